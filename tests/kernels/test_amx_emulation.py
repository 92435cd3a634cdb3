"""The emulated matrix unit is what Intel's manual says of the real one, bit for bit; what that refuses ends the
process."""

from __future__ import annotations

import ctypes
import inspect
import platform
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import Context, KvKind, available_isas, load
from tests.kernels.attention_cases import Cache, Numbers, run, same_bits
from tests.kernels.calls import emulated_unit, normal, threads
from tests.kernels.test_gemm import Linear
from tests.kernels.test_gemm_int8 import linear
from tests.kernels.test_gemm_weight_only import linear as weight_only
from tests.kernels.test_library import compiler

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sets the mode of x86 processors")
SOURCE = """
#include "cpu/amx_emulation.h"
using namespace pagedec::emulation;
extern "C" {
void configure(const void *shapes) { ldtilecfg(shapes); }
void release() { tilerelease(); }
void zero(int tile) { tilezero(tile); }
void load(int tile, const void *p, int64_t stride) { tileloadd(tile, p, stride); }
void store(int tile, void *p, int64_t stride) { tilestored(tile, p, stride); }
void bf16(int sum, int x, int w) { tdpbf16ps(sum, x, w); }
void int8(int sum, int x, int w) { tdpbsud(sum, x, w); }
}
"""
LARGEST = {0: (16, 64), 4: (16, 64), 6: (16, 64)}


def shapes(tiles: dict[int, tuple[int, int]], palette: int = 1, start_row: int = 0, reserved: int = 0) -> bytes:
    """The 64 bytes that say which tiles have how many rows of how many bytes."""
    widths, heights = [0] * 16, [0] * 16
    for tile, (rows, num_bytes) in tiles.items():
        widths[tile], heights[tile] = num_bytes, rows
    return struct.pack("<BB14B16H16B", palette, start_row, *[0] * 13, reserved, *widths, *heights)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulation as a library of its own."""
    place = tmp_path_factory.mktemp("emulation")
    source, made = place / "unit.cpp", place / "unit.so"
    source.write_text(SOURCE)
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{CSRC}"]
    subprocess.run([compiler(), *options, str(source), "-o", str(made)], check=True)
    return made


class Unit:
    """The emulated unit of this thread."""

    def __init__(self, path: Path) -> None:
        self.functions = ctypes.CDLL(str(path))

    def load(self, tile: int, values: np.ndarray) -> None:
        rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
        self.functions.load(tile, ctypes.c_void_p(rows.ctypes.data), ctypes.c_int64(rows.shape[1]))

    def multiply(self, name: str, total: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """total + x w, as words of 4 bytes, in tiles of just these shapes."""
        tiles = {0: total, 4: x, 6: w}
        self.functions.configure(shapes({tile: (len(a), a.nbytes // len(a)) for tile, a in tiles.items()}))
        for tile, values in tiles.items():
            self.load(tile, values)
        getattr(self.functions, name)(0, 4, 6)
        out = np.full((len(total) + 1, total.shape[1]), 77, total.dtype)
        self.functions.store(0, ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(out.strides[0]))
        assert (out[-1] == 77).all()
        self.functions.release()
        return out[:-1]


@pytest.fixture
def unit(path: Path) -> Unit:
    return Unit(path)


def pairs(values: np.ndarray) -> np.ndarray:
    """fp32 that bf16 holds, as bf16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def manual(total: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """TDPBF16PS: x [rows, 2 k], w [k, columns, 2]. Of values so near each other that float64 holds each sum exactly."""
    temp = np.zeros((2, *total.shape), np.float32)
    for k in range(len(w)):
        for i in range(2):
            temp[i] = (temp[i].astype(np.float64) + np.outer(x[:, 2 * k + i], w[k, :, i].astype(np.float64))).astype(
                np.float32
            )
    return total + (temp[0] + temp[1])


def grid(rng: np.random.Generator, *sizes: int) -> np.ndarray:
    return (rng.integers(-255, 256, sizes) * 2.0 ** rng.integers(-3, 4, sizes)).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "k", "columns"), [(16, 16, 16), (1, 1, 1), (7, 8, 16), (16, 4, 16), (3, 16, 5), (16, 1, 2)]
)
def test_bf16_products(unit: Unit, rows: int, k: int, columns: int) -> None:
    rng = np.random.default_rng(rows * k)
    for _ in range(5):
        total = grid(rng, rows, columns) * np.float32(2.0**12) + grid(rng, rows, columns)
        x, w = grid(rng, rows, 2 * k), grid(rng, k, columns, 2)
        want = manual(total, x, w)
        got = unit.multiply("bf16", total, pairs(x), pairs(w).reshape(k, -1))
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    if k == 16:
        exact = total.astype(np.float64) + x.astype(np.float64) @ w.transpose(0, 2, 1).reshape(2 * k, columns).astype(
            np.float64
        )
        assert (want != exact.astype(np.float32)).any(), "nothing was rounded on the way"


