"""From a step's answers to the next generations. Settling never fails but for what a decoder says, and that is its
request's alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pagedec.core.cached import note_cached, offer
from pagedec.core.check_values import check_rank
from pagedec.core.checks import DECODERS_CODE, check_told, check_verdict
from pagedec.core.children import Descent, as_objects, check_children, check_generation, is_plain
from pagedec.core.common import forget_sides, note_common
from pagedec.core.constraint import Forbidden
from pagedec.core.cutting import cause_of, feed
from pagedec.core.demand import Demand
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.forward import LaneAnswers, split_rolled
from pagedec.core.limits import SchedulerLimits
from pagedec.core.logprobs import Recorder, TokenLogprobs, forget_reports, reported
from pagedec.core.plan import StepPlan, Work
from pagedec.core.protocol import Answer, Child, Hypothesis, Query, Sample, Verdict
from pagedec.core.reading import candidates_of, read_answer
from pagedec.core.request import GONE, KNOWN, Branch, Event, Finished, Progress, Request, Settled
from pagedec.core.resuming import resumed
from pagedec.core.stopping import Cut
from pagedec.core.table import CopyPlan
from pagedec.core.transition import Heir, descend, transition
from pagedec.core.weighing import note_drafts
from pagedec.errors import InvalidArgument, PagedecError, RequestError, shown, told


class Settler:
    """Carries a step's answers into the requests. `copies` receives what the next step has to copy first, `events` what
    has happened, `demand` how long answers were."""

    __slots__ = (
        "_answers", "_candidates", "_copies", "_demand", "_draws", "_events", "_publishing", "_recorder", "_rolled",
        "_size", "_vocab_size", "current", "failed", "over",
    )  # fmt: skip

    def __init__(
        self,
        limits: SchedulerLimits,
        answers: Mapping[str, LaneAnswers],
        copies: Mapping[str, CopyPlan],
        demand: Demand,
        events: list[Event],
    ) -> None:
        self._answers, self._copies, self._demand, self._events = answers, copies, demand, events
        self._size, self._publishing = limits.block_size, limits.enable_prefix_caching
        self._vocab_size = limits.vocab_size
        self._draws: list[int] = answers["target"].draws.tolist() if "target" in answers else []
        self._candidates = candidates_of(answers["target"]) if "target" in answers else []
        self._rolled: Sequence[tuple[int, ...]] = ()
        self._recorder: Recorder | None = None
        self.current: Request | None = None
        """Whose answers are being carried in."""
        self.over: list[Request] = []
        """Requests of which no branch lives any more."""
        self.failed: dict[Request, RequestError] = {}
        """Requests whose decoders failed: of these nothing has changed."""

    def settle(self, plan: StepPlan) -> None:
        """Note what is cached now, publish it, then let every answered request go on."""
        works = [work for work in plan.works if work.lives]
        target, draft = plan.forwards.get("target"), plan.forwards.get("draft")
        if draft is not None and len(draft.rolls):
            self._rolled = split_rolled(draft, self._answers["draft"].rolled)
        if target is not None and target.report is not None:
            self._recorder = Recorder(target, self._answers["target"])
        for work in works:
            self.current = work.request
            if plan.is_foreseen:
                work.branch.awaits = KNOWN
            else:
                self._note_cached(work)
            if work.report is not None and self._recorder is not None:
                self._recorder.record(work)
        pool = self._copies["target"].pool
        for request, group in groupby(works, key=lambda work: work.request):
            self.current = request
            answered = [work for work in group if work.answers_something]
            if not answered or request in self.failed:  # works of one request may stand in two places
                continue
            try:
                if request.resume is not None:
                    self._go_on(request, answered)
                elif all(work.draw >= 0 for work in answered):
                    self._advance_plain(request, answered)
                else:
                    before = pool.num_forks
                    self._advance(request, answered)
                    request.num_forks += pool.num_forks - before
            except RequestError as error:
                self.failed[request] = error

    # ---- what is cached, and what of it can be found
    def _note_cached(self, work: Work) -> None:
        note_cached(work, self._publishing, self._rolled[work.roll] if work.roll >= 0 and self._rolled else ())

    def _publish_generation(self, request: Request) -> None:
        """Offer what the new branches have: of a gang only what all of them share, which cannot be displaced any
        more."""
        branches, size = request.branches, self._size
        if not self._publishing or not branches:
            return
        gang = request.decoder.gang
        if gang:
            note_common(request, size)
        for branch in branches:
            table = branch.tables["target"]
            settled = request.common_length if gang else table.length
            if min(table.length, settled) // size > table.published:
                offer(request, branch, settled)

    # ---- plain sampling: one token for each branch, and no verdict
    def _advance_plain(self, request: Request, works: Sequence[Work]) -> None:
        history, stopping, draws, events = request.history, request.stopping, self._draws, self._events
        depth, limit, state_of, reason_of = history.depth, request.limit, stopping.next, stopping.reason
        constraint = request.constraint
        simple = stopping.strings is None and request.reports is None and constraint is None
        can_ban_all = request.rules.can_ban_all
        over: dict[Branch, Hypothesis] = {}
        for work in works:
            branch, token = work.branch, draws[work.draw]
            tip, state = branch.tip, branch.stop_state
            rank = branch.state[0]
            if not simple or (token == 0 and can_ban_all):
                cut, after = feed(request, tip, state, branch.constraint_state, (token,), limit - depth[tip])
                if cut.tokens:
                    events.append(Progress(request, rank, cut.tokens, _logprobs(request, tip, cut.tokens)))
                if cut.reason is None:
                    branch.tip = history.append_one(tip, token)
                    branch.stop_state, branch.constraint_state = cut.state, after
                    continue
            elif depth[tip] >= limit:
                cut = Cut(state, (), "length")
            else:
                reason = reason_of(state, token)
                events.append(Progress(request, rank, (token,)))
                if reason is None:
                    branch.tip = history.append_one(tip, token)
                    branch.stop_state = state_of(state, token)
                    continue
                cut = Cut(state, (token,), reason, token if reason == "stop" else None)
            over[branch] = Hypothesis.ended(tip, cut, rank, branch.score, branch.prompt_length)
        if over:
            for branch in over:
                branch.awaits = GONE
            request.hold([*over.values()])
            for branch, hypothesis in over.items():
                branch.release()
                self._finish(request, hypothesis)
            request.branches = [branch for branch in request.branches if branch not in over]
            if not request.branches:
                self.over.append(request)

    # ---- any decoder
    def _advance(self, request: Request, works: Sequence[Work]) -> None:
        queries, answers = self._answer_all(request, works)
        try:
            verdict, outcome, evaluated = self._judged(request, works, queries, answers)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(request.id, _mistake(error)) from cause_of(error)
        if isinstance(outcome, Descent):
            request.hold(verdict.done)
            request.branches = descend(request.history, request.branches, *outcome)
            self._finish_generation(request, verdict, ())
        else:
            note_drafts(request, queries, answers, verdict)
            self._apply(request, evaluated, verdict, outcome)

    def _judged(
        self, request: Request, works: Sequence[Work], queries: Sequence[Query], answers: Sequence[Answer]
    ) -> tuple[Verdict, Descent | Generation, dict[Branch, Draft]]:
        """What the decoder says, what follows of it, and the draft that was run behind each branch. Changes nothing but
        reports."""
        with DECODERS_CODE:
            verdict = request.decoder.advance(queries, answers)
        if isinstance(verdict, Verdict) and verdict.children is not None:
            children = check_children(verdict, queries, request, self._vocab_size)
            if is_plain(request, works):
                descent = check_generation(request, works, verdict, children, self._vocab_size)
                if self._recorder is not None:
                    self._recorder.record_best(works, verdict)
                return verdict, descent, {}
            verdict = as_objects(verdict, children, queries)
        history, known, evaluated = request.history, request.settled_length, _drafts_of(queries, answers)
        check_verdict(
            history, request.branches, evaluated, verdict, self._vocab_size, request.decoder, known, request.limit
        )
        if self._recorder is not None:
            self._recorder.record_paths(works, answers, verdict)
            self._recorder.record_best(works, verdict, [answer.draft for answer in answers])
        return verdict, self._generation(request, evaluated, verdict, ranks_of(request, verdict)), evaluated

    def _answer_all(self, request: Request, works: Sequence[Work]) -> tuple[list[Query], list[Answer]]:
        queries, answers = [], []
        asks: object = None
        for work in works:
            if asks is not work.asks or not work.shares_answer:
                query, answer = self._answer(request, work)
                asks = work.asks
            else:
                assert work.query is not None
                query = work.query
            queries.append(query)
            answers.append(answer)
        return queries, answers

    def _answer(self, request: Request, work: Work) -> tuple[Query, Answer]:
        if work.query is not None:
            return work.query, read_answer(work, self._answers["target"], self._rolled, self._candidates)
        sampler = request.plain or request.decoder.resting_sampler
        assert sampler is not None
        query = Query(work.branch, (Sample(sampler, tuple(work.branch.state)),))
        return query, Answer(EMPTY, (self._answers["target"].draws[work.draw : work.draw + 1].reshape(1, 1),))

    def _go_on(self, request: Request, works: Sequence[Work]) -> None:
        """What was told of the request before it was interrupted stands behind its prompt."""
        [query], [answer] = self._answer_all(request, works)
        verdict, evaluated = resumed(request, query, answer), {query.branch: answer.draft}
        self._apply(
            request, evaluated, verdict, self._generation(request, evaluated, verdict, ranks_of(request, verdict))
        )

    def edit(self, request: Request, verdict: Verdict, ranks: Sequence[int]) -> None:
        """A generation in which nothing was evaluated: what it appends is the client's, and ends nothing."""
        self._apply(request, {}, verdict, self._generation(request, {}, verdict, ranks, given=True))

    def conclude(self, request: Request, answers: Sequence[Hypothesis]) -> None:
        """End a request with these answers, besides those that it has."""
        request.hold(answers)
        for branch in request.branches:
            branch.release()
        request.branches = []
        for hypothesis in answers:
            self._finish(request, hypothesis)
        self.over.append(request)

    def _apply(
        self, request: Request, evaluated: Mapping[Branch, Draft], verdict: Verdict, generation: Generation
    ) -> None:
        request.hold((*verdict.done, *generation.finished))
        request.branches = transition(
            request.history, request.branches, evaluated, generation.heirs, generation.dropped, self._copies
        )
        if any(heir.child.keep is not None for heir in generation.heirs):
            request.common_length = 0
            forget_sides(request)
        self._events += generation.progress
        self._finish_generation(request, verdict, generation.finished)

    def _finish_generation(self, request: Request, verdict: Verdict, finished: Sequence[Hypothesis]) -> None:
        self._publish_generation(request)
        if verdict.settled is not None and request.branches:
            self._tell_settled(request, verdict.settled)
        for hypothesis in (*verdict.done, *finished):
            self._finish(request, hypothesis)
        if not request.branches:
            self.over.append(request)
        elif request.decoder.gang and request.reports is not None:
            forget_reports(request, request.reports)

    def _tell_settled(self, request: Request, settled: int) -> None:
        history, tip = request.history, request.branches[0].tip
        known = request.settled_length
        if settled <= known:
            return
        request.settled_length = settled
        tokens = tuple(history.slice(tip, known, settled))
        logprobs = _logprobs(request, history.ancestor(tip, known), tokens)
        self._events.append(Settled(request, tokens, logprobs))

    def _generation(
        self,
        request: Request,
        evaluated: Mapping[Branch, Draft],
        verdict: Verdict,
        ranks: Sequence[int],
        given: bool = False,
    ) -> Generation:
        """What lives on of a verdict that was checked, without what follows a stop. `given`: its tokens are a
        client's."""
        history, stopping = request.history, request.stopping
        out = Generation([], [*verdict.drop], [], [])
        cut_off: list[Branch] = []
        tells = not (request.decoder.gang or request.decoder.revises)
        for child, rank in zip(verdict.live, ranks, strict=True):
            parent, state, given_length = child.parent, child.parent.stop_state, child.parent.given_length
            behind = parent.constraint_state
            at, length, tokens = parent.tip, history.depth[parent.tip], child.tokens
            if child.path:
                tokens = (*evaluated[parent].along(child.path), *tokens)
            if child.keep is not None:
                request.num_taken_back += max(0, length - child.keep)
                length, given_length = child.keep, min(given_length, child.keep)
                at = history.ancestor(parent.tip, length)
                state = stopping.replay(history.slice(parent.tip, given_length, length))
                behind = replayed(request, parent.tip, given_length, length)
            if given and tokens:
                cut, given_length = Cut(stopping.start, tokens), length + len(tokens)
                if request.constraint is not None:
                    behind = request.constraint.start([*history.slice(parent.tip, 0, length), *tokens])
            else:
                cut, behind = feed(request, at, state, behind, tokens, request.limit - length)
            if cut.tokens and tells and at == parent.tip:
                out.progress.append(_progress(request, child, rank, cut.tokens))
            if cut.reason is None:
                out.heirs.append(Heir(child, cut.state, given_length, behind))
                continue
            if request.decoder.gang:
                limit = f"must be in done: it has ended with {shown(cut.tokens)}, and a gang ends its branches itself"
                raise InvalidArgument("live", f"a child of rank {rank}", limit)
            score = parent.score if child.score is None else child.score
            prompt_length = min(parent.prompt_length, length)
            out.finished.append(Hypothesis.ended(at, cut, rank, score, prompt_length))
            cut_off.append(parent)
        if tells and not given:
            check_told(request, evaluated.keys(), verdict, ranks, out.finished)
        if cut_off:
            alive = {heir.child.parent for heir in out.heirs}
            out.dropped.extend(dict.fromkeys(branch for branch in cut_off if branch not in alive))
        return out

    def _finish(self, request: Request, hypothesis: Hypothesis) -> None:
        request.done.append(hypothesis)
        self._events.append(Finished(request, hypothesis))
        self._demand.note(len(request.output(hypothesis)), hypothesis.reason == "stop")


