"""Parked branches: what a session holds between two calls, how a call goes out from one, and what it leaves there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from pagedec.core.block import BlockPool
from pagedec.core.history import History
from pagedec.core.table import BlockTable
from pagedec.core.trunk import Trunks

if TYPE_CHECKING:
    from pagedec.core.protocol import Hypothesis
    from pagedec.core.request import Branch, Request


@dataclass(slots=True, eq=False)
class Parked:
    """A branch that no request has: nobody asks it, and its tables are the first to give way."""

    place: tuple[History, int]
    """A history and a tip in it. It is replaced as a whole, so any thread may read it."""
    tables: dict[str, BlockTable]
    priority: int = 0
    call: Call | None = None
    """The request that goes out from it, one at a time."""

    @property
    def length(self) -> int:
        """How many tokens it has."""
        history, tip = self.place
        return history.depth[tip]

    def tokens(self) -> list[int]:
        """All of its tokens. Any thread may ask."""
        history, tip = self.place
        return history.tokens(tip)


class Parking:
    """All parked branches of a scheduler, in the order in which they give way: lowest priority first (the highest
    number), then the least recently used."""

    __slots__ = ("_branches", "_order", "_pools")

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self._pools = pools
        self._branches: dict[Parked, None] = {}
        self._order: dict[str, dict[int, OrderedDict[Parked, None]]] = {lane: {} for lane in pools}

    def __len__(self) -> int:
        return len(self._branches)

    def add(self, parked: Parked) -> None:
        """Hold a branch, as the one that was used last."""
        self._branches[parked] = None
        self.touch(parked)

    def touch(self, parked: Parked) -> None:
        """Note that a branch is used now. To be called whenever it was given blocks."""
        for lane, table in parked.tables.items():
            order = self._order[lane].setdefault(parked.priority, OrderedDict())
            order.pop(parked, None)
            if table.num_blocks:
                order[parked] = None

    def remove(self, parked: Parked) -> None:
        """Let a branch go, with its blocks."""
        del self._branches[parked]
        for orders in self._order.values():
            if parked.priority in orders:
                orders[parked.priority].pop(parked, None)
        for table in parked.tables.values():
            table.release()

    def take_over(self, parked: Parked, held: Parked, common: int) -> None:
        """`parked` becomes what `held` is, which goes. They have `common` tokens in common: up to there `parked` keeps
        the tables of lanes that `held` has none of."""
        tables, held.tables = held.tables, {}
        self.remove(held)
        for lane, table in parked.tables.items():
            table.keep(0 if lane in tables else common)
        parked.place, parked.tables = held.place, {**parked.tables, **tables}
        self.add(parked)

    def give_way(self, lane: str) -> bool:
        """Have the first branch in order give up its table on a lane. False: no branch has any."""
        orders = self._order[lane]
        for priority in sorted(orders, reverse=True):
            order = orders[priority]
            while order:
                parked, _ = order.popitem(last=False)
                table = parked.tables[lane]
                if table.num_blocks:
                    table.release()
                    return True
            del orders[priority]
        return False

    def holds_blocks(self, lane: str) -> bool:
        """Some branch holds blocks of this lane."""
        return any(order for order in self._order[lane].values())

    def tables(self, lane: str) -> Iterator[BlockTable]:
        """All tables of a lane."""
        return (parked.tables[lane] for parked in self._branches if lane in parked.tables)

    def reset(self) -> None:
        """The pools were reset: nobody holds anything."""
        self._order = {lane: {} for lane in self._pools}
        for parked in self._branches:
            parked.tables = {lane: BlockTable(self._pools[lane]) for lane in parked.tables}


class Call:
    """A request's root: the parked branch that it goes out from, and the answers that it has left there so far."""

    __slots__ = ("_parking", "answers", "keeps", "parked")

    def __init__(self, parked: Parked, parking: Parking, keeps: bool = True) -> None:
        """`keeps`: answers are held when they end."""
        self.parked, self._parking, self.keeps = parked, parking, keeps
        self.answers: list[tuple[Hypothesis, Parked]] = []

    def enter(self, request: Request) -> None:
        """The request is let in, perhaps not for the first time: give its branches what the parked one has of them."""
        for branch in request.branches:
            for lane, table in branch.tables.items():
                own = self.parked.tables.get(lane)
                if own is not None and table.length < own.num_valid(branch.prompt_length):
                    table.release()
                    branch.tables[lane] = own.fork()
                    branch.tables[lane].keep(branch.prompt_length)
        self._parking.touch(self.parked)

    def hold(self, request: Request, hypotheses: Sequence[Hypothesis]) -> None:
        """These answers end now, and the branches that they stand on are about to give up their tables."""
        if hypotheses or request.scored_from is not None:
            self._evaluate(request)
        if not self.keeps:
            return
        history, trunks = request.history, None
        standing = {branch.tip: branch for branch in request.branches}
        for hypothesis in hypotheses:
            branch, length = standing.get(hypothesis.tip), history.depth[hypothesis.tip]
            if branch is None:  # a beam that ended before, or one that was taken back
                trunks = trunks or Trunks(history, request.branches, ())
                branch, length = trunks.donor(hypothesis)
            tables: dict[str, BlockTable] = {}
            for lane, table in ({} if branch is None else branch.tables).items():
                tables[lane] = table.fork()
                tables[lane].keep(length)
            place = history, history.append(hypothesis.tip, hypothesis.tokens)
            held = Parked(place, tables, self.parked.priority)
            self._parking.add(held)
            self.answers.append((hypothesis, held))

    def _evaluate(self, request: Request) -> None:
        """What the request has evaluated of the parked branch, that one has from now on."""
        parked, branch = self.parked, max(request.branches, key=_length, default=None)
        if branch is None or branch.prompt_length < parked.length:
            return
        for lane, table in branch.tables.items():
            own = parked.tables.get(lane)
            if own is not None and own.length < table.num_valid(parked.length):
                own.release()
                parked.tables[lane] = table.fork()
                parked.tables[lane].keep(parked.length)
        self._parking.touch(parked)

    def end(self, kept: Sequence[Hypothesis] = ()) -> list[Parked]:
        """The request is over: let go of all answers but those that are kept, which are returned in the order asked
        for."""
        self.parked.call = None
        held: dict[int, list[Parked]] = {}
        for hypothesis, parked in self.answers:
            held.setdefault(id(hypothesis), []).append(parked)
        found = [held[id(hypothesis)].pop() for hypothesis in kept]
        for parked in chain.from_iterable(held.values()):
            self._parking.remove(parked)
        self.answers = []
        return found


def _length(branch: Branch) -> int:
    return branch.table.length