def one(unit: Unit, total: float, x: list[float], w: list[float]) -> float:
    """A single sum."""
    a, b = np.array([x], np.float32), np.array(w, np.float32).reshape(-1, 2)
    return float(unit.multiply("bf16", np.array([[total]], np.float32), pairs(a), pairs(b))[0, 0])


def test_even_and_odd_products_meet_before_the_sum(unit: Unit) -> None:
    assert one(unit, 2.0**24, [1, 1], [1, 1]) == 2.0**24 + 2
    assert one(unit, 0, [2.0**24, 1, 1, 1], [1, 1, 1, 1]) == 2.0**24 + 2, "evens: 2^24 + 1 is 2^24; odds: 2"


def test_products_are_not_rounded_and_denormals_are_zeros(unit: Unit) -> None:
    assert one(unit, 0, [2.0**-60, 0, 2.0**-60, 0], [2.0**-60, 0, 2.0**-75, 0]) == 2.0**-120 + 2.0**-135
    assert one(unit, 0, [2.0**-60, 0], [2.0**-75, 0]) == 0, "a sum that is denormal"
    assert one(unit, 0, [2.0**-127, 0], [2.0**100, 0]) == 0, "a factor that is denormal"
    assert one(unit, 2.0**-130, [0, 0], [1, 1]) == 0, "a sum that was denormal before"
    assert one(unit, -1.5 * 2.0**-126, [2.0**-63, 0], [2.0**-63, 0]) == 0
    assert torch.tensor([1e-40]).mul(1.0).item() != 0, "the thread's own mode is as it was"


def test_infinity_and_nan(unit: Unit) -> None:
    inf = float("inf")
    assert one(unit, 0, [2.0**100, 0], [2.0**100, 0]) == inf
    assert np.isnan(one(unit, -inf, [inf, 0], [1, 0])) and np.isnan(one(unit, 0, [float("nan"), 0], [1, 0]))
    assert np.isnan(one(unit, 0, [inf, 0], [0, 0]))


@pytest.mark.parametrize(("rows", "k", "columns"), [(16, 16, 16), (5, 3, 16), (16, 2, 7)])
def test_int8_products(unit: Unit, rows: int, k: int, columns: int) -> None:
    rng = np.random.default_rng(rows * k)
    total = rng.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)  # near the ends, where sums wrap
    x = rng.integers(-128, 128, (rows, 4 * k)).astype(np.int8)
    w = rng.integers(0, 256, (k, columns, 4)).astype(np.uint8)
    exact = total.astype(np.int64) + x.astype(np.int64) @ w.transpose(0, 2, 1).reshape(4 * k, columns).astype(np.int64)
    got = unit.multiply("int8", total, x, w.reshape(k, -1))
    assert np.array_equal(got, exact.astype(np.int32))
    extremes = unit.multiply(
        "int8", np.array([[2**31 - 1]], np.int32), np.full((1, 4), 127, np.int8), np.full((1, 4), 255, np.uint8)
    )
    assert extremes[0, 0] == 2**31 - 1 + 4 * 127 * 255 - 2**32


