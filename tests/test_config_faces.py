"""One configuration with three faces: for every argument, a file, flags and Python give the same value or the same
refusal."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pagedec.cli.arguments import (
    RENAMED,
    add_beam_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    beam_params,
    engine_config,
    given_sampling,
    sampling_params,
)
from pagedec.cli.parser import Parser
from pagedec.config import EngineConfig, engine_rules, read_tables
from pagedec.errors import InvalidArgument
from pagedec.fields import Flag, Integer, Number, Rule, Size, Text, rules
from pagedec.params import SamplingParams

SPECIAL: dict[str, Any] = {
    "speculative_config": {"method": "ngram"},
    "speculative": {"method": "lookahead", "window_size": 3},
    "override_generation_config": {"temperature": 0.5},
    "stop_token_ids": [3, 4],
    "allowed_token_ids": [3, 4],
    "stop": ["a", 'b"\n'],
    "bad_words": ["x y"],
    "logit_bias": {"17": -2.5},
    "spaces_between_special_tokens": True,
}
"""Values of fields whose rule does not say one."""


def other_values(name: str, rule: Rule, default: Any) -> list[Any]:
    """Values that the rule allows besides the default; what an argument's choices are is all tried."""
    if name in SPECIAL:
        return [SPECIAL[name]]
    if isinstance(rule, Flag):
        return [True, False]
    if choices := getattr(rule, "choices", ()):
        return list(choices)
    if isinstance(rule, Size):
        return ["64MiB", 1 << 20]
    if isinstance(rule, Integer):
        return [rule.low, rule.high, rule.low + 1]
    if isinstance(rule, Number):
        return [0.75, 1]
    assert isinstance(rule, Text), name
    return ["none-such", "a b"]


def cases(fields: dict[str, tuple[Rule, Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, (rule, default) in fields.items() for value in other_values(name, rule, default)]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def flags(name: str, value: Any, renamed: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    flag = renamed.get(name, name).replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [part for item in value for part in (f"--{flag}", item)]
    if isinstance(value, list):
        return [f"--{flag}", ",".join(map(str, value))]
    return [f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def parse(*given: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    return parser.parse_args(given)


def outcome(make: Any) -> Any:
    """A configuration, or what is said against it."""
    try:
        return make()
    except InvalidArgument as error:
        return type(error), error.field, error.limit


@pytest.mark.parametrize(("name", "value"), cases(engine_rules()), ids=repr)
def test_engine_arguments(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"{name} = {toml(value)}\n")
    expected = outcome(lambda: EngineConfig.from_kwargs(**{name: value}))
    assert outcome(lambda: EngineConfig.from_file(file)) == expected
    assert outcome(lambda: engine_config(parse(*flags(name, value, RENAMED)))) == expected
    assert outcome(lambda: engine_config(parse("--config", str(file)))) == expected


@pytest.mark.parametrize(("name", "value"), cases(rules(SamplingParams)), ids=repr)
def test_sampling_parameters(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'model = "m"\n[sampling]\n{name} = {toml(value)}\n')
    expected = outcome(lambda: SamplingParams(**{name: value}))
    assert outcome(lambda: SamplingParams(**read_tables(file)[1])) == expected
    assert outcome(lambda: sampling_params(parse(*flags(name, value)))) == expected
    assert outcome(lambda: sampling_params(parse("--config", str(file)))) == expected
    assert EngineConfig.from_file(file).model.model == "m", "the table does not disturb the engine's arguments"


def test_most_values_are_not_refused() -> None:
    """Or the tests above would compare refusals only."""

    def taken(fields: dict[str, tuple[Rule, Any]], make: Any) -> set[str]:
        return {name for name, value in cases(fields) if not isinstance(outcome(partial(make, **{name: value})), tuple)}

    assert taken(engine_rules(), EngineConfig.from_kwargs) == set(engine_rules())
    assert taken(rules(SamplingParams), SamplingParams) == set(rules(SamplingParams))


def test_a_configuration_from_a_pipe() -> None:
    """As with `--config <(...)`: it can be read only once."""
    reader, writer = os.pipe()
    os.write(writer, b'dtype = "float32"\n[sampling]\nmax_tokens = 3\n')
    os.close(writer)
    arguments = parse("--config", f"/dev/fd/{reader}")
    assert (engine_config(arguments).model.dtype, given_sampling(arguments)) == ("float32", {"max_tokens": 3})
    os.close(reader)


def test_flags_win_over_the_file_and_defaults_over_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[sampling]\ntemperature = 0.5\nmax_tokens = 4\n")
    arguments = parse("--config", str(file), "--max-tokens", "9")
    assert sampling_params(arguments, top_k=3, temperature=1.5) == SamplingParams(
        temperature=0.5, max_tokens=9, top_k=3
    )


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ('kv_offload_memory = "1GiB"', "--no-enable-prefix-caching",
         "kv_offload_memory is .*; it is in .*config.toml, and --kv-offload-memory none lifts it"),
        ('executor = "inline"', "--tensor-parallel-size=2",
         "executor is 'inline': .*; it is in .*config.toml, and the flag --executor wins over it"),
        ("[sampling]\nmin_tokens = 10", "--max-tokens=2",
         "min_tokens is 10: .*; it is in .*config.toml, and the flag --min-tokens wins over it"),
        ("[beams]\nnum_return_sequences = 3", "--beam-width=2",
         "num_return_sequences is 3: .*; it is in .*config.toml, and --num-return-sequences none lifts it"),
        ("[beams]\nnum_return_sequences = 3\nbeam_width=2", "--max-tokens=5",
         "num_return_sequences is 3: must be at most beam_width, 2"),
    ],
)  # fmt: skip
def test_what_flags_are_against_is_said_to_be_in_the_file(text: str, given: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text + "\n")
    parser = Parser(prog="test")
    add_sampling_arguments(parser)
    add_beam_arguments(parser)
    add_engine_arguments(parser)
    arguments = parser.parse_args(["--config", str(file), given])
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        engine_config(arguments)
        beam_params(arguments, SamplingParams(**given_sampling(arguments)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sampling]\ntemprature = 1", r"temprature is 1: not a field of \[sampling\] in .*config.toml; known are n, "),
        ("[sampling]\nblock_size = 16", r"block_size is 16: must be above the table \[sampling\] of .*config.toml: "),
        ("sampling = 3", "sampling is 3: must be a table of sampling parameters in .*config.toml"),
        ("[sampling]\nbeam_width = 4", r"beam_width is 4: must be in the table \[beams\] of .*config.toml, as "),
        ("beam_width = 4", r"beam_width is 4: must be in the table \[beams\] of .*config.toml, as beam search "),
        ("[beams]\nblock_size = 16", r"block_size is 16: must be above the table \[beams\] of .*config.toml: "),
        ("[beams]\nbeam_widht = 4", r"beam_widht is 4: not a field of \[beams\] in .*did you mean beam_width\?"),
        ("beams = 4", "beams is 4: must be a table of beam search parameters in .*config.toml"),
        ("temperature = 0", r"temperature is 0: must be in the table \[sampling\] of .*config.toml, as "),
    ],
)
def test_wrong_names_in_the_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    for read in (EngineConfig.from_file, read_tables):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            read(file)
