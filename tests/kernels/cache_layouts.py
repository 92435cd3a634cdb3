"""K and V of a cache as a CUDA device keeps them, for tests that have them as a processor does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pagedec.kernels.library import Context, KvKind
from pagedec.kernels.reference_cache import KV_KINDS, SCALE_BYTES, parts


def kind_of(cache: Tensor) -> int:
    """What a cache's elements are."""
    return int(KV_KINDS.get(cache.dtype, KvKind.PLAIN))


def _by_token(x: Tensor, *, paired: bool, keys: bool) -> Tensor:
    """Of the processor's layout, with pairs side by side or without, [..., block_size, head_dim]."""
    if paired:
        return x.transpose(-2, -3).flatten(-2) if keys else x.mT.flatten(-3, -2)
    return x.mT if keys else x


def _by_place(x: Tensor, *, paired: bool, keys: bool) -> Tensor:
    """Back again."""
    if paired:
        return x.unflatten(-1, (-1, 2)).transpose(-2, -3) if keys else x.unflatten(-2, (-1, 2)).mT
    return x.mT if keys else x


def in_turn(dim: int) -> Tensor:
    """Of a device's bytes: which dimension lies where. Of 16 the first and the last eight in turn."""
    whole = dim // 16 * 16
    return torch.cat((torch.arange(whole).view(-1, 2, 8).mT.flatten(), torch.arange(whole, dim)))


def _to_device(cache: Tensor, *, paired: bool, keys: bool) -> Tensor:
    if not kind_of(cache):
        return _by_token(cache, paired=paired, keys=keys).clone(memory_format=torch.contiguous_format)
    data, scales = parts(cache, paired=paired, keys=keys)
    rows = _by_token(data, paired=paired, keys=keys)
    rows = rows[..., in_turn(rows.shape[-1])].flatten(-2)
    flat = torch.cat((rows, scales.contiguous().view(torch.uint8)), -1)
    return flat.unflatten(-1, (scales.shape[-1], -1)).contiguous()


def _from_device(own: Tensor, cache: Tensor, *, paired: bool, keys: bool) -> None:
    if not kind_of(cache):
        cache.copy_(_by_place(own, paired=paired, keys=keys))
        return
    data, scales = parts(cache, paired=paired, keys=keys)
    size, dim = own.shape[-2], own.shape[-1] - SCALE_BYTES
    flat = own.flatten(-2)
    rows = torch.empty_like(flat[..., : size * dim].unflatten(-1, (size, dim)))
    rows[..., in_turn(dim)] = flat[..., : size * dim].unflatten(-1, (size, dim))
    data.copy_(_by_place(rows, paired=paired, keys=keys))
    scales.copy_(flat[..., size * dim :].contiguous().view(torch.bfloat16))


@contextmanager
def laid_out(context: Context, k: Tensor, v: Tensor, *, paired: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V as the context's device keeps them; what becomes of them is put back. A CUDA device has both as
    [..., block_size, head_dim]."""
    if not context.isa.startswith("cuda"):
        yield k, v
        return
    own_k, own_v = _to_device(k, paired=paired, keys=True), _to_device(v, paired=paired, keys=False)
    yield own_k, own_v
    _from_device(own_k, k, paired=paired, keys=True)
    _from_device(own_v, v, paired=paired, keys=False)
