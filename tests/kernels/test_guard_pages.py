"""Nothing in front of an array and nothing behind it is read or written: both ends lie at pages that cannot be touched.

An error here is a segmentation fault; pytest prints the line that called the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from ctypes import Structure, c_void_p
from typing import cast

import pytest
import torch
from torch import Tensor

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.blocks import LAYOUTS
from pagedec.kernels.fp8 import VALUES, fp8_blocks
from pagedec.kernels.library import DEVICES, Context, Dtype, EmbedArgs, Epilogue, GemmArgs, Quantization, Segment
from pagedec.kernels.reference import RopeShape
from pagedec.kernels.reference_blocks import BlockLinear
from tests.kernels import calls
from tests.kernels.attention_cases import Cache, run
from tests.kernels.block_cases import FORMATS, random_blocks
from tests.kernels.calls import CODES, DTYPES, count, ints, normal, pointer, threads
from tests.kernels.lora_cases import behind, in_turns, layer, lora

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor, *, at_front: bool = False) -> Tensor:
    """A copy that ends (or begins) at a page that cannot be touched."""
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-num_bytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (0, PAGE + size):
        assert mprotect(c_void_p(storage.data_ptr() + page), ctypes.c_size_t(PAGE), 0) == 0
    start = PAGE if at_front else PAGE + size - num_bytes
    copy = storage[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class GuardedContext:
    """Calls a kernel on guarded copies of the tensors whose addresses `calls` has put into its record, at either
    end."""

    def __init__(self, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context, self.isa, self.num_guarded = context, context.isa, 0
        self._tensors: dict[int, Tensor] = {}
        monkeypatch.setattr(calls, "pointer", self._pointer)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self._tensors[tensor.data_ptr()] = tensor
        return pointer(tensor)

    def call(self, record: Structure) -> None:
        fields = {name: getattr(record, name) for name, kind in record._fields_ if kind is c_void_p}
        tensors = {name: self._tensors[at] for name, at in fields.items() if at and self._tensors[at].numel()}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for at_front in (True, False):
            copies = {name: guarded(tensor, at_front=at_front) for name, tensor in before.items()}
            for name, copy in copies.items():
                setattr(record, name, copy.data_ptr())
            self.context.call(record)
        for name, tensor in tensors.items():
            tensor.copy_(copies[name])
        self.num_guarded += len(tensors)


@pytest.fixture
def guards(context: Context, monkeypatch: pytest.MonkeyPatch) -> GuardedContext:
    return GuardedContext(context, monkeypatch)


def product(context: Context, x: Tensor, weight: Tensor, kind: Quantization) -> Tensor:
    """A linear layer between guards."""
    (n, k), dtype, library = weight.shape, Dtype(CODES[weight.dtype]), context.library
    if kind == Quantization.FP8:
        return product_of_floats(context, x, weight)
    num_bytes, pack = {
        Quantization.PLAIN: (library.packed_bytes(n, k, dtype), context.pack),
        Quantization.INT8: (library.packed_int8_bytes(n, k), context.pack_int8),
        Quantization.INT8_WEIGHT_ONLY: (library.packed_int8_weight_only_bytes(n, k), context.pack_int8_weight_only),
    }[kind]
    packed, weight = guarded(torch.zeros(num_bytes, dtype=torch.uint8)), guarded(weight)
    pack(weight.data_ptr(), n, k, dtype, packed.data_ptr())
    return multiplied(context, x, packed, (n, k), kind)


def product_of_floats(context: Context, x: Tensor, weight: Tensor) -> Tensor:
    if context.library.isa in DEVICES:
        pytest.skip("of processors alone")
    (n, k), library = weight.shape, context.library
    values = torch.zeros(n, -(-k // VALUES) * VALUES)
    values[:, :k] = weight.float()
    blocks = fp8_blocks(values.to(torch.float8_e4m3fn), torch.full((n, values.shape[1] // VALUES), 0.3))
    assert blocks is not None
    data, packed = guarded(blocks.data), guarded(torch.zeros(library.packed_fp8_bytes(n, k), dtype=torch.uint8))
    context.pack_fp8(data.data_ptr(), n, k, packed.data_ptr())
    return multiplied(context, x, packed, (n, k), Quantization.FP8)


def multiplied(context: Context, x: Tensor, packed: Tensor, shape: tuple[int, ...], kind: Quantization) -> Tensor:
    (n, k), dtype = shape, CODES[x.dtype]
    rows, bias, y = guarded(count(len(x))), guarded(torch.zeros(n)), guarded(torch.full((len(x), n), torch.nan))
    arrays = (rows, x, packed, bias, y)
    context.call(GemmArgs(*map(pointer, arrays), n, k, int(dtype), int(Dtype.F32), 0, int(kind), None, 0))
    return y.clone()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", [kind for kind in Quantization if kind != Quantization.BLOCKS], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 31, 33, 63, 64, 95, 2079])
def test_linear_layers(context: Context, dtype: torch.dtype, k: int, kind: Quantization) -> None:
    """And a row of NaN stays in its row: the values behind a row's end are its neighbour's."""
    for rows, n in ((1, 1), (2, 33), (17, 32), (33, 33), (145, 16)):
        x, weight = guarded(normal(rows, k, seed=1, dtype=dtype)), normal(n, k, seed=2, dtype=dtype)
        threaded = threads(context, 1 + rows % 3)
        expected = product(threaded, x, weight, kind)
        dirty = guarded(x)
        dirty[rows // 2] = torch.nan
        actual = product(threaded, dirty, weight, kind)
        others = [row for row in range(rows) if row != rows // 2]
        assert actual[rows // 2].isnan().all() and not expected.isnan().any()
        assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_in_blocks(context: Context, dtype: torch.dtype, format: str) -> None:
    layout = LAYOUTS[format]
    for rows, n, blocks in ((1, 1, 1), (17, 33, 3), (145, 16, 1)):
        k = blocks * layout.values
        given = random_blocks(format, n, k, seed=1)
        data, size = guarded(given.data), context.library.packed_blocks_bytes(n, k, layout.code)
        packed, segment = guarded(torch.zeros(size, dtype=torch.uint8)), Segment(int(layout.code), 0)
        context.pack_blocks(data.data_ptr(), n, k, layout.code, packed.data_ptr())
        x, bias = guarded(normal(rows, k, seed=1, dtype=dtype)), guarded(torch.zeros(n))
        num_rows, y = guarded(count(rows)), guarded(torch.full((rows, n), torch.nan))
        arrays, segments = (num_rows, x, packed, bias, y), (ctypes.addressof(segment), 1)
        f32, kind = int(Dtype.F32), int(Quantization.BLOCKS)
        record = GemmArgs(*map(pointer, arrays), n, k, int(CODES[dtype]), f32, 0, kind, None, 0, *segments)
        threads(context, 1 + rows % 3).call(record)
        assert torch.equal(y, BlockLinear([given])(x))
        ids, out, num_ids = guarded(ints(range(n))), guarded(torch.zeros(n, k)), guarded(count(n))
        fields = {"num_rows": pointer(num_ids), "token_ids": pointer(ids), "table": pointer(packed)}
        numbers = {"dim": k, "vocab": n, "dtype": int(Dtype.F32), "scale": 1.0}
        context.call(EmbedArgs(**fields, **numbers, out=pointer(out), segments=segments[0], num_segments=1))
        assert torch.equal(out, given.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 16, 47])
def test_rows_in_and_out(guards: GuardedContext, dtype: torch.dtype, dim: int) -> None:
    context = cast(Context, guards)
    x, weight, table = normal(5, dim, seed=1), normal(dim, seed=2), normal(9, dim, seed=3, dtype=dtype)
    calls.rms_norm(context, x, weight, 1e-5, out_dtype=dtype)
    calls.rms_norm(context, x, weight, 1e-5, row_ids=ints([4, 0]), add_to=normal(2, dim, seed=5))
    calls.layer_norm(context, x, weight, weight, 1e-5, row_ids=ints([4]), out_dtype=dtype)
    calls.soft_cap(context, x, 5.0)
    plane, places = ints([-1] * 16), ints([8, 0, 3])
    calls.embed(context, ints([8, 0, 9]), table, 2.0, ints([15, -1, 0]), plane, places, table)
    assert guards.num_guarded > 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 18, 64])
def test_cache_writes_and_moves(guards: GuardedContext, dtype: torch.dtype, head_dim: int) -> None:
    context, (k, v) = cast(Context, guards), calls.caches(dtype, 1, 3, 2, head_dim, 8, seed=1)
    qkv, norm = normal(3, 7 * head_dim, seed=2, dtype=dtype), normal(head_dim, seed=3)
    for interleaved in (False, True):
        shape = RopeShape(3, 2, head_dim, interleaved, 1e-5)
        arrays = (k[0].clone(), v[0].clone(), ints([4, 0, 1]), ints([23, -1, 0]))
        calls.rope_kv_write(context, qkv, *arrays, shape, cos_sin=normal(5, head_dim, seed=4), q_norm=norm, k_norm=norm)
    calls.kv_copy(context, k, v, ints([17, 18, 19, 23, 0]), ints([9, 10, 11, 0, 23]), ints(range(24)))
    calls.kv_copy(context, k, v, ints(range(16, 24)), ints(range(8)), ints(range(24)), normal(24, 33, seed=8))
    assert guards.num_guarded > 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 15, 33, 64, 100])
def test_ends_of_adapters(guards: GuardedContext, dtype: torch.dtype, k: int) -> None:
    """The last row of x and of A, the last rank of B, parts that end inside of 16 outputs."""
    context, adapters = cast(Context, guards), [1, 1, 1, 1, 1, -1, 0, 1]
    x = normal(len(adapters), k, seed=1, dtype=dtype)
    for of_parts in (behind(1), behind(32, 7), in_turns(48)):
        weights = layer(of_parts, k, [[3] * len(of_parts), [5] * len(of_parts)], 5, dtype)
        n = weights.b.shape[2]
        lora(context, adapters, x, weights, normal(len(adapters), n, seed=2))
        lora(context, adapters, x, weights, normal(len(adapters), n, seed=2, dtype=dtype))
        if n % 32 == 0:
            lora(context, adapters, x, weights, normal(len(adapters), n, seed=2), Epilogue.SILU_MUL, dtype)
    assert guards.num_guarded > 60


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_attention(context: Context, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    shape = AttentionShape(6, 2, head_dim, block_size, 0.1)
    cache = Cache(shape, max(2, 320 // block_size), dtype, seed=1)
    branches = [cache.branch(192, num_rows=70), cache.branch(128)]  # all of the blocks; tiles seen whole and in part
    q = cache.query(71)
    expected = run(context, cache, branches, q)
    for at_front in (True, False):
        cache.k, cache.v = guarded(cache.k, at_front=at_front), guarded(cache.v, at_front=at_front)
        assert torch.equal(run(context, cache, branches, guarded(q, at_front=at_front)), expected)
