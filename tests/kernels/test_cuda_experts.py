"""CUDA's mixtures of experts, on the emulated device: a processor's choices, linear layers' bits by every tile, in any
order of threads, and in the device's own memory from recorded lists."""

from __future__ import annotations

from ctypes import c_int32, c_void_p

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.library import EMULATED_DEVICE, Context, Library, load
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.records import Epilogue, ExpertScore
from tests.kernels import cuda_library
from tests.kernels.calls import normal, same_bits
from tests.kernels.cuda_library import LARGE, SMALL, shuffle
from tests.kernels.test_experts import COUNT, KINDS, numbers, products, routed

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
SOME = 10
"""Blocks with which tiles of `uneven(70, 17)` are of 64 x 64; with LARGE and SMALL they are as in test_cuda_gemm.py."""
ALL_KINDS = {**KINDS, "fp16": (torch.float16, None, numbers)}
NAMES = ("first", "chosen", "places", "weights", "sorted")


class Backend(NativeBackend):
    """In memory of the host, of all dtypes."""

    dtypes = DeviceBackend.dtypes


def uneven(rows: int, most: int, seed: int = 1) -> Tensor:
    """Logits of rows that choose experts 2 and 9, all of them, and as a third one the first `most` expert 4, the next
    `most` - 1 expert 5, and others whom they like."""
    logits = normal(rows, COUNT, seed=seed)
    logits[:, [2, 9]] += 20.0
    logits[:, [4, 5]] -= 10.0
    logits[:most, 4] += 20.0
    logits[most : 2 * most - 1, 5] += 20.0
    return logits


