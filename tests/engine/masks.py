"""Forwards whose rows are masked, and workers that warn or have lost their device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pagedec.config import EngineConfig
from pagedec.core.forward import DRAW_DTYPE, NO_INTS, LaneForward, Masks
from pagedec.errors import WeightsWarning
from pagedec.kernels.context import KernelError
from pagedec.runtime.geometry import Geometry, LaneGeometry
from pagedec.runtime.loading import Ranks, load_worker
from pagedec.runtime.pool import KvPool
from pagedec.runtime.worker import Worker
from tests.masks import of_words


def masked_forward(num_rows: int, vocab: int) -> tuple[Callable[..., LaneForward], Masks, dict[int, set[int]]]:
    """A prompt of `num_rows` tokens that draws greedily at every row; masks for every second row; and what they allow,
    by row."""
    rng = np.random.default_rng(num_rows)
    rows = np.arange(num_rows, dtype=np.int32)
    masked = rows[::2].copy()
    bits = np.zeros((len(masked), -(-vocab // 32) * 32), np.uint8)
    allowed = {}
    for i, row in enumerate(masked.tolist()):
        tokens = rng.choice(vocab, 3, replace=False)
        bits[i, tokens] = 1
        allowed[row] = set(tokens.tolist())
    masks = of_words(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
    draws = np.zeros(num_rows, DRAW_DTYPE)
    draws["row"], draws["position"] = rows, rows + 1
    tokens = rng.integers(0, vocab, num_rows).astype(np.int32)

    def forward(masked: bool) -> LaneForward:
        return LaneForward(
            "target",
            tokens,
            rows,
            rows,
            np.array([0, num_rows], np.int32),
            np.array([num_rows], np.int32),
            np.arange(-(-num_rows // 16), dtype=np.int32)[None].copy(),
            read_rows=rows,
            draws=draws,
            masked_rows=rows[::2].copy() if masked else NO_INTS,
        )

    return forward, masks, allowed


def load_with_a_warning(config: EngineConfig, ranks: Ranks) -> Any:
    warnings.warn("made up", WeightsWarning, stacklevel=1)
    warnings.warn("of a package", FutureWarning, stacklevel=1)
    warnings.warn("for its developers", DeprecationWarning, stacklevel=1)
    pool = KvPool(2, 16, 0, "")
    return Worker({}, Geometry({"target": LaneGeometry(2, 3, 4)}, pool, (), "none", "float32", None, 1))


def load_on_a_device_that_is_lost(config: EngineConfig, ranks: Ranks) -> Any:
    """The first process that loads: nothing is carried out there. The others are as they should be."""
    worker, place = load_worker(config, ranks), Path(os.environ["TEST_LOST_DEVICE"])
    if not place.exists():
        place.touch()
        runner = worker.lanes["target"]  # type: ignore[union-attr]
        for owner, name in ((runner, "execute"), (runner, "begin"), (runner.backend, "wait")):
            setattr(owner, name, _lost)
    return worker


def _lost(*_: Any) -> None:
    raise KernelError("pd_run_program: an illegal memory access was encountered")
