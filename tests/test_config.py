"""Engine configuration: one source, the same errors from Python, the command line and a file."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli.arguments import add_engine_arguments, engine_config
from pagedec.cli.parser import Parser
from pagedec.config import ENGINE_GROUPS, CacheConfig, EngineConfig, ModelConfig, engine_rules
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import rules
from pagedec.serve.server_config import ServerConfig

WRONG = [
    *[("model", value) for value in ("", None, 3)],
    *[("dtype", value) for value in ("float64", "", None)],
    *[("load_format", value) for value in ("pt", None)],
    *[("quantization", value) for value in ("int3", 8)],
    *[("skip_tokenizer_init", value) for value in (1, "yes", None)],
    *[("max_model_len", value) for value in (1, 0, -1, 1.5, True)],
    *[("block_size", value) for value in (0, 4, 12, 512, None, 16.0, True)],
    *[("num_blocks", value) for value in (0, -1, "many", 2.0)],
    *[("kv_cache_memory", value) for value in ("2XiB", "", "GiB", -1, 1000, 2**60, 1.5, True, "-1GiB")],
    *[("enable_prefix_caching", value) for value in (None, 1)],
    *[("max_num_seqs", value) for value in (0, 2**20, None)],
    *[("max_num_batched_tokens", value) for value in (0, -5, None)],
    *[("speculative_config", value) for value in ("ngram", [1], {1: 2})],
    *[("executor", value) for value in ("mp", None)],
    *[("tensor_parallel_size", value) for value in (0, None, True)],
    *[("attention_backend", value) for value in ("flashinfer", None)],
    *[("num_threads", value) for value in (0, -1, 1.0)],
    *[("seed", value) for value in (-1, None, 2**64)],
]
NOT_YET = [
    ("speculative_config", {"method": "eagle"}),
]


def from_flags(*flags: str) -> EngineConfig:
    parser = Parser(prog="test")
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(flags))


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_wrong_value_names_field_value_and_limit(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig.from_kwargs(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert str(caught.value).startswith(f"{field} is {value!r}: must be ")


@pytest.mark.parametrize(("field", "value"), NOT_YET, ids=lambda value: str(value))
def test_what_does_not_exist_yet_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(
        FeatureNotAvailable, match=rf"^{field}(\.method)? is .*: not available in this version; available: "
    ):
        EngineConfig.from_kwargs(**{field: value})


def test_unknown_argument_names_the_known_ones() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^max_num_seq is 3: not a field of the engine; known are model, tokenizer,"
    ):
        EngineConfig.from_kwargs(max_num_seq=3)
    with pytest.raises(InvalidArgument, match=r"^size is 3: not a field of CacheConfig; known are block_size,"):
        CacheConfig(size=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match=r"^port is 1: not a field of the engine"):
        EngineConfig.from_kwargs(port=1)


@pytest.mark.parametrize("name", ["engine_seed", "sead"])
def test_the_engine_s_seed_is_named_where_its_flag_was_meant(name: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f"{name} = 1\n")
    makers = (lambda: EngineConfig.from_kwargs(**{name: 1}), lambda: EngineConfig.from_file(file))
    for make in makers:
        with pytest.raises(InvalidArgument, match=rf"^{name} is 1: not a field of .*; did you mean seed\?$"):
            make()


def test_groups_must_be_of_their_kind() -> None:
    with pytest.raises(InvalidArgument, match="cache .* must be a CacheConfig"):
        EngineConfig(cache=ModelConfig())  # type: ignore[arg-type]


def test_only_one_size_of_the_pool() -> None:
    with pytest.raises(InvalidArgument, match="kv_cache_memory .* num_blocks is 8; give one of them"):
        EngineConfig.from_kwargs(num_blocks=8, kv_cache_memory="1GiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("2GB", 2 * 10**9),
        ("1m", 1 << 20),
    ],
)
def test_sizes_in_bytes_or_with_a_unit(text: str, size: int) -> None:
    assert EngineConfig.from_kwargs(kv_cache_memory=text).cache.kv_cache_memory == size
    assert EngineConfig.from_kwargs(kv_cache_memory=size).cache.kv_cache_memory == size


def test_field_names_are_unique_over_the_groups() -> None:
    names = [name for group in ENGINE_GROUPS.values() for name in rules(group)]
    assert len(names) == len(set(names))
    assert not set(names) & set(rules(ServerConfig))
    for group in ENGINE_GROUPS.values():
        assert [field.name for field in dataclasses.fields(group)] == list(rules(group))


def test_every_argument_has_a_valid_default_and_help() -> None:
    for name, (rule, default) in engine_rules().items():
        assert rule.check(name, default) == default
        assert rule.help


def test_a_path_is_a_model() -> None:
    assert EngineConfig.from_kwargs(model=Path("/models/a")).model.model == "/models/a"


def test_kwargs_make_an_equal_configuration() -> None:
    config = EngineConfig.from_kwargs(model="a", kv_cache_memory="1GiB", enable_prefix_caching=False, num_threads=3)
    assert EngineConfig.from_kwargs(**config.to_kwargs()) == config
    assert set(config.to_kwargs()) == set(engine_rules())


SAME = {
    "model": "some/model",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "block_size": 32,
    "kv_cache_memory": "64MiB",
    "enable_prefix_caching": False,
    "max_num_seqs": 4,
    "seed": 9,
}


def test_three_faces_make_the_same_configuration(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    text = "\n".join(f"{name} = {toml_value(value)}" for name, value in SAME.items())
    file.write_text(text, encoding="utf-8-sig")  # with the mark that editors of Windows write
    flags = [
        *("--model", "some/model", "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128"),
        *("--block-size", "32", "--kv-cache-memory", "64MiB", "--no-enable-prefix-caching", "--max-num-seqs", "4"),
        *("--engine-seed", "9"),
    ]
    expected = EngineConfig.from_kwargs(**SAME)
    assert EngineConfig.from_file(file) == expected
    assert from_flags(*flags) == expected
    assert from_flags("--config", str(file)) == expected
    assert expected != EngineConfig()


def test_flags_and_keywords_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("block_size = 32\nmax_num_seqs = 4\n")
    for config in (
        EngineConfig.from_file(file, max_num_seqs=8),
        from_flags("--config", str(file), "--max-num-seqs", "8"),
    ):
        assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 8)


@pytest.mark.parametrize(
    ("of_file", "flags", "expected"),
    [
        ('kv_cache_memory = "512MiB"', ("--num-blocks", "500"), (500, None, None)),
        ("num_blocks = 500", ("--kv-cache-memory", "512MiB"), (None, 512 << 20, None)),
        ("memory_utilization = 0.5", ("--num-blocks", "500"), (500, None, None)),
        ("num_blocks = 500", ("--memory-utilization", "0.5"), (None, None, 0.5)),
        ("num_blocks = 500", ("--kv-cache-memory", "none"), (500, None, None)),
    ],
)
def test_a_size_of_the_pool_wins_over_another_in_the_file(
    of_file: str, flags: tuple[str, ...], expected: tuple[object, ...], tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(of_file)
    given = {flags[0].strip("-").replace("-", "_"): {"none": None, "500": 500, "0.5": 0.5}.get(flags[1], flags[1])}
    for config in (from_flags("--config", str(file), *flags), EngineConfig.from_file(file, **given)):
        cache = config.cache
        assert (cache.num_blocks, cache.kv_cache_memory, cache.memory_utilization) == expected


@pytest.mark.parametrize(("field", "value"), [case for case in [*WRONG, *NOT_YET] if case[1] is not None])
def test_a_file_is_as_strict_as_python(field: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f"{field} = {toml_value(value)}\n")
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig.from_file(file)
    assert caught.value.field.partition(".")[0] == field


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_sise = 16", "block_sise is 16: not a field of .*engine.toml; known are "),
        ("[server]\nport = 1", "server is .*: not a field of "),
        ("block_size = ", "config is .*engine.toml': is not TOML: "),
        (b"\xff\xfe", "config is .*engine.toml': is not TOML: "),
        ("block_size = " + "9" * 5000, "config is .*engine.toml': is not TOML: Exceeds the limit "),
    ],
)
def test_damaged_files(text: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig.from_file(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="none.toml': cannot be read: No such file"):
        EngineConfig.from_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-size", "12"), "^block_size is 12: must be one of 8, 16, 32, 64, 128, 256$"),
        (("--block-size", "x"), "^block_size is 'x': must be one of 8, 16, 32, 64, 128, 256$"),
        (("--max-num-seqs", "1e3"), "^max_num_seqs is '1e3': must be a whole number from 1 to 65536$"),
        (("--dtype", "half"), "^dtype is 'half': must be one of auto, bfloat16, float16, float32$"),
        (("--kv-cache-memory", "much"), "^kv_cache_memory is 'much': must be a number of bytes from "),
        (("--speculative-config", "{"), "^speculative_config is '{': must be a table of names and values"),
        (
            ("--speculative-config", '{"method": "eagle"}'),
            "^speculative_config.method is 'eagle': not available in this",
        ),
        (("--no-such-flag", "1"), "^--no-such-flag is not a flag of test; see test --help$"),
        (("--max-num", "1"), "^--max-num is not a flag of test; did you mean --max-num-seqs"),
        (("--block-size",), "argument --block-size: expected one argument"),
    ],
)
def test_the_command_line_is_as_strict_as_python(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_flags(*flags)


def test_none_can_be_said_on_the_command_line() -> None:
    assert from_flags("--max-model-len", "none").model.max_model_len is None
    with pytest.raises(InvalidArgument, match="block_size is 'none'"):
        from_flags("--block-size", "none")


def test_every_argument_has_a_flag_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for name, (rule, default) in engine_rules().items():
        is_offer = rule.available != (default,)
        assert (f"--{'engine-seed' if name == 'seed' else name.replace('_', '-')}" in shown) == is_offer
    assert (
        "--engine-seed INT seed of random weights, and of requests without a seed; in files and in Python it is "
        "named seed" in shown
    )
    assert "(default: 16)" in shown and "(default: smollm2)" in shown


def test_the_example_file_is_valid() -> None:
    config = EngineConfig.from_file(Path(__file__).resolve().parent.parent / "examples" / "engine.toml")
    assert config.cache.kv_cache_memory == 512 << 20
    assert config.scheduler.speculative_config == {"method": "ngram", "num_candidates": 2}
