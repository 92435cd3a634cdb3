"""`pagedec serve` as a process: signals, drains, exit statuses, and what it logs."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedec.cli import main
from pagedec.cli.parser import Parser
from pagedec.cli.serve import add_arguments, recommending
from pagedec.client import Client
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc
from tests.engine.lora_models import Adapted
from tests.serve.serving import greedy, parameters, prompt, reason

SOURCES = Path(__file__).resolve().parents[2]
FEW_FILES = 256
"""That a shell gives to a server."""
ASKED = health_pb2.HealthCheckRequest(service="pagedec.v1.GenerationService")


class Process:
    """A server in a process of its own. `program`: what runs instead of `pagedec`."""

    def __init__(self, path: Path, *flags: str, program: Sequence[str] = ("-m", "pagedec")) -> None:
        command = [
            "sh", "-c", f'ulimit -S -n {FEW_FILES} && exec "$0" "$@"',
            sys.executable, *program, "serve", "--model", str(path), "--skip-tokenizer-init", "--port", "0",
            "--num-blocks", "1024", "--max-model-len", "16384", "--dtype", "float32", *flags,
        ]  # fmt: skip
        self.popen = subprocess.Popen(command, cwd=SOURCES, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.port = int(self.said(r"listening on 127\.0\.0\.1:(\d+) for clients")[1])
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    def said(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if (found := re.search(pattern, line)) is not None:
                    return found
            assert self.popen.poll() is None or self._reading.is_alive(), "".join(self.lines)
            time.sleep(0.01)
        raise AssertionError("".join(self.lines))

    def ready(self) -> Process:
        self.said("serving ")
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.popen.pid, number)

    def wait(self) -> int:
        status = self.popen.wait(30)
        self._reading.join()
        return status


@pytest.fixture
def started(tiny_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(*flags: str, **given: Any) -> Process:
        made.append(Process(tiny_path, *flags, **given))
        return made[-1]

    yield start
    for process in made:
        process.channel.close()
        process.popen.kill()
        process.popen.wait()


def long(num_tokens: int) -> pb.GenerateStreamRequest:
    own = parameters(num_tokens, temperature=0.0)
    own.stopping.ignore_eos = True
    return pb.GenerateStreamRequest(prompt=prompt([5, 9, 33]), parameters=own, client_request_id="long")


def test_a_drain(started: Callable[..., Process]) -> None:
    """Not serving; a grace in which requests are let in; then none; what runs ends, or is aborted; status 0."""
    process = started("--drain-grace", "1.0", "--drain-timeout", "1.0", "--log-format", "json").ready()
    soft, hard = resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE)
    assert soft == min(65536, hard) > FEW_FILES or hard == resource.RLIM_INFINITY, "each connection is an open file"
    endless = long(16000)
    endless.client_request_id = "endless"
    call = process.generation.GenerateStream(endless)
    watch = process.health.Watch(ASKED, timeout=30)
    assert next(call) and next(watch).status == 1
    short = process.generation.GenerateStream(long(30))
    next(short)  # the last one: it must still run now
    process.signal()
    assert next(watch).status == 2
    once = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2))
    assert process.generation.Generate(once).answers, "within the grace"
    deadline = time.monotonic() + 10
    with pytest.raises(grpc.RpcError) as caught:
        while time.monotonic() < deadline:
            process.generation.Generate(once)
            time.sleep(0.05)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "DRAINING"
    assert [answer.finish.reason for message in short for answer in message.finished] == [2], "what runs may end"
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "DRAINING", (
        "others go on with it"
    )
    watch.cancel()
    assert process.wait() == 0
    calls = [json.loads(line) for line in process.lines if line.startswith("{")]
    said = [entry["message"] for entry in calls if entry["logger"] == "pagedec.serve"]
    assert "draining: 2 requests; what runs may end within 1 s" in said
    assert "draining: 1 request left after 1 s, aborted" in said and said[-1] == "stopped"
    told = [entry for entry in calls if entry.get("request_ids")]
    assert any(name.endswith("/endless") for entry in told for name in entry["request_ids"])


def test_a_second_signal_ends_it_at_once(started: Callable[..., Process]) -> None:
    process = started("--drain-timeout", "600").ready()
    call = process.generation.GenerateStream(long(16000))
    next(call)
    watch = process.health.Watch(ASKED, timeout=30)
    next(watch)
    process.signal()
    assert next(watch).status == 2
    began = time.monotonic()
    process.signal()
    assert process.wait() == 1 and time.monotonic() - began < 20


SLOW = """
import sys, time
from pagedec.cli.main import main
from pagedec.llm import async_llm
class Slow(async_llm.AsyncLLM):
    def __init__(self, *given, **named):
        time.sleep(60)
