"""The emulated vectors are what Intel's manual says of AVX-512's, bit for bit, and where there are real ones, those."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedec.kernels.library import available_isas
from tests.kernels.test_library import compiler
from tests.kernels.vector_models import CASES, Array, of

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or "avx2" not in available_isas(), reason="needs AVX2 and its library"
)
SOURCE = """
#include <string.h>
#include "cpu/vectors.h"
namespace pagedec {
void put(char *to, __m512i v) { _mm512_storeu_si512(to, v); }
void put(char *to, __m512 v) { _mm512_storeu_ps(to, v); }
void put(char *to, __m256i v) { memcpy(to, &v, 32); }
void put(char *to, __m128i v) { memcpy(to, &v, 16); }
void put(char *to, uint64_t v) { memcpy(to, &v, 8); }
void put(char *to, float v) { memcpy(to, &v, 4); }
void put(char *to, int v) { memcpy(to, &v, 4); }
alignas(64) char aligned[64];
#define PD_CASE(number, text) \\
  extern "C" void case_##number(const char *pa, const char *pb, const char *pc, uint64_t k, char *to) { \\
    [[maybe_unused]] __m512i a = _mm512_loadu_si512(pa), b = _mm512_loadu_si512(pb), c = _mm512_loadu_si512(pc); \\
    [[maybe_unused]] __m512 x = _mm512_loadu_ps(pa), y = _mm512_loadu_ps(pb), z = _mm512_loadu_ps(pc); \\
    [[maybe_unused]] __m256i half = _mm256_loadu_si256((const __m256i *)pa); \\
    [[maybe_unused]] __m128i quarter = _mm_loadu_si128((const __m128i *)pa); \\
    put(to, text); \\
  }
