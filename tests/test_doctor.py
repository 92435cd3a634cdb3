"""What the doctor says, on machines made up for it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pagedec import environment
from pagedec.cli import active, doctor, main
from pagedec.kernels import library
from pagedec.runtime.memory import Memory

ALL_FLAGS = frozenset(active.ISA_FLAGS["amx"])


def test_cpu_facts_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t: x\n"
    )
    assert active.cpu_facts(cpuinfo) == ("Some CPU", {"fpu", "avx2", "fma"})
    assert active.cpu_facts(tmp_path / "none")[1] == frozenset()


def test_no_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    facts = active.kernel_facts(ALL_FLAGS)
    assert set(facts) == {*library.ISAS, library.CUDA, "reference (torch)"}
    assert facts["reference (torch)"] == f"active: no libpagedec_scalar.so in {tmp_path}"
    assert all(facts[isa].startswith("not built: ") for isa in library.ISAS)


def test_libraries_that_cannot_be_used_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off, or without the one by which the others are chosen; commands that need them say so in a line, too."""
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    for isa in ("avx2", library.CUDA):
        (tmp_path / f"libpagedec_{isa}.so").write_bytes(b"\x7fELF")
    facts = active.kernel_facts(ALL_FLAGS)
    assert facts["avx2"] == f"built, not used: no libpagedec_scalar.so in {tmp_path}"
    assert facts["avx512"].startswith("not built: ")
    assert active.nccl_fact() == "not looked for: it is for ranks on CUDA devices, whose kernels cannot be used"
    broken = tmp_path / "libpagedec_scalar.so"
    broken.write_bytes(b"\x7fELF")
    facts = active.kernel_facts(ALL_FLAGS)
    problem = f"{broken}: file too short"
    assert facts["scalar"] == facts["avx2"] == f"built, not used: {problem}"
    assert facts["reference (torch)"] == f"not used, nothing can run: {problem}"
    assert main.main(["generate", "a", "--max-tokens", "1"]) == 2
    said = f"attention_backend is auto: the compiled kernels cannot be used: {problem}; reference does without them"
    assert capsys.readouterr().err == f"pagedec: error: {said}\n"


def test_a_default_model_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone.gguf"
    monkeypatch.setattr("pagedec.formats.resolve.default_model_path", lambda: path)
    assert doctor.model_facts()["smollm2"] == f"{path}, which cannot be read: No such file or directory"


def test_a_quota_of_processors_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedec.runtime.processors.quota", lambda *root: 1.5)
    assert doctor.processor_facts()["cpu"].endswith(" usable cores, a quota of 1.5")


def test_a_poorer_processor_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    facts = active.kernel_facts(frozenset(active.ISA_FLAGS["avx512"]))
    assert facts["avx512bf16"] == "not usable: this processor lacks avx512_bf16, avx512_vnni"


def test_one_library_is_active_and_the_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    available = library.available_isas()
    if not available:
        pytest.skip("the kernels are not built")
    facts = active.kernel_facts(active.cpu_facts()[1])
    assert [isa for isa, fact in facts.items() if fact == "active"] == [available[-1]]
    assert all(facts[isa] == f"available, not used: {available[-1]} is in use" for isa in available[:-1])
    monkeypatch.setenv("PAGEDEC_ISA", "none")
    facts = active.kernel_facts(active.cpu_facts()[1])
    assert facts["reference (torch)"].startswith("active: PAGEDEC_ISA is none")
    assert all(facts[isa].startswith("available, not used: PAGEDEC_ISA is none") for isa in available)


def test_the_emulation_says_what_it_is_for_and_is_never_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    emulated = library.loadable_isas()[-1]
    if emulated not in library.EMULATED_ISAS:
        pytest.skip("none is built, or this processor lacks AVX2")
    flags = active.cpu_facts()[1]
    meaning = "slow, for tests of the amx kernels on a processor without these instructions"
    for isa in library.available_isas():
        (tmp_path / f"libpagedec_{isa}.so").symlink_to(library.load(isa).path)
    assert active.kernel_facts(flags)[emulated] == f"not used: {meaning}"
    monkeypatch.setenv("PAGEDEC_ISA", emulated)
    facts = active.kernel_facts(flags)
    assert facts[emulated] == f"active: {meaning}"
    assert [name for name, fact in facts.items() if fact.startswith("active")] == [emulated]
    assert facts["reference (torch)"] == f"not used: {emulated} is in use"
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    facts = active.kernel_facts(flags)
    assert emulated not in facts
    assert facts["reference (torch)"].startswith(f"active: isa is '{emulated}'; built and run by this processor are ")


def test_optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_wheel.py").write_text("raise ImportError('undefined symbol:\\n  _ZN3c10')\n")
    (tmp_path / "of_another_triton.py").write_text("assert False\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        active.optional_package("no_such_thing", "no-such-thing", "extra")
        == "not installed: pip install 'pagedec[extra]'"
    )
    assert (
        active.optional_package("broken_wheel", "x", "y") == "installed, but does not import: undefined symbol: _ZN3c10"
    )
    assert active.optional_package("of_another_triton", "x", "y") == "installed, but does not import: AssertionError"
    assert active.optional_package("numpy", "numpy", "y").startswith("installed, ")


