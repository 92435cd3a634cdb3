"""The meaning of every kernel that works row by row, in torch; also what runs where there is no compiled library.

Arguments are those of the records in csrc/include/pagedec.h. `compute_dtype` is the precision of the arithmetic: fp32
when the functions serve, float64 when they judge the kernels. Cache layouts are those of pagedec.h, as tensors:
bf16 K [blocks, kv_heads, D/2, block_size, 2], V [blocks, kv_heads, block_size/2, D, 2];
fp32 K [blocks, kv_heads, D, block_size], V [blocks, kv_heads, block_size, D].
Read-out (argmax, top-k, sampling) is in reference_readout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedec.kernels.reference_cache import copy_slots, write_slots


def embed(
    token_ids: Tensor,
    table: Tensor,
    scale: float = 1.0,
    *,
    slots: Tensor | None = None,
    token_plane: Tensor | None = None,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
    ids: tuple[int, int] | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return table[token_ids] * scale (+ position_table[positions]), NaN where an id or a position is outside its
    table; note the ids in the token plane. `ids`: the table is of the rows from that on of so many; others are 0."""
    if slots is not None and token_plane is not None:
        written = slots >= 0
        token_plane[slots[written].long()] = token_ids[written].to(token_plane.dtype)
    first_id, num_ids = (0, table.shape[0]) if ids is None else ids
    known = (token_ids >= 0) & (token_ids < num_ids)
    places = token_ids - first_id
    own = known & (places >= 0) & (places < table.shape[0])
    rows = table[torch.where(own, places, 0).long()].to(compute_dtype) * scale
    rows = torch.where(own[:, None], rows, 0.0)
    if positions is not None and position_table is not None:
        inside = (positions >= 0) & (positions < position_table.shape[0])
        rows = rows + position_table[torch.where(inside, positions, 0).long()].to(compute_dtype)
        known = known & inside
    return torch.where(known[:, None], rows, torch.nan)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    row_ids: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the normed rows, of `row_ids` where given."""
    rows = (x if row_ids is None else x[row_ids.long()]).to(compute_dtype)
    scale = 1.0 / torch.sqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale * weight.to(compute_dtype)).to(out_dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    row_ids: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias of the rows."""
    rows = (x if row_ids is None else x[row_ids.long()]).to(compute_dtype)
    centred = rows - rows.mean(-1, keepdim=True)
    scale = 1.0 / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = centred * scale * weight.to(compute_dtype)
    return (normed if bias is None else normed + bias.to(compute_dtype)).to(out_dtype)


def soft_cap(x: Tensor, cap: float, *, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return cap * tanh(x / cap)."""
    return (cap * torch.tanh(x.to(compute_dtype) / cap)).to(x.dtype)


def copy_rows(
    src: Tensor, dst: Tensor, src_rows: Tensor | None = None, dst_rows: Tensor | None = None, scale: float = 1.0
) -> None:
    """Put src[src_rows] * scale at dst[dst_rows] where that is not -1, in dst's dtype; None: all rows in order."""
    if dst_rows is None:
        sources, places = src_rows, torch.arange(len(src if src_rows is None else src_rows))
    else:
        kept = torch.nonzero(dst_rows >= 0).flatten()
        sources, places = kept if src_rows is None else src_rows[kept], dst_rows[kept]
    rows = src if sources is None else src[sources.long()]
    dst[places.long()] = (rows if scale == 1.0 else rows.float() * scale).to(dst.dtype)


def spread_logits(src: Tensor, places: Tensor) -> Tensor:
    """Return src[:, places], -inf where a place is negative."""
    return torch.where(places >= 0, src[:, places.clamp(min=0).long()], -torch.inf)


@dataclass(frozen=True, slots=True)
class RopeShape:
    """What a kind of layer fixes for rope_kv_write."""

    q_heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool = False
    norm_eps: float = 0.0


def rotate(x: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate heads [rows, heads, head_dim] by table [rows, rotary_dim] = (cos | sin); the dimensions behind it stay."""
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half].to(x.dtype), table[:, None, half:].to(x.dtype)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((pairs, rest), -1)


def rope_kv_write(
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
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Norm and rotate q and k, write k and v to their slots, return q [rows, q_heads * head_dim]."""
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.split((shape.q_heads, shape.kv_heads, shape.kv_heads), 1)

    def prepare(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.to(compute_dtype)
        if norm is not None:  # over each head, or over all of them
            rows = x.reshape(len(x), -1, len(norm))
            normed = rms_norm(rows, norm, shape.norm_eps, out_dtype=compute_dtype, compute_dtype=compute_dtype)
            x = normed.view(x.shape)
        if cos_sin is None:
            return x
        return rotate(x, cos_sin[positions.long()], interleaved=shape.interleaved)

    written = slots >= 0
    write_slots(k_cache, v_cache, slots[written], prepare(k, k_norm)[written], v[written])
    return prepare(q, q_norm).to(qkv.dtype).flatten(1)


def kv_copy(
    k_cache: Tensor,
    v_cache: Tensor,
    src: Tensor,
    dst: Tensor,
    token_plane: Tensor | None = None,
    features: Tensor | None = None,
) -> None:
    """Move slots in list order in every layer; caches as above with a leading dimension of layers."""
    copy_slots(k_cache, v_cache, src, dst)
    for plane in (token_plane, features):
        if plane is not None:
            for source, target in zip(src.tolist(), dst.tolist(), strict=True):
                plane[target] = plane[source]


def add_parts(parts: Tensor) -> Tensor:
    """Return the sum of parts [num_parts, rows, dim] in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def join_parts(parts: Tensor, widths: Sequence[int], rows: int) -> Tensor:
    """Return rows [rows, sum(widths)] side by side from parts [num_parts, *], each rows of its width one behind the
    other."""
    return torch.cat([part[: rows * width].view(rows, width) for part, width in zip(parts, widths, strict=True)], 1)
