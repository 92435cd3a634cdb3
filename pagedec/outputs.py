"""What a request returns. Field names follow vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from pagedec.errors import RequestError
from pagedec.lora.request import LoRARequest

if TYPE_CHECKING:
    from pagedec.tree import AnswerTree


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request's events happened and what it cost. None: it has not happened.

    `arrival_time`, `first_scheduled_time`, `first_token_time` and `finished_time` are seconds of the engine's monotonic
    clock, `time.perf_counter()`, whose zero means nothing: only differences do, and no time of day is among them. Of a
    server's requests they are seconds since the request arrived there. The properties are seconds, too.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Over all answers; the first token of each counts too."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held at first admission."""
    num_preemptions: int = 0
    num_released_branches: int = 0
    """Idle branches that gave way to other requests, and came back when they were needed."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_scheduled_time: float | None = None
    """When its first row began to run."""

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

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
class Logprob:
    """One token's log-probability in one place: of the model itself, before penalties, bans and temperature.

    `rank` 1 is the most probable. `decoded_token` is the token's own text (None without a tokenizer); bytes that are
    only a part of a character show as U+FFFD.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason`: "stop", "length", "abort", or None while it runs; `stop_reason`: the token id or
    text that ended it, None for the model's own end token.

    `token_ids` are all tokens that were generated, what ended the answer included; `text` is without it unless it was
    asked for. `logprobs` has a table for each token, the token itself among its entries; None for a token that was not
    generated but given. `cumulative_logprob` is the sum over the tokens. Both come with the finished answer, where they
    were asked for.

    `score` is what its decoder compares answers by: of beams the log-probability, with whatever rules and penalties
    made of it, over the length to the power of `length_penalty`; None where nothing is compared. `ancestry` has for
    each token of a beam the place, among the beams of its step, of the one that it was chosen behind.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    limited_by: str | None = None
    """What was reached where `finish_reason` is "length": "max_tokens", "max_time", "max_model_len", "kv_pool", which
    holds no more, or "rules", which leave nothing to draw."""
    score: float | None = None
    ancestry: list[int] | None = None
    item_id: int | None = None
    """The item that was chosen from a `token_trie`; None where there is none, or the answer was cut short."""
    lora_request: LoRARequest | None = None
    """The adapter that it was written with."""
    kv_transfer_params: ClassVar[None] = None
    """vLLM's names, for what there is not: None, as there for a request without it."""
    routed_experts: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


Spell = Callable[[Sequence[int]], bytes]
"""The bytes of tokens, those that are not shown left out."""


class Spelled:
    """Has a model's vocabulary at hand, which is no part of its value: copies and pickles are without it."""

    __slots__ = ("_spell",)

    def spelled(self: S, spell: Spell | None) -> S:
        """Have texts of tokens made so; returns itself."""
        object.__setattr__(self, "_spell", spell)
        return self


S = TypeVar("S", bound=Spelled)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestOutput(Spelled):
    """One prompt and its answers, the best or first one first. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """A table for each token of the prompt; None for the first, before which there is nothing."""
    error: RequestError | None = None
    """Why the request could not be carried out; it has no answers then. Only where errors were asked to be returned."""
    block_size: int | None = None
    """Tokens in a block of KV."""
    lora_request: LoRARequest | None = None
    """The adapter that the request went through."""
    encoder_prompt: ClassVar[None] = None
    """vLLM's names, for what there is not: None, as there for a request without it."""
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.metrics is None else self.metrics.num_cached_tokens

    def tree(self) -> AnswerTree:
        """The answers with their common beginnings merged: where they fork, what they share, how they score. `str`
        draws it for a terminal, its `svg()` and `html()` make one file. An output that was copied or unpickled has no
        vocabulary, and shows token ids where answers fork."""
        from pagedec.tree import AnswerTree

        spell: Spell | None = getattr(self, "_spell", None)
        return AnswerTree(self.prompt, self.prompt_token_ids, self.outputs, self.block_size, spell)


@dataclass(frozen=True, slots=True)
class BranchOutput(RequestOutput, Generic[T]):
    """What a call on a branch of a session returns. `branches`: with `keep="all"` a new branch for each of the
    outputs, in their order."""

    branches: list[T] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first answer's."""
        return self.outputs[0].text if self.outputs else ""

    @classmethod
    def of(cls, output: RequestOutput, branches: list[T]) -> BranchOutput[T]:
        """The same output, with branches."""
        values = {field.name: getattr(output, field.name) for field in fields(RequestOutput)}
        return cls(**values, branches=branches).spelled(getattr(output, "_spell", None))


@dataclass(frozen=True, slots=True)
class Mark:
    """A place that a branch, or a fork of it, can be taken back to. `num_tokens` is how many tokens it had there."""

    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BranchState:
    """A branch at one moment: the text of all its tokens, special ones left out, its tokens, their reports as calls
    have brought them (None for a token of which nothing was reported), and this place."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    mark: Mark


@dataclass(frozen=True, slots=True)
class BranchBlocks:
    """KV blocks that a branch holds now, and how many of them others hold, too: branches, or requests that run."""

    num_tokens: int
    num_blocks: int
    num_shared_blocks: int


@dataclass(frozen=True, slots=True)
class SessionBlocks:
    """KV blocks that branches hold now: each of them, and together, where each block counts once."""

    branches: list[BranchBlocks]
    num_blocks: int

    @property
    def num_blocks_saved(self) -> int:
        """How many more they would hold if they shared none."""
        return sum(branch.num_blocks for branch in self.branches) - self.num_blocks


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session holds: branches, and tokens, each once however many branches share it. `seconds_left`: until it is
    closed if nobody uses it; None: never."""

    num_branches: int
    num_tokens: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """What a model says of one continuation. `logprob` is the sum over its tokens; `logprobs` has a table for each of
    them, the token itself among its entries. `text` is None where token ids were given."""

    text: str | None
    token_ids: list[int]
    logprob: float
    logprobs: list[dict[int, Logprob]]

    @property
    def token_logprobs(self) -> list[float]:
        """Of each token its own."""
        return [table[token].logprob for token, table in zip(self.token_ids, self.logprobs, strict=True)]


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer of `LLM.beam_search`, as vLLM has it: `tokens` and `text` begin with the prompt's. An end token is
    among the tokens where `include_stop_str_in_output` is set; its report and its log-probability always count.

    `score` is what answers are ordered by: the log-probability, with whatever rules made of it, over the number of
    generated tokens to the power of `length_penalty`.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt of `LLM.beam_search`, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput, prompt: str | None, keeps_stop: bool) -> BeamSearchOutput:
        """The answers of a beam search as whole sequences. `prompt`: its text, None where no text is wanted.
        `keeps_stop`: end tokens are among the tokens."""
        return cls([_sequence(output, answer, prompt, keeps_stop) for answer in output.outputs])


def _sequence(
    output: RequestOutput, answer: CompletionOutput, prompt: str | None, keeps_stop: bool
) -> BeamSearchSequence:
    token_ids, stop_reason = answer.token_ids, answer.stop_reason
    if answer.finish_reason == "stop" and not isinstance(stop_reason, str):
        stop_reason = token_ids[-1]
        token_ids = token_ids if keeps_stop else token_ids[:-1]
    return BeamSearchSequence(
        tokens=[*output.prompt_token_ids, *token_ids],
        logprobs=answer.logprobs or [],
        cum_logprob=answer.cumulative_logprob or 0.0,
        text=None if prompt is None else prompt + answer.text,
        finish_reason=answer.finish_reason,
        stop_reason=stop_reason,
        score=answer.score,
        lora_request=output.lora_request,
    )
