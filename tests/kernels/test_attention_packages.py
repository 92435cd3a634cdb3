"""Attention of other packages on the emulated device, whose stand-ins compute what is documented: which branches go
there, that all rows are what our kernel makes of them, and what cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.errors import InvalidArgument
from pagedec.kernels.attention_kernel import AttentionKernel, check_shapes
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.flash_attn_kernel import FlashAttention
from pagedec.kernels.library import EMULATED_DEVICE, KvKind, load
from pagedec.kernels.split_plan import TILE, SplitPlan, plain_chains
from pagedec.kernels.xformers_kernel import Xformers, by_branch_and_head
from tests.kernels import attention_stand_ins, cuda_library
from tests.kernels.attention_cases import Batch, Branch, Cache, random_tree, read_slots
from tests.kernels.attention_stand_ins import stand_ins
from tests.kernels.cuda_build import ROOT

__all__ = ["stand_ins"]
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
SHAPE = AttentionShape(6, 2, 32, 256, 0.18)


def test_a_tile_is_as_long_as_the_plan_says() -> None:
    assert f"constexpr int TILE = {TILE}," in (ROOT / "csrc" / "plan" / "words.h").read_text(encoding="utf-8")


def device(kernel: AttentionKernel | None = None, block_size: int = 256) -> DeviceBackend:
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.bfloat16)
    if kernel is not None:
        backend.use_attention(kernel, block_size)
    return backend


def mixed(cache: Cache) -> list[Branch]:
    """Decoding, parts of prompts, a chain of drafts, a tree, and two branches that share a prompt; nobody's branch, and
    lengths on both sides of the ends of tiles, blocks and chunks."""
    size = cache.shape.block_size
    prompt = cache.branch(300, 1)
    return [
        cache.branch(1),
        cache.branch(257),
        cache.branch(300, 20),
        prompt,
        cache.branch(90, 5, [-1, -1, 1, 2, 3]),
        Branch([], 0, 0),
        cache.branch(512),
        cache.branch(140, 12, random_tree(np.random.default_rng(2), 2, 10)),
        cache.fork(prompt, 256 // size, 270),
        cache.branch(64, 64),
        cache.branch(520, 9),
    ]


def computed(backend: DeviceBackend, cache: Cache, branches: list[Branch], q: torch.Tensor) -> torch.Tensor:
    """One layer, as a program of the backend runs it."""
    batch, shape = Batch(branches), cache.shape
    place = backend.cache(1, cache.num_blocks, shape.num_kv_heads, shape.head_dim, shape.block_size)
    every = np.arange(cache.num_blocks * shape.block_size)
    k, v = laid_by_token(cache, every)
    backend.memory.fill_from(place.k[0], k)
    backend.memory.fill_from(place.v[0], v)
    flat = q.reshape(len(q), -1)
    rows, own_q, out = backend.zeros((1,), torch.int32), backend.place(flat), backend.place(torch.full_like(flat, 7.0))
    backend.write(rows, np.array([len(q)], np.int32))
    plan, program = backend.plan(shape), backend.program()
    program.attention(rows, plan, own_q, place, 0, out)
    program.finish()
    for _ in range(2):  # the second time from what was recorded
        plan.update(batch.row_indptr, batch.kv_len, batch.block_table, batch.parents)
        program.run()
    return backend.memory.get(out).reshape(q.shape)


def laid_by_token(cache: Cache, slots: np.ndarray) -> list[torch.Tensor]:
    """As a device has it: [num_blocks, num_kv_heads, block_size, head_dim]."""
    return [
        x.reshape(cache.num_blocks, cache.shape.block_size, *x.shape[1:]).transpose(1, 2).contiguous()
        for x in read_slots(cache.k, cache.v, slots)
    ]


CASES: dict[str, tuple[type[Any], AttentionShape, list[tuple[str, int]]]] = {
    "flash-attn": (FlashAttention, SHAPE, [("flash_attn_with_kvcache", 3), ("flash_attn_varlen_func", 98)]),
    "window": (
        FlashAttention, replace(SHAPE, window=70),
        [("flash_attn_with_kvcache", 3), ("flash_attn_varlen_func", 98)],
    ),
    "soft cap": (
        FlashAttention, replace(SHAPE, soft_cap=3.0, head_dim=48),
        [("flash_attn_with_kvcache", 3), ("flash_attn_varlen_func", 98)],
    ),
    "xformers": (Xformers, SHAPE, [("triton_splitK", 6), ("fa2F", 196)]),
    "blocks of 64": (Xformers, replace(SHAPE, block_size=64, num_heads=2), [("triton_splitK", 6)]),
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
def test_all_rows_are_what_our_kernel_makes_of_them(stand_ins: list[tuple[str, int]], case: str) -> None:
    """To bf16's rounding; those of our own kernel to the bit, whoever has the others."""
    kind, shape, expected = CASES[case]
    cache = Cache(shape, 4096 // shape.block_size, torch.bfloat16, seed=1)
    branches = mixed(cache)
    batch, q = Batch(branches), cache.query(Batch(branches).num_rows)
    want = computed(device(), cache, branches, q)
    got = computed(device(kind(), shape.block_size), cache, branches, q)
    assert stand_ins == expected * 2
    torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-6, atol=2.0**-6)
    for i in (3, 7, 8):  # what is shared, and the tree
        rows = slice(*batch.row_indptr[i : i + 2].tolist())
        assert torch.equal(got[rows], want[rows])
    assert not torch.equal(got, want), "the stand-in rounds otherwise, so some bits must show who computed them"


