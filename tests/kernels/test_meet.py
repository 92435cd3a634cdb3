"""Where ranks on one machine wait for one another."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from pagedec.kernels.library import Context, KernelError, Library, MeetArgs

STRIDE = 32  # PD_MEET_STRIDE


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (MeetArgs(None, 1.0, 0, 1), "pd_meet: arrivals is NULL"),
        (MeetArgs(64, 1.0, 2, 2), "pd_meet: rank is 2; it must be 0 to 1"),
        (MeetArgs(64, 0.0, 0, 2), "pd_meet: seconds is 0; it must be above 0"),
        (MeetArgs(64, float("nan"), 0, 2), "pd_meet: seconds is nan"),
    ],
)
def test_mistakes_are_named(context: Context, record: MeetArgs, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        context.call(record)


def test_nobody_is_through_before_all_have_come(library: Library) -> None:
    """A thousand meetings of three: nobody is ever two ahead of another, and what was written before is seen behind."""
    arrivals, seen = torch.zeros(3, STRIDE, dtype=torch.int32), np.zeros((3, 2), np.int64)
    wrong: list[str] = []

    def go(rank: int) -> None:
        context = library.context(1)
        for i in range(1000):
            seen[rank, i % 2] = i
            context.call(MeetArgs(arrivals.data_ptr(), 20.0, rank, 3))
            if not (seen[:, i % 2] == i).all():
                wrong.append(f"rank {rank} at {i}: {seen}")

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and arrivals[:, 0].tolist() == [1000] * 3


def test_counts_may_wrap(library: Library) -> None:
    arrivals = torch.full((2, STRIDE), 2**31 - 1, dtype=torch.int32)
    threads = [
        threading.Thread(target=lambda rank=rank: library.context(1).call(MeetArgs(arrivals.data_ptr(), 20.0, rank, 2)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert arrivals[:, 0].tolist() == [-(2**31)] * 2


def test_who_does_not_come_is_named(context: Context) -> None:
    arrivals = torch.zeros(3, STRIDE, dtype=torch.int32)
    arrivals[1, 0] = 1
    began = time.monotonic()
    with pytest.raises(KernelError, match="pd_run: rank 2 has not come in time"):
        context.call(MeetArgs(arrivals.data_ptr(), 0.05, 0, 3))
    assert time.monotonic() - began < 20
