"""What a sum costs that ranks share, by how many rows a step has: exchanged by NCCL, and on the host, in its memory.

python benchmarks/gpu_ranks.py [--smoke] [--world N]

A process a rank, each with a device. A list of sums is what a model's layers make of them: two a layer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from common import Timing, heading, table
from gpu_common import SAMPLES, SECONDS, micro

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, load
from pagedec.runtime.links import Exchange, connect

LINKS = ("nccl", "memory")
WAIT_SECONDS = 60.0


def exchange_of_first(ends: list[socket.socket]) -> Exchange:
    readers = [end.makefile("r") for end in ends]

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        told = [own, *(json.loads(reader.readline()) for reader in readers)]
        for end in ends:
            end.sendall(json.dumps(told).encode() + b"\n")
        return told

    return exchange


def exchange_of_other(end: socket.socket) -> Exchange:
    reader = end.makefile("r")

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        end.sendall(json.dumps(own).encode() + b"\n")
        told: list[dict[str, Any]] = json.loads(reader.readline())
        return told

    return exchange


@contextmanager
def ranks(world: int, work: Callable[[int, Exchange], object]) -> Iterator[Exchange]:
    """The others do `work` in forks, which must be made before anything asks the driver; gives what the first tells
    them by."""
    ends, children = [], []
    for rank in range(1, world):
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                work(rank, exchange_of_other(theirs))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        ends.append(ours)
        children.append(child)
    yield exchange_of_first(ends)
    assert not any(os.waitpid(child, 0)[1] for child in children)


class Sums:
    """A recorded list of sums over rows of `dim` values, exchanged in one way."""

    def __init__(self, link: str, isa: str, rank: int, world: int, exchange: Exchange, most: int, dim: int, num: int):
        os.environ["PAGEDEC_LINK"], self.num = link, num
        library = load(isa)
        self._backend = DeviceBackend(library, torch.bfloat16, device=rank % library.num_devices)
        self._backend.link = connect(rank, world, exchange, self._backend, WAIT_SECONDS)
        self._rows, self._exchange = self._backend.zeros((1,), torch.int32), exchange
        parts = [self._backend.link.parts((most, dim), torch.float32) for _ in range(2)]
        out = self._backend.zeros((most, dim), torch.float32)
        self._program = self._backend.program()
        for i in range(num):
            self._program.sum_parts(self._rows, parts[i % 2], out, add=True)
        self._program.finish()

    def seconds(self, num_rows: int, count: int) -> float:
        """Of one sum; all ranks ask for it together."""
        self._backend.write(self._rows, np.array([num_rows], np.int32))
        self._backend.wait()
        self._exchange({})
        began = time.perf_counter()
        for _ in range(count):
            self._program.run()
        self._backend.wait()
        return (time.perf_counter() - began) / count / self.num


def measure(rank: int, arguments: argparse.Namespace, exchange: Exchange) -> dict[int, dict[str, Timing]]:
    smoke, isa = arguments.smoke, EMULATED_DEVICE if arguments.smoke else CUDA
    sizes, dim, num = ([1, 5], 32, 2) if smoke else ([1, 4, 16, 64, 256, 1024, 2048], 4096, 64)
    kinds = {link: Sums(link, isa, rank, arguments.world, exchange, sizes[-1], dim, num) for link in LINKS}
    found: dict[int, dict[str, Timing]] = {}
    for num_rows in sizes:
        counts, samples = {}, {link: list[float]() for link in LINKS}
        for link, sums in kinds.items():
            sums.seconds(num_rows, 2)  # carried out, recorded
            once = sums.seconds(num_rows, 1) * num
            counts[link] = exchange({"count": max(1, min(200, round(SECONDS / once)))})[0]["count"]
        for _ in range(1 if smoke else SAMPLES):
            for link, sums in kinds.items():
                samples[link].append(sums.seconds(num_rows, 1 if smoke else counts[link]))
        found[num_rows] = {link: Timing(tuple(own)) for link, own in samples.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on emulated devices: that it runs at all")
    parser.add_argument("--world", type=int, default=2, help="how many ranks, each with a device")
    arguments = parser.parse_args()
    with ranks(arguments.world, lambda rank, exchange: measure(rank, arguments, exchange)) as exchange:
        found = measure(0, arguments, exchange)
    heading(f"Sums of {arguments.world} ranks, {EMULATED_DEVICE if arguments.smoke else CUDA}")
    rows = [
        [num_rows, *(micro(own[link].median) for link in LINKS), *(f"{own[link].spread:.3f}" for link in LINKS)]
        for num_rows, own in found.items()
    ]
    table(["rows", "us by NCCL", "us on the host", "spread", "spread"], rows)


if __name__ == "__main__":
    main()