async_llm.AsyncLLM = Slow
sys.exit(main(sys.argv[1:]))
"""
"""A model that takes long to load."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_it_at_once(started: Callable[..., Process], number: int) -> None:
    process = started(program=("-c", SLOW))
    with pytest.raises(grpc.RpcError) as caught:
        process.generation.Generate(pb.GenerateRequest(prompt=prompt([5]), parameters=greedy(2)))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "LOADING"
    assert process.health.Check(health_pb2.HealthCheckRequest()).status == 1 and process.health.Check(ASKED).status == 2
    began = time.monotonic()
    process.signal(number)
    assert process.wait() == 0 and time.monotonic() - began < 20
    assert not any("Traceback" in line for line in process.lines)


def test_a_signal_before_it_listens_is_heard(started: Callable[..., Process], tiny_path: Path) -> None:
    """As soon as the command runs, while libraries are still being imported: a container's first process gets no other
    one."""
    told = SLOW.replace("import sys, time", "import os, signal, sys, time\nfrom pagedec.cli import serve").replace(
        "sys.exit", "begin = serve._serve\n"
        "def early(*given):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return begin(*given)\n"
        "serve._serve = early\nsys.exit", 1
    )  # fmt: skip
    command = [sys.executable, "-c", told, "serve", "--model", str(tiny_path), "--port", "0"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_command_line_is_read_is_heard(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That alone takes a second where others compute. Other commands are ended as Python's programs are."""

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    told = list[int]()
    monkeypatch.setattr(main.os, "_exit", end)
    monkeypatch.setattr(main, "parser", lambda: os.kill(os.getpid(), number))
    before = signal.signal(number, lambda number, frame: told.append(number))
    try:
        with pytest.raises(Ended, match="^0$"):
            main.main(["serve", "--port", "0"])
        with pytest.raises(AttributeError):
            main.main(["health", "serve"])
    finally:
        signal.signal(number, before)
    assert told == [number]


BROKEN = """
import sys
from pagedec.cli.main import main
from pagedec.core.scheduler import Scheduler
class Gone(BaseException):
    pass
def fail(*given, **named):
    raise Gone("for good")
Scheduler.plan = fail
sys.exit(main(sys.argv[1:]))
"""


def test_an_engine_that_has_failed_for_good_ends_it_with_1(started: Callable[..., Process]) -> None:
    process = started("--probe-port", "0", program=("-c", BROKEN)).ready()
    with pytest.raises(grpc.RpcError) as caught:
        process.generation.Generate(pb.GenerateRequest(prompt=prompt([5]), parameters=greedy(2)), timeout=30)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    assert process.wait() == 1
    assert "pagedec: error: the engine has failed; its log says why\n" in process.lines
    place = [i for i, line in enumerate(process.lines) if line.endswith(" error the engine has failed\n")]
    assert len(place) == 1 and process.lines[place[0] + 1].startswith('  File "') and "Gone\n" in process.lines
    assert not any("Traceback" in line or "Exception in thread" in line for line in process.lines)


def configured(tmp_path: Path, text: str, *flags: str) -> EngineConfig:
    file, parser = tmp_path / "engine.toml", Parser()
    file.write_text(text)
    add_arguments(parser)
    return recommending(parser.parse_args(["--config", str(file), *flags]))


def test_the_table_sampling_of_the_file_is_what_the_server_recommends(
    started: Callable[..., Process], tmp_path: Path
) -> None:
    """Nothing is left to drain then, and it ends at once."""
    file = tmp_path / "engine.toml"
    file.write_text("seed = 5\n[sampling]\ntemperature = 0.25\ntop_k = 7\nmax_tokens = 3\n")
    process = started("--config", str(file), "--override-generation-config", '{"top_k": 9}').ready()
    with Client(f"127.0.0.1:{process.port}") as client:
        own = client.get_default_sampling_params()
        [output] = client.generate([[5, 9]], use_tqdm=False)
    assert (own.temperature, own.top_k, own.max_tokens) == (0.25, 9, 3)
    assert len(output.outputs[0].token_ids) == 3
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    assert not any("aborted" in line or "Traceback" in line for line in process.lines)
    assert any("draining: 0 requests" in line for line in process.lines) and "stopped" in process.lines[-1]
    both = "override_generation_config = {top_k = 4, top_p = 0.5}\n[sampling]\ntop_k = 7\n"
    assert configured(tmp_path, both).model.override_generation_config == {"top_k": 7, "top_p": 0.5}
    assert configured(tmp_path, "seed = 5\n").model.override_generation_config is None


def test_what_a_server_cannot_recommend_is_refused(tmp_path: Path) -> None:
    said = (
        r"^n is 3: must not be in the table \[sampling\] of .*engine.toml: .*--override-generation-config takes: temp"
    )
    with pytest.raises(InvalidArgument, match=said):
        configured(tmp_path, "[sampling]\nn = 3\n")


def refused_port(tiny_path: Path, *flags: str, **environ: str) -> tuple[list[str], str]:
    """The lines of a server that finds its port taken, and what it says of that."""
    own = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | environ
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "pagedec", "serve", "--model", str(tiny_path), "--port", str(port), *flags]
        done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=60, env=own)
    assert done.returncode == 2
    said = f"pagedec: error: port is {port}: cannot be listened on at 127.0.0.1: Address already in use"
    return done.stderr.splitlines(), said


