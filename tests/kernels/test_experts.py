"""Mixtures of experts on every library: whom rows take, their products, and their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedec.kernels.backend import Backend
from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.fp8 import fp8_blocks, num_blocks
from pagedec.kernels.library import CUDA, DEVICES, Context, KernelError, Library
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.records import Epilogue, ExpertScore
from pagedec.kernels.reference_experts import choose, combine
from tests.kernels import calls
from tests.kernels.block_cases import random_blocks

DIM, WIDTH, COUNT = 256, 96, 11
Made = dict[str, Tensor]


def choice_of(score: ExpertScore = ExpertScore.SOFTMAX, num_chosen: int = 3, **others: Any) -> ExpertChoice:
    return ExpertChoice(COUNT, num_chosen, score, **others)


def at_least_one(rows: Tensor) -> Tensor:
    """Rows, or one of nonsense: a step's buffers have an address whatever there is."""
    return rows if len(rows) else torch.full((1, rows.shape[1]), torch.nan, dtype=rows.dtype)


def routed(backend: Backend, logits: Tensor, x: Tensor, choice: ExpertChoice, bias: Tensor | None = None) -> Routes:
    """What a program of the backend makes of rows, whose room was full of nonsense."""
    rows, num_rows = max(len(x), 1), calls.count(len(x))
    logits, x = at_least_one(logits), at_least_one(x)
    routes = Routes.allocate(backend.zeros, rows, x.shape[1], choice, x.dtype)
    for tensor in (routes.first, routes.chosen, routes.places, routes.weights, routes.sorted):
        tensor.fill_(77)
    p = backend.program()
    p.route(num_rows, logits, x, choice, routes, bias)
    p.finish()
    p.run()
    return routes


def native(library: Library, dtype: torch.dtype = torch.float32, threads: int = 2, **others: Any) -> NativeBackend:
    """Of an emulated device as many multiprocessors; a real one has its own."""
    return NativeBackend(library, dtype, num_threads=0 if library.isa == CUDA else threads, **others)


def numbers_of_threads(library: Library, *numbers: int) -> tuple[int, ...]:
    """On devices, where a backend takes its time, the last of them."""
    return numbers[-1:] if library.isa in DEVICES else numbers


# ------------------------------------------------------------------------------------------------------- whom rows take
@pytest.mark.parametrize("score", list(ExpertScore))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (8, 2), (60, 4), (128, 8), (257, 13)])
def test_choices(library: Library, score: ExpertScore, biased: bool, num_experts: int, num_chosen: int) -> None:
    logits = calls.normal(37, num_experts, seed=1, scale=3.0)
    bias = calls.normal(num_experts, seed=2, scale=0.3) if biased else None
    choice = ExpertChoice(num_experts, num_chosen, score, biased, 2.5)
    x = calls.normal(37, 16, seed=3)
    routes = routed(native(library), logits, x, choice, bias)
    chosen, weights = choose(logits, choice, bias)
    assert torch.equal(routes.chosen.long(), chosen)
    assert torch.allclose(routes.weights, weights, rtol=1e-5, atol=1e-7)
    sizes = chosen.flatten().bincount(minlength=num_experts)
    assert routes.first[0] == 0 and torch.equal(routes.first[1:].long(), sizes.cumsum(0))
    assert torch.equal(routes.places.flatten().sort().values.long(), torch.arange(37 * num_chosen))
    for row in range(37):
        for place, expert in zip(routes.places[row].tolist(), chosen[row].tolist(), strict=True):
            assert routes.first[expert] <= place < routes.first[expert + 1]
            assert torch.equal(routes.sorted[place], x[row])
    for expert in range(num_experts):  # in the order of rows
        own = routes.places[chosen == expert]
        assert torch.equal(own, own.sort().values)


def test_the_reference_is_the_same(library: Library) -> None:
    logits, x = calls.normal(21, COUNT, seed=1), calls.normal(21, DIM, seed=2)
    own, meant = (routed(b, logits, x, choice_of()) for b in (native(library), ReferenceBackend(torch.float32)))
    for name in ("first", "chosen", "places", "sorted"):
        assert torch.equal(getattr(own, name), getattr(meant, name)), name


