"""From a configuration to lanes: files, weights, caches, kernels. Nothing below this reads a configuration."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagedec import environment
from pagedec.config import (
    ATTENTION_PACKAGES,
    POOL_SIZES,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    draft_config,
    names_draft_model,
)
from pagedec.errors import InvalidArgument, ModelFileError, Shown, WeightsWarning, within
from pagedec.formats.generation import read_end_ids
from pagedec.formats.gguf.header import headers_kept
from pagedec.formats.quantised import MXFP4, quantised
from pagedec.formats.resolve import ModelFiles, resolve_model
from pagedec.kernels.attention_kernel import AttentionKernel, check_shapes
from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.flash_attn_kernel import FlashAttention
from pagedec.kernels.library import DEVICES, KernelError, Library, LibraryNotFound, load
from pagedec.kernels.link import Exchange
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.records import KvKind
from pagedec.kernels.xformers_kernel import Xformers
from pagedec.lora import LoraConfig
from pagedec.models.adapters import LoraSizes
from pagedec.models.architecture import Architecture
from pagedec.models.draft_head import DraftHead
from pagedec.models.hf.hosted_architecture import HostedArchitecture
from pagedec.models.model import Model
from pagedec.models.registry import check_adapters, check_ranks, load_architecture, load_model_weights
from pagedec.models.sharding import part_of, sharded
from pagedec.runtime.cache import allocate_cache
from pagedec.runtime.fingerprint import model_digest, numerics_digest
from pagedec.runtime.follower import Follower
from pagedec.runtime.geometry import Geometry, LaneGeometry
from pagedec.runtime.heads import feature_width, keep_features, load_head, names_head
from pagedec.runtime.links import connect, machine
from pagedec.runtime.memory import is_out_of_memory, shown_size
from pagedec.runtime.nccl import NcclLink
from pagedec.runtime.numbers import NAMES, chosen_dtype, is_on_device
from pagedec.runtime.pool import KvPool
from pagedec.runtime.processors import check_threads, default_threads, tell_torch
from pagedec.runtime.runner import LaneRunner
from pagedec.runtime.sizes import (
    check_places,
    draft_pool,
    lane_pool,
    memory_of,
    offload_blocks,
    target_pool,
    weight_bytes,
)
from pagedec.runtime.weight_form import weight_form
from pagedec.runtime.worker import Worker

NO_SIZES = dict.fromkeys(POOL_SIZES)
KERNELS: dict[str, Callable[[], AttentionKernel]] = {own.name: own for own in (FlashAttention, Xformers)}
"""Of other packages, by their names among `attention_backend`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many ranks loads a part of a model, how it tells the others something, and the address at which they
    reach its machine."""

    rank: int
    world: int
    exchange: Exchange
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in a backend's hands, and what is known of it."""

    model: Model
    arch: Architecture
    files: ModelFiles
    max_model_len: int


def choose_backend(
    parallel: ParallelConfig,
    dtype: str,
    quantization: str | None = None,
    place: int = 0,
    kv_cache_dtype: str = "auto",
) -> Backend:
    """The compiled kernels, or torch where there are none or where it is asked for. `place`: how many ranks of the same
    machine come before this one; each has a device, as far as there are some.

    dtype "auto" is bfloat16 on compiled kernels, which read half the bytes of float32, and float32 on the reference.
    Raises InvalidArgument for float16 on a CPU's kernels, and for more threads than the machine can run.
    """
    kv_kind = KvKind.PLAIN if kv_cache_dtype == "auto" else KvKind[kv_cache_dtype.upper()]
    num_threads = default_threads() if parallel.num_threads is None else parallel.num_threads
    if parallel.num_threads is not None:
        check_threads(parallel.num_threads)
    tell_torch(num_threads)
    if parallel.attention_backend != "reference":
        try:
            library, numbers = _loaded(parallel.attention_backend), NAMES.get(dtype, torch.bfloat16)
            if library.isa in DEVICES:
                return _device_backend(library, numbers, quantization, place, kv_kind)
            if dtype == "float16":
                raise InvalidArgument("dtype", dtype, "must be bfloat16, float32 or auto on a CPU")
            # those of kernels are told, since torch's number is of the calling thread alone
            return NativeBackend(library, numbers, quantization, num_threads, 0, kv_kind)
        except LibraryNotFound as error:
            if (isa := environment.read("PAGEDEC_ISA")) in DEVICES:
                raise InvalidArgument("PAGEDEC_ISA", isa, f"is not available: {error}") from error
            if parallel.attention_backend == "native":
                limit = f"is not available: {error}"
                raise InvalidArgument("attention_backend", parallel.attention_backend, limit) from error
    return ReferenceBackend(NAMES.get(dtype, torch.float32), quantization, kv_kind)


