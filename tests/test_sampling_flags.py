"""The sampling parameters' flags mean what the same values mean in Python."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from pagedec.cli.arguments import Parser, add_sampling_arguments, sampling_params
from pagedec.errors import InvalidArgument
from pagedec.params import SamplingParams


def parsed(*flags: str) -> SamplingParams:
    parser = Parser(prog="test")
    add_sampling_arguments(parser)
    arguments: argparse.Namespace = parser.parse_args(flags)
    return sampling_params(arguments)


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], {}),
        (["--stop", "a"], {"stop": "a"}),
        (["--stop", "a", "--stop", "\n\n"], {"stop": ["a", "\n\n"]}),
        (["--stop", '["a", "b\\n"]', "--stop", "c"], {"stop": ["a", "b\n", "c"]}),
        (["--stop", "[1"], {"stop": "[1"}),
        (["--stop", "[]"], {"stop": None}),
        (["--stop", "none"], {"stop": "none"}),
        (["--bad-words", "x", "--bad-words", "y z"], {"bad_words": ["x", "y z"]}),
        (["--logit-bias", '{"17": -2.5, "3": 1}'], {"logit_bias": {17: -2.5, 3: 1}}),
        (["--logit-bias", "none"], {}),
        (["--allowed-token-ids", "3,4,"], {"allowed_token_ids": [3, 4]}),
        (["--allowed-token-ids", "none"], {}),
        (["--presence-penalty", "-0.5", "--repetition-penalty", "1.1", "--no-repeat-ngram-size", "3"],
         {"presence_penalty": -0.5, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}),
        (["--logprobs", "-1", "--prompt-logprobs", "none"], {"logprobs": -1}),
        (["--no-detokenize", "--include-stop-str-in-output", "--no-skip-special-tokens"],
         {"detokenize": False, "include_stop_str_in_output": True, "skip_special_tokens": False}),
    ],
    ids=repr,
)  # fmt: skip
def test_flags_are_values(flags: list[str], values: dict[str, Any]) -> None:
    assert parsed(*flags) == SamplingParams(**values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop", ""], "stop is '': must be a text that is not empty"),
        (["--stop", '["a", 3]'], "stop is ['a', 3]: must be a text that is not empty, or a list of them"),
        (["--logit-bias", "17"], "logit_bias is 17: must be a table of token ids and numbers from -100 to 100"),
        (["--logit-bias", "{17: 1}"], "logit_bias is '{17: 1}': must be a table of token ids"),
        (["--logit-bias", '{"17": 101}'], "logit_bias is {'17': 101}: must be a table of token ids"),
        (["--allowed-token-ids", ""], "allowed_token_ids is []: must be a sequence of at least one token id from 0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0: must be a finite number above 0"),
    ],
    ids=repr,
)
def test_flags_are_as_strict_as_python(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parsed(*flags)
    assert str(caught.value).startswith(message)
