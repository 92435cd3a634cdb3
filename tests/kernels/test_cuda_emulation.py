"""The emulated CUDA device does what the programming guide says of a real one, and tells what a kernel does wrong."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedec.kernels.library import EMULATED_DEVICE
from tests.kernels import calls, cuda_library
from tests.kernels.test_library import compiler

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="fibers of x86-64")
SOURCE = """
#include "cuda/matrix.h"
using namespace pagedec;
static int lane() { return thread_index() % kWarp; }

void shuffled(float *out) { out[thread_index()] = shuffle(10.0f * thread_index(), (lane() + 1) % kWarp); }
void crossed(float *out) { out[thread_index()] = shuffle_xor((float)thread_index(), 5); }
void voted(float *out) { out[thread_index()] = (float)ballot(lane() % 3 == 0); }
void summed(float *out) { out[thread_index()] = block_sum<4>((float)thread_index()); }
void begins(float *out) {
  SHARED_ARRAY(float, values, 128);
  out[thread_index()] = values[thread_index()];
}
void reversed(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = (float)thread_index();
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
}
void halved(float *out) {  // bf16 beside bf16: threads of one word, and no race
  SHARED_ARRAY(bf16, values, 128);
  values[thread_index()] = from_float<bf16>((float)thread_index());
  sync_block();
  out[thread_index()] = to_float(values[thread_index() ^ 1]);
}
void turned(float *out) {  // within a warp, whose meetings order what its lanes do
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = (float)thread_index();
  sync_warp();
  const float next = values[thread_index() / kWarp * kWarp + (lane() + 1) % kWarp];
  sync_warp();
  values[thread_index()] = next;
  out[thread_index()] = next;
}
void counted(float *out) {
  SHARED_ARRAY(uint32_t, sums, 2);
  if (thread_index() < 2) sums[thread_index()] = 0;
  sync_block();
  atomic_add(sums, 0, (uint32_t)thread_index());
  atomic_or(sums, 1, 1u << lane());
  sync_block();
  out[thread_index()] = (float)(sums[0] + (sums[1] == 0xffffffffu));
}
void drawn(float *out) { out[0] = std::fmod(out[0] * 3.0f + (float)thread_index(), 65521.0f); }  // says in which order
alignas(16) float given[256];  // memory of the device
void copied(float *out) {  // two groups, the second of which is not waited for at first; a lane brings zeros
  LAUNCHED_SHARED(memory);
  const SharedArray<float> values = memory.part<float>(64, 512);
  for (int i = 0; i < 2; i++) {
    if (thread_index() < 32) begin_copy(values.at(4 * lane() + 128 * i), given + 4 * lane() + 128 * i, lane() != 5);
    end_copy_group();
  }
  await_copies<1>();
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
  await_copies<0>();
  sync_block();
  out[thread_index()] = out[thread_index()] + values[128 + thread_index()];
}
void multiplied(float *out) {  // 16 x 16 by 16 x 8: a[i][k] = i + k, b[n][k] = n - k, of which lanes have what PTX says
  SHARED_ARRAY(bf16, a, 256);
  SHARED_ARRAY(bf16, b, 256);
  for (int i = lane(); i < 256; i += 32) {
    a[i] = from_float<bf16>((float)(i / 16 + i % 16));
    b[i] = from_float<bf16>((float)(i / 16 - i % 16));
  }
  sync_warp();
  float d[4] = {0.5f, 0.5f, 0.5f, 0.5f};
  uint32_t of_a[4], of_b[4];
  load_matrices(of_a, a.at(lane() % 16 * 16 + lane() / 16 * 8));
  load_matrices(of_b, b.at((lane() / 16 * 8 + lane() % 8) * 16 + lane() / 8 % 2 * 8));
  multiply_add<bf16>(d, of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; i++) out[(lane() / 4 + i / 2 * 8) * 8 + 2 * (lane() % 4) + i % 2] = d[i];
}
void transposed(float *out) {  // each lane two values of a column
  SHARED_ARRAY(bf16, x, 256);
  for (int i = lane(); i < 256; i += 32) x[i] = from_float<bf16>((float)i);
  sync_warp();
  uint32_t r[4];
  load_transposed(r, x.at(lane() * 8));
  for (int i = 0; i < 4; i++) out[i * 32 + lane()] = to_float(bf16{(uint16_t)(r[i] >> 16)});
}
void rounded(float *out) {  // 1 and eight times 2^-25: each is cut off before they are added
  const uint32_t ones = 0x3f803f80u, tiny = 0x33003300u, a[4] = {ones, ones, 0, 0};
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  multiply_add<bf16>(d, a, tiny, 0);
  out[thread_index()] = d[0];
}
void rounded_fp16(float *out) {  // the same of 0.5 times fp16's least number, which is not lost where it stands alone
  const uint32_t halves = 0x38003800u, tiny = 0x00010001u, a[4] = {halves, halves, 0, 0};
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f}, alone[4] = {};
  multiply_add<fp16>(d, a, tiny, 0);
  multiply_add<fp16>(alone, a, tiny, 0);
  out[thread_index()] = d[0] + alone[0];
}
void some_leave(float *out) {  // who has ended is not waited for
  out[thread_index()] = 1.0f;
  if (thread_index() >= 64) return;
  sync_block();
  out[thread_index()] = 2.0f;
}

