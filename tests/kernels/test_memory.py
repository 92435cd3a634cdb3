"""Memory where kernels work: there and back, in order; on the emulated device nobody else can touch it. And programs
that a device repeats: with what its buffers and plans hold now."""

from __future__ import annotations

import signal
import subprocess
import sys
from ctypes import c_void_p
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels.arena import zeros
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.device_memory import SMALL, DeviceMemory, LateCall, LateRoom, Staging
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, ArgmaxArgs, CopyRowsArgs, KernelError, Library, load
from pagedec.kernels.native import NativeBackend
from tests.kernels import cuda_library

EMULATED = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
# the emulated device stages 4 MiB at a time
SIZES = [1, 63, 64, 65, 4095, 4096, 4097, SMALL - 1, SMALL, SMALL + 1, 5 << 20]


@pytest.fixture(params=cuda_library.cases())
def device(request: pytest.FixtureRequest) -> DeviceBackend:
    if request.param == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    return DeviceBackend(load(request.param), torch.float32)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_there_and_back(library: Library, num_bytes: int) -> None:
    context = library.context()
    memory = DeviceMemory(context, 0)
    tensor, values = memory.allocate(num_bytes), np.random.default_rng(1).integers(0, 255, num_bytes).astype(np.uint8)
    assert tensor.data_ptr() % 64 == 0
    assert not memory.get(tensor).any()
    memory.write(tensor, values)
    assert np.array_equal(memory.get(tensor).numpy(), values)
    memory.fill(tensor[num_bytes // 2 :], 0xAB)
    values[num_bytes // 2 :] = 0xAB
    assert np.array_equal(memory.get(tensor).numpy(), values)
    copy = memory.put(torch.from_numpy(values))
    del tensor
    assert np.array_equal(memory.get(copy).numpy(), values)


def test_a_copy_that_others_follow(library: Library) -> None:
    """It has what was there when it began, whatever is written behind it; and a second one may be under way."""
    context = library.context()
    memory = DeviceMemory(context, 0)
    tensor = memory.zeros((1000,), torch.int32)
    fetches, found = [context.new_fetch(4000), context.new_fetch(4000)], np.zeros((2, 1000), np.int32)
    for i in range(40):
        memory.write(tensor, np.full(1000, 2 * i + 1, np.int32))
        fetches[0].begin(tensor.data_ptr(), 4000)
        memory.write(tensor, np.full(1000, 2 * i + 2, np.int32))
        fetches[1].begin(tensor.data_ptr(), 40)
        memory.write(tensor, np.full(1000, -1, np.int32))
        for fetch, out in zip(fetches, found, strict=True):
            fetch.end(out.ctypes.data)
        assert (found[0] == 2 * i + 1).all() and (found[1, :10] == 2 * i + 2).all() and not found[1, 10:].any()
    fetches[0].begin(tensor.data_ptr(), 0)
    fetches[0].end(found.ctypes.data)
    with pytest.raises(KernelError, match="pd_fetch_begin: from is NULL; it must point to 8 bytes"):
        fetches[0].begin(0, 8)
    with pytest.raises(MemoryError, match="pd_fetch_new: num_bytes is -1; it must be 0 to"):
        context.new_fetch(-1)


@pytest.mark.parametrize("smallest", [0, 1 << 12])
def test_room_for_what_comes_later(library: Library, smallest: int) -> None:
    """It grows while arrays lie in it; two lots may be under way, of which one may never be asked for."""
    context = library.context()
    memory = DeviceMemory(context, 0)
    room, lots = LateRoom(context, memory, smallest, 2), list[tuple[Any, list[np.ndarray]]]()
    for lot, sizes in enumerate([(1,), (3, 0, 40), (1000, 16, 17), (), (16,), (5000, 1), (2, 2)]):
        room.reset()
        arrays = [np.empty(size, np.int32) for size in sizes]
        for i, array in enumerate(arrays):
            place = room.want(array)
            assert place.data_ptr() % 64 == 0 and place.nbytes == array.nbytes
            memory.write(place, np.full(array.nbytes, 10 * lot + i, np.uint8))
            memory.fill(room.place(3), 0xEE)  # what nobody wants
        lots.append((room.later(), arrays))
        if lot in (0, 3):
            continue  # one more is under way; of the fourth nobody takes anything
        for taken, (take, own) in enumerate(lots[-2:], lot - 1):
            if taken in (0, lot):
                take()
                for i, array in enumerate(own):
                    assert (array.view(np.uint8) == 10 * taken + i).all()
    call = LateCall(context, Staging(memory), room)
    x, found = memory.put(torch.tensor([[1.0, 5.0, 2.0], [7.0, 5.0, 2.0]])), np.full(2, -1, np.int32)
    room.reset()
    call.run(ArgmaxArgs(call.given(np.array([2], np.int32)), x.data_ptr(), call.wanted(found), 3, 0))
    assert found.tolist() == [-1, -1]
    room.later()()
    assert found.tolist() == [1, 0]


@EMULATED
def test_what_goes_wrong_is_told_of_one_lot() -> None:
    """Whose arrays lie in several pieces; not of a later one again, which uses one of these."""
    context = load(EMULATED_DEVICE).context()
    memory = DeviceMemory(context, 0)
    room, one = LateRoom(context, memory, 0, 2), memory.put(torch.ones(1, dtype=torch.int32))
    rows, values = memory.zeros((1,), torch.int32), memory.zeros((4,), torch.float32)
    for lot in range(4):
        room.reset()
        arrays = [np.empty(size, np.int32) for size in ((1000,) if lot else (16, 1000))]
        for array in arrays:
            memory.write(room.want(array), np.full(array.nbytes, lot, np.uint8))
        if lot == 0:
            row, own = rows.data_ptr(), values.data_ptr()
            shape = (2, 2, 2, 0, 0, 1.0)
            context.call(CopyRowsArgs(one.data_ptr(), own + 2, own, row, row, *shape))  # not where floats can lie
            with pytest.raises(KernelError, match="pd_copy_rows"):
                room.later()()
            continue
        room.later()()
        assert all((array.view(np.uint8) == lot).all() for array in arrays)


def test_copies_out_of_turn(library: Library) -> None:
    """One that nobody has asked for gives its place to the next; and none is another context's."""
    context, other = library.context(), library.context()
    memory = DeviceMemory(context, 0)
    tensor, out = memory.zeros((16,), torch.int32), np.zeros(16, np.int32)
    fetch, foreign = context.new_fetch(64), other.new_fetch(64)
    with pytest.raises(KernelError, match="pd_fetch_end: no copy is under way"):
        fetch.end(out.ctypes.data)
    with pytest.raises(KernelError, match="pd_fetch_begin: num_bytes is 65; it must be at most 64"):
        fetch.begin(tensor.data_ptr(), 65)
    fetch.begin(tensor.data_ptr(), 64)
    memory.fill(tensor, 1)
    fetch.begin(tensor.data_ptr(), 64)
    with pytest.raises(KernelError, match="pd_fetch_end: fetch is another context's"):
        library.check(library.functions.pd_fetch_end(context.handle, foreign._handle, out.ctypes.data))
    fetch.end(out.ctypes.data)
    assert (out == 0x01010101).all()


def test_sizes_that_there_are_not(library: Library) -> None:
    context = library.context()
    with pytest.raises(MemoryError, match="pd_memory_new: num_bytes is -1; it must be 0 to"):
        context.new_memory(-1)
    with pytest.raises(MemoryError, match=f"pd_memory_new: num_bytes is {1 << 60}"):
        context.new_memory(1 << 60)
    with pytest.raises(KernelError, match="pd_memory_write: to is NULL; it must point to 8 bytes"):
        context.write_memory(0, 64, 8)
    with pytest.raises(KernelError, match="pd_memory_read: from is NULL; it must point to 8 bytes"):
        context.read_memory(64, 0, 8)


def test_small_tensors_share_a_chunk(library: Library) -> None:
    """Each begins aligned and as zeros, and a chunk that is full leaves those in it alone."""
    memory = DeviceMemory(library.context(), 1 << 16)
    tensors = [memory.zeros((n,), torch.int32) for n in (1, 16, 17, 15000, 1500, 3, 70000)]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0 and not memory.get(tensor).any()
        memory.write(tensor, np.full(len(tensor), i + 1, np.int32))
    for i, tensor in enumerate(tensors):
        assert (memory.get(tensor) == i + 1).all()
    assert memory.zeros((0, 4), torch.float32).shape == (0, 4)


def test_arrays_of_a_call_travel_together(library: Library) -> None:
    """Also more of them than there was room for, whose places stay what they were told."""
    memory = DeviceMemory(library.context(), 0)
    staging = Staging(memory)
    for sizes in ([7, 64, 1], [SMALL - 64, 64, 1], [SMALL, 3 * SMALL, 5], [2, 9 * SMALL, 70]):
        staging.reset()
        places = [staging.place(size) for size in sizes]
        for i, (_, room) in enumerate(places):
            room[:] = i + 1
        staging.send()
        for _, room in places:
            room[:] = 0
        staging.receive()
        assert [len(room) for _, room in places] == sizes
        assert all((room == i + 1).all() for i, (_, room) in enumerate(places))
        assert len({address for address, _ in places}) == len(places)
        assert all(address % 64 == 0 for address, _ in places)


def test_a_source_may_change_when_it_is_written(device: DeviceBackend) -> None:
    """Also of more than is staged at a time."""
    memory, source = DeviceMemory(device.context, 0), np.empty(1 << 20, np.uint8)
    tensors = [memory.allocate(len(source) - i) for i in range(11)]
    for i, tensor in enumerate(tensors):
        source[:] = i + 1
        memory.write(tensor, source[i:])
    source[:] = 0
    assert [memory.get(tensor).unique().tolist() for tensor in tensors] == [[i + 1] for i in range(11)]


@EMULATED
def test_staging_grows_with_what_is_under_way() -> None:
    """Copies before and behind it are right, and a fetch that began before it may end behind. From 64 KB to 4 MB; what
    is larger goes without."""
    context = load(EMULATED_DEVICE).context()
    memory = DeviceMemory(context, 0)

    def staging() -> int:
        return int(context.library.functions.pd_emulate_staging_bytes(c_void_p(context.handle)))

    kb, fetch, fetched = 1 << 10, context.new_fetch(64 << 10), np.empty(60 << 10, np.uint8)
    assert staging() == 0
    tensors: list[torch.Tensor] = []
    sizes = ((1, 64), (60, 64), (4, 128), (100, 128), (30, 256), (700, 1024), (4096, 4096), (5000, 4096))
    for size, expected in sizes:
        tensors.append(memory.allocate(size * kb))
        memory.write(tensors[-1], np.full(size * kb, len(tensors), np.uint8))
        assert staging() == expected * kb
        if len(tensors) == 2:
            fetch.begin(tensors[-1].data_ptr(), 60 * kb)
    fetch.end(fetched.ctypes.data)
    assert (fetched == 2).all()
    for i in range(40):  # around the ring
        memory.write(tensors[3], np.full(100 * kb, 100 + i, np.uint8))
    assert [memory.get(tensor).unique().tolist() for tensor in tensors] == [[i] for i in (1, 2, 3, 139, 5, 6, 7, 8)]
    assert staging() == 4096 * kb


@EMULATED
def test_calls_come_as_late_as_they_may() -> None:
    """When somebody waits, or gives memory back."""
    device = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    x, other = (zeros((1, 8), torch.float32) for _ in range(2))
    for tensor in (x, other):
        device.map(tensor)
    out, count = device.zeros((1,), torch.int32), device.place(torch.tensor([1], dtype=torch.int32))
    for last in (device.wait, lambda: device.library.unmap_memory(other.data_ptr())):
        x[:] = torch.tensor([0, 9, 0, 0, 0, 0, 0, 0])
        device.context.call(ArgmaxArgs(count.data_ptr(), x.data_ptr(), out.data_ptr(), 8, 0))
        x[:] = torch.tensor([0, 0, 0, 0, 0, 9, 0, 0])
        last()
        x[:] = 0
        assert device.memory.get(out).tolist() == [5]
    device.context.map_memory(other.data_ptr(), other.nbytes)  # which is unmapped with the backend


@EMULATED
def test_records_lead_nowhere_else() -> None:
    device = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    x, out = torch.randn(3, 40), np.zeros(3, np.int32)
    count, own = np.array([3], np.int32), device.place(x)
    with pytest.raises(KernelError, match="pd_argmax: logits points to memory that is not the device's"):
        call = device.call()
        call.run(ArgmaxArgs(call.given(count), x.data_ptr(), call.wanted(out), 40, 0))
    with pytest.raises(KernelError, match="pd_argmax: num_rows points to memory that is not the device's"):
        call = device.call()
        call.run(ArgmaxArgs(count.ctypes.data, own.data_ptr(), call.wanted(out), 40, 0))
    call = device.call()
    call.run(ArgmaxArgs(call.given(count), own.data_ptr(), call.wanted(out), 40, 0))
    assert out.tolist() == x.argmax(1).tolist()


@EMULATED
def test_records_lead_to_no_other_device() -> None:
    first, second = (DeviceBackend(load(EMULATED_DEVICE), torch.float32, device=number) for number in range(2))
    x, out = first.place(torch.randn(3, 40)), np.zeros(3, np.int32)
    for backend in (first, second):
        call = backend.call()
        record = ArgmaxArgs(call.given(np.array([3], np.int32)), x.data_ptr(), call.wanted(out), 40, 0)
        if backend is first:
            call.run(record)
            continue
        with pytest.raises(KernelError, match="pd_argmax: logits points to memory that is not the device's"):
            call.run(record)


TOUCH = """
import os, sys
import numpy as np, torch
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, ArgmaxArgs, load
for hand in sys.argv[1:]:
    child = os.fork()
    if not child:
        backend = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
        x = backend.place(torch.randn(2, 64))
        print("so far", flush=True)
        exec(hand)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
HANDS = {
    "the host reads": "x[0, 0].item()",
    "the host writes": "x[1, 5] = 1.0",
    "a kernel reads behind it": """
call, out = backend.call(), np.zeros(3, np.int32)
call.run(ArgmaxArgs(call.given(np.array([3], np.int32)), x.data_ptr(), call.wanted(out), 64, 0))""",
}


@EMULATED
def test_a_hand_that_must_not() -> None:
    """ends the process, there and then; one that may does not."""
    hands = ["x.size(0)", *HANDS.values()]
    told = subprocess.run([sys.executable, "-c", TOUCH, *hands], capture_output=True, text=True)
    ends = [0, *([-signal.SIGSEGV] * len(HANDS))]
    assert told.stdout == "".join(f"so far\n{end}\n" for end in ends), told.stderr


def test_memory_of_the_host_that_is_mapped(device: DeviceBackend) -> None:
    x, out = zeros((2, 50), torch.float32).copy_(torch.randn(2, 50)), np.zeros(2, np.int32)
    device.place(x)
    device.context.map_memory(x.data_ptr(), x.nbytes)
    call = device.call()
    call.run(ArgmaxArgs(call.given(np.array([2], np.int32)), x.data_ptr(), call.wanted(out), 50, 0))
    assert out.tolist() == x.argmax(1).tolist()
    with pytest.raises(KernelError, match="pd_memory_map: .*(mapped already|already mapped)"):
        device.context.map_memory(x.data_ptr(), x.nbytes)
    device.library.unmap_memory(x.data_ptr())
    with pytest.raises(KernelError, match="not mapped|not correspond to a registered"):
        device.library.unmap_memory(x.data_ptr())


def attended(backend: NativeBackend) -> list[torch.Tensor]:
    """What a program of two layers gives, step after step: of other rows, longer ones whose plans need more room, none,
    and then few again."""
    heads, kv_heads, dim, block, blocks, most = 4, 2, 16, 8, 300, 40
    cache = backend.cache(2, blocks, kv_heads, dim, block)
    values = torch.randn(2, 2, blocks, kv_heads, block, dim, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        k, v = values[layer]
        if not isinstance(backend, DeviceBackend):
            k = k.transpose(2, 3).contiguous()  # a processor has K the other way round
        backend.write(cache.k[layer], k.numpy())
        backend.write(cache.v[layer], v.numpy())
    plan = backend.plan(AttentionShape(heads, kv_heads, dim, block, 0.25))
    rows, q, y = (
        backend.zeros((1,), torch.int32),
        backend.zeros((most, heads * dim), torch.float32),
        [backend.zeros((most, heads * dim), torch.float32) for _ in range(2)],
    )
    program = backend.program()
    for layer in range(2):
        program.attention(rows, plan, q, cache, layer, y[layer])
    program.finish()
    rng, found = np.random.default_rng(3), []
    for lengths in ([5, 9], [7], [600, 40, 1, 513], [1100] * 12, [], [3, 5]):
        n = len(lengths)
        width = -(-max(lengths, default=1) // block)
        table = rng.integers(0, blocks, (n, width)).astype(np.int32)
        own = rng.standard_normal((most, heads * dim)).astype(np.float32)
        backend.write(rows, np.array([n], np.int32))
        backend.write(q, own)
        plan.update(np.arange(n + 1, dtype=np.int32), np.array(lengths, np.int32), table, None)
        program.run()
        for out in y:
            found.append((backend.memory.get(out) if isinstance(backend, DeviceBackend) else out.clone())[:n])
    return found


def test_a_program_is_repeated_with_what_is_there_now(device: DeviceBackend) -> None:
    """As attention in memory that is the host's, and on a processor."""
    got, want = attended(device), attended(NativeBackend(load("scalar"), torch.float32))
    for own, other in zip(got, want, strict=True):
        assert torch.allclose(own, other, atol=1e-5)


@EMULATED
def test_what_grows_with_each_step_is_not_recorded_in_each() -> None:
    """A branch of one token more each step: its plan gets a tile longer again and again, and later in chunks, too."""
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    recorded = backend.library.functions.pd_emulate_num_recorded
    plan, cache = backend.plan(AttentionShape(1, 1, 16, 64, 0.25)), backend.cache(1, 40, 1, 16, 64)
    rows, (q, out) = backend.zeros((1,), torch.int32), (backend.zeros((1, 16), torch.float32) for _ in range(2))
    program = backend.program()
    for _ in range(2):
        program.attention(rows, plan, q, cache, 0, out)
    program.finish()
    backend.write(rows, np.ones(1, np.int32))
    before = recorded()
    for tiles in range(1, 41):
        kv_len = np.array([64 * tiles], np.int32)
        plan.update(np.array([0, 1], np.int32), kv_len, np.arange(40, dtype=np.int32)[None], None)
        program.run()
    backend.wait()
    assert 2 < recorded() - before < 12


def test_a_list_belongs_to_one_library(device: DeviceBackend) -> None:
    program = device.program()
    program.finish()
    program.run()
    with pytest.raises(KernelError, match=f"the list was carried out by {device.name} before; scalar needs its own"):
        load("scalar").context().run(program.ops)
