"""xformers' attention over paged KV.

A page there is [page_size, num_heads, head_dim], and our block has the heads outside. So a block of a KV head counts as
a page, and a branch as one for each KV head, with the query heads of that head's group: multi-query attention, which
needs no copy of K and V.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from pagedec.kernels.attention_kernel import Attend, AttentionLimits, Chains, Given, import_package, part_of
from pagedec.kernels.backend import AttentionShape

AT_LEAST = "0.0.30"


class Xformers:
    """Decoding goes through its kernel in Triton that splits keys, parts of prompts through the FlashAttention-2 that
    it brings along. Raises InvalidArgument where the package cannot be used."""

    name = "xformers"
    limits = AttentionLimits(
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(16, 32, 64, 128, 256),
        block_sizes=(64, 128, 256),  # a multiple of the keys that the kernel in Triton takes at a time
        chain_block_sizes=(256,),
        windows=False,
        soft_caps=False,
    )

    def __init__(self) -> None:
        ops, self.version = import_package(self.name, "xformers.ops", AT_LEAST)
        part = partial(part_of, self.name, ops)
        forward = part("fmha.memory_efficient_attention_forward")
        self._single = partial(forward, op=part("fmha.triton_splitk.FwOp"))
        self._several = partial(forward, op=part("fmha.flash.FwOp"))
        self._keys_of_one: Any = part("fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask")
        self._keys_of_several: Any = part("fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask")

    def prepare(self, chains: Chains, shape: AttentionShape, given: Given) -> Attend:
        heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        pages = chains.block_table[:, None] * np.int32(heads) + np.arange(heads, dtype=np.int32)[:, None]
        tables = given(pages.reshape(-1, chains.block_table.shape[1]))
        counts, lengths = (np.repeat(numbers, heads).tolist() for numbers in (chains.counts, chains.kv_len))
        mask_class = self._keys_of_one if chains.is_single else self._keys_of_several
        mask = mask_class.from_seqlens(counts, lengths, tables, shape.block_size, device=tables.device)
        forward = partial(self._single if chains.is_single else self._several, attn_bias=mask, scale=shape.scale)
        places = None if chains.is_single else given(by_branch_and_head(chains.counts, heads))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own = q.reshape(-1, group, shape.head_dim)
            own = own if places is None else own[places]
            kv = (x.reshape(1, -1, 1, shape.head_dim).expand(-1, -1, group, -1) for x in (k, v))
            out = forward(own[None], *kv)[0]
            if places is not None:
                out = torch.empty_like(out).index_copy_(0, places, out)
            return out.reshape(q.shape)

        return attend


def by_branch_and_head(counts: np.ndarray, num_heads: int) -> np.ndarray:
    """Where the rows of each branch and head lie among rows that lie row by row: int64 [sum(counts) * num_heads]."""
    starts = np.cumsum(counts) - counts
    heads = np.arange(num_heads, dtype=np.int64)[:, None]
    places = [
        ((first + np.arange(count)) * num_heads + heads).reshape(-1)
        for first, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    return np.concatenate(places)
