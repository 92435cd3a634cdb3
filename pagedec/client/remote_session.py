"""Sessions of `Client`: branches on a server, in this program's hands."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from pagedec.client.connection import Inquiry, Route
from pagedec.client.failures import last_of
from pagedec.client.handle import RemoteHandle, output_of
from pagedec.errors import BranchClosed, unless_failed
from pagedec.outputs import (
    BranchOutput,
    BranchState,
    ContinuationScore,
    Logprob,
    Mark,
    RequestOutput,
    SessionBlocks,
    SessionState,
)
from pagedec.params import RequestParams
from pagedec.tree import AnswerTree

T = TypeVar("T")


class RemoteBranch(RemoteHandle):
    """A branch of a server's session: what `SessionBranch` does, by the same names.

    `text`, `token_ids`, `logprobs` and `mark` ask the server each time; `state` brings all of them at once. A branch is
    closed by `close`, as a context manager, or by dropping it, in any thread: the client's next call of any kind, or
    its `close`, tells the server of that first.
    """

    def generate(
        self,
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> BranchOutput[RemoteBranch]:
        """The answers of a request that goes on from here; see `SessionBranch.generate`. Never tried again: who does
        not hear of the end may ask with `state` what has become of the branch. `request_id`: what the output, the
        server's log and its operator's `Abort` call the request; one that is aborted leaves the branch as it was. Of
        two with one name that run at the same time the second is a `ServerError`."""
        ask = self._generating(sampling_params, keep, fields, False, request_id)
        with contextlib.closing(self._line.begin(ask, timeout)) as outputs:
            return last_of(outputs)

    def stream(
        self,
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Generator[BranchOutput[RemoteBranch], None, None]:
        """The same as the answers grow, see `LLM.stream`. Closing the iterator before its end leaves the branch as it
        was, unless the server had come to the end: `state` says what has become of it, and branches of `keep="all"`
        that were not read of live as long as the session."""
        ask = self._generating(sampling_params, keep, fields, True, request_id)
        return self._line.begin(ask, timeout)

    def append(self, what: str | Sequence[int] | Mapping[str, Any]) -> None:
        """Go on with a text, with token ids, or, where the session began with messages, with a chat's next message."""
        self._do(self._appending(what))

    @overload
    def fork(self) -> Self: ...
    @overload
    def fork(self, k: int) -> list[Self]: ...
    def fork(self, k: int | None = None) -> Self | list[Self]:
        """One new branch that is where this one is, or `k` of them in a list."""
        made = self._do(self._forking(k))
        return made[0] if k is None else made

    def rollback(self, to: int | Mark) -> None:
        """Take back the last `to` tokens, or what has come since a `mark`. At least one token must stay."""
        self._do(self._cutting(to))

    def score(
        self, continuations: Sequence[str | Sequence[int]], *, logprobs: int = 0, request_id: str | None = None
    ) -> list[ContinuationScore]:
        """How probable the model takes each of these continuations to be, one result each. Nothing is appended.
        `request_id`: as that of `generate`."""
        return self._do(self._scoring(continuations, logprobs, request_id=request_id))

    def state(self, logprobs: bool = True) -> BranchState:
        """Its text, its tokens and their reports, all of one moment; without reports where `logprobs` is false."""
        return self._do(self._looking(logprobs))

    @property
    def text(self) -> str:
        """The text of all its tokens, special ones left out; "" without a tokenizer."""
        return self.state(False).text

    @property
    def token_ids(self) -> list[int]:
        """All of its tokens, the prompt's too."""
        return self.state(False).token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob] | None]:
        """A table for each token, None for what was given or not reported."""
        return self.state().logprobs

    def mark(self) -> Mark:
        """Name this place, for `rollback`. A mark holds nothing."""
        return self.state(False).mark

    def tree(self, branches: Sequence[RemoteBranch] | None = None) -> AnswerTree:
        """All open branches of the session as a tree, or those that are given; see `SessionBranch.tree`."""
        return self._do(self._drawing(branches))

    def blocks(self, branches: Sequence[RemoteBranch] | None = None) -> SessionBlocks:
        """KV blocks that these branches of the session hold now, by default this one alone."""
        return self._do(self._counting(branches))

    def session_state(self) -> SessionState:
        """How large its session is, and how long it lives if nobody uses it from now on."""
        return self._do(self._holding())

    def close(self) -> None:
        """Let the branch go; a call on it fails. May be called again."""
        if not self.closed:
            self._shut()
            with contextlib.suppress(BranchClosed):
                self._do(self._closing([self.name]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- several
    def generate_all(
        self,
        branches: Sequence[RemoteBranch],
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        timeout: float | None = None,
        **fields: Any,
    ) -> list[BranchOutput[RemoteBranch]]:
        """`generate` on several branches, of this session or of others, at the same time; `sampling_params` is one
        object for all or one for each. Raises `RequestsFailed`, with the outputs of all, where some fail. Where one may
        not be asked at all, as on a branch that is busy, that is raised, and the others are ended: those that had not
        come to their end are as they were."""
        asks = self._generating_all(branches, sampling_params, keep, fields)
        return unless_failed([output_of(one) for one in self._line.together(asks, timeout)])

    def score_all(
        self,
        branches: Sequence[RemoteBranch],
        continuations: Sequence[Sequence[str | Sequence[int]]],
        *,
        logprobs: int = 0,
    ) -> list[list[ContinuationScore]]:
        """`score` on several branches at the same time: a list of continuations for each. Raises `RequestsFailed` where
        some fail: in its `outputs` their errors stand among the others' scores."""
        asks = self._scoring_all(branches, continuations, logprobs)
        return unless_failed(self._line.together(asks))

    # ---- inside
    @property
    def _line(self) -> Route:
        line: Route = self._held.line
        return line

    def _spelled(self, output: RequestOutput, params: RequestParams) -> RequestOutput:
        return self._held.pieces.spelled(output, params, self._line.ask)

    def _do(self, ask: Inquiry[T]) -> T:
        return self._line.ask(ask)


class RemoteSession(RemoteBranch):
    """A session: its first branch, and what is common to all of them. `Client.session` makes it.

    As a context manager, and by `close`, all of its branches are closed; dropped, its first branch alone.
    """

    def _again(self, branch: Any) -> Any:
        return RemoteBranch(self._held, branch)

    def close(self) -> None:
        """Let all branches go; calls on them fail. May be called again."""
        if not self._held.is_closed and not self._held.line.is_closed:
            self._held.is_closed = True
            self._shut()
            with contextlib.suppress(BranchClosed):
                self._line.ask(self._closing())
