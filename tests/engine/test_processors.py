"""How many threads there are where nobody says so, in containers made up for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec.config import ParallelConfig
from pagedec.runtime import processors
from pagedec.runtime.loading import choose_backend
from pagedec.runtime.processors import default_threads, quota

V2 = {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/docker/c0ffee\n3:memory:/docker/c0ffee",
    "proc/self/mountinfo": "35 31 0:32 /docker/c0ffee /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 /docker/c0ffee /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
}


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "_told", None)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "given", "threads"),
    [
        ({}, None, 4),
        (V2, None, 4),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None, 4),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "340000 100000"}, 3.4, 3),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5, 2),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "350000 100000", "sys/fs/cgroup/a/cpu.max": "20000 10000"}, 2.0, 2),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "10000 100000"}, 0.1, 1),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "6400000 100000"}, 64.0, 4),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "garbage"}, None, 4),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "100000 0"}, None, 4),
        (V1 | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1"}, None, 4),
        (
            V1 | {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.0,
            2,
        ),
    ],
)  # fmt: skip
def test_a_quota_bounds_the_threads(
    files: Mapping[str, str], given: float | None, threads: int, tmp_path: Path
) -> None:
    root = machine(tmp_path, files)
    assert (quota(root), default_threads(root)) == (given, threads)


def test_what_somebody_has_said_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, V2 | {"sys/fs/cgroup/a/b/cpu.max": "100000 100000"})
    assert default_threads(root) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert default_threads(root) == 4


@pytest.mark.parametrize(
    ("said", "given", "threads"), [(None, "300000", 3), (5, "300000", 5), (None, "max", 4), (None, "900000", 4)]
)
def test_an_engine_keeps_to_it(
    said: int | None, given: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, V2 | {"sys/fs/cgroup/a/b/cpu.max": f"{given} 100000"})
    monkeypatch.setattr("pagedec.runtime.loading.default_threads", lambda: default_threads(root))
    for which in ("an engine", "its draft model, or a second engine"):
        backend = choose_backend(ParallelConfig(num_threads=said), "auto")
        assert torch.get_num_threads() == threads, which
        if backend.name != "reference":
            assert threads_elsewhere(backend) == threads, which


def threads_elsewhere(backend: Any) -> int:
    """How many a thread would use that has not heard of torch's number, as an engine's own."""
    with ThreadPoolExecutor(1) as pool:
        return int(pool.submit(lambda: backend.context.num_threads).result())


def test_what_an_engine_is_told_is_not_the_next_ones_default() -> None:
    choose_backend(ParallelConfig(num_threads=1), "float32")
    choose_backend(ParallelConfig(num_threads=2), "float32")
    assert torch.get_num_threads() == 2 and default_threads() == 4
    torch.set_num_threads(3)  # somebody's choice
    assert default_threads() == 3
