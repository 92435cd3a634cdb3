"""What a request may ask for. Field names and defaults follow vLLM, except that `max_tokens` unset means up to the
context."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from pagedec.errors import InvalidArgument
from pagedec.fields import (
    MAX_UINT64,
    Flag,
    Integer,
    Number,
    Text,
    Texts,
    TokenIds,
    TokenNumbers,
    check_fields,
    check_names,
    field_names,
    option,
    rules,
    strict,
)
from pagedec.inputs import without_nothing
from pagedec.speculation import Speculation, SpeculationTable, speculation_of
from pagedec.structured import AllowedSequences, StructuredOutputsParams

MAX_SAMPLES = 16384
"""Most answers of one prompt, vLLM's own cap."""
MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0: a logit of 1e4 divided by it stays far below fp32's largest number."""


P = TypeVar("P", bound="RequestParams")
CONSTRAINT_HELP = {
    "structured_outputs": "what an answer's text may be, a StructuredOutputsParams or a table of its fields: one of "
    "json, regex, choice, grammar, json_object",
    "token_trie": "a TokenTrie of which each answer is one sequence",
    "allowed_tokens_fn": "a function of all tokens of a sequence, the prompt's too, that returns the ids which may "
    "follow",
}
CONSTRAINTS = tuple(CONSTRAINT_HELP)


