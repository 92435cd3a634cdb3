"""From a configuration to an engine: files, weights, cache, kernels. Nothing below this reads a configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import torch

from pagedec import environment
from pagedec.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from pagedec.core.limits import SchedulerLimits
from pagedec.core.scheduler import Scheduler
from pagedec.engine.engine import Engine, ModelLimits
from pagedec.engine.options import Vocabulary
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.executor.inline import InlineExecutor
from pagedec.formats.generation import read_end_ids
from pagedec.formats.resolve import ModelFiles, resolve_model, resolve_tokenizer
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import LibraryNotFound, load
from pagedec.kernels.memory import trim
from pagedec.kernels.native import NativeBackend
from pagedec.models.architecture import Architecture
from pagedec.models.base import Model
from pagedec.models.registry import load_architecture, load_model_weights
from pagedec.runtime.cache import allocate_cache, block_bytes
from pagedec.runtime.runner import LaneRunner, ModelRunner
from pagedec.text.tokenizer import Tokenizer

CACHE_SHARE = 4  # the KV pool takes a quarter of the free memory where nothing is said ...
CACHE_LIMIT = 4 << 30  # ... and at most this many bytes: pages are touched only as blocks are used
MIN_BLOCKS = 2  # one for tokens, and one for the copy of a shared block


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in a backend's hands, and what is known of it."""

    model: Model
    arch: Architecture
    files: ModelFiles
    max_model_len: int


def choose_backend(parallel: ParallelConfig, dtype: str, quantization: str | None = None) -> Backend:
    """The compiled kernels, or torch where there are none or where it is asked for.

    dtype "auto" is bfloat16 on compiled kernels, which read half the bytes of float32, and float32 on the reference.
    """
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if parallel.num_threads is not None:
        torch.set_num_threads(parallel.num_threads)
    if parallel.attention_backend != "reference":
        try:
            library = load()
            if parallel.num_threads is not None:  # torch's number is of the calling thread alone
                library.set_num_threads(parallel.num_threads)
            return NativeBackend(library, names.get(dtype, torch.bfloat16), quantization)
        except LibraryNotFound as error:
            if parallel.attention_backend == "native":
                limit = f"is not available: {error}"
                raise InvalidArgument("attention_backend", parallel.attention_backend, limit) from error
    return ReferenceBackend(names.get(dtype, torch.float32), quantization)


def load_model(config: ModelConfig, backend: Backend) -> LoadedModel:
    """Resolve, check and load the weights of one model."""
    files = resolve_model(config.model, config.load_format)
    arch = load_architecture(files, config.model_impl)
    limit = arch.max_position_embeddings
    length = limit if config.max_model_len is None else config.max_model_len
    if length > limit:
        raise InvalidArgument("max_model_len", length, f"must be at most {limit}, the model's context")
    model = load_model_weights(arch, files, backend, length, config.seed)
    trim()  # packing leaves the room of its parts behind
    return LoadedModel(model, arch, files, length)