class Generation(NamedTuple):
    """What follows from a verdict: who lives on, who does not, which answers end, and what each child was given."""

    heirs: list[Heir]
    dropped: list[Branch]
    finished: list[Hypothesis]
    progress: list[Event]


def _mistake(error: Exception) -> str:
    """A decoder's, in words."""
    if isinstance(error, Forbidden):  # of `DecoderContext.ending`
        return str(error)
    return f"its decoder cannot advance: {error if isinstance(error, PagedecError) else told(error)}"


def replayed(request: Request, tip: int, given_length: int, length: int) -> Any:
    """The constraint's state behind the first `length` tokens of a sequence."""
    constraint, history = request.constraint, request.history
    if constraint is None:
        return None
    state = constraint.start(history.slice(tip, 0, given_length))
    for token in history.slice(tip, given_length, length):
        state = constraint.next(state, token)
    return state


def ranks_of(request: Request, verdict: Verdict) -> list[int]:
    """The rank of each child of a verdict that was checked. Raises what the decoder does, and `InvalidArgument` for
    what is no rank."""
    ranks = [request.decoder.rank(child.parent.state if child.state is None else child.state) for child in verdict.live]
    for i, rank in enumerate(ranks):
        check_rank(f"rank of live[{i}]", rank)
    return ranks


def _drafts_of(queries: Sequence[Query], answers: Sequence[Answer]) -> dict[Branch, Draft]:
    return {query.branch: answer.draft for query, answer in zip(queries, answers, strict=True)}


def _progress(request: Request, child: Child, rank: int, tokens: tuple[int, ...]) -> Progress:
    """What a child adds to the answer of its rank: where that answer was another's until now, all that it has."""
    history, tip, first = request.history, child.parent.tip, request.prompt_length
    length = history.depth[tip]
    if length > first and child.state is not None and request.decoder.rank(child.parent.state) != rank:
        tip, tokens = history.ancestor(tip, first), (*history.slice(tip, first, length), *tokens)
    return Progress(request, rank, tokens, _logprobs(request, tip, tokens))


def _logprobs(request: Request, tip: int, tokens: Sequence[int]) -> tuple[TokenLogprobs | None, ...] | None:
    reports = request.reports
    if reports is None or reports.reporting.num_logprobs is None:
        return None
    return tuple(reported(request.history, reports, tip, tokens))
