"""The three standard streams: closed, read no more, or of another encoding; and how a process ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pagedec.cli import console, main
from tests.batch.tiny import make_tiny

SOURCES = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def shell(
    arguments: str, redirections: str = "", data: bytes = b"", **environ: str
) -> subprocess.CompletedProcess[bytes]:
    command = f"{sys.executable} -m pagedec {arguments} {redirections}"
    return subprocess.run(
        command, shell=True, input=data, cwd=SOURCES, env=os.environ | environ, capture_output=True, timeout=120
    )


def test_text_is_utf_8_whatever_the_locale(tiny: Path) -> None:
    done = shell(f"tokenize --json --model {tiny} é", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == '{"text": "é", "token_ids": [127, 102], "count": 2}\n'.encode()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ["utf-8:surrogateescape", "utf-8:strict", "latin-1"])
def test_prompts_that_are_not_utf_8(encoding: str, tiny: Path) -> None:
    done = shell(f"generate --model {tiny}", data=b"ab\n\xff\n", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"pagedec: error: file is 'standard input': is not UTF-8: invalid start byte at byte 3\n"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("closed", "out"), [("<&-", b"64\n"), (">&-", b""), ("2>&-", b"64\n"), ("<&- >&- 2>&-", b"")])
def test_a_closed_stream_leads_nowhere(closed: str, out: bytes, tiny: Path) -> None:
    done = shell(f"tokenize a --model {tiny}", closed)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, b"")


def test_a_mark_before_the_first_line_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf/help\n\xef\xbb\xbf"), "ascii")
    for name in ("stdin", "__stdin__"):
        monkeypatch.setattr(sys, name, typed)
    console.open_streams()
    assert sys.stdin.readlines() == ["/help\n", "\ufeff"]


def test_nothing_to_read() -> None:
    done = shell("generate", "<&-")
    assert done.returncode == 2 and done.stderr.startswith(b"pagedec: error: prompts is empty: must be at least one")


def test_a_disk_that_takes_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main.main(["generate", "--temperature", "-1"]) == main.USER_ERROR


@pytest.mark.parametrize("asked", ["--version", "--help"])
def test_a_disk_that_takes_no_help(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main.main([asked]) == main.FAILED
    assert capsys.readouterr().err == "pagedec: error: the output cannot be written: No space left on device\n"


def test_a_bar_that_cannot_be_drawn_ends_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did, and a batch said with status 0 that it was done."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(sys, "__stderr__", full)
        command = ["generate", "ab", "ba", "--progress", "--max-tokens", "2", "--num-blocks", "8"]
        assert main.main([*command, "--load-format", "dummy", "--model", str(tiny)]) == console.DONE
        assert capsys.readouterr().out.count("--- 2 tokens") == 2


def test_a_profiler_of_a_newer_python_keeps_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """cProfile writes its file behind the program, which therefore must end as Python's programs do."""
    monitoring = types.SimpleNamespace(get_tool={2: "cProfile"}.get)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    monkeypatch.setattr(main, "main", lambda: 3)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("ended at once"))
    monkeypatch.setattr(sys, "getprofile", lambda: None)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main.command()
    assert caught.value.code == 3
