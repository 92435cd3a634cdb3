"""A device's memory as tensors that other packages can work with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from pagedec.kernels.context import Context
from pagedec.kernels.device_memory import DeviceMemory


class LentMemory(Protocol):
    """Lends tensors of `DeviceMemory`."""

    capability: tuple[int, int]
    """Of the device."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `lend` takes in a contiguous tensor's place, for as long as that is there."""

    def given(self, array: np.ndarray) -> torch.Tensor:
        """An array of the host where the packages work, in order with what is under way."""

    def in_order(self) -> AbstractContextManager[None]:
        """What packages make and copy meanwhile is in order with the context's calls, and so is what takes its place
        once it is given up."""

    def lend(self, read: Sequence[torch.Tensor], out: torch.Tensor) -> AbstractContextManager[list[torch.Tensor]]:
        """Let a package work on views, `read` and then `out`, which it may write, in order with the context's calls."""


class CudaMemory:
    """torch's own tensors at the same addresses, in the stream that our kernels are put into. No GPU has run this."""

    def __init__(self, context: Context, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._stream = torch.cuda.ExternalStream(context.stream, device=self._device)
        self.capability = torch.cuda.get_device_capability(self._device)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        return torch.as_tensor(_Bytes(tensor), device=self._device).view(tensor.dtype).view(tensor.shape)

    def given(self, array: np.ndarray) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # from memory that stays in place: the host does not wait
            return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def lend(self, read: Sequence[torch.Tensor], out: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            yield [*read, out]


class _Bytes:
    """A tensor's memory as torch takes it from other packages: bytes, since not all of them know bf16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # as long as what is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


class EmulatedMemory:
    """Copies: nobody but kernels may touch the emulated device's memory. It takes itself for an A100, whose rounding it
    has."""

    capability = (8, 0)

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def given(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def in_order(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def lend(self, read: Sequence[torch.Tensor], out: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        copies = [self._memory.get(tensor) for tensor in (*read, out)]
        yield copies
        self._memory.fill_from(out, copies[-1])