@pytest.mark.parametrize("score", list(ExpertScore))
def test_equal_logits_go_to_the_lower_numbers(library: Library, score: ExpertScore) -> None:
    logits = torch.tensor([[0.0] * 8, [1.0, 0, 1, 0, 1, 0, 1, 0], [-torch.inf] * 7 + [0.0], [0.0] * 7 + [9.0]])
    routes = routed(native(library), logits, calls.normal(4, 8, seed=1), ExpertChoice(8, 3, score))
    assert routes.chosen.tolist() == [[0, 1, 2], [0, 2, 4], [0, 1, 7], [0, 1, 7]]


@pytest.mark.parametrize("score", list(ExpertScore))
@pytest.mark.parametrize("biased", [False, True])
def test_rows_that_are_no_numbers_touch_no_others(library: Library, score: ExpertScore, biased: bool) -> None:
    logits = calls.normal(6, COUNT, seed=1)
    bias = calls.normal(COUNT, seed=2) if biased else None
    backend, x = native(library), calls.normal(6, DIM, seed=3)
    alone = routed(backend, logits[1::2].clone(), x[1::2].clone(), choice_of(score), bias)
    hurt = logits.clone()
    hurt[0], hurt[2, 5], hurt[4] = torch.nan, torch.nan, -torch.inf
    routes = routed(backend, hurt, x, choice_of(score), bias)
    assert torch.equal(routes.chosen[1::2], alone.chosen) and torch.equal(routes.weights[1::2], alone.weights)
    assert routes.weights[[0, 2]].isnan().all() and (score == ExpertScore.SIGMOID or routes.weights[4].isnan().all())
    assert ((routes.chosen >= 0) & (routes.chosen < COUNT)).all() and (
        routes.chosen[:, 1:] > routes.chosen[:, :-1]
    ).all()
    assert routes.first[-1] == 18 and routes.places.flatten().sort().values.tolist() == list(range(18))


def test_threads_change_nothing(library: Library) -> None:
    logits, x = calls.normal(45, COUNT, seed=1), calls.normal(45, DIM, seed=2, dtype=torch.bfloat16)
    first, *others = (routed(native(library, torch.bfloat16, n), logits, x, choice_of()) for n in (1, 2, 3, 7))
    for other in others:
        for name in ("first", "chosen", "places", "weights", "sorted"):
            assert torch.equal(getattr(first, name), getattr(other, name)), name


# ------------------------------------------------------------------------------------------------------ their products
def numbers(n: int, k: int, seed: int) -> Tensor:
    return calls.normal(n, k, seed=seed, scale=0.1)


def floats(n: int, k: int, seed: int) -> Any:
    return fp8_blocks(numbers(n, k, seed).to(torch.float8_e4m3fn), torch.full((n, num_blocks(k)), 0.3))


KINDS: dict[str, tuple[torch.dtype, str | None, Callable[[int, int, int], Any]]] = {
    "fp32": (torch.float32, None, numbers),
    "bf16": (torch.bfloat16, None, numbers),
    "int8": (torch.bfloat16, "int8", numbers),
    "int8_weight_only": (torch.bfloat16, "int8_weight_only", numbers),
    "fp8": (torch.bfloat16, None, floats),
} | {
    form: (torch.bfloat16, None, lambda n, k, seed, form=form: random_blocks(form, n, k, seed))  # type: ignore[misc]
    for form in LAYOUTS
}


