"""Commands whose device carries nothing out any more, or that lack what they need: one line says so, and what is left
of a job."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli import main
from pagedec.errors import DeviceLost
from pagedec.executor.inline import InlineExecutor
from tests.batch.tiny import make_tiny

TOLD = "pagedec: error: the device is lost to this process, which must be started anew: made up"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
def test_one_line_says_so(
    command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any) -> None:
        raise DeviceLost("made up")

    monkeypatch.setattr(InlineExecutor, "execute", lost)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    own = {
        "generate": ["ab"],
        "chat": [],
        "batch": ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")],
    }
    model = ["--model", str(tiny), "--load-format", "dummy", "--num-blocks", "64"]
    assert main.main([command, *own[command], *model]) == main.FAILED
    out, err = capsys.readouterr()
    left = "; 0 of 1 lines are answered in" if command == "batch" else ""
    assert not out.strip() and err.splitlines()[-1].startswith(TOLD + left)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'; pagedec doctor says what is"),
        (ImportError("libx.so: failed to map segment"), "libx.so: failed to map segment; pagedec doctor says what is"),
        (MemoryError(), "the system gives this process no more memory; pagedec doctor says how much there is"),
    ],
)
def test_what_an_installation_or_a_machine_lacks_is_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: Any) -> int:
        raise error

    monkeypatch.setattr("pagedec.cli.tokenize.run", lacking)
    assert main.main(["tokenize", "a"]) == main.FAILED
    assert capsys.readouterr().err.startswith(f"pagedec: error: {told}")


def test_a_mistake_of_our_own_is_none_of_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> int:
        raise ImportError("cannot import name 'x' from 'pagedec.core'", name="pagedec.core")

    monkeypatch.setattr("pagedec.cli.tokenize.run", mistaken)
    with pytest.raises(ImportError):
        main.main(["tokenize", "a"])
