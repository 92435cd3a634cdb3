"""Low-rank adapters on every library: what they add, and that a row's bits are nobody else's business."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedec.kernels import reference_lora
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, Dtype, Epilogue, KernelError, Library, LoraArgs
from pagedec.kernels.lora import LoraUpdate, LoraWeights
from pagedec.kernels.native import NativeBackend
from tests.kernels import lora_cases
from tests.kernels.calls import (
    DTYPES,
    assert_close,
    assert_lost_alone,
    count,
    either,
    ints,
    normal,
    pointer,
    same_bits,
    threads,
)
from tests.kernels.lora_cases import MIXED, NOBODY, behind, exact, in_turns, layer, lora, rows_of


def assert_near(y: Tensor, adapters: tuple[int, ...], x: Tensor, weights: LoraWeights, before: Tensor) -> None:
    """Sums of k / 16 products and of as many as there are ranks, then the lanes' and the last one."""
    expected, size = exact(adapters, x, weights, before)
    assert_close(y, expected, ulps=weights.a.shape[3] / 16 + weights.a.shape[2] + 48, scale=size)


# ------------------------------------------------------------------------------------------------------ what they add
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 15, 16, 17, 100, 576, 1100])
@pytest.mark.parametrize("widths", [(1,), (33,), (144, 31), (64, 16, 47), (16, 130, 32, 5)], ids=len)
def test_sums_are_near_float64(context: Context, dtype: torch.dtype, k: int, widths: tuple[int, ...]) -> None:
    """Of one to four parts, to fp32 and to the model's numbers; one place has nothing for the last part."""
    ranks = [[3 + p for p in range(len(widths))], [8] * len(widths), [1] * (len(widths) - 1) + [0]]
    weights = layer(behind(*widths), k, ranks, 8, dtype)
    x, n = rows_of(MIXED, k, dtype), weights.b.shape[2]
    for y_dtype in {torch.float32, dtype}:
        before = normal(len(MIXED), n, seed=3, dtype=y_dtype)
        y = lora(context, MIXED, x, weights, before)
        assert_near(y, MIXED, x, weights, before)
        nobody = [row for row, place in enumerate(MIXED) if place == NOBODY]
        assert same_bits(y[nobody], before[nobody])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 16, 64])
def test_any_rank_below_and_at_the_most(context: Context, dtype: torch.dtype, rank: int) -> None:
    """What lies behind an update's own rank is NaN, and read by nobody."""
    k = either(context, 200, 40)
    x = rows_of(MIXED, k, dtype)
    for most in (rank, rank + 1, 64):
        weights = layer(behind(48, 21), k, [[rank, 1], [0, rank], [rank, rank]], most, dtype)
        before = normal(len(MIXED), 69, seed=3)
        assert_near(lora(context, MIXED, x, weights, before), MIXED, x, weights, before)


@pytest.mark.parametrize("length", range(1, 10))
def test_runs_of_one_adapter(context: Context, length: int) -> None:
    """A run's rows, wherever it begins, have the bits that each has alone."""
    weights, x = layer(behind(40), 70, [[5], [3]]), normal(length + 3, 70, seed=9)
    before = normal(length + 3, 40, seed=3)
    alone = torch.cat([lora(context, [1], x[i : i + 1], weights, before[i : i + 1]) for i in range(length + 3)])
    for first in range(4):
        adapters = [0] * first + [1] * length + [NOBODY] * (3 - first)
        y = lora(context, adapters, x, weights, before)
        assert same_bits(y[first : first + length], alone[first : first + length])
        assert_near(y, tuple(adapters), x, weights, before)


def test_no_rows(context: Context) -> None:
    weights = layer(behind(40), 70, [[5]])
    for epilogue in (Epilogue.ADD, Epilogue.SILU_MUL):
        own = weights if epilogue == Epilogue.ADD else layer(in_turns(16), 70, [[5, 5]])
        n = own.b.shape[2]
        assert not len(lora(context, [], torch.zeros(0, 70), own, torch.zeros(0, n), epilogue))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), bf16=st.booleans(), k=st.integers(1, 70), num_threads=st.integers(1, 3))
def test_any_mixture_on_every_instruction_set(
    contexts: list[Context], data: st.DataObject, bf16: bool, k: int, num_threads: int
) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    widths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    most = data.draw(st.integers(1, 9))
    ranks = [[data.draw(st.integers(0, most)) for _ in widths] for _ in range(3)]
    adapters = tuple(data.draw(st.lists(st.integers(NOBODY, 2), max_size=13)))
    weights, x = layer(behind(*widths), k, ranks, most, dtype), rows_of(adapters, k, dtype)
    before = normal(len(adapters), weights.b.shape[2], seed=3)
    first, *others = (lora(threads(context, num_threads), adapters, x, weights, before) for context in contexts)
    assert_near(first, adapters, x, weights, before)
    assert all(same_bits(first, other) for other in others)


