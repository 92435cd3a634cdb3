"""Every instruction set of this processor, each as its own case, the richest that is emulated on it (those between,
marked long), and for kernels that CUDA has the emulated device and, marked gpu, a real one. What several libraries have
from the same object file is tested in one of them (csrc/CMakeLists.txt says which files are compiled once)."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from pagedec.kernels.library import DEVICES, EMULATED_DEVICE, Context, Library, library_directories, load, loadable_isas
from tests.kernels import cuda_library, host_memory

host_memory.prepare(cuda_library.built())

BESIDE_UNIT = {"test_argmax", "test_best", "test_copy_rows", "test_embed", "test_kv_copy", "test_norm", "test_parts"}
BESIDE_UNIT |= {
    "test_lora",
    "test_pick_logits",
    "test_process_logits",
    "test_restrict_logits",
    "test_rope",
    "test_sample",
}
BESIDE_UNIT |= {"test_soft_cap", "test_spread_logits", "test_topk", "test_verify"}
"""Modules of kernels that avx512bf16 and both libraries of the matrix unit have in common, and those two whose vectors
are emulated."""
SAME_BESIDE_UNIT = {"amx": "avx512bf16", "amx_emulated": "avx512bf16", "avx512bf16_on_avx2": "amx_on_avx2"}
BETWEEN = ("avx512_on_avx2", "avx512bf16_on_avx2")
PORTABLE = {"test_memory", "test_meet"}
"""Modules of what all instruction sets have in common."""


def _isas_of(module: str, is_portable: bool) -> tuple[str, ...]:
    isas = loadable_isas()
    if module in PORTABLE or is_portable:
        return isas[:1]
    return tuple(isa for isa in isas if not (module in BESIDE_UNIT and SAME_BESIDE_UNIT.get(isa) in isas))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        module, name = metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__
        is_portable = metafunc.definition.get_closest_marker("same_bits") is not None
        isas: list[Any] = [
            pytest.param(isa, marks=pytest.mark.long) if isa in BETWEEN else isa
            for isa in _isas_of(module, is_portable) or ("none",)
        ]
        isas += cuda_library.cases_of(module, name)
        metafunc.parametrize("library", isas, indirect=True, scope="session")


def _need_libraries() -> None:
    if loadable_isas():
        return
    places = ", ".join(str(place) for place in library_directories())
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip(f"no kernel library in {places} and no compiler to build one")
    pytest.fail(f"no kernel library in {places}: run `make build`")


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    _need_libraries()
    return cuda_library.open_library(request.param) if request.param in DEVICES else load(request.param)


@pytest.fixture(scope="session")
def libraries() -> list[Library]:
    """All of them, the portable one first, the emulated one last."""
    _need_libraries()
    return [load(isa) for isa in loadable_isas()]


@pytest.fixture(scope="session")
def context(library: Library) -> Context:
    """Of two threads, as few as can meet one another; a device has its own."""
    return library.context(0 if library.isa in DEVICES else 2)


@pytest.fixture(scope="session")
def contexts(libraries: list[Library]) -> list[Context]:
    """One of each library, in their order, of two threads."""
    return [library.context(2) for library in libraries]


@pytest.fixture(scope="session")
def emulated() -> Library:
    """CUDA's, on the emulated device."""
    if cuda_library.path() is None:
        pytest.skip("the emulated device is not built")
    return cuda_library.open_library(EMULATED_DEVICE)


@pytest.fixture(scope="session")
def cpu() -> Context:
    """Of the portable library."""
    _need_libraries()
    return load(loadable_isas()[0]).context()
