"""Ways to draft: what the engine's `speculative_config` and a request's `speculative` may say. Names follow vLLM where
it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pagedec.errors import FeatureNotAvailable, InvalidArgument, within
from pagedec.fields import Flag, Integer, Number, Rule, Text, check_fields, check_names, option, rules

DRAFT_MODEL_FIELDS = (
    "model",
    "revision",
    "load_format",
    "dtype",
    "model_impl",
    "quantization",
    "max_model_len",
    "num_blocks",
    "kv_cache_memory",
)
"""Which model drafts, in which numbers, with how much KV: engine arguments of its own, by the same names."""
MODEL_NAMES = {"ngram": "ngram", "[ngram]": "ngram"}
"""Names in place of a model that mean a method, as in older versions of vLLM."""
NEUTRAL: dict[str, Rule] = {
    "draft_tensor_parallel_size": Integer("one device holds a model", choices=(1,), optional=True),
    "enforce_eager": Flag("a CPU has no graphs; a device's are made anyway", optional=True),
    "disable_log_stats": Flag("nothing is logged", optional=True),
    "disable_padded_drafter_batch": Flag("drafts are not padded", optional=True),
}
"""vLLM's fields that change nothing here."""
ELSEWHERE = ("eagle", "medusa", "mlp_speculator", "mtp")
"""vLLM's methods that there are not."""
MOST = 1024
"""Of every number: far more than pays."""
MOST_CANDIDATES = 16
"""Of a place of a roll: the token that is drawn and those behind it, as many as the kernels find."""
MOST_COMPARED = 64
"""Last tokens that a method may compare one by one with what stands elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A way to draft, with its numbers. Raises `InvalidArgument` for one that it may not have."""

    method: ClassVar[str]
    defaults: ClassVar[dict[str, tuple[int, int]]] = {}
    """Numbers that nobody has said: of drafts as wide as pays, and of drafts as wide as they are."""
    adaptive: bool = option(
        True, Flag("draft as widely as pays, at most as the numbers say; false: always as they say")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (most, fixed) in self.defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, most if self.adaptive else fixed)

    @property
    def reach(self) -> dict[str, int]:
        """How many tokens ahead each field makes it draft."""
        return {name: getattr(self, name) for name in rules(type(self)) if name == "num_speculative_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramSpeculation(Speculation):
    """Prompt lookup: go on as the text went on before, where it ended alike."""

    method = "ngram"
    defaults = {"num_speculative_tokens": (12, 5)}
    num_speculative_tokens: int | None = option(
        None, Integer("tokens of a candidate; none: 5, or up to 12 where they pay", 1, MOST, optional=True)
    )
    prompt_lookup_max: int | None = option(
        None, Integer("most last tokens that must be alike; none: 4, or prompt_lookup_min", 1, MOST, optional=True)
    )
    prompt_lookup_min: int = option(1, Integer("fewest last tokens that must be alike", low=1, high=MOST))
    num_candidates: int = option(1, Integer("continuations that are drafted together, as a tree", low=1, high=MOST))

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        if self.prompt_lookup_max is None:
            object.__setattr__(self, "prompt_lookup_max", max(4, self.prompt_lookup_min))
        elif self.prompt_lookup_min > self.prompt_lookup_max:
            limit = f"must be at most prompt_lookup_max, which is {self.prompt_lookup_max}"
            raise InvalidArgument("prompt_lookup_min", self.prompt_lookup_min, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSpeculation(Speculation):
    """Suffix decoding (Oliaro et al. 2024): what followed most often where a text ended alike, of its own or of answers
    that have ended."""

    method = "suffix"
    num_speculative_tokens: int | None = option(
        None, Integer("most tokens of a tree; none: suffix_decoding_max_tree_depth", 1, MOST, optional=True)
    )
    suffix_decoding_max_tree_depth: int = option(24, Integer("most last tokens that are compared", 1, MOST_COMPARED))
    suffix_decoding_max_cached_requests: int = option(
        10_000,
        Integer(
            "latest answers of others that are looked in; 0: none, and those of the request are not kept for others"
        ),
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, Number("most tokens of a tree, as a multiple of how many last tokens were alike", low=0)
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, Number("how often a token, with those before it, must have followed: a share", low=0, high=1)
    )

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", self.suffix_decoding_max_tree_depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSpeculation(Speculation):
    """Lookahead decoding (Fu et al. 2024): n-grams from a window of parallel Jacobi iterations, verified beside it."""

    method = "lookahead"
    window_size: int = option(15, Integer("W, columns of the window; 0: no window", high=MOST))
    ngram_size: int = option(5, Integer("N, tokens of an n-gram: the one it follows, and N - 1 guessed", 2, MOST))
    num_guesses: int = option(15, Integer("G, most guesses that are kept and verified for a token; 0: none", high=MOST))
    pool_from_prompt: bool = option(False, Flag("take guesses from the prompt and the answer, too"))

    @property
    def reach(self) -> dict[str, int]:
        """The window's last column, and the longest guess."""
        return {"window_size": self.window_size, "ngram_size": self.ngram_size - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiSpeculation(Speculation):
    """Jacobi decoding: a row of guesses, each replaced in each step by what the model draws before it."""

    method = "jacobi"
    num_speculative_tokens: int = option(8, Integer("guesses of the row", low=1, high=MOST))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSpeculation(Speculation):
    """A smaller model, which the engine's `speculative_config` names, drafts with the target's own noise."""

    method = "draft_model"
    defaults = {"num_speculative_tokens": (14, 5), "num_candidates": (3, 1)}
    num_speculative_tokens: int | None = option(
        None, Integer("tokens rolled out in a step; none: 5, or up to 14 where they pay", 1, MOST, optional=True)
    )
    num_candidates: int | None = option(
        None,
        Integer(
            "tokens that are verified at each place: the rolled one, and those that were nearest to be; none: 1, or up "
            "to 3 where they pay",
            1,
            MOST_CANDIDATES,
            optional=True,
        ),
    )
    verify: str = option(
        "coupling",
        Text(
            "coupling: it shares the target's noise, and answers are those of plain sampling; rejection: more may be "
            "accepted, and answers are distributed as those of plain sampling",
            choices=("coupling", "rejection"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Speculation(DraftModelSpeculation):
    """EAGLE-3 (Li et al. 2025): a head of one layer, which the engine's `speculative_config` names, drafts from the
    target's own residual stream at three of its layers."""

    method = "eagle3"
    defaults = {"num_speculative_tokens": (7, 4), "num_candidates": (3, 1)}


METHODS: dict[str, type[Speculation]] = {
    kind.method: kind
    for kind in (
        NGramSpeculation,
        SuffixSpeculation,
        LookaheadSpeculation,
        JacobiSpeculation,
        DraftModelSpeculation,
        Eagle3Speculation,
    )  # fmt: skip
}


def add_method(kind: type[Speculation]) -> None:
    """Have tables name `kind` by its `method`. A reloaded module replaces its own; raises `InvalidArgument` for a name
    that is another's, or none."""
    name = getattr(kind, "method", None)
    if not isinstance(name, str):
        raise InvalidArgument("speculation.method", name, "must be a name: tables of speculative_config say it")
    taken = METHODS.get(name, kind)
    if name in ELSEWHERE or (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise InvalidArgument("speculation.method", name, "must be new; it belongs to another way to draft")
    METHODS[name] = kind


def speculation_of(table: Mapping[str, Any]) -> Speculation:
    """The way to draft that a checked table names."""
    kind = METHODS[table["method"]]
    return kind(**{name: table[name] for name in rules(kind) if name in table})


def speculation_name(table: Mapping[str, Any] | None) -> str:
    """What a checked table of the engine's is called: the method, and the model that drafts. Empty without one."""
    return " ".join(str(table[name]) for name in ("method", "model") if name in table) if table else ""


@dataclass(frozen=True, slots=True)
class SpeculationTable(Rule):
    """A table that names a method and its numbers. As text: a JSON object. `of_engine`: it may name a draft model, and
    False is none."""

    of_engine: bool = False
    metavar = "JSON"

    @property
    def limit(self) -> str:
        off, none = ("", "") if self.of_engine else ("False, or ", "false, or ")
        example = '{"method": "ngram"}'
        return f"{off}a table of names and values, on the command line {none}a JSON object such as {example}"

    @property
    def _names(self) -> list[str]:
        """Of all methods."""
        own = [name for kind in METHODS.values() for name in rules(kind)]
        return list(dict.fromkeys(("method", "model", *own, *DRAFT_MODEL_FIELDS, *NEUTRAL)))

    def accept(self, value: object) -> Any:
        if value is False and not self.of_engine:
            return False
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError
        return dict(value)

    def read(self, text: str) -> object:
        return False if text == "False" else json.loads(text)

    def check(self, name: str, value: object) -> Any:
        accepted = Rule.check(self, name, value)
        if not isinstance(accepted, dict):
            return accepted
        with within(f"{name}."):
            return self._checked(accepted)

    def _checked(self, table: dict[str, Any]) -> dict[str, Any]:
        """The table with its method, and without what is None or changes nothing. Raises errors about its fields."""
        model = table.get("model")
        if isinstance(model, str) and model in MODEL_NAMES:
            table["method"] = table.get("method") or MODEL_NAMES[table.pop("model")]
            model = None
        if table.get("method") is None and model is not None:
            table["method"] = DraftModelSpeculation.method
        method = table.get("method")
        if method is None:
            check_names("speculation", table, self._names, table)
        if method in ELSEWHERE:
            limit = f"not available in this version; available: {', '.join(METHODS)}"
            raise FeatureNotAvailable("method", method, limit)
        if not isinstance(method, str) or method not in METHODS:
            raise InvalidArgument("method", method, f"must be one of {', '.join(METHODS)}")
        kind = METHODS[method]
        of_model = DRAFT_MODEL_FIELDS if issubclass(kind, DraftModelSpeculation) else ()
        known = ("method", *rules(kind), *(of_model if self.of_engine else ()), *NEUTRAL)
        if not self.of_engine:
            for name in (name for name in table if name in of_model):
                raise InvalidArgument(name, table[name], "must be in the engine's speculative_config, not a request's")
        if "verify" in table and "verify" not in known:
            limit = (
                f"must be left out: guesses of {method} have no probabilities, and are accepted while the model's own "
            )
            raise InvalidArgument("verify", table["verify"], limit + "draws say the same, as often as rejection would")
        check_names(f"the method {method}", table, known, table)
        for name, rule in NEUTRAL.items():
            rule.check(name, table.pop(name, None))
        if self.of_engine and of_model and model is None:
            raise InvalidArgument("model", None, "must name the model that drafts")
        kept = {name: value for name, value in table.items() if value is not None}
        kind(**{name: kept[name] for name in rules(kind) if name in kept})
        return kept
