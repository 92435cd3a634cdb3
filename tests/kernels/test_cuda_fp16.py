"""fp16 on CUDA's kernels, which are bf16's once more: every number, its rounding, the bits of few rows and many, int8's
sums of a CPU. Attention and the cache are in test_cuda_attention.py and test_kv_bytes.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference
from pagedec.kernels.library import EMULATED_DEVICE, Context, Dtype, Epilogue, KernelError, Library
from tests.kernels import calls, cuda_library, test_gemm_int8
from tests.kernels.calls import CODES, count, ints, normal, pointer, same_bits
from tests.kernels.test_gemm import Linear, aligned, assert_near

HALF = torch.float16
FEW = 32
"""Rows that the kernel of few takes; more go by tiles, with one block by those of 128 x 128."""


@pytest.fixture(scope="module", params=cuda_library.cases())
def device(request: pytest.FixtureRequest) -> Library:
    return cuda_library.open_library(request.param)


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, but that any NaN is as good as another."""
    there = ~want.isnan()
    return same_bits(got[there], want[there]) and torch.equal(got.isnan(), want.isnan())


def all_numbers() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(HALF)


def test_every_number_is_read(device: Library) -> None:
    table = all_numbers().view(1 << 12, 16)
    assert same(calls.embed(device.context(), ints(range(len(table))), table, 1.0), table.float())


def test_numbers_are_rounded_as_torch_rounds_them(device: Library) -> None:
    """Each number of fp16, what lies halfway to the next, and beside it; beyond the largest it is infinity."""
    own = all_numbers().float()
    own = own[own.isfinite()].sort().values
    middle = (own[:-1] + own[1:]) / 2
    x = torch.cat((own, middle, torch.nextafter(middle, -own[-1:]), torch.nextafter(middle, own[-1:])))
    edge = torch.tensor([65519.996, 65520.0, 1e30, 2.0**-25, 2.0**-25 + 2.0**-48, 1e-30, torch.inf, torch.nan])
    numbers = [torch.cat((x, edge[:6], -edge[:6], x.new_zeros(-(len(x) + 12) % FEW))).view(-1, FEW), edge[:, None]]
    for x in numbers:  # times 1 and plus 0
        assert same(Linear.pack(device.context(), torch.eye(x.shape[1]))(x, y_dtype=HALF), (x + 0.0).half())


def test_norms(device: Library) -> None:
    x, weight, bias = normal(5, 100, seed=1, scale=3.0), normal(100, seed=2), normal(100, seed=3)
    x[3], x[4, 5] = x[3] * 1e5, torch.nan
    weight[7] = 1e6  # far beyond what fp16 has
    with_bias = calls.layer_norm(device.context(), x, weight, bias, 1e-5, out_dtype=HALF)
    assert same(with_bias, calls.layer_norm(device.context(), x, weight, bias, 1e-5).half())
    got = calls.rms_norm(device.context(), x, weight, 1e-5, out_dtype=HALF)
    assert same(got, calls.rms_norm(device.context(), x, weight, 1e-5).half()) and got[4].isnan().all()
    exact = reference.rms_norm(x, weight, 1e-5, out_dtype=torch.float64, compute_dtype=torch.float64)
    assert got[:4, 7].isinf().any() and not got[:4, 8:].isinf().any()
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-10 + 2.0**-24)[:4, 8:].all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("blocks", "rows", "n", "k"),
    [(1, 130, 100, 552), (1, 257, 129, 96), (64, 65, 33, 776), (64, 33, 31, 40), (2, 70, 65, 301)],
)
def test_many_rows_have_the_bits_of_few(device: Library, blocks: int, rows: int, n: int, k: int) -> None:
    """And are near float64, also of numbers below 2^-14."""
    x, weight, bias = normal(rows, k, seed=1, dtype=HALF), normal(n, k, seed=2, dtype=HALF), normal(n, seed=3)
    x[:, ::3] *= 2.0**-16
    linear = Linear.pack(device.context(blocks), weight, torch.cat((bias, torch.zeros(-n % FEW))), n)
    whole = linear(x)
    assert_near(whole, x, weight, bias)
    assert same_bits(whole, torch.cat([linear(part) for part in x.split(FEW)]))
    assert same_bits(linear(x[5:6]), whole[5:6]) and same_bits(linear(x[7:27]), whole[7:27])
    if device.isa == EMULATED_DEVICE:  # its second one has too little shared memory for tiles
        assert same_bits(Linear.pack(device.context(0, 1), weight, linear.bias, n)(x), whole)


