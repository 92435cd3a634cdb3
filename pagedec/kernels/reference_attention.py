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
from pagedec.kernels.reference_cache import Ints, read_numbers


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: AttentionShape,
    compute_dtype: torch.dtype,
    scales: Sequence[torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one row's q [num_heads, head_dim] to k and v [num_kv_heads, num_tokens, head_dim], each with scales
    [num_kv_heads, num_tokens] where the cache holds bytes. sinks [num_heads]: the logits of tokens without a value."""
    grouped = q.to(compute_dtype).reshape(shape.num_kv_heads, -1, shape.head_dim)
    logits = torch.matmul(grouped, k.transpose(1, 2))
    if scales is not None:
        logits = logits * scales[0][:, None]
    logits = logits * shape.scale
    if shape.soft_cap > 0:
        logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap)
    if sinks is not None:
        own = sinks.to(compute_dtype).view(shape.num_kv_heads, -1, 1)
        logits = torch.cat([logits, own], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., : k.shape[1]]
    if scales is not None:
        probabilities = probabilities * scales[1][:, None]
    return torch.matmul(probabilities, v).reshape(shape.num_heads, shape.head_dim)


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [num_rows, num_heads, head_dim] in compute_dtype. The batch is described as by pd_attn_batch; sinks
    [num_heads]."""
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
        numbers, scales = read_numbers(k_cache, v_cache, slots)
        k, v, *scales = (part.to(compute_dtype) for part in (*numbers, *(scales or ())))
        for row, index in enumerate(seen, int(first)):  # copies of the same shape and alignment whatever is around them
            own = torch.from_numpy(index - start)
            seen_of = [part.index_select(0, own).transpose(0, 1).contiguous() for part in (k, v, *scales)]
            out[row] = attend(rows[row], seen_of[0], seen_of[1], shape, compute_dtype, seen_of[2:] or None, sinks)
    return out
