"""What a request may ask for. Field names and defaults follow vLLM, except that `max_tokens` unset means up to the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.fields import (
    MAX_UINT64,
    Flag,
    Integer,
    Number,
    Texts,
    TokenIds,
    TokenNumbers,
    check_fields,
    check_names,
    option,
    strict,
)

MAX_SAMPLES = 16384
"""Most answers of one prompt, vLLM's own cap."""
MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0: a logit of 1e4 divided by it stays far below fp32's largest number."""


@strict
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends. `temperature` 0 is greedy.

    Checked as a whole when made and when a field is set; a request copies it. Raises `InvalidArgument`.

    With a `seed`, the same prompt returns the same tokens in any company. Without one, a seed is drawn for each request.
    """

    n: int = option(1, Integer("answers for each prompt", low=1, high=MAX_SAMPLES))
    presence_penalty: float = option(
        0.0, Number("taken from the logit of every token that was generated before", low=-2, high=2)
    )
    frequency_penalty: float = option(
        0.0, Number("taken from a token's logit as often as it was generated before", low=-2, high=2)
    )
    repetition_penalty: float = option(
        1.0, Number("above 1 makes tokens of the prompt and the answer less probable, below 1 more", above=0)
    )
    temperature: float = option(
        1.0, Number("0 is greedy; below 1 sharpens, above 1 flattens", low=MIN_TEMPERATURE, zero=True)
    )
    top_p: float = option(
        1.0, Number("draw among the smallest set of tokens of at least this probability", above=0, high=1)
    )
    top_k: int = option(0, Integer("draw among the k most probable tokens only; 0 or -1: all", low=-1))
    min_p: float = option(
        0.0, Number("drop tokens less probable than this share of the most probable one", low=0, high=1)
    )
    seed: int | None = option(
        None, Integer("names the randomness; none: a fresh one each time", high=MAX_UINT64, optional=True)
    )
    stop: Sequence[str] | None = option(
        (), Texts("text that ends an answer; give it again for several, or once as a JSON list")
    )
    stop_token_ids: Sequence[int] = option((), TokenIds("token ids that end an answer, besides the model's own"))
    ignore_eos: bool = option(False, Flag("go on after the model's end token"))
    max_tokens: int | None = option(
        None, Integer("most tokens of an answer; none: up to the context's end", low=1, optional=True)
    )
    min_tokens: int = option(0, Integer("do not end an answer before this many tokens"))
    logprobs: int | None = option(
        None, Integer("report this many of the most probable tokens of each step; -1: all", low=-1, optional=True)
    )
    prompt_logprobs: int | None = option(
        None, Integer("the same for each token of the prompt; -1: all", low=-1, optional=True)
    )
    detokenize: bool = option(True, Flag("return text, not token ids alone"))
    skip_special_tokens: bool = option(True, Flag("leave special tokens out of the text"))
    spaces_between_special_tokens: bool = option(
        True, Flag("taken for compatibility: text is the tokens' own bytes, and nothing is ever put between them")
    )
    include_stop_str_in_output: bool = option(False, Flag("keep what ended an answer, a text or a token, in its text"))
    truncate_prompt_tokens: int | None = option(
        None, Integer("keep only this many of the prompt's last tokens", low=1, optional=True)
    )
    logit_bias: dict[int, float] | None = option(
        None, TokenNumbers("numbers added to the logits of tokens", low=-100, high=100, optional=True)
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, TokenIds("draw none but these tokens", filled=True, optional=True)
    )
    bad_words: Sequence[str] | None = option((), Texts("text that no answer has; give it again for several"))
    no_repeat_ngram_size: int = option(
        0, Integer("no sequence of this many tokens comes twice, the prompt's included; 0: no such rule")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                "min_tokens", self.min_tokens, f"must be at most max_tokens, which is {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise InvalidArgument(
                "stop", self.stop, "must be empty where detokenize is false: there is no text to stop at"
            )

    def clone(self, **changes: Any) -> SamplingParams:
        """Make one like this one but for `changes`; they are checked as in a new one."""
        check_names(type(self).__name__, changes, _names(type(self)), changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make one from names and values; an unknown name is an error that lists the known ones."""
        check_names(cls.__name__, values, _names(cls), values)
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _set_checked(params: SamplingParams, name: str, value: object) -> None:
    changed = params.clone(**{name: value})
    for field in _names(type(params)):  # what a check makes of one value may show in another field
        object.__setattr__(params, field, getattr(changed, field))


# Scripts set fields of the recommended parameters. A request takes a copy, so what is set later is of later ones.
SamplingParams.__setattr__ = _set_checked  # type: ignore[method-assign,assignment]
SamplingParams.__hash__ = None  # type: ignore[assignment]


def _names(cls: type[SamplingParams]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))