@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_what_becomes_of_sums(device: Library, epilogue: Epilogue) -> None:
    x, weight = normal(67, 40, seed=1, dtype=HALF), normal(96, 40, seed=2, dtype=HALF)
    x[3] *= 300  # gate times up is beyond fp16's numbers, but where both are clamped
    is_beyond = epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_MUL)
    y = normal(67, 96, seed=4) if epilogue == Epilogue.ADD else None
    for context in (device.context(1), device.context(64)):
        linear = Linear.pack(context, weight)
        whole = linear(x, epilogue, y)
        if y is not None:
            assert_near(whole, x, weight, None, y)
            continue
        half = linear(x, epilogue, y_dtype=HALF)
        assert same_bits(half, whole.half())
        assert half[3].isinf().any() == is_beyond and half[4:].isfinite().all()
        assert same_bits(torch.cat([linear(part, epilogue, y_dtype=HALF) for part in x.split(FEW)]), half)


def test_int8_has_the_bits_of_a_cpu(device: Library, cpu: Context) -> None:
    """Of the same numbers in fp32; weights are made integers from fp16, too."""
    for rows, n, k in ((1, 33, 70), (20, 7, 1090), (70, 65, 257), (129, 130, 192)):
        x, weight = normal(rows, k, seed=1, dtype=HALF), normal(n, k, seed=2, dtype=HALF)
        x[:, 1::2] *= 2.0**-12
        context = device.context(1 if rows > 100 else 64)
        want = test_gemm_int8.linear(cpu, x.float(), weight.float())
        assert same_bits(test_gemm_int8.linear(context, x, weight), want)
        assert same_bits(test_gemm_int8.linear(context, x, weight, y_dtype=HALF), want.half())
        own = test_gemm_int8.packed(context, weight)
        assert torch.equal(own, test_gemm_int8.packed(context, weight.float()))


def test_what_is_not_finite_stays_in_its_row(device: Library) -> None:
    x, linear = normal(70, 48, seed=1, dtype=HALF), Linear.pack(device.context(2), normal(70, 48, seed=2, dtype=HALF))
    clean = linear(x)
    x[3, 47], x[66, 0] = torch.nan, torch.inf
    dirty, others = linear(x), [i for i in range(70) if i not in (3, 66)]
    assert same_bits(dirty[others], clean[others])
    assert dirty[3].isnan().all() and not dirty[66].isfinite().any()


def test_products_a_second_are_counted(device: Library) -> None:
    assert device.context().dot_rate(Dtype.F16, 1e-9) > 0


def test_a_cpu_refuses_it_by_name(contexts: list[Context]) -> None:
    x, y, rows = normal(2, 8, seed=1, dtype=HALF), torch.zeros(2, 32), count(2)
    said = r"dtype is 2 \(fp16\), which a CPU does not compute in; it must be 0 \(fp32\) or 1 \(bf16\)$"
    for context in contexts:
        with pytest.raises(KernelError, match=f"^pd_packed_bytes: {said}"):
            context.library.packed_bytes(32, 8, CODES[HALF])
        with pytest.raises(KernelError, match=f"^pd_pack_int8: {said}"):
            context.pack_int8(pointer(x), 2, 8, CODES[HALF], aligned(4096).data_ptr())
        packed = Linear.pack(context, normal(32, 8, seed=2))
        record = packed.record(rows, x, y)
        record.y_dtype = CODES[HALF]
        with pytest.raises(KernelError, match=f"^pd_gemm: y_{said}"):
            context.call(record)
        with pytest.raises(KernelError, match=f"^pd_embed: {said}"):
            calls.embed(context, ints([0]), x)
