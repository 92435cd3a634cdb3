from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedec import environment
from pagedec.environment import EMULATED_VECTORS
from pagedec.kernels import records
from pagedec.kernels.library import (
    ABI_VERSION,
    EMULATED_ISAS,
    ISAS,
    KernelError,
    Library,
    LibraryNotFound,
    OpList,
    available_isas,
    library_directories,
    load,
    loadable_isas,
)


def compiler() -> str:
    found = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def test_library_is_what_it_was_asked_for(library: Library) -> None:
    assert library.path.name == f"libpagedec_{library.isa}.so"
    assert load(library.isa) is library
    assert library.best_isa() in ISAS


def test_each_extension_that_compilers_may_use_is_asked_of_the_processor() -> None:
    csrc = Path(__file__).resolve().parents[2] / "csrc"
    flags = re.findall(r"^set\(FLAGS_\w+ (.+)\)$", (csrc / "CMakeLists.txt").read_text(encoding="utf-8"), re.M)
    used = {name for line in flags for name in re.findall(r"-m(avx\w*|fma|bmi2?|lzcnt|f16c)\b", line)}
    body = (csrc / "common" / "best_isa.cpp").read_text(encoding="utf-8")
    asked = {
        name.lower() for pair in re.findall(r'__builtin_cpu_supports\("(\w+)"\)|& bit_(\w+)\b', body) for name in pair
    }
    asked.discard("")
    assert {"avx2", "f16c", "avx512bf16"} <= used and used == asked


BMI = r"(andn|bextr|bls(i|r|msk)|bzhi|lzcnt|mulx|pdep|pext|rorx|sarx|shlx|shrx)[lqw]?"
MATRIX = r"(t(dp|ile)|(ld|st)tile)\w+"
RICHER = {
    "scalar": rf"\t(v\w+|{BMI}) ",
    "avx2": r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|[23]\d)",
    "avx512": rf"\t(vdpbf16ps|vcvtne2?ps2bf16\w?|{MATRIX}) ",  # a processor is asked for VNNI there
    "avx512bf16": rf"\t{MATRIX} ",
    "amx_emulated": rf"\t{MATRIX} ",
    **dict.fromkeys(EMULATED_VECTORS, r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|[23]\d)|" + rf"\t{MATRIX} "),
}
"""Instructions of processors that a library is not for."""


@pytest.mark.parametrize("isa", RICHER)
def test_no_library_has_instructions_of_richer_processors(libraries: list[Library], isa: str) -> None:
    """Object files of several instruction sets are linked into each, and of equal functions the linker takes one."""
    path, objdump = libraries[0].path.with_name(f"libpagedec_{isa}.so"), shutil.which("objdump")
    if objdump is None or not path.is_file():
        pytest.skip(f"no {path.name} or no objdump")
    text = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(f"^.*(?:{RICHER[isa]}).*$", text, re.M)
    assert found is None, found[0]
    if isa != "scalar":  # and they are looked for rightly
        assert re.search(RICHER["scalar"], text)


def test_all_instruction_sets_load_side_by_side(libraries: list[Library]) -> None:
    assert [library.isa for library in libraries] == list(loadable_isas())
    assert libraries[0].isa == "scalar"
    assert len({library.context().gumbel(1, 2, 3, 0, 50).tobytes() for library in libraries}) == 1


def test_torch_and_kernels_share_one_openmp(library: Library) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    files = {line.split()[-1] for line in maps.read_text().splitlines()}
    assert len([path for path in files if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]) == 1