def _loaded(attention_backend: str) -> Library:
    try:
        return load()
    except KernelError as error:  # of another version, or no library at all
        limit = f"the compiled kernels cannot be used: {error}; reference does without them"
        raise InvalidArgument("attention_backend", attention_backend, limit) from error


def _device_backend(
    library: Library, dtype: torch.dtype, quantization: str | None, place: int, kv_kind: KvKind
) -> DeviceBackend:
    """Kernels of a device; its threads are not the processor's."""
    try:
        return DeviceBackend(library, dtype, quantization, 0, place % library.num_devices, kv_kind)
    except (KernelError, MemoryError) as error:
        raise InvalidArgument("PAGEDEC_ISA", library.isa, f"cannot be used: {error}") from error


def own_backend(config: EngineConfig, place: int = 0) -> Backend:
    """`choose_backend` as a configuration says."""
    model, name = config.model, config.parallel.attention_backend
    dtype = chosen_dtype(model, name)
    backend = choose_backend(config.parallel, dtype, weight_form(model), place, config.cache.kv_cache_dtype)
    if name in ATTENTION_PACKAGES:
        if not isinstance(backend, DeviceBackend):
            problem = f"must be auto, native or reference on a processor (kernels here: {backend.name}); it serves CUDA"
            raise InvalidArgument("attention_backend", name, f"{problem} devices, chosen by PAGEDEC_ISA=cuda")
        backend.use_attention(KERNELS[name](), config.cache.block_size)
    return backend


def load_model(
    config: ModelConfig, backend: Backend, longest: int | None = None, lora: LoraConfig | None = None
) -> LoadedModel:
    """Resolve, check and load the weights of one model. `longest`: tokens of a sequence that are enough where the
    configuration says nothing. `lora`: which adapters it has places for; None: none."""
    files = resolve_model(config.model, config.load_format)
    arch = load_architecture(files, config.model_impl)
    limit = arch.max_position_embeddings
    length = min(limit, longest or limit) if config.max_model_len is None else config.max_model_len
    if length > limit:
        raise InvalidArgument("max_model_len", length, f"must be at most {limit}, the model's context")
    stored = quantised(files, (MXFP4,))
    bits = 4 if stored is None else stored.bits if stored.is_kept else None
    if stored is not None and stored.are_floats and isinstance(backend, DeviceBackend):
        bits = None
    size, memory = weight_bytes(arch, backend, bits), memory_of(backend)
    if size > memory.num_bytes:
        told = f"the weights of {config.model} take {shown_size(size)}, more than the {memory}"
        advice = "the system may end the process"
        if not isinstance(arch, HostedArchitecture):
            advice += "; quantization int8 takes a byte a weight, int4 half of one"
        if isinstance(backend, DeviceBackend):
            advice = "quantization int8 takes a byte a weight, and tensor_parallel_size shares them among devices"
        warnings.warn(f"{told}: {advice}", WeightsWarning, stacklevel=4)
    places = lora_sizes(lora)
    if places is not None:
        check_adapters(arch)
        check_places(arch, backend, places)
    try:
        model = load_model_weights(arch, files, backend, length, config.seed, places)
    except (OSError, MemoryError, RuntimeError, ModelFileError) as error:
        if not is_out_of_memory(error.__cause__ or error if isinstance(error, ModelFileError) else error):
            raise
        problem = f"has weights of {shown_size(size)}, which this machine does not give; {memory}"
        raise InvalidArgument("model", config.model, problem) from error
    backend.settle()
    return LoadedModel(model, arch, files, length)


def lora_sizes(config: LoraConfig | None) -> LoraSizes | None:
    """The places that a configuration has for adapters."""
    return None if config is None or not config.enable_lora else LoraSizes(config.max_loras, config.max_lora_rank)