class RequestOutputKind(Enum):
    """What each output of a stream holds; vLLM's names and values."""

    CUMULATIVE = 0
    """All of the answers so far."""
    DELTA = 1
    """What has come since the output before."""
    FINAL_ONLY = 2
    """All of the answers, once: there is no other output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """What any request may ask for, whatever decodes it: when its answers end, what is done to logits before a token is
    chosen, what is reported, and how text is made. The parameters of every decoder are a subclass.

    Checked as a whole when made. Raises `InvalidArgument`.
    """

    ELSEWHERE = dict[str, str]()  # no annotation: it is no field
    """Names that other engines have, and what there is instead."""
    max_tokens: int | None = option(
        None, Integer("most tokens of an answer; none: up to the context's end", low=1, optional=True)
    )
    max_time: float | None = option(
        None,
        Number(
            "end all answers, as they are, so many seconds after the request came; none: never", above=0, optional=True
        ),
    )
    min_tokens: int = option(0, Integer("do not end an answer before this many tokens"))
    stop: Sequence[str] | None = option((), Texts("text that ends an answer"))
    stop_token_ids: Sequence[int] = option((), TokenIds("token ids that end an answer, besides the model's own"))
    ignore_eos: bool = option(False, Flag("go on after the model's end token"))
    include_stop_str_in_output: bool = option(False, Flag("keep what ended an answer, a text or a token, in its text"))
    seed: int | None = option(
        None, Integer("names the randomness; none: drawn from the engine's seed", high=MAX_UINT64, optional=True)
    )
    presence_penalty: float = option(
        0.0, Number("taken from the logit of every token that was generated before", low=-2, high=2)
    )
    frequency_penalty: float = option(
        0.0, Number("taken from a token's logit as often as it was generated before", low=-2, high=2)
    )
    repetition_penalty: float = option(
        1.0, Number("above 1 makes tokens of the prompt and the answer less probable, below 1 more", above=0)
    )
    no_repeat_ngram_size: int = option(
        0, Integer("no sequence of this many tokens comes twice, the prompt's included; 0: no such rule")
    )
    logit_bias: dict[int, float] | None = option(
        None, TokenNumbers("numbers added to the logits of tokens", low=-100, high=100, optional=True)
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, TokenIds("draw none but these tokens", filled=True, optional=True)
    )
    bad_words: Sequence[str] | None = option((), Texts("words whose tokens never come in a row; others may spell one"))
    logprobs: int | None = option(
        None,
        Integer(
            "report this many of the most probable tokens of each step; -1: all; the engine's max_logprobs bounds them",
            low=-1,
            optional=True,
        ),
    )
    prompt_logprobs: int | None = option(
        None, Integer("the same for each token of the prompt; -1: all", low=-1, optional=True)
    )
    detokenize: bool = option(True, Flag("return text, not token ids alone"))
    skip_special_tokens: bool = option(True, Flag("leave special tokens out of the text"))
    spaces_between_special_tokens: bool = option(
        True, Flag("taken for compatibility: text is the tokens' own bytes, and nothing is ever put between them")
    )
    truncate_prompt_tokens: int | None = option(
        None, Integer("keep only this many of the prompt's last tokens", low=1, optional=True)
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Of `LLM.stream` and `AsyncLLM`; a call for many prompts returns final outputs."""
    stream_interval: int = 1
    """Of the same: an output comes when an answer has so many new tokens; its first token and its end come at once."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text of an answer may be; a table of its fields is taken, too."""
    token_trie: Any = None
    """A `TokenTrie` of which each answer is one sequence."""
    allowed_tokens_fn: Callable[[list[int]], Iterable[int] | None] | None = None
    """Given all tokens of a sequence, the prompt's too: the ids that may follow, None for any. It is called in the
    thread that steps the engine, once for each place; what it raises ends its request alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_constraints()
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidArgument("output_kind", self.output_kind, "must be a RequestOutputKind")
        Integer("tokens", low=1).check("stream_interval", self.stream_interval)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                "min_tokens", self.min_tokens, f"must be at most max_tokens, which is {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise InvalidArgument(
                "stop", self.stop, "must be empty where detokenize is false: there is no text to stop at"
            )

    def _check_constraints(self) -> None:
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.allowed_tokens_fn is not None and not callable(self.allowed_tokens_fn):
            limit = "must be a function of a sequence's token ids, or None"
            raise InvalidArgument("allowed_tokens_fn", self.allowed_tokens_fn, limit)
        if not isinstance(self.token_trie, (AllowedSequences, type(None))):
            raise InvalidArgument("token_trie", self.token_trie, "must be a TokenTrie, or None")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            limit = f"must be None beside {given[0]}: an answer has one constraint"
            raise InvalidArgument(given[1], getattr(self, given[1]), limit)

    @property
    def num_answers(self) -> int:
        """How many answers a prompt gets."""
        return 1

    def clone(self: P, **changes: Any) -> P:
        """Make one like this one but for `changes`; they are checked as in a new one."""
        check_names(type(self).__name__, changes, field_names(type(self)), changes, self.ELSEWHERE)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls: type[P], values: Mapping[str, Any]) -> P:
        """Make one from names and values; an unknown name is an error that lists the known ones."""
        check_names(cls.__name__, values, field_names(cls), values, cls.ELSEWHERE)
        return cls(**values)


def _set_checked(params: RequestParams, name: str, value: object) -> None:
    changed = params.clone(**{name: value})
    for field in field_names(type(params)):  # what a check makes of one value may show in another field
        object.__setattr__(params, field, getattr(changed, field))


def settable(cls: type[P]) -> type[P]:
    """Let the fields of a class of parameters be set, each time checked as a whole: scripts do that to recommended
    ones. A request takes a copy, so what is set later is of later ones."""
    cls.__setattr__ = _set_checked  # type: ignore[method-assign,assignment]
    cls.__hash__ = None  # type: ignore[assignment]
    return cls


def described(cls: type[P]) -> type[P]:
    """Put all fields, with their meanings and defaults, at the end of the docstring of a class of parameters."""
    entries = [f"{name}: {rule.help} (default: {default!r})" for name, (rule, default) in rules(cls).items()]
    kinds = ", ".join(kind.name for kind in RequestOutputKind)
    entries.append(
        f"output_kind: what each output of a stream holds, a RequestOutputKind: {kinds} (default: CUMULATIVE)"
    )
    entries.append("stream_interval: new tokens of an answer that make an output of a stream (default: 1)")
    entries += [f"{name}: {text} (default: None)" for name, text in CONSTRAINT_HELP.items()]
    lines = [textwrap.fill(entry, 118, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Args:", *lines])
    return cls


@described
@settable
@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(RequestParams):
    """How tokens are drawn and when a request ends. `temperature` 0 is greedy.

    Checked as a whole when made and when a field is set; a request copies it. Raises `InvalidArgument`.

    With a `seed`, the same prompt returns the same tokens in any company. Without one, each request draws a seed from
    the engine's own, so that the same calls of a new engine return the same tokens again.
    """

    READ = staticmethod(without_nothing)
    ELSEWHERE = {
        **dict.fromkeys(("guided_decoding", "response_format"), "structured_outputs says what a text may be"),
        **dict.fromkeys(
            ("use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping", "num_beam_groups"),
            "a beam search has parameters of its own, BeamSearchParams",
        ),
        "max_new_tokens": "it is named max_tokens",
        "min_new_tokens": "it is named min_tokens",
        "num_return_sequences": "it is named n",
        "speculative_config": "a request's own is named speculative",
        "best_of": "n answers are all returned; BeamSearchParams searches for the best",
        "logits_processors": "allowed_tokens_fn says which tokens may follow, logit_bias how much rather",
    }
    n: int = option(1, Integer("answers for each prompt", low=1, high=MAX_SAMPLES))
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
    speculative: dict[str, Any] | bool | None = option(
        None,
        SpeculationTable(
            'how several tokens are drafted and verified in a step, such as {"method": "ngram"}; false: not at all; '
            "none: as the engine's speculative_config says",
            optional=True,
        ),
    )

    def __post_init__(self) -> None:
        # by its name: a dataclass with slots is another class than the one its methods were made in
        RequestParams.__post_init__(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    @property
    def num_answers(self) -> int:
        """How many answers a prompt gets."""
        return self.n

    @property
    def speculation(self) -> Speculation | None:
        """The way to draft that `speculative` names; None where it names none."""
        return speculation_of(self.speculative) if isinstance(self.speculative, dict) else None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


MAX_BEAMS = 512
"""Most beams of one prompt."""


class EarlyStopping(Flag):
    """True, False, or the text "never"."""

    metavar = "true|false|never"

    @property
    def limit(self) -> str:
        return 'true, false or "never"'

    def accept(self, value: object) -> Any:
        return value if value == "never" and isinstance(value, str) else Flag.accept(self, value)


@described
@settable
@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams(RequestParams):
    """Beam search: the most probable answers that a search of `beam_width` paths finds, each with its score.

    Rules (penalties, bans, biases) change log-probabilities, and change scores with them. Checked as a whole when made
    and when a field is set; a request copies it. Raises `InvalidArgument`.
    """

    ELSEWHERE = {
        **dict.fromkeys(("guided_decoding", "response_format"), "structured_outputs says what a text may be"),
        **dict.fromkeys(("num_beams", "best_of"), "it is named beam_width"),
        "n": "it is named num_return_sequences",
        "max_new_tokens": "it is named max_tokens",
        "min_new_tokens": "it is named min_tokens",
        "use_beam_search": "these are always a beam search's",
        "speculative_config": "a request's own is named speculative",
    }
    beam_width: int = option(4, Integer("paths that are followed at once", low=1, high=MAX_BEAMS))
    num_return_sequences: int | None = option(
        None, Integer("answers to return, the best ones; none: beam_width", low=1, optional=True)
    )
    length_penalty: float = option(
        1.0,
        Number(
            "an answer's score is its log-probability over its length to this power; above 0 favours long ones",
            low=-5,
            high=5,
        ),
    )
    early_stopping: bool | str = option(
        False,
        EarlyStopping(
            "when beam_width answers have ended: true ends the search; false goes on while the best path, at its "
            "present length, could still beat the worst answer; never, while it could at the best possible length"
        ),
    )
    do_sample: bool = option(False, Flag("draw the paths to follow at random, without replacement: beam sampling"))
    temperature: float = option(
        0.0,
        Number(
            "of beam sampling, where 0 is taken for 1; without do_sample it changes nothing, which is warned of",
            low=MIN_TEMPERATURE,
            zero=True,
        ),
    )
    top_p: float = option(1.0, Number("of beam sampling: as in sampling, for each path", above=0, high=1))
    top_k: int = option(0, Integer("of beam sampling: as in sampling, for each path; 0 or -1: all", low=-1))
    min_p: float = option(0.0, Number("of beam sampling: as in sampling, for each path", low=0, high=1))
    num_beam_groups: int = option(
        1, Integer("groups of paths, searched side by side; it must divide beam_width", low=1)
    )
    diversity_penalty: float = option(
        0.0, Number("taken from a token's log-probability as often as groups before chose it at this step", low=0)
    )
    hf_semantics: str = option(
        "5", Text("which transformers release to follow where releases differ", choices=("5", "4.38"))
    )
    speculative: dict[str, Any] | bool | None = option(
        None,
        SpeculationTable(
            'how the next paths are guessed, several levels of the search a step, such as {"method": "ngram"}; false '
            "or none: not at all",
            optional=True,
        ),
    )

    def __post_init__(self) -> None:
        RequestParams.__post_init__(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.max_tokens is None:
            raise InvalidArgument("max_tokens", None, "must be given: a beam search ends where all paths have a length")
        if self.num_answers > self.beam_width:
            raise InvalidArgument(
                "num_return_sequences", self.num_answers, f"must be at most beam_width, {self.beam_width}"
            )
        if self.beam_width % self.num_beam_groups:
            raise InvalidArgument(
                "num_beam_groups", self.num_beam_groups, f"must divide beam_width, which is {self.beam_width}"
            )
        if self.num_beam_groups > 1 and self.do_sample:
            raise InvalidArgument("do_sample", True, "must be false where there are groups: they are never drawn")
        if self.num_beam_groups == 1 and self.diversity_penalty:
            raise InvalidArgument("diversity_penalty", self.diversity_penalty, "must be 0 where there is one group")

    @property
    def num_answers(self) -> int:
        """How many answers a prompt gets."""
        return self.beam_width if self.num_return_sequences is None else self.num_return_sequences

    @property
    def speculation(self) -> Speculation | None:
        """The way to draft that `speculative` names; None where it names none."""
        return speculation_of(self.speculative) if isinstance(self.speculative, dict) else None


def as_beams(params: Any) -> BeamSearchParams:
    """The parameters of a call of `beam_search`, with a report of each token, as its sequences have one. Raises
    `InvalidArgument`."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidArgument("params", params, "must be a BeamSearchParams; other ones go to `generate`")
    return params.clone(logprobs=0) if params.logprobs is None else params