def test_the_reference_is_near(context: Context) -> None:
    weights, x = layer(behind(32, 48), 100, [[3, 0], [2, 8], [1, 1]]), rows_of(MIXED, 100, torch.float32)
    before = normal(len(MIXED), 80, seed=3)
    meant = reference_lora.lora(ints(MIXED), x, weights, before)
    assert torch.allclose(lora(context, MIXED, x, weights, before), meant, rtol=1e-5, atol=1e-5)
    assert_near(meant, MIXED, x, weights, before)


# --------------------------------------------------------------------------------------------------------- their bits
def test_threads_change_nothing(context: Context) -> None:
    for of_parts, epilogue in ((behind(144, 80, 33), Epilogue.ADD), (in_turns(208), Epilogue.SILU_MUL)):
        weights = layer(of_parts, 100, [[3, 8, 2][: len(of_parts)]] * 3, 8, torch.bfloat16)
        x, before = rows_of(MIXED, 100, torch.bfloat16), normal(len(MIXED), weights.b.shape[2], seed=3)
        first, *others = (
            lora(threads(context, number), MIXED, x, weights, before, epilogue)
            for number in either(context, (1, 2, 3), (1, 3))
        )
        assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 100, 1100])
def test_every_instruction_set_gives_the_same_bits(contexts: list[Context], dtype: torch.dtype, k: int) -> None:
    """But for gates, which are each one's own."""
    weights, x = layer(behind(144, 77), k, [[3, 8], [16, 1], [0, 7]], 16, dtype), rows_of(MIXED, k, dtype)
    before = normal(len(MIXED), weights.b.shape[2], seed=3)
    first, *others = (lora(context, MIXED, x, weights, before) for context in contexts)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SILU_MUL], ids=lambda epilogue: epilogue.name)
def test_a_row_is_the_same_alone_and_at_any_place(context: Context, dtype: torch.dtype, epilogue: Epilogue) -> None:
    k, num_rows = 100, len(MIXED)
    of_parts = in_turns(144) if epilogue.is_gated else behind(144, 77)
    weights, x = layer(of_parts, k, [[3, 8], [16, 1], [0, 7]], 16, dtype), rows_of(MIXED, k, dtype)
    before = normal(num_rows, weights.b.shape[2], seed=3)
    whole = lora(context, MIXED, x, weights, before, epilogue)
    for row in range(num_rows):
        own = slice(row, row + 1)
        assert same_bits(lora(context, MIXED[own], x[own], weights, before[own], epilogue), whole[own])
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    shuffled = lora(context, ints(MIXED)[order], x[order], weights, before[order], epilogue)
    assert same_bits(shuffled, whole[order])
    for move in ([2, 0, 1], [1, 2, 0]):  # the same updates at other places
        moved = LoraWeights(*(t[move].contiguous() for t in (weights.a, weights.b, weights.scales, weights.ranks)),
                            weights.parts, weights.of_parts)  # fmt: skip
        adapters = [place if place == NOBODY else move.index(place) for place in MIXED]
        assert same_bits(lora(context, adapters, x, moved, before, epilogue), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SILU_MUL], ids=lambda epilogue: epilogue.name)
def test_what_is_not_finite_stays_in_its_rows(context: Context, dtype: torch.dtype, epilogue: Epilogue) -> None:
    """In a row, whose neighbours are in its run; and in an adapter, whose rows are not all."""
    for k in (17, 100):
        of_parts = in_turns(48) if epilogue.is_gated else behind(48, 45)
        weights, x = layer(of_parts, k, [[3, 8], [4, 1], [2, 7]], 8, dtype), rows_of(MIXED, k, dtype)
        before = normal(len(MIXED), weights.b.shape[2], seed=3)
        clean = lora(context, MIXED, x, weights, before, epilogue)
        hurt = x.clone()
        hurt[1, k - 1], hurt[8, 0], hurt[5] = torch.nan, torch.nan, torch.inf  # the last one is nobody's
        assert_lost_alone(lora(context, MIXED, hurt, weights, before, epilogue), _lost(clean, [1, 8]), [1, 8])
        own = [row for row, place in enumerate(MIXED) if place == 0]
        weights.a[0], weights.b[0] = torch.inf, torch.nan
        assert_lost_alone(lora(context, MIXED, x, weights, before, epilogue), _lost(clean, own), own)


def _lost(y: Tensor, rows: list[int]) -> Tensor:
    lost = y.clone()
    lost[rows] = torch.nan
    return lost


