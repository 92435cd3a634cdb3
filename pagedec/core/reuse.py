"""KV that need not be computed: the prefix cache has it, a sibling has it, or somebody is just computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagedec.core.request import Branch, Request
from pagedec.core.table import BlockTable
from pagedec.core.trunk import Trunks


class Reuse:
    """Finds valid KV for branches that are about to compute, once a step. `asked` gives the branches of a request that
    want to advance (None: all); `computing` holds the keys of the blocks that the step fills."""

    __slots__ = ("_asked", "_caching", "_computing", "_trunks")

    def __init__(
        self, caching: bool, computing: set[bytes], asked: Callable[[Request], Iterable[Branch] | None]
    ) -> None:
        self._caching, self._computing, self._asked = caching, computing, asked
        self._trunks: dict[Request, Trunks] = {}

    def must_wait(self, request: Request, branch: Branch) -> bool:
        """Give a branch what there is. True: the rest is on its way, so the branch computes nothing in this step."""
        history, table = request.history, branch.table
        if request.reports is not None and request.awaits_prompt_report(branch):
            # a fork may hold what was found in the cache
            table.truncate(min(table.length, request.reports.num_evaluated - 1))
            return False
        length = history.depth[branch.tip]
        if table.length >= length - 1:
            return False
        before = table.length
        if (trunks := self._trunks.get(request)) is not None:  # one of them has looked in the prefix cache for all
            donor, best = trunks.donor(branch)
            size = table.pool.block_size
            _fork(branch, donor, best // size * size)  # from within a block the prefix cache goes no further
        if self._caching:
            _extend_from_cache(branch, request)
        if len(request.branches) > 1 and self._wait_for_trunk(request, branch, branch.table.length > before):
            return True
        table = branch.table
        end = table.length + table.pool.block_size
        at_boundary = table.length % table.pool.block_size == 0 and end <= _findable(request, length)
        return self._caching and at_boundary and history.block_key(branch.tip, end) in self._computing

    def most_pending(self, request: Request, branch: Branch) -> int:
        """How many tokens a branch that need not wait may evaluate: no more than siblings wait for. Behind all of its
        own it is answered, and may end with what these have not found yet."""
        pending = request.history.depth[branch.tip] - branch.table.length
        trunks = self._trunks.get(request)
        awaited = 0 if trunks is None else trunks.awaited(branch) - branch.table.length
        return min(pending, awaited) if awaited > 0 else pending

    def num_shared(self, request: Request) -> int:
        """Blocks of a request that holds none, which others hold."""
        branch = request.branches[0]
        if not self._caching or request.awaits_prompt_report(branch):
            return 0
        pool, history = branch.table.pool, request.history
        num_shared, length = 0, history.depth[branch.tip]
        for end in range(pool.block_size, length + 1, pool.block_size):
            block = pool.block_of.get(history.block_key(branch.tip, end))
            if block is None:
                break
            num_shared += pool.refs[block] > 0
        return num_shared

    def _wait_for_trunk(self, request: Request, branch: Branch, extended: bool) -> bool:
        trunks = self._trunks.get(request)
        if trunks is None:
            trunks = self._find_trunks(request)
        elif extended:
            trunks.mark(branch)
        donor, best = trunks.donor(branch)
        if donor is not None and donor.table.length < best:  # it has given way since
            trunks = self._find_trunks(request)
            donor, best = trunks.donor(branch)
        if best < trunks.length(branch):
            return True
        _fork(branch, donor, best)
        return False

    def _find_trunks(self, request: Request) -> Trunks:
        asked = self._asked(request)
        trunks = self._trunks[request] = Trunks(
            request.history, request.branches, request.branches if asked is None else asked
        )
        return trunks


def _fork(branch: Branch, donor: Branch | None, best: int) -> None:
    """Give a branch what a sibling has of its first `best` tokens, if that is more, and if he still has it."""
    if donor is not None and donor.table.length >= best > branch.table.length:
        branch.table.release()
        branch.tables["target"] = donor.table.fork()
        branch.table.truncate(best)


def _findable(request: Request, length: int) -> int:
    """Up to where the prefix cache may be used: rows that are to be reported must run."""
    return length if request.scored_from is None else min(length, request.scored_from)


def _extend_from_cache(branch: Branch, request: Request) -> None:
    table: BlockTable = branch.table
    history, pool = request.history, table.pool
    size, length = pool.block_size, _findable(request, history.depth[branch.tip])
    while table.length % size == 0 and table.length + size <= length:
        block = pool.lookup(history.block_key(branch.tip, table.length + size))
        if block is None:
            return
        table.extend(block)
