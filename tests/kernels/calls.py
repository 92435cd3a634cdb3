"""The small kernels called on tensors, and how results are compared with float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.core.forward import DRAW_DTYPE
from pagedec.kernels.backend import are_of_all_heads
from pagedec.kernels.library import (
    CUDA,
    EMULATED_DEVICE,
    ArgmaxArgs,
    Context,
    Dtype,
    EmbedArgs,
    KvCopyArgs,
    LayerNormArgs,
    Library,
    RmsNormArgs,
    RopeKvWriteArgs,
    SampleArgs,
    SoftCapArgs,
    TopkLseArgs,
    loadable_isas,
)
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference import RopeShape
from pagedec.kernels.reference_cache import SCALE_BYTES
from tests.kernels import host_memory
from tests.kernels.cache_layouts import kind_of, laid_out

CODES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
ALWAYS_VNNI = ("avx512bf16", "amx", "amx_emulated", "avx512bf16_on_avx2", "amx_on_avx2")
DTYPES = [torch.float32, torch.bfloat16]
EMULATED_UNITS = ("amx_emulated", "amx_on_avx2")
T = TypeVar("T")


def emulated_unit() -> str:
    """The library of the matrix unit, emulated, that this processor runs."""
    found = next((isa for isa in EMULATED_UNITS if isa in loadable_isas()), None)
    if found is None:
        pytest.skip("needs a processor with AVX2, and make test's libraries")
    return found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


def ints(values: Sequence[int] | Tensor | np.ndarray) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr() or host_memory.of_nothing()


def count(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def threads(context: Context, num_threads: int) -> Context:
    """The same kernels, in a new context with so many threads; a real device, which takes its time to make one, has one
    for all who ask."""
    library = context.library
    return _kept(library, num_threads) if library.isa == CUDA else library.context(num_threads)


@functools.cache
def _kept(library: Library, num_threads: int) -> Context:
    return library.context(num_threads)


def native(context: Context, num_threads: int = 0) -> NativeBackend:
    """A backend of the same kernels, in fp32; likewise."""
    library = context.library
    if library.isa == CUDA:
        return _kept_backend(library, num_threads)
    return NativeBackend(library, torch.float32, num_threads=num_threads)


@functools.cache
def _kept_backend(library: Library, num_threads: int) -> NativeBackend:
    return NativeBackend(library, torch.float32, num_threads=num_threads)


def without_vnni(context: Context) -> Context:
    """The same kernels, in a new context, as on a processor that cannot multiply bytes; in a library for processors
    that all can, the same."""
    without = context.library.context()
    assert without.allow_vnni(False) == (context.isa in ALWAYS_VNNI)
    return without


def either(context: Context, n: T, on_emulated_device: T) -> T:
    """n; on the emulated device, where rows take milliseconds, another number, or others."""
    return on_emulated_device if context.library.isa == EMULATED_DEVICE else n


def assert_lost_alone(got: Tensor, want: Tensor, lost: list[int]) -> None:
    """Of rows [rows, n], these are NaN in both, and all others finite and of the same bits."""
    own, other = (torch.stack([t for i, t in enumerate(y) if i not in lost]) for y in (got, want))
    assert torch.stack([got[lost], want[lost]]).isnan().all() and own.isfinite().all() and same_bits(own, other)


def embed(
    context: Context,
    token_ids: Tensor,
    table: Tensor,
    scale: float = 1.0,
    slots: Tensor | None = None,
    token_plane: Tensor | None = None,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    vocab, dim = table.shape
    out, rows = torch.full((len(token_ids), dim), torch.nan), count(len(token_ids))
    context.call(
        EmbedArgs(
            num_rows=pointer(rows),
            token_ids=pointer(token_ids),
            table=pointer(table),
            out=pointer(out),
            slots=pointer(slots),
            token_plane=pointer(token_plane),
            dim=dim,
            vocab=vocab,
            dtype=CODES[table.dtype],
            scale=scale,
            positions=pointer(positions),
            position_table=pointer(position_table),
            num_positions=0 if position_table is None else len(position_table),
        )
    )
    return out


def rms_norm(
    context: Context,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    row_ids: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    add_to: Tensor | None = None,
) -> Tensor:
    num_rows, dim = len(x) if row_ids is None else len(row_ids), x.shape[1]
    out, rows = torch.full((num_rows, dim), torch.nan, dtype=out_dtype), count(num_rows)
    if add_to is not None:
        out = add_to.clone()
    context.call(
        RmsNormArgs(
            num_rows=pointer(rows),
            x=pointer(x),
            weight=pointer(weight),
            out=pointer(out),
            row_ids=pointer(row_ids),
            dim=dim,
            dtype=CODES[out_dtype],
            eps=eps,
            add=int(add_to is not None),
        )
    )
    return out


def layer_norm(
    context: Context,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    row_ids: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    num_rows, dim = len(x) if row_ids is None else len(row_ids), x.shape[1]
    out, rows = torch.full((num_rows, dim), torch.nan, dtype=out_dtype), count(num_rows)
    context.call(
        LayerNormArgs(
            num_rows=pointer(rows),
            x=pointer(x),
            weight=pointer(weight),
            bias=pointer(bias),
            out=pointer(out),
            row_ids=pointer(row_ids),
            dim=dim,
            dtype=CODES[out_dtype],
            eps=eps,
        )
    )
    return out


def soft_cap(context: Context, x: Tensor, cap: float) -> Tensor:
    out, rows = x.clone(), count(len(x))
    context.call(SoftCapArgs(num_rows=pointer(rows), x=pointer(out), n=x.shape[1], cap=cap))
    return out


def caches(
    dtype: torch.dtype,
    num_layers: int,
    num_blocks: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of all layers; NaN, or normal values where a seed is given."""
    if dtype == torch.bfloat16:
        k: tuple[int, ...] = (num_layers, num_blocks, kv_heads, head_dim // 2, block_size, 2)
        v: tuple[int, ...] = (num_layers, num_blocks, kv_heads, block_size // 2, head_dim, 2)
    else:
        k = (num_layers, num_blocks, kv_heads, head_dim, block_size)
        v = (num_layers, num_blocks, kv_heads, block_size, head_dim)
    if seed is None:
        return torch.full(k, torch.nan, dtype=dtype), torch.full(v, torch.nan, dtype=dtype)
    return normal(*k, seed=seed, dtype=dtype), normal(*v, seed=seed + 1, dtype=dtype)


def rope_kv_write(
    context: Context,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    shape: RopeShape,
    *,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Tensor:
    out, rows = torch.full((len(qkv), shape.q_heads * shape.head_dim), torch.nan, dtype=qkv.dtype), count(len(qkv))
    with laid_out(context, k_cache, v_cache, paired=k_cache.dim() == 5) as (k, v):
        context.call(
            RopeKvWriteArgs(
                num_rows=pointer(rows),
                qkv=pointer(qkv),
                q_out=pointer(out),
                k_cache=pointer(k),
                v_cache=pointer(v),
                positions=pointer(positions),
                slots=pointer(slots),
                cos_sin=pointer(cos_sin),
                q_norm=pointer(q_norm),
                k_norm=pointer(k_norm),
                q_heads=shape.q_heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
                block_size=k_cache.shape[3],
                dtype=CODES[qkv.dtype],
                interleaved=int(shape.interleaved),
                norm_eps=shape.norm_eps,
                kv_kind=kind_of(k_cache),
                norms_all_heads=int(are_of_all_heads((q_norm, k_norm, 0.0), shape.head_dim)),
            )
        )
    return out


def kv_copy(
    context: Context,
    k_cache: Tensor,
    v_cache: Tensor,
    src: Tensor,
    dst: Tensor,
    token_plane: Tensor | None = None,
    features: Tensor | None = None,
) -> None:
    layers, _, kv_heads = k_cache.shape[:3]
    paired, kind = k_cache.dim() == 6, kind_of(k_cache)
    head_dim = k_cache.shape[3] * (2 if paired else 1) - (SCALE_BYTES if kind else 0)
    moves = count(len(src))
    with laid_out(context, k_cache, v_cache, paired=paired) as (k, v):
        context.call(
            KvCopyArgs(
                num_moves=pointer(moves),
                src=pointer(src),
                dst=pointer(dst),
                k_cache=pointer(k),
                v_cache=pointer(v),
                token_plane=pointer(token_plane),
                features=pointer(features),
                feature_bytes=0 if features is None else features.shape[1] * features.itemsize,
                layer_stride=k.stride(0),
                num_layers=layers,
                kv_heads=kv_heads,
                head_dim=head_dim,
                block_size=k_cache.shape[4],
                dtype=Dtype.BF16 if paired else CODES.get(k_cache.dtype, Dtype.F32),
                kv_kind=kind,
            )
        )


def argmax(context: Context, logits: np.ndarray) -> np.ndarray:
    out, rows = np.full(len(logits), -7, np.int32), count(len(logits))
    context.call(
        ArgmaxArgs(num_rows=pointer(rows), logits=logits.ctypes.data, token_ids=out.ctypes.data, vocab=logits.shape[1])
    )
    return out


def topk_lse(
    context: Context, logits: np.ndarray, k: int, row_ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(logits) if row_ids is None else len(row_ids)
    ids, values, lse = (
        np.full((n, k), -7, np.int32),
        np.full((n, k), np.nan, np.float32),
        np.full(n, np.nan, np.float32),
    )
    rows = count(n)
    context.call(
        TopkLseArgs(
            num_rows=pointer(rows),
            logits=logits.ctypes.data,
            row_ids=None if row_ids is None else row_ids.ctypes.data,
            token_ids=ids.ctypes.data,
            values=values.ctypes.data,
            lse=lse.ctypes.data,
            vocab=logits.shape[1],
            k=k,
        )
    )
    return ids, values, lse


def draws(n: int, **fields: Any) -> np.ndarray:
    """n draws; fields are numbers or arrays. Unnamed: everything kept at temperature 1."""
    out = np.zeros(n, DRAW_DTYPE)
    out["temperature"], out["top_p"] = 1.0, 1.0
    for name, value in fields.items():
        out[name] = value
    return out


def sample(context: Context, logits: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    assert logits.dtype == np.float32 and wanted.dtype == DRAW_DTYPE
    out, num = np.full(len(wanted), -7, np.int32), count(len(wanted))
    context.call(
        SampleArgs(
            num_draws=pointer(num),
            draws=wanted.ctypes.data,
            logits=logits.ctypes.data,
            token_ids=out.ctypes.data,
            vocab=logits.shape[1],
        )
    )
    return out


def assert_close(actual: Tensor, expected: Tensor, *, ulps: float, scale: Tensor | float = 0.0) -> None:
    """Within `ulps` units in the last place of fp32 of the float64 value (or of `scale` where that is larger), and in
    bf16 the half unit of the one rounding besides."""
    assert expected.dtype == torch.float64
    bound = torch.maximum(expected.abs(), torch.as_tensor(scale, dtype=torch.float64)) * (ulps * 2.0**-24)
    if actual.dtype == torch.bfloat16:
        bound = bound + expected.abs() * 2.0**-8 * (1.0 + 2.0**-8) + 2.0**-133
    wrong = ~((actual.double() - expected).abs() <= bound + 2.0**-149)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ: {actual[wrong][:4]}, {expected[wrong][:4]}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    view = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """For this thread alone, as torch does it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
