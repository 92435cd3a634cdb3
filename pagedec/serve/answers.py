"""From outputs to messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pagedec.llm.readers import MANY_REPORTED
from pagedec.messages import REASONS, TIME_LIMIT, as_duration
from pagedec.outputs import (
    BranchBlocks,
    BranchState,
    CompletionOutput,
    ContinuationScore,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pagedec.params import RequestOutputKind, RequestParams, SamplingParams
from pagedec.tree import AnswerTree
from pagedec.v1 import answer_pb2, generation_service_pb2, session_service_pb2

Tables = Sequence[Mapping[int, Logprob] | None] | None
M = TypeVar("M")


class Events(Generic[M]):
    """One request's outputs as a stream's messages: each output what has come since the one before (`DELTA`), or a
    single one with all of it (`FINAL_ONLY`)."""

    def __init__(self, params: RequestParams, kind: Callable[[], M]) -> None:
        """`kind`: of messages, which have the fields of a `GenerateStreamResponse`."""
        self._kind = kind
        self._is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._may_be_common = not isinstance(params, SamplingParams) and params.num_answers > 1
        self._num_answers = params.num_answers
        self._is_first = True
        self._told: set[int] = set()  # answers whose end was told of

    async def message(self, output: RequestOutput, text: str = "") -> M:
        """The next message, made in a thread where it is large. `text`: what a conversation became."""
        if is_large(output):
            return await asyncio.to_thread(self._message, output, text)
        return self._message(output, text)

    def _message(self, output: RequestOutput, text: str) -> M:
        message = self._kind()
        made: Any = message
        if self._is_first:
            self._is_first = False
            made.request_id = output.request_id
            made.prompt.CopyFrom(prompt_info(output, text))
        if not output.finished and self._are_common(output.outputs):
            if output.outputs[0].token_ids or output.outputs[0].text:
                _write_delta(made.deltas.add(all_answers=True), output.outputs[0])
            return message
        for answer in output.outputs:
            if not self._is_whole and (answer.token_ids or answer.text):
                _write_delta(made.deltas.add(index=answer.index), answer)
            if answer.finish_reason is not None and answer.index not in self._told:
                self._told.add(answer.index)
                made.finished.append(as_answer(answer, is_told=not self._is_whole))
        if output.finished:
            made.prompt_logprobs.extend(as_logprobs(output.prompt_logprobs))
            made.usage.CopyFrom(as_usage(output.metrics))
        return message

    def _are_common(self, answers: Sequence[CompletionOutput]) -> bool:
        """All answers that can still come go on with the same."""
        if not self._may_be_common or len(answers) != self._num_answers:
            return False
        first = answers[0]
        return all(answer.token_ids == first.token_ids and answer.text == first.text for answer in answers)


def is_large(output: RequestOutput) -> bool:
    """It has so many log-probabilities that an event loop should not wait for its message."""
    tables = itertools.chain(output.prompt_logprobs or (), *(answer.logprobs or () for answer in output.outputs))
    return sum(len(table) for table in tables if table is not None) > MANY_REPORTED


def as_response(output: RequestOutput, text: str = "") -> generation_service_pb2.GenerateResponse:
    """A finished output as one message. `text`: what a conversation became."""
    return generation_service_pb2.GenerateResponse(
        request_id=output.request_id,
        answers=[as_answer(answer) for answer in output.outputs],
        prompt=prompt_info(output, text),
        prompt_logprobs=as_logprobs(output.prompt_logprobs),
        usage=as_usage(output.metrics),
    )


def prompt_info(output: RequestOutput, text: str = "") -> answer_pb2.PromptInfo:
    """What was read."""
    return answer_pb2.PromptInfo(
        num_tokens=len(output.prompt_token_ids),
        token_ids=output.prompt_token_ids,
        text=text,
        block_size=output.block_size or 0,
    )


def as_answer(answer: CompletionOutput, is_told: bool = False) -> answer_pb2.Answer:
    """One answer. `is_told`: deltas have told its text, tokens and reports."""
    made = answer_pb2.Answer(
        index=answer.index,
        text="" if is_told else answer.text,
        token_ids=() if is_told else answer.token_ids,
        cumulative_logprob=answer.cumulative_logprob,
        logprobs=() if is_told else as_logprobs(answer.logprobs),
        score=answer.score,
        ancestry=answer.ancestry or (),
        item_id=answer.item_id,
    )
    if answer.finish_reason is not None:
        made.finish.CopyFrom(_finish(answer))
    return made


def as_usage(metrics: RequestMetrics | None) -> answer_pb2.Usage:
    """What a request cost; nothing is known of one that was aborted."""
    if metrics is None:
        return answer_pb2.Usage()
    made = answer_pb2.Usage(
        prompt_tokens=metrics.num_prompt_tokens,
        cached_tokens=metrics.num_cached_tokens,
        completion_tokens=metrics.num_output_tokens,
        draft_tokens=metrics.num_draft_tokens,
        accepted_tokens=metrics.num_accepted_tokens,
        preemptions=metrics.num_preemptions,
        released_branches=metrics.num_released_branches,
    )
    if metrics.time_to_first_token is not None:
        made.time_to_first_token.CopyFrom(as_duration(metrics.time_to_first_token))
    if metrics.latency is not None:
        made.latency.CopyFrom(as_duration(metrics.latency))
    return made


def as_logprobs(tables: Tables) -> list[answer_pb2.Logprobs]:
    """A report for each place, empty where there is none."""
    return [_report(table) for table in tables or ()]


def _report(table: Mapping[int, Logprob] | None) -> answer_pb2.Logprobs:
    made = answer_pb2.Logprobs()
    entries = sorted((table or {}).items(), key=lambda entry: entry[1].rank or 1 << 31)
    for token_id, entry in entries:
        made.candidates.add(token_id=token_id, logprob=entry.logprob, rank=entry.rank or 0, text=entry.decoded_token)
    return made


def _write_delta(made: answer_pb2.Delta, answer: CompletionOutput) -> None:
    made.text = answer.text
    made.token_ids.extend(answer.token_ids)
    if answer.logprobs:
        made.logprobs.extend(as_logprobs(answer.logprobs))


def _finish(answer: CompletionOutput) -> answer_pb2.Finish:
    is_limited = answer.limited_by == TIME_LIMIT
    reason = answer_pb2.FINISH_REASON_TIME_LIMIT if is_limited else REASONS[answer.finish_reason]
    made = answer_pb2.Finish(reason=reason, limited_by="" if is_limited else answer.limited_by or "")
    if isinstance(answer.stop_reason, int):
        made.stop_token_id = answer.stop_reason
    elif answer.stop_reason is not None:
        made.stop_text = answer.stop_reason
    return made


def as_branch(name: str, blocks: BranchBlocks, room: int) -> session_service_pb2.Branch:
    """Where a branch stands."""
    return session_service_pb2.Branch(
        name=name,
        num_tokens=blocks.num_tokens,
        num_blocks=blocks.num_blocks,
        num_shared_blocks=blocks.num_shared_blocks,
        room=room,
    )


def as_state(
    stands: session_service_pb2.Branch, state: BranchState, has_logprobs: bool
) -> session_service_pb2.GetBranchResponse:
    """A branch with its text and tokens, and their reports where these are asked for."""
    stands.num_tokens = len(state.token_ids)
    return session_service_pb2.GetBranchResponse(
        branch=stands,
        text=state.text,
        token_ids=state.token_ids,
        logprobs=as_logprobs(state.logprobs) if has_logprobs else (),
        mark=session_service_pb2.Mark(num_tokens=state.mark.num_tokens, digest=state.mark.digest),
    )


def as_score(score: ContinuationScore) -> session_service_pb2.ContinuationScore:
    """What the model says of one continuation."""
    return session_service_pb2.ContinuationScore(
        logprob=score.logprob, token_ids=score.token_ids, logprobs=as_logprobs(score.logprobs)
    )


def as_nodes(tree: AnswerTree) -> list[session_service_pb2.TreeNode]:
    """A tree's nodes, each before those below it."""
    nodes = list(tree.nodes())
    places = {id(node): place for place, node in enumerate(nodes)}
    parents = {id(child): places[id(node)] for node in nodes for child in node.children}
    return [
        session_service_pb2.TreeNode(
            parent=parents.get(id(node), 0),
            token_ids=node.token_ids,
            text=node.text,
            ended=node.ended,
            cumulative_logprob=node.cumulative_logprob,
            first_block=node.blocks.start,
            num_blocks=len(node.blocks),
        )
        for node in nodes
    ]
