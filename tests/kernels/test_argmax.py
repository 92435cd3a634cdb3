from __future__ import annotations

import numpy as np
import pytest

from pagedec.kernels import reference_readout as reference
from pagedec.kernels.library import ArgmaxArgs, Context, KernelError
from tests.kernels import calls

VOCABS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 5003, 49152]


def logits(rows: int, vocab: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("vocab", VOCABS)
def test_largest(context: Context, vocab: int) -> None:
    x = logits(7, vocab, vocab)
    assert np.array_equal(calls.argmax(context, x), reference.argmax(x))


@pytest.mark.parametrize("vocab", VOCABS)
def test_ties_go_to_the_lower_id(context: Context, vocab: int) -> None:
    x = np.floor(logits(9, vocab, vocab + 1) / 4)  # a handful of values; 0 and -0 among them
    assert np.array_equal(calls.argmax(context, x), reference.argmax(x))
    x = np.full((2, vocab), -0.0, np.float32)
    x[1, vocab // 2 :] = 0.0
    assert calls.argmax(context, x).tolist() == [0, 0]


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_place_is_looked_at(context: Context, vocab: int) -> None:
    places = np.unique(np.linspace(0, vocab - 1, 40).astype(int))
    x = np.full((len(places), vocab), -2.0, np.float32)
    x[np.arange(len(places)), places] = -1.0
    assert np.array_equal(calls.argmax(context, x), places)


def test_nan_counts_as_minus_infinity(context: Context) -> None:
    x = logits(5, 200, 3)
    x[0, ::2] = np.nan
    x[1, :] = np.nan
    x[2, :] = -np.inf
    x[3, 100:] = np.nan
    x[4, 7], x[4, 150] = np.inf, np.inf
    got = calls.argmax(context, x)
    assert np.array_equal(got, reference.argmax(x))
    assert got.tolist()[1:3] == [0, 0] and got[4] == 7


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_rows_do_not_change_a_row(context: Context, num_threads: int) -> None:
    x = logits(20, 300, 4)
    threaded = calls.threads(context, num_threads)
    for n in (0, 1, 2, 20):
        assert np.array_equal(calls.argmax(threaded, x[:n]), reference.argmax(x)[:n])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("vocab", 0, "vocab is 0"), ("logits", None, "logits is NULL"), ("token_ids", None, "token_ids is NULL")],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    rows, data = calls.count(1), np.zeros(8, np.float32)
    fields: dict[str, object] = {"num_rows": rows.data_ptr(), "vocab": 4}
    fields |= {"logits": data.ctypes.data, "token_ids": data.ctypes.data, field: value}
    with pytest.raises(KernelError, match=f"^pd_argmax: {message}"):
        context.call(ArgmaxArgs(**fields))
