"""From a configuration to an engine: files, weights, cache, kernels. Nothing below this reads a configuration."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial

import torch

from pagedec import environment
from pagedec.config import POOL_SIZES, EngineConfig, ModelConfig, ParallelConfig
from pagedec.core.limits import SchedulerLimits
from pagedec.core.scheduler import Scheduler
from pagedec.engine.engine import Engine, ModelLimits
from pagedec.engine.memory import available_memory, is_out_of_memory, shown_size
from pagedec.engine.options import Vocabulary
from pagedec.engine.pool import KvPool, choose_pool
from pagedec.errors import InvalidArgument, ModelFileError, PoolWarning, Shown, WeightsWarning
from pagedec.executor.inline import InlineExecutor
from pagedec.formats.generation import read_end_ids
from pagedec.formats.resolve import ModelFiles, resolve_model, resolve_tokenizer
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import LibraryNotFound, load
from pagedec.kernels.native import NativeBackend
from pagedec.models.architecture import Architecture
from pagedec.models.base import Model
from pagedec.models.registry import load_architecture, load_model_weights
from pagedec.runtime.cache import allocate_cache, block_bytes
from pagedec.runtime.runner import LaneRunner, ModelRunner
from pagedec.text.tokenizer import Tokenizer


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
    size, memory = weight_bytes(arch, backend), available_memory()
    if size > memory.num_bytes:
        told = f"the weights of {config.model} take {shown_size(size)}, more than the {memory}: the system may end the process"
        warnings.warn(f"{told}; quantization int8 takes a byte a weight", WeightsWarning, stacklevel=4)
    try:
        model = load_model_weights(arch, files, backend, length, config.seed)
    except (OSError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"has weights of {shown_size(size)}, which this machine does not give; {memory}"
        raise InvalidArgument("model", config.model, problem) from error
    backend.settle()
    return LoadedModel(model, arch, files, length)


def weight_bytes(arch: Architecture, backend: Backend) -> int:
    """About how much memory the weights take in a backend's form; 0 where only their modeling code knows."""
    num_weights = sum(math.prod(shape) for shape in arch.weight_shapes().values())
    return num_weights * (backend.dtype.itemsize if backend.quantization is None else 1)


def load_tokenizer(config: ModelConfig, files: ModelFiles) -> Tokenizer | None:
    """The model's tokenizer, or the one that is named; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return Tokenizer.from_path(resolve_tokenizer(config.tokenizer))
    if files.tokenizer is None:
        raise ModelFileError(files.model, "has no tokenizer; name one with tokenizer, or set skip_tokenizer_init")
    return Tokenizer.from_path(files.tokenizer)


def lane_pool(loaded: LoadedModel, config: EngineConfig, taken: int = 0) -> KvPool:
    """The size of a lane's cache; `taken`: bytes of the available memory that another lane will use."""
    size = block_bytes(loaded.arch, config.cache.block_size, loaded.model.backend.dtype)
    return choose_pool(config.cache, size, loaded.max_model_len, config.scheduler.max_num_seqs, taken=taken)


def build_lane(
    loaded: LoadedModel, config: EngineConfig, pool: KvPool, debug: bool = False, vocab_size: int | None = None
) -> LaneRunner:
    """A model with a cache of its own; it draws the token ids below `vocab_size`, if it knows more."""
    try:
        tensors = allocate_cache(loaded.arch, pool.num_blocks, pool.block_size, loaded.model.backend.dtype)
    except (OSError, MemoryError) as error:
        name = next((name for name in POOL_SIZES if getattr(config.cache, name) is not None), "kv_cache_memory")
        value = Shown("chosen") if getattr(config.cache, name) is None else getattr(config.cache, name)
        limit = f"must be less: the KV pool would take {shown_size(pool.num_bytes)}, which this machine does not give"
        raise InvalidArgument(name, value, limit) from error
    return LaneRunner(loaded.model, tensors, config.scheduler.max_num_batched_tokens, debug, vocab_size)


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
    pool = lane_pool(loaded, config)
    lanes = {"target": build_lane(loaded, config, pool, debug)}
    if draft is not None:
        draft_pool = lane_pool(draft, config, pool.num_bytes)
        lanes["draft"] = build_lane(draft, config, draft_pool, debug, loaded.arch.vocab_size)
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
            max_positions={} if draft is None else {"draft": draft.max_model_len},
            vocab_sizes={} if draft is None else {"draft": draft.arch.vocab_size},
        )
    )
    limits = ModelLimits(loaded.arch.vocab_size, loaded.max_model_len, eos_token_ids, config.scheduler.max_logprobs)
    executor = InlineExecutor(ModelRunner(lanes))
    engine = Engine(scheduler, executor, limits, seed=config.model.seed, debug=debug, vocabulary=vocabulary)
    engine.kv_cache = pool
    return engine


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
    engine = assemble(config, loaded, end_tokens(loaded, tokenizer), vocabulary=vocabulary)
    complaint = None if engine.kv_cache is None else engine.kv_cache.complaint(loaded.max_model_len)
    if complaint is not None:
        warnings.warn(complaint, PoolWarning, stacklevel=3)  # who made the LLM
    return engine, tokenizer
