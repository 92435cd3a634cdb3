"""flash-attn's attention over paged KV (FlashAttention-2; Dao 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedec.kernels.attention_kernel import Attend, AttentionLimits, Chains, Given, import_package, part_of
from pagedec.kernels.backend import AttentionShape

AT_LEAST, BELOW = "2.7", "3"


class FlashAttention:
    """Decoding goes through `flash_attn_with_kvcache`, which splits the keys of few rows over the device; parts of
    prompts through `flash_attn_varlen_func`, which takes branches of any number of rows. Raises InvalidArgument where
    the package cannot be used."""

    name = "flash-attn"
    limits = AttentionLimits(
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=tuple(range(16, 257, 16)),
        block_sizes=(256,),  # "page_block_size must be a multiple of 256"
        chain_block_sizes=(256,),
        windows=True,
        soft_caps=True,
    )

    def __init__(self) -> None:
        package, self.version = import_package(self.name, "flash_attn", AT_LEAST, BELOW)
        self._single = part_of(self.name, package, "flash_attn_with_kvcache")
        self._several = part_of(self.name, package, "flash_attn_varlen_func")

    def prepare(self, chains: Chains, shape: AttentionShape, given: Given) -> Attend:
        options: dict[str, Any] = {
            "softmax_scale": shape.scale,
            "causal": True,  # aligned to the last row and the last key
            "window_size": (shape.window - 1, 0) if shape.window else (-1, -1),  # how many more it sees on either side
            "softcap": shape.soft_cap,
            "block_table": given(chains.block_table),
        }
        if chains.is_single:
            lengths = given(chains.kv_len)

            def attend_single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                own = self._single(q[:, None], *_by_token(k, v), cache_seqlens=lengths, **options)
                return own[:, 0]

            return attend_single
        bounds = given(_bounds(chains.counts)), given(_bounds(chains.kv_len))
        longest = int(chains.counts.max()), int(chains.kv_len.max())

        def attend_several(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._several(q, *_by_token(k, v), *bounds, *longest, **options)

        return attend_several


def _by_token(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_blocks, block_size, num_kv_heads, head_dim], without copying: only the last side must be contiguous."""
    return k.transpose(1, 2), v.transpose(1, 2)


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
