"""Log-probabilities that a request reports: of the model's own logits, before anything is done to them.

They belong to a request and its history, not to a decoder: for every row that answers a decoder's asks, whatever it
asks for, the tokens that may come of it are reported as well, and kept under the tokens before them. What is accepted
then has its report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedec.core.constraint import closes
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.forward import LaneAnswers, LaneForward
from pagedec.core.history import History
from pagedec.core.protocol import Answer, Best, Hypothesis, RowBest, Sample, TopK, Verdict
from pagedec.errors import InvariantError

if TYPE_CHECKING:
    from pagedec.core.plan import Work
    from pagedec.core.protocol import Child
    from pagedec.core.request import Request


@dataclass(frozen=True, slots=True)
class Reporting:
    """What a request reports: of each generated token, and of each prompt token but the first, its own log-probability
    and rank and those of the most probable tokens, as many as are named here. None: no report; 0: the token's own
    only."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


NO_REPORTING = Reporting()


class TokenLogprobs(NamedTuple):
    """What is reported of one token. `rank` 1 is the most probable; equally probable tokens have the same rank.

    `top_ids` and `top_logprobs` are in descending order, ties to the lower id. Log-probabilities are fp32 values.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


FEWEST_EDGES = 256
"""So many a gang may always have."""


def edge_of(hypothesis: Hypothesis) -> int | None:
    """The edge of the token that an answer of a gang ends with; None: it ends with its tip."""
    return hypothesis.tip << 32 | hypothesis.tokens[0] if hypothesis.tokens else None


@dataclass(slots=True)
class Reports:
    """A request's reports so far."""

    reporting: Reporting
    prompt: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Of the first prompt tokens; the very first has no report."""
    edges: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of the tokens that came of a row: history node << 32 | the token behind it."""
    room: int = FEWEST_EDGES
    """A gang's `edges` are looked through when there are more."""
    num_coming: int = 0
    """The first prompt tokens whose reports are there when the steps that are out are settled; or fewer than there
    are."""

    @property
    def num_evaluated(self) -> int:
        """The first prompt tokens whose reports are there or on their way."""
        return max(len(self.prompt), self.num_coming)

    def forget(self, history: History, tips: Iterable[int], waiting: Iterable[Hypothesis]) -> None:
        """Keep only the edges that lead to `tips` and to `waiting`. It is done when there are twice as many as were
        kept the last time, so it costs a step no more the longer answers are."""
        kept: dict[int, TokenLogprobs] = {}
        seen: set[int] = set()
        nodes = [*tips]
        for hypothesis in waiting:
            nodes.append(hypothesis.tip)
            edge = edge_of(hypothesis)
            if edge is not None and edge in self.edges:
                kept[edge] = self.edges[edge]
        for node in nodes:
            while node and node not in seen:
                seen.add(node)
                parent = history.parent[node]
                edge = parent << 32 | history.token[node]
                if edge in self.edges:
                    kept[edge] = self.edges[edge]
                node = parent
        self.edges, self.room = kept, max(FEWEST_EDGES, 2 * len(kept))


class _Stand(NamedTuple):
    """A node of a branch's draft (0: the root) as the history has it, and the states there."""

    node: int
    tip: int
    stop_state: int
    constraint_state: Any

    def closes(self, request: Request, token: int) -> bool:
        """Whether the branch would end with `token`, which its constraint allows."""
        constraint = request.constraint
        if request.stopping.cut(self.stop_state, (token,)).reason is not None:
            return True
        return constraint is not None and closes(constraint, request.stopping.stops, self.constraint_state, token)


_Top = tuple[tuple[int, ...], tuple[float, ...]]
_Found = tuple[int, float, int]  # token id, log-probability, rank


