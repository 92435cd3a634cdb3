"""From what the engine answers, tokens and their reports, to what people read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.resuming import Resume
from pagedec.engine.completion import Completion
from pagedec.engine.engine import FinishedRequest
from pagedec.errors import InvalidArgument
from pagedec.llm.prompts import Job
from pagedec.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Spell
from pagedec.params import RequestParams
from pagedec.text.streaming import TextStream
from pagedec.text.tokenizer import Tokenizer


class Writer:
    """Writes outputs with a model's vocabulary; without a tokenizer their texts are empty."""

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], block_size: int | None = None
    ) -> None:
        self.tokenizer, self.eos_token_ids, self.block_size = tokenizer, frozenset(eos_token_ids), block_size
        self._token_text = functools.lru_cache(maxsize=1 << 16)(self._decoded)

    def request(self, job: Job, finished: FinishedRequest) -> RequestOutput:
        """The whole output of a request that has ended."""
        answers = [self.completion(i, answer, job.params) for i, answer in enumerate(finished.answers)]
        return self.output(job, answers, True, finished.metrics, self.logprobs(finished.prompt_logprobs))

    def output(
        self,
        job: Job,
        answers: list[CompletionOutput],
        is_finished: bool,
        metrics: RequestMetrics | None = None,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
    ) -> RequestOutput:
        """An output of answers that are written."""
        if job.lora is not None:
            answers = [replace(answer, lora_request=job.lora) for answer in answers]
        made = RequestOutput(
            job.request_id,
            job.prompt,
            job.token_ids,
            answers,
            is_finished,
            metrics,
            prompt_logprobs,
            block_size=self.block_size,
            lora_request=job.lora,
        )
        return made.spelled(self._spell(job.params))

    def completion(self, index: int, answer: Completion, params: RequestParams) -> CompletionOutput:
        """One finished answer."""
        stop_reason: int | str | None = answer.stop_string
        if stop_reason is None and not self._is_end(answer.stop_token, params):
            stop_reason = answer.stop_token
        return CompletionOutput(
            index=index,
            text=self.text(answer, params),
            token_ids=answer.token_ids,
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=self.logprobs(answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=stop_reason,
            limited_by=answer.limited_by,
            score=answer.score,
            ancestry=answer.ancestry,
            item_id=answer.item_id,
        )

    def text(self, answer: Completion, params: RequestParams) -> str:
        """An answer's text, without what ended it unless that is asked for."""
        if self.tokenizer is None or not params.detokenize:
            return ""
        include = params.include_stop_str_in_output
        token_ids = answer.token_ids if include or answer.stop_token is None else answer.token_ids[:-1]
        data = self.tokenizer.byte_table.join(token_ids, params.skip_special_tokens)
        if answer.stop_string is not None:
            behind = answer.excess_bytes + (0 if include else len(answer.stop_string.encode()))
            data = data[: len(data) - behind]
        return data.decode("utf-8", "replace")

    def ends(self, params: RequestParams) -> frozenset[int]:
        """The tokens that may be an answer's end and no text: of a request a vocabulary, perhaps."""
        return frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)))

    def stream(self, params: RequestParams, ends: frozenset[int] | None = None) -> TextStream | None:
        """What gives the same text in pieces; None where there is no text. `ends`: those of `params`, where all of a
        request's answers share them."""
        if self.tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self.tokenizer.byte_table,
            tuple(params.stop or ()),
            min_tokens=params.min_tokens,
            include_stop_string=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            ends=self.ends(params) if ends is None else ends,
        )

    def check_told(self, resume: Resume | None, params: RequestParams) -> None:
        """Raise `InvalidArgument` for more text than the tokens that were told can have."""
        for i, answer in enumerate(() if resume is None else resume.answers):
            most = 0
            if self.tokenizer is not None and params.detokenize:
                data = self.tokenizer.byte_table.join(answer.token_ids, params.skip_special_tokens)
                most = len(data.decode("utf-8", "replace"))
            if answer.num_characters > most:
                limit = f"must be at most {most}: its tokens have no more text"
                raise InvalidArgument(f"resume.answers[{i}].num_characters", answer.num_characters, limit)

    def logprobs(self, reports: Sequence[TokenLogprobs | None] | None) -> list[dict[int, Logprob] | None] | None:
        """One table for each token: its own entry and those of the most probable tokens. None where nothing is
        reported."""
        if reports is None:
            return None
        return [None if report is None else self._table(report) for report in reports]

    def _table(self, report: TokenLogprobs) -> dict[int, Logprob]:
        table = {report.token_id: Logprob(report.logprob, report.rank, self._token_text(report.token_id))}
        rank, last = 0, None
        for place, (token_id, logprob) in enumerate(zip(report.top_ids, report.top_logprobs, strict=True), start=1):
            rank, last = (rank, last) if logprob == last else (place, logprob)
            if token_id not in table:
                table[token_id] = Logprob(logprob, rank, self._token_text(token_id))
        return table

    def _spell(self, params: RequestParams) -> Spell | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return functools.partial(self.tokenizer.byte_table.join, skip_special_tokens=params.skip_special_tokens)

    def _decoded(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _is_end(self, token_id: int | None, params: RequestParams) -> bool:
        return token_id in self.eos_token_ids and not params.ignore_eos