CASES
extern "C" unsigned call(void (*one)(const char *, const char *, const char *, uint64_t, char *), const char *a,
                         const char *b, const char *c, const uint64_t *k, char *to, int64_t n, unsigned mode) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(mode);
  for (int64_t i = 0; i < n; i++) one(a + i * 64, b + i * 64, c + i * 64, k[i], to + i * 64);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  return after;
}
extern "C" void load_masked(const void *p, uint64_t k, char *to) { put(to, _mm512_maskz_loadu_ps((__mmask16)k, p)); }
extern "C" void store_masked(const void *from, void *p, uint64_t k) {
  _mm512_mask_storeu_ps(p, (__mmask16)k, _mm512_loadu_ps(from));
}
extern "C" void load_aligned(const char *p) { put(aligned, _mm512_load_si512(p)); }
extern "C" void stream(char *p) { _mm512_stream_ps((float *)p, _mm512_loadu_ps(aligned)); }
}
"""
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mlzcnt", "-mf16c", "-DPD_EMULATE_VECTORS"]
AVX512 = ["-mavx512bf16", "-mavx512vnni", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2[:-1]]
OWN_MODE = 0x1F80  # to nearest; no exception traps
DOWN, FLUSHED = 0x2000, 0x8040  # besides: down; denormals are zeros on the way in and out
NUMBERS = {name: i for i, name in enumerate(CASES)}


def built(place: Path, flags: list[str]) -> Path:
    source, made = place / "vectors.cpp", place / "vectors.so"
    cases = "\n".join(f"PD_CASE({i}, ({case.text}))" for i, case in enumerate(CASES.values()))
    source.write_text(SOURCE.replace("CASES", cases))
    options = ["-std=gnu++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wno-ignored-attributes"]
    options += ["-Wno-unused-value", "-DPD_LEVEL=3", f"-I{CSRC}", f"-I{CSRC / 'include'}", *flags]
    subprocess.run([compiler(), *options, str(source), "-o", str(made)], check=True)
    return made


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("vectors"), AVX2)


@pytest.fixture(scope="session")
def emulated(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if "avx512bf16" not in available_isas():
        pytest.skip("needs a processor with AVX512-BF16")
    return ctypes.CDLL(str(built(tmp_path_factory.mktemp("real"), AVX512)))


def called(unit: ctypes.CDLL, name: str, given: list[Array], mode: int = OWN_MODE) -> Array:
    a, b, c, k = given
    out = np.zeros_like(a)
    pointers = [ctypes.c_void_p(v.ctypes.data) for v in (a, b, c, k, out)]
    one = ctypes.cast(getattr(unit, f"case_{NUMBERS[name]}"), ctypes.c_void_p)
    after = unit.call(one, *pointers, ctypes.c_int64(len(a)), mode)
    assert after & ~0x3F == mode, "the thread's mode is another now"
    return out


SPECIAL = np.array([0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7F7F8000,
                    0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3FC00000, 0x3F000000, 0x40200000, 0x4B000001,
                    0x4EFFFFFF, 0x4F000000, 0x00400000, 0x007F8000, 0x00010000, 0x00808000, 0x33800000, 0x42FE0000,
                    0x43160000, 0x1F800000, 0x20000000, 0x1F7F0000], np.uint32)  # fmt: skip


def inputs(n: int = 600) -> list[Array]:
    """Random bits; of the others floats near one another, whose products and sums are rounded; exponents at the ends;
    each special one by each; masks of every kind."""
    rng = np.random.default_rng(7)
    vectors = [rng.integers(0, 2**32, (n, 16), np.uint32) for _ in range(3)]
    for v in vectors:
        v[n // 4 : n // 2] = (v[n // 4 : n // 2] & 0x807FFFFF) | rng.integers(120, 135, (n // 2 - n // 4, 16)) << 23
        at = slice(n // 2, n * 5 // 8)
        v[at] = (v[at] & 0x807FFFFF) | rng.choice([0, 1, 2, 62, 63, 64, 254, 255], v[at].shape).astype(np.uint32) << 23
        v[at, ::2] &= np.uint32(0xFFFF0000)
    signed = np.concatenate([SPECIAL, SPECIAL | 0x80000000])
    at = slice(n * 5 // 8, n * 7 // 8)
    every = np.stack(np.meshgrid(signed, signed), 2).reshape(-1, 2)[: vectors[0][at].size]
    for i in range(2):
        vectors[i][at] = np.resize(every[:, i], vectors[i][at].shape)
        vectors[i][n * 7 // 8 :] = rng.choice(signed, vectors[i][n * 7 // 8 :].shape)
    vectors[2][at] = rng.choice(signed, vectors[2][at].shape)
    k = rng.integers(0, 2**64, n, np.uint64)
    k[:66] = [(1 << i) - 1 for i in range(65)] + [1 << 63]
    return [*(v.view(np.uint8) for v in vectors), k]


def assert_same(name: str, got: Array, want: Array, given: list[Array]) -> None:
    case = CASES[name]
    got = of(got[:, : want.shape[1] * want.itemsize], want.dtype)
    raw = np.dtype(f"u{want.itemsize}")
    same = of(got, raw) == of(want, raw)
    if case.floats:
        same |= np.isnan(got) & np.isnan(want)
    if not same.all():
        row, lane = np.argwhere(~same)[0]
        shown = [of(v[row], np.uint32) for v in given[:3]]
        pytest.fail(f"{name}, lane {lane}: {got[row, lane]!r} instead of {want[row, lane]!r}, from {shown}")


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_manual_says(emulated: ctypes.CDLL, name: str) -> None:
    given = inputs()
    with np.errstate(all="ignore"):
        want = np.ascontiguousarray(CASES[name].model(*given))
    assert_same(name, called(emulated, name, given), want, given)


@pytest.mark.parametrize("name", ["dpbf16_ps", "cvtneps_pbh", "cvtne2ps_pbh"])
@pytest.mark.parametrize("mode", [DOWN, FLUSHED])
def test_bf16_knows_no_modes(emulated: ctypes.CDLL, name: str, mode: int) -> None:
    given = inputs()
    assert np.array_equal(called(emulated, name, given, OWN_MODE | mode), called(emulated, name, given))


def test_the_others_round_as_the_thread_does(emulated: ctypes.CDLL) -> None:
    given = [np.full((1, 16), x, np.float32).view(np.uint8) for x in (1, 2.0**-40, 1)] + [np.zeros(1, np.uint64)]
    assert of(called(emulated, "sub_ps", given), np.float32)[0, 0] == 1
    assert of(called(emulated, "sub_ps", given, OWN_MODE | DOWN), np.float32)[0, 0] < 1
    tiny = [np.full((1, 16), x, np.float32).view(np.uint8) for x in (1, -130, 1)] + given[3:]
    assert of(called(emulated, "scalef_ps", tiny), np.float32)[0, 0] == 2.0**-130
    assert of(called(emulated, "scalef_ps", tiny, OWN_MODE | FLUSHED), np.float32)[0, 0] == 0


@pytest.mark.parametrize("mode", [0, DOWN, FLUSHED])
def test_the_processors_own_give_the_same_bits(emulated: ctypes.CDLL, real: ctypes.CDLL, mode: int) -> None:
    everything = inputs()
    for name, case in CASES.items():
        given = finite_exponents(everything) if name == "scalef_ps" and mode == DOWN else everything
        with np.errstate(all="ignore"):
            kind = case.model(*given)
        want = called(real, name, given, OWN_MODE | mode)[:, : kind.shape[1] * kind.itemsize]
        assert_same(name, called(emulated, name, given, OWN_MODE | mode), of(want, kind.dtype), given)


def finite_exponents(given: list[Array]) -> list[Array]:
    """Of 2^infinity Intel's manual says that it is infinite; rounded down, AMD's Zen 4 gives the largest number. No
    kernel rounds down."""
    x, y, *others = given
    exponents = of(y, np.float32)
    return [x, np.where(np.isinf(exponents), np.float32(127), exponents).view(np.uint8), *others]


def test_all_that_kernels_use_are_compared() -> None:
    """What is emulated is named in a case, but for what `put` and the cases' vectors are made with."""
    emulation = (CSRC / "cpu" / "vector_emulation.h").read_text(encoding="utf-8")
    names = set(re.findall(r"PD_INLINE \w+ (_mm\w+)\(|^\[\[gnu::noinline\]\] inline \w+ (_mm\w+)\(", emulation, re.M))
    defined = {a or b for a, b in names} | {
        f"_mm512_{name}" for name in re.findall(r"^PD_(?:ONE|TWO|THREE|SHIFT)\((?:\w+, )?(\w+)", emulation, re.M)
    }
    tried = {name for case in CASES.values() for name in re.findall(r"_mm\d*_\w+", case.text)}
    by_all = {"_mm512_loadu_ps", "_mm512_loadu_si512", "_mm512_storeu_ps", "_mm512_storeu_si512"}
    assert len(defined) > 80 and defined - tried - by_all == {"_mm512_dpbusd_epi32"}  # add_dots_of_bytes


