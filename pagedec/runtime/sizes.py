"""How much memory a model's weights and its lanes' KV take, and what there is for them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from pagedec.config import POOL_SIZES, EngineConfig, draft_config
from pagedec.errors import InvalidArgument
from pagedec.formats.quantised import MXFP4
from pagedec.formats.quantize import FORMS
from pagedec.kernels.backend import Backend
from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.device import DeviceBackend
from pagedec.models.adapters import LoraSizes, places_bytes
from pagedec.models.architecture import Architecture
from pagedec.models.sharding import cut_shape, part_of, sharded
from pagedec.runtime.cache import block_bytes
from pagedec.runtime.heads import feature_width
from pagedec.runtime.memory import Memory, available_memory, shown_size
from pagedec.runtime.pool import KvPool, choose_pool, default_bytes, whole_bytes

if TYPE_CHECKING:
    from pagedec.runtime.loading import LoadedModel

WEIGHT_BYTES = {"int4": 18 / 32, "int4_128": 66 / 128, "int4_zero": 20 / 32, "int4_zero_128": 68 / 128, "gguf": 0.61}
WEIGHT_BYTES |= {"int8": 1, "int8_weight_only": 1, MXFP4: 18 / 32}
"""Bytes of a weight with its share of scales; of files about what is usual."""
STORED_BYTES = {4: 0.55, 8: 34 / 32}
"""The same of integers of so many bits that a checkpoint has."""
DEVICE_BYTES = 34 / 32
"""Where a device has a format's values in 8 bits."""


def memory_of(backend: Backend) -> Memory:
    """What there is for weights and caches."""
    own = backend.room()
    return available_memory() if own is None else Memory(own, "of what the device has free")


def weight_bytes(arch: Architecture, backend: Backend, bits: int | None = 4) -> int:
    """About how much memory the weights take in a backend's form, of a rank those that it has. `bits`: what a value has
    where layers stay in a checkpoint's integers; None: they become numbers."""
    link = backend.link
    cuts = {} if link is None else arch.cuts(part_of(arch, link.rank, link.world))
    own = ((name, cut_shape(shape, cuts.get(name))) for name, shape in arch.weight_shapes().items())
    return int(sum(math.prod(shape) * _bytes_each(name, shape, backend, bits) for name, shape in own))


def _bytes_each(name: str, shape: tuple[int, ...], backend: Backend, bits: int | None) -> float:
    """Of a weight: what no block divides stays in the dtype, and so does all but experts where these are in MXFP4, and
    all but layers where a checkpoint has these in integers."""
    kind, whole = backend.quantization, backend.dtype.itemsize
    if kind is None or (kind in FORMS and shape[-1] % FORMS[kind].group):
        return whole
    if kind == MXFP4 and not (".experts." in name and len(shape) == 2):
        return whole
    if kind == MXFP4 and isinstance(backend, DeviceBackend) and not LAYOUTS[MXFP4].on_devices:
        return DEVICE_BYTES
    if kind in WEIGHT_BYTES:
        return WEIGHT_BYTES[kind]
    return whole if bits is None or len(shape) < 2 or ".layers." not in name else STORED_BYTES[bits]


def check_places(arch: Architecture, backend: Backend, sizes: LoraSizes) -> None:
    """Raise InvalidArgument where places for so many adapters do not fit into what there is beside nothing else."""
    link = backend.link
    own = arch if link is None else sharded(arch, part_of(arch, link.rank, link.world))
    taken, memory = places_bytes(own, sizes, backend.dtype.itemsize), memory_of(backend)
    if taken > memory.num_bytes:
        limit = f"must be less, or max_lora_rank: places for adapters take {shown_size(taken)}, more than the {memory}"
        raise InvalidArgument("max_loras", sizes.num_places, limit)


def bytes_of_a_block(loaded: LoadedModel, config: EngineConfig) -> int:
    """Of a lane's KV."""
    arch, backend = loaded.arch, loaded.model.backend
    if backend.link is not None:  # all ranks have as many blocks; the first has the most KV heads
        arch = sharded(arch, part_of(arch, 0, backend.link.world))
    return block_bytes(arch, config.cache.block_size, backend.dtype, backend.kv_kind, feature_width(loaded))


def lane_pool(loaded: LoadedModel, config: EngineConfig, taken: int = 0, beside: int = 0) -> KvPool:
    """The size of a lane's cache. `taken`: bytes of the available memory that another lane will use; `beside`: bytes of
    a block of another lane, which is to have as many of a device's memory."""
    backend, size = loaded.model.backend, bytes_of_a_block(loaded, config)
    default = default_bytes if backend.room() is None else partial(whole_bytes, part=size / (size + beside))
    sizes = config.cache, size, loaded.max_model_len, config.scheduler.max_num_seqs
    return choose_pool(*sizes, lambda: memory_of(backend), taken, default)


def target_pool(loaded: LoadedModel, config: EngineConfig, draft: LoadedModel | None) -> KvPool:
    """The size of the target's cache. Where it would have all of a device's memory, `draft` leaves it less."""
    if draft is None or loaded.model.backend.room() is None:
        return lane_pool(loaded, config)
    own = draft_config(config)
    size, cache = bytes_of_a_block(draft, own), own.cache
    told = cache.kv_cache_memory or 0 if cache.num_blocks is None else cache.num_blocks * size
    return lane_pool(loaded, config, told, 0 if told else size)


def draft_pool(draft: LoadedModel, config: EngineConfig, target: KvPool) -> KvPool:
    """The size of the draft lane's cache by its own configuration, before the target's is taken; where that says
    nothing, as many blocks as the target has, or fewer where they do not fit."""
    pool = lane_pool(draft, config, target.num_bytes)
    is_told = any(getattr(config.cache, name) is not None for name in POOL_SIZES)
    if is_told or pool.num_blocks <= target.num_blocks:
        return pool
    num_bytes = pool.num_bytes // pool.num_blocks * target.num_blocks
    return KvPool(target.num_blocks, pool.block_size, num_bytes, "as many blocks as the target has")


def offload_blocks(config: EngineConfig, pool: KvPool) -> int:
    """How many blocks of a pool the host keeps. Raises InvalidArgument where it is not one."""
    size, given = pool.num_bytes // pool.num_blocks, config.cache.kv_offload_memory
    if given is not None and given < size:
        raise InvalidArgument("kv_offload_memory", given, f"must be at least {size}, the bytes of a block")
    return 0 if given is None else given // size