def test_a_tile_is_what_its_shape_says(unit: Unit) -> None:
    data, out = np.arange(16 * 64, dtype=np.uint8).reshape(16, 64), np.zeros((16, 64), np.uint8)
    unit.functions.configure(shapes({3: (5, 12)}))
    unit.functions.load(3, ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(64))
    unit.functions.store(3, ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(64))
    assert np.array_equal(out[:5, :12], data[:5, :12])
    assert not out[5:].any() and not out[:, 12:].any()
    unit.functions.zero(3)
    unit.functions.store(3, ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(64))
    assert not out.any()
    unit.functions.release()


REFUSED = [
    ("zero(0)", "tilezero: no shapes are loaded (#UD)"),
    ("configure(LARGEST); release(); zero(0)", "tilezero: no shapes are loaded (#UD)"),
    ("configure(LARGEST); load(1, memory, 64)", "tileloadd: tile 1 has no shape (#UD)"),
    ("configure(LARGEST); store(8, memory, 64)", "tilestored: there is no tile 8 (#UD)"),
    ("configure(LARGEST); bf16(0, 4, 4)", "tdpbf16ps: tiles 0, 4, 4 are not three (#UD)"),
    ("configure(LARGEST); int8(0, 4, 5)", "tdpbsud: tile 5 has no shape (#UD)"),
    (
        "configure({0: (8, 64), 4: (7, 64), 6: (16, 64)}); bf16(0, 4, 6)",
        "tdpbf16ps: tile 4 has 7 rows, the sums in tile 0 have 8 (#UD)",
    ),
    (
        "configure({0: (8, 64), 4: (8, 32), 6: (16, 64)}); bf16(0, 4, 6)",
        "tdpbf16ps: tile 4 has 8 words a row, tile 6 has 16 rows (#UD)",
    ),
    (
        "configure({0: (8, 32), 4: (8, 64), 6: (16, 64)}); int8(0, 4, 6)",
        "tdpbsud: tile 6 has 64 bytes a row, the sums in tile 0 have 32 (#UD)",
    ),
    (
        "configure({0: (8, 62), 4: (8, 64), 6: (16, 62)}); int8(0, 4, 6)",
        "tdpbsud: rows of tile 0 have 62 bytes, not whole words (#UD)",
    ),
    ("configure({2: (17, 64)})", "ldtilecfg: tile 2 is given 17 rows; it has 16 (#GP)"),
    ("configure({2: (16, 65)})", "ldtilecfg: tile 2 is given rows of 65 bytes; they have 64 (#GP)"),
    ("configure({2: (16, 0)})", "ldtilecfg: tile 2 is given 16 rows of 0 bytes (#GP)"),
    ("configure({9: (1, 4)})", "ldtilecfg: tile 9 is given a shape; there are 8 tiles (#GP)"),
    ("configure(LARGEST, palette=2)", "ldtilecfg: the palette is 2; there is 1 (#GP)"),
    ("configure(LARGEST, reserved=9)", "ldtilecfg: reserved byte 15 is 9 (#GP)"),
    ("configure(LARGEST, start_row=1)", "ldtilecfg: the start row is 1; every instruction begins at row 0 here"),
    ("configure(LARGEST, palette=0); zero(0)", "tilezero: no shapes are loaded (#UD)"),
]
PROGRAM = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
unit, memory, LARGEST = ctypes.CDLL(sys.argv[1]), ctypes.create_string_buffer(1024), {largest}
zero, release, bf16, int8 = unit.zero, unit.release, unit.bf16, unit.int8
load = lambda tile, p, stride: unit.load(tile, p, ctypes.c_int64(stride))
store = lambda tile, p, stride: unit.store(tile, p, ctypes.c_int64(stride))
configure = lambda tiles, **others: unit.configure(shapes(tiles, **others))
{calls}
"""


@pytest.mark.parametrize(("calls", "message"), REFUSED)
def test_what_the_unit_refuses_ends_the_process(path: Path, calls: str, message: str) -> None:
    definition = "from __future__ import annotations\nimport struct\n" + inspect.getsource(shapes)
    program = definition + PROGRAM.format(largest=LARGEST, calls=calls)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -6, "it did not abort"
    assert done.stderr == f"pagedec: the emulated matrix unit refuses {message}\n"


# ---- the library of the unit's kernels


def emulated() -> Context:
    return load(emulated_unit()).context()


@pytest.mark.parametrize("k", [64, 30, 2])
def test_linear_layers_are_lines_of_the_units_products(k: int) -> None:
    """Lines of 32 values of k; what a line lacks at the end of k is zeros."""
    rng = np.random.default_rng(k)
    x, weight, padded = grid(rng, 20, k), grid(rng, 32, k), -(-k // 32) * 32
    wide = np.pad(x, ((0, 0), (0, padded - k)))
    words = np.pad(weight, ((0, 0), (0, padded - k))).reshape(32, -1, 2).transpose(1, 0, 2)
    want = np.zeros((20, 32), np.float32)
    for line in range(0, padded, 32):
        want = manual(want, wide[:, line : line + 32], words[line // 2 : line // 2 + 16])
    linear_layer = Linear.pack(emulated(), torch.from_numpy(weight).bfloat16())
    assert torch.equal(linear_layer(torch.from_numpy(x).bfloat16()), torch.from_numpy(want))


BLOCKS = [("plain", 400, 256, 2048), ("plain", 170, 40, 4101), ("int8", 200, 40, 8192)]
BLOCKS += [("weight_only", 300, 40, 2048), ("weight_only", 200, 40, 4101)]


@pytest.mark.parametrize(("kind", "rows", "n", "k"), BLOCKS)
def test_blocks_of_rows_groups_of_tiles_and_parts_of_k_change_no_bit(kind: str, rows: int, n: int, k: int) -> None:
    """Rows enough for several groups of tiles, k for several blocks of rows (but where widened weights are kept); rows
    that are 4 KB apart are copied."""
    context, dtype = emulated(), torch.bfloat16
    x, weight = normal(rows, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)

    def product(first: int, end: int, num_threads: int = 1) -> Tensor:
        threaded = threads(context, num_threads)
        if kind == "plain":
            return Linear.pack(threaded, weight)(x[first:end])
        return (linear if kind == "int8" else weight_only)(threaded, x[first:end], weight)

    whole = product(0, rows)
    for first, end, num_threads in [(0, rows, 3), (0, 1, 1), (0, 32, 1), (100, 149, 1), (7, rows - 3, 2)]:
        assert torch.equal(product(first, end, num_threads), whole[first:end])


def test_the_processors_own_unit_gives_the_same_bits() -> None:
    ours = emulated()
    if "amx" not in available_isas():
        pytest.skip("needs the matrix unit")
    unit = load("amx").context()
    for rows, n, k in [(1, 33, 7), (40, 65, 300), (200, 65, 901)]:
        x, weight = normal(rows, k, seed=1, dtype=torch.bfloat16), normal(n, k, seed=2, dtype=torch.bfloat16)
        assert same_bits(Linear.pack(ours, weight)(x), Linear.pack(unit, weight)(x))
        assert same_bits(linear(ours, x, weight), linear(unit, x, weight))
    for block_size, head_dim, window, soft_cap in [
        (8, 64, 0, 0.0),
        (16, 64, 90, 0.0),
        (16, 96, 0, 5.0),
        (32, 32, 0, 0.0),
        (64, 128, 300, 0.0),
        (256, 64, 0, 0.0),
    ]:
        shape = AttentionShape(6, 2, head_dim, block_size, 0.125, window, soft_cap)
        for kind in KvKind:
            cache = Cache(shape, 4096 // block_size, Numbers(torch.bfloat16, kind), seed=3)
            tree = cache.branch(150, 9, [-1, 0, 1, 2, 0, 4, 2, 0, 7])
            branches = [cache.branch(700, 300), cache.branch(1100, 3), cache.branch(130), tree]
            q = cache.query(313)
            assert same_bits(run(ours, cache, branches, q), run(unit, cache, branches, q))
