"""How the ranks of a model reach one another: through NCCL between CUDA devices, through memory where they share a
machine, else through sockets."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedec import environment
from pagedec.errors import InvalidArgument, InvariantError, LinkWarning
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import KernelError, MeetArgs
from pagedec.kernels.link import Exchange, Link
from pagedec.kernels.native import NativeBackend
from pagedec.runtime.nccl import NcclLink, place_of, why_not, why_not_all

MEET_STRIDE = 32  # PD_MEET_STRIDE of pagedec.h
BROADCAST = 1 << 14  # values that are broadcast at once: more tokens than a step drafts
PROCESSES = Path("/proc")


class SharedLink:
    """Ranks on one machine: their parts lie in memory that all of them have mapped, and kernels meet there, so nothing
    is sent. Raises OSError where a rank cannot map what another has made."""

    received: torch.Tensor | None = None

    def __init__(self, rank: int, world: int, exchange: Exchange, backend: NativeBackend, seconds: float) -> None:
        self.rank, self.world, self.seconds = rank, world, seconds
        self._exchange, self._context, self._map = exchange, backend.context, backend.map
        self.arrivals: torch.Tensor | None = self.parts((MEET_STRIDE,), torch.int32)
        self._values = self.parts((BROADCAST,), torch.int32)[0].numpy()

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        whole = (self.world, *shape)
        size = max(1, int(np.prod(whole)) * dtype.itemsize)
        file, made, problem = -1, dict[str, Any](), ""
        try:
            if self.rank == 0:
                file, made = _make(size)
        except OSError as error:
            problem = f"rank 0 cannot make memory to share: {error.strerror}"
        made = self._exchange(made)[0]
        try:
            if self.rank != 0 and made:
                file = _open(made)
            if made:
                memory = mmap.mmap(file, size)
        except OSError as error:
            problem = f"rank {self.rank} cannot map {made['place']}: {error.strerror}"
        problems = [told["problem"] for told in self._exchange({"problem": problem}) if told["problem"]]
        if file >= 0:
            os.close(file)  # the mapping stays
        if problems:
            raise OSError(problems[0])
        tensor = torch.frombuffer(memory, dtype=dtype, count=int(np.prod(whole))).view(whole)
        self._map(tensor)
        return tensor

    def gather(self, parts: torch.Tensor, num_values: int) -> None:
        raise InvariantError("kernels meet where parts lie in the memory of all; nothing is sent")

    def gather_first(self, parts: torch.Tensor, num_values: int) -> None:
        self.gather(parts, num_values)

    def broadcast(self, values: np.ndarray) -> None:
        for first in range(0, len(values), BROADCAST):
            piece = values[first : first + BROADCAST]
            if self.rank == 0:
                self._values[: len(piece)] = piece
            self._meet()
            piece[:] = self._values[: len(piece)]
            self._meet()  # nobody writes the next piece before all have read this one

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        raise InvariantError("ranks that meet on the host have nothing in a device's stream")

    def _meet(self) -> None:
        assert self.arrivals is not None
        self._context.call(MeetArgs(self.arrivals.data_ptr(), self.seconds, self.rank, self.world))


def _make(size: int) -> tuple[int, dict[str, Any]]:
    """A file that is memory, and where others find it. Raises OSError."""
    file = os.memfd_create("pagedec-parts", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file, {"place": str(PROCESSES / str(os.getpid()) / "fd" / str(file)), "identity": _identity(file)}


def _open(made: dict[str, Any]) -> int:
    """The file that another rank has made. Raises OSError where it is not there."""
    file = os.open(made["place"], os.O_RDWR | os.O_CLOEXEC)
    if _identity(file) != made["identity"]:
        os.close(file)
        raise OSError(errno.ENOENT, "another process is there: a container numbers them for itself")
    return file


def _identity(file: int) -> list[int]:
    """What no other file of the machine has."""
    found = os.fstat(file)
    return [found.st_dev, found.st_ino]


class SocketLink:
    """Ranks anywhere: parts are sent with gloo. `address`: this machine's, as the others reach it."""

    arrivals: torch.Tensor | None = None
    received: torch.Tensor | None = None

    def __init__(self, rank: int, world: int, exchange: Exchange, seconds: float, address: str = "127.0.0.1") -> None:
        from torch.distributed import ProcessGroupGloo, TCPStore  # half a second, for those who need it

        gloo: Any = ProcessGroupGloo  # its methods have no types

        self.rank, self.world, self.seconds = rank, world, seconds
        limit = timedelta(seconds=seconds)
        self._store = TCPStore(address, 0, world, True, limit, wait_for_workers=False) if rank == 0 else None
        port = 0 if self._store is None else self._store.port
        told = exchange({"address": address, "port": port})[0]
        if self._store is None:
            self._store = TCPStore(told["address"], told["port"], world, False, limit)
        options = gloo._Options()
        for name, value in (("devices", [gloo.create_device(hostname=address)]), ("timeout", limit), ("threads", 1)):
            setattr(options, f"_{name}", value)
        self._group = gloo(self._store, rank, world, options)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((self.world, *shape), dtype=dtype)

    def gather(self, parts: torch.Tensor, num_values: int) -> None:
        own = [part.view(-1)[:num_values] for part in parts]
        self._group.allgather([own], [own[self.rank].clone()]).wait()

    def gather_first(self, parts: torch.Tensor, num_values: int) -> None:
        own = [part.view(-1)[:num_values] for part in parts]
        self._group.gather(own if self.rank == 0 else [], own[self.rank].clone(), 0).wait()

    def broadcast(self, values: np.ndarray) -> None:
        self._group.broadcast(torch.from_numpy(values), 0).wait()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        raise InvariantError("ranks that send have nothing in a device's stream")


