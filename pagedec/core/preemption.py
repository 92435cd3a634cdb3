"""Making room: who gives way to whom, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from pagedec.core.parked import Parking
from pagedec.core.request import KNOWN, Branch, Request
from pagedec.core.table import BlockTable


class Room:
    """The order of giving way within one step: parked branches; requests that may not run in it; idle branches, of the
    lowest priority first and then the one that has been idle for longest; the youngest requests; the request's own
    youngest branches without work in this step. Drafts take only what is left. The oldest request of the highest
    priority never gives way. Where the step before is still out (`is_ahead`) only parked branches do: others may be
    about to end.

    Each of the orders is walked once a step: what has been passed has nothing left to give, or has work in this step.
    """

    __slots__ = (
        "_asked",
        "_draft",
        "_idle",
        "_is_ahead",
        "_own",
        "_own_request",
        "_parking",
        "_paused",
        "_requests",
        "_step",
        "_youngest",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        step: int,
        asked: Callable[[Request], set[Branch] | None],
        only: Collection[Request] | None = None,
        parking: Parking | None = None,
        is_ahead: bool = False,
    ) -> None:
        self._parking, self._is_ahead = parking, is_ahead
        self._requests, self._step, self._asked = requests, step, asked
        self._paused = iter(() if only is None else [request for request in requests if request not in only])
        self._idle = self._idle_branches()
        self._youngest = len(requests) - 1
        self._own: Iterator[Branch] = iter(())
        self._own_request: Request | None = None
        self._draft = self._draft_branches()

    def make(self, request: Request, protected: set[Branch]) -> bool:
        """Have somebody give way to `request`. False: nobody is left."""
        if self._parking is not None and self._parking.give_way("target"):
            return True
        if self._is_ahead:
            return False
        for paused in self._paused:
            if preempt(paused):
                return True
        for owner, branch in self._idle:
            branch.release()
            owner.num_released_branches += 1
            owner.started = not owner.idle or holds_blocks(owner)
            return True
        while self._youngest >= 0 and self._requests[self._youngest] is not request:
            victim = self._requests[self._youngest]
            if victim.order < request.order:
                break
            self._youngest -= 1
            if preempt(victim):
                return True
        if self._own_request is not request:
            self._own_request, self._own = request, iter(request.branches[::-1])
        for branch in self._own:
            if branch.table.num_blocks and branch not in protected and branch.planned_in != self._step:
                branch.release()
                return True
        return False

    def make_on_draft_lane(self, wanted_by: Branch) -> bool:
        """Have a parked branch lose its draft table, or the youngest one without work in this step."""
        if self._parking is not None and self._parking.give_way("draft"):
            return True
        for branch in self._draft:
            table = branch.tables["draft"]
            if branch is not wanted_by and branch.planned_in != self._step and table.num_blocks:
                table.release()
                return True
        return False

    def _idle_branches(self) -> Iterator[tuple[Request, Branch]]:
        idle: list[tuple[Request, Branch]] = []
        for request in self._requests:
            asked = self._asked(request) if holds_blocks(request) else None
            if asked is None:  # nothing to take, or plain sampling, in which everybody wants to advance
                continue
            idle += ((request, branch) for branch in request.branches if branch not in asked)
        idle.sort(key=lambda entry: (-entry[0].priority, entry[1].planned_in))
        for request, branch in idle:
            if branch.table.num_blocks:  # else a step of its own has not given it any, or it was released meanwhile
                yield request, branch

    def _draft_branches(self) -> Iterator[Branch]:
        for request in reversed(self._requests):
            if "draft" in request.decoder.lanes:
                yield from request.branches


def holds_blocks(request: Request) -> bool:
    """Something could be taken from it."""
    for branch in request.branches:
        for table in branch.tables.values():
            if table.num_blocks:
                return True
    return False


def lose_kv(request: Request) -> None:
    """The device has lost what a request's tables held: it begins with empty ones, from its history."""
    request.num_preemptions += holds_blocks(request)
    request.started = False
    if request.reports is not None:
        request.reports.num_coming = 0
    for branch in request.branches:
        branch.tables = {lane: BlockTable(table.pool) for lane, table in branch.tables.items()}
        branch.awaits = KNOWN


def preempt(request: Request) -> bool:
    """Release a request's tables; its history brings everything back. False: it held nothing."""
    held = holds_blocks(request)
    if held:
        for branch in request.branches:
            branch.release()
        request.num_preemptions += 1
    request.started = False
    return held
