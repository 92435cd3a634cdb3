"""Stand-ins for flash-attn and xformers: what their documentation says of the calls that we make, in torch on the host,
and as strict about what they are given. Where one is installed, nothing is known of the package itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

calls: list[tuple[str, int]] = []
"""What was called since a test began, and for how many rows."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = -1, softcap: float = 0.0
) -> torch.Tensor:
    """Of one sequence: q [rows, heads, dim] are the last of the tokens of k and v [tokens, kv_heads, dim]. `window`:
    how many tokens before its own a row sees; -1: all."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    own, seen = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    visible = (seen <= own) & ((window < 0) | (seen >= own - window))
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def gathered(cache: torch.Tensor, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first tokens of a sequence [num_tokens, heads, dim], of pages [num_pages, size, heads, dim]."""
    pages = cache[table[: -(-num_tokens // cache.shape[1])].long()]
    return pages.reshape(-1, *cache.shape[2:])[:num_tokens]


# ---- flash-attn
def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> None:
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "must have contiguous last dimension"
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.shape[-2] % k.shape[-2] == 0
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    _check(q, k_cache, v_cache, block_table)
    assert causal and q.dim() == 4 and cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(q)
    assert int(cache_seqlens.max()) <= block_table.shape[1] * k_cache.shape[1]
    calls.append(("flash_attn_with_kvcache", len(q)))
    out = []
    for own, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        kv = (gathered(cache, table, length) for cache in (k_cache, v_cache))
        out.append(attend(own, *kv, softmax_scale, window_size[0], softcap))
    return torch.stack(out)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    _check(q, k, v, block_table)
    counts, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert causal and q.dim() == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(counts.sum()) == len(q) and int(counts.max()) == max_seqlen_q and int(lengths.max()) == max_seqlen_k
    calls.append(("flash_attn_varlen_func", len(q)))
    out = []
    for own, table, length in zip(q.split(counts.tolist()), block_table, lengths.tolist(), strict=True):
        kv = (gathered(cache, table, length) for cache in (k, v))
        out.append(attend(own, *kv, softmax_scale, window_size[0], softcap))
    return torch.cat(out)


def flash_attn(version: str = "2.8.3") -> ModuleType:
    module = ModuleType("flash_attn")
    module.__version__ = version  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


# ---- xformers
@dataclass
class PagedBlockDiagonalPaddedKeysMask:
    counts: Sequence[int]
    lengths: Sequence[int]
    block_tables: torch.Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
        *,
        device: torch.device | None = None,
    ) -> PagedBlockDiagonalPaddedKeysMask:
        assert device == block_tables.device and len(q_seqlen) == len(kv_seqlen) == len(block_tables)
        assert max(kv_seqlen) <= block_tables.shape[1] * page_size and block_tables.dtype == torch.int32
        return cls(q_seqlen, kv_seqlen, block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    pass


SPLIT_K, FLASH = SimpleNamespace(name="triton_splitK"), SimpleNamespace(name="fa2F")


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert query.dtype in (torch.bfloat16, torch.float16) and query.dim() == key.dim() == value.dim() == 4
    assert len(query) == 1 and query.shape[2:] == key.shape[2:] and scale is not None and p == 0.0
    assert all(x.shape[2] == 1 or x.stride(2) == 0 for x in (key, value)), "the same head for all of the group"
    assert sum(attn_bias.counts) == query.shape[1] and key.shape[1] % attn_bias.page_size == 0
    if op is SPLIT_K:
        assert set(attn_bias.counts) == {1} and attn_bias.page_size % 64 == 0
        assert query.shape[-1] in {16, 32, 64, 128, 256, 512}
    else:
        assert op is FLASH and attn_bias.page_size % 256 == 0
        assert isinstance(attn_bias, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    calls.append((op.name, query.shape[1]))
    pages = [x[0].view(-1, attn_bias.page_size, *x.shape[2:]) for x in (key, value)]
    out = []
    sequences = zip(query[0].split(list(attn_bias.counts)), attn_bias.block_tables, attn_bias.lengths, strict=True)
    for own, table, length in sequences:
        out.append(attend(own, *(gathered(cache, table, length) for cache in pages), scale))
    return torch.cat(out)[None]


def xformers(version: str = "0.0.33") -> tuple[ModuleType, ModuleType]:
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__version__ = version  # type: ignore[attr-defined]
    masks = (PagedBlockDiagonalPaddedKeysMask, PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    ops.fmha = SimpleNamespace(  # type: ignore[attr-defined]
        memory_efficient_attention_forward=memory_efficient_attention_forward,
        attn_bias=SimpleNamespace(**{mask.__name__: mask for mask in masks}),
        triton_splitk=SimpleNamespace(FwOp=SPLIT_K),
        flash=SimpleNamespace(FwOp=FLASH),
    )
    return package, ops


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Both packages are stood in for; gives what is called of them."""
    calls.clear()
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn())
    for module in xformers():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield calls