def machine() -> str:
    """What ranks that may share memory have in common."""
    try:
        return (PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return ""


def connect(
    rank: int, world: int, exchange: Exchange, backend: NativeBackend | None, seconds: float, address: str = "127.0.0.1"
) -> Link:
    """This rank's link. Between CUDA devices NCCL, where all ranks have it and a device each; else through memory where
    all run compiled kernels (`backend`) on one machine and can map what the others have made, else through sockets.
    PAGEDEC_LINK says which it is to be: nccl or nothing, memory without NCCL, sockets without either. Raises
    InvalidArgument where devices have no way to one another."""
    wanted, place = environment.read("PAGEDEC_LINK"), place_of(backend)
    own = {"nccl": why_not(backend), "place": None if place is None else [machine(), place]}
    own["machine"] = machine() if backend is not None and wanted not in ("sockets", "nccl") else ""
    told = exchange(own)
    lacking = why_not_all(told)
    if isinstance(backend, DeviceBackend) and not lacking:
        try:
            return NcclLink(rank, world, exchange, backend, seconds)
        except KernelError as error:  # all ranks were told
            lacking = str(error)
    if wanted == "nccl":
        raise InvalidArgument("PAGEDEC_LINK", wanted, f"NCCL cannot be had: {lacking}")
    if backend is not None and told[0]["machine"] and all(each["machine"] == told[0]["machine"] for each in told):
        try:
            link = SharedLink(rank, world, exchange, backend, seconds)
        except OSError:
            pass  # other containers of one machine: all ranks were told
        else:
            if wanted is None and place is not None:
                warnings.warn(f"ranks meet on the host, in its memory: {lacking}", LinkWarning, stacklevel=5)
            return link
    if isinstance(backend, DeviceBackend):
        limit = "must be 1 on CUDA devices whose machines, or containers, share no memory, and that have no NCCL"
        raise InvalidArgument("tensor_parallel_size", world, f"{limit}: {lacking}")
    return SocketLink(rank, world, exchange, seconds, address)
