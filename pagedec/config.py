"""The engine's configuration: one source for Python, the command line and files, checked when it is made."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedec.errors import InvalidArgument, within
from pagedec.fields import (
    MAX_UINT64,
    Flag,
    Integer,
    Number,
    Rule,
    Size,
    Table,
    Text,
    check_fields,
    check_names,
    option,
    rules,
    strict,
)
from pagedec.lora import LoraConfig
from pagedec.params import BeamSearchParams, SamplingParams
from pagedec.speculation import DRAFT_MODEL_FIELDS, SpeculationTable

DEFAULT_MODEL = "smollm2"
QUANTIZATIONS = (
    *("int8", "int8_weight_only", "int4", "int4_128", "int4_zero", "int4_zero_128"),
    *("gguf", "awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "torchao"),
    *("mxfp4", "off"),
)
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")
EXECUTORS = ("auto", "inline", "process", "ray")
GENERATION_CONFIG_OFF = ("none", "vllm")
"""Values of `generation_config` that mean our own defaults."""
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e5m2")
POOL_SIZES = ("num_blocks", "kv_cache_memory", "memory_utilization")
"""The ways to say how large the KV pool is to be."""
ATTENTION_PACKAGES = ("flash-attn", "xformers")
ATTENTION_BACKENDS = ("auto", "native", "reference", *ATTENTION_PACKAGES)


@strict
@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, from where, in which numbers."""

    model: str = option(
        DEFAULT_MODEL, Text(f"a local directory, a .gguf file, a hub id, or {DEFAULT_MODEL}, the embedded default")
    )
    tokenizer: str | None = option(None, Text("directory or hub id of the tokenizer; none: the model's", optional=True))
    revision: str | None = option(
        None, Text("branch, tag or commit of a model that is a hub id; none: its main branch", optional=True)
    )
    tokenizer_revision: str | None = option(
        None, Text("the same of the tokenizer; none: revision, where both are of one hub id", optional=True)
    )
    download_dir: str | None = option(
        None, Text("where what comes from the hub is kept; none: where its client keeps things", optional=True)
    )
    skip_tokenizer_init: bool = option(False, Flag("take and return token ids only; no tokenizer is needed"))
    load_format: str = option(
        "auto",
        Text("the weights' format; dummy: random, of a config.json or a preset as qwen3-0.6b", choices=LOAD_FORMATS),
    )
    dtype: str = option(
        "auto",
        Text(
            "numbers of weights and activations; float16: on a CUDA device; auto: the best for this machine",
            choices=("auto", "bfloat16", "float16", "float32"),
        ),
    )
    model_impl: str = option(
        "auto",
        Text(
            "whose code computes the model; transformers: its modeling code with our attention; auto: native where "
            "there is one",
            choices=MODEL_IMPLS,
        ),
    )
    quantization: str | None = option(
        None,
        Text(
            "weights of linear layers: int8, inputs too; int8_weight_only: inputs as they are; int4 in groups of 32 or "
            "128, with or without zero points; gguf: as a .gguf file has them; off: as dtype says; a checkpoint's "
            "method, such as fp8: its floats of 8 bits, too; by default its integers or MXFP4, else numbers",
            choices=QUANTIZATIONS,
            optional=True,
        ),
    )
    max_model_len: int | None = option(
        None, Integer("most tokens of a prompt and its answer; none: what the model allows", low=2, optional=True)
    )
    generation_config: str = option(
        "auto",
        Text("sampling defaults; auto: the model's generation_config.json or .gguf; none: ours; else a path"),
    )
    override_generation_config: dict[str, Any] | None = option(
        None, Table('values over those of generation_config, such as {"temperature": 0.5}', optional=True)
    )
    seed: int = option(0, Integer("seed of random weights, and of requests without a seed", high=MAX_UINT64))

    def __post_init__(self) -> None:
        check_fields(self)