void read_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  out[thread_index()] = values[(thread_index() + 32) % 128];
}
void written_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  sync_block();
  const float other = values[(thread_index() + 32) % 128];
  values[thread_index()] = other + 1.0f;
}
void written_twice(float *out) {
  SHARED_ARRAY(float, values, 4);
  values[lane() % 4] = 1.0f;
}
void shuffled_between(float *out) {  // a shuffle orders no memory
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = shuffle_xor((float)thread_index(), 1);
  out[thread_index()] = shuffle_xor((float)ballot(true), 1);
  out[thread_index()] = values[thread_index() ^ 1];
}
void multiplied_between(float *out) {  // nor do matrices that are loaded and multiplied
  SHARED_ARRAY(bf16, a, 256);
  SHARED_ARRAY(bf16, b, 256);
  for (int i = lane(); i < 256; i += 32) a[i] = from_float<bf16>(1.0f);
  sync_warp();
  b[lane()] = a[lane()];
  uint32_t of_a[4];
  float d[4] = {};
  load_matrices(of_a, a.at(lane() * 8));
  multiply_add<bf16>(d, of_a, of_a[0], of_a[1]);
  out[thread_index()] = d[0] + to_float(b[lane() ^ 1]);
}
void lanes_race(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  out[thread_index()] = values[thread_index() ^ 1];
}
void warps_race(float *out) {  // warps have met, each by itself
  SHARED_ARRAY(float, values, 1);
  if (thread_index() == 0) values[0] = 1.0f;
  sync_warp();
  out[thread_index()] = values[0];
}
void counted_too_soon(float *out) {  // before all see that it begins with 0
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  atomic_add(sums, 0, 1u);
}
void looked_at_too_soon(float *out) {
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  sync_block();
  atomic_add(sums, 0, 1u);
  out[thread_index()] = (float)sums[0];
}
void changed_while_read(float *out) {
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  sync_block();
  if (thread_index() != 77) out[thread_index()] = (float)sums[0];
  else atomic_add(sums, 0, 1u);
}
void outside(float *out) {
  SHARED_ARRAY(float, values, 64);
  values[thread_index()] = 1.0f;
}
void half_wait(float *out) {
  if (lane() < 16) sync_block();
  else sync_warp();
}
void lanes_left(float *out) {
  if (lane() == 7) return;
  sync_warp();
}
void copied_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(lane() * 4), given, true);
  end_copy_group();
  out[thread_index()] = values[lane() * 4];
  await_copies<0>();
}
void copied_over(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
  if (thread_index() < 32) begin_copy(values.at(lane() * 4), given, true);
  end_copy_group();
  await_copies<0>();
}
void copies_left(float *out) {
  SHARED_ARRAY(float, values, 128);
  if (thread_index() < 32) begin_copy(values.at(lane() * 4), given, true);
}
void copied_askew(float *out) {
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(1), given, true);
}
void row_askew(float *out) {
  SHARED_ARRAY(bf16, values, 512);
  uint32_t r[4];
  load_matrices(r, values.at(lane() + 1));
}
void zeros_askew(float *out) {  // a device may look at the address even so
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(lane() * 4), given + 1, false);
}
struct alignas(16) Four { float values[4]; };
void loaded_whole(float *out) { out[thread_index()] = load_whole<Four>(given + 4 * lane()).values[thread_index() % 4]; }
void loaded_askew(float *out) { out[thread_index()] = load_whole<Four>(given + 4 * lane() + 2).values[0]; }
void eight_askew(float *out) {  // in the device's memory, as this processor would read it
  out[thread_index()] = (float)((const uint64_t *)(given + 1))[lane()];
}
void shared_askew(float *out) {
  LAUNCHED_SHARED(memory);
  out[thread_index()] = memory.part<double>(4, 32)[lane()];
}
void shifted_too_far(float *out) { out[thread_index()] = (float)(1u << (thread_index() + 1)); }
void overflown(float *out) { out[thread_index()] = (float)((thread_index() + 1) * (1 << 30)); }
void no_integer(float *out) { out[thread_index()] = (float)(int)(given[255] * 1e9f * thread_index()); }
void outside_of_registers(float *out) {
  float own[4] = {};
  for (int i = 0; i < 4; i++) own[(thread_index() + i) % 5] = 1.0f;
  out[thread_index()] = own[0];
}
void both_too_much(float *out) {  // no more than each may be alone
  LAUNCHED_SHARED(memory);
  SHARED_ARRAY(float, values, 12 << 10);
  values[0] = memory.part<float>(0, 1)[0];
}
void met_elsewhere(float *out) {
  if (lane() < 16) out[thread_index()] = shuffle(1.0f, lane());
  else sync_warp();
}
void launched_with_less(float *out) {
  LAUNCHED_SHARED(memory);
  memory.part<float>(4000, 25)[0] = 1.0f;
}
void too_much(float *out) { SHARED_ARRAY(float, values, 1 << 20); values[0] = 1.0f; }

