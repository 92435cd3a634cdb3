"""What a user installs: a source distribution that builds anywhere, with the kernel libraries where there is a
compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent
NOT_SHIPPED = ("tests/", "benchmarks/", "deploy/", "examples/", "docs/", "build/", "Makefile", ".")


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def without_compiler() -> dict[str, str]:
    """An environment whose PATH has Python, cmake and ninja, and no compiler."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX") and "PAGEDEC" not in name}
    return kept | {"PATH": str(Path(sys.executable).parent)}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy, so that nothing is built in the checkout."""
    place = tmp_path_factory.mktemp("sdist")
    copy = place / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "lib")
    for name in ("pagedec", "csrc", "proto", "tests", "benchmarks", "deploy", "examples", "docs"):
        if (SOURCES / name).is_dir():
            shutil.copytree(SOURCES / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", ".gitignore", ".dockerignore"):
        shutil.copy(SOURCES / name, copy / name)
    (copy / "pagedec/lib").mkdir()
    (copy / "pagedec/lib/libpagedec_scalar.so").write_bytes(b"left over from a development build")
    (copy / ".venv/other").mkdir(parents=True)
    (copy / ".venv/other/LICENSE").write_text("of a package that is installed in the checkout")
    program = f"from scikit_build_core.build import build_sdist; build_sdist({str(place)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=copy, check=True, capture_output=True, timeout=60)
    [archive] = place.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def plain_wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that comes of the source distribution where there is no compiler."""
    if shutil.which("g++", path=without_compiler()["PATH"]) is not None:
        pytest.skip("a compiler stands beside this Python")
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(place), str(sdist), environment=without_compiler())
    [wheel] = place.glob("*.whl")
    return wheel


def doctor(wheel: Path, place: Path) -> dict[str, dict[str, str]]:
    """What `pagedec doctor` says of an installed wheel, away from the sources."""
    pip("install", "--no-deps", "--target", str(place / "site"), str(wheel))
    environment = {name: value for name, value in os.environ.items() if "PAGEDEC" not in name}
    # The checkout's own editable install redirects imports before any path is searched.
    program = (
        "import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__];"
        "sys.argv[1:] = ['doctor', '--no-probe', '--json']; runpy.run_module('pagedec', run_name='__main__')"
    )
    command = [sys.executable, "-c", program]
    environment["PYTHONPATH"] = str(place / "site")
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts: dict[str, dict[str, str]] = json.loads(done.stdout)
    return facts


def test_sdist_has_the_sources_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "csrc/CMakeLists.txt", "csrc/include/pagedec.h"} <= set(names)
    assert "proto/pagedec/v1/generation_service.proto" in names, "of which other clients are made"
    assert "pagedec/py.typed" in names, "without which type checkers read nothing of the package"
    expected = {path.relative_to(SOURCES).as_posix() for path in (SOURCES / "pagedec").rglob("*.py")}
    expected.add("proto/generate.py")
    assert {name for name in names if name.endswith(".py")} == expected
    assert [name for name in names if name.startswith(NOT_SHIPPED) or name.endswith((".so", ".pyc"))] == []


def test_without_a_compiler_the_wheel_is_pure_python(plain_wheel: Path) -> None:
    assert plain_wheel.name == "pagedec-0.1.0-py3-none-any.whl"
    names = zipfile.ZipFile(plain_wheel).namelist()
    assert [name for name in names if name.endswith((".so", ".cpp", ".h")) or name.startswith("tests")] == []
    assert {"pagedec/__init__.py", "pagedec/py.typed", "pagedec/cli/main.py", "pagedec/kernels/library.py"} <= set(
        names
    )
    assert "pagedec-0.1.0.dist-info/licenses/LICENSE" in names


@pytest.mark.long
def test_without_a_compiler_the_doctor_says_so(plain_wheel: Path, tmp_path: Path) -> None:
    facts = doctor(plain_wheel, tmp_path)
    assert facts["versions"]["pagedec"] == "0.1.0"
    assert facts["kernels"]["reference (torch)"].startswith("active: no libpagedec_scalar.so in ")
    assert facts["kernels"]["scalar"].startswith("not built: install pagedec where a C++ compiler is")


@pytest.mark.long
def test_with_a_compiler_the_wheel_has_the_libraries(sdist: Path, tmp_path: Path) -> None:
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(sdist))
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith("pagedec-0.1.0-py3-none-") and not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pagedec/py.typed" in names
    assert "pagedec/lib/libpagedec_scalar.so" in names
    assert not [name for name in names if "emulated" in name or "_on_avx2" in name]
    kernels = doctor(wheel, tmp_path)["kernels"]
    assert list(kernels.values()).count("active") == 1
    assert kernels["reference (torch)"].startswith("not used: ")


def test_what_the_metadata_promises() -> None:
    project = tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["scripts"] == {"pagedec": "pagedec.cli.main:command"}
    assert {"ray", "flash-attn", "xformers", "otel", "dev"} <= set(project["optional-dependencies"])
    needed = {name.split(">")[0] for name in project["dependencies"]}
    assert {"torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "tqdm"} <= needed