@strict
@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV blocks. `num_blocks`, `kv_cache_memory` or `memory_utilization` sizes the pool; none of them: a quarter of
    the memory that is available when the weights are loaded, at most 4 GiB, but a whole context where half of it holds
    one."""

    block_size: int = option(16, Integer("tokens in a block of KV", choices=(8, 16, 32, 64, 128, 256)))
    num_blocks: int | None = option(None, Integer("blocks of KV in the pool", low=1, optional=True))
    kv_cache_memory: int | None = option(
        None, Size("memory of the KV pool instead of num_blocks, such as 2GiB", low=2**16, optional=True)
    )
    memory_utilization: float | None = option(
        None,
        Number(
            "share of the available memory that the KV pool may take, such as 0.5; none: a quarter, at most 4 GiB",
            above=0,
            high=1,
            optional=True,
        ),
    )
    kv_cache_dtype: str = option(
        "auto",
        Text(
            "numbers of KV; int8, fp8 (e4m3): a byte each and a scale for each token and head, half the memory; auto: "
            "as dtype says",
            choices=KV_CACHE_DTYPES,
            available=("auto", "int8", "fp8"),
        ),
    )
    enable_prefix_caching: bool = option(True, Flag("keep finished prompts' blocks and reuse common beginnings"))
    kv_offload_memory: int | None = option(
        None,
        Size("the host's memory for blocks that the KV pool gives up, to be found again, such as 8GiB", optional=True),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kv_offload_memory is not None and not self.enable_prefix_caching:
            limit = "must be none without enable_prefix_caching: nothing would be found"
            raise InvalidArgument("kv_offload_memory", self.kv_offload_memory, limit)
        sizes = {name: getattr(self, name) for name in POOL_SIZES}
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            other, name = given[:2]
            raise InvalidArgument(name, sizes[name], f"{other} is {sizes[other]}; give one of them")


@strict
@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step, or one request, may hold."""

    max_num_seqs: int = option(
        256, Integer("most branches in a step; the beams of one search count as one", low=1, high=2**16)
    )
    max_num_batched_tokens: int = option(
        512, Integer("most rows in a step, prompts and drafts included", low=1, high=2**20)
    )
    target_step_time: float | None = option(
        None,
        Number("seconds a step should take while answers are written; none: any", above=0, high=1e6, optional=True),
    )
    max_logprobs: int = option(
        20,
        Integer(
            "log-probabilities of each token that any request may ask for; for more, it may have 1048576 in all; -1: "
            "no bound",
            low=-1,
        ),
    )
    async_scheduling: bool | None = option(
        None,
        Flag(
            "plan a step while the one before is carried out; none: where a device works by itself; answers do not "
            "depend on it",
            optional=True,
        ),
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        SpeculationTable(
            'how requests draft, such as {"method": "ngram"} or {"model": "a smaller one"}; none: not at all',
            optional=True,
            of_engine=True,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        draft_configs(self.speculative_config, ModelConfig(), CacheConfig())


@strict
@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What sessions may hold between calls."""

    max_session_branches: int = option(16384, Integer("most open branches of one session", low=1, high=2**20))
    max_session_tokens: int = option(
        2**20, Integer("most tokens of one session, each counted once however many branches share it", low=1)
    )
    max_parked_branches: int = option(65536, Integer("most open branches of all sessions", low=1, high=2**24))
    max_parked_tokens: int = option(2**22, Integer("most tokens of all sessions, some 250 bytes each", low=1))
    session_ttl: float | None = option(
        None,
        Number("seconds after which a session that nobody uses is closed; none: never", above=0, optional=True),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@strict
@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """On what the work runs."""

    executor: str = option(
        "auto",
        Text(
            "where steps run; inline: in the engine's process; process: in one for each device; auto: inline on one "
            "device, process on several; ray: in actors of a cluster",
            choices=EXECUTORS,
        ),
    )
    step_timeout: float = option(
        600.0,
        Number(
            "seconds in which a worker process must answer a step, before another one takes its place",
            above=0,
            high=1e6,
        ),
    )
    tensor_parallel_size: int = option(1, Integer("devices, or processes of one, that share a model", low=1, high=1024))
    attention_backend: str = option(
        "auto",
        Text(
            "attention kernel; auto: the fastest of ours; flash-attn, xformers: that package's, on a CUDA device, for "
            "branches that it takes",
            choices=ATTENTION_BACKENDS,
        ),
    )
    num_threads: int | None = option(
        None,
        Integer(
            "threads of the CPU kernels, of each process; none: as many as torch uses, at most a container's quota of "
            "processors, shared by a machine's processes",
            low=1,
            high=4096,
            optional=True,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.executor == "inline" and self.tensor_parallel_size > 1:
            limit = f"must be process or ray where tensor_parallel_size is {self.tensor_parallel_size}, or auto"
            raise InvalidArgument("executor", self.executor, limit)


ENGINE_GROUPS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "session": SessionConfig,
    "lora": LoraConfig,
    "parallel": ParallelConfig,
}
"""The groups whose fields are engine arguments. Field names are unique over all of them."""


def engine_rules() -> dict[str, tuple[Rule, Any]]:
    """Every engine argument by name: its rule and its default."""
    return {name: entry for group in ENGINE_GROUPS.values() for name, entry in rules(group).items()}


@strict
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of it. Usually made by `from_kwargs` or `from_file`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for name, group in ENGINE_GROUPS.items():
            if not isinstance(getattr(self, name), group):
                raise InvalidArgument(name, getattr(self, name), f"must be a {group.__name__}")

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineConfig:
        """Make one from engine arguments by name; an unknown name is an error that lists the known ones."""
        check_names("the engine", values, engine_rules(), values)
        groups = ENGINE_GROUPS.items()
        return cls(**{name: group(**{k: values[k] for k in rules(group) if k in values}) for name, group in groups})

    @classmethod
    def from_file(cls, path: str | Path, **values: Any) -> EngineConfig:
        """Make one from a TOML file of engine arguments; `values` win over the file."""
        return cls.from_kwargs(**over_file(read_file(path), values))

    def to_kwargs(self) -> dict[str, Any]:
        """The engine arguments that make an equal configuration."""
        groups = (getattr(self, name) for name in ENGINE_GROUPS)
        return {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}


def draft_configs(
    speculative_config: Mapping[str, Any] | None, model: ModelConfig, cache: CacheConfig
) -> tuple[ModelConfig, CacheConfig]:
    """The draft model and its KV pool: what `speculative_config` says of them; else the target's numbers, and no size.
    Raises `InvalidArgument` about fields of `speculative_config`."""
    table = speculative_config or {}
    given = {name: table[name] for name in DRAFT_MODEL_FIELDS if name in table}
    sizes = {name: given.pop(name) for name in POOL_SIZES if name in given}
    same = {"dtype": model.dtype, "download_dir": model.download_dir, "seed": model.seed}
    with within("speculative_config."):
        return ModelConfig(**{**same, **given}), CacheConfig(
            block_size=cache.block_size, kv_cache_dtype=cache.kv_cache_dtype, **sizes
        )


def draft_config(config: EngineConfig) -> EngineConfig:
    """The configuration of the draft model's lane."""
    model, cache = draft_configs(config.scheduler.speculative_config, config.model, config.cache)
    parallel = config.parallel
    if parallel.attention_backend in ATTENTION_PACKAGES:  # a draft's chains are rolled without the host, by our kernels
        parallel = dataclasses.replace(parallel, attention_backend="native")
    return dataclasses.replace(config, model=model, cache=cache, parallel=parallel, lora=LoraConfig())


def names_draft_model(config: EngineConfig) -> bool:
    """Whether there is a draft model."""
    return "model" in (config.scheduler.speculative_config or {})


def over_file(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments over those of a file. One that sizes the pool is instead of whichever the file has."""
    is_sized = any(given.get(name) is not None for name in POOL_SIZES)
    return {name: value for name, value in file.items() if not (is_sized and name in POOL_SIZES)} | dict(given)


def read_file(path: str | Path) -> Mapping[str, Any]:
    """The engine arguments in a TOML file, names checked, values not yet."""
    return read_tables(path)[0]


def read_tables(
    path: str | Path, elsewhere: Mapping[str, str] | None = None
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """The engine arguments in a TOML file, the sampling parameters of its table [sampling], and those of beam search of
    its table [beams]; names checked, values not yet. `elsewhere`: of names that are something else, what they are."""
    try:
        with open(path, "rb") as file:
            values = tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise InvalidArgument("config", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, UTF-8, or a number of thousands of digits
        raise InvalidArgument("config", str(path), f"is not TOML: {error}") from error
    except RecursionError:
        raise InvalidArgument("config", str(path), "is not TOML that can be read: it is nested too deeply") from None
    known, drawn, searched = engine_rules(), rules(SamplingParams), rules(BeamSearchParams)
    tables, others = {}, elsewhere or {}
    for title, kind, fields in (("sampling", "sampling", drawn), ("beams", "beam search", searched)):
        table = tables[title] = values.pop(title, {})
        if not isinstance(table, dict):
            raise InvalidArgument(title, table, f"must be a table of {kind} parameters in {path}")
        for name in (name for name in table if name not in fields):
            if name in known:
                limit = f"must be above the table [{title}] of {path}: the engine takes it"
                raise InvalidArgument(name, table[name], limit)
            if name in searched:
                limit = f"must be in the table [beams] of {path}, as beam search parameters are"
                raise InvalidArgument(name, table[name], limit)
        check_names(f"[{title}] in {path}", table, fields, table, others)
    for name in (name for name in values if name not in known):
        title, kind = ("sampling", "sampling") if name in drawn else ("beams", "beam search")
        if name in drawn or name in searched:
            limit = f"must be in the table [{title}] of {path}, as {kind} parameters are"
            raise InvalidArgument(name, values[name], limit)
    check_names(f"{path}", values, (*known, *tables), values, others)
    return values, tables["sampling"], tables["beams"]
