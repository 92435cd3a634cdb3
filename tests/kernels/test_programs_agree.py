"""The two backends carry out the same recording: what models call, on the compiled kernels and on torch."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, Epilogue
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls

DIM, WIDTH, VOCAB, ROWS, MAX_ROWS = 48, 70, 90, 7, 9


def forward(backend: Backend, num_rows: int) -> dict[str, torch.Tensor]:
    """Embedding with positions, a layer norm, an MLP with GELU, a norm behind it, capped logits of some rows."""
    dtype, p, rows = backend.dtype, backend.program(), calls.count(num_rows)
    table, offsets = (calls.normal(n, DIM, seed=n, dtype=dtype) for n in (VOCAB, 40))
    ids, positions = calls.ints(torch.arange(MAX_ROWS) * 7 % VOCAB), calls.ints(torch.arange(MAX_ROWS) + 3)
    slots, plane = calls.ints(range(MAX_ROWS)), torch.full((16,), -1, dtype=torch.int32)
    x, block, logits = torch.zeros(MAX_ROWS, DIM), torch.zeros(MAX_ROWS, DIM), torch.zeros(MAX_ROWS, VOCAB)
    normed, mlp = torch.zeros(MAX_ROWS, DIM, dtype=dtype), torch.zeros(MAX_ROWS, WIDTH, dtype=dtype)
    weight, bias = calls.normal(DIM, seed=1), calls.normal(DIM, seed=2)
    up = backend.pack(calls.normal(WIDTH, DIM, seed=3, scale=0.2), calls.normal(WIDTH, seed=4))
    down, head = (backend.pack(calls.normal(n, k, seed=n, scale=0.2)) for n, k in ((DIM, WIDTH), (VOCAB, DIM)))
    p.embed(rows, ids, table, x, slots, plane, 2.0, positions, offsets)
    p.layer_norm(rows, x, weight, bias, normed, 1e-5)
    p.linear(rows, normed, up, mlp, Epilogue.GELU)
    p.linear(rows, mlp, down, block)
    p.rms_norm(rows, block, weight, x, 1e-6, add=True)
    p.layer_norm(rows, x, weight, None, normed, 1e-5, calls.ints([4, 0, 2, 2, 1, 3, 5, 6, 6]) % num_rows)
    p.linear(rows, normed, head, logits)
    p.soft_cap(rows, logits, 3.0)
    p.finish()
    p.run()
    return {"x": x, "mlp": mlp, "logits": logits, "plane": plane}


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_native_and_torch_give_the_same_forward(context: Context, dtype: torch.dtype) -> None:
    native, torches = (forward(b, ROWS) for b in (NativeBackend(context.library, dtype), ReferenceBackend(dtype)))
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    for name in ("x", "mlp", "logits"):
        assert torch.allclose(native[name].float(), torches[name].float(), rtol=tolerance, atol=tolerance), name
        assert not native[name][:ROWS].eq(0).all() and native[name][ROWS:].eq(0).all()
    assert torch.equal(native["plane"], torches["plane"])
    assert native["logits"].abs().max() <= 3.0


def elsewhere(backend: Backend, num_rows: int) -> dict[str, torch.Tensor]:
    """Rows into columns of a wider array, at places of which one is none, and back; logits of some tokens."""
    p, rows = backend.program(), calls.count(num_rows)
    x, y = calls.normal(MAX_ROWS, DIM, seed=1), torch.zeros(MAX_ROWS, DIM)
    pairs, logits = torch.zeros(20, 2 * DIM, dtype=backend.dtype), torch.zeros(MAX_ROWS, VOCAB)
    slots, places = calls.ints([19, 3, -1, 0, 7, 8, 1, -1, 2]), calls.ints(torch.arange(VOCAB) - 1).clamp(max=DIM - 1)
    p.copy_rows(rows, x, pairs[:, DIM:], dst_rows=slots, scale=1.5)
    p.copy_rows(rows, pairs[:, DIM:], pairs[:, :DIM])
    p.copy_rows(rows, pairs[:, DIM:], y, slots.abs())
    p.spread_logits(rows, y, places, logits)
    p.finish()
    p.run()
    return {"pairs": pairs, "y": y, "logits": logits}


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, ROWS, MAX_ROWS])
def test_native_and_torch_put_rows_to_the_same_places(context: Context, dtype: torch.dtype, num_rows: int) -> None:
    native, torches = (elsewhere(b, num_rows) for b in (NativeBackend(context.library, dtype), ReferenceBackend(dtype)))
    assert all(calls.same_bits(native[name], torches[name]) for name in native)
    assert all(tensor.count_nonzero() > 0 for tensor in native.values()) == (num_rows > 0)


@pytest.mark.parametrize(
    ("columns", "dtype", "message"),
    [
        (slice(0, 20, 2), torch.float32, "src is torch.float32, strides \\(20, 2\\); it must be rows of"),
        (slice(0, 10), torch.int32, "src is torch.int32, strides \\(20, 1\\); it must be rows of torch.float32,"),
        (slice(0, 9), torch.float32, "dst has 10 columns; it must have 9, as src"),
    ],
)
def test_what_are_no_rows_is_refused(context: Context, columns: slice, dtype: torch.dtype, message: str) -> None:
    program, src = NativeBackend(context.library, torch.float32).program(), torch.zeros(4, 20, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        program.copy_rows(calls.count(2), src[:, columns], torch.zeros(4, 10))


@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_rows_of_the_torch_programs_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    few, many = forward(ReferenceBackend(dtype), 1), forward(ReferenceBackend(dtype), ROWS)
    for name in ("x", "mlp"):
        assert calls.same_bits(few[name][0], many[name][0])
