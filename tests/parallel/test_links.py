"""How ranks reach one another: through memory where they can, through sockets where they must."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.errors import InvalidArgument, InvariantError
from pagedec.kernels.library import available_isas, load
from pagedec.kernels.link import Link
from pagedec.kernels.native import NativeBackend
from pagedec.runtime import links, loading
from pagedec.runtime.links import SharedLink, SocketLink, connect
from tests.parallel.ranks import engine_of, together

needs_kernels = pytest.mark.skipif(not available_isas(), reason="no kernels were compiled")


def backend() -> NativeBackend:
    return NativeBackend(load(), torch.float32, num_threads=1)


def linked(world: int, given: bool = True) -> list[Link]:
    return together(lambda ranks: connect(ranks.rank, world, ranks.exchange, backend() if given else None, 20.0), world)


@needs_kernels
def test_ranks_of_one_machine_share_memory() -> None:
    made = linked(3)
    assert all(isinstance(link, SharedLink) and link.arrivals is not None for link in made)


@needs_kernels
def test_what_one_writes_all_see() -> None:
    def work(ranks: Any) -> torch.Tensor:
        link = connect(ranks.rank, ranks.world, ranks.exchange, backend(), 20.0)
        parts = link.parts((2, 3), torch.float32)
        assert parts.shape == (3, 2, 3) and not parts.any()
        ranks.exchange({})
        parts[ranks.rank] = float(ranks.rank + 1)
        ranks.exchange({})
        return parts

    for parts in together(work, 3):
        assert parts.flatten(1).tolist() == [[1.0] * 6, [2.0] * 6, [3.0] * 6]


@pytest.mark.parametrize("given", [True, False] if available_isas() else [False])
@pytest.mark.parametrize("count", [1, 5, links.BROADCAST, 2 * links.BROADCAST + 3])
def test_the_first_ranks_values_go_to_all(given: bool, count: int) -> None:
    def work(ranks: Any) -> np.ndarray:
        link = connect(ranks.rank, 3, ranks.exchange, backend() if given else None, 20.0)
        values = np.arange(count, dtype=np.int32) * (ranks.rank + 1)
        link.broadcast(values)
        return values

    for values in together(work, 3):
        assert np.array_equal(values, np.arange(count))


def test_parts_are_sent() -> None:
    def work(ranks: Any) -> tuple[torch.Tensor, torch.Tensor]:
        link = SocketLink(ranks.rank, 3, ranks.exchange, 20.0)
        all_parts, first = (link.parts((7,), torch.float32) for _ in range(2))
        all_parts[ranks.rank] = first[ranks.rank] = ranks.rank + torch.arange(7) / 8
        link.gather(all_parts, 5)
        link.gather_first(first, 6)
        return all_parts, first

    for rank, (all_parts, first) in enumerate(together(work, 3)):
        for other in range(3):
            known = 7 if other == rank else 5
            assert torch.equal(all_parts[other, :known], (other + torch.arange(7) / 8)[:known])
            if rank == 0:
                assert torch.equal(first[other, :6], (other + torch.arange(7) / 8)[:6])


@needs_kernels
def test_sockets_where_memory_is_not_wanted_or_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(links, "PROCESSES", tmp_path)  # another container's
    monkeypatch.setattr(links, "machine", lambda: "one")
    made = linked(2)
    assert all(isinstance(link, SocketLink) and link.arrivals is None for link in made)
    monkeypatch.undo()
    del made
    monkeypatch.setenv("PAGEDEC_LINK", "sockets")
    assert all(isinstance(link, SocketLink) for link in linked(2))
    assert len(os.listdir("/proc/self/fd")) < before + 40  # gloo's own, which end with it


@needs_kernels
def test_a_file_of_another_container_s_process_is_not_taken_for_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers of one machine count processes from 1, each for itself."""
    files = tmp_path / str(os.getpid()) / "fd"
    files.mkdir(parents=True)
    for number in range(200):
        (files / str(number)).write_bytes(b"mine" * 100_000)
    monkeypatch.setattr(links, "PROCESSES", tmp_path)
    monkeypatch.setattr(links, "machine", lambda: "one")
    assert all(isinstance(link, SocketLink) for link in linked(2))
    assert all(path.read_bytes() == b"mine" * 100_000 for path in files.iterdir())


@needs_kernels
def test_sockets_where_no_memory_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert all(isinstance(link, SocketLink) for link in linked(2))


@needs_kernels
def test_memory_that_is_shared_is_not_sent() -> None:
    [link, _] = linked(2)
    with pytest.raises(InvariantError, match="nothing is sent"):
        link.gather(torch.zeros(2, 3), 3)


@needs_kernels
def test_ranks_must_compute_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pagedec.config import EngineConfig

    seen: list[str] = []
    choose = loading.choose_backend

    def other(*arguments: Any) -> Any:
        made = choose(*arguments)
        seen.append(made.name)
        made.name = f"{made.name}{len(seen)}"
        return made

    monkeypatch.setattr(loading, "choose_backend", other)
    with pytest.raises(InvalidArgument, match="must be the same at all ranks: rank 0 has"):
        engine_of(EngineConfig.from_kwargs(num_blocks=16, executor="process"), 2)
