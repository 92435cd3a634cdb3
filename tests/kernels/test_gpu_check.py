"""benchmarks/gpu_check.sh, which runs where little is installed and time is short: what it runs needs no more than it
says, what it stops ends, and each stage has its time."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedec.kernels.library import EMULATED_DEVICE
from tests.kernels import bare_python, cuda_library
from tests.kernels.bare_python import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")
STUB = '#!/usr/bin/env bash\nsleep 600 &\necho $$ $! >>"$STUB_PIDS"\nwait\n'


def modules() -> list[str]:
    """Files of tests that it runs."""
    assert "import on_devices" in TEXT
    return sorted({*re.findall(r"tests/\w+/test_\w+\.py", TEXT), *cuda_library.on_devices()})


def benchmarks() -> list[str]:
    return sorted(set(re.findall(r"benchmarks/(gpu_\w+)\.py", TEXT)))


def needs() -> list[str]:
    """The packages that the script says it needs."""
    found = re.search(r"Needs Python [\d.]+ with ([\w, ]+) \(", TEXT)
    assert found is not None
    return re.split(r", | and ", found[1])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with those alone."""
    return bare_python.make(tmp_path_factory.mktemp("bare") / "venv", *needs())


def test_what_it_runs_is_there() -> None:
    assert len(benchmarks()) == 7 and len(modules()) > 30
    assert all((ROOT / path).is_file() for path in modules())


