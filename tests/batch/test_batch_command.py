"""`pagedec batch`: flags, messages, exit statuses."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from pagedec.batch import progress
from pagedec.batch.feeder import Feeder
from pagedec.batch.job import BatchJob
from pagedec.batch.journal import Journal
from pagedec.cli import main
from tests.batch.files import read_output, request, write_input
from tests.batch.test_kill import ENGINE, num_lines, start


@pytest.fixture
def flags(tiny: Path) -> list[str]:
    return ["--model", str(tiny), *ENGINE]


def run(source: Path, out: Path, *flags: str) -> int:
    return main.main(["batch", "-i", str(source), "-o", str(out), *flags])


def test_a_job_and_then_nothing_to_do(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [request("a", prompt="x"), request("b", prompt="x", max_tokens=5), "bad"]
    source, out = write_input(tmp_path / "in", lines), tmp_path / "out"
    assert run(source, out, "--max-tokens", "2", "--temperature", "0", *flags) == 0
    shown, err = capsys.readouterr()
    assert shown == ""
    assert "pagedec: 3 lines answered, 1 with errors; 3 lines and 7 tokens in " in err
    usages = [record["response"]["body"]["usage"] for record in read_output(out)[:2]]
    assert [usage["completion_tokens"] for usage in usages] == [2, 5]
    assert run(source, out, "--max-tokens", "2", "--temperature", "0", *flags) == 0
    assert capsys.readouterr().err == (f"pagedec: nothing to do: all 3 lines are answered in {out}, 1 with errors\n")
    assert run(source, out, "--max-tokens", "3", "--temperature", "0", *flags) == main.USER_ERROR
    err = capsys.readouterr().err
    assert "was begun with another model, seed or other sampling parameters" in err and len(err.splitlines()) == 1
    assert err.endswith("give the same, name another file, or start over with --restart\n")
    assert run(source, out, "--max-tokens", "3", "--temperature", "0", "--restart", *flags) == 0
    assert read_output(out)[0]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("flag", ["--restart", "--retry-failed"])
def test_somebody_else_s_file_is_not_written_over(
    flag: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, notes = write_input(tmp_path / "in", [request("a", prompt="x")]), tmp_path / "notes"
    notes.write_text("my notes\n")
    assert run(source, notes, flag, *flags) == main.USER_ERROR
    assert notes.read_text() == "my notes\n"
    assert capsys.readouterr().err == (
        f"pagedec: error: output is {notes}: line 1 is no record of a batch; name another file, this one stays as it "
        "is\n"
    )


@pytest.mark.parametrize(("flag", "bar", "lines"), [([], 0, 1), (["--progress"], 1, 0), (["--no-progress"], 0, 0)])
def test_a_log_gets_lines_and_a_bar_if_asked_for(
    flag: list[str],
    bar: int,
    lines: int,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    source = write_input(tmp_path / "in", [request("a", prompt="x", max_tokens=2)])
    assert run(source, tmp_path / "out", *flag, *flags) == 0
    err = capsys.readouterr().err
    assert (("\r" in err) == bool(bar)) and (("1 of 1 lines (100%), 0 with errors; " in err) == bool(lines))


def test_defaults_from_a_file(flags: list[str], tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[sampling]\nmax_tokens = 3\ntemperature = 0\n")
    source = write_input(tmp_path / "in", [request("a", prompt="x")])
    assert run(source, tmp_path / "out", "--config", str(config), *flags) == 0
    assert read_output(tmp_path / "out")[0]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: -i/--input, -o/--output"),
        (["-i", "none", "-o", "out"], "input is none: cannot be read: No such file or directory"),
        (["-i", "none", "-o", "out", "--window", "0"], "window is 0: must be a whole number from 1"),
        (["-i", "none", "-o", "out", "--top-p", "2"], "top_p is "),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["batch", *arguments]) == main.USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith(f"pagedec: error: {message}") and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_two_jobs_on_one_output(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in", [request("a", prompt="x")])
    held = Journal(tmp_path / "out")
    assert run(source, tmp_path / "out", *flags) == main.USER_ERROR
    assert "another job is writing it" in capsys.readouterr().err
    held.close()


def test_a_full_disk(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in", [request(f"r{i}", prompt="x", max_tokens=2) for i in range(9)])
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        assert run(source, out, *flags) == main.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    count = len(read_output(out))
    assert 0 < count < 9
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"pagedec: error: {out}: cannot be written: File too large; {count} of 9 lines are answered in {out}; "
        "the same command goes on with the rest"
    )
    assert run(source, out, *flags) == 0
    assert len(read_output(out)) == 9


def test_a_disk_that_fails_at_the_end(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    source, out = write_input(tmp_path / "in", [request("a", prompt="x", max_tokens=2)]), tmp_path / "out"
    monkeypatch.setattr(os, "fsync", full)
    assert run(source, out, *flags) == main.FAILED
    assert f"pagedec: error: {out}: cannot be written: No space left on device; 1 of 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, main.INTERRUPTED), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"]
)
def test_signals(
    number: signal.Signals, status: int, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", [request(f"r{i}", prompt="x", max_tokens=20) for i in range(60)])
    out = tmp_path / "out"

    def interrupt() -> None:
        while num_lines(out) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own where a test before this one started it
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run(source, out, "--window", "1", *flags) == status
    assert signal.getsignal(signal.SIGTERM) is before
    thread.join()
    count = len(read_output(out))
    left = f"pagedec: interrupted: {count} of 60 lines are answered in {out}; the same command goes on with the rest"
    assert 2 <= count < 60 and capsys.readouterr().err.splitlines()[-1] == left
    assert run(source, out, *flags) == 0
    assert f"pagedec: 60 lines answered, {count} of them before, 0 with errors; " in capsys.readouterr().err


def test_after_a_restart_the_same_command_would_start_over(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    source, out = write_input(tmp_path / "in", [request("a", prompt="x")]), tmp_path / "out"
    monkeypatch.setattr(BatchJob, "run", interrupted)
    assert run(source, out, "--restart", *flags) == main.INTERRUPTED
    assert capsys.readouterr().err.endswith(f"pagedec: interrupted: {out} is as it was\n")
    monkeypatch.undo()
    monkeypatch.setattr(Feeder, "add", interrupted)
    assert run(source, out, "--restart", *flags) == main.INTERRUPTED
    assert capsys.readouterr().err.endswith("the same command without --restart goes on with the rest\n")


def test_messages_that_nobody_reads_stop_nothing(flags: list[str], tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [request("a", prompt="x", max_tokens=2), "bad"])
    process = start(source, tmp_path / "out", *flags)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert len(read_output(tmp_path / "out")) == 2
