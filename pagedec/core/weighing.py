"""A step's drafts of those that draft as widely as pays: weighed against one another, and cut to what is granted."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.costs import StepCosts
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.granting import Grants, Load, Wish, cut, fits, grant
from pagedec.core.protocol import Answer, Query, Verdict
from pagedec.core.request import Branch, Request
from pagedec.core.rows import Chain, Rows
from pagedec.core.standing import LEAST_ASKING, MOST_LOST, TRIED_ROWS


class Weighing:
    """Collects the drafts of a step, then says what is left of each. `num_running`: requests that are inside."""

    __slots__ = ("_asked", "_chains", "_costs", "_num_running", "_requests", "_wishes", "granted", "num_granted")

    def __init__(self, costs: StepCosts, num_running: int) -> None:
        self._costs, self._num_running = costs, num_running
        self._requests: list[Request] = []
        self._chains: list[Chain] = []
        self._wishes: list[Wish] = []
        self._asked: dict[Request, float] = {}
        self.granted: dict[Branch, Draft | Roll] = {}
        """What is left of each draft that was considered."""
        self.num_granted = 0

    @property
    def num_wished(self) -> int:
        """Rows of all drafts that were considered."""
        return sum(chain.query.draft.num_nodes for chain in self._chains)

    def consider(self, request: Request, chain: Chain) -> None:
        """Let a chain's draft, or that it has none, be weighed with the others. Of one that is not whole a draft lane
        may catch up, unless the request rests."""
        standing, draft = request.standing, chain.query.draft
        assert standing is not None
        if standing.is_resting:
            self.granted[chain.branch] = EMPTY
        elif chain.is_whole:
            self._asked.setdefault(request, 0.0)
            if draft.num_nodes:
                self._requests.append(request)
                self._chains.append(chain)
                self._wishes.append(wish_of(request, draft))

    def decide(self, load: Load) -> None:
        """Cut all drafts, and tell the requests what asking them was worth."""
        costs, nodes = self._costs, list[list[int]]([[] for _ in self._wishes])
        if not costs.is_bare:
            grants = grant(self._wishes, load, costs)
            nodes = grants.nodes
            self._gain(grants)
            self._try(nodes, load, grants)
            asking = max(costs.asking, LEAST_ASKING * grants.bare_seconds)
            for request, seconds in self._asked.items():
                assert request.standing is not None
                request.standing.asked(seconds, asking, load[:2], self._num_running)
        for chain, chosen in zip(self._chains, nodes, strict=True):
            self.granted[chain.branch] = cut(chain.query.draft, chosen)
            self.num_granted += len(chosen)

    # ---- inside
    def _gain(self, grants: Grants) -> None:
        """What each request is expected to gain: its tokens' worth less the time of its rows."""
        num_rows = sum(map(len, grants.nodes))
        if not num_rows:
            return
        token, row = grants.seconds / grants.num_tokens, (grants.seconds - grants.bare_seconds) / num_rows
        for request, wish, chosen in zip(self._requests, self._wishes, grants.nodes, strict=True):
            self._asked[request] += wish.gain(len(chosen)) * token - len(chosen) * row

    def _try(self, nodes: list[list[int]], load: Load, grants: Grants) -> None:
        """Run some rows of one draft that seems not to pay, as long as that costs little of all time."""
        left = load.rows_left - sum(map(len, nodes))
        if load.is_shared and any(nodes):
            return
        for i, (request, wish) in enumerate(zip(self._requests, self._wishes, strict=True)):
            standing = request.standing
            if nodes[i] or standing is None or not standing.may_try or not wish.gains:
                continue
            for size in (len(wish.gains),) if wish.is_whole else TRIED_ROWS:
                chosen = wish.likeliest(size)
                fit = len(chosen) == size <= left
                seconds = fits(size, wish.roll_depth(chosen), load, self._costs) if fit else None
                if seconds is None:
                    continue
                loss = seconds / grants.bare_seconds - 1 - wish.gain(size) / load.num_tokens
                if loss < MOST_LOST or size == 1 or wish.is_whole:
                    nodes[i] = chosen
                    standing.tried(max(0.0, loss))
                    return


def wish_of(request: Request, draft: Draft | Roll) -> Wish:
    """What a draft is expected to add, by what its request's drafts have done."""
    standing = request.standing
    assert standing is not None
    if standing.sizes:
        return Wish([standing.gain()] + [0.0] * (draft.num_nodes - 1), is_whole=True)
    return Wish(standing.odds.gains(draft), draft.depths()[1:] if isinstance(draft, Roll) else ())


def is_forced(request: Request, branch: Branch, draft: Draft | Roll) -> bool:
    """A draft that says nothing but what the branch's constraint leaves no choice about."""
    if request.forced is None or isinstance(draft, Roll) or not draft.tokens or not draft.is_chain:
        return False
    return draft.tokens == tuple(request.forced(branch)[: len(draft.tokens)])


def load_of(rows: Rows, waiting: Sequence[tuple[Request, Sequence[Chain]]], num_fixed: int) -> Load:
    """What a step has before drafts are granted: rows that are laid out, chains that wait, and `num_fixed` rows of
    drafts that are laid out as they are."""
    answered = [work.request for work in rows.plan.works if work.answers_something]
    whole = [(request, chain) for request, chains in waiting for chain in chains if chain.is_whole]
    answered += (request for request, _ in whole)
    return Load(
        rows.num_taken + num_fixed,
        len(answered),
        max(0, rows.spare - num_fixed),
        any(request.standing is None for request in answered),
        any(isinstance(chain.query.draft, Roll) and request.constraint is not None for request, chain in whole),
    )


def note_drafts(request: Request, queries: Sequence[Query], answers: Sequence[Answer], verdict: Verdict) -> None:
    """Count what became of each draft that was run: as forced, or as a guess that was taken so far."""
    for query, answer in zip(queries, answers, strict=True):
        draft = answer.draft
        if not draft.tokens:
            continue
        if is_forced(request, query.branch, draft):
            request.num_forced_tokens += len(draft.tokens)
        else:
            paths = [child.path for child in verdict.live if child.parent is query.branch]
            request.acceptance.note(query, draft, [len(path) for path in paths])
            if request.standing is not None:
                for path in paths:
                    request.standing.note(draft, path)
