"""A Python that has some packages, what these need, and nothing else; pagedec it finds by PYTHONPATH."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def needed(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """These distributions, and those that they cannot be without, by their names in lower case."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = [*names]
    while names:
        name = names.pop().lower().replace("_", "-")
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            asked = map(Requirement, found[name].requires or ())
            names += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def make(folder: Path, *names: str) -> Path:
    """An environment there, with links to what is installed here; its interpreter. Raises PackageNotFoundError."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for distribution in needed([*names]).values():
        tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([str(python), *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)
