"""Sessions: branches that clients hold between calls. All of this happens in the engine's loop, between two steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pagedec.core.adapter_places import Adapter, salted
from pagedec.core.history import History
from pagedec.core.logprobs import answer_reports
from pagedec.core.parked import Parked, Parking
from pagedec.core.protocol import Hypothesis
from pagedec.core.request import Request
from pagedec.core.table import BlockTable, num_blocks_of
from pagedec.decoders.scoring import ScoreParams
from pagedec.engine.open_branches import FEW_TOKENS, KEEPS, ROOT, OpenBranch, OpenCall, Owner, SessionLimits, seed_of
from pagedec.engine.options import Options, with_seed
from pagedec.errors import BranchBusy, BranchClosed, InvalidArgument, RequestError, SessionLimit, SessionTooSmall, Shown
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
        self.num_branches = self.num_tokens = self._num_promised = self._num_coming = 0
        self.num_forks = self.num_taken_back = self.num_closed = 0
        """Branches that clients have had forked, tokens that they have taken back, and branches that were closed."""

    # ---- what a client does
    def open(self, engine: Engine, tokens: Sequence[int], seed: int, salt: str, priority: int,
             ttl: float | None, adapter: Adapter | None = None) -> OpenBranch:  # fmt: skip
        """A new session with one branch. Raises `InvalidArgument` for a prompt that could not be gone on with, and
        `SessionLimit`."""
        self.tidy(engine)
        if not tokens:
            raise InvalidArgument("prompt", Shown("empty"), "must have at least one token")
        engine.check_room("prompt", len(tokens), 1)
        engine.check_tokens("prompt", tokens)
        self._check_branches(None, 1)
        self._check_size(None, len(tokens))
        history, tip = History.of(self._block_size, salted(adapter, salt), tokens)
        ttl = self.limits.session_ttl if ttl is None else ttl
        owner = Owner(history, seed, salt, priority, ttl, len(tokens), adapter)
        self.owners[owner] = None
        engine.adapters.hold(adapter)
        branch = self._named(owner, ROOT, (history, tip), self._new_tables())
        self._used(owner)
        return branch

    def fork(self, engine: Engine, branch: OpenBranch, count: int) -> list[OpenBranch]:
        """`count` branches that are where `branch` is. Takes no block and copies nothing."""
        owner = self._of(engine, branch, "fork")
        self._check_branches(owner, count)
        self.num_forks += count
        self._parking.touch(branch)
        made = [
            self._forked(owner, branch, branch.place, {lane: table.fork() for lane, table in branch.tables.items()})
            for _ in range(count)
        ]
        self._used(owner)
        return made

    def append(self, engine: Engine, branch: OpenBranch, tokens: Sequence[int], behind: int | None = None) -> None:
        """Continue a branch, or its first `behind` tokens, to which it is taken back, by a client's tokens, which end
        nothing. Raises `InvalidArgument` and `SessionLimit` where there is no room; nothing has changed then."""
        owner = self._of(engine, branch, "append")
        length = branch.length if behind is None else behind
        engine.check_room("append", len(tokens), 0, length)
        engine.check_tokens("append", tokens)
        self._check_size(owner, len(tokens))
        if length < branch.length:
            self.cut(engine, branch, length)
        (history, tip), size = branch.place, len(owner.history)
        branch.place = history, history.append(tip, tokens)
        if len(owner.history) - size < len(tokens):
            self._revive(owner)
        self._used(owner)

    def cut(self, engine: Engine, branch: OpenBranch, length: int) -> None:
        """Take a branch back to its first `length` tokens, and begin a new epoch of it."""
        owner = self._of(engine, branch, "rollback")
        if not 1 <= length <= branch.length:
            most = branch.length - 1
            text = f"must be from 0 to {most}: branch {branch.name} has {branch.length} tokens, and one must stay"
            raise InvalidArgument("rollback", branch.length - length, text)
        history, tip = branch.place
        owner.num_loose += branch.length - length
        self.num_taken_back += branch.length - length
        branch.place = history, history.ancestor(tip, length)
        branch.epoch += 1
        branch.num_given = min(branch.num_given, length)
        for table in branch.tables.values():
            table.keep(length)
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
        options: Options | None = None,
    ) -> Request:
        """A request that goes out from `branch`, for the loop to take in this very turn. `waits`: `read` or `give_up`
        must follow when it has ended. `options`: what the engine has made of the parameters, if it has. Raises as
        `Engine.admit` does; nothing has changed then."""
        owner = self._of(engine, branch, "another call")
        engine.check_room(f"branch {branch.name}", branch.length, 1, advice="; roll it back first")
        if params.truncate_prompt_tokens is not None:
            limit = "must be None: a branch is continued as it is"
            raise InvalidArgument("truncate_prompt_tokens", params.truncate_prompt_tokens, limit)
        name = keep if isinstance(keep, str) else None
        if name == "all":
            self._check_branches(owner, params.num_answers)
        elif (
            not isinstance(params, ScoreParams)
            and name not in KEEPS
            and not (type(keep) is int and 0 <= keep < params.num_answers)
        ):
            limit = f"must be one of {', '.join(KEEPS)}, or an answer's number below {params.num_answers}"
            raise InvalidArgument("keep", keep, limit)
        num_promised = self._most_tokens(engine, branch, params)
        self._check_size(owner, num_promised)
        seed = owner.seed if params.seed is None else params.seed
        named = with_seed(params, seed_of(seed, branch.name, branch.epoch))
        call = OpenCall(branch, self._parking, request_id, keep, waits)
        whose = owner.priority, owner.salt
        request = engine.admit(request_id, branch.tokens(), named, *whose, call, None, options, owner.adapter)
        branch.call = call
        call.owner, call.num_promised, call.num_coming = owner, num_promised, params.num_answers if name == "all" else 0
        call.size_before = len(owner.history)
        self._count(owner, call, 1)
        self._used(owner)
        return request

    def close(self, engine: Engine, branch: OpenBranch, why: str = "was closed") -> None:
        """Let a branch go; its call fails. One that is closed already stays so."""
        owner = branch.owner
        if owner is None:
            return
        call = branch.call
        if isinstance(call, OpenCall) and not self.give_up(call.request_id):
            name = call.request_id
            engine.fail(name, RequestError(name, f"branch {branch.name}, from which it went out, {why}"))
            self._uncount(call)
        branch.owner, branch.why_closed = None, why
        owner.num_loose += max(1, branch.length - branch.num_given)  # its parent may have let go of what it was given
        del owner.branches[branch.name]
        self._parking.remove(branch)
        self.num_branches -= 1
        if owner.branches:
            self._used(owner)
        else:
            del self.owners[owner]
            engine.adapters.release(owner.adapter)
            self.num_tokens -= owner.counted
        self.num_closed += 1  # last: whoever sees another number finds it closed

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
        self._uncount(call)
        if owner is None:
            return
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
        call = request.home
        if isinstance(call, OpenCall):
            self._uncount(call)
            if isinstance(call.parked, OpenBranch) and call.parked.owner is not None:
                self._used(call.parked.owner)

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
            if not owner.num_calls and owner.expiry <= now:
                for branch in list(owner.branches.values()):
                    self.close(engine, branch, f"was given up: its session was not used for {owner.ttl:g} seconds")
        self._next_expiry = min((owner.expiry for owner in self.owners), default=math.inf)

    # ---- inside
    def _count(self, owner: Owner, call: OpenCall, sign: int) -> None:
        """A call goes out (1), or is over (-1), with the tokens and the branches that it may add."""
        owner.num_calls += sign
        owner.num_promised += sign * call.num_promised
        self._num_promised += sign * call.num_promised
        owner.num_coming += sign * call.num_coming
        self._num_coming += sign * call.num_coming

    def _uncount(self, call: OpenCall) -> None:
        """It is over; perhaps it was before."""
        owner, call.owner = call.owner, None
        if owner is not None:
            self._count(owner, call, -1)
            self._revive(owner)
            grown = len(owner.history) - call.size_before
            owner.num_loose += max(0, min(call.num_promised, grown))  # perhaps none of it is kept

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
        branch.num_given = parent.length
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
        self._next_expiry = min(self._next_expiry, owner.expiry)
        size = len(owner.history)
        if size >= 2 * owner.size_before or 2 * owner.num_loose > size > FEW_TOKENS:
            self._bury(owner)
        self._recount(owner)

    def _revive(self, owner: Owner) -> None:
        """Perhaps tokens were added that had been there, and died."""
        owner.num_loose, owner.num_dead = owner.num_loose + owner.num_dead, 0

    def _recount(self, owner: Owner) -> None:
        counted = len(owner.history) - owner.num_dead
        self.num_tokens += counted - owner.counted
        owner.counted = counted

    def _bury(self, owner: Owner) -> None:
        """Count a history's dead; write one anew of which more is dead than alive, or whose runs are so short that to
        count takes long. Requests that still run keep the old one."""
        history = owner.history
        num_alive, num_runs = history.alive(owner.tips)
        if 2 * num_alive <= len(history) or num_runs > max(FEW_TOKENS + 4 * len(owner.tips), num_alive // 8):
            owner.history, number = history.pruned(owner.tips)
            for branch in owner.branches.values():
                branch.place = owner.history, number(branch.place[1])
        owner.num_dead, owner.num_loose = len(owner.history) - num_alive, 0
        owner.size_before = max(FEW_TOKENS, len(owner.history))

    def bury(self, owners: Iterable[Owner]) -> None:
        """Count sessions' dead where there may be more than are known: before somebody is refused for them."""
        for owner in owners:
            if owner.num_loose and owner.branches:
                self._bury(owner)
                self._recount(owner)

    # ---- what is refused
    def _check_branches(self, owner: Owner | None, count: int) -> None:
        have = 0 if owner is None else len(owner.branches) + owner.num_coming
        self._check_limit("max_session_branches", owner, have, count, "a session may have")
        have = self.num_branches + self._num_coming
        self._check_limit("max_parked_branches", owner, have, count, "all sessions together may have")

    def _check_limit(self, name: str, owner: Owner | None, have: int, count: int, who: str) -> None:
        most: int = getattr(self.limits, name)
        if have + count <= most:
            return
        unit = name.rpartition("_")[2]
        is_never = count + (owner is not None) > most  # the branch itself stays, and a token of it
        kind = SessionTooSmall if is_never else SessionLimit
        raise kind(name, Shown(f"{have} {unit}, and {count} more"), f"{who} {most}")

    def _most_tokens(self, engine: Engine, branch: OpenBranch, params: RequestParams) -> int:
        """How many tokens a call's answers, or its continuations, may add."""
        if isinstance(params, ScoreParams):
            return sum(map(len, params.continuations))
        room = max(1, engine.limits.max_model_len - branch.length)
        return params.num_answers * (room if params.max_tokens is None else min(params.max_tokens, room))

    def _check_size(self, owner: Owner | None, count: int) -> None:
        promised = 0 if owner is None else owner.num_promised
        if owner is not None and owner.counted + promised + count > self.limits.max_session_tokens:
            self.bury([owner])
        if self.num_tokens + self._num_promised + count > self.limits.max_parked_tokens:
            self.bury(self.owners)
        have = promised + (0 if owner is None else owner.counted)
        self._check_limit("max_session_tokens", owner, have, count, "a session may hold")
        have = self.num_tokens + self._num_promised
        self._check_limit("max_parked_tokens", owner, have, count, "all sessions together may hold")