def test_masked_lanes_are_not_touched(emulated: ctypes.CDLL) -> None:
    """Behind the lanes of the mask is memory that nobody may read or write."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    other = np.arange(16, dtype=np.float32)
    for count in (0, 1, 8, 9, 15):
        at, out = ctypes.c_void_p(start + page - 4 * count), np.zeros(16, np.float32)
        pointer, to = ctypes.c_void_p(other.ctypes.data), ctypes.c_void_p(out.ctypes.data)
        emulated.store_masked(pointer, at, ctypes.c_uint64((1 << count) - 1))
        emulated.load_masked(at, ctypes.c_uint64((1 << count) - 1), to)
        assert np.array_equal(out, np.where(np.arange(16) < count, other, 0))
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 3) == 0


@pytest.mark.parametrize(("call", "name"), [("load_aligned", "vmovdqa64"), ("stream", "vmovntps")])
def test_an_address_that_the_processor_refuses_ends_the_process(path: Path, call: str, name: str) -> None:
    program = f"""
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
memory = ctypes.create_string_buffer(256)
start = (ctypes.addressof(memory) + 63) // 64 * 64
unit = ctypes.CDLL(sys.argv[1])
unit.{call}(ctypes.c_void_p(start))
print("aligned", flush=True)
unit.{call}(ctypes.c_void_p(start + 32))
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -6 and done.stdout == "aligned\n"
    assert done.stderr == f"pagedec: the emulated vectors refuse {name}: its address is no multiple of 64 (#GP)\n"
