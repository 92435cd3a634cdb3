"""Ranks whose CUDA devices exchange their parts by NCCL, in the order of their streams, on however many machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pagedec import environment
from pagedec.errors import InvariantError
from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, AllGatherArgs, KernelError
from pagedec.kernels.link import Exchange
from pagedec.kernels.places import nccl_path

ADVICE = "install nvidia-nccl-cu12 or nvidia-nccl-cu13, or name a libnccl.so.2 in PAGEDEC_NCCL"
BROADCAST = 1 << 12  # values that are broadcast at once: more tokens than most steps draft


class NcclLink:
    """Exchanges are kernels like others, so a step waits on the host where it reads its answers, and nowhere else; it
    fails there where a rank has not come in `seconds`. Raises KernelError, at all ranks, where one cannot join."""

    arrivals: torch.Tensor | None = None

    def __init__(self, rank: int, world: int, exchange: Exchange, backend: DeviceBackend, seconds: float) -> None:
        self.rank, self.world, self.seconds, self._backend = rank, world, seconds, backend
        made = self._of_all(exchange, lambda: backend.library.nccl_id().hex() if rank == 0 else "")[0]
        self._of_all(exchange, lambda: backend.context.join(bytes.fromhex(made), rank, world, seconds))
        self._own: dict[tuple[int, ...], torch.Tensor] = {}
        self._received: torch.Tensor | None = None
        self._told = backend.zeros((BROADCAST,), torch.int32)
        self._heard = backend.zeros((world * BROADCAST,), torch.int32)

    @staticmethod
    def _of_all(exchange: Exchange, work: Callable[[], Any]) -> list[Any]:
        """What it gives at all ranks. Raises the first one's KernelError at all of them."""
        done, problem = None, ""
        try:
            done = work()
        except KernelError as error:
            problem = str(error)
        told = exchange({"done": done, "problem": problem})
        for rank, own in enumerate(told):
            if own["problem"]:
                raise KernelError(f"rank {rank}: {own['problem']}")
        return [own["done"] for own in told]

    @property
    def shape_of_device(self) -> int:
        """Of ranks on devices that are alike the same."""
        return self._backend.context.num_threads

    def are_alike(self) -> None:
        """All ranks have as many heads, and devices with as many multiprocessors: what is recorded is made anew at all
        of them at a time, and they need not agree on that before each step."""
        self._backend.context.are_alike()

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own part alone, at every rank's place, and the same one for all of a shape: a kernel that fills
        it again comes behind the exchange."""
        own = self._own.get(shape)
        if own is None:
            own = self._own[shape] = self._backend.zeros(shape, dtype)
        return own.expand(self.world, *shape)

    @property
    def received(self) -> torch.Tensor:
        num_values = self.world * max((math.prod(shape) for shape in self._own), default=0)
        if self._received is None or self._received.numel() < num_values:  # lists that have another keep it
            self._received = self._backend.zeros((num_values,), torch.float32)
        return self._received

    def gather(self, parts: torch.Tensor, num_values: int) -> None:
        raise InvariantError("devices exchange their parts themselves; nothing is sent")

    def gather_first(self, parts: torch.Tensor, num_values: int) -> None:
        self.gather(parts, num_values)

    def broadcast(self, values: np.ndarray) -> None:
        memory = self._backend.memory
        for first in range(0, len(values), BROADCAST):
            piece = values[first : first + BROADCAST]
            if self.rank == 0:
                memory.write(self._told, piece)
            piece[:] = memory.get(self.spread(self._told[: len(piece)])).numpy()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        if self.world * len(values) > len(self._heard):
            self._heard = self._backend.zeros((self.world * len(values),), torch.int32)
        self._backend.context.call(AllGatherArgs(values.data_ptr(), self._heard.data_ptr(), len(values)))
        return self._heard[: len(values)]  # rank 0's come first


def why_not(backend: Backend | None) -> str:
    """Why this rank cannot exchange by NCCL. Nothing: it can, and the library is open."""
    wanted = environment.read("PAGEDEC_LINK")
    if not isinstance(backend, DeviceBackend):
        return "it is for CUDA devices"
    if wanted not in (None, "nccl"):
        return f"PAGEDEC_LINK is {wanted}"
    if backend.name == EMULATED_DEVICE and wanted is None:
        return "emulated devices exchange by it where PAGEDEC_LINK is nccl"
    try:
        backend.library.open_nccl(nccl_path(backend.library.path))
    except KernelError as error:
        return f"{error}; {ADVICE}"
    return ""


def place_of(backend: Backend | None) -> str | None:
    """The device, among those of its machine; None: as many ranks as like may share it."""
    is_real = isinstance(backend, DeviceBackend) and backend.name == CUDA
    return environment.visible_device(backend.device) if is_real else None  # type: ignore[union-attr]


def why_not_all(told: Sequence[dict[str, Any]]) -> str:
    """Why ranks that have told `why_not` as "nccl", and their device as "place", cannot."""
    owners: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(told):
        if own["nccl"]:
            return f"rank {rank}: {own['nccl']}"
        if own["place"] is not None:
            other = owners.setdefault(tuple(own["place"]), rank)
            if other != rank:
                return f"ranks {other} and {rank} share a device"
    return ""