# ------------------------------------------------------------------------------------------------------- whom rows take
@pytest.mark.parametrize("score", list(ExpertScore))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen"), [(1, 1), (5, 5), (33, 7), (130, 13), (300, 8), (1024, 9), (1000, 1000)]
)
def test_choices_are_a_processors(
    emulated: Library, cpu: Context, score: ExpertScore, biased: bool, num_experts: int, num_chosen: int
) -> None:
    """To the bit, with rows of ties, infinities and NaN; blocks have more choices than threads, and other rows."""
    rows = 4 if num_chosen == 1000 else 41
    logits, x = normal(rows, num_experts, seed=1, scale=2.0), normal(rows, 3, seed=2)
    bias = normal(num_experts, seed=3, scale=0.2) if biased else None
    logits[0], logits[1] = logits[0].round(), 0.5
    logits[2, num_experts // 2], logits[3, 1:2] = torch.nan, -torch.inf
    choice = ExpertChoice(num_experts, num_chosen, score, biased, 1.5)
    want = routed(NativeBackend(cpu.library, torch.float32), logits, x, choice, bias)
    assert want.weights[2].isnan().all() and want.weights[[0, 1, 3]].isfinite().all()
    for blocks in (2, SMALL):
        got = routed(Backend(emulated, torch.float32, num_threads=blocks), logits, x, choice, bias)
        for name in NAMES:
            own, other = getattr(got, name), getattr(want, name)
            assert torch.equal(own.nan_to_num(), other.nan_to_num()), name
        assert torch.equal(got.weights.isnan(), want.weights.isnan())


def test_rows_are_copied_whole_or_value_by_value(emulated: Library) -> None:
    """By 16 bytes where they begin there."""
    logits, choice = uneven(9, 4), ExpertChoice(COUNT, 3)
    for dim in (8, 24, 7, 20):
        x = normal(9, dim, seed=2, dtype=torch.bfloat16)
        routes = routed(Backend(emulated, torch.bfloat16, num_threads=2), logits, x, choice)
        assert same_bits(routes.sorted[routes.places.long()], x[:, None].expand(9, 3, dim))


# ------------------------------------------------------------------------------------------------------ their products
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8", "int8_weight_only", "q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("blocks", [LARGE, SOME, SMALL])
def test_each_number_of_rows_is_some_kernels(emulated: Library, kind: str, blocks: int) -> None:
    """70 rows of two experts, of two others one more than few and as many as these, and a few of the rest: tiles of all
    widths beside panels of few rows."""
    dtype, quantization, make = ALL_KINDS[kind]
    backend = Backend(emulated, dtype, quantization=quantization, num_threads=blocks)
    y, own = products(backend, make, quantization, uneven(70, 33 if kind in LAYOUTS else 17), gated=False)
    assert same_bits(y, own)


@pytest.mark.parametrize(
    ("kind", "k", "rows"),
    [("bf16", 2344, 13), ("int8_weight_only", 2080, 13), ("int8", 2100, 13), ("fp16", 33, 13), ("bf16", 41, 40)],
)
def test_long_rows_and_rows_that_begin_anywhere(emulated: Library, kind: str, k: int, rows: int) -> None:
    """k of more chunks than there are warps, and of no whole 16 bytes."""
    dtype, quantization, make = ALL_KINDS[kind]
    backend = Backend(emulated, dtype, quantization=quantization, num_threads=2)
    y, own = products(backend, make, quantization, uneven(rows, 9), gated=False, k=k)
    assert same_bits(y, own)


@pytest.mark.parametrize("kind", ["bf16", "int8", "q4_k"])
def test_no_order_of_threads_changes_a_bit(emulated: Library, kind: str) -> None:
    dtype, quantization, make = ALL_KINDS[kind]
    backend = Backend(emulated, dtype, quantization=quantization, num_threads=SOME)
    found = []
    for seed in (0, 5, 6):
        shuffle(emulated, seed)
        found.append(products(backend, make, quantization, uneven(37, 12), gated=True)[0])
    shuffle(emulated, 1)
    assert all(same_bits(found[0], other) for other in found[1:])


# --------------------------------------------------------------------------------------------- in a device's own memory
MOST, DIM, WIDTH, DENSE = 40, 64, 96, 40


class Mixture:
    """A layer of experts and what stands before and behind it, in memory that kernels alone may touch."""

    def __init__(self, kind: str, has_dense: bool = True) -> None:
        dtype, quantization, make = ALL_KINDS[kind]
        self.backend = backend = DeviceBackend(load(EMULATED_DEVICE), dtype, quantization)
        backend.library.functions.pd_emulate_hopper(c_void_p(backend.context.handle), c_int32(80))
        choice = ExpertChoice(COUNT, 3, ExpertScore.SIGMOID, True, 2.5)
        routes = Routes.allocate(backend.zeros, MOST, DIM, choice, dtype)
        self.rows, self.logits = backend.zeros((1,), torch.int32), backend.zeros((MOST, COUNT), torch.float32)
        self.gates, self.out = (backend.zeros((MOST, n), torch.float32) for n in (1, DENSE))
        self.x, inner = backend.zeros((MOST, DIM), dtype), backend.zeros((3 * MOST, WIDTH), dtype)
        y, shared = (backend.zeros((n, DENSE), torch.float32) for n in (3 * MOST, MOST))
        bias = backend.place(normal(COUNT, seed=3, scale=0.1))
        up, down = (
            backend.pack_experts(COUNT, (make(n, k, seed + n) for seed in range(COUNT)), None, quantization)
            for n, k in ((2 * WIDTH, DIM), (DENSE, WIDTH))
        )
        plain = make(DENSE, DIM, 77)
        dense = backend.pack(plain, None, quantization) if isinstance(plain, Tensor) else backend.pack_blocks([plain])
        self.program = backend.program()
        self.program.route(self.rows, self.logits, self.x, choice, routes, bias)
        self.program.experts(self.rows, routes.sorted, up, routes, inner, Epilogue.SILU_MUL)
        self.program.experts(self.rows, inner, down, routes, y, Epilogue.STORE)
        if has_dense:
            self.program.linear(self.rows, self.x, dense, shared)
        self.program.combine(self.rows, y, routes, self.out, True, shared, self.gates)
        self.program.finish()

    def run(self, rows: int, seed: int) -> Tensor:
        """Of so many rows, and zeros behind them."""
        memory = self.backend.memory
        for tensor, values in (
            (self.logits, uneven(MOST, 7, seed)),
            (self.gates, normal(MOST, 1, seed=seed)),
            (self.x, normal(*self.x.shape, seed=seed, dtype=self.x.dtype)),
            (self.out, normal(MOST, DENSE, seed=seed)),
        ):
            memory.write(tensor, values.view(torch.int16).numpy() if values.element_size() == 2 else values.numpy())
        memory.write(self.rows, np.array([rows], np.int32))
        self.program.run()
        out: Tensor = memory.get(self.out)
        assert same_bits(out[rows:], normal(MOST, DENSE, seed=seed)[rows:])
        return out[:rows]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8", "int8_weight_only", "q4_0"])
def test_a_recorded_list_serves_any_number_of_rows(kind: str) -> None:
    """Carried out, recorded for many rows and for few, repeated with others, while kernels may begin before those in
    front of them are through: a row has the bits that it has in a step of all rows, where none begins early."""
    mixture, steps = Mixture(kind), [(MOST, 1), (MOST, 2), (3, 3), (0, 4), (32, 5), (33, 6), (1, 7)]
    with cuda_library.early(load(EMULATED_DEVICE)):
        found = [mixture.run(*step) for step in steps]
    alone = Mixture(kind)
    for (rows, seed), out in zip(steps, found, strict=True):
        assert len(out) == rows and out.isfinite().all()
        if rows:
            assert same_bits(alone.run(MOST, seed)[:rows], out)


@pytest.mark.parametrize(("kind", "has_dense"), [("bf16", True), ("int8_weight_only", False)])
def test_a_list_for_few_rows_has_no_kernels_for_many(kind: str, has_dense: bool) -> None:
    """Nor where experts are its only linear layers."""
    mixture, layers = Mixture(kind, has_dense), 2 + has_dense
    launches = mixture.backend.library.functions.pd_emulate_num_captured
    # of a choice two kernels, of a sum one, and of linear layers and experts each one or two
    for rows, wanted in ((MOST, 0), (5, 2 + 1 + layers), (MOST, 2 + 1 + 2 * layers), (32, 0)):
        before = launches()
        mixture.run(rows, rows)
        assert launches() - before == wanted, rows
