"""Parameters of any registered type become rules of the core, or errors that name field, value and limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import NO_REPORTING, Reporting
from pagedec.engine.options import Options, Vocabulary, read_options, with_seed
from pagedec.errors import InvalidArgument
from pagedec.params import RequestParams, SamplingParams

# "a b": a word begins with a space, or with none at the start; "xyz" is two tokens either way.
TEXTS = {
    "a": [1],
    " a": [2],
    "b": [3],
    " b": [9, 3],
    "xyz": [4, 5],
    " xyz": [6, 5],
    "same": [7],
    " same": [7],
    "": [],
    "big": [99],
}
VOCABULARY = Vocabulary((b"<e>", b"a", b" a", b"b"), frozenset({0}), lambda text: TEXTS.get(text, [8]))


def read(vocabulary: Vocabulary | None = VOCABULARY, **fields: Any) -> Options:
    """Fields as they are: a decoder's own parameters may check less than ours."""
    params = RequestParams()
    for name, value in fields.items():
        object.__setattr__(params, name, value)
    return read_options(params, 10, (0,), vocabulary)


def test_parameters_that_say_nothing_cost_nothing() -> None:
    for params in (RequestParams(), SamplingParams()):
        options = read_options(params, 10, (0,), None)
        assert options.rules is NO_RULES and options.reporting is NO_REPORTING
        assert options.stopping.strings is None and options.stopping.ends == (0,)


def test_every_rule_has_its_place() -> None:
    processing = read(
        allowed_token_ids=[5, 1, 5],
        bad_words=["xyz"],
        logit_bias={3: 1, 2: -0.5},
        no_repeat_ngram_size=2,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=-1,
    ).rules
    assert processing == LogitsRules((1, 5), ((4, 5), (6, 5)), ((2, -0.5), (3, 1.0)), 2, 1.5, 0.25, -1.0)


def test_bad_words_begin_a_text_or_follow_a_space() -> None:
    """Both spellings where they differ in their first token and not in length, as in vLLM; leading spaces do not
    count."""
    for words, want in (
        (["a"], ((1,), (2,))), ([" a"], ((1,), (2,))), (["b"], ((3,),)), (["same"], ((7,),)),
        (["xyz", "a", "a"], ((4, 5), (6, 5), (1,), (2,))),
    ):  # fmt: skip
        assert read(bad_words=words).rules.bad_words == want


def test_stop_strings_are_made_of_the_vocabularys_bytes() -> None:
    stopping = read(stop=["a a", "b"], max_tokens=5).stopping
    cut = stopping.cut(stopping.start, (1, 2, 3))
    assert (cut.tokens, cut.stop_string) == ((1, 2), "a a")
    shown = read(stop="<e>", ignore_eos=True, skip_special_tokens=False).stopping
    assert shown.cut(shown.start, (0,)).stop_string == "<e>"


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"logprobs": 0}, Reporting(0)),
        ({"logprobs": -1}, Reporting(10)),
        ({"prompt_logprobs": 10, "logprobs": 1}, Reporting(1, 10)),
        ({"prompt_logprobs": -1}, Reporting(None, 10)),
    ],
)
def test_reports(fields: dict[str, Any], want: Reporting) -> None:
    assert read(**fields).reporting == want


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop_token_ids": (10,)}, "stop_token_ids is 10: token ids must be from 0 to 9"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is -1"),
        ({"allowed_token_ids": (3, 10)}, "allowed_token_ids is 10"),
        ({"allowed_token_ids": ()}, r"allowed_token_ids is \[\]: must name at least one"),
        ({"logit_bias": {12: 1.0}}, "logit_bias is 12"),
        ({"logit_bias": {1: math.nan}}, "logit_bias is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty is 1e-46: must be above 0 in 32 bits"),
        ({"repetition_penalty": 1e39}, r"repetition_penalty is 1e\+39: must be a finite number in 32 bits"),
        ({"no_repeat_ngram_size": 2**31}, "no_repeat_ngram_size is 2147483648: must be from 0 to 2147483647"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"logprobs": 11}, "logprobs is 11: must be from 0 to 10"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"bad_words": ["\n"]}, r"bad_words is '\\n': must be text with more in it than white space"),
        ({"bad_words": ["big"]}, "bad_words is 'big': must be of tokens from 0 to 9; it has token 99"),
        ({"bad_words": ["a"] * 10_001}, "bad_words is 10001 words: must be at most 10000"),
        ({"bad_words": ["a", "b" * 262144]}, "bad_words is 262145 bytes: must be at most 262144 in all"),
        ({"stop": [""]}, "stop is ''"),
        ({"allowed_token_ids": (1, 2), "bad_words": ["a"]}, "allowed_token_ids is 2 tokens"),
        ({"allowed_token_ids": (0,), "min_tokens": 1}, "allowed_token_ids is 1 token:"),
        ({"stop_token_ids": range(10), "min_tokens": 1}, "stop_token_ids is 10 tokens"),
    ],
)
def test_refusals(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        read(**fields)


@pytest.mark.parametrize("fields", [{"stop": ["x"]}, {"bad_words": ["a"]}])
def test_text_needs_a_vocabulary(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="must be empty: the engine has no tokenizer"):
        read(None, **fields)


def test_what_follows_from_a_seed_follows_from_the_one_that_a_session_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is made anew: in an engine's turn all others wait for it."""

    @dataclass(frozen=True)
    class Another(RequestParams):
        piece: int = 4

    @dataclass(frozen=True)
    class Keyed(RequestParams):
        key: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            self.__dict__["key"] = 3 * (self.seed or 0)

    plain, own = SamplingParams(seed=1, logit_bias={5: 1.0}), Keyed(seed=1)
    assert (with_seed(own, 7).key, own.key) == (21, 3)
    same, other = plain.clone(seed=7), Another(piece=5)
    monkeypatch.delattr("pagedec.params.check_fields")
    assert (with_seed(plain, 7).seed, plain.seed) == (7, 1) and with_seed(plain, 7) == same
    assert (with_seed(other, 7).seed, with_seed(other, 7).piece, other.seed) == (7, 5, None)