def test_a_step_without_rows_for_one_of_both(stand_ins: list[tuple[str, int]]) -> None:
    cache = Cache(SHAPE, 16, torch.bfloat16, seed=3)
    plain, tree = [cache.branch(9), cache.branch(70)], [cache.branch(20, 3, [-1, 0, 0])]
    for branches, called in ((plain, [("flash_attn_with_kvcache", 2)] * 2), (tree, [])):
        q = cache.query(Batch(branches).num_rows)
        want = computed(device(), cache, branches, q)
        stand_ins.clear()
        got = computed(device(FlashAttention()), cache, branches, q)
        assert stand_ins == called
        torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-6, atol=2.0**-6)


def test_which_branches_are_chains_of_their_own() -> None:
    table = np.array([[3, 4], [3, 5], [6, -1], [3, -1], [7, -1], [7, 8]], np.int32)
    lengths, counts = np.array([300, 280, 90, 40, 80, 0], np.int32), np.array([1, 2, 4, 1, 1, 0])
    parents = np.array([-1, -1, -1, -1, 0, 1, 0, -1, -1])
    assert plain_chains(counts, lengths, table, None).tolist() == [False, False, True, True, True, False]
    assert not plain_chains(counts, lengths, table, parents)[2]
    parents[6] = 2
    assert plain_chains(counts, lengths, table, parents)[2]
    assert by_branch_and_head(np.array([1, 2]), 2).tolist() == [0, 1, 2, 4, 3, 5]


def test_layers_that_it_does_not_take_are_ours(stand_ins: list[tuple[str, int]]) -> None:
    backend, windowed = device(Xformers()), replace(SHAPE, window=100)
    assert isinstance(backend.plan(SHAPE), SplitPlan)
    assert not isinstance(backend.plan(windowed), SplitPlan)
    assert backend.attention is not None
    check_shapes(backend.attention, (SHAPE, windowed))
    for shape, lack in (
        (windowed, "windows, of 100 tokens"),
        (replace(SHAPE, soft_cap=30.0), "soft caps, of 30"),
        (replace(SHAPE, head_dim=80), "heads of 80 numbers"),
        (replace(SHAPE, has_sinks=True), "sinks"),
    ):
        told = f"attention_backend is 'xformers': must take {lack}, as the model's layers have them"
        with pytest.raises(InvalidArgument, match=f"^{told}$"):
            check_shapes(backend.attention, (shape,))


Make = Callable[[], ModuleType]


def without(function: str) -> ModuleType:
    module = attention_stand_ins.flash_attn()
    delattr(module, function)
    return module


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (None, r"it is not installed: pip install 'pagedec\[flash-attn\]'"),
        (
            lambda: attention_stand_ins.flash_attn("2.6.3"),
            "it must be version 2.7 or newer, below 3, and is 2.6.3: pip",
        ),
        (lambda: attention_stand_ins.flash_attn("3.0.0b1"), "it must be version 2.7 or newer, below 3, and is 3.0.0b1"),
        (lambda: without("flash_attn_varlen_func"), "what is installed has no flash_attn_varlen_func"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, module: Make | None, problem: str) -> None:
    if module is None:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        monkeypatch.delitem(sys.modules, "flash_attn")
        monkeypatch.setattr(sys, "path", [])
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", module())
    with pytest.raises(InvalidArgument, match=f"^attention_backend is 'flash-attn': cannot be used: {problem}"):
        FlashAttention()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('undefined symbol:\\n  _ZN3c10')", "it does not import: undefined symbol: _ZN3c10"),
        ("import triton.of_another_release", "it does not import: No module named 'triton[^ ]*"),
        ("raise AttributeError('module triton has no JITFunction')", "it does not import: module triton has no .*"),
        ("assert False", "it does not import: AssertionError"),
        ("from types import SimpleNamespace\nfmha = SimpleNamespace()", r"what .* has no fmha\.memory_efficient\w+"),
    ],
)
def test_a_package_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, problem: str) -> None:
    folder = tmp_path / "xformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '0.0.33'\n")
    (folder / "ops.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument, match=f"cannot be used: {problem}$"):
        Xformers()
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        del sys.modules[name]


def test_what_can_never_be_is_named(stand_ins: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    flash, beside = FlashAttention(), "with attention_backend"
    with pytest.raises(InvalidArgument, match=f"^block_size is 64: must be 256 {beside} flash-attn$"):
        device(flash, 64)
    with pytest.raises(InvalidArgument, match=f"^block_size is 16: must be 64, 128 or 256 {beside} xformers$"):
        device(Xformers(), 16)
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    with pytest.raises(InvalidArgument, match=f"^dtype is 'float32': must be bfloat16 or float16 {beside} flash-attn$"):
        backend.use_attention(flash, 256)
    backend = device()
    backend.kv_kind = KvKind.INT8
    with pytest.raises(InvalidArgument, match=f"^kv_cache_dtype is 'int8': must be auto {beside} flash-attn$"):
        backend.use_attention(flash, 256)
    monkeypatch.setattr("pagedec.kernels.lent_memory.EmulatedMemory.capability", (7, 5))
    with pytest.raises(InvalidArgument, match="it needs a device of compute capability 8.0 or newer, and this one"):
        device(flash)
    backend = device()
    backend.name = "cuda"
    with pytest.raises(InvalidArgument, match="cannot be used: the torch that is installed does not reach the device"):
        backend.use_attention(flash, 256)
