"""Single logits and their ranks: 1 + how many of the row are greater, whatever ties, infinities and NaN there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, KernelError, PickLogitsArgs
from tests.kernels import calls
from tests.kernels.test_guard_pages import guarded

VOCABS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 4097]
KINDS = ("plain", "ties", "zeros", "banned", "nothing", "nan", "infinities")


def logits(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    some = rng.random(x.shape) < 0.3
    if kind == "ties":
        x = np.floor(x)
    elif kind == "zeros":
        x = np.where(some, np.float32(-0.0), np.float32(0.0))
    elif kind == "banned":
        x[some] = -np.inf
    elif kind == "nothing":
        x[:] = -np.inf
    elif kind == "nan":
        x[some] = np.nan
    elif kind == "infinities":
        x[some], x[rng.random(x.shape) < 0.1] = np.inf, -np.inf
    return x


def entries(x: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A row's entries side by side and apart, some twice."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(x), n).astype(np.int32)
    rows[n // 2 :] = np.sort(rows[n // 2 :])
    return rows, rng.integers(0, x.shape[1], n).astype(np.int32)


def check(context: Context, x: np.ndarray, rows: np.ndarray, tokens: np.ndarray, num_threads: int = 0) -> None:
    backend = calls.native(context, num_threads)
    wanted = x[rows, tokens]
    ranks = [1 + int((x[row] > value).sum()) for row, value in zip(rows.tolist(), wanted, strict=True)]
    for each in (backend, ReferenceBackend(torch.float32)):
        values, found = each.pick_ranked(torch.from_numpy(x), rows, tokens)
        assert values.dtype == np.float32 and found.dtype == np.int32
        assert values.tobytes() == wanted.tobytes() and found.tolist() == ranks
        assert each.pick(torch.from_numpy(x), rows, tokens).tobytes() == wanted.tobytes()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_values_and_ranks(context: Context, vocab: int, kind: str) -> None:
    for n in (0, 1, 17):
        x = logits(kind, 5, vocab, vocab + n)
        check(context, x, *entries(x, n, n))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_row(context: Context, kind: str) -> None:
    x = logits(kind, 2, 200, 3)
    check(context, x, np.repeat(np.array([1, 0], np.int32), 200), np.tile(np.arange(200, dtype=np.int32), 2))


def test_many_entries_and_a_large_vocabulary(context: Context) -> None:
    x = logits("ties", 300, 77, 1)
    check(context, x, np.arange(300, dtype=np.int32), entries(x, 300, 2)[1])
    x = logits("plain", 3, 49153, 4)
    order = np.argsort(-x[1])
    tokens = order[[0, 1, 7, 1000, 30000, 49152]].astype(np.int32)
    check(context, x, np.ones(6, np.int32), tokens)
    backend = calls.native(context)
    assert backend.pick_ranked(torch.from_numpy(x), np.ones(6, np.int32), tokens)[1].tolist() == [
        1, 2, 8, 1001, 30001, 49153
    ]  # fmt: skip


def test_a_nan_beside_an_entry_changes_nothing_of_it(context: Context) -> None:
    x = logits("plain", 1, 100, 5)
    x[0, 40] = np.nan
    check(context, x, np.zeros(3, np.int32), np.array([3, 40, 7], np.int32))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(context: Context, num_threads: int) -> None:
    x = logits("ties", 4, 700, 6)
    for n in (0, 1, 2, 40):
        check(context, x, *entries(x, n, n), num_threads=num_threads)


@pytest.mark.parametrize("at_front", [False, True])
def test_ends_of_arrays(context: Context, at_front: bool) -> None:
    for vocab in (1, 33, 1001):
        x = calls.normal(2, vocab, seed=1)
        last = calls.ints([vocab - 1, 0])
        arrays = (calls.count(2), x, calls.ints([1, 0]), last, torch.zeros(2), calls.ints([0, 0]))
        n, own, rows, tokens, values, ranks = (guarded(tensor, at_front=at_front) for tensor in arrays)
        addresses = [tensor.data_ptr() for tensor in (n, own, rows, tokens, values, ranks)]
        context.call(PickLogitsArgs(*addresses, vocab, 0))
        assert values.tolist() == [float(x[1, -1]), float(x[0, 0])]
        assert ranks.tolist() == [1 + int((x[1] > x[1, -1]).sum()), 1 + int((x[0] > x[0, 0]).sum())]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_entries", None, "num_entries is NULL"),
        ("num_entries", [-1], "num_entries is -1; it must be 0 to"),
        ("logits", None, "logits is NULL"),
        ("rows", None, "rows is NULL"),
        ("tokens", None, "tokens is NULL"),
        ("values", None, "values is NULL"),
        ("vocab", 0, "vocab is 0; it must be 1 to"),
        ("rows", [0, -1], r"rows\[1\] is -1; it must be 0 to"),
        ("tokens", [4, 0], r"tokens\[0\] is 4; it must be 0 to 3"),
        ("tokens", [0, -1], r"tokens\[1\] is -1; it must be 0 to 3"),
    ],
)
def test_mistakes_are_named(context: Context, field: str, value: Any, message: str) -> None:
    numbers: dict[str, Any] = {"num_entries": [2], "rows": [0, 1], "tokens": [1, 3], "ranks": [0, 0], field: value}
    vocab = numbers.pop("vocab", 4)
    held = {name: values if values is None else calls.ints(values) for name, values in numbers.items()}
    held = {"logits": torch.ones(2, 4), "values": torch.zeros(2)} | held
    record = PickLogitsArgs(vocab=vocab, **{name: calls.pointer(tensor) for name, tensor in held.items()})
    with pytest.raises(KernelError, match=f"^pd_pick_logits: {message}"):
        context.call(record)
    assert held["values"] is None or not held["values"].any()
