"""Who has how much of a device's memory: KV of the target and of a draft model, and what a step works in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument
from pagedec.kernels.device import ROOM_SHARE, DeviceBackend
from pagedec.kernels.device_memory import DeviceMemory
from pagedec.kernels.library import EMULATED_DEVICE
from tests.engine.test_speculation import drafted_by
from tests.kernels import cuda_library

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
MIB = 1 << 20
TOTAL = 24 * MIB
BIG = "too large for it"


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A device of so many bytes: what was taken of it, piece by piece."""
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
    taken, own = list[int](), DeviceMemory._own

    def take(memory: DeviceMemory, num_bytes: int) -> torch.Tensor:
        if sum(taken) + num_bytes > TOTAL:
            raise MemoryError(BIG)
        taken.append(num_bytes)
        return own(memory, num_bytes)

    monkeypatch.setattr(DeviceMemory, "_own", take)
    monkeypatch.setattr(DeviceBackend, "room", lambda self: int(ROOM_SHARE * (TOTAL - sum(taken))))
    yield taken


def engine(path: Path, **arguments: Any) -> LLM:
    return LLM(str(path), skip_tokenizer_init=True, dtype="bfloat16", **{"max_num_batched_tokens": 64, **arguments})


def pools(llm: LLM) -> dict[str, int]:
    lanes = llm.engine.executor.worker.lanes  # type: ignore[attr-defined]
    return {lane: runner.cache.k.shape[1] for lane, runner in lanes.items()}


def test_a_draft_model_has_as_many_blocks(tiny_path: Path, used: list[int]) -> None:
    """Its KV stands beside the target's, which leaves it as much as that takes; and speculation goes on."""
    llm = engine(tiny_path, speculative_config={**drafted_by(tiny_path), "adaptive": False})
    found = pools(llm)
    assert found["target"] > 2 * 320 // 16 and found["draft"] == found["target"]
    assert "what a draft model's KV leaves of the" in llm.kv_cache.reason
    kv = 2 * llm.kv_cache.num_bytes
    assert 0.8 * TOTAL < kv < ROOM_SHARE * TOTAL
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate([[5, 9, 40]], params, use_tqdm=False)
    assert llm.engine.stats.num_failed_steps == 0
    assert llm.engine.stats.drafts["draft_model"].num_accepted > 0
    llm.close()


def test_a_draft_models_own_size(tiny_path: Path) -> None:
    """Which the target leaves to it, and has all else; alone it has all."""
    llm = engine(tiny_path, speculative_config={**drafted_by(tiny_path), "num_blocks": 400})
    found, pool = pools(llm), llm.kv_cache
    assert found["draft"] == 400 < found["target"] and "all of the" in pool.reason
    assert 0.8 * TOTAL < pool.num_bytes + 400 * pool.num_bytes // pool.num_blocks < ROOM_SHARE * TOTAL
    llm.close()


def test_all_of_it_is_the_targets(tiny_path: Path) -> None:
    llm = engine(tiny_path)
    assert "all of the" in llm.kv_cache.reason and llm.kv_cache.num_bytes > 0.8 * TOTAL
    llm.close()


def test_what_there_is_no_room_for_is_named(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidArgument, match="^kv_cache_memory is 33554432: must be less: the KV pool would take 32 MiB"
    ):
        engine(tiny_path, kv_cache_memory="32MiB")
    with pytest.raises(InvalidArgument, match=f"^max_num_batched_tokens is 65536: must be less, .* of KV: {BIG}$"):
        engine(tiny_path, max_num_batched_tokens=65536)
    monkeypatch.setattr(DeviceBackend, "__init__", _too_full)
    with pytest.raises(InvalidArgument, match=f"^PAGEDEC_ISA is 'cuda_emulated': cannot be used: {BIG}$"):
        engine(tiny_path)


def _too_full(*_: Any) -> None:
    raise MemoryError(BIG)