def build_lane(
    loaded: LoadedModel,
    config: EngineConfig,
    pool: KvPool,
    debug: bool = False,
    vocab_size: int | None = None,
    num_offload_blocks: int = 0,
) -> LaneRunner:
    """A model with a cache of its own; it draws the token ids below `vocab_size`, if it knows more."""
    rows, backend = config.scheduler.max_num_batched_tokens, loaded.model.backend
    if isinstance(backend, DeviceBackend) and backend.attention is not None:
        check_shapes(backend.attention, loaded.model.attention_shapes(pool.block_size))
    try:
        sizes = pool.num_blocks, pool.block_size, backend, feature_width(loaded)
        tensors = allocate_cache(loaded.model.arch, *sizes)
    except (OSError, MemoryError) as error:
        name = next((name for name in POOL_SIZES if getattr(config.cache, name) is not None), "kv_cache_memory")
        value = Shown("chosen") if getattr(config.cache, name) is None else getattr(config.cache, name)
        limit = f"must be less: the KV pool would take {shown_size(pool.num_bytes)}, which this machine does not give"
        raise InvalidArgument(name, value, limit) from error
    try:
        return LaneRunner(loaded.model, tensors, rows, debug, vocab_size, num_offload_blocks)
    except OSError as error:
        limit = "must be less: this machine does not give as much"
        raise InvalidArgument("kv_offload_memory", config.cache.kv_offload_memory, limit) from error
    except MemoryError as error:
        where = "this machine" if backend.room() is None else "the device"
        limit = f"must be less, or the KV pool: {where} has no room for a step beside {shown_size(pool.num_bytes)}"
        raise InvalidArgument("max_num_batched_tokens", rows, f"{limit} of KV: {error}") from error


def build_worker(config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None = None) -> Worker:
    """Lanes over loaded models, with caches of their own; with `draft`, rolls run on that model's lane."""
    debug = environment.read("PAGEDEC_DEBUG") == "1"
    pool, drafts = target_pool(loaded, config, draft), None
    kept = offload_blocks(config, pool)
    own = config if draft is None else draft_config(config)
    if draft is not None:  # sized before a device's memory is taken
        with within("speculative_config."):
            drafts = draft_pool(draft, own, pool)
    lanes = {"target": build_lane(loaded, config, pool, debug, num_offload_blocks=kept)}
    known = {"target": _lane_geometry(loaded, pool, kept)}
    if draft is not None and drafts is not None:
        with within("speculative_config."):
            if isinstance(draft.model, DraftHead):
                draft.model.source = lanes["target"].cache.features
            lanes["draft"] = build_lane(draft, own, drafts, debug, loaded.arch.vocab_size)
        known["draft"] = _lane_geometry(draft, drafts)
    return Worker(lanes, _geometry(loaded, config.model, known, pool), loaded.model.backend.link)


def build_follower(config: EngineConfig, loaded: LoadedModel) -> Follower:
    """A rank's part of a loaded model, with its KV."""
    link, pool = loaded.model.backend.link, lane_pool(loaded, config)
    assert link is not None
    kept = offload_blocks(config, pool)
    lane = build_lane(loaded, config, pool, environment.read("PAGEDEC_DEBUG") == "1", num_offload_blocks=kept)
    return Follower(lane, _geometry(loaded, config.model, {"target": _lane_geometry(loaded, pool, kept)}, pool), link)


def _lane_geometry(loaded: LoadedModel, pool: KvPool, num_offload_blocks: int = 0) -> LaneGeometry:
    sizes = pool.num_blocks, loaded.arch.vocab_size, loaded.max_model_len
    return LaneGeometry(*sizes, num_offload_blocks, loaded.model.lag)


def _geometry(loaded: LoadedModel, config: ModelConfig, lanes: dict[str, LaneGeometry], pool: KvPool) -> Geometry:
    backend = loaded.model.backend
    dtype, weights = str(backend.dtype).removeprefix("torch."), backend.quantization
    world = 1 if backend.link is None else backend.link.world
    names = model_digest(loaded.files, config), numerics_digest(backend, config, world)
    kv = "auto" if backend.kv_kind == KvKind.PLAIN else backend.kv_kind.name.lower()
    numbers, num_threads = (backend.name, dtype, weights), torch.get_num_threads()
    # ranks that meet on the host wait there for one another
    overlaps = backend.overlaps and (backend.link is None or backend.link.received is not None)
    return Geometry(lanes, pool, end_ids(loaded), *numbers, num_threads, world, *names, kv, overlaps)


def end_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens that end an answer by the model's own files."""
    config = loaded.files.config
    own = [] if config is None or config.suffix == ".gguf" else read_end_ids(config.parent)
    return tuple(own or loaded.arch.eos_token_ids)


def check_configuration(config: ModelConfig, files: ModelFiles) -> None:
    """Raise what loading raises for a configuration that is damaged, or of a model that cannot be run."""
    load_architecture(files, config.model_impl)


def check_shares(config: EngineConfig) -> None:
    """Raise `InvalidArgument` where the model cannot be shared by as many ranks as the configuration says. Reads no
    weights."""
    model = config.model
    arch = load_architecture(resolve_model(model.model, model.load_format), model.model_impl)
    check_ranks(arch, config.parallel.tensor_parallel_size)


def load_whole(config: EngineConfig) -> Worker:
    """A worker that has all of the model. Raises `PagedecError` for what cannot be loaded, and warns of what may end
    badly."""
    backend = own_backend(config)
    loaded = load_model(config.model, backend, lora=config.lora)
    keep_features(config, loaded)
    return build_worker(config, loaded, load_draft(config, loaded))