def test_variable_chooses_the_instruction_set(libraries: list[Library], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    assert load().isa == available_isas()[-1]
    monkeypatch.setenv("PAGEDEC_ISA", "scalar")
    assert load().isa == "scalar"
    assert load(libraries[-1].isa) is libraries[-1]


def test_emulations_are_loaded_only_by_name(libraries: list[Library], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    emulated = [library for library in libraries if library.isa in EMULATED_ISAS]
    if not emulated:
        pytest.skip("none is built, or this processor lacks AVX2")
    assert libraries[-len(emulated) :] == emulated and load().isa == available_isas()[-1]
    assert not set(EMULATED_ISAS) & set(available_isas())
    for library in emulated:
        monkeypatch.setenv("PAGEDEC_ISA", library.isa)
        assert load() is library and library.best_isa() in ISAS


@pytest.mark.parametrize(
    ("best", "wanted"),
    [
        ("scalar", []),
        ("avx2", ["avx512_on_avx2", "avx512bf16_on_avx2", "amx_on_avx2"]),
        ("avx512bf16", ["avx512_on_avx2", "avx512bf16_on_avx2", "amx_on_avx2", "amx_emulated"]),
    ],
)
def test_an_emulation_needs_a_processor_too(
    best: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for isa in (*ISAS, *EMULATED_ISAS):
        (tmp_path / f"libpagedec_{isa}.so").symlink_to(load("scalar").path)
    monkeypatch.setattr(Library, "best_isa", lambda self: best)
    assert loadable_isas(tmp_path) == (*ISAS[: ISAS.index(best) + 1], *wanted)


def test_without_the_emulation_it_is_not_there(library: Library, tmp_path: Path) -> None:
    for isa in available_isas():
        (tmp_path / f"libpagedec_{isa}.so").symlink_to(load(isa).path)
    assert loadable_isas(tmp_path) == available_isas(tmp_path) == available_isas()
    known = ", ".join(available_isas())
    for isa in EMULATED_ISAS:
        with pytest.raises(LibraryNotFound, match=f"isa is '{isa}'; built and run by this processor are {known}"):
            load(isa, tmp_path)


def test_variable_none_means_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_ISA", "none")
    with pytest.raises(LibraryNotFound, match="PAGEDEC_ISA is none"):
        load()


def test_missing_library_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_isas(tmp_path) == ()
    with pytest.raises(LibraryNotFound, match=str(tmp_path)):
        load(directory=tmp_path)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    assert library_directories() == [tmp_path]
    with pytest.raises(LibraryNotFound, match=str(tmp_path)):
        load("scalar")


def test_instruction_set_that_is_not_built_is_named(library: Library, tmp_path: Path) -> None:
    (tmp_path / "libpagedec_scalar.so").symlink_to(load("scalar").path)
    with pytest.raises(LibraryNotFound, match="isa is 'avx512'; built and run by this processor are scalar"):
        load("avx512", tmp_path)
    with pytest.raises(ValueError, match="isa is 'sse9'"):
        load("sse9")


def test_a_directory_that_this_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.check({"PAGEDEC_LIB_DIR": str(tmp_path)})
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may enter all
    with pytest.raises(ValueError, match="must be an existing directory that this user may enter"):
        environment.check({"PAGEDEC_LIB_DIR": str(tmp_path)})


def test_other_abi_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int pd_abi_version(void) { return 99; }\n')  # and no function that came later
    path = tmp_path / "libpagedec_scalar.so"
    subprocess.run([compiler(), "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(KernelError, match=f"ABI version is 99; this package needs {ABI_VERSION}"):
        load("scalar", tmp_path)


def test_library_of_older_sources_is_refused(tmp_path: Path) -> None:
    source, path = tmp_path / "older.cpp", tmp_path / "libpagedec_scalar.so"
    source.write_text(f'extern "C" int pd_abi_version(void) {{ return {ABI_VERSION}; }}\n')
    subprocess.run([compiler(), "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(KernelError, match="it has no function pd_last_error: build it again"):
        load("scalar", tmp_path)


def test_failing_call_raises_the_librarys_words(library: Library) -> None:
    library.check(0)
    with pytest.raises(KernelError, match="pd_argmax: num_rows is NULL"):
        library.context().call(records.ArgmaxArgs())
    with pytest.raises(KernelError, match="pd_packed_bytes|pd_pack|n is"):
        library.packed_bytes(-1, 8, records.Dtype.F32)


def test_empty_plan_is_freed_twice_safely(library: Library) -> None:
    plan = library.plan()
    with pytest.raises(KernelError, match="pd_plan_view"):
        plan.words()
    plan.close()
    plan.close()
    assert plan.handle is None


def test_program_takes_kernels_only() -> None:
    with pytest.raises(KeyError):
        OpList([records.AttnShape()])


# ---- the debugging variables


def test_known_variables_pass() -> None:
    environment.check({"PAGEDEC_ISA": "avx2", "PAGEDEC_LIB_DIR": "/", "HOME": "anything", "MY_PAGEDEC_X": "1"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PAGEDEC_ISA", "mmx", "PAGEDEC_ISA is 'mmx'; it must be one of scalar"),
        ("PAGEDEC_ISA", "", "PAGEDEC_ISA is ''"),
        ("PAGEDEC_LIB_DIR", "/no/such/directory", "PAGEDEC_LIB_DIR is '/no/such/directory'; it must be an existing"),
        ("PAGEDEC_LIB_DIR", "x" * 5000, "PAGEDEC_LIB_DIR is 'xxx.*'; it must be an existing"),
        ("PAGEDEC_ISAS", "avx2", "PAGEDEC_ISAS is not a known variable; known are PAGEDEC_"),
    ],
)
def test_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        load("scalar")


def test_variable_outside_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="PAGEDEC_NOPE"):
        environment.read("PAGEDEC_NOPE")
