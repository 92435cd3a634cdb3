"""Asking failed lines again: their records are replaced, all others stay, whenever the job is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.batch import BatchJob, journal, run_batch
from pagedec.batch.journal import Journal, OutputError
from pagedec.batch.replies import as_line
from pagedec.cli import main
from pagedec.config import ModelConfig
from pagedec.errors import InvalidArgument
from tests.batch.files import read_output, request, stable, write_input
from tests.batch.test_job import BAD, good_lines, texts
from tests.batch.test_kill import ENGINE, num_lines, start

DEFAULTS = {"max_tokens": 4}


def mixed(count: int) -> list[Any]:
    """Good lines, and between them bad ones of every kind."""
    lines: list[Any] = [*good_lines(count)]
    for i, bad in enumerate(BAD):
        lines.insert(2 * i + 1, bad)
    return lines


def mended(lines: list[Any]) -> list[Any]:
    """The same lines, and good ones in the places of all bad ones but the last."""
    return [request(f"mended {i}", prompt=f"line {i}") if line in BAD[:-1] else line for i, line in enumerate(lines)]


def failed(path: Path) -> list[int]:
    """The numbers of the lines that have error records."""
    found = [one for one in read_output(path) if one["error"] or one["response"]["status_code"] != 200]
    return [int(one["id"].split("-")[1]) for one in found]


def good_data(data: bytes) -> bytes:
    return b"".join(line + b"\n" for line in data.splitlines() if b'"status_code": 200' in line)


def test_mended_lines_are_asked_again_and_the_rest_is_kept(llm: LLM, tmp_path: Path) -> None:
    lines = mixed(24)
    source, out = write_input(tmp_path / "in", lines), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    out.chmod(0o640)
    before = out.read_bytes()
    bad = [number for number, line in enumerate(lines, start=1) if line in BAD]
    assert failed(out) == bad
    again = run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)
    assert (again.num_answered_before, again.num_answered, again.num_errors) == (24, len(BAD), len(BAD))
    assert failed(out) == bad and out.read_bytes().startswith(good_data(before)), "the same faults"
    write_input(source, mended(lines))
    with pytest.raises(InvalidArgument, match="line 2 is not the one that .* has an answer to"):
        run_batch(llm, source, out, defaults=DEFAULTS)
    done = run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)
    assert (done.num_answered_before, done.num_answered, done.num_errors) == (24, len(BAD), 1)
    assert failed(out) == bad[-1:] and out.read_bytes().startswith(good_data(before))
    assert stat.S_IMODE(out.stat().st_mode) == 0o640 and sorted(os.listdir(tmp_path)) == ["in", "out"]
    run_batch(llm, source, tmp_path / "whole", defaults=DEFAULTS)
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(tmp_path / "whole")))


def test_failed_lines_may_be_gone_and_answered_ones_may_not(llm: LLM, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", [*good_lines(2), "bad", "worse"]), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    write_input(source, [*good_lines(2), ""])
    done = run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)
    assert (done.num_lines, done.num_answered, done.num_errors) == (2, 0, 0) and failed(out) == []
    write_input(source, [good_lines(1)[0], request("r1", prompt="changed")])
    with pytest.raises(InvalidArgument, match="line 2 is not the one that .* has an answer to"):
        run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)


def test_other_settings_are_noticed_by_what_is_kept_alone(llm: LLM, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", [request("a", prompt="x", model="gpt-4")]), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    done = run_batch(llm, source, out, defaults=DEFAULTS, any_model=True, retry_failed=True)
    assert (done.num_answered, done.num_errors) == (1, 0) and len(texts(read_output(out)[0])) == 1
    with pytest.raises(InvalidArgument, match="was begun with another model, .* or start over with restart=True$"):
        run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)


def test_nothing_that_failed_is_nothing_to_do(llm: LLM, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", good_lines(3)), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    before = out.read_bytes(), out.stat().st_ino
    with BatchJob(source, out, model=llm.config.model, defaults=DEFAULTS, retry_failed=True) as job:
        assert job.complete
    assert (out.read_bytes(), out.stat().st_ino) == before


def test_a_retry_that_never_runs_loses_nothing(llm: LLM, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", ["bad", *good_lines(2)]), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    before = out.read_bytes()
    with BatchJob(source, out, model=llm.config.model, defaults=DEFAULTS, retry_failed=True) as job:
        assert not job.complete and not job.begun and (job.num_done, job.num_errors) == (2, 0)
    assert out.read_bytes() == before


def test_not_with_restart(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", good_lines(1))
    with pytest.raises(InvalidArgument, match="^retry_failed is True: restart=True forgets all answers; give one of"):
        BatchJob(source, tmp_path / "out", model=ModelConfig("m"), restart=True, retry_failed=True)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------- the file
def record(number: int, status: int) -> dict[str, Any]:
    name = f"line-{number}-{number:016x}-{0:08x}"
    return {"id": name, "custom_id": str(number), "response": {"status_code": status, "body": {}}, "error": None}


def write_records(path: Path) -> bytes:
    """Three records, the second one an error."""
    path.write_bytes(b"".join(as_line(record(number, status)) for number, status in ((1, 200), (2, 400), (3, 200))))
    return path.read_bytes()


def test_a_kill_between_the_copy_and_its_place_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = write_records(path)
    child = os.fork()
    if child == 0:
        journal.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
        try:
            Journal(path, retry_failed=True).begin()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before and len(os.listdir(tmp_path)) == 2
    retried = Journal(path, retry_failed=True)
    retried.append(record(2, 200))
    retried.close()
    assert path.read_bytes() == good_data(before) + as_line(record(2, 200)) and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("call", ["replace", "fsync", "fchmod"])
def test_a_copy_that_fails_leaves_the_file_as_it_was(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = write_records(tmp_path / "out")
    retried = Journal(tmp_path / "out", retry_failed=True)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match="cannot be replaced: No space left on device"):
        retried.begin()
    monkeypatch.undo()
    assert retried.stale and (tmp_path / "out").read_bytes() == before and os.listdir(tmp_path) == ["out"]
    retried.close()


def test_the_lock_goes_to_the_new_file(tmp_path: Path) -> None:
    write_records(tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    retried = Journal(tmp_path / "link", retry_failed=True)
    retried.begin()
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(InvalidArgument, match="another job is writing it"):
        Journal(tmp_path / "out")
    retried.close()
    Journal(tmp_path / "out").close()


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, path, other = journal._lock, tmp_path / "out", tmp_path / "other"
    write_records(path)
    other.write_bytes(as_line(record(7, 200)))

    def late(fd: int, name: Path) -> None:
        if other.exists():
            os.replace(other, path)
        lock(fd, name)

    monkeypatch.setattr(journal, "_lock", late)
    opened = Journal(path)
    opened.append(record(8, 200))
    opened.close()
    assert path.read_bytes() == as_line(record(7, 200)) + as_line(record(8, 200))


# -------------------------------------------------------------------------------------------------------------- kills
def kill_once_retried(process: subprocess.Popen[str], out: Path, old: int, count: int) -> None:
    """Kill the job once its output is another file than `old`, with so many lines."""
    deadline = time.monotonic() + 600
    while (out.stat().st_ino == old or num_lines(out) < count) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def check_kills(tiny: Path, llm: LLM, place: Path, num_good: int, num_bad: int, num_kills: int) -> None:
    flags = ["--model", str(tiny), *ENGINE, "--max-tokens", "24", "--window", "1"]
    lines: list[Any] = [*good_lines(num_good)]
    for i in range(num_bad):
        lines.insert(2 * i, request(f"b{i}", prompt="x" * 40_000))
    source, out = write_input(place / "in", lines), place / "out"
    run_batch(llm, source, out, defaults={"max_tokens": 24})
    kept = good_data(out.read_bytes())
    fixed = [request(one["custom_id"], prompt="y") if len(json.dumps(one)) > 40_000 else one for one in lines]
    write_input(source, fixed)
    for kill in range(num_kills):  # from the second on nothing has failed any more, and the rest is gone on with
        old = out.stat().st_ino if kill == 0 else -1
        target = num_good + (kill + 1) * num_bad // (num_kills + 1)
        kill_once_retried(start(source, out, *flags, "--retry-failed"), out, old, target)
        assert out.read_bytes().startswith(kept)
    done = start(source, out, *flags, debug=True)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0 and ", 0 with errors; " in err, err
    run_batch(llm, source, place / "whole", defaults={"max_tokens": 24})
    assert out.read_bytes().startswith(kept) and len(read_output(out)) == num_good + num_bad
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(place / "whole")))


@pytest.mark.long
def test_a_killed_retry_goes_on(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    check_kills(tiny, llm, tmp_path, 40, 30, 1)


@pytest.mark.long
def test_five_kills_of_a_retry(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    check_kills(tiny, llm, tmp_path, 500, 400, 5)


def test_wherever_a_retry_was_killed_it_ends_as_if_it_had_not_been(llm: LLM, tmp_path: Path) -> None:
    """What it leaves is the records that were kept, and behind them a part of what was to come."""
    lines = mixed(20)
    source, out = write_input(tmp_path / "in", lines), tmp_path / "out"
    run_batch(llm, source, out, defaults=DEFAULTS)
    kept = len(good_data(out.read_bytes()))
    write_input(source, mended(lines))
    run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=True)
    expected, data = list(map(stable, read_output(out))), out.read_bytes()
    dice = random.Random(0)
    for size in [kept, kept + 1, len(data) - 1, *(dice.randrange(kept, len(data)) for _ in range(6))]:
        out.write_bytes(data[:size])
        run_batch(llm, source, out, defaults=DEFAULTS, retry_failed=dice.random() < 0.5)
        assert list(map(stable, read_output(out))) == expected


# -------------------------------------------------------------------------------------------------------- the command
def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_input(tmp_path / "in", [request("a", prompt="x"), "bad"]), tmp_path / "out"
    command = ["batch", "-i", str(source), "-o", str(out), "--max-tokens", "2", "--model", str(tiny), *ENGINE]
    assert main.main(command) == 0
    write_input(source, [request("a", prompt="x"), request("b", prompt="y")])
    assert main.main([*command, "--restart", "--retry-failed"]) == main.USER_ERROR
    assert capsys.readouterr().err.splitlines()[-1] == (
        "pagedec: error: retry_failed is true: --restart forgets all answers; give one of the two"
    )
    assert main.main([*command, "--retry-failed"]) == 0
    assert "pagedec: 2 lines answered, 1 of them before, 0 with errors; 1 line and " in capsys.readouterr().err
    assert main.main([*command, "--retry-failed"]) == 0
    told = f"pagedec: nothing to do: all 2 lines are answered in {out}, 0 with errors\n"
    assert capsys.readouterr().err == told
