"""From a step's answers to the next generations. Settling never fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from pagedec.core.branch import Branch
from pagedec.core.copies import CopyPlan
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.layout import read_answer
from pagedec.core.plan import StepPlan, Work
from pagedec.core.protocol import Answer, Child, Hypothesis, LaneAnswers, Query, Sample, Verdict
from pagedec.core.recording import Recorder, reported
from pagedec.core.reporting import TokenLogprobs
from pagedec.core.request import Event, Finished, Progress, Request
from pagedec.core.stopping import Cut
from pagedec.core.table import BlockTable
from pagedec.core.transition import transition, validate
from pagedec.errors import RequestError


class Settler:
    """Carries a step's answers into the requests. `copies` receives what the next step has to copy first."""

    __slots__ = ("_answers", "_copies", "_draws", "_publishing", "_recorder", "_rolled", "_size")

    def __init__(
        self, answers: Mapping[str, LaneAnswers], copies: Mapping[str, CopyPlan], block_size: int, publishing: bool
    ) -> None:
        self._answers, self._copies, self._size, self._publishing = answers, copies, block_size, publishing
        self._draws: list[int] = answers["target"].draws.tolist() if "target" in answers else []
        self._rolled: Sequence[tuple[int, ...]] = answers["draft"].rolled if "draft" in answers else ()
        self._recorder: Recorder | None = None

    def settle(self, plan: StepPlan) -> list[Event]:
        """Note what is cached now, publish it, then let every answered request go on."""
        works = [work for work in plan.works if not work.request.closed]
        target = plan.forwards.get("target")
        if target is not None and target.report is not None:
            self._recorder = Recorder(target, self._answers["target"])
        for work in works:
            self._note_cached(work)
            if work.report is not None and self._recorder is not None:
                self._recorder.record(work)
        events: list[Event] = []
        for request, group in groupby(works, key=_request_of):
            answered = [work for work in group if work.draw >= 0 or work.query is not None]
            if not answered:
                continue
            if any(work.draw < 0 for work in answered):
                self._advance(request, answered, events)
            else:
                self._advance_plain(request, answered, events)
        return events

    # ---- what is cached, and what of it can be found
    def _note_cached(self, work: Work) -> None:
        table, length = work.table, work.start + work.num_tokens
        table.length = length
        if table.pool.lane == "draft":
            tail = self._rolled[work.roll][:-1] if work.roll >= 0 else ()  # the last rolled token was not evaluated
            table.truncate(length, tuple(tail))
        elif length // self._size > table.published and self._publishing:
            request = work.request  # before the transition, or a finished request would leave nothing
            settled = _common_length(request, request.branches) if request.decoder.gang else length
            self._publish(request, work.branch, settled)

    def _publish(self, request: Request, branch: Branch, settled: int) -> None:
        """Offer full blocks of accepted tokens to the prefix cache."""
        table: BlockTable = branch.tables["target"]
        last = min(table.length, settled) // self._size
        if last > table.published:
            blocks = table.blocks()
            for number in range(table.published, last):
                table.pool.publish(blocks[number], request.history.block_key(branch.tip, (number + 1) * self._size))
            table.published = last

    def _publish_generation(self, request: Request) -> None:
        if not self._publishing or not request.branches:
            return
        branches = request.branches
        if request.decoder.gang:  # what all live beams share cannot be displaced any more
            if all(branch.table.length // self._size <= branch.table.published for branch in branches):
                return
            settled = _common_length(request, branches)
            for branch in branches:
                self._publish(request, branch, settled)
        else:
            for branch in branches:
                if branch.table.length // self._size > branch.table.published:
                    self._publish(request, branch, branch.table.length)

    # ---- plain sampling: one token for each branch, and no verdict
    def _advance_plain(self, request: Request, works: Sequence[Work], events: list[Event]) -> None:
        history, stopping, draws = request.history, request.stopping, self._draws
        depth, limit, state_of, reason_of = history.depth, request.limit, stopping.next, stopping.reason
        simple = stopping.strings is None and request.reports is None
        over: dict[Branch, Hypothesis] = {}
        for work in works:
            branch, token = work.branch, draws[work.draw]
            tip, state = branch.tip, branch.stop_state
            rank = branch.state[0]
            if not simple:
                cut = stopping.cut(state, (token,), limit - depth[tip])
                if cut.tokens:
                    events.append(Progress(request, rank, cut.tokens, _logprobs(request, tip, cut.tokens)))
                if cut.reason is None:
                    branch.tip = history.append_one(tip, token)
                    branch.stop_state = cut.state
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
            over[branch] = _hypothesis(tip, cut, rank, branch.score)
        if over:
            for branch, hypothesis in over.items():
                branch.release()
                self._finish(request, hypothesis, events)
            request.branches = [branch for branch in request.branches if branch not in over]

    # ---- any decoder
    def _advance(self, request: Request, works: Sequence[Work], events: list[Event]) -> None:
        queries, answers = [], []
        for work in works:
            query, answer = self._answer(request, work)
            queries.append(query)
            answers.append(answer)
            request.num_drafted_tokens += len(answer.draft.tokens)
        evaluated = {query.branch: answer.draft for query, answer in zip(queries, answers, strict=True)}
        try:
            verdict = request.decoder.advance(queries, answers)
            validate(request.history, request.branches, evaluated, verdict)
        except Exception as error:
            raise RequestError(request.id, f"its decoder cannot advance: {error!r}") from error
        request.num_accepted_tokens += sum(len(child.path) for child in verdict.live)
        if self._recorder is not None:
            self._recorder.record_paths(works, answers, verdict)
        self.apply(request, evaluated, verdict, events)

    def _answer(self, request: Request, work: Work) -> tuple[Query, Answer]:
        if work.query is not None:
            return work.query, read_answer(work, self._answers["target"], self._rolled)
        assert request.plain is not None
        query = Query(work.branch, (Sample(request.plain, tuple(work.branch.state)),))
        return query, Answer(EMPTY, (self._answers["target"].draws[work.draw : work.draw + 1].reshape(1, 1),))

    def apply(self, request: Request, evaluated: Mapping[Branch, Draft], verdict: Verdict, events: list[Event]) -> None:
        """The next generation of a request, with everything behind a stop cut off."""
        kept, finished, progress = self._cut(request, evaluated, verdict)
        request.branches = transition(request.history, request.branches, evaluated, kept, self._copies)
        self._publish_generation(request)
        if not request.decoder.gang:
            events += progress
        for hypothesis in (*kept.done, *finished):
            self._finish(request, hypothesis, events)

    def _cut(
        self, request: Request, evaluated: Mapping[Branch, Draft], verdict: Verdict
    ) -> tuple[Verdict, list[Hypothesis], list[Event]]:
        """The verdict without what follows a stop; the answers that end there; the tokens each child was given."""
        history, stopping = request.history, request.stopping
        live: list[Child] = []
        finished: list[Hypothesis] = []
        progress: list[Event] = []
        for child in verdict.live:
            parent, state = child.parent, child.parent.stop_state
            tokens = child.tokens
            if child.path and parent in evaluated:
                drafted = evaluated[parent].tokens
                tokens = (*[drafted[node - 1] for node in child.path if 0 < node <= len(drafted)], *tokens)
            length = history.depth[parent.tip]
            if child.keep is not None:
                length = min(length, child.keep)
                first = min(length, parent.prompt_length)
                state = stopping.replay(history.slice(parent.tip, first, length))
            cut = stopping.cut(state, tokens, request.limit - length)
            rank = request.decoder.rank(parent.state if child.state is None else child.state)
            if cut.tokens and child.keep is None:
                progress.append(Progress(request, rank, cut.tokens, _logprobs(request, parent.tip, cut.tokens)))
            if cut.reason is None:
                live.append(
                    Child(parent, child.tokens, child.path, child.keep, child.score, child.state, cut.state)
                    if tokens or child.keep is not None
                    else child
                )
            else:
                tip = parent.tip if child.keep is None else history.ancestor(parent.tip, length)
                finished.append(_hypothesis(tip, cut, rank, parent.score if child.score is None else child.score))
        return Verdict(tuple(live), verdict.done, verdict.drop), finished, progress

    def _finish(self, request: Request, hypothesis: Hypothesis, events: list[Event]) -> None:
        request.done.append(hypothesis)
        events.append(Finished(request, hypothesis))


def _request_of(work: Work) -> Request:
    return work.request


def _logprobs(request: Request, tip: int, tokens: Sequence[int]) -> tuple[TokenLogprobs | None, ...] | None:
    reports = request.reports
    if reports is None or reports.reporting.num_logprobs is None:
        return None
    return tuple(reported(request.history, reports, tip, tokens))


def _hypothesis(tip: int, cut: Cut, rank: int, score: float) -> Hypothesis:
    reason = cut.reason or "stop"
    return Hypothesis(tip, cut.tokens, rank, score, reason, cut.stop_token, cut.stop_string, cut.excess_bytes)


def _common_length(request: Request, branches: Sequence[Branch]) -> int:
    first = branches[0].tip
    return min(request.history.common_length(first, branch.tip) for branch in branches)
