"""The load generator: when requests are sent, what is made of their outcomes, and the command."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedec.cli import bench_serve
from pagedec.errors import InvalidArgument
from pagedec.serve.load import Outcome, parse_goals, start_times, summary
from tests.serve.certificates import Authority
from tests.serve.serving import Serving

ROOT = Path(__file__).parents[2]
Serve = Callable[..., Serving]


def test_starts_are_a_poisson_process() -> None:
    starts = start_times(20_000, 50.0, 1.0, 1)
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert starts[0] == 0 and mean == pytest.approx(1 / 50, rel=0.03)
    assert variance**0.5 / mean == pytest.approx(1.0, abs=0.05), "of exponential gaps it is 1"
    even = start_times(2000, 50.0, 100.0, 1)
    assert max(b - a for a, b in zip(even, even[1:], strict=False)) < 2 / 50
    assert start_times(3, 0.0, 1.0, 1) == [0.0, 0.0, 0.0]


def test_times_of_an_outcome() -> None:
    outcome = Outcome(10.0, 10.5, 14.0, 7, [(11.0, 1), (12.0, 4), (13.0, 4)])
    assert (outcome.ttft, outcome.tpot, outcome.e2el, outcome.gaps) == (1.0, 0.25, 4.0, [1.0, 1.0])
    assert outcome.meets({"ttft": 1.0, "tpot": 0.25, "e2el": 4.0}) and not outcome.meets({"ttft": 0.9})
    one = Outcome(10.0, 10.0, 11.0, 7, [(11.0, 1)])
    assert one.tpot is None and one.meets({"tpot": 0.1})


def test_a_summary_counts_what_was_not_answered() -> None:
    outcomes = [Outcome(0.0, 0.0, 2.0, 3, [(1.0, 1), (2.0, 1)]), Outcome(1.0, 1.0, 4.0, 0, [], "RESOURCE_EXHAUSTED")]
    found = summary(outcomes, {"ttft": 1.5})
    assert (found["duration"], found["completed"], found["failed"]) == (4.0, 1, 1)
    assert found["errors"] == {"RESOURCE_EXHAUSTED": 1} and found["request_goodput"] == 0.25
    assert (found["median_ttft_ms"], found["mean_tpot_ms"], found["p99_e2el_ms"]) == (1000.0, 1000.0, 2000.0)
    assert summary([], {})["request_throughput"] == 0


def test_goals_are_in_milliseconds() -> None:
    assert parse_goals(["ttft:200", "e2el:1500.5"]) == {"ttft": 0.2, "e2el": 1.5005}
    for wrong in ("ttft", "ttft:", "ttft:-1", "ttft:0", "itl:3", "ttft:nan"):
        with pytest.raises(InvalidArgument, match="goodput"):
            parse_goals([wrong])


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagedec", "bench", "serve", *flags]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False
    )


def test_the_command_sends_what_it_says(text_server: Serving, tmp_path: Path) -> None:
    address, prompts = f"127.0.0.1:{text_server.server.port}", tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "One two three"}\n\n{"prompt": "Four"}\n', encoding="utf-8")
    flags = {
        "address": address, "num-prompts": 9, "request-rate": 200, "max-concurrency": 3, "dataset-path": prompts,
        "output-len": 20, "goodput": "ttft:60000", "stream-interval": 4, "temperature": 0.5,
        "result": tmp_path / "r.json", "plot": tmp_path / "r.png",
    }  # fmt: skip
    done = bench("--json", *(text for name, value in flags.items() for text in (f"--{name}", str(value))))
    result = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 0 and json.loads(done.stdout)["completed"] == 9, done.stderr
    assert result["total_output_tokens"] == 180 and result["total_input_tokens"] == 5 * 3 + 4
    assert [sum(count for _, count in request["arrivals"]) for request in result["requests"]] == [20] * 9
    assert result["request_goodput"] == result["request_throughput"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_random_prompts_and_a_server_that_refuses(serve: Serve) -> None:
    """The tiny model's vocabulary is smaller than random prompts need."""
    flags = ["--num-prompts", "8", "--input-len", "200", "--result", "/dev/full"]
    done = bench("--address", f"127.0.0.1:{serve().server.port}", *flags)
    assert done.returncode == 1 and "INVALID_ARGUMENT" in done.stdout, done.stderr
    told, lost = done.stderr.splitlines()
    assert re.fullmatch(r"pagedec: INVALID_ARGUMENT: prompt.*: token ids must be from 0 to 130", told)
    assert lost == "pagedec: error: result is /dev/full: cannot be written: No space left on device"
    units = {"duration": "s", "request throughput": "requests/s", "output throughput": "tokens/s"}
    for name, unit in (units | {"request goodput": "requests/s"}).items():
        assert re.search(rf"^{name} \({unit}\) +[0-9.]+$", done.stdout, re.M), done.stdout


