"""What backends share whose device is the host: memory, the KV cache, rules as arrays, and the read-out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import LaneForward, Masks
from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.arena import zeros
from pagedec.kernels.backend import Backend, CacheTensors, Drafted, Roller
from pagedec.kernels.block_swap import BlockSwap, HostBlockSwap
from pagedec.kernels.drawn import DrawnTokens, HostDrawn
from pagedec.kernels.processing import FlatRules, flatten
from pagedec.kernels.readout import HostReadOut
from pagedec.kernels.reference_cache import as_bytes, cache_dtype, cache_shapes
from pagedec.kernels.row_buffer import RowBuffer

POISON_TOKEN = -1
LARGE = 64 << 20
"""Bytes of a tensor that takes memory as it is written: of steps that may have thousands of rows, each once for each of
its experts, most is never used. What the usual step needs is there from the beginning."""


class HostBackend(Backend):
    """A backend whose tensors the host can read and write."""

    overlaps = False

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait(self) -> None:
        pass

    def room(self) -> int | None:
        return None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if (num_bytes := math.prod(shape) * dtype.itemsize) < LARGE:
            return torch.zeros(shape, dtype=dtype)
        try:
            return zeros(shape, dtype)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes are not given ({error})") from error

    def write(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        self.writer(tensor)(array)

    def writer(self, tensor: torch.Tensor) -> Callable[[np.ndarray], None]:
        values = tensor.numpy()

        def write(array: np.ndarray) -> None:
            values[: len(array)] = array

        return write

    def cache(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        feature_width: int = 0,
    ) -> CacheTensors:
        shapes = cache_shapes(num_blocks, num_kv_heads, head_dim, block_size, self.dtype, self.kv_kind)
        k, v = (zeros((num_layers, *shape), cache_dtype(self.dtype, self.kv_kind)) for shape in shapes)
        tokens = torch.full((num_blocks * block_size,), POISON_TOKEN, dtype=torch.int32)
        features = zeros((num_blocks * block_size, feature_width), self.dtype) if feature_width else None
        return CacheTensors(k, v, tokens, num_kv_heads, head_dim, block_size, features)

    def block_swap(self, cache: CacheTensors, num_places: int) -> BlockSwap:
        return HostBlockSwap(cache)

    def poison(self, cache: CacheTensors, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            for side in cache.sides:
                as_bytes(side[:, block]).fill_(0xFF)  # NaN in every dtype and as a scale, -1 as a token

    def rules(self, rules: LogitsRules, vocab_size: int) -> FlatRules:
        return flatten(rules, vocab_size)

    def read_out(
        self,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, FlatRules],
        masks: Masks | None = None,
        drafted: Drafted | None = None,
        room: RowBuffer | None = None,
    ) -> HostReadOut:
        return HostReadOut(self, forward, cache, rules, masks, drafted, room)

    def has_nan(self, logits: torch.Tensor) -> bool:
        return bool(logits.isnan().any())

    def drawn_tokens(self) -> DrawnTokens:
        return HostDrawn(self)

    def roller(
        self,
        programs: Any,
        buffers: Any,
        plans: Sequence[Any],
        cache: CacheTensors,
        num_drawn: int,
        debug: bool = False,
        lag: int = 0,
    ) -> Roller | None:
        return None