# ---------------------------------------------------------------------------------------------- programs, and mistakes
def add_and_gate(backend: Backend, adapters: tuple[int, ...]) -> dict[str, Tensor]:
    """Two layers with adapters, as a block has them: to the residual stream, and before gates."""
    rows, dim, width, dtype, p = len(adapters), 48, 80, backend.dtype, backend.program()
    added, gated = (
        layer(parts, dim, [[4, 2], [3, 0], [1, 5]], 5, dtype) for parts in (behind(32, 16), in_turns(width))
    )
    x, own, num_rows = normal(rows, dim, seed=1, dtype=dtype), ints(adapters), count(rows)
    y, z, low = normal(rows, dim, seed=2), normal(rows, 2 * width, seed=3), torch.zeros(rows * 10)
    mlp = torch.zeros(rows, width, dtype=dtype)
    p.lora(num_rows, own, x, added, low, y)
    p.lora(num_rows, own, x, gated, low, mlp, Epilogue.SILU_MUL, z)
    p.finish()
    p.run()
    return {"y": y, "mlp": mlp}


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_both_backends_agree(library: Library, dtype: torch.dtype) -> None:
    native, torches = (add_and_gate(b, MIXED) for b in (NativeBackend(library, dtype), ReferenceBackend(dtype)))
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    for name, value in native.items():
        assert torch.allclose(value.float(), torches[name].float(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, None, f"{name} is NULL") for name in ("num_rows", "adapters", "x", "a", "b", "scales", "ranks")),
        *((name, None, f"{name} is NULL") for name in ("parts", "low", "y")),
        ("num_places", 0, "num_places is 0; it must be 1 to 65536"),
        ("num_parts", 0, "num_parts is 0; it must be 1 to 4"),
        ("num_parts", 5, "num_parts is 5; it must be 1 to 4"),
        ("rank", 0, "rank is 0; it must be 1 to 1024"),
        ("rank", 1025, "rank is 1025; it must be 1 to 1024"),
        ("n", 0, "n is 0"),
        ("k", -1, "k is -1"),
        ("dtype", 7, "dtype is 7; it must be 0"),
        ("y_dtype", int(Dtype.BF16), r"y_dtype is 1; it must be 0 \(fp32\) or dtype, 0"),
        ("epilogue", int(Epilogue.STORE), r"epilogue is 0; it must be 1 \(add\), or one of gates"),
        ("epilogue", int(Epilogue.GELU), "epilogue is 4; it must be 1"),
        ("epilogue", int(Epilogue.SILU_MUL), "z is NULL"),
        ("z", 1, "z is given; only where outputs are gates may it be"),
    ],
)
def test_an_invalid_field_is_named(context: Context, field: str, value: int | None, message: str) -> None:
    data, rows, own = torch.zeros(256), count(1), ints([0, 0])
    arrays = ("x", "a", "b", "scales", "low", "y")
    numbers = {"num_places": 1, "num_parts": 1, "rank": 2, "n": 32, "k": 4, "epilogue": int(Epilogue.ADD)}
    fields: dict[str, Any] = {name: pointer(data) for name in arrays} | numbers
    fields |= {"num_rows": pointer(rows), "adapters": pointer(own), "ranks": pointer(own), "parts": pointer(own)}
    context.call(LoraArgs(**fields))
    wrong = pointer(data) if field == "z" else value
    with pytest.raises(KernelError, match=f"^pd_lora: {message}"):
        context.call(LoraArgs(**(fields | {field: wrong})))


def test_gates_take_whole_groups(context: Context) -> None:
    weights = layer(behind(48), 8, [[1]])
    with pytest.raises(KernelError, match="^pd_lora: n is 48; with gate and up rows it must be a multiple of 32"):
        lora(context, [0], torch.zeros(1, 8), weights, torch.zeros(1, 48), Epilogue.SILU_MUL)


def test_an_invalid_record_is_named(context: Context) -> None:
    """What its pointers lead to: a place, a rank or a part that there is not, and a negative count."""
    x, before = torch.zeros(5, 8), torch.zeros(5, 48)
    for name, value, limit in (("adapters[4]", 2, "-1 to 1"), ("adapters[4]", -2, "-1 to 1")):
        with pytest.raises(KernelError, match=re.escape(f"pd_lora: {name} is {value}; it must be {limit}")):
            lora(context, [0, 1, 1, -1, value], x, layer(behind(32, 16), 8, [[1, 3], [2, 1]]), before)
    for name, place, value, limit in (("ranks", 3, 4, "0 to 3"), ("ranks", 1, -1, "0 to 3"), ("parts", 2, 2, "0 to 1")):
        weights = layer(behind(32, 16), 8, [[1, 3], [2, 1]])
        getattr(weights, name).view(-1)[place] = value
        with pytest.raises(KernelError, match=re.escape(f"pd_lora: {name}[{place}] is {value}; it must be {limit}")):
            lora(context, [0], x[:1], weights, before[:1])


def test_a_group_of_two_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="part 1 shares some group of 16 outputs with another"):
        layer([behind(20)[0], behind(20)[0][:5] + 20], 8, [[1, 1]])


def test_a_place_is_another_adapters_afterwards(context: Context) -> None:
    """Of a lower rank, and of fewer parts: nothing is left of the one before."""
    weights, x, before = layer(behind(32, 16), 20, [[6, 6]]), normal(3, 20, seed=9), normal(3, 48, seed=3)
    b = normal(32, 2, seed=5)
    weights.put(lora_cases.write, 0, [LoraUpdate(normal(2, 20, seed=4), b, 0.5), None])
    y = lora(context, [0, NOBODY, 0], x, weights, before)
    assert_near(y, (0, NOBODY, 0), x, weights, before)
    assert weights.ranks.tolist() == [[2, 0]] and same_bits(y[:, 32:], before[:, 32:])
    assert weights.a[0, 0, 2:].eq(0).all() and weights.b[0, 2:].eq(0).all()
