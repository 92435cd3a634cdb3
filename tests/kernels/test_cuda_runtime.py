"""What the host asks of CUDA: devices that cannot be used are named, threads keep theirs, and nothing is done while a
list is recorded that a real device forbids. On the emulated device, which has the calls of CUDA's runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_void_p
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels.arena import zeros
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.device_memory import DeviceMemory
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, ArgmaxArgs, Context, KernelError, Library, OpList, load
from tests.kernels import calls, cuda_library

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


@pytest.fixture
def device() -> Iterator[Library]:
    library = load(EMULATED_DEVICE)
    yield library
    library.functions.pd_emulate_lost(0)
    library.functions.pd_emulate_capability(8)
    library.functions.pd_emulate_device(0)


@pytest.mark.parametrize(
    ("major", "problem"),
    [
        (7, "device 0 has compute capability 7.0; it must be 8.0 or newer"),
        (9, "nothing here was built for device 0, of compute capability 9.0 .no kernel image is .*: make cuda"),
    ],
)
def test_a_device_that_kernels_are_not_for(device: Library, major: int, problem: str) -> None:
    device.functions.pd_emulate_capability(major)
    with pytest.raises(KernelError, match=f"^pd_context_new: {problem}"):
        device.context()
    device.functions.pd_emulate_capability(8)
    assert device.context().num_threads == 3


def test_a_device_that_is_lost(device: Library) -> None:
    """Whoever waits first is told that it was a kernel before, and how to find it; and so is who makes a context."""
    context = device.context()
    memory, fetch = DeviceMemory(context, 0), context.new_fetch(64)
    tensor, out = memory.zeros((16,), torch.int32), np.zeros(16, np.int32)
    fetch.begin(tensor.data_ptr(), 64)
    device.functions.pd_emulate_lost(1)
    why = "an illegal memory access was encountered; a kernel before has failed, .* CUDA_LAUNCH_BLOCKING=1 in its"
    for wait in (context.wait, lambda: fetch.end(out.ctypes.data), lambda: memory.get(tensor)):
        with pytest.raises(KernelError, match=f"^(await|pd_fetch_end): {why}"):
            wait()
    with pytest.raises(KernelError, match=f"^pd_context_new: {why}"):
        device.context()
    device.functions.pd_emulate_lost(0)
    assert not memory.get(tensor).any()
    device.context().close()


def used(context: Context) -> None:
    """Work of every kind, and what it has taken is given back."""
    memory, host = DeviceMemory(context, 0), zeros((1, 64), torch.float32)
    tensor, out, fetch = memory.put(torch.ones(16)), np.zeros(16, np.float32), context.new_fetch(64)
    context.map_memory(host.data_ptr(), host.nbytes)
    fetch.begin(tensor.data_ptr(), 64)
    memory.fill(tensor, 0)
    fetch.end(out.ctypes.data)
    assert (out == 1).all() and not memory.get(tensor).any()
    context.library.unmap_memory(host.data_ptr())
    context.close()


@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("own", [0, 1])
def test_a_thread_has_its_device_still(device: Library, own: int, of: int) -> None:
    """Whoever calls us may work on another one, with torch, say."""
    device.functions.pd_emulate_device(own)
    used(device.context(0, of))
    assert device.functions.pd_emulate_device(-1) == own


def test_contexts_of_two_devices_in_threads_of_their_own(device: Library) -> None:
    """A thread that was never asked has none of its own: it goes to the context's."""
    contexts, problems = [device.context(0, number) for number in (0, 1, 0, 1)], list[BaseException]()

    def work(context: Context) -> None:
        try:
            used(context)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def in_thread(work: Callable[[], object]) -> None:
    """In one of its own, which was never asked for a device."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()


def test_memory_of_the_host_is_taken_back_from_all_devices(device: Library) -> None:
    """When none of them works on it any more, whichever a context was made on last."""
    first, last = (device.context(0, number) for number in (0, 1))
    x, memory = zeros((1, 8), torch.float32), DeviceMemory(first, 0)
    count, out = memory.put(torch.ones(1, dtype=torch.int32)), memory.zeros((1,), torch.int32)
    first.map_memory(x.data_ptr(), x.nbytes)
    x[0, 5] = 9
    first.call(ArgmaxArgs(count.data_ptr(), x.data_ptr(), out.data_ptr(), 8, 0))
    in_thread(lambda: device.unmap_memory(x.data_ptr()))
    x[0, 5] = 0
    assert memory.get(out).tolist() == [5]
    last.close()


def test_nobody_goes_to_a_device_that_is_not_used(device: Library) -> None:
    """As a rank whose device is not the first one: a context there would take hundreds of megabytes, whichever thread
    makes and frees what there is."""
    made = list[Any]()

    def make() -> None:
        context = device.context(0, 1)
        memory = DeviceMemory(context, 0)
        count, x, out = (
            memory.put(values) for values in (torch.ones(1, dtype=torch.int32), torch.eye(4), torch.ones(4))
        )
        program = OpList([ArgmaxArgs(count.data_ptr(), x.data_ptr(), out.data_ptr(), 4, 0)] * 2)
        for _ in range(2):
            context.run(program)
        made.extend([program, context.new_fetch(64), (x, out, count), memory, context])

    device.functions.pd_emulate_unused(0)
    in_thread(make)
    in_thread(lambda: used(device.context(0, 1)))
    while made:
        in_thread(lambda: made.pop(0))
    assert device.functions.pd_emulate_in_use(0) == 0 and device.functions.pd_emulate_in_use(1) == 1


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("nothing", 0),
        ("give elsewhere", 0),
        *((name, 901) for name in ("wait", "look", "copy", "take", "give", "wait for all elsewhere")),
    ],
)
def test_what_must_not_be_while_a_list_is_recorded(device: Library, what: str, status: int) -> None:
    """The emulated device is as strict as that, and its stream is then as before."""
    context = device.context()
    capture = device.functions.pd_emulate_capture
    capture.argtypes = (c_void_p, c_char_p)
    assert capture(context.stream, what.encode()) == status
    assert (
        calls.argmax(cuda_library.open_library(EMULATED_DEVICE).context(), np.eye(3, dtype=np.float32)) == [0, 1, 2]
    ).all()
    context.wait()


def test_a_copy_that_nobody_ends(device: Library) -> None:
    """Its memory is given up when it is through, also behind its context's end."""
    context = device.context()
    tensor, fetches = (
        DeviceMemory(context, 0).zeros((1 << 14,), torch.int32),
        [context.new_fetch(1 << 16) for _ in range(2)],
    )
    for fetch in fetches:
        fetch.begin(tensor.data_ptr(), tensor.nbytes)
    del fetches[0]
    context.wait()
    context.close()


@pytest.mark.parametrize("status", [0, 101])
def test_the_generation_is_what_the_driver_tells(device: Library, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Or an error: devices that it tells nothing of are not all alike."""

    class Driver:
        @staticmethod
        def cuDeviceGet(found: Any, number: int) -> int:
            found._obj.value = number + 7  # its own name of it
            return 0

        @staticmethod
        def cuDeviceGetAttribute(found: Any, name: int, of: Any) -> int:
            assert of.value == 8
            found._obj.value = {75: 9, 76: 0}[name]
            return status

    backend = DeviceBackend(device, torch.float32, device=1)
    monkeypatch.setattr(backend, "name", CUDA)
    monkeypatch.setattr("pagedec.kernels.device.ctypes.CDLL", lambda name: Driver)
    if status == 0:
        assert backend.generation == "9.0"
        return
    with pytest.raises(KernelError, match="the driver does not tell the compute capability of device 1: its error 101"):
        _ = backend.generation