def count_blocks(config: CacheConfig, arch: Architecture, dtype: torch.dtype, max_model_len: int, num_seqs: int) -> int:
    """How many blocks of KV to keep: what is asked for, or what the free memory allows and the requests can use."""
    size = block_bytes(arch, config.block_size, dtype)
    if config.num_blocks is not None:
        if config.num_blocks < MIN_BLOCKS:
            raise InvalidArgument("num_blocks", config.num_blocks, f"must be at least {MIN_BLOCKS}")
        return config.num_blocks
    if config.kv_cache_memory is not None:
        num_blocks = int(config.kv_cache_memory) // size
        if num_blocks < MIN_BLOCKS:
            limit = f"must be at least {MIN_BLOCKS} blocks of {size} bytes"
            raise InvalidArgument("kv_cache_memory", config.kv_cache_memory, limit)
        return num_blocks
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    useful = num_seqs * -(-max_model_len // config.block_size)
    return max(MIN_BLOCKS, min(useful, CACHE_LIMIT // size, free // CACHE_SHARE // size))


def load_tokenizer(config: ModelConfig, files: ModelFiles) -> Tokenizer | None:
    """The model's tokenizer, or the one that is named; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return Tokenizer.from_path(resolve_tokenizer(config.tokenizer))
    if files.tokenizer is None:
        raise ModelFileError(files.model, "has no tokenizer; name one with tokenizer, or set skip_tokenizer_init")
    return Tokenizer.from_path(files.tokenizer)


def build_lane(loaded: LoadedModel, config: EngineConfig, debug: bool = False) -> LaneRunner:
    """A model with a cache of its own."""
    backend, cache, scheduler = loaded.model.backend, config.cache, config.scheduler
    num_blocks = count_blocks(cache, loaded.arch, backend.dtype, loaded.max_model_len, scheduler.max_num_seqs)
    try:
        tensors = allocate_cache(loaded.arch, num_blocks, cache.block_size, backend.dtype)
    except (OSError, MemoryError) as error:
        size = num_blocks * block_bytes(loaded.arch, cache.block_size, backend.dtype)
        name = "num_blocks" if cache.kv_cache_memory is None else "kv_cache_memory"
        limit = f"must be less: the KV pool would take {size / 2**30:.1f} GiB, which this machine does not give"
        raise InvalidArgument(name, getattr(cache, name), limit) from error
    return LaneRunner(loaded.model, tensors, scheduler.max_num_batched_tokens, debug)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    eos_token_ids: tuple[int, ...],
    draft: LoadedModel | None = None,
    vocabulary: Vocabulary | None = None,
) -> Engine:
    """An engine over a loaded model, with caches of its own; with `draft`, rolls run on that model's lane; with `vocabulary`,
    requests may have stop strings and bad words."""
    debug = environment.read("PAGEDEC_DEBUG") == "1"
    lanes = {"target": build_lane(loaded, config, debug)}
    if draft is not None:
        lanes["draft"] = build_lane(draft, config, debug)
    size, rows = config.cache.block_size, config.scheduler.max_num_batched_tokens
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks={lane: runner.cache.num_blocks for lane, runner in lanes.items()},
            vocab_size=loaded.arch.vocab_size,
            block_size=size,
            max_blocks_per_table=-(
                -(loaded.max_model_len + rows) // size
            ),  # a draft may reach behind the context's end
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=rows,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
    )
    limits = ModelLimits(loaded.arch.vocab_size, loaded.max_model_len, eos_token_ids)
    executor = InlineExecutor(ModelRunner(lanes))
    return Engine(scheduler, executor, limits, seed=config.model.seed, debug=debug, vocabulary=vocabulary)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What the engine needs to know of a tokenizer."""
    table = tokenizer.byte_table
    return Vocabulary(table.pieces, table.special_ids, partial(tokenizer.encode, add_special_tokens=False))


def end_tokens(loaded: LoadedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's and the model's own, of which a tokenizer from elsewhere need not know. Those
    that the model cannot write are left out."""
    config = loaded.files.config
    own = [] if config is None or config.suffix == ".gguf" else read_end_ids(config.parent)
    known = () if tokenizer is None else tokenizer.eos_token_ids
    both = dict.fromkeys((*known, *(own or loaded.arch.eos_token_ids)))
    return tuple(token for token in both if token < loaded.arch.vocab_size)


def load_engine(config: EngineConfig) -> tuple[Engine, Tokenizer | None]:
    """An engine ready for requests, and its tokenizer."""
    backend = choose_backend(config.parallel, config.model.dtype, config.model.quantization)
    tokenizer = load_tokenizer(config.model, resolve_model(config.model.model, config.model.load_format))
    loaded = load_model(config.model, backend)
    vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
    return assemble(config, loaded, end_tokens(loaded, tokenizer), vocabulary=vocabulary), tokenizer
