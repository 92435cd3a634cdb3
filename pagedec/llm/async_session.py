"""Sessions of `AsyncLLM`: branches in a client's own hands, for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, overload

from pagedec.core.adapter_places import Adapter
from pagedec.decoders.scoring import ScoreParams
from pagedec.engine.engine import Engine
from pagedec.engine.open_branches import OpenBranch, closing
from pagedec.errors import EngineClosed
from pagedec.llm.branches import Handle, Turns
from pagedec.llm.going import Going, Scored, all_scored, all_written
from pagedec.llm.readers import Reader, outputs_of
from pagedec.llm.several import all_at_once, generating, scoring
from pagedec.llm.slow import is_heavy, is_long
from pagedec.lora.request import LoRARequest
from pagedec.outputs import BranchOutput, ContinuationScore, Mark, SessionBlocks
from pagedec.text.chat_template import Message
from pagedec.text.conversation import Conversation

if TYPE_CHECKING:
    from pagedec.llm.async_llm import AsyncLLM

T = TypeVar("T")


class AsyncSessionBranch(Handle):
    """A branch of a session, as `SessionBranch`, for coroutines: what that one does is awaited here.

    One call at a time runs on a branch, any number on different ones. A second call on a branch raises `BranchBusy`,
    whatever is done with a closed one `BranchClosed`. Cancelling a call leaves its branch as it was.
    """

    _front: AsyncLLM

    async def generate(
        self, sampling_params: Any = None, *, keep: str | int = "first", request_id: str | None = None, **fields: Any
    ) -> BranchOutput[AsyncSessionBranch]:
        """The answers of a request that goes on from here; see `SessionBranch.generate`. `request_id`: as that of
        `AsyncLLM.generate`. One that is aborted leaves the branch as it was."""
        outputs = self._read(sampling_params, keep, fields, False, request_id)
        async with contextlib.aclosing(outputs):
            return await anext(outputs)

    async def stream(
        self, sampling_params: Any = None, *, keep: str | int = "first", request_id: str | None = None, **fields: Any
    ) -> AsyncGenerator[BranchOutput[AsyncSessionBranch], None]:
        """The same as the answers grow. Leaving the iterator before its end leaves the branch as it was."""
        outputs = self._read(sampling_params, keep, fields, True, request_id)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def append(self, what: str | Sequence[int] | Message) -> None:
        """Go on with a text, with token ids, or with a chat's next message; see `SessionBranch.append`."""
        await (await self.appending(what))

    async def appending(self, what: str | Sequence[int] | Message) -> Appending:
        """What `append` is about to do: to be awaited."""
        is_slow = not isinstance(what, (str, Sequence)) or is_long(what)
        made = await asyncio.to_thread(self._appending, what) if is_slow else self._appending(what)
        return Appending(self, *made)

    @overload
    async def fork(self) -> Self: ...
    @overload
    async def fork(self, k: int) -> list[Self]: ...
    async def fork(self, k: int | None = None) -> Self | list[Self]:
        """One new branch that is where this one is, or `k` of them in a list."""
        made = await self._do(self._forking(k))
        return made[0] if k is None else made

    async def rollback(self, to: int | Mark) -> None:
        """Take back the last `to` tokens, or what has come since a `mark`; see `SessionBranch.rollback`."""
        await self._do(self._cutting(to))

    async def score(
        self, continuations: Sequence[str | Sequence[int]], *, logprobs: int = 0, request_id: str | None = None
    ) -> list[ContinuationScore]:
        """How probable the model takes each of these continuations to be; see `SessionBranch.score`."""
        return await (await self.scoring(continuations, logprobs=logprobs, request_id=request_id))

    async def scoring(
        self, continuations: Sequence[str | Sequence[int]], *, logprobs: int = 0, request_id: str | None = None
    ) -> PendingScores:
        """What `score` is about to do: to be awaited."""
        return PendingScores(
            self, await asyncio.to_thread(self._scoring, continuations, logprobs, request_id=request_id)
        )

    async def blocks(self, branches: Sequence[AsyncSessionBranch] | None = None) -> SessionBlocks:
        """KV blocks that these branches hold now, by default this one alone."""
        return await self._do(self._counting([self] if branches is None else branches))

    async def generate_all(
        self,
        branches: Sequence[AsyncSessionBranch],
        sampling_params: Any = None,
        *,
        keep: str | int = "first",
        **fields: Any,
    ) -> list[BranchOutput[AsyncSessionBranch]]:
        """`generate` on several branches, of this session or of others, in one batch; see `SessionBranch.generate_all`.
        Begins all of the calls or none; cancelled, it leaves all branches as they were."""
        begin = functools.partial(generating, self, branches, sampling_params, keep, fields, waits=True)
        each = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params]
        is_slow = is_heavy(fields) or any(map(is_heavy, each))
        calls = await asyncio.to_thread(begin) if is_slow else begin()
        await self._run(calls)
        return all_written(calls, [await outputs_of(call.stream) for call in calls])

    async def score_all(
        self,
        branches: Sequence[AsyncSessionBranch],
        continuations: Sequence[Sequence[str | Sequence[int]]],
        *,
        logprobs: int = 0,
    ) -> list[list[ContinuationScore]]:
        """`score` on several branches in one batch; see `SessionBranch.score_all`."""
        calls = scoring(self, branches, continuations, logprobs)
        await self._run([call for call in calls if not call.is_empty])
        return await asyncio.to_thread(all_scored, calls)

    async def close(self) -> None:
        """Let the branch go; a call on it fails. May be called again."""
        if not self.closed and not self._front.loop.closed:
            await self._do(self._closing())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(
        self, sampling_params: Any, keep: str | int, fields: dict[str, Any], streams: bool, name: str | None
    ) -> AsyncGenerator[BranchOutput[AsyncSessionBranch], None]:
        given = sampling_params, keep, fields, streams, name, True  # it may be cancelled while it is read
        if is_heavy(sampling_params) or is_heavy(fields):
            going = await asyncio.to_thread(self._generating, *given)
        else:
            going = self._generating(*given)
        with self._front._reading(going.stream) as reader:
            try:
                await self._do(going.begin)
                self._abort_if_aborted(reader)
                while True:
                    for output in await reader.read():
                        if output.finished:
                            await self._do(going.read)
                        yield going.written(output)
                        if output.finished:
                            return
            finally:
                going.leave()

    def _abort_if_aborted(self, reader: Reader) -> None:
        """It was, perhaps before the loop had it. A call that has ended by now waits to be read, and is kept then."""
        if reader.stream.is_aborted:
            self._front.loop.abort(reader.stream.job.request_id)

    async def _run(self, calls: Sequence[Going[AsyncSessionBranch]] | Sequence[Scored]) -> None:
        """Begin calls together, and wait until all are over: who is cancelled before has kept nothing."""
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(self._front._reading(call.stream)) for call in calls]
            try:
                await self._do(all_at_once(calls))
                for reader in readers:
                    self._abort_if_aborted(reader)
                for reader in readers:
                    await reader.news()
                with contextlib.suppress(EngineClosed):  # each has its outputs, or its error
                    await self._do(functools.partial(_read, calls))
            finally:
                for call in calls:
                    call.leave()

    async def _do(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._front.loop.call(function))


