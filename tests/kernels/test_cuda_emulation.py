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
from tests.kernels.emulated_kernels import SOURCE
from tests.kernels.test_library import compiler

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="fibers of x86-64")
Run = Callable[..., tuple[str, np.ndarray]]
DEVICE = ("machine", "memory", "stream", "undefined", "warpgroup")


def compiled_or_source(name: str) -> str:
    """What `make build` has made of a file, or the file."""
    made = CSRC.parent / "build/dev/CMakeFiles/pagedec_cuda_emulated.dir" / f"{name}.o"
    is_new = made.is_file() and made.stat().st_mtime > (CSRC / name).stat().st_mtime
    return str(made if is_new else CSRC / name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("device")
    (place / "kernels.cpp").write_text(SOURCE)
    checks = "".join(re.findall(r"PAGEDEC_SANITIZE ([a-z,-]+)", (CSRC / "CMakeLists.txt").read_text()))
    assert "alignment" in checks and "signed-integer-overflow" in checks
    flags = ["-std=gnu++20", "-O1", "-shared", "-fPIC", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    compiled = [compiler(), *flags, f"-fsanitize={checks}", "-c", str(place / "kernels.cpp")]
    subprocess.run([*compiled, "-o", str(place / "kernels.o")], check=True)
    device = [compiled_or_source(f"cuda/emulate/{name}.cpp") for name in DEVICE]
    subprocess.run([compiler(), *flags, str(place / "kernels.o"), *device, "-o", str(place / "kernels.so")], check=True)
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
# Of twice a[i][k] b[n][k] = (i % 8 + k) (n - k), 64 x 64 of them, what emulated_warpgroups.tell() says: thread 4 g + t
# of warp w has rows 16 w + g and that plus 8, the first of columns 2 t and the last of 57 + 2 t.
AT = THREADS // 32 * 16 + THREADS % 32 // 4
LEFT_OF_GROUP = np.add.outer(np.arange(64) % 8, np.arange(16))
GROUPED = 2.0 * LEFT_OF_GROUP @ np.subtract.outer(np.arange(64), np.arange(16)).T
GROUPED = GROUPED[AT, 2 * (THREADS % 4)] + 4096 * GROUPED[AT + 8, 57 + 2 * (THREADS % 4)]
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
    "found_early": np.full(128, 33.0),
    "copied_early": np.full(128, 1.0),
    **dict.fromkeys(["grouped", "copied_again", "heard_of_in_meetings"], GROUPED),
    **dict.fromkeys(["sums_too_soon", "sums_of_one_group_too_soon"], np.full(128, np.nan)),
    "reversed_in_group": THREADS[::-1],
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
@pytest.mark.parametrize("kernel", RIGHT)
def test_what_is_right(run: Run, kernel: str, seed: int) -> None:
    problem, out = run(kernel, seed=seed, blocks=4, threads=32 if kernel in ("multiplied", "transposed") else 128)
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
    "not_awaited": "thread 70: a kernel that may begin early has not awaited those before it",
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
    "groups_race": "of shared memory is (used|written) while thread",
    "half_a_group": "threads wait for ever: 0 for their block, 64 for their group, 0 for their warp",
    "not_waited_for": "is multiplied(, and nothing was copied| while it is copied to|, and nobody waited for its copy)",
    "nothing_there": "is multiplied, and nothing was copied",
    "copied_by_threads": "is multiplied, and nothing was copied",
    "multiplied_and_copied_to_by_threads": "is copied to while products read it",
    "copied_to_twice": "is copied to twice at a time",
    "multiplied_and_copied_to": "copied to( while products read it|, and warp [0-3] has not said that it has read it)",
    "not_said_to_be_free": "copied to( while products read it|, and warp [1-3] has not said that it has read it)",
    "different_operands": "threads of group 0 have multiplied different things",
    "products_left": "it ends with 1 products under way",
    "not_begun": "sums are multiplied to that were not fenced",
    "operand_outside": "byte [0-9]+, outside shared memory",
    "tensor_left": "it ends with [12] copies under way",
    "tensor_askew": "a copy of a tensor that is not aligned",
    "never_there": "threads wait for ever: 0 for their block, 0 for their warp, 128 for a barrier",
    "one_too_many": "more arrive at a barrier than it counts",
    "written_early": "memory is written that kernels in front may use",
    "begun_meanwhile": "a barrier that was (not begun|begun meanwhile)",
}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("kernel", WRONG)
def test_what_is_wrong_is_told(run: Run, kernel: str, seed: int) -> None:
    problem, _ = run(kernel, seed=seed, blocks=2, threads=256 if kernel == "groups_race" else 128)
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
