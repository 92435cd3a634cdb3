"""What the engine needs of whoever carries out its steps."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from pagedec.core.protocol import Answers, LaneForward


class Executor(Protocol):
    """Carries out steps in the order they are given. Workers own weights, KV and kernels, and no decoding state."""

    def execute(self, forwards: Mapping[str, LaneForward]) -> Future[Answers]:
        """Carry out one step's forwards, by lane. The future fails with what went wrong."""

    def stop(self) -> None:
        """Give up the device. No step may follow."""