@headers_kept()
def load_worker(config: EngineConfig, ranks: Ranks) -> Worker | Follower:
    """The part of a model that a rank has; all of it where there is but one. Raises as `load_whole` does."""
    if ranks.world == 1:
        return load_whole(config)
    config, backend = join(config, ranks)
    loaded = load_model(config.model, backend, lora=config.lora)
    keep_features(config, loaded)
    draft = load_draft(config, loaded) if ranks.rank == 0 else None  # before it is known what KV may take
    config = agree(config, ranks, loaded, draft)
    return build_worker(config, loaded, draft) if ranks.rank == 0 else build_follower(config, loaded)


def join(config: EngineConfig, ranks: Ranks) -> tuple[EngineConfig, Backend]:
    """A rank's share of what the configuration allows, and its kernels with a link to the other ranks."""
    config, place = _share_of(config, ranks)
    backend = own_backend(config, place)
    told = ranks.exchange({"isa": backend.name})
    different = next((rank for rank, own in enumerate(told) if own != told[0]), None)
    if different is not None:
        limit = f"must be the same at all ranks: rank 0 has {told[0]['isa']}, rank {different} {told[different]['isa']}"
        raise InvalidArgument("PAGEDEC_ISA", backend.name, limit)
    native, seconds = backend if isinstance(backend, NativeBackend) else None, config.parallel.step_timeout
    backend.link = connect(ranks.rank, ranks.world, ranks.exchange, native, seconds, ranks.address)
    return config, backend


def agree(config: EngineConfig, ranks: Ranks, loaded: LoadedModel, draft: LoadedModel | None = None) -> EngineConfig:
    """The configuration with as many blocks as all ranks have memory for, the first one beside a draft model's."""
    pool = target_pool(loaded, config, draft)
    link, own = loaded.model.backend.link, dict[str, Any](num_blocks=pool.num_blocks)
    if isinstance(link, NcclLink):
        part = sharded(loaded.arch, part_of(loaded.arch, ranks.rank, ranks.world))
        own["shape"] = [part.num_attention_heads, part.num_kv_heads, link.shape_of_device]
    told = ranks.exchange(own)
    if isinstance(link, NcclLink) and all(other["shape"] == own["shape"] for other in told):
        link.are_alike()
    least = min(own["num_blocks"] for own in told)
    cache = dataclasses.replace(config.cache, **{**NO_SIZES, "num_blocks": least})
    return dataclasses.replace(config, cache=cache)


def _share_of(config: EngineConfig, ranks: Ranks) -> tuple[EngineConfig, int]:
    """The configuration of a rank that shares its machine: of threads, and of a device's memory, as much as others
    have. And how many ranks of the machine come before it."""
    told = [own["machine"] == machine() for own in ranks.exchange({"machine": machine()})]
    sharers, place = sum(told), sum(told[: ranks.rank])
    parallel, cache = config.parallel, config.cache
    sizes = [getattr(cache, name) for name in POOL_SIZES]
    if parallel.num_threads is None:
        parallel = dataclasses.replace(parallel, num_threads=max(1, default_threads() // sharers))
    # Ray lets each rank see a device of its own
    is_alone = parallel.executor == "ray" and environment.gpus_of_a_rank() > 0
    of_a_device, share = 1 if is_alone else math.ceil(sharers / _num_devices(parallel)), cache.memory_utilization
    if of_a_device > 1 and is_on_device(parallel.attention_backend) and sizes.count(None) == len(sizes):
        share = 1.0  # of which each would take all
    if share is not None:
        cache = dataclasses.replace(cache, memory_utilization=share / of_a_device)
    return dataclasses.replace(config, parallel=parallel, cache=cache), place


def _num_devices(parallel: ParallelConfig) -> int:
    """How many devices ranks of this machine have among them."""
    try:
        return 1 if parallel.attention_backend == "reference" else load().num_devices
    except (LibraryNotFound, KernelError):  # whoever uses it says so
        return 1


def load_draft(config: EngineConfig, target: LoadedModel) -> LoadedModel | None:
    """The model that speculative_config names, in numbers of its own; None where it names none. Raises errors about
    speculative_config's fields."""
    if not names_draft_model(config):
        return None
    own = draft_config(config)
    with within("speculative_config."):
        backend = own_backend(own, target.model.backend.device)
        if not names_head(config):
            return load_model(own.model, backend, target.max_model_len)
    head, files, length = load_head(config, target, backend)
    return LoadedModel(head, head.arch, files, length)