def imported(path: Path) -> set[str]:
    """What a file imports when it is imported itself, `from x import y` as both x and x.y."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_what_it_runs_imports_no_more_than_it_says() -> None:
    """Its tests and benchmarks, what of ours they import, and so on."""
    folders = {parent for path in modules() for parent in Path(path).parents}
    left = [ROOT / path for path in modules()] + [ROOT / folder / "conftest.py" for folder in folders]
    left += [ROOT / "benchmarks" / f"{name}.py" for name in benchmarks()]
    seen, others = set[Path](), dict[str, Path]()
    while left:
        path = left.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for name in imported(path):
            for root in (ROOT, ROOT / "benchmarks"):
                place = root.joinpath(*name.split("."))
                left += [place.with_suffix(".py"), *(parent / "__init__.py" for parent in (place, *place.parents))]
            others[name.partition(".")[0]] = path
    own = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"pagedec", "tests"}
    there = own | {*sys.stdlib_module_names}
    for distribution in bare_python.needed(needs()).values():
        told = distribution.read_text("top_level.txt")  # of torch, say, whose list of files is long
        files = told.split() if told else map(str, distribution.files or ())
        there |= {Path(file).parts[0].removesuffix(".py") for file in files}
    wrong = {name: path for name, path in others.items() if name not in there}
    assert not wrong and {"torch", "pytest", "pagedec", "gpu_common"} <= {*others}


@pytest.mark.long
def test_its_tests_need_no_more_than_it_says(bare: Path) -> None:
    done = bare_python.run(bare, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *modules())
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.long
@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
@pytest.mark.parametrize("name", benchmarks())
def test_its_benchmarks_need_no_more_than_it_says(bare: Path, name: str) -> None:
    options = re.findall(rf"benchmarks/{name}\.py([^;}}\n]*)", TEXT)[0].split() if name != "gpu_ranks" else []
    chosen = {"PAGEDEC_ISA": EMULATED_DEVICE, "PAGEDEC_LINK": "memory"}
    done = bare_python.run(bare, f"benchmarks/{name}.py", "--smoke", *options, **chosen)
    assert done.returncode == 0, done.stderr[-3000:]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("stage", "num_at_once"), [("engine", 4), ("sanitizer", 1)])
def test_what_is_stopped_ends(tmp_path: Path, stage: str, num_at_once: int) -> None:
    """A stage's group of processes is told to, as its time limit does, while they and what they have started sleep."""
    pids = tmp_path / "pids"
    for name in ("python", "compute-sanitizer"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    own = {"PYTHON": str(tmp_path / "python"), "STUB_PIDS": str(pids), "GPU_TESTS_LOGS": str(tmp_path)}
    command = ["bash", str(SCRIPT), "--inside", stage]
    process = subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not pids.exists() or len(pids.read_text().split("\n")) <= num_at_once:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    while left := [pid for pid in map(int, pids.read_text().split()) if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} go on"
        time.sleep(0.02)
    assert len(pids.read_text().split("\n")) == num_at_once + 1, "none came after them"


def test_a_module_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    own = {"STUB_PIDS": str(tmp_path / "pids"), "GPU_TESTS_LOGS": str(tmp_path), "GPU_TESTS_SECONDS": "1"}
    command = [str(SCRIPT.with_name("gpu_tests.sh")), "tests/one.py", "tests/two.py"]
    environ = {**os.environ, **own, "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode and re.findall(r"^\| tests/(\w+)\.py \| .*\| 124 \|$", done.stdout, re.MULTILINE)
    assert not any(is_running(pid) for pid in map(int, (tmp_path / "pids").read_text().split()))


COUNTING = """#!/usr/bin/env bash
[[ " $* " != *" --collect-only "* ]] || { printf '%s\\n' tests/a/one.py::x tests/a/one.py::y tests/a/two.py::x; exit; }
echo "${@: -1} $$ $PYTHONMALLOC,$OMP_NUM_THREADS,$PYTEST_DISABLE_PLUGIN_AUTOLOAD" >>"$STUB_PIDS"
echo "1 of them"
[[ "$*" != *one.py ]]
"""


def test_each_module_has_a_process_of_its_own(tmp_path: Path) -> None:
    """Of a folder too, as make test-gpu has them; what one has failed with is not the end of the next."""
    (tmp_path / "python").write_text(COUNTING)
    (tmp_path / "python").chmod(0o755)
    own = {"PYTHON": str(tmp_path / "python"), "STUB_PIDS": str(tmp_path / "pids"), "GPU_TESTS_LOGS": str(tmp_path)}
    command = [str(SCRIPT.with_name("gpu_tests.sh")), "tests/kernels", "tests/b.py::z"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env={**environ, **own}, capture_output=True, text=True)
    rows = {
        f"| tests/{name} | 1 of them | {status} |"
        for name, status in (("a/one.py", 1), ("a/two.py", 0), ("b.py::z", 0))
    }
    assert done.returncode and rows <= {*done.stdout.split("\n")}, done.stdout + done.stderr
    ran = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    assert len({pid for _, pid, _ in ran}) == len(ran) == 3 and {given for *_, given in ran} == {"malloc,2,1"}
    assert "benchmarks/gpu_tests.sh tests/kernels" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("told", "arch"), [("echo 9.0", "90"), ("exit 9", "80")])
def test_the_build_is_for_the_device_that_is_there(tmp_path: Path, told: str, arch: str) -> None:
    """Which torch knows, too."""
    stubs = {
        "nvidia-smi": told,
        "python": '[[ "$*" != *capability* ]] || echo 80',
        "nvcc": "true",
        "cmake": f'echo "$*" >>{tmp_path / "asked"}',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    logs = tmp_path / "logs"
    logs.mkdir()
    own = {"PYTHON": str(tmp_path / "python"), "GPU_TESTS_LOGS": str(logs), "PAGEDEC_LIB_DIR": str(tmp_path)}
    done = subprocess.run([str(SCRIPT), "--inside", "build"], env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    assert f"-DCMAKE_CUDA_ARCHITECTURES={arch} " in f"{asked.splitlines()[0]} " and "--target pagedec_cuda" in asked


def seconds(name: str) -> dict[str, int]:
    table = re.search(rf"declare -A {name}=\(([^)]*)\)", TEXT)
    assert table is not None
    return {stage: int(number) for stage, number in re.findall(r"\[(\w+)\]=(\d+)", table[1])}


def test_every_stage_has_its_time() -> None:
    """However long those before it take; what must be known first comes first."""
    [stages], [total] = (
        re.findall(r'^STAGES="(.*)"$', TEXT, re.MULTILINE),
        re.findall(r"GPU_CHECK_SECONDS:-(\d+)", TEXT),
    )
    least, most = seconds("LEAST"), seconds("MOST")
    assert [*least] == [*most] == stages.split() and sum(least.values()) <= int(total)
    assert all(3 < least[stage] <= most[stage] for stage in least)
    assert all(re.search(rf"^{stage}\(\) {{", TEXT, re.MULTILINE) for stage in least)
    assert stages.split()[:4] == ["device", "build", "smoke", "engine"] and stages.split()[-1] == "sanitizer"


def test_a_stage_leaves_those_behind_it_what_they_need(tmp_path: Path) -> None:
    """With just the time of the last two the first is begun all the same; with less than its own it is left out."""
    results, least = tmp_path / "results.md", seconds("LEAST")
    environ = {**os.environ, "PYTHON": "false", "GPU_CHECK_SECONDS": str(least["copy"] - 1)}
    done = subprocess.run([str(SCRIPT), str(results), "copy", "device"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and "_copy: left out, no time_" in results.read_text()
    assert re.search(r"_device: \d+ s, status", results.read_text())


def test_modules_with_gemm_and_attention_come_first() -> None:
    modules = [Path(path).stem for path in cuda_library.on_devices()]
    first = [any(part in module for part in ("gemm", "attention")) for module in modules]
    assert first == sorted(first, reverse=True) and True in first and False in first
