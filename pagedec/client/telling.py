"""From messages to outputs, the same ones as without a server between."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagedec.messages import REASONS, TIME_LIMIT
from pagedec.outputs import (
    BranchBlocks,
    BranchState,
    CompletionOutput,
    ContinuationScore,
    Logprob,
    Mark,
    RequestMetrics,
    RequestOutput,
    SessionBlocks,
    SessionState,
)
from pagedec.params import BeamSearchParams, RequestOutputKind, RequestParams
from pagedec.tree import AnswerTree, TreeNode
from pagedec.v1 import answer_pb2, session_service_pb2

LOG = logging.getLogger("pagedec.client")
FINISH = {number: reason for reason, number in REASONS.items()}


@dataclass(slots=True)
class Growing:
    """One request's outputs, as its messages come."""

    params: RequestParams
    text: str | None
    """The prompt's, where it is known here."""
    request_id: str = ""
    prompt: answer_pb2.PromptInfo = field(default_factory=answer_pb2.PromptInfo)
    answers: dict[int, CompletionOutput] = field(default_factory=dict)
    resume: Any = None
    """What the stream began with, for going on; None: nothing has come, or its server knows of no such thing."""
    began: float = field(default_factory=time.monotonic)

    def whole(self, response: Any, answers: Sequence[answer_pb2.Answer]) -> RequestOutput:
        """The output of a request that was answered at once."""
        self._begin(response)
        return self._output([self._answer(answer) for answer in answers], response)

    def push(self, message: Any) -> RequestOutput | None:
        """The output that a stream's next message makes, of the kind that was asked for; None: it makes none."""
        goes_on = self.resume is not None
        if message.HasField("prompt"):
            self._begin(message)
        parts: dict[int, CompletionOutput] = {}
        for delta in message.deltas:
            for index in range(self.params.num_answers) if delta.all_answers else (delta.index,):
                parts[index] = self._grow(index, delta)
        for answer in message.finished:
            if goes_on and self._has_ended(answer.index):
                continue  # it was told before
            parts[answer.index] = self._end(answer, parts.get(answer.index))
        is_last, kind = message.HasField("usage"), self.params.output_kind
        if is_last:  # of beams, fewer may have come than were asked for
            self.answers = {index: whole for index, whole in self.answers.items() if self._has_ended(index)}
        if not is_last and (kind is RequestOutputKind.FINAL_ONLY or (goes_on and not parts)):
            return None
        if kind is not RequestOutputKind.DELTA:
            shown = self.answers
        elif is_last:
            shown = {index: parts.get(index, self._rest(whole)) for index, whole in self.answers.items()}
        else:
            shown = parts
        return self._output([shown[index] for index in sorted(shown)], message if is_last else None)

    # ---- streams that are interrupted
    @property
    def num_tokens(self) -> int:
        """How many were told, over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def so_far(self) -> RequestOutput:
        """All that was told."""
        return self._output([self.answers[index] for index in sorted(self.answers)], None)

    def request_again(self, request: Any) -> Any:
        """The same request, to go on behind what was told; None: it cannot."""
        if self.resume is None:
            return None
        made = type(request)()
        made.CopyFrom(request)
        made.resume.CopyFrom(self.resume)
        for index in range(self.params.num_answers):
            answer = self.answers.get(index) or CompletionOutput(index, "", [])
            pairs = zip(answer.token_ids, answer.logprobs or (), strict=False)
            logprobs = [table[token].logprob if table else 0.0 for token, table in pairs]
            made.resume.answers.add(
                token_ids=answer.token_ids, num_characters=len(answer.text), logprobs=logprobs if self._reports else ()
            )
        limit = made.parameters.stopping.time_limit
        if made.parameters.stopping.HasField("time_limit"):
            limit.FromNanoseconds(max(1, limit.ToNanoseconds() - round((time.monotonic() - self.began) * 1e9)))
        return made

    # ---- inside
    def _begin(self, message: Any) -> None:
        self.request_id = message.request_id
        self.prompt.CopyFrom(message.prompt)
        if "resume" in message.DESCRIPTOR.fields_by_name and message.HasField("resume"):
            if self.resume is not None and self.resume.fingerprint != message.resume.fingerprint:
                LOG.warning("request %s goes on where numbers have other bits than where it began", self.request_id)
            self.resume = message.resume

    def _has_ended(self, index: int) -> bool:
        answer = self.answers.get(index)
        return answer is not None and answer.finish_reason is not None

    def _grow(self, index: int, delta: answer_pb2.Delta) -> CompletionOutput:
        last = self.answers.get(index) or CompletionOutput(index, "", [])
        tokens, tables, total = list(delta.token_ids), as_tables(delta.logprobs), last.cumulative_logprob
        if tables:
            total = (total or 0.0) + sum(table[t].logprob for t, table in zip(tokens, tables, strict=True) if table)
        known = [*(last.logprobs or ()), *tables] if tables else last.logprobs
        whole = CompletionOutput(index, last.text + delta.text, [*last.token_ids, *tokens], total, known)
        self.answers[index] = whole
        return replace(whole, text=delta.text, token_ids=tokens, logprobs=tables if self._reports else None)

    def _end(self, answer: answer_pb2.Answer, part: CompletionOutput | None) -> CompletionOutput:
        last = self.answers.get(answer.index) or CompletionOutput(answer.index, "", [])
        part = part or self._rest(last)
        tables = (last.logprobs or []) if self._reports else None
        whole = replace(self._answer(answer), text=last.text, token_ids=last.token_ids, logprobs=tables)
        self.answers[answer.index] = whole
        return replace(whole, text=part.text, token_ids=part.token_ids, logprobs=part.logprobs)

    def _rest(self, whole: CompletionOutput) -> CompletionOutput:
        return replace(whole, text="", token_ids=[], logprobs=[] if self._reports else None)

    @property
    def _reports(self) -> bool:
        return self.params.logprobs is not None

    def _answer(self, answer: answer_pb2.Answer) -> CompletionOutput:
        finish = answer.finish
        is_late = finish.reason == answer_pb2.FINISH_REASON_TIME_LIMIT
        stop = finish.WhichOneof("stop")
        is_beam = isinstance(self.params, BeamSearchParams)
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            cumulative_logprob=answer.cumulative_logprob if answer.HasField("cumulative_logprob") else None,
            logprobs=as_tables(answer.logprobs) if self._reports else None,
            finish_reason="length" if is_late else FINISH[finish.reason],
            stop_reason=None if stop is None else getattr(finish, stop),
            limited_by=TIME_LIMIT if is_late else finish.limited_by or None,
            score=answer.score if answer.HasField("score") else None,
            ancestry=list(answer.ancestry) if is_beam or answer.ancestry else None,
            item_id=answer.item_id if answer.HasField("item_id") else None,
        )

    def _output(self, answers: list[CompletionOutput], last: Any) -> RequestOutput:
        """`last`: the message that ends it, if this is the last output."""
        has_reports = last is not None and self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text if self.text is not None else self.prompt.text or None,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=answers,
            finished=last is not None,
            metrics=as_metrics(last.usage) if last is not None and last.usage.HasField("latency") else None,
            prompt_logprobs=as_tables(last.prompt_logprobs) if has_reports else None,
            block_size=self.prompt.block_size or None,
        )


def as_metrics(usage: answer_pb2.Usage) -> RequestMetrics:
    """What a request cost; its times are counted from its arrival at the server."""
    first = usage.time_to_first_token
    return RequestMetrics(
        arrival_time=0.0,
        first_token_time=first.ToNanoseconds() / 1e9 if usage.HasField("time_to_first_token") else None,
        finished_time=usage.latency.ToNanoseconds() / 1e9,
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens,
        num_cached_tokens=usage.cached_tokens,
        num_preemptions=usage.preemptions,
        num_released_branches=usage.released_branches,
        num_draft_tokens=usage.draft_tokens,
        num_accepted_tokens=usage.accepted_tokens,
    )


def as_tables(reports: Sequence[answer_pb2.Logprobs]) -> list[dict[int, Logprob] | None]:
    """A table for each place, None where nothing is reported."""
    return [_table(report) or None for report in reports]


def as_score(score: session_service_pb2.ContinuationScore, text: str | None) -> ContinuationScore:
    """What a model says of one continuation."""
    tables = [_table(report) for report in score.logprobs]
    return ContinuationScore(text, list(score.token_ids), score.logprob, tables)


def as_state(state: session_service_pb2.GetBranchResponse) -> BranchState:
    """A branch at one moment."""
    mark = Mark(state.mark.num_tokens, state.mark.digest)
    return BranchState(state.text, list(state.token_ids), as_tables(state.logprobs), mark)


def as_blocks(told: session_service_pb2.GetSessionResponse) -> SessionBlocks:
    """What branches hold."""
    each = [BranchBlocks(branch.num_tokens, branch.num_blocks, branch.num_shared_blocks) for branch in told.branches]
    return SessionBlocks(each, told.num_blocks)


def as_session(session: session_service_pb2.Session) -> SessionState:
    """A session that was used just now."""
    return SessionState(session.num_branches, session.num_tokens, session.ttl.ToNanoseconds() / 1e9)


def as_tree(told: session_service_pb2.GetTreeResponse) -> AnswerTree:
    """The tree that a server has made."""
    tokens: list[list[int]] = []
    texts: list[str] = []
    outputs: dict[int, CompletionOutput] = {}
    nodes: list[TreeNode] = []
    for place, node in enumerate(told.nodes):
        is_root = place == 0
        own = [] if is_root else [*tokens[node.parent], *node.token_ids]
        tokens.append(own)
        texts.append("" if is_root else texts[node.parent] + node.text)
        logprob = node.cumulative_logprob if node.HasField("cumulative_logprob") else None
        blocks = range(node.first_block, node.first_block + node.num_blocks)
        start = 0 if is_root else nodes[node.parent].end
        made = TreeNode(tuple(node.token_ids), node.text, start, (), tuple(node.ended), logprob, blocks)
        nodes.append(made)
        if not is_root:
            nodes[node.parent].children.append(made)
        for answer in node.ended:
            outputs[answer] = CompletionOutput(answer, texts[place], own)
    for node_of in reversed(nodes):
        below = [answer for child in node_of.children for answer in child.answers]
        node_of.answers = tuple(sorted([*node_of.ended, *below]))
    has_text = any(node.text for node in told.nodes)
    answers, names = [outputs[i] for i in sorted(outputs)], [branch.name for branch in told.branches]
    return AnswerTree.of(nodes[0], answers, told.block_size or None, has_text, names)


def _table(report: answer_pb2.Logprobs) -> dict[int, Logprob]:
    return {
        entry.token_id: Logprob(entry.logprob, entry.rank or None, entry.text if entry.HasField("text") else None)
        for entry in report.candidates
    }