#define KERNELS(X)                                                                                         \\
  X(shuffled) X(crossed) X(voted) X(summed) X(begins) X(reversed) X(halved) X(turned) X(counted) X(drawn)    \\
  X(copied) X(multiplied) X(transposed) X(rounded) X(copied_too_soon) X(copied_over) X(copies_left)          \\
  X(copied_askew) X(row_askew) X(zeros_askew) X(loaded_whole) X(loaded_askew) X(met_elsewhere)               \\
  X(launched_with_less) X(rounded_fp16) X(eight_askew) X(shared_askew) X(shifted_too_far) X(overflown)         \\
  X(no_integer) X(outside_of_registers) X(both_too_much)                                                     \\
  X(some_leave) X(counted_too_soon) X(looked_at_too_soon) X(changed_while_read)                              \\
  X(read_too_soon) X(written_too_soon) X(written_twice) X(lanes_race) X(warps_race) X(outside) X(half_wait)  \\
  X(lanes_left) X(too_much) X(shuffled_between) X(multiplied_between)
extern "C" const char *run(const char *name, int blocks, int threads, uint64_t seed, float *out) {
  static std::string problem;
  problem = "no such kernel";
  for (int i = 0; i < 256; i++) given[i] = (float)i;
  emulate::set_seed(seed);
#define X(kernel) \\
  if (!strcmp(name, #kernel)) problem = emulate::run(blocks, threads, 4096, [&] { kernel(out); });
  KERNELS(X)
  return problem.c_str();
}
"""
Run = Callable[..., tuple[str, np.ndarray]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("device")
    (place / "kernels.cpp").write_text(SOURCE)
    checks = "".join(re.findall(r"PAGEDEC_SANITIZE ([a-z,-]+)", (CSRC / "CMakeLists.txt").read_text()))
    assert "alignment" in checks and "signed-integer-overflow" in checks
    flags = ["-std=gnu++20", "-O1", "-shared", "-fPIC", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    compiled = [compiler(), *flags, f"-fsanitize={checks}", "-c", str(place / "kernels.cpp")]
    subprocess.run([*compiled, "-o", str(place / "kernels.o")], check=True)
    sources = [str(CSRC / "cuda/emulate" / f"{name}.cpp") for name in ("machine", "undefined")]
    subprocess.run(
        [compiler(), *flags, str(place / "kernels.o"), *sources, "-o", str(place / "kernels.so")], check=True
    )
    function = ctypes.CDLL(str(place / "kernels.so")).run
    function.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
    function.restype = ctypes.c_char_p

    def carry_out(name: str, *, blocks: int = 1, threads: int = 128, seed: int = 1) -> tuple[str, np.ndarray]:
        out = np.zeros(max(threads, 128), np.float32)
        return function(name.encode(), blocks, threads, seed, out.ctypes.data).decode(), out

    return carry_out


THREADS = np.arange(128)
WARPS = THREADS // 32 * 32
GIVEN = np.where(np.arange(256) % 128 // 4 == 5, 0, np.arange(256))
LEFT, ACROSS = np.indices((16, 16)).sum(0), -np.subtract.outer(np.arange(16), np.arange(8))
RIGHT = {
    "shuffled": 10.0 * (WARPS + (THREADS + 1) % 32),
    "crossed": THREADS ^ 5,
    "voted": np.full(128, float(sum(1 << lane for lane in range(0, 32, 3)))),
    "summed": np.full(128, THREADS.sum()),
    "begins": np.full(128, np.nan),
    "reversed": THREADS[::-1],
    "halved": THREADS ^ 1,
    "turned": WARPS + (THREADS + 1) % 32,
    "copied": GIVEN[127::-1] + GIVEN[128:],
    "multiplied": (LEFT @ ACROSS + 0.5).reshape(-1),
    "transposed": ((2 * (THREADS % 4) + 1) * 8 + THREADS % 32 // 4) + 64 * (THREADS // 32),
    "rounded": np.full(128, 1.0),
    "rounded_fp16": np.full(128, 1.0 + 2.0**-22),
    "counted": np.full(128, THREADS.sum() + 1),
    "loaded_whole": 4 * (THREADS % 32) + THREADS % 4,
    "some_leave": np.where(THREADS < 64, 2.0, 1.0),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
@pytest.mark.parametrize("kernel", RIGHT)
def test_what_is_right(run: Run, kernel: str, seed: int) -> None:
    problem, out = run(kernel, seed=seed, blocks=3, threads=32 if kernel in ("multiplied", "transposed") else 128)
    assert problem == ""
    assert np.array_equal(out, RIGHT[kernel].astype(np.float32), equal_nan=True)


def test_who_runs_first_is_drawn(run: Run) -> None:
    orders = {run("drawn", threads=128, seed=seed)[1][0] for seed in range(1, 9)}
    assert len(orders) > 4
    assert run("drawn", seed=0)[1][0] == run("drawn", seed=0)[1][0]


WRONG = {
    "read_too_soon": "of shared memory is (used|written) while thread",
    "written_too_soon": "of shared memory is (used|written) while thread",
    "written_twice": "of shared memory is used while thread [0-9]+ writes it",
    "lanes_race": "of shared memory is (used|written) while thread",
    "shuffled_between": "of shared memory is used while thread",
    "multiplied_between": "of shared memory is used while thread",
    "warps_race": "of shared memory is (used|written) while thread",
    "counted_too_soon": "of shared memory is used while thread",
    "looked_at_too_soon": "of shared memory is (used|written) while thread",
    "changed_while_read": "of shared memory is (used|written) while thread",
    "outside": "index [0-9]+ of a shared array of 64",
    "half_wait": "threads wait for ever: 64 for their block, 64 for their warp",
    "lanes_left": "a warp's meeting of 31 lanes",
    "copied_too_soon": "of shared memory is used while it is copied to",
    "copied_over": "of shared memory is (used|written) while",
    "copies_left": "it ends with 1 copies under way",
    "copied_askew": "a copy that is not aligned",
    "row_askew": "a matrix row that is not aligned",
    "zeros_askew": "a copy that is not aligned",
    "loaded_askew": "a load of 16 bytes that is not aligned",
    "eight_askew": "a value that is not aligned, at kernels.cpp:[0-9]+",
    "shared_askew": "a value that is not aligned",
    "shifted_too_far": "a shift that is too far",
    "overflown": "a product that overflows",
    "no_integer": "a float that no integer is",
    "outside_of_registers": "an index outside an array",
    "both_too_much": "53248 bytes of shared memory, of 49152",
    "met_elsewhere": "lanes of a warp meet in different instructions",
    "launched_with_less": "bytes 4000 to 4100 of 4096 that were launched with",
    "too_much": "4194304 bytes of shared memory, of 49152",
}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("kernel", WRONG)
def test_what_is_wrong_is_told(run: Run, kernel: str, seed: int) -> None:
    problem, _ = run(kernel, seed=seed, blocks=2)
    assert re.search(r"block [01]: ", problem) and re.search(WRONG[kernel], problem), problem
    assert run("reversed")[0] == "", "the next kernel runs"


def test_sizes_of_a_launch(run: Run) -> None:
    assert run("voted", threads=1025)[0] == "a block of 1025 threads"
    assert run("voted", blocks=0)[0] == "a grid of 0 blocks"


# ---------------------------------------------------------------------------------------------- the kernels there are
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_no_order_changes_a_bit(num_threads: int) -> None:
    if cuda_library.path() is None:
        pytest.skip("it is not built")
    library = cuda_library.open_library(EMULATED_DEVICE)
    context = library.context(num_threads)
    x, weight, bias = calls.normal(7, 1000, seed=1), calls.normal(1000, seed=2), calls.normal(1000, seed=3)
    found = []
    for seed in range(5):
        cuda_library.shuffle(library, seed)
        rms = calls.rms_norm(context, x, weight, 1e-5)
        layer = calls.layer_norm(context, x, weight, bias, 1e-5)
        found.append((rms, layer, torch.from_numpy(calls.argmax(context, x.numpy()))))
    cuda_library.shuffle(library, 1)
    assert all(calls.same_bits(a, b) for other in found[1:] for a, b in zip(found[0][:2], other[:2], strict=True))
    assert all(torch.equal(found[0][2], other[2]) for other in found[1:])
