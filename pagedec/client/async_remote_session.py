"""Sessions of `AsyncClient`: branches on a server, for coroutines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from pagedec.client.async_route import learned, together
from pagedec.client.connection import Inquiry
from pagedec.client.failures import last_of
from pagedec.client.handle import RemoteHandle, output_of
from pagedec.errors import BranchClosed, unless_failed
from pagedec.outputs import BranchOutput, BranchState, ContinuationScore, Mark, SessionBlocks, SessionState
from pagedec.tree import AnswerTree

T = TypeVar("T")


class AsyncRemoteBranch(RemoteHandle):
    """A branch of a server's session, as `RemoteBranch`, for coroutines: what that one does is awaited here, and what
    it has as properties, text, tokens and reports, `state` brings. Dropping it closes it in the same way."""

    async def generate(
        self,
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> BranchOutput[AsyncRemoteBranch]:
        """The answers of a request that goes on from here; see `RemoteBranch.generate`."""
        ask = self._generating(sampling_params, keep, fields, False, request_id)
        return await self._whole(ask, timeout)

    async def stream(
        self,
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[BranchOutput[AsyncRemoteBranch], None]:
        """The same as the answers grow. Leaving the iterator before its end leaves the branch as it was, unless the
        server had come to the end; see `RemoteBranch.stream`."""
        ask = self._generating(sampling_params, keep, fields, True, request_id)
        async with contextlib.aclosing(self._held.line.read(ask, timeout)) as outputs:
            async for output in outputs:
                if output is not None:
                    yield await self._learned(ask, output)

    async def append(self, what: str | Sequence[int] | Mapping[str, Any]) -> None:
        """Go on with a text, with token ids, or with a chat's next message."""
        await self._do(self._appending(what))

    @overload
    async def fork(self) -> Self: ...
    @overload
    async def fork(self, k: int) -> list[Self]: ...
    async def fork(self, k: int | None = None) -> Self | list[Self]:
        """One new branch that is where this one is, or `k` of them in a list."""
        made = await self._do(self._forking(k))
        return made[0] if k is None else made

    async def rollback(self, to: int | Mark) -> None:
        """Take back the last `to` tokens, or what has come since a `mark`."""
        await self._do(self._cutting(to))

    async def score(
        self, continuations: Sequence[str | Sequence[int]], *, logprobs: int = 0, request_id: str | None = None
    ) -> list[ContinuationScore]:
        """How probable the model takes each of these continuations to be. `request_id`: as that of `generate`."""
        return await self._do(self._scoring(continuations, logprobs, request_id=request_id))

    async def state(self, logprobs: bool = True) -> BranchState:
        """Its text, its tokens and their reports, all of one moment; without reports where `logprobs` is false."""
        return await self._do(self._looking(logprobs))

    async def mark(self) -> Mark:
        """Name this place, for `rollback`. A mark holds nothing."""
        return (await self.state(False)).mark

    async def tree(self, branches: Sequence[AsyncRemoteBranch] | None = None) -> AnswerTree:
        """All open branches of the session as a tree, or those that are given; see `SessionBranch.tree`."""
        return await self._do(self._drawing(branches))

    async def blocks(self, branches: Sequence[AsyncRemoteBranch] | None = None) -> SessionBlocks:
        """KV blocks that these branches of the session hold now, by default this one alone."""
        return await self._do(self._counting(branches))

    async def session_state(self) -> SessionState:
        """How large its session is, and how long it lives if nobody uses it from now on."""
        return await self._do(self._holding())

    async def generate_all(
        self,
        branches: Sequence[AsyncRemoteBranch],
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        timeout: float | None = None,
        **fields: Any,
    ) -> list[BranchOutput[AsyncRemoteBranch]]:
        """`generate` on several branches at the same time; see `RemoteBranch.generate_all`."""
        asks = self._generating_all(branches, sampling_params, keep, fields)
        found = await together([self._whole(ask, timeout) for ask in asks])
        return unless_failed([output_of(one) for one in found])

    async def score_all(
        self,
        branches: Sequence[AsyncRemoteBranch],
        continuations: Sequence[Sequence[str | Sequence[int]]],
        *,
        logprobs: int = 0,
    ) -> list[list[ContinuationScore]]:
        """`score` on several branches at the same time; see `RemoteBranch.score_all`."""
        asks = self._scoring_all(branches, continuations, logprobs)
        return unless_failed(await together([self._held.line.ask(ask) for ask in asks]))

    async def close(self) -> None:
        """Let the branch go; a call on it fails. May be called again."""
        if not self.closed:
            self._shut()
            with contextlib.suppress(BranchClosed):
                await self._do(self._closing([self.name]))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- inside
    async def _whole(self, ask: Inquiry[Any], timeout: float | None) -> BranchOutput[AsyncRemoteBranch]:
        async with contextlib.aclosing(self._held.line.read(ask, timeout)) as outputs:
            return await self._learned(ask, last_of([output async for output in outputs]))

    async def _learned(
        self, ask: Inquiry[Any], output: BranchOutput[AsyncRemoteBranch]
    ) -> BranchOutput[AsyncRemoteBranch]:
        return await learned(self._held.line, self._held.pieces, output, ask.given[""])

    async def _do(self, ask: Inquiry[T]) -> T:
        answer: T = await self._held.line.ask(ask)
        return answer


class AsyncRemoteSession(AsyncRemoteBranch):
    """A session: its first branch, and what is common to all of them. As a context manager, and by `close`, all of its
    branches are closed; dropped, its first branch alone. `AsyncClient.session` makes it."""

    def _again(self, branch: Any) -> Any:
        return AsyncRemoteBranch(self._held, branch)

    async def close(self) -> None:
        """Let all branches go; calls on them fail. May be called again."""
        if not self._held.is_closed and not self._held.line.is_closed:
            self._held.is_closed = True
            self._shut()
            with contextlib.suppress(BranchClosed):
                await self._held.line.ask(self._closing())
