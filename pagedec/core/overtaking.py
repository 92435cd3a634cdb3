"""Short prompts do not wait for a long one that came before: it leaves them rows of each step in which it does not
end."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from pagedec.core.adapter_places import AdapterPlaces
from pagedec.core.request import LAST, Request, order_of

SHARE = 4
"""One in so many of the rows that a step has for prompts is kept for short ones, as far as there are any: so a long one
takes at most a third longer, however many pass it."""
MOST_LOOKED_AT = 64
"""Requests, in the order in which they run, among which short ones are looked for: a queue may have thousands."""
NOTHING = 0, 0
"""Rows that are kept for nobody, and those of prompts among them."""


class Overtaking:
    """Those of one step that lack no more rows than are kept for all of them: short prompts, and who writes behind one
    or passed it before. What counts is what is to be evaluated, whatever its name: a long prompt's last tokens are
    short, and a session's next call is.

    `long`: the first one that leaves rows; `requests`: all, in order. `may_run`: whether one can have rows in the step;
    `comes_in`: whether one that waits outside would be let in. `num_rows`: of the step, for prompts; `num_seqs`: how
    many more than the long one may have some.
    """

    __slots__ = ("_orders", "_prompts", "_rows")

    def __init__(
        self,
        long: Request,
        requests: Sequence[Request],
        may_run: Callable[[Request], bool],
        comes_in: Callable[[Request], bool],
        places: AdapterPlaces,
        num_rows: int,
        num_seqs: int,
    ) -> None:
        self._orders: list[tuple[int, float]] = []
        most, counts, adapters = num_rows // SHARE, list[tuple[int, int]](), {long.adapter} - {0}
        is_open: bool | None = None
        first = bisect_right(requests, long.order, key=order_of)
        for request in islice(requests, first, first + MOST_LOOKED_AT):
            if not most or len(counts) >= num_seqs:
                break
            if not may_run(request):
                continue
            if not request.started:  # where the first of them does not come in, none does
                is_open = comes_in(request) if is_open is None else is_open
                if not is_open:
                    continue
            lacking = self._lacking(request, most)
            if not 0 < lacking <= most or (request.adapter and not places.have_room(adapters | {request.adapter})):
                continue
            adapters |= {request.adapter} - {0}
            self._orders.append(request.order)
            counts.append((lacking, lacking if lacking > len(request.branches) else 0))
            most -= lacking
        self._rows, self._prompts = ([0, *accumulate(column)] for column in zip(*counts or [(0, 0)], strict=True))

    def kept(self, request: Request) -> tuple[int, int]:
        """Rows that a request leaves to those of its priority that came after it, and how many of them are of prompts.
        Who is one of those leaves none: its turn is before theirs."""
        first = bisect_right(self._orders, request.order)
        if first and self._orders[first - 1] == request.order:
            return NOTHING
        last = bisect_right(self._orders, (request.priority, math.inf))
        return self._rows[last] - self._rows[first], self._prompts[last] - self._prompts[first]

    def _lacking(self, request: Request, most: int) -> int:
        """How many rows would end what a request has to evaluate, at least where it is more than `most`."""
        depth, branches = request.history.depth, request.branches
        if len(branches) > 1 and request.plain is None and request.asked_in >= 0:
            return len(request.queries)  # of its last step: others may wait
        if request.started:
            lengths = (depth[branch.tip] - branch.table.length for branch in branches if branch.awaits != LAST)
            return sum(max(1, length) for length in lengths)
        return self._lacking_outside(request, most)

    def _lacking_outside(self, request: Request, most: int) -> int:
        """What its parked branch has, or the prefix cache, counts as there."""
        branch, history = request.branches[0], request.history
        table, length = branch.table, history.depth[branch.tip]
        own = None if request.home is None else request.home.parked.tables.get(table.pool.lane)
        held, size = 0 if own is None else own.num_valid(branch.prompt_length), table.pool.block_size
        if held < length - most and request.scored_from is None:
            end, found = -(-(length - most) // size) * size, table.pool.block_of  # it leaves no more than `most`
            # A block is there with those before it, so whoever is strange is found out without reading all of him.
            looked_at = [size << i for i in range((end // size).bit_length()) if size << i < end]
            if all(history.block_key(branch.tip, place) in found for place in looked_at):
                while end < length and history.block_key(branch.tip, end) in found:
                    held, end = end, end + size
        return length - held