class Recorder:
    """Reads one forward's reported rows."""

    __slots__ = ("_answers", "_ends", "_forward", "_report", "_tops")

    def __init__(self, forward: LaneForward, answers: LaneAnswers) -> None:
        assert forward.report is not None
        if answers.report is None:
            raise InvariantError("a forward's reported rows were not answered")
        self._forward, self._answers, self._report = forward, answers, answers.report
        self._ends: list[int] = forward.report.num_top.cumsum().tolist()
        self._tops: dict[int, _Top] = {}  # of the reported rows that were looked at

    def record(self, work: Work) -> None:
        """Keep the prompt tokens' reports, and those of all tokens that may follow the root."""
        reports, report = work.request.reports, work.report
        if reports is None or report is None:
            return
        if report.num_given:
            self._record_prompt(reports, work)
        if 0 in report.rows:
            self._record_node(reports, work, 0, work.branch.tip)

    def record_paths(self, works: Sequence[Work], answers: Sequence[Answer], verdict: Verdict) -> None:
        """Keep the reports of what follows the draft nodes that a verdict accepts."""
        reports = works[0].request.reports
        if reports is None:
            return
        history = works[0].request.history
        ran = {work.branch: (work, answer.draft) for work, answer in zip(works, answers, strict=True)}
        for child in verdict.live:
            if child.path and child.parent in ran:
                work, draft = ran[child.parent]
                self._record_path(reports, history, work, draft, child.path)
        for hypothesis in verdict.done:
            for work, draft in ran.values():
                if work.branch.tip == hypothesis.tip and draft.tokens:
                    self._record_path(reports, history, work, draft, _way(draft, hypothesis.tokens))

    def record_best(self, works: Sequence[Work], verdict: Verdict, drafts: Sequence[Draft] = ()) -> None:
        """Keep the reports of ranked candidates, those of `Best` and `RowBest`, that live on, are done, or wait: those
        may be done later. Nothing is kept of the others, nor of what a gang lives with no more. `drafts`: what was run
        behind each of `works`, () where nothing was; of its nodes those count that the history has, for then they lived
        on, if only to be displaced in the same step."""
        reports, asks = works[0].request.reports, () if works[0].query is None else works[0].query.asks
        if reports is None or reports.reporting.num_logprobs is None:
            return
        at = next((i for i, ask in enumerate(asks) if isinstance(ask, Best)), None)
        if at is None:
            if not any(True for work in works for _ in _ranked_alone(work)):
                return
            drafts = drafts or [EMPTY] * len(works)
        request, answers, tips = works[0].request, self._answers, [work.branch.tip for work in works]
        waiting = request.decoder.waiting()
        done = (*verdict.done, *(waiting or ()))
        taken = {edge for hypothesis in done if (edge := edge_of(hypothesis)) is not None}
        if verdict.children is not None:
            pairs = zip(verdict.children.parents.tolist(), verdict.children.tokens.tolist(), strict=True)
            taken |= {tips[parent] << 32 | token for parent, token in pairs}
        taken |= {tip << 32 | child.tokens[0] for tip, child in self._born(works, verdict, drafts) if child.tokens}
        ends = np.cumsum(answers.best_counts).tolist()
        for group in () if at is None else {work.asks[at].first for work in works}:
            first, stop = ends[group] - int(answers.best_counts[group]), ends[group]
            parents, tokens = answers.best_parents[first:stop].tolist(), answers.best_tokens[first:stop].tolist()
            for i, (parent, token) in enumerate(zip(parents, tokens, strict=True), first):
                work = works[parent]
                stand = _Stand(0, tips[parent], work.branch.stop_state, work.branch.constraint_state)
                self._record_candidate(reports, work, stand, token, i, taken, waiting is None)
        for work, draft in zip(works, drafts, strict=False):
            for node, group in _ranked_alone(work):
                behind = _stand(work, draft, node) if node or at is None else None
                if behind is None:  # or the root of one whose best are ranked together
                    continue
                first, stop = ends[group] - int(answers.best_counts[group]), ends[group]
                for i, token in enumerate(answers.best_tokens[first:stop].tolist(), first):
                    self._record_candidate(reports, work, behind, token, i, taken, waiting is None)

    def _born(self, works: Sequence[Work], verdict: Verdict, drafts: Sequence[Draft]) -> Iterator[tuple[int, Child]]:
        """The children of a verdict, each with the node that its own tokens stand behind."""
        draft_of = {work.branch: draft for work, draft in zip(works, drafts, strict=False)}
        for child in verdict.live:
            way = draft_of[child.parent].along(child.path) if child.path else ()
            yield works[0].request.history.append(child.parent.tip, way), child

    def _record_candidate(
        self,
        reports: Reports,
        work: Work,
        stand: _Stand,
        token: int,
        at: int,
        taken: Collection[int],
        may_wait: bool,
    ) -> None:
        """Keep the report of one of the best, if it is among those `taken`, lived on, or, where it may wait unknown to
        us, ends."""
        edge, request = stand.tip << 32 | token, work.request
        if edge not in taken and request.history.find(stand.tip, token) is None:
            if not may_wait or not stand.closes(request, token):
                return
        assert work.report is not None
        logprob, rank = float(self._report.best_logprobs[at]), int(self._report.best_ranks[at])
        if edge not in reports.edges:
            reports.edges[edge] = TokenLogprobs(token, logprob, rank, *self._top(work.report.rows[stand.node]))

    def _record_path(self, reports: Reports, history: History, work: Work, draft: Draft, path: Sequence[int]) -> None:
        tip = work.branch.tip
        for node, token in zip(path, draft.along(path), strict=True):
            tip = history.append_one(tip, token)
            if work.report is not None and node in work.report.rows:
                self._record_node(reports, work, node, tip)

    def _record_prompt(self, reports: Reports, work: Work) -> None:
        assert work.report is not None and self._forward.report is not None
        first, row, position = work.report.first_given, work.report.first_row, work.report.position
        tokens = self._forward.report.given_tokens[first : first + work.report.num_given].tolist()
        if work.request.scored_from is not None and position > work.request.scored_from:  # else they are the prompt's
            history = work.request.history
            tip = history.ancestor(work.branch.tip, position)
            for i, token in enumerate(tokens):
                logprob, rank = self._report.given_logprobs[first + i], self._report.given_ranks[first + i]
                entry = TokenLogprobs(token, float(logprob), int(rank), *self._top(row + i))
                reports.edges.setdefault(tip << 32 | token, entry)
                tip = history.append_one(tip, token)
            return
        for i, token in enumerate(tokens):
            if position + i > len(reports.prompt):
                raise InvariantError(f"prompt token {len(reports.prompt)} was evaluated without its report")
            if position + i == len(reports.prompt):
                logprob, rank = self._report.given_logprobs[first + i], self._report.given_ranks[first + i]
                reports.prompt.append(TokenLogprobs(token, float(logprob), int(rank), *self._top(row + i)))

    def _record_node(self, reports: Reports, work: Work, node: int, tip: int) -> None:
        assert work.report is not None
        top = None
        for token, logprob, rank in self._found(work, node):
            edge = tip << 32 | token
            known = reports.edges.get(edge)
            if known is None or not known.rank:  # what was told of an answer before it was resumed has no rank
                top = top or self._top(work.report.rows[node])
                reports.edges[edge] = TokenLogprobs(token, logprob, rank, *top)

    def _top(self, row: int) -> _Top:
        if row not in self._tops:
            part = slice(self._ends[row - 1] if row else 0, self._ends[row])
            ids, logprobs = self._report.top_ids[part].tolist(), self._report.top_logprobs[part].tolist()
            self._tops[row] = tuple(ids), tuple(logprobs)
        return self._tops[row]

    def _found(self, work: Work, node: int) -> Iterator[_Found]:
        """What the decoder was answered at a node."""
        answers, report = self._answers, self._report
        if work.query is None:
            yield _entry(answers.draws, report.draw_logprobs, report.draw_ranks, work.draw)
            return
        for ask, part in zip(work.query.asks, work.asks, strict=True):
            places = [node] if ask.nodes is None else _places(ask.nodes, node, work.draft.num_nodes)
            if isinstance(ask, Sample):
                for at in places:
                    for i in range(part.first + at * part.width, part.first + (at + 1) * part.width):
                        yield _entry(answers.draws, report.draw_logprobs, report.draw_ranks, i)
            elif isinstance(ask, TopK):
                for at in places:
                    i = part.first + at
                    ids, logprobs, ranks = answers.topk_tokens[i], report.topk_logprobs[i], report.topk_ranks[i]
                    yield from zip(ids[: ask.k].tolist(), logprobs.tolist(), ranks.tolist(), strict=False)
            elif not isinstance(ask, (Best, RowBest)):  # see record_best
                for at in places:
                    yield _entry(self._forward.logprob_tokens, answers.logprobs, report.logprob_ranks, part.first + at)


