"""Two hundred clients that cancel, vanish, hurry, crawl and err, for minutes: nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pagedec.v1 import admin_service_pb2 as pb
from pagedec.v1 import admin_service_pb2_grpc

ROOT = Path(__file__).parents[2]
ACTIONS = (
    "ask", "stream", "cancel", "hurry", "crawl", "flood", "mistake", "hold", "forget", "interrupt", "snatch",
)  # fmt: skip
FLAGS = (
    "--port", "0", "--admin-port", "0", "--skip-tokenizer-init", "--dtype", "float32", "--num-blocks", "96",
    "--max-model-len", "256", "--max-requests", "120", "--send-timeout", "20", "--log-level", "info",
)  # fmt: skip


@contextmanager
def served(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A server in a process of its own, its address and its admin address."""
    environment = {**os.environ, "PAGEDEC_DEBUG": "1"}
    command = [sys.executable, "-m", "pagedec", "serve", "--model", str(model), *FLAGS]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stderr=out, env=environment)
    try:
        while " serving " not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.05)
        addresses = re.findall(r"listening on (\S+)", text)
        yield process, addresses[0], addresses[1]
    finally:
        process.kill()
        process.wait()


def clients(address: str, seed: int, seconds: float, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.serve.chaos_client", address, str(seed), str(seconds), str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Counter[str]:
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return Counter(json.loads(out))


def memory(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def settled(address: str) -> pb.GetStatsResponse:
    """The server's counts when nothing runs any more."""
    with grpc.insecure_channel(address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        for _ in range(600):
            stats: pb.GetStatsResponse = stub.GetStats(pb.GetStatsRequest(), timeout=10)
            if not (stats.num_running or stats.num_waiting or stats.num_sessions):
                return stats
            time.sleep(0.05)
    raise AssertionError(f"requests run, or sessions live, that nobody waits for: {stats}")


def chaos(model: Path, log: Path, rounds: int, seconds: float, processes: int, count: int) -> Counter[str]:
    """Rounds of clients, `count` in each process; in each round some processes are killed in the middle."""
    rng, counts = random.Random(1), Counter[str]()
    with served(model, log) as (server, address, admin):
        sizes, files = [], []
        for turn in range(rounds):
            running = [clients(address, 100 * turn + i, seconds, count) for i in range(processes)]
            time.sleep(seconds * (0.5 + 0.4 * rng.random()))
            victims = rng.sample(running, processes // 2)
            for victim in victims:
                victim.kill()
            for process in running:
                if process in victims:
                    process.communicate()
                else:
                    counts += ended(process)
            stats = settled(admin)
            assert stats.num_blocks_used == stats.num_blocks_leaked == 0, "blocks are held that nobody has"
            assert stats.num_parked_branches == 0, "branches are held that no session has"
            sizes.append(memory(server.pid))
            files.append(num_files(server.pid))
        counts += ended(clients(address, 7, 1.0, count))
        if rounds > 3:
            assert sizes[-1] < 1.1 * sizes[1], f"memory grows: {sizes}"
            assert files[-1] <= files[1] + 8, f"files are left open: {files}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()[-3000:]
    assert "Traceback" not in log.read_text(), log.read_text()[-5000:]
    return counts


@pytest.mark.long
def test_clients_that_vanish(tiny_path: Path, tmp_path: Path) -> None:
    counts = chaos(tiny_path, tmp_path / "log", 1, 3.0, 2, 24)
    assert all(counts[name] for name in ("ask", "stream", "hold", "forget", "interrupt", "snatch"))


@pytest.mark.long
def test_some_minutes_of_chaos(tiny_path: Path, tmp_path: Path) -> None:
    counts = chaos(tiny_path, tmp_path / "log", 6, 30.0, 5, 40)
    assert all(counts[name] > 20 for name in ACTIONS)