def _read(calls: Iterable[Going[AsyncSessionBranch] | Scored], engine: Engine) -> None:
    """All calls that keep something were read to their end."""
    for call in calls:
        if isinstance(call, Going):
            call.read(engine)


async def recount(sessions: Sequence[AsyncSession]) -> None:
    """Have sessions of one engine gone through for tokens that no branch has any more: how many they hold is exact
    then."""
    owners = [session._owner for session in sessions]
    if owners:
        await sessions[0]._do(lambda engine: engine.sessions.bury(owners))


def conversations_of(branches: Iterable[AsyncSessionBranch]) -> set[Conversation]:
    """The chats' messages that branches have: of each, the conversation up to it."""
    return {conversation for branch in branches for _, conversation in branch._turns}


class Appending:
    """What is about to be appended to a branch: to be awaited."""

    def __init__(
        self,
        branch: AsyncSessionBranch,
        append: Callable[[Engine], None],
        num_tokens: int,
        conversation: Conversation | None,
    ) -> None:
        """`conversation`: of a chat's message; see `conversations_of`."""
        self._branch, self._append, self.num_tokens, self.conversation = branch, append, num_tokens, conversation

    def __await__(self) -> Generator[Any, None, None]:
        return self._branch._do(self._append).__await__()


class PendingScores:
    """Continuations of a branch that are about to be scored: to be awaited."""

    def __init__(self, branch: AsyncSessionBranch, scored: Scored) -> None:
        self._branch, self._scored = branch, scored
        params = scored.stream.job.params
        assert isinstance(params, ScoreParams)
        self.num_tokens = sum(map(len, params.continuations))

    def __await__(self) -> Generator[Any, None, list[ContinuationScore]]:
        return self._scores().__await__()

    async def _scores(self) -> list[ContinuationScore]:
        await self._branch._run([] if self._scored.is_empty else [self._scored])
        return await asyncio.to_thread(self._scored.results)


class AsyncSession(AsyncSessionBranch):
    """A session: its first branch, and what is common to all of them. As a context manager, and by `close`, all of its
    branches are closed; dropped, it closes its first branch alone, and the others live on. `AsyncLLM.session` makes
    it."""

    def _again(self, branch: OpenBranch) -> Any:
        return AsyncSessionBranch(self._front, branch, self._turns, self._owner)

    async def close_all(self, branches: Sequence[AsyncSessionBranch]) -> None:
        """Let several branches go at once; calls on them fail."""
        await self._do(closing([branch._branch for branch in branches]))

    async def close(self) -> None:
        """Let all branches go; calls on them fail. May be called again."""
        if not self._front.loop.closed:
            await self._do(self._closing_all())


class Opening:
    """A session that is about to be opened: to be awaited, or entered with `async with`."""

    def __init__(
        self, front: AsyncLLM, opening: Callable[[Engine, Adapter | None], OpenBranch], turns: Turns, num_tokens: int,
        lora: LoRARequest | None,
    ) -> None:  # fmt: skip
        """`num_tokens`: of its prompt."""
        self._front, self._opening, self._turns, self.num_tokens, self._lora = front, opening, turns, num_tokens, lora
        self.conversation = turns[0][1] if turns else None
        """Of a chat's first messages; see `conversations_of`."""
        self._session: AsyncSession | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a session must be awaited, or entered with `async with`, before it has {name!r}")

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._open().__await__()

    async def _open(self) -> AsyncSession:
        front, lora = self._front, self._lora
        adding = front.loras.adding([lora])
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            [adapter] = await asyncio.to_thread(enter, adding) if front.loras.is_new(lora) else enter(adding)
            future = front.loop.call(lambda engine: AsyncSession(front, self._opening(engine, adapter), self._turns))
            return await asyncio.wrap_future(future)

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._open()
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
