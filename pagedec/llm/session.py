"""Sessions of `LLM`: branches in a client's own hands."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, overload

from pagedec.llm.branches import Handle
from pagedec.llm.going import Going, Outputs, Scored, all_scored, all_written
from pagedec.llm.several import all_at_once, generating, scoring
from pagedec.outputs import BranchOutput, ContinuationScore, Mark, SessionBlocks
from pagedec.text.chat_template import Message


class SessionBranch(Handle):
    """A branch of a session: generate on it, append to it, fork it, take it back, score what might follow.

    One call at a time runs on a branch, any number on different ones. Calls that threads bring at the same time, or
    that `generate_all` and `score_all` bring together, are one batch. A second call on a branch raises `BranchBusy`,
    whatever is done with a closed one `BranchClosed`.
    """

    def generate(
        self, sampling_params: Any = None, *, keep: str | int = "first", **fields: Any
    ) -> BranchOutput[SessionBranch]:
        """The answers of a request that goes on from here, with any parameters; `fields` change some of them, or of the
        defaults: `branch.generate(max_tokens=20)`.

        `keep="first"`: the branch goes on from the first answer, with all of its tokens, what ended it included; a
        number: from that answer. "all": the branch stays, and the output's `branches` go on from the answers, one each.
        "none": nothing is kept. Where the branch stays as it is, it draws anew next time.

        Raises `InvalidArgument` before anything has changed, and `RequestError` where the request fails; the branch is
        then as before.
        """
        going = self._generating(sampling_params, keep, fields, False)
        with self._run([going]):
            return going.written(next(going.stream.read()))

    def stream(
        self, sampling_params: Any = None, *, keep: str | int = "first", **fields: Any
    ) -> Generator[BranchOutput[SessionBranch], None, None]:
        """The same as the answers grow, see `LLM.stream`. Closing the iterator before its end leaves the branch as it
        was."""
        going = self._generating(sampling_params, keep, fields, True)
        self._front.loop.at_once(going.begin)
        return Outputs(going, self._read(going))

    def _read(self, going: Going[SessionBranch]) -> Generator[BranchOutput[SessionBranch], None, None]:
        try:
            while True:
                self._front.loop.drive(lambda: going.stream.has_news)
                for output in going.stream.read():
                    if output.finished:
                        self._front.loop.at_once(going.read)
                    yield going.written(output)
                    if output.finished:
                        return
        finally:
            going.leave()

    def append(self, what: str | Sequence[int] | Message) -> None:
        """Go on with a text, with token ids, or, where the session began with messages, with a chat's next message.
        Nothing that is appended ends anything. Raises `InvalidArgument` where there is no room for it."""
        append, *_ = self._appending(what)
        self._front.loop.at_once(append)

    @overload
    def fork(self) -> Self: ...
    @overload
    def fork(self, k: int) -> list[Self]: ...
    def fork(self, k: int | None = None) -> Self | list[Self]:
        """One new branch that is where this one is, or `k` of them in a list. Nothing is copied or computed. Raises
        `SessionLimit`."""
        made = self._front.loop.at_once(self._forking(k))
        return made[0] if k is None else made

    def rollback(self, to: int | Mark) -> None:
        """Take back the last `to` tokens, or what has come since a `mark`. At least one token must stay. What is
        generated from here on is drawn anew."""
        self._front.loop.at_once(self._cutting(to))

    def score(self, continuations: Sequence[str | Sequence[int]], *, logprobs: int = 0) -> list[ContinuationScore]:
        """How probable the model takes each of these continuations to be, one result each. Nothing is appended; what
        they share is evaluated once. `logprobs`: so many of the most probable tokens are reported beside each token,
        -1: all."""
        scored = self._scoring(continuations, logprobs)
        with self._run([] if scored.is_empty else [scored]):
            return scored.results()

    def blocks(self, branches: Sequence[SessionBranch] | None = None) -> SessionBlocks:
        """KV blocks that these branches hold now, by default this one alone."""
        return self._front.loop.at_once(self._counting([self] if branches is None else branches))

    def close(self) -> None:
        """Let the branch go; a call on it fails. May be called again."""
        if not self.closed and not self._front.loop.closed:
            self._front.loop.at_once(self._closing())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- several
    def generate_all(
        self,
        branches: Sequence[SessionBranch],
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        **fields: Any,
    ) -> list[BranchOutput[SessionBranch]]:
        """`generate` on several branches, of this session or of others, in one batch; `sampling_params` is one object
        for all or one for each. Begins all of the calls or none; raises `RequestsFailed`, with the outputs of all,
        where some fail."""
        calls = generating(self, branches, sampling_params, keep, fields)
        with self._run(calls):
            return all_written(calls, (call.stream.read() for call in calls))

    def score_all(
        self,
        branches: Sequence[SessionBranch],
        continuations: Sequence[Sequence[str | Sequence[int]]],
        *,
        logprobs: int = 0,
    ) -> list[list[ContinuationScore]]:
        """`score` on several branches in one batch: a list of continuations for each. Begins all of the calls or none;
        raises `RequestsFailed` where some fail: in its `outputs` their errors stand among the others' scores."""
        calls = scoring(self, branches, continuations, logprobs)
        with self._run([call for call in calls if not call.is_empty]):
            return all_scored(calls)

    @contextlib.contextmanager
    def _run(self, calls: Sequence[Going[SessionBranch]] | Sequence[Scored]) -> Iterator[None]:
        """Begin calls together, and wait until all are over. Left, those that are not are ended."""
        loop = self._front.loop
        try:
            loop.at_once(all_at_once(calls))
            loop.drive(lambda: all(call.stream.is_over for call in calls))
            yield
        finally:
            for call in calls:
                call.leave()


class Session(SessionBranch):
    """A session: its first branch, and what is common to all of them. `LLM.session` makes it.

    As a context manager, and by `close`, all of its branches are closed; dropped, it closes its first branch alone, and
    the others live on.
    """

    def _again(self, branch: Any) -> Any:
        return SessionBranch(self._front, branch, self._turns, self._owner)

    def close(self) -> None:
        """Let all branches go; calls on them fail. May be called again."""
        if not self._front.loop.closed:
            self._front.loop.at_once(self._closing_all())
