"""Request parameters, outputs and errors: what is taken, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest

from pagedec.errors import (
    MAX_SHOWN,
    FeatureNotAvailable,
    InvalidArgument,
    InvariantError,
    ModelFileError,
    NotFound,
    PagedecError,
    RequestError,
)
from pagedec.inputs import PARAMS_ONLY
from pagedec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedec.params import MAX_SAMPLES, MIN_TEMPERATURE, BeamSearchParams, RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf
WRONG = [
    *[("n", value) for value in (0, -1, MAX_SAMPLES + 1, 1.0, "1", None, True, [1])],
    *[("temperature", value) for value in (-0.1, 1e39, NAN, INF, -INF, "1", None, True, MIN_TEMPERATURE / 2, 1j)],
    *[("top_k", value) for value in (-2, 1.5, None, False, 2**31, "all")],
    *[("top_p", value) for value in (0, 0.0, 1e-46, -0.5, 1.0000001, NAN, INF, None, True)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, INF, None, True)],
    *[("seed", value) for value in (-1, 2**64, 0.5, "7", True)],
    *[("max_tokens", value) for value in (0, -1, 2.0, True, "3")],
    *[("min_tokens", value) for value in (-1, None, 1.0, True)],
    *[("stop_token_ids", value) for value in ("12", b"1", 5, [1.0], [True], [-1], [2**31], {1: 2}, [None])],
    *[("ignore_eos", value) for value in (0, 1, None, "true")],
    *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, None, "0", True)],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, INF, None, False)],
    *[("repetition_penalty", value) for value in (0, -1, 1e-46, 1e39, NAN, INF, None, "1")],
    *[("stop", value) for value in ("", [""], ["a", ""], b"a", [b"a"], 5, [5], [None], {"a": 1}, "\ud800", ["a",
    "\udc00"])],
    *[("bad_words", value) for value in ("", [""], b"a", 5, [5], {"a": 1}, ["\ud800"])],
    *[("logprobs", value) for value in (-2, 1.0, "1", True, 2**31)],
    *[("prompt_logprobs", value) for value in (-2, 0.5, "1", False)],
    *[(name, value) for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                                 "include_stop_str_in_output") for value in (0, None, "true")],
    *[("truncate_prompt_tokens", value) for value in (0, -1, 1.0, "5", True)],
    *[("logit_bias", value) for value in ({1: 100.5}, {1: -101}, {1: NAN}, {1: None}, {1: "2"}, {1: True}, {-1: 1},
                                          {2**31: 1}, {1.0: 1}, {True: 1}, {"x": 1}, {" 1": 1}, {"-1": 1}, {"1_0": 1},
                                          {"\u0661": 1}, {1: 1, "1": 1}, [(1, 1)], "1", 5)],
    *[("allowed_token_ids", value) for value in ([], (), "12", b"1", 5, [1.0], [-1], [2**31], {1: 2}, [None])],
    *[("no_repeat_ngram_size", value) for value in (-1, 1.0, None, True, "2")],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_wrong_value_names_field_value_and_limit(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert str(caught.value).startswith(f"{field} is {value!r}: must be ")
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"n": np.int64(3)}, {"n": 3}),
        ({"n": MAX_SAMPLES}, {"n": MAX_SAMPLES}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": MIN_TEMPERATURE}, {"temperature": MIN_TEMPERATURE}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"stop_token_ids": [3, np.int32(1)]}, {"stop_token_ids": (3, 1)}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 5, "max_tokens": 5}),
        ({"stop": "\n\n"}, {"stop": ("\n\n",)}),
        ({"stop": ["a", "b", "a"]}, {"stop": ("a", "b", "a")}),
        ({"stop": None, "bad_words": None}, {"stop": (), "bad_words": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"bad_words": "no"}, {"bad_words": ("no",)}),
        ({"logit_bias": {"7": 1, np.int64(3): -100}}, {"logit_bias": {7: 1.0, 3: -100.0}}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        ({"allowed_token_ids": np.arange(3)}, {"allowed_token_ids": (0, 1, 2)}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 1e-3}, {"repetition_penalty": 1e-3}),
        ({"logprobs": -1, "prompt_logprobs": 0}, {"logprobs": -1, "prompt_logprobs": 0}),
    ],
)
def test_values_have_one_normal_form(given: dict[str, Any], kept: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    for name, value in kept.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)
    assert params == SamplingParams(**kept)
    assert params == SamplingParams(**kept)


def test_defaults_are_those_of_vllm_but_for_max_tokens() -> None:
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in dataclasses.fields(params)} == {
        "output_kind": RequestOutputKind.CUMULATIVE,
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": (), "stop_token_ids": (), "ignore_eos": False,
        "max_tokens": None, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "truncate_prompt_tokens": None, "logit_bias": None, "allowed_token_ids": None, "bad_words": (),
        "no_repeat_ngram_size": 0, "max_time": None, "structured_outputs": None, "token_trie": None,
        "allowed_tokens_fn": None, "speculative": None, "stream_interval": 1,
    }  # fmt: skip
    assert not params.greedy and SamplingParams(temperature=0).greedy


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidArgument, match=r"^min_tokens is 4: must be at most max_tokens, which is 3$"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidArgument, match=r"^stop is \('a',\): must be empty where detokenize is false"):
        SamplingParams(stop="a", detokenize=False)


HALVES = [
    ({"stop": ["a", "b\ud800"]}, r"^stop is .*: must be text, has half a surrogate pair at character 1$"),
    ({"bad_words": "\udc00"}, r"^bad_words is .* half a surrogate pair at character 0$"),
    *(
        ({"structured_outputs": {name: "ab\ud800"}}, rf"^structured_outputs\.{name} is .* pair at character 2$")
        for name in ("regex", "grammar")
    ),
    ({"structured_outputs": {"choice": ["a", "\ud800"]}}, r"^structured_outputs\.choice\[1\] is .* character 0$"),
    ({"structured_outputs": {"json": '{"enum": ["\\ud800"]}'}}, r"^structured_outputs\.json is .* what JSON can say"),
]


@pytest.mark.parametrize(("given", "message"), HALVES)
def test_half_a_surrogate_pair_is_no_text(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**given)


def test_a_copy_with_changes_is_checked_as_a_new_one() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2}, seed=3)
    assert params.clone() == params and params.clone() is not params
    assert params.clone(temperature=0, stop=None) == SamplingParams(temperature=0, logit_bias={1: 2}, seed=3)
    with pytest.raises(InvalidArgument, match="^n is 0"):
        params.clone(n=0)
    with pytest.raises(InvalidArgument, match="^temprature is 1: not a field of SamplingParams"):
        params.clone(temprature=1)


def test_a_caller_may_change_what_was_passed() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[5], stop[0] = 1.0, "b"
    assert (params.logit_bias, params.stop) == ({1: 2.0}, ("a",))
    assert params == params.clone() and params != params.clone(logit_bias={1: 3})


@pytest.mark.parametrize("make", [lambda values: SamplingParams(**values), SamplingParams.from_dict])
def test_unknown_field_names_the_known_ones(make: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^temprature is 1: not a field of SamplingParams; known are n, temperature,"
    ):
        make({"temprature": 1})


def test_from_dict_checks_as_the_constructor_does() -> None:
    assert SamplingParams.from_dict({"n": 2, "seed": 3}) == SamplingParams(n=2, seed=3)
    with pytest.raises(InvalidArgument, match="top_p is 2"):
        SamplingParams.from_dict({"top_p": 2})


def test_a_field_that_is_set_is_checked_with_the_others() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=8)
    params.max_tokens, params.stop, params.top_k, params.logit_bias = 16, "x", -1, {"3": 1}
    assert params == SamplingParams(temperature=0.5, max_tokens=16, stop=["x"], logit_bias={3: 1.0})
    before = params.clone()
    with pytest.raises(InvalidArgument, match="^n is 0"):
        params.n = 0
    with pytest.raises(InvalidArgument, match="^min_tokens is 17: must be at most max_tokens, which is 16"):
        params.min_tokens = 17
    with pytest.raises(InvalidArgument, match="^max_token is 3: not a field of SamplingParams; known are n, "):
        params.max_token = 3
    assert params == before, "what was refused changes nothing"
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_params_survive_pickling() -> None:
    params = SamplingParams(n=2, temperature=0.5, stop_token_ids=[1], logit_bias={"3": 1}, stop="x")
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=4) == params.clone(n=4)
    with pytest.raises(InvalidArgument, match="n is 0"):
        dataclasses.replace(params, n=0)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidArgument("n", 0, "must be 1 or more"), "INVALID_ARGUMENT", "n is 0: must be 1 or more"),
        (FeatureNotAvailable("executor", "ray", "not yet"), "UNIMPLEMENTED", "executor is 'ray': not yet"),
        (ModelFileError("a/b.gguf", "is cut short"), "MODEL_FILE", "a/b.gguf: is cut short"),
        (NotFound("request", "r1", "known: r2"), "NOT_FOUND", "request 'r1' does not exist; known: r2"),
        (RequestError("r1", "is closed"), "FAILED_PRECONDITION", "request 'r1': is closed"),
    ],
)
def test_errors_have_a_code_and_survive_pickling(error: PagedecError, code: str, message: str) -> None:
    assert isinstance(error, ValueError)
    assert (error.code, str(error)) == (code, message)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.code, str(copy)) == (code, message)


def test_codes_are_distinct_and_our_own_bug_is_no_value_error() -> None:
    kinds = [InvalidArgument, FeatureNotAvailable, ModelFileError, NotFound, RequestError, InvariantError]
    assert len({kind.code for kind in kinds}) == len(kinds)  # type: ignore[attr-defined]
    assert not issubclass(InvariantError, ValueError)


def test_long_values_do_not_make_long_messages() -> None:
    message = str(InvalidArgument("prompt", "x" * 10**6, "must be shorter"))
    assert len(message) < MAX_SHOWN + 50
    assert message.endswith("must be shorter")


def test_metrics_are_differences_of_one_clock() -> None:
    metrics = RequestMetrics(10.0, 10.5, 12.5, num_output_tokens=5)
    assert metrics.time_to_first_token == 0.5
    assert metrics.time_per_output_token == 0.5
    assert metrics.latency == 2.5
    unfinished = RequestMetrics(10.0)
    assert (unfinished.time_to_first_token, unfinished.time_per_output_token, unfinished.latency) == (None, None, None)
    assert RequestMetrics(1.0, 2.0, 2.0, num_output_tokens=1).time_per_output_token is None


def test_outputs_read_as_vllm_users_expect() -> None:
    answer = CompletionOutput(0, " there", [5, 6], finish_reason="length")
    output = RequestOutput("0", "Hello", [1, 2], [answer], True, RequestMetrics(0.0, num_cached_tokens=2))
    assert output.outputs[0].text == " there" and output.outputs[0].finished()
    assert output.num_cached_tokens == 2
    assert not CompletionOutput(0, "", []).finished()


def test_help_tells_every_field() -> None:
    told = inspect.getdoc(SamplingParams) or ""
    for field in dataclasses.fields(SamplingParams):
        assert f"\n    {field.name}: " in told, field.name
    assert "\n    n: answers for each prompt (default: 1)\n    temperature: 0 is greedy;" in told
    assert (
        "\n    output_kind: what each output of a stream holds, a RequestOutputKind: CUMULATIVE, DELTA, FINAL_ONLY"
        in told
    )
    assert all(len(line) <= 120 or not line.startswith("    ") for line in told.splitlines())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (BeamSearchParams, "num_beams", "num_beams is 4: not a field of BeamSearchParams; it is named beam_width"),
        (BeamSearchParams, "n", "n is 4: not a field of BeamSearchParams; it is named num_return_sequences"),
        (
            BeamSearchParams,
            "max_new_tokens",
            "max_new_tokens is 4: not a field of BeamSearchParams; it is named max_tok",
        ),
        (
            SamplingParams,
            "beam_width",
            "beam_width is 4: not a field of SamplingParams; a beam search has parameters of",
        ),
        (SamplingParams, "guided_decoding", "guided_decoding is 4: not a field of SamplingParams; structured_outputs"),
    ],
)
def test_names_of_other_engines_are_told_by_what_there_is(kind: Any, name: str, message: str) -> None:
    given = {"max_tokens": 4, name: 4}
    for make in (lambda: kind(**given), lambda: kind.from_dict(given), lambda: kind(max_tokens=4).clone(**{name: 4})):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            make()


def test_fields_of_vllm_s_that_ask_for_nothing() -> None:
    """Wrappers of vLLM's pass all fields that some version has, most of them as they are by default."""
    plain = {name: values[0] for name, values in PARAMS_ONLY.items()}
    assert SamplingParams(n=2, **plain) == SamplingParams(n=2)
    for name, values in PARAMS_ONLY.items():
        for value in values:
            assert SamplingParams(**{name: value}) == SamplingParams()
        for value in (7, "a", [3]):
            with pytest.raises(InvalidArgument, match=f"^{name} is .*: not a field of SamplingParams; "):
                SamplingParams(**{name: value})