def refusal_of(tiny_path: Path, *flags: str) -> tuple[int, str]:
    """How a server has ended that cannot start, and its last line."""
    command = [sys.executable, "-m", "pagedec", "serve", "--model", str(tiny_path), "--skip-tokenizer-init", *flags]
    done = subprocess.run([*command, "--port", "0"], cwd=SOURCES, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()[-1]


def test_adapters_of_the_command_line(started: Callable[..., Process], tiny_path: Path, tmp_path: Path) -> None:
    """--lora has the engine take them; what is wrong with one stands in one line, and nothing is served."""
    lora = Adapted(tiny_path, tmp_path).write("tuned", 8, seed=1)
    process = started("--lora", f"tuned={lora.lora_path}", "--lora", f"twin={lora.lora_path}", "--max-loras", "2")
    process.said(r"serving .*, tuned, twin$")
    answers = [
        process.generation.Generate(pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(4), model=name))
        for name in ("tuned", "twin")
    ]
    assert answers[0].answers == answers[1].answers
    process.signal()
    assert process.wait() == 0
    missing, folder = f"tuned={tmp_path}/no", str(tmp_path)
    for flags, said in (
        (("--lora", missing), f"lora is {missing}: {tmp_path}/no: does not exist"),
        (("--lora", "tuned"), "lora is tuned: must be NAME=PATH, the path that of"),
        (("--lora", "a=b", "--no-enable-lora"), "lora is [a=b]: must not be given with --no-enable-lora"),
        (("--lora-dir", folder), "admin_port is none: must be given, since lora_dir is"),
    ):
        status, line = refusal_of(tiny_path, *flags)
        assert status == 2 and line.replace("'", "").startswith(f"pagedec: error: {said}"), line


def test_a_port_that_is_taken_is_one_line(tiny_path: Path) -> None:
    """And gRPC's own library has none beside it: a stranger could have it write until a pipe that nobody reads is full,
    and it waits for that."""
    lines, said = refused_port(tiny_path)
    assert lines == [said]


@pytest.mark.long
def test_nobody_writes_between_lines_of_json(tiny_path: Path) -> None:
    lines, said = refused_port(tiny_path, "--log-format", "json")
    assert lines == [said]


@pytest.mark.long
def test_nobody_does_unless_he_is_asked_to(tiny_path: Path) -> None:
    lines, said = refused_port(tiny_path, "--log-format", "json", GRPC_VERBOSITY="ERROR")
    assert lines[-1] == said and any("Failed to add port" in line for line in lines[:-1])
