"""The sampling parameters' flags mean what the same values mean in Python."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from pagedec.batch.bodies import parse_body
from pagedec.cli.arguments import add_sampling_arguments, sampling_params
from pagedec.cli.parser import Parser
from pagedec.config import read_tables
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
        (["--stop", r"\n"], {"stop": "\n"}),
        (["--stop", r"a\tb\r\n\"", "--bad-words", r"\u00e9\ud83d\ude00"], {"stop": 'a\tb\r\n"', "bad_words": "é😀"}),
        (["--stop", r"\\n\\"], {"stop": "\\n\\"}),
        (["--stop", r'["\\n", "\u00e9\n"]', "--stop", r"[\n"], {"stop": ["\\n", "é\n", "[\n"]}),
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
        (
            ["--stop", r"a\d"],
            r"stop is 'a\\d': has \d, which is no escape: \n, \t, \r, \" and \uXXXX are, and a backslash is",
        ),
        (["--bad-words", "a\\"], r"bad_words is 'a\\': has \, which is no escape: "),
        (["--stop", r"\u12"], r"stop is '\\u12': has \u, which is no escape"),
        (["--stop", r"\ud800"], r"stop is '\ud800': must be text, has half a surrogate pair"),
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


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_escapes_are_the_command_line_s_alone(name: str, tmp_path: Path) -> None:
    """Python, files and bodies have escapes of their own, or none."""
    file = tmp_path / "config.toml"
    file.write_text(f"[sampling]\n{name} = '\\n'\n")
    values: list[dict[str, Any]] = [{name: r"\n"}, dict(read_tables(file)[1])]
    values.append({name: getattr(parse_body(False, {"prompt": "a", name: r"\n"}, {}).params, name)})
    assert [getattr(SamplingParams(**value), name) for value in values] == [("\\n",)] * 3
