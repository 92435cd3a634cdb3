"""CUDA's kernels compile for all devices that they are meant for, keep everything in registers, and make a library that
loads on any machine and says what is missing there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pagedec.cli import active, main
from pagedec.config import ParallelConfig
from pagedec.errors import InvalidArgument
from pagedec.kernels import library
from pagedec.kernels.library import CUDA, KernelError, LibraryNotFound, load
from pagedec.kernels.prototypes import PROTOTYPES
from pagedec.runtime.loading import choose_backend
from tests.kernels import cuda_library
from tests.kernels.cuda_build import ROOT, Build, build, missing

SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
NO_DEVICE = "pd_(context_new|num_devices): (there is no driver of an NVIDIA device|no CUDA-capable device is detected)"


@pytest.fixture(scope="module")
def built() -> Build:
    if missing() is not None:
        pytest.skip(f"no {missing()}")
    return build()


@pytest.fixture
def directory(built: Build) -> Path:
    assert built.status == 0, built.told
    return built.directory


def has_kernels(source: Path) -> bool:
    """In itself or in what it includes."""
    text = source.read_text(encoding="utf-8")
    if re.search("^PD_KERNEL", text, re.MULTILINE):
        return True
    return any(
        has_kernels(source.parent / name) for name in re.findall(r'^#include "cuda/(\w+\.h)"', text, re.MULTILINE)
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_compiles_without_spills(built: Build, source: Path) -> None:
    told = built.log(source)
    assert "FAILED" not in told and "not compiled" not in told, told
    spills = re.findall(r"([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads", told)
    assert all(spill == ("0", "0") for spill in spills), told
    assert bool(spills) == has_kernels(source)
    assert not re.search("C75[0-9]+", told), "products of warpgroups wait for one another"
    if spills:
        hopper = source.name == "gemm_hopper.cu"
        assert set(re.findall(r"for '(sm_\w+)'", told)) == ({"sm_90a"} if hopper else {"sm_80", "sm_90"})


def test_no_source_asks_what_it_is_compiled_for() -> None:
    """Nor do headers of CUDA that do: one PTX is made into all devices' code. But for whether a kernel can begin early,
    of which CMake knows the sources."""
    for source in [*SOURCES, *SOURCES[0].parent.glob("*.h")]:
        text = source.read_text(encoding="utf-8")
        asked = text.count("__CUDA_ARCH")
        assert asked == (2 if source.name == "device.h" else 0), source.name
        assert "cuda_fp" not in text and "cuda_bf16" not in text, source.name


def test_no_call_leaves_an_error_to_the_next_launch() -> None:
    """A call's result is looked at, or `ignore` forgets it: launches read the thread's last error."""
    statement = re.compile(r"^(?:[^/\n]*[;{)])?\s*cuda(?!GetLastError)[A-Z]\w*\(", re.MULTILINE)
    for source in [*SOURCES, *SOURCES[0].parent.glob("*.h")]:
        found = statement.findall(source.read_text(encoding="utf-8"))
        assert not found, (source.name, found)


@pytest.mark.parametrize("name", ["gemm_int8", "gemm_int8_many", "gemm_blocks", "gemm_blocks_many", "lora"])
def test_sixteen_bytes_are_one_load(built: Build, name: str) -> None:
    """Not one for each byte, as nvcc makes of a copy whose alignment it does not believe."""
    loads = set(re.findall(r"ld\.global\S*", built.ptx(name)))
    assert "ld.global.v4.u32" in loads and not {"ld.global.u8", "ld.global.s8", "ld.global.b8"} & loads


@pytest.mark.parametrize(
    ("name", "kernel", "end", "least"),
    [
        ("attention", "merge_kernel", "ex2", 32),  # 131,072 tokens are 256 chunks
        ("norm", "norm_kernel", "st.global", 32),  # a step of an 8B model has 65 norms
        ("experts", "order_kernel", r"(atom|red)\.shared", 8),  # all choices, in each block
        ("experts", "combine_kernel", "st.global", 16),  # what eight experts have made of a value
        ("lora", "lora_low_kernel", r"mma\.sync", 24),  # A x of one row: eight steps of each warp
        ("lora", "lora_outputs_kernel", r"bar\.sync", 16),  # and its products with B: all of rank 16
        ("cache", "kv_copy_kernel", "st.global", 16),  # K or V of 8 moves, and where they lie
        ("rows", "copy_rows_kernel", "st.global", 8),  # numbers of a row
        *((name, f"{name}_kernel", r"setp\.\w+\.f32", 8) for name in ("argmax", "sample")),  # logits
    ],
)
def test_loads_do_not_wait_for_one_another(built: Build, name: str, kernel: str, end: str, least: int) -> None:
    """So many begin before what is made of them, or written, can hold up the next ones."""
    text = built.ptx(name)
    bodies = [body for body in text.split(".entry")[1:] if kernel in body.split("(")[0]]
    loads = [max(part.count("ld.global") for part in re.split(end, body)) for body in bodies]
    assert loads and min(loads) >= least


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_library_has_the_functions_of_the_interface_and_no_others(directory: Path) -> None:
    path = str(directory / "libpagedec_cuda.so")
    assert {line.split()[-1] for line in _lines("nm", "-D", "--defined-only", path)} == set(PROTOTYPES)
    needed = [line for line in _lines("readelf", "-d", path) if "NEEDED" in line]
    assert needed and not any("cuda" in line for line in needed)


def test_it_loads_and_says_what_is_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(CUDA, directory)
    assert loaded.isa == CUDA and loaded.best_isa() in library.ISAS
    assert loaded.packed_bytes(33, 33, library.Dtype.BF16) == 64 * 64 * 2
    loaded.plan().close()
    if cuda_library.has_device():
        pytest.skip("there is a device")
    with pytest.raises(KernelError, match=NO_DEVICE):
        loaded.context()
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(directory))
    monkeypatch.setenv("PAGEDEC_ISA", CUDA)
    with pytest.raises(InvalidArgument, match=f"^PAGEDEC_ISA is 'cuda': cannot be used: {NO_DEVICE}"):
        choose_backend(ParallelConfig(), "auto")
    facts = active.kernel_facts(frozenset())
    assert re.match(f"built, not usable: {NO_DEVICE}", facts[CUDA])
    assert re.match(f"not used, nothing can run: {NO_DEVICE}", facts["reference (torch)"])


def test_where_it_is_not_built_is_said_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryNotFound, match=f"no libpagedec_cuda.so in {tmp_path}: make cuda, in"):
        load(CUDA, tmp_path)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    assert active.kernel_facts(frozenset())[CUDA] == "not built: run make cuda in pagedec's sources where nvcc is"
    monkeypatch.setenv("PAGEDEC_ISA", CUDA)  # who names it does not want a processor's torch
    with pytest.raises(
        InvalidArgument, match="^PAGEDEC_ISA is 'cuda': is not available: no libpagedec_cuda.so in .*: make"
    ):
        choose_backend(ParallelConfig(), "auto")
    assert active.kernel_facts(frozenset())["reference (torch)"].startswith(
        "not used, nothing can run: no libpagedec_cuda"
    )
    assert main.main(["doctor", "--no-probe"]) == 1