def test_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which there is, and where; or why ranks on devices would meet on the host."""
    for name in ("PAGEDEC_ISA", "PAGEDEC_LINK", "PAGEDEC_NCCL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PAGEDEC_LINK", "memory")
    assert active.nccl_fact() == "not used: PAGEDEC_LINK is memory"
    monkeypatch.delenv("PAGEDEC_LINK")
    if library.EMULATED_DEVICE not in library.built_isas():
        pytest.skip("the emulated device is not built")
    path = library.load(library.EMULATED_DEVICE).path
    monkeypatch.setenv("PAGEDEC_ISA", library.EMULATED_DEVICE)
    stands_in = path.with_name("libnccl_emulated.so")
    assert active.nccl_fact() == f"2.32.3, {stands_in}; used by ranks on CUDA devices, with one each"
    for isa in ("scalar", library.EMULATED_DEVICE):  # another library, which has opened none yet, nor finds one
        shutil.copy(library.load(isa).path, tmp_path)
    monkeypatch.setenv("PAGEDEC_LIB_DIR", str(tmp_path))
    assert active.nccl_fact().startswith("cannot be used: pd_nccl_open: ")
    assert active.nccl_fact().endswith(
        "; install nvidia-nccl-cu12 or nvidia-nccl-cu13, or name a libnccl.so.2 in PAGEDEC_NCCL"
    )
    monkeypatch.delenv("PAGEDEC_ISA")
    assert active.nccl_fact() == "not looked for: it is for ranks on CUDA devices, whose kernels are not built"


def test_the_doctor_says_what_a_pool_on_a_device_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "device_room", lambda: 70 * 2**30)
    told = "70.00 GiB, were it made now and nothing said: all of the 70.00 GiB available (of what the device has free"
    assert doctor.memory_facts()["KV pool"] == told + ", less the weights)"


def test_doctor_reports_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json", "--no-probe"]) == 0
    sections = json.loads(capsys.readouterr().out)
    titles = ["versions", "machine", "memory", "kernels", "backends", "default model", "environment variables"]
    assert list(sections) == titles
    assert sections["versions"]["python"].startswith(sys.version.split()[0])
    assert set(sections["environment variables"]) == set(environment.VARIABLES)
    assert {"cuda", "nccl", "flash-attn", "xformers", "ray"} == set(sections["backends"])
    assert main.main(["doctor", "--no-probe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "kernels" in lines and any(line.startswith("  torch ") for line in lines)


def test_the_doctor_says_what_a_pool_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    machine, group = Memory(20 * gib, "MemAvailable of /proc/meminfo"), Memory(3 * gib // 2, "limit of the group")
    monkeypatch.setattr("pagedec.runtime.memory._of_machine", lambda root: machine)
    monkeypatch.setattr("pagedec.runtime.memory._of_address_space", lambda root: iter(()))
    monkeypatch.setattr("pagedec.runtime.memory._of_groups", lambda root: iter(()))
    assert doctor.memory_facts() == {
        "machine": "20.00 GiB available (MemAvailable of /proc/meminfo)",
        "limits": "none on this process",
        "KV pool": "4.00 GiB, were it made now and nothing said: 4 GiB are the most where nothing is said",
    }
    monkeypatch.setattr("pagedec.runtime.memory._of_groups", lambda root: iter([group]))
    assert doctor.memory_facts() == {
        "machine": "20.00 GiB available (MemAvailable of /proc/meminfo)",
        "limits": "1.50 GiB available (limit of the group)",
        "KV pool": "384 MiB, were it made now and nothing said: a quarter of the 1.50 GiB available "
        "(limit of the group)",
    }


def test_probe_covers_every_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEFAULT_LINEARS", {"small": (32, 64), "narrow": (16, 48)})
    facts = doctor.invariance_facts()
    assert set(facts) == {"small 32x64", "narrow 16x48"}
    answers = [answer.split() for fact in facts.values() for answer in fact.split(", ")]
    assert [dtype for dtype, _ in answers] == ["bfloat16", "float32"] * 2
    assert {verdict for _, verdict in answers} <= {"yes", "NO"}


def test_probe_says_no_where_bits_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEFAULT_LINEARS", {"small": (32, 64)})
    monkeypatch.setattr("pagedec.kernels.reference_linear.TorchPackedLinear.probe_invariance", lambda self: False)
    assert doctor.invariance_facts() == {"small 32x64": "bfloat16 NO, float32 NO"}


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_where_nothing_can_run_the_exit_status_says_so(
    form: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert main.main(["doctor", *form]) == 1
    assert "does not import, so nothing can run" in capsys.readouterr().out


def test_a_torch_that_fails_in_any_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('driver of\\nanother version')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    assert main.main(["doctor"]) == 1
    assert "does not import, so nothing can run: driver of another version" in capsys.readouterr().out
