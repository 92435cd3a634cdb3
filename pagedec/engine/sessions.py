"""Sessions: branches that clients hold between calls. All of this happens in the engine's loop, between two steps."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pagedec.constraints import constraint_of
from pagedec.core.history import History
from pagedec.core.logprobs import answer_reports
from pagedec.core.parked import Parked, Parking
from pagedec.core.protocol import Hypothesis
from pagedec.core.request import Request
from pagedec.core.table import BlockTable, num_blocks_of
from pagedec.engine.open_branches import (
    FEW_TOKENS,
    KEEPS,
    ROOT,
    SCORES,
    OpenBranch,
    OpenCall,
    Owner,
    SessionLimits,
    seed_of,
)
from pagedec.engine.options import read_options
from pagedec.errors import BranchBusy, BranchClosed, InvalidArgument, RequestError, SessionLimit, Shown
from pagedec.outputs import BranchBlocks, SessionBlocks
from pagedec.params import RequestParams

if TYPE_CHECKING:
    from pagedec.engine.engine import Engine

TARGET = "target"


class Sessions:
    """All sessions of an engine."""

    def __init__(
        self, parking: Parking, new_tables: Callable[[], dict[str, BlockTable]], block_size: int,
        clock: Callable[[], float], limits: SessionLimits,
    ) -> None:  # fmt: skip
        self._parking, self._new_tables, self._block_size = parking, new_tables, block_size
        self._clock, self.limits = clock, limits
        self.owners: dict[Owner, None] = {}
        self.dropped: deque[OpenBranch | OpenCall] = deque()
        """Branches whose handles are gone, and calls that nobody waits for or has looked at. A collector may put them
        here anywhere: nothing is locked or woken."""
        self._unread: dict[str, tuple[OpenCall, Request, Sequence[Hypothesis]]] = {}  # calls that have ended, and wait
        self._next_expiry = math.inf  # not later than the first
        self.num_branches = self.num_tokens = 0

    # ---- what a client does
    def open(self, engine: Engine, tokens: Sequence[int], seed: int, salt: str, priority: int, ttl: float | None,
    ) -> OpenBranch:  # fmt: skip
        """A new session with one branch. Raises `InvalidArgument` for a prompt that could not be gone on with, and
        `SessionLimit`."""
        self.tidy(engine)
        if not tokens:
            raise InvalidArgument("prompt", Shown("empty"), "must have at least one token")
        engine.check_room("prompt", len(tokens), 1)
        self.check_tokens(engine, "prompt", tokens)
        self._check_branches(None, 1)
        self._check_size(None, len(tokens))
        history = History(self._block_size, salt)
        tip = history.append(0, tokens)
        ttl = self.limits.session_ttl if ttl is None else ttl
        owner = Owner(history, seed, salt, priority, ttl, len(tokens))
        self.owners[owner] = None
        branch = self._named(owner, ROOT, (history, tip), self._new_tables())
        self._used(owner)
        return branch

    def fork(self, engine: Engine, branch: OpenBranch, count: int) -> list[OpenBranch]:
        """`count` branches that are where `branch` is. Takes no block and copies nothing."""
        owner = self._of(engine, branch, "fork")
        self._check_branches(owner, count)
        self._parking.touch(branch)
        made = [
            self._forked(owner, branch, branch.place, {lane: table.fork() for lane, table in branch.tables.items()})
            for _ in range(count)
        ]
        self._used(owner)
        return made

    def append(self, engine: Engine, branch: OpenBranch, tokens: Sequence[int]) -> None:
        """Continue a branch by a client's tokens, which end nothing."""
        owner = self._of(engine, branch, "append")
        engine.check_room("append", branch.length + len(tokens), 0)
        self.check_tokens(engine, "append", tokens)
        self._check_size(owner, len(tokens))
        history, tip = branch.place
        branch.place = history, history.append(tip, tokens)
        self._used(owner)

    def cut(self, engine: Engine, branch: OpenBranch, length: int) -> None:
        """Take a branch back to its first `length` tokens, and begin a new epoch of it."""
        owner = self._of(engine, branch, "rollback")
        if not 1 <= length <= branch.length:
            most = branch.length - 1
            text = f"must be from 0 to {most}: branch {branch.name} has {branch.length} tokens, and one must stay"
            raise InvalidArgument("rollback", branch.length - length, text)
        history, tip = branch.place
        branch.place = history, history.ancestor(tip, length)
        branch.epoch += 1
        for table in branch.tables.values():
            table.truncate(min(table.length, length))
        self._parking.touch(branch)
        self._used(owner)

    def begin(
        self,
        engine: Engine,
        branch: OpenBranch,
        request_id: str,
        params: RequestParams,
        keep: str | int,
        waits: bool = False,
    ) -> Request:
        """A request that goes out from `branch`, for the loop to take in this very turn. `waits`: `read` or `give_up`
        must follow when it has ended. Raises as `Engine.admit` does; nothing has changed then."""
        owner = self._of(engine, branch, "call")
        if params.truncate_prompt_tokens is not None:
            limit = "must be None: a branch is continued as it is"
            raise InvalidArgument("truncate_prompt_tokens", params.truncate_prompt_tokens, limit)
        if keep == "all":
            self._check_branches(owner, params.num_answers)
        elif keep != SCORES and keep not in KEEPS and not (type(keep) is int and 0 <= keep < params.num_answers):
            limit = f"must be one of {', '.join(KEEPS)}, or an answer's number below {params.num_answers}"
            raise InvalidArgument("keep", keep, limit)
        self._check_size(owner, params.num_answers * (params.max_tokens or 1))
        seed = owner.seed if params.seed is None else params.seed
        named = dataclasses.replace(params, seed=seed_of(seed, branch.name, branch.epoch))
        call = OpenCall(branch, self._parking, request_id, keep, waits)
        request = engine.admit(request_id, branch.tokens(), named, owner.priority, owner.salt, call)
        branch.call = call
        owner.num_calls += 1
        self._used(owner)
        return request

    def close(self, engine: Engine, branch: OpenBranch, why: str = "was closed") -> None:
        """Let a branch go; its call fails. One that is closed already stays so."""
        owner = branch.owner
        if owner is None:
            return
        if isinstance(branch.call, OpenCall) and not self.give_up(branch.call.request_id):
            name = branch.call.request_id
            engine.fail(name, RequestError(name, f"branch {branch.name}, from which it went out, {why}"))
            owner.num_calls -= 1
        branch.owner, branch.why_closed = None, why
        del owner.branches[branch.name]
        self._parking.remove(branch)
        self.num_branches -= 1
        if owner.branches:
            self._used(owner)
        else:
            del self.owners[owner]
            self.num_tokens -= owner.counted

    def blocks(self, branches: Sequence[OpenBranch]) -> SessionBlocks:
        """KV blocks of the target model that branches hold, and how many of them others hold, too. The branches'
        sessions count as used. Raises `BranchClosed`."""
        for branch in branches:
            if branch.owner is None:
                raise BranchClosed(branch.name, branch.why_closed)
        tables = [branch.tables[TARGET] for branch in branches]
        for owner in {branch.owner for branch in branches if branch.owner is not None}:
            self._used(owner)
        each = [
            BranchBlocks(branch.length, table.num_blocks, table.num_shared)
            for branch, table in zip(branches, tables, strict=True)
        ]
        return SessionBlocks(each, num_blocks_of(tables))

    # ---- what the engine does
    def ended(self, request: Request, done: Sequence[Hypothesis]) -> None:
        """A call is over, with these answers in order: its branch, or new ones, go on from those that are kept."""
        call = request.home
        if isinstance(call, OpenCall):
            self._unread[call.request_id] = call, request, done
            if not call.waits:
                self.read(call.request_id)

    def give_up(self, request_id: str) -> bool:
        """If a call has ended that waits to be read, nobody will: its branch is as it was."""
        found = self._unread.pop(request_id, None)
        if found is not None:
            found[0].end()
            self.abandoned(found[1])
        return found is not None

    def read(self, request_id: str) -> None:
        """A call that has ended was read to its end: its answers are kept. No such call: its branch was closed."""
        if request_id not in self._unread:
            return
        call, request, done = self._unread.pop(request_id)
        branch, keep = call.parked, call.keep
        assert isinstance(branch, OpenBranch)
        owner, chosen = branch.owner, []
        if owner is not None and call.keeps and done:
            chosen = list(done) if keep == "all" else [done[0 if keep == "first" else min(int(keep), len(done) - 1)]]
        held = call.end(chosen)
        if owner is None:
            return
        owner.num_calls -= 1
        for hypothesis, answer in zip(chosen, held, strict=True):
            self._bring(owner, request, hypothesis, answer)
            if keep == "all":
                tables, answer.tables = self._new_tables() | answer.tables, {}
                self._parking.remove(answer)
                call.kept.append(self._forked(owner, branch, answer.place, tables))
            else:
                before, tip = branch.place[1], answer.place[1]
                self._parking.take_over(branch, answer, owner.history.common_length(before, tip))
        if keep in ("all", "none"):
            branch.epoch += 1
        self._used(owner)

    def refused(self, request: Request) -> None:
        """A call was begun and not taken."""
        if request.home is not None:
            request.home.end()
        self.abandoned(request)

    def abandoned(self, request: Request) -> None:
        """A call was aborted, or has failed: its branch is as it was."""
        branch = None if request.home is None else request.home.parked
        if isinstance(branch, OpenBranch) and branch.owner is not None:
            branch.owner.num_calls -= 1
            self._used(branch.owner)

    def tidy(self, engine: Engine) -> None:
        """Close what nobody holds, and what nobody has used for too long."""
        while self.dropped:
            dropped = self.dropped.popleft()
            if isinstance(dropped, OpenBranch):
                self.close(engine, dropped, "was dropped")
                continue
            if dropped.parked.call is dropped and not self.give_up(dropped.request_id):
                engine.fail(dropped.request_id, RequestError(dropped.request_id, "nobody waits for it"))
            for branch in dropped.kept:
                self.close(engine, branch, "was dropped")
        if self._next_expiry == math.inf or (now := self._clock()) < self._next_expiry:
            return
        for owner in list(self.owners):
            if owner.ttl is not None and not owner.num_calls and owner.last_used + owner.ttl <= now:
                for branch in list(owner.branches.values()):
                    self.close(engine, branch, f"was given up: its session was not used for {owner.ttl:g} seconds")
        self._next_expiry = min(map(_expiry, self.owners), default=math.inf)

    # ---- inside
    def _of(self, engine: Engine, branch: OpenBranch, what: str) -> Owner:
        self.tidy(engine)
        if branch.owner is None:
            raise BranchClosed(branch.name, branch.why_closed)
        if branch.call is not None:
            raise BranchBusy(branch.name, what)
        return branch.owner

    def _forked(
        self, owner: Owner, parent: OpenBranch, place: tuple[History, int], tables: dict[str, BlockTable]
    ) -> OpenBranch:
        branch = self._named(owner, f"{parent.name}.{parent.num_forks}", place, tables)
        parent.num_forks += 1
        return branch

    def _named(self, owner: Owner, name: str, place: tuple[History, int], tables: dict[str, BlockTable]) -> OpenBranch:
        branch = OpenBranch(place, tables, owner.priority, None, owner, name)
        owner.branches[name] = branch
        self._parking.add(branch)
        self.num_branches += 1
        return branch

    def _bring(self, owner: Owner, request: Request, hypothesis: Hypothesis, answer: Parked) -> None:
        """Have a kept answer stand in the session's history, with its reports. It was written anew meanwhile, perhaps;
        the request did not notice."""
        history, tip = answer.place
        if history is not owner.history:
            tip = owner.history.append(0, history.tokens(tip))
            answer.place = owner.history, tip
        reports = answer_reports(request, hypothesis) or []
        for entry in reversed(reports):
            if entry is not None:
                owner.history.notes[tip] = entry
            tip = owner.history.parent[tip]

    def _used(self, owner: Owner) -> None:
        """Something has happened to a session."""
        owner.last_used = self._clock()
        if owner.ttl is not None:
            self._next_expiry = min(self._next_expiry, owner.last_used + owner.ttl)
        if len(owner.history) >= 2 * owner.size_before:
            self._prune(owner)
        self.num_tokens += len(owner.history) - owner.counted
        owner.counted = len(owner.history)

    def _prune(self, owner: Owner) -> None:
        """Write a history anew of which more is dead than alive. Requests that still run keep the old one."""
        history = owner.history
        new, number = history.pruned(branch.place[1] for branch in owner.branches.values())
        if 2 * len(new) <= len(history):
            owner.history = new
            for branch in owner.branches.values():
                branch.place = new, number[branch.place[1]]
        owner.size_before = max(FEW_TOKENS, len(owner.history))

    # ---- what is refused
    def check_tokens(self, engine: Engine, field: str, tokens: Sequence[int]) -> None:
        """Raise `InvalidArgument` for a token that the model does not know."""
        size = engine.limits.vocab_size
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise InvalidArgument(field, wrong, f"token ids must be from 0 to {size - 1}")

    def _check_branches(self, owner: Owner | None, count: int) -> None:
        limits = self.limits
        if owner is not None and len(owner.branches) + count > limits.max_session_branches:
            have = f"{len(owner.branches)} branches, and {count} more"
            raise SessionLimit("max_session_branches", Shown(have), f"a session may have {limits.max_session_branches}")
        if self.num_branches + count > limits.max_parked_branches:
            have = f"{self.num_branches} branches, and {count} more"
            limit = f"all sessions together may have {limits.max_parked_branches}"
            raise SessionLimit("max_parked_branches", Shown(have), limit)

    def _check_size(self, owner: Owner | None, count: int) -> None:
        limits = self.limits
        have = 0 if owner is None else len(owner.history)
        if have + count > limits.max_session_tokens and owner is not None:
            owner.size_before = 0
            self._used(owner)  # perhaps much of it is dead
            have = len(owner.history)
        if have + count > limits.max_session_tokens:
            value = Shown(f"{have} tokens, and {count} more")
            raise SessionLimit("max_session_tokens", value, f"a session may hold {limits.max_session_tokens}")
        if self.num_tokens + count > limits.max_parked_tokens:
            value = Shown(f"{self.num_tokens} tokens, and {count} more")
            raise SessionLimit("max_parked_tokens", value, f"all sessions together may hold {limits.max_parked_tokens}")


def compile_grammar(engine: Engine, params: RequestParams) -> None:
    """Compile what answers may be, as `Engine.admit` would. One thread at a time."""
    limits = engine.limits
    stopping = read_options(params, limits.vocab_size, limits.eos_token_ids, engine.vocabulary).stopping
    constraint_of(params, stopping, limits.vocab_size, engine.grammars, limits.max_model_len)


def _expiry(owner: Owner) -> float:
    return math.inf if owner.ttl is None else owner.last_used + owner.ttl


def closing(branches: Iterable[OpenBranch]) -> Callable[[Engine], Any]:
    """What closes branches, for the loop."""

    def close(engine: Engine) -> None:
        for branch in branches:
            engine.sessions.close(engine, branch)

    return close
