"""Tests of kernels on a device that reaches one heap of this process and nothing else, as many real ones do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import cuda_library, host_memory

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")

PROGRAM = """
import mmap, threading
import numpy as np, torch
from pagedec.kernels.library import EMULATED_DEVICE, Dtype, KernelError, load
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls, host_memory
host_memory.prepare([EMULATED_DEVICE])
library = host_memory.host_library(load(EMULATED_DEVICE).path)
context, found = library.context(), []

def work(vocab):
    x = np.random.default_rng(1).standard_normal((2, vocab)).astype(np.float32)
    found.append((calls.argmax(context, x) == x.argmax(1)).all())
    capped = calls.soft_cap(context, torch.from_numpy(x), 3.0).numpy()
    found.append(np.allclose(capped, 3.0 * np.tanh(x / 3.0), atol=1e-5))

for vocab in (1, 3, 500, 70000):  # 70000: of a size that malloc otherwise maps by itself
    work(vocab)
    other = threading.Thread(target=work, args=(vocab,))
    other.start(), other.join()
assert len(found) == 16 and all(found), found
weight = NativeBackend(library, torch.float32).pack(torch.ones(64, 64))
elsewhere = np.frombuffer(mmap.mmap(-1, 1 << 14), np.float32).reshape(64, 64)
for use in (
    lambda: calls.argmax(context, elsewhere),
    lambda: context.pack(elsewhere.ctypes.data, 64, 64, Dtype.F32, weight.data.data_ptr()),
    lambda: context.pack(torch.ones(64, 64).data_ptr(), 64, 64, Dtype.F32, elsewhere.ctypes.data),
):
    try:
        use()
    except KernelError as error:
        print(str(error).replace(hex(elsewhere.ctypes.data), "it").split(",")[0])
"""
TOLD = ["pd_argmax: logits points to memory that is not the device's", *["it is not in the heap"] * 2]


def _run(*command: str, python_malloc: str = "malloc") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, host_memory.HEAP_ONLY: "1", "PYTHONMALLOC": python_malloc}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True)


def test_tensors_of_all_sizes_and_threads_and_packed_weights_lie_in_it() -> None:
    told = _run("-c", PROGRAM)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == TOLD


@pytest.mark.long
def test_modules_run_as_they_are() -> None:
    modules = [f"tests/kernels/test_{name}.py" for name in ("embed", "topk")]
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cuda_emulated", *modules]
    told = _run(*command)
    assert told.returncode == 0 and " passed" in told.stdout, told.stdout
    told = _run(*command, python_malloc="pymalloc")
    assert told.returncode != 0 and "run the tests with PYTHONMALLOC=malloc" in told.stdout
