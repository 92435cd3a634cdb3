from __future__ import annotations

import numpy as np
import pytest

from pagedec.kernels import reference_readout as reference
from pagedec.kernels.library import Context, KernelError, TopkLseArgs
from tests.kernels import calls


def logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def check(context: Context, x: np.ndarray, k: int, row_ids: np.ndarray | None = None) -> None:
    ids, values, lse = calls.topk_lse(context, x, k, row_ids)
    true_ids, true_values, true_lse = reference.topk_lse(x, k, row_ids)
    assert np.array_equal(ids, true_ids)
    assert np.array_equal(values, true_values)
    finite = np.isfinite(true_lse)
    assert np.array_equal(lse[~finite], true_lse[~finite].astype(np.float32))
    # exp to 2 ulp, 64 adds in a lane, a tree of 4; then double, rounded once.
    bound = 2.0**-24 * (np.abs(true_lse[finite]) + 70)
    assert np.all(np.abs(lse[finite] - true_lse[finite]) <= bound)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("vocab", [1, 5, 16, 63, 64, 65, 1000, 1024, 1025, 4999])
def test_every_k(context: Context, vocab: int) -> None:
    for k in sorted({0, 1, 2, 8, 16, 17, 64, 200, vocab // 2, vocab - 1, vocab}):
        if 0 <= k <= vocab:
            check(context, logits(3, vocab, vocab + k), k)


@pytest.mark.parametrize("k", [1, 8, 64, 128, 1000])
def test_large_vocabulary(context: Context, k: int) -> None:
    check(context, logits(2, 49152, k), k)


@pytest.mark.parametrize("k", [1, 3, 50, 700])
def test_ties_go_to_the_lower_id(context: Context, k: int) -> None:
    check(context, np.floor(logits(4, 2000, k)), k)
    check(context, np.zeros((2, 2000), np.float32), k)
    mixed = np.zeros((1, 2000), np.float32)
    mixed[0, ::3] = -0.0
    check(context, mixed, k)


def test_row_ids_choose_rows(context: Context) -> None:
    check(context, logits(9, 300, 1), 5, np.array([8, 0, 0, 3], np.int32))


def test_far_apart_and_large_logits(context: Context) -> None:
    x = logits(6, 3000, 2)
    x[0] *= 1e30
    x[1] -= 80000.0
    x[2, 17] = 500.0
    x[3, 2500] = 1000.0  # the largest comes last: what was summed before is rescaled to 0
    x[4] = -np.inf
    x[4, 2999] = 1.5
    x[5, ::2] = -np.inf
    check(context, x, 10)


def test_infinities_and_nan(context: Context) -> None:
    x = logits(5, 1500, 3)
    x[0, 3::7] = np.nan
    x[1] = np.nan
    x[2] = -np.inf
    x[3, [20, 1400]] = np.inf
    x[4, 1024:] = np.nan
    check(context, x, 6)
    check(context, x, 1500)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(context: Context, num_threads: int) -> None:
    x = logits(11, 2500, 4)
    whole = calls.topk_lse(context, x, 7)
    threaded = calls.threads(context, num_threads)
    for n in (0, 1, 2, 11):
        for got, expected in zip(calls.topk_lse(threaded, x[:n], 7), whole, strict=True):
            assert got.tobytes() == expected[:n].tobytes()


def test_every_instruction_set_gives_the_same_bits(contexts: list[Context]) -> None:
    x = logits(6, 3333, 5)
    first, *others = (calls.topk_lse(context, x, 40) for context in contexts)
    for other in others:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab", 0, "vocab is 0"),
        ("k", 9, "k is 9; it must be 0 to 8"),
        ("k", -1, "k is -1"),
        ("logits", None, "logits is NULL"),
        ("lse", None, "lse is NULL"),
        ("token_ids", None, "token_ids is NULL"),
        ("values", None, "values is NULL"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    rows, data = calls.count(1), np.zeros(64, np.float32)
    fields: dict[str, object] = dict.fromkeys(("logits", "token_ids", "values", "lse"), data.ctypes.data)
    fields |= {"num_rows": rows.data_ptr(), "vocab": 8, "k": 2, field: value}
    with pytest.raises(KernelError, match=f"^pd_topk_lse: {message}"):
        context.call(TopkLseArgs(**fields))
