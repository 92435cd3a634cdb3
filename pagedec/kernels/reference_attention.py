"""The meaning of paged attention in torch: what the compiled kernel is tested against, and what runs without a
compiler.

Every row is computed by itself, by operations whose shapes follow from the row's own position alone, so that its bits
depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedec.kernels.backend import AttentionShape

Ints = Sequence[int] | npt.NDArray[np.int32]


def cache_shapes(
    num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one layer's K and V."""
    if dtype == torch.bfloat16:
        return (
            (num_blocks, num_kv_heads, head_dim // 2, block_size, 2),
            (num_blocks, num_kv_heads, block_size // 2, head_dim, 2),
        )
    if dtype == torch.float32:
        return (num_blocks, num_kv_heads, head_dim, block_size), (num_blocks, num_kv_heads, block_size, head_dim)
    raise ValueError(f"dtype is {dtype}; a cache is torch.bfloat16 or torch.float32")


def _places(k_cache: torch.Tensor, slots: Ints | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.as_tensor(np.asarray(slots), dtype=torch.int64)
    block_size = k_cache.shape[3]
    return index // block_size, index % block_size


def read_slots(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Ints | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of these slots, each [num_slots, num_kv_heads, head_dim], contiguous."""
    block, offset = _places(k_cache, slots)
    if k_cache.dim() == 5:  # pairs lie side by side
        k, v = k_cache[block, :, :, offset].flatten(2), v_cache[block, :, offset // 2, :, offset % 2]
        return k.contiguous(), v.contiguous()
    return k_cache[block, :, :, offset].contiguous(), v_cache[block, :, offset].contiguous()


def write_slots(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Ints | torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Store K and V, each [num_slots, num_kv_heads, head_dim], into these slots."""
    block, offset = _places(k_cache, slots)
    if k_cache.dim() == 5:  # pairs lie side by side
        k_cache[block, :, :, offset] = k.unflatten(2, (-1, 2)).to(k_cache.dtype)
        v_cache[block, :, offset // 2, :, offset % 2] = v.to(v_cache.dtype)
    else:
        k_cache[block, :, :, offset] = k.to(k_cache.dtype)
        v_cache[block, :, offset] = v.to(v_cache.dtype)


def visible_slots(kv_len: int, num_rows: int, parents: Ints | None) -> list[list[int]]:
    """Return for each of a branch's rows the table indices it sees, in position order, itself last.

    `parents` are the branch's own, relative to its first row; negative for chain rows.
    """
    before = kv_len - num_rows
    chain = num_rows if parents is None else sum(1 for parent in parents if parent < 0)
    seen: list[list[int]] = []
    for row in range(num_rows):
        if parents is None or row < chain:
            seen.append(list(range(before + row + 1)))
        elif parents[row] < chain:
            seen.append([*range(before + chain), before + row])
        else:
            seen.append([*seen[parents[row]], before + row])
    return seen


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape, compute_dtype: torch.dtype
) -> torch.Tensor:
    """Attend from one row's q [num_heads, head_dim] to k and v [num_kv_heads, num_tokens, head_dim]."""
    grouped = q.to(compute_dtype).reshape(shape.num_kv_heads, -1, shape.head_dim)
    logits = torch.matmul(grouped, k.transpose(1, 2)) * shape.scale
    if shape.soft_cap > 0:
        logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap)
    return torch.matmul(torch.softmax(logits, dim=-1), v).reshape(shape.num_heads, shape.head_dim)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: AttentionShape,
    row_indptr: Ints,
    kv_len: Ints,
    block_table: Sequence[Sequence[int]] | npt.NDArray[np.int32],
    parents: Ints | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return [num_rows, num_heads, head_dim] in compute_dtype. The batch is described as by pd_attn_batch."""
    rows = q.reshape(-1, shape.num_heads, shape.head_dim)
    out = torch.empty(rows.shape, dtype=compute_dtype)
    for branch, (first, last) in enumerate(zip(row_indptr[:-1], row_indptr[1:], strict=True)):
        if first == last:
            continue
        own_parents = None if parents is None else parents[first:last]
        seen = [
            np.asarray(index[max(0, len(index) - shape.window) if shape.window else 0 :], dtype=np.int64)
            for index in visible_slots(int(kv_len[branch]), int(last - first), own_parents)
        ]
        start = min(int(index[0]) for index in seen)
        table = np.asarray(block_table[branch], dtype=np.int64)
        places = np.arange(start, int(kv_len[branch]))
        slots = table[places // shape.block_size] * shape.block_size + places % shape.block_size
        k, v = (part.to(compute_dtype) for part in read_slots(k_cache, v_cache, slots))
        for row, index in enumerate(seen, int(first)):  # copies of the same shape and alignment whatever is around them
            own = torch.from_numpy(index - start)
            own_k, own_v = (part.index_select(0, own).transpose(0, 1).contiguous() for part in (k, v))
            out[row] = attend(rows[row], own_k, own_v, shape, compute_dtype)
    return out