def forget_reports(request: Request, reports: Reports) -> None:
    """Of a gang that says what waits, forget the reports of all that nobody can come back to, where they are many."""
    if len(reports.edges) > reports.room and (waiting := request.decoder.waiting()) is not None:
        reports.forget(request.history, [branch.tip for branch in request.branches], (*waiting, *request.done))


def reported(history: History, reports: Reports, tip: int, tokens: Sequence[int]) -> list[TokenLogprobs | None]:
    """The reports of `tokens` behind `tip`; None for one that did not come of the model, as a client's."""
    found = []
    for token in tokens:
        found.append(reports.edges.get(tip << 32 | token))
        tip = history.append_one(tip, token)
    return found


def answer_reports(request: Request, hypothesis: Hypothesis) -> list[TokenLogprobs | None] | None:
    """The reports of a finished answer's tokens; None: the request has none."""
    if request.reports is None or request.reports.reporting.num_logprobs is None:
        return None
    history = request.history
    start = history.ancestor(hypothesis.tip, min(request.num_given(hypothesis), history.depth[hypothesis.tip]))
    return reported(history, request.reports, start, request.output(hypothesis))


def _ranked_alone(work: Work) -> Iterator[tuple[int, int]]:
    """The nodes of a work whose candidates are ranked by themselves, with the places of their groups."""
    for ask, part in zip(() if work.query is None else work.query.asks, work.asks, strict=True):
        if isinstance(ask, RowBest):
            run = [node for node in ask.nodes if node <= work.draft.num_nodes]
            yield from zip(run, range(part.first, part.first + part.num_nodes), strict=True)


def _stand(work: Work, draft: Draft, node: int) -> _Stand | None:
    """A node of a work's draft; None where the history does not have it."""
    request, branch = work.request, work.branch
    tip, stop_state, state = branch.tip, branch.stop_state, branch.constraint_state
    for token in draft.along(draft.path(node)):
        found = request.history.find(tip, token)
        if found is None:
            return None
        tip, stop_state = found, request.stopping.next(stop_state, token)
        state = None if request.constraint is None else request.constraint.next(state, token)
    return _Stand(node, tip, stop_state, state)


def _entry(tokens: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, i: int) -> _Found:
    return int(tokens[i]), float(logprobs[i]), int(ranks[i])


def _places(nodes: Sequence[int], node: int, last: int) -> list[int]:
    """Where `node` stands among those of the nodes that were run."""
    return [at for at, other in enumerate([other for other in nodes if other <= last]) if other == node]


def _way(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The nodes down a draft along `tokens`, as far as there are any."""
    way: list[int] = []
    for token in tokens:
        parent = way[-1] if way else 0
        children = [
            node for node, up in enumerate(draft.parents, 1) if up == parent and draft.tokens[node - 1] == token
        ]
        if not children:
            break
        way.append(children[0])
    return way
