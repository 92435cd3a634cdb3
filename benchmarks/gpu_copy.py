"""What a device's memory, its way to the host and a kernel's launch allow: the anchors of the other gpu_*.py.

python benchmarks/gpu_copy.py [--smoke] [--isa NAME]
"""

from __future__ import annotations

import numpy as np
from common import table
from gpu_common import Device, arguments_of, micro

from pagedec.kernels.library import ArgmaxArgs

VOCAB = 32  # of a kernel that does next to nothing


def copies(device: Device, num_bytes: int) -> list[list[object]]:
    """Ways of as many bytes: inside the device, through a kernel, to it and from it."""
    a, b = (device.memory.allocate(num_bytes) for _ in range(2))
    host, rows = np.zeros(num_bytes, np.uint8), []
    inside = device.timed(lambda: device.copy(a.data_ptr(), b.data_ptr(), num_bytes))
    fill = device.timed(lambda: device.memory.fill(a, 1))
    there = device.timed(lambda: device.context.write_memory(a.data_ptr(), host.ctypes.data, num_bytes))
    back = device.timed(lambda: device.context.read_memory(host.ctypes.data, a.data_ptr(), num_bytes))
    read = device.context.read_rate(a.data_ptr(), num_bytes, 1 if device.smoke else 20)
    ways = ("device to device, read and written", inside, 2), ("fill", fill, 1), ("host to device", there, 1)
    for name, timing, passes in (*ways, ("device to host", back, 1)):
        rate = 1e-9 * passes * num_bytes / timing.median
        rows.append([name, num_bytes, micro(timing.median), f"{rate:.4g}", f"{timing.spread:.3f}"])
    rows.append(["read by a kernel, the best", num_bytes, micro(num_bytes / read * 1e-9), f"{read:.4g}", "-"])
    return rows


def launches(device: Device) -> list[list[object]]:
    """What a kernel costs that does next to nothing: alone and waited for, one behind the other, in a recording."""
    logits, out, count = device.random((1, VOCAB)), device.put(np.zeros(1, np.int32)), device.count(1)
    record = ArgmaxArgs(count.data_ptr(), logits.data_ptr(), out.data_ptr(), VOCAB // 2, 0)
    many = 4 if device.smoke else 200

    def alone() -> None:
        device.context.call(record)
        device.context.wait()

    waited, behind = device.timed(alone), device.timed(lambda: device.context.call(record))
    recorded = device.timed(device.program([record] * many))
    staged = device.timed(lambda: device.memory.write(count, np.ones(1, np.int32)))
    return [
        ["a kernel, and a wait for it", micro(waited.median), f"{waited.spread:.3f}"],
        ["a kernel behind others", micro(behind.median), f"{behind.spread:.3f}"],
        [f"one of {many} in a recording", micro(recorded.median / many), f"{recorded.spread:.3f}"],
        ["4 bytes to the device, behind others", micro(staged.median), f"{staged.spread:.3f}"],
    ]


def main() -> None:
    device = Device(arguments_of(__doc__))
    device.head("Copies and launches")
    sizes = [1 << 12] if device.smoke else [1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 30]
    table(["way", "bytes", "us", "GB/s", "spread"], (row for size in sizes for row in copies(device, size)))
    table(["launch", "us", "spread"], launches(device))
    print(f"tensor cores from registers, bf16: {device.dot_rate():.4g} TFLOP/s\n")


if __name__ == "__main__":
    main()
