"""What tests of whole models share: logits of every position, without a scheduler, and a small model's metadata."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pagedec.core.adapter_places import Adapter
from pagedec.core.forward import LaneForward
from pagedec.core.request import Failed, Progress, Request
from pagedec.engine.engine import Engine, EngineEvent, FinishedRequest
from pagedec.models.buffers import READ_ROWS
from pagedec.models.model import Model
from pagedec.runtime.cache import allocate_cache
from pagedec.runtime.runner import LaneRunner

BLOCK_SIZE = 16
NOTHING = np.empty(0, np.int32)
LLAMA_GGUF_FIELDS = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 96,
}
"""The metadata of a small Llama."""


def add(
    engine: Engine,
    request_id: str,
    prompt: Sequence[int],
    params: Any,
    priority: int = 0,
    salt: str = "",
    adapter: Adapter | None = None,
) -> Request:
    """Queue a request in an engine without a loop."""
    request = engine.admit(request_id, prompt, params, priority, salt, adapter=adapter)
    engine.add(request)
    return request


def step(engine: Engine, seen: list[EngineEvent] | None = None) -> list[FinishedRequest]:
    """One step of an engine without a loop: the requests that ended. Raises the error of one that failed."""
    events = engine.step()
    if seen is not None:
        seen += events
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    return [event for event in events if isinstance(event, FinishedRequest)]


def drain(engine: Engine, seen: list[EngineEvent] | None = None) -> dict[str, list[list[int]]]:
    """All answers of what runs, by request."""
    answers: dict[str, list[list[int]]] = {}
    while not engine.idle:
        for finished in step(engine, seen):
            answers[finished.request.id] = [answer.token_ids for answer in finished.answers]
    return answers


def progress(events: Sequence[EngineEvent]) -> list[Progress]:
    return [event for event in events if isinstance(event, Progress)]


def all_logits(model: Model, tokens: Sequence[int], chunk: int = READ_ROWS) -> torch.Tensor:
    """fp32 [len(tokens), vocab] of one sequence, evaluated `chunk` rows a step in scattered blocks."""
    assert chunk <= READ_ROWS, "a step's logits must all be in the buffer"
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    runner = LaneRunner(model, allocate_cache(model.arch, num_blocks, BLOCK_SIZE, model.backend), chunk)
    pieces = []
    for start in range(0, len(tokens), chunk):
        piece = np.array(tokens[start : start + chunk], np.int32)
        n, end = len(piece), start + len(piece)
        at = np.arange(start, end, dtype=np.int32)
        slots = (table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).astype(np.int32)
        runner.execute(
            LaneForward(
                "target",
                piece,
                at,
                slots,
                np.array([0, n], np.int32),
                np.array([end], np.int32),
                table[None],
                read_rows=np.arange(n, dtype=np.int32),
            )
        )
        pieces.append(runner.buffers.logits[:n].clone())
    return torch.cat(pieces)


def wait_for(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait until something is so. Raises AssertionError where it takes too long even for a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.002)
