"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pagedec import environment
from pagedec.errors import InvalidArgument, counted
from pagedec.runtime.control_groups import VERSION_2, groups, number, read

ROOT = Path("/")
THREADS_OF_A_PROCESSOR, FEW_THREADS = 4, 64
"""More wait for one another at each kernel's end: on two processors 64 answer within seconds, 4,096 in no time that
anybody waits. Few are let be on any machine, as a file for a larger one may say so."""
_told: tuple[int, int] | None = None
"""What torch used before an engine told it otherwise, and what that was."""


def quota(root: Path = ROOT) -> float | None:
    """The least time that a control group gives this process, in processors; None where none bounds it. `root`: where
    proc and sys are."""
    given = []
    for version, directory in groups(root, "cpu"):
        if version == VERSION_2:
            time, _, period = read(directory / "cpu.max").partition(" ")
        else:
            time, period = read(directory / "cpu.cfs_quota_us"), read(directory / "cpu.cfs_period_us")
        microseconds, of = number(time), number(period)  # "max", and -1 in version 1, are no numbers: no bound
        if microseconds and of:
            given.append(microseconds / of)
    return min(given, default=None)


def tell_torch(num_threads: int) -> None:
    """Have torch use so many threads, which is no choice for the process: the next engine's default is what torch used
    before."""
    global _told
    if num_threads != torch.get_num_threads():
        _told = of_torch(), num_threads
        torch.set_num_threads(num_threads)


def of_torch() -> int:
    """How many threads torch uses where no engine has told it otherwise."""
    now = torch.get_num_threads()
    return _told[0] if _told is not None and _told[1] == now else now


def default_threads(root: Path = ROOT) -> int:
    """As many as torch uses, but no more than a quota's processors, rounded: with more, all of them stand still once a
    period's time (of 100 ms, mostly) is used up, and each of the kernels waits for its last thread. Measured: of a
    quota of 1, two threads take 1.3 times as long as one; of one of 1.5, they take 0.85. OMP_NUM_THREADS is somebody's
    choice, and stands."""
    most, given = of_torch(), None if environment.says_threads() else quota(root)
    return most if given is None else max(1, min(most, int(given + 0.5)))


def check_threads(given: int) -> None:
    """Raise `InvalidArgument` for more threads than this machine can run."""
    processors = os.cpu_count() or 1
    most = max(FEW_THREADS, THREADS_OF_A_PROCESSOR * processors)
    if given > most:
        limit = f"must be at most {most} on this machine, which has {counted(processors, 'processor')}"
        raise InvalidArgument("num_threads", given, limit)
