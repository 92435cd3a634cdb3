"""The contract: its style, the committed stubs, and that it only grows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).parent / "contract.binpb"
"""The contract as clients have it. `python -m tests.serve.test_contract` writes it anew, when one is released."""
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def buf(*arguments: str) -> str:
    done = subprocess.run(["buf", *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.fixture
def described(tmp_path: Path) -> Path:
    generator().describe(tmp_path / "now.binpb")
    return tmp_path / "now.binpb"


def test_stubs_are_those_of_the_contract(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "pagedec" / "v1").iterdir()}
    committed = {
        path.name: path.read_text("utf-8")
        for path in (ROOT / "pagedec" / "v1").iterdir()
        if path.suffix in (".py", ".pyi") and path.name != "__init__.py"
    }
    assert made == committed, "run python proto/generate.py"


def test_style(described: Path) -> None:
    assert buf("lint", str(described), "--config", str(ROOT / "proto" / "buf.yaml")) == ""


def test_nothing_that_clients_use_has_changed(described: Path) -> None:
    config = str(ROOT / "proto" / "buf.yaml")
    assert buf("breaking", str(described), "--against", str(BASELINE), "--config", config) == ""


def test_the_check_finds_what_breaks(described: Path, tmp_path: Path) -> None:
    """A field that has another number is another field."""
    data = described.read_bytes().replace(b"client_request_id", b"client_request_ix")
    (tmp_path / "other.binpb").write_bytes(data)
    config = str(ROOT / "proto" / "buf.yaml")
    assert "client_request_id" in buf(
        "breaking", str(tmp_path / "other.binpb"), "--against", str(BASELINE), "--config", config
    )


if __name__ == "__main__":
    generator().describe(BASELINE)
