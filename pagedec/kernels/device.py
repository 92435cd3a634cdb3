"""The compiled kernels of a device with memory of its own."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from pagedec.core.forward import NO_INTS
from pagedec.core.logits_rules import LogitsRules
from pagedec.errors import InvalidArgument
from pagedec.kernels.addresses import DTYPES
from pagedec.kernels.attention_kernel import AttentionKernel, check_device, check_numbers
from pagedec.kernels.backend import AttentionShape, CacheTensors
from pagedec.kernels.block_swap import BlockSwap, DeviceBlockSwap
from pagedec.kernels.context import Context, KernelError
from pagedec.kernels.device_memory import SMALL, DeviceCall, DeviceMemory, KernelCall, LateCall, LateRoom, Staging
from pagedec.kernels.drawn import of_all
from pagedec.kernels.lent_memory import CudaMemory, EmulatedMemory, LentMemory
from pagedec.kernels.library import EMULATED_DEVICE, KvKind, Library
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.native_plan import NativePlan
from pagedec.kernels.processing import FlatRules, flatten
from pagedec.kernels.reference_cache import SCALE_BYTES, cache_dtype
from pagedec.kernels.split_plan import SplitPlan

ROOM_SHARE = 0.9
"""Of a device's free memory: the rest is for a step's buffers and attention's partial results."""
MOST_OUT = 2  # steps whose draws nobody has taken yet
CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
CHUNK = 32 << 20  # bytes of a device's memory that small tensors are cut from


