"""The process around the kernels: forks, a system that refuses the matrix unit, no memory, a thread's rounding mode."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.arena import zeros
from pagedec.kernels.library import Context, KernelError, Library, available_isas, load
from pagedec.kernels.native import NativeBackend
from tests.forked import forked
from tests.kernels import calls
from tests.kernels.processing_cases import simple_case
from tests.kernels.test_gemm import Linear

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def run(program: str, *arguments: str) -> str:
    """What a program prints, in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_forked_child_computes_alone_and_its_threads_together(libraries: list[Library]) -> None:
    context = load().context(2)
    linear, x = Linear.pack(context, calls.normal(96, 64, seed=1)), calls.normal(50, 64, seed=2)
    expected = linear(x)

    def look() -> None:
        print(context.num_threads, torch.equal(linear(x), expected))

    def look_twice() -> None:
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()

    assert forked(look_twice, 60) == (0, "1 True\n2 True\n")
    assert context.num_threads == 2 and torch.equal(linear(x), expected)


# A seccomp filter by hand: arch_prctl(ARCH_REQ_XCOMP_PERM, ...) gives EPERM, all else is allowed.
REFUSAL = """
import ctypes, struct
libc = ctypes.CDLL(None)
lines = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (6, 0, 0, 0x50001), (6, 0, 0,
0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code)), 0, 0) == 0
from pagedec.cli.active import cpu_facts, kernel_facts
from pagedec.kernels.library import available_isas, load
print(*available_isas(), load().isa)
print(kernel_facts(cpu_facts()[1])["amx"])
"""


def test_without_leave_to_use_the_matrix_unit_the_next_best_is_used() -> None:
    isas = available_isas()
    if "amx" not in isas:
        pytest.skip("needs the matrix unit")
    names, fact = run(REFUSAL).splitlines()
    assert names.split() == [*isas[:-1], isas[-2]]
    assert fact == "not usable: the system does not grant this process the registers it needs"


def starve() -> None:
    backend, vocab = NativeBackend(load(), torch.float32, num_threads=2), 200_000_000
    logits = zeros((2, vocab), torch.float32)
    case = simple_case([[3, 4], [4, 5]], logits, LogitsRules(presence_penalty=1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), hard))  # the kernel's table of tokens would need 1.6 GB
    try:
        backend.process_logits(logits, 0, case.forward, case.cache(), case.known(backend))
    except KernelError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    case = simple_case([[3, 4], [4, 5]], torch.zeros(2, 9), LogitsRules(presence_penalty=1.0))
    backend.process_logits(case.logits, 0, case.forward, case.cache(), case.known(backend))
    print(case.logits.sum().item())


def test_a_kernel_without_memory_fails_and_the_process_lives(libraries: list[Library]) -> None:
    def in_a_thread() -> None:  # which has others beside it, as a forked process's first one has not
        thread = threading.Thread(target=starve)
        thread.start()
        thread.join()

    assert forked(in_a_thread) == (0, "pd_run: no memory for ops[0], of kind 12\n-4.0\n")


def test_a_threads_rounding_mode_does_not_reach_its_rows(context: Context) -> None:
    x, weight = calls.normal(64, 8, seed=1, scale=1e-20), calls.normal(96, 8, seed=2, scale=1e-20)
    linear = Linear.pack(context, weight)
    expected = linear(x)
    assert (expected != 0).all() and (expected.abs() < 2.0**-126).all()
    with calls.flushed_denormals():
        for num_threads in (1, 2):
            linear.context = calls.threads(context, num_threads)
            assert calls.same_bits(linear(x), expected)
        assert torch.tensor([1e-40]).mul(1.0).item() == 0.0  # what was set stays set
