"""From outputs to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedec.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedec.params import RequestParams, SamplingParams
from pagedec.serve.statuses import as_duration
from pagedec.v1 import answer_pb2, generation_service_pb2

REASONS = {
    None: answer_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": answer_pb2.FINISH_REASON_STOP,
    "length": answer_pb2.FINISH_REASON_LENGTH,
    "abort": answer_pb2.FINISH_REASON_ABORTED,
}
TIME_LIMIT = "max_time"
Tables = Sequence[Mapping[int, Logprob] | None] | None


class Events:
    """One request's outputs, each what has come since the one before (`DELTA`), as a stream's messages."""

    def __init__(self, params: RequestParams) -> None:
        self._may_be_common = not isinstance(params, SamplingParams) and params.num_answers > 1
        self._num_answers = params.num_answers
        self._is_first = True
        self._told: set[int] = set()  # answers whose end was told of

    def message(self, output: RequestOutput) -> generation_service_pb2.GenerateStreamResponse:
        """The next message."""
        made = generation_service_pb2.GenerateStreamResponse()
        if self._is_first:
            self._is_first = False
            made.request_id = output.request_id
            made.prompt.CopyFrom(prompt_info(output))
        if not output.finished and self._are_common(output.outputs):
            _write_delta(made.deltas.add(all_answers=True), output.outputs[0])
            return made
        for answer in output.outputs:
            if answer.token_ids or answer.text:
                _write_delta(made.deltas.add(index=answer.index), answer)
            if answer.finish_reason is not None and answer.index not in self._told:
                self._told.add(answer.index)
                made.finished.append(as_answer(answer, is_told=True))
        if output.finished:
            made.prompt_logprobs.extend(as_logprobs(output.prompt_logprobs))
            if output.metrics is not None:
                made.usage.CopyFrom(as_usage(output.metrics))
        return made

    def _are_common(self, answers: Sequence[CompletionOutput]) -> bool:
        """All answers that can still come go on with the same."""
        if not self._may_be_common or len(answers) != self._num_answers:
            return False
        first = answers[0]
        return all(answer.token_ids == first.token_ids and answer.text == first.text for answer in answers)


def as_response(output: RequestOutput) -> generation_service_pb2.GenerateResponse:
    """A finished output as one message."""
    return generation_service_pb2.GenerateResponse(
        request_id=output.request_id,
        answers=[as_answer(answer) for answer in output.outputs],
        prompt=prompt_info(output),
        prompt_logprobs=as_logprobs(output.prompt_logprobs),
        usage=None if output.metrics is None else as_usage(output.metrics),
    )


def prompt_info(output: RequestOutput) -> answer_pb2.PromptInfo:
    """What was read."""
    return answer_pb2.PromptInfo(num_tokens=len(output.prompt_token_ids), token_ids=output.prompt_token_ids)


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


def as_usage(metrics: RequestMetrics) -> answer_pb2.Usage:
    """What a request cost."""
    made = answer_pb2.Usage(
        prompt_tokens=metrics.num_prompt_tokens,
        cached_tokens=metrics.num_cached_tokens,
        completion_tokens=metrics.num_output_tokens,
        draft_tokens=metrics.num_draft_tokens,
        accepted_tokens=metrics.num_accepted_tokens,
        preemptions=metrics.num_preemptions,
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
        made.candidates.add(
            token_id=token_id, logprob=entry.logprob, rank=entry.rank or 0, text=entry.decoded_token or ""
        )
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
