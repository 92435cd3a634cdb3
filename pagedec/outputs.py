"""What a request returns. Field names follow vLLM. Times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request's events happened and what it cost. None: it has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Over all answers; the first token of each counts too."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held at first admission."""
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds of a token after the first; with several answers, of them together."""
        if self.first_token_time is None or self.finished_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason`: "stop", "length", "abort", or None while it runs; `stop_reason`: the token id or text
    that ended it, None for the model's own end token."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers, the best or first one first. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.metrics is None else self.metrics.num_cached_tokens
