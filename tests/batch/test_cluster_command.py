"""`pagedec batch --ray` as a command, killed, interrupted, and with engines that are killed or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM
from pagedec.batch import run_batch
from tests.batch.files import read_output, write_input
from tests.batch.test_job import BAD, good_lines
from tests.batch.test_kill import ENGINE, check, kill_after, num_lines, start
from tests.support import wait_for

ray = pytest.importorskip("ray", reason="ray is not installed")
LINES: list[Any] = [*good_lines(120), *BAD]
DEFAULTS = {"max_tokens": 24}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One that outlives the commands, as one of several machines does."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield
    made.shutdown()


@pytest.fixture
def expected(llm: LLM, tmp_path: Path) -> list[dict[str, Any]]:
    run_batch(llm, write_input(tmp_path / "in", LINES), tmp_path / "whole", defaults=DEFAULTS)
    return read_output(tmp_path / "whole")


def begin(tiny: Path, place: Path, *flags: str) -> subprocess.Popen[str]:
    engine = ("--model", str(tiny), *ENGINE, "--max-tokens", str(DEFAULTS["max_tokens"]))
    return start(place / "in", place / "out", *engine, "--ray", "--replicas", "2", "--window", "4", *flags)


def engines() -> list[int]:
    """The processes that are engines of a job now."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            title, state = (place / "cmdline").read_bytes(), (place / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if title.startswith(b"ray::_Engine") and state != "Z":
            found.append(int(place.name))
    return found


@pytest.mark.long
def test_a_job_is_killed_interrupted_and_ended(tiny: Path, tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    kill_after(begin(tiny, tmp_path), tmp_path / "out", 25)
    wait_for(lambda: not engines())
    held = num_lines(tmp_path / "out")
    process = begin(tiny, tmp_path)
    wait_for(lambda: num_lines(tmp_path / "out") > held + 20 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on with the rest" in told
    wait_for(lambda: not engines())
    process = begin(tiny, tmp_path)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert f"{len(LINES)} lines answered" in told
    check(read_output(tmp_path / "out"), expected, len(BAD))
    wait_for(lambda: not engines())


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_is_lost(tiny: Path, tmp_path: Path, expected: list[dict[str, Any]], number: signal.Signals) -> None:
    """By a signal; one that is stopped is noticed when it has not answered for step_timeout. One line at a time, or the
    job might be over before."""
    process = begin(tiny, tmp_path, "--step-timeout", "5", "--max-num-seqs", "1")
    wait_for(lambda: num_lines(tmp_path / "out") > 10 or process.poll() is not None)
    lost = engines()
    assert lost
    os.kill(lost[0], number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "an engine is lost" in told
    check(read_output(tmp_path / "out"), expected, len(BAD))
    wait_for(lambda: not engines())


@pytest.mark.long
def test_engines_of_two_ranks(tiny: Path, tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    """Both in processes of one actor, and in actors of their own; on one engine, since there are two processors."""
    for executor in ("process", "ray"):
        out = tmp_path / executor
        engine = ("--model", str(tiny), *ENGINE, "--max-tokens", "24", "--tensor-parallel-size", "2")
        flags = (*engine, "--executor", executor, "--num-threads", "1", "--dtype", "float32", "--ray")
        process = start(tmp_path / "in", out, *flags)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
        texts = [
            json.dumps(record["response"]["body"].get("choices")) for record in read_output(out) if record["response"]
        ]
        assert len(texts) == len([record for record in expected if record["response"]])