def products(
    backend: NativeBackend,
    make: Callable[[int, int, int], Any],
    quantization: str | None,
    logits: Tensor,
    gated: bool,
    k: int = DIM,
) -> tuple[Tensor, Tensor]:
    """What the experts give, and what each gives as a linear layer of its own."""
    rows, n = len(logits), 2 * WIDTH if gated else WIDTH + 3
    choice, logits = choice_of(), at_least_one(logits)
    x = calls.normal(max(rows, 1), k, seed=9, dtype=backend.dtype)
    weights = [make(n, k, seed) for seed in range(COUNT)]
    bias = None if isinstance(weights[0], Tensor) and quantization is None else calls.normal(COUNT, n, seed=5)
    packed = backend.pack_experts(COUNT, iter(weights), bias, quantization)
    epilogue, width = (Epilogue.SILU_MUL, n // 2) if gated else (Epilogue.STORE, n)
    routes = Routes.allocate(backend.zeros, max(rows, 1), k, choice, backend.dtype)
    y = torch.full((rows * 3 + 1, width), torch.nan, dtype=backend.dtype if gated else torch.float32)
    p = backend.program()
    p.route(calls.count(rows), logits, x, choice, routes)
    p.experts(calls.count(rows), routes.sorted, packed, routes, y, epilogue)
    p.finish()
    p.run()
    assert y[rows * 3 :].isnan().all()
    own = torch.zeros_like(y)
    for expert in range(COUNT):
        begin, end = routes.first[expert : expert + 2].tolist()
        if begin == end:
            continue
        matrix, its = weights[expert], None if bias is None else bias[expert]
        plain = (
            backend.pack(matrix, its, quantization)
            if isinstance(matrix, Tensor)
            else backend.pack_blocks([matrix], its)
        )
        q = backend.program()
        q.linear(calls.count(end - begin), routes.sorted[begin:end].contiguous(), plain, own[begin:end], epilogue)
        q.finish()
        q.run()
    return y[: rows * 3], own[: rows * 3]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_products_are_those_of_linear_layers(library: Library, kind: str, gated: bool, rows: int) -> None:
    dtype, quantization, make = KINDS[kind]
    for threads in numbers_of_threads(library, 1, 2, 5):
        backend = native(library, dtype, threads, quantization=quantization)
        logits = calls.normal(rows, COUNT, seed=rows) if rows else torch.zeros(1, COUNT)[:0]
        y, own = products(backend, make, quantization, logits, gated)
        assert calls.same_bits(y, own)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int8_weight_only", "fp8", "q4_k"])
def test_one_expert_has_all_rows(library: Library, kind: str) -> None:
    """More than a thread keeps at once, and others none."""
    dtype, quantization, make = KINDS[kind]
    logits = torch.zeros(291, COUNT)
    logits[:, [2, 3, 10]] = 1.0
    for threads in numbers_of_threads(library, 2, 3):
        backend = native(library, dtype, threads, quantization=quantization)
        y, own = products(backend, make, quantization, logits, gated=True)
        assert calls.same_bits(y, own)


# ---------------------------------------------------------------------------------------------------------- their sums
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_sums(library: Library, add: bool, shared: bool, rows: int) -> None:
    dim, backend = 515, native(library)
    x = calls.normal(max(rows, 1), 8, seed=1)[:rows]
    routes = routed(backend, calls.normal(max(rows, 1), COUNT, seed=2)[:rows], x, choice_of())
    y, out = calls.normal(rows * 3 + 1, dim, seed=3), calls.normal(rows + 1, dim, seed=4)
    beside = (calls.normal(rows + 1, dim, seed=5), calls.normal(rows + 1, 1, seed=6)) if shared else (None, None)
    before, p = out.clone(), backend.program()
    p.combine(calls.count(rows), y, routes, out, add, *beside)
    p.finish()
    p.run()
    own = (None, None) if beside[0] is None or beside[1] is None else (beside[0][:rows], beside[1][:rows])
    expected = combine(y, routes, rows, *own)
    expected = before[:rows] + expected if add else expected
    assert torch.equal(out[rows:], before[rows:])
    if shared:
        assert torch.allclose(out[:rows], expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out[:rows], expected)


def test_mistakes_are_named(context: Context) -> None:
    backend, x = native(context.library), calls.normal(2, 16, seed=1)
    logits = calls.normal(2, COUNT, seed=2)
    for choice, problem in (
        (ExpertChoice(0, 1), "num_experts is 0; it must be 1 to 1024"),
        (ExpertChoice(COUNT, COUNT + 1), "num_chosen is 12; it must be 1 to 11"),
        (ExpertChoice(COUNT, 1, scale=float("inf")), "scale is inf; it must be finite"),
    ):
        routes = Routes.allocate(backend.zeros, 2, 16, choice, x.dtype)
        p = backend.program()
        p.route(calls.count(2), logits, x, choice, routes)
        p.finish()
        with pytest.raises(KernelError, match=problem):
            p.run()
    with pytest.raises(ValueError, match=r"expert 1 has \[33, 32\] in numbers; it must have \[32, 32\] in numbers"):
        backend.pack_experts(2, iter([calls.normal(32, 32, seed=1), calls.normal(33, 32, seed=1)]))