def test_a_server_with_tls_and_tokens(serve: Serve, tmp_path: Path) -> None:
    ours, clients = Authority("ours"), Authority("clients")
    cert, key = ours.write("server", tmp_path)
    own, own_key = clients.write("ada", tmp_path)
    files = {"ca": ours.pem, "clients": clients.pem, "keys": b'[ada]\ntokens = ["sixteencharacters"]\n'}
    paths = {name: tmp_path / name for name in files}
    for name, data in files.items():
        paths[name].write_bytes(data)
    (tmp_path / "token").write_text("sixteencharacters\n")
    serving = serve(
        tls_cert=cert, tls_key=key, tls_client_ca=str(paths["clients"]), api_keys=str(paths["keys"])
    )  # fmt: skip
    flags = ["--address", f"127.0.0.1:{serving.server.port}", "--num-prompts", "2", "--input-len", "9"]
    known = ["--tls-ca", str(paths["ca"]), "--tls-cert", own, "--tls-key", own_key]
    done = bench(*flags, *known, "--token-file", str(tmp_path / "token"))
    assert "UNAVAILABLE" not in done.stdout and "UNAUTHENTICATED" not in done.stdout, done.stdout + done.stderr
    assert "UNAUTHENTICATED" in bench(*flags, *known).stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--request-rate", "-1"], "request_rate is"),
        (["--goodput", "ttft"], "goodput is ttft: must be one of ttft, tpot, e2el"),
        (["--dataset-path", "/nowhere"], "dataset_path is /nowhere: cannot be read"),
        (["--n", "3"], "n is 3: must not be given"),
        (["--tls-ca", "/nowhere"], "tls_ca is /nowhere: cannot be read: No such file or directory"),
        (["--result", "/nowhere/r.json"], "result is /nowhere/r.json: cannot be written"),
    ],
)
def test_mistakes(flags: list[str], said: str) -> None:
    done = bench(*flags)
    assert done.returncode == 2 and said in done.stderr


def test_files_that_will_not_be_written_are_told_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there may be written to in a folder that may not."""
    (tmp_path / "there").touch()
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    for flags, limit in (
        (["--result", str(tmp_path)], "must be a file that may be written to"),
        (["--plot", str(tmp_path / "r.jpog")], "must be the name of a picture, which ends in .png"),
        (["--plot", str(tmp_path / "r.png" / "r.png")], "r.png must be a directory that may be written to"),
    ):
        with pytest.raises(InvalidArgument, match=limit):
            bench_serve.run(parser.parse_args(flags))
    own = str(tmp_path / "there")
    monkeypatch.setattr(bench_serve.os, "access", lambda path, mode: path == own)
    bench_serve._check_place("result", own)
    with pytest.raises(InvalidArgument, match="must be a directory that may be written to"):
        bench_serve._check_place("result", f"{own}.too")
    monkeypatch.setattr(bench_serve.os, "access", lambda path, mode: path == tmp_path)
    with pytest.raises(InvalidArgument, match="must be a file that may be written to"):
        bench_serve._check_place("result", own)