class DeviceBackend(NativeBackend):
    """Compiled kernels on a CUDA device: what they read and write lies in its memory, and small arrays travel with each
    call. Raises as `NativeBackend` does, and MemoryError where the device has no room."""

    dtypes = tuple(DTYPES)

    overlaps = True

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        quantization: str | None = None,
        num_threads: int = 0,
        device: int = 0,
        kv_kind: KvKind = KvKind.PLAIN,
    ) -> None:
        super().__init__(library, dtype, quantization, num_threads, device, kv_kind)
        # of emulated memory each piece has its own guard
        self.memory = DeviceMemory(self.context, 0 if self.name == EMULATED_DEVICE else CHUNK)
        self._mapped: list[torch.Tensor] = []
        self._counts: dict[int, int] = {}
        self._given, self._wanted = Staging(self.memory), Staging(self.memory)
        self.attention: AttentionKernel | None = None
        self._lent: LentMemory | None = None
        self._late: LateRoom | None = None

    @contextmanager
    def late(self, room: LateRoom) -> Iterator[None]:
        """Within it, what calls answer lies in that room, and is in their arrays when that was asked for."""
        self._late = room
        try:
            yield
        finally:
            self._late = None

    def late_room(self) -> LateRoom:
        """Room for what up to `MOST_OUT` steps answer."""
        return LateRoom(self.context, self.memory, 0 if self.name == EMULATED_DEVICE else SMALL, MOST_OUT)

    @property
    def generation(self) -> str:
        """What devices have in common whose tensor cores round alike: the compute capability, of an H100 9.0. Raises
        KernelError."""
        if self.name == EMULATED_DEVICE:
            return "emulated"
        driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()

        def told(status: int) -> int:
            if status:
                problem = f"the driver does not tell the compute capability of device {self.device}: its error {status}"
                raise KernelError(problem)
            return found.value

        device = ctypes.c_int(told(driver.cuDeviceGet(ctypes.byref(found), self.device)))
        numbers = [told(driver.cuDeviceGetAttribute(ctypes.byref(found), name, device)) for name in CAPABILITY]
        return ".".join(map(str, numbers))

    def use_attention(self, kernel: AttentionKernel, block_size: int) -> None:
        """Let another package's kernel have the branches that it takes. Raises InvalidArgument where there could be
        none, and where torch does not reach the device."""
        check_numbers(kernel, self.dtype, self.kv_kind, block_size)
        if self.name == EMULATED_DEVICE:
            self._lent = EmulatedMemory(self.memory)
        elif not torch.cuda.is_available():
            reason = "cannot be used: the torch that is installed does not reach the device"
            raise InvalidArgument("attention_backend", kernel.name, reason)
        else:
            self._lent = CudaMemory(self.context, self.device)
        check_device(kernel, self._lent.capability)
        self.attention = kernel

    def plan(self, shape: AttentionShape) -> NativePlan:
        if self.attention is None or self._lent is None or self.attention.limits.lacks(shape) is not None:
            return super().plan(shape)
        return SplitPlan(self, shape, self.attention, self._lent)

    def call(self) -> KernelCall:
        if self._late is not None:
            return LateCall(self.context, self._given, self._late)
        return DeviceCall(self.context, self._given, self._wanted)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.memory.put(tensor)

    def map(self, tensor: torch.Tensor) -> None:
        self.context.map_memory(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(self, self.library.unmap_memory, tensor.data_ptr()).atexit = False
        self._mapped.append(tensor)

    def wait(self) -> None:
        self.context.wait()

    def room(self) -> int | None:
        return room_of(self.context)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memory.zeros(shape, dtype)

    def storage(self, num_bytes: int) -> torch.Tensor:
        return self.memory.allocate(num_bytes)

    def take_back(self, storage: torch.Tensor) -> None:
        """It is free when nobody keeps it."""

    def write(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        self.writer(tensor)(array)

    def writer(self, tensor: torch.Tensor) -> Callable[[np.ndarray], None]:
        write = self.memory.writer(tensor)
        if tensor.numel() != 1 or tensor.dtype != torch.int32:
            return write
        counts, address = self._counts, tensor.data_ptr()

        def count(array: np.ndarray) -> None:
            counts[address] = int(array[0])
            write(array)

        return count

    def count(self, rows: torch.Tensor) -> int:
        return self._counts[rows.data_ptr()]  # the host knows what it has written

    def cache(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        feature_width: int = 0,
    ) -> CacheTensors:
        width = head_dim if self.kv_kind == KvKind.PLAIN else head_dim + SCALE_BYTES
        shape = (num_layers, num_blocks, num_kv_heads, block_size, width)
        k, v = (self.zeros(shape, cache_dtype(self.dtype, self.kv_kind)) for _ in range(2))
        tokens = self.zeros((num_blocks * block_size,), torch.int32)
        self.memory.fill(tokens, 0xFF)  # -1: POISON_TOKEN
        features = self.zeros((num_blocks * block_size, feature_width), self.dtype) if feature_width else None
        return CacheTensors(k, v, tokens, num_kv_heads, head_dim, block_size, features)

    def block_swap(self, cache: CacheTensors, num_places: int) -> BlockSwap:
        return DeviceBlockSwap(self, cache, num_places)

    def poison(self, cache: CacheTensors, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            for side in cache.sides:
                for layer in side:
                    self.memory.fill(layer[block], 0xFF)  # NaN in every dtype and as a scale, -1 as a token

    def drawn_tokens(self) -> DeviceDrawn:
        return DeviceDrawn(self)

    def has_nan(self, logits: torch.Tensor) -> bool:
        return bool(self.memory.get(logits).isnan().any())

    def rules(self, rules: LogitsRules, vocab_size: int) -> FlatRules:
        return flatten(rules, vocab_size, self._placed)

    def _placed(self, array: np.ndarray) -> tuple[int, object]:
        tensor = self.memory.put(torch.from_numpy(array))
        return tensor.data_ptr(), tensor


def room_of(context: Context) -> int | None:
    """Bytes of a device's memory for weights and caches; None: the host's system tells."""
    num_free, _ = context.memory_room()
    return None if num_free < 0 else int(ROOM_SHARE * num_free)


class DeviceDrawn:
    """Draws in the device's memory, of one forward at a time: what follows on its stream reads them before the next
    forward's take their places, and so does the copy to the host."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._room = backend.late_room()
        self._drawn = NO_INTS

    def begin(self, num_draws: int) -> None:
        self._room.reset()
        self._drawn = np.empty(num_draws, np.int32)
        self._tokens = self._room.want(self._drawn).view(torch.int32)

    def sample(self, logits: torch.Tensor, draws: np.ndarray, first: int) -> None:
        self._backend.sample_into(logits, draws, self._tokens[first : first + len(draws)])

    def tokens(self, places: np.ndarray) -> torch.Tensor:
        first, num = int(places[0]), len(places)
        if int(places[-1]) - first == num - 1:
            return self._tokens[first : first + num]
        own = self._room.place(4 * num).view(torch.int32)
        self._copy(self._tokens, places, own, np.arange(num, dtype=np.int32))
        return own

    def asking(self) -> AbstractContextManager[None]:
        return self._backend.late(self._room)

    def _copy(self, tokens: torch.Tensor, places: np.ndarray, ids: torch.Tensor, rows: np.ndarray) -> None:
        """ids[rows] = tokens[places]: four bytes each, which a kernel that copies rows takes as they are."""
        drawn, own = (tensor.view(torch.float32)[:, None] for tensor in (tokens, ids))
        self._backend.copy_rows(drawn, places, own, rows)

    def put(self, token_ids: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> None:
        self._copy(self._of_all(int(places.max()) + 1), places, token_ids, rows)

    def _of_all(self, num_tokens: int) -> torch.Tensor:
        """The first so many, also of ranks behind the first."""
        link, memory = self._backend.link, self._backend.memory
        if link is None:
            return self._tokens
        if link.rank > 0:
            self.begin(num_tokens)
        own = self._tokens[:num_tokens]
        if link.received is not None:
            return link.spread(own)
        return memory.put(torch.from_numpy(of_all(link, num_tokens, lambda: memory.get(own).numpy())))

    def later(self) -> Callable[[], np.ndarray]:
        take, drawn = self._room.later(), self._drawn

        def taken() -> np.ndarray:
            take()
            return drawn

        return taken
