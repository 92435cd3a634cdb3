"""libpagedec_cuda.so as CMake builds it, once for all tests of a run and of later ones, in a folder of its own: nvcc
takes minutes."""

from __future__ import annotations

import fcntl
import functools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "cuda-test"
FLAGS = "-Xptxas -v -Werror all-warnings --keep"
"""Besides those of the build: what each kernel takes of a multiprocessor is told, a warning is an error, and what comes
between is kept."""


@dataclass(frozen=True, slots=True)
class Build:
    """Its library's folder, and what was said in all; `logs`: of each source when it was compiled last; `kept`: PTX."""

    status: int
    told: str
    directory: Path
    logs: Path
    kept: Path

    def ptx(self, name: str) -> str:
        """Of a source; where it has some for several targets, nvcc names them."""
        found = sorted(self.kept.glob(f"{name}*.ptx"), key=lambda path: path.stat().st_mtime)
        return next(path.read_text(encoding="utf-8") for path in reversed(found) if path.name.split(".")[0] == name)

    def log(self, source: Path) -> str:
        path = self.logs / f"{source.name}.txt"
        return path.read_text(encoding="utf-8") if path.is_file() else f"it was not compiled:\n{self.told}"


def tool(name: str) -> str | None:
    """Beside this Python, or wherever the shell finds it."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def missing() -> str | None:
    """What of the compilers there is not."""
    return next((name for name in ("nvcc", "cmake", "ninja") if tool(name) is None), None)


def _run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@functools.cache
def build() -> Build:
    """Compile what has changed. Processes of one run wait for each other."""
    cmake, ninja = str(tool("cmake")), str(tool("ninja"))
    logs, directory, kept = FOLDER / "logs", FOLDER / "lib", FOLDER / "kept"
    for folder in (logs, kept):
        folder.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ["-DPAGEDEC_CUDA=ON", f"-DPAGEDEC_LIB_DIR={directory}", "-Wno-dev"]
        options.append(f"-DCMAKE_CUDA_FLAGS={FLAGS} --keep-dir {kept}")
        places = ["-S", str(ROOT / "csrc"), "-B", str(FOLDER), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        status, told = _run(cmake, *places, *options)
        if status == 0:
            status, told = _run(ninja, "-C", str(FOLDER), "-k0", "-j2", "pagedec_cuda")
        for path in kept.iterdir():
            if path.suffix != ".ptx":  # 200 MB
                path.unlink()
        for part in re.split(r"^\[\d+/\d+\] ", told, flags=re.MULTILINE):
            found = re.match(r"Building CUDA object \S*/(\S+\.cu)\.o\n", part)
            if found:
                (logs / f"{found[1]}.txt").write_text(part, encoding="utf-8")
    return Build(status, told, directory, logs, kept)
