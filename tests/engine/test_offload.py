"""Blocks that the pool gives up and the host keeps: the same bits, less to compute again."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.config import EngineConfig
from pagedec.core.offload import OffloadTier
from pagedec.errors import InvalidArgument, InvariantError
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.runtime.offloaded_blocks import OffloadedBlocks
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers

BLOCK = 16 * 2 * 2 * 64 * 4 + 4 * 16  # bytes in fp32: tokens, layers, K and V, their size; and token ids
PLAIN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
KEPT = {"num_blocks": 12, "kv_offload_memory": 60 * BLOCK}


def prompts(count: int = 8, length: int = 90) -> list[dict[str, list[int]]]:
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(3, 131) for _ in range(length)]} for _ in range(count)]


def answers(llm: LLM, asked: list[dict[str, list[int]]]) -> list[Any]:
    return [[(a.token_ids, a.logprobs) for a in o.outputs] for o in llm.generate(asked, PLAIN, use_tqdm=False)]


def tier(llm: LLM) -> OffloadTier:
    found = llm.engine.scheduler.pools["target"].offload
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------- the same bits
@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", [{}, {"executor": "process"}, {"tensor_parallel_size": 2}], ids=str)
def test_what_was_given_up_comes_back(tiny: Tiny, own: dict[str, Any]) -> None:
    """A pool for two of eight prompts, asked twice: the second time nothing but their last blocks is computed."""
    expected = answers(tiny(num_blocks=64, **own), prompts())
    llm = tiny(**KEPT, **own)
    assert answers(llm, prompts()) == expected
    assert tier(llm).num_stored >= 6 * 5
    rows, loaded = llm.engine.stats.num_rows, tier(llm).num_loaded
    assert answers(llm, prompts()) == expected
    assert tier(llm).num_loaded - loaded >= 6 * 5
    assert llm.engine.stats.num_rows - rows < 8 * (16 + 10 + 10)  # of 8 x 100; some give way and come back


def test_a_crowd_that_is_preempted(tiny: Tiny, expected: list[Tokens]) -> None:
    """Greedy, sampled, repeated and beams, in ten blocks, with one place, a few, and more than are needed."""
    for places in (1, 7, 100):
        llm = tiny(**{**SMALL, "block_size": 8, "num_blocks": 12}, kv_offload_memory=places * BLOCK // 2)
        assert right_answers(llm) == expected
        assert tier(llm).num_stored > 0
        assert_whole(llm, expected)


def test_other_blocks_and_numbers(tiny: Tiny) -> None:
    for own in ({"block_size": 8, "dtype": "bfloat16"}, {"block_size": 32}, {"attention_backend": "reference"}):
        expected = answers(tiny(num_blocks=64, **own), prompts(4))
        room = {8: 24, 32: 6}.get(own.get("block_size", 16), 12)
        llm = tiny(num_blocks=room, kv_offload_memory="2MiB", **own)
        assert answers(llm, prompts(4)) == expected == answers(llm, prompts(4))
        assert tier(llm).num_loaded > 0


# --------------------------------------------------------------------------------------------------------------- losses
def test_workers_that_die_lose_it(tiny: Tiny) -> None:
    expected = answers(tiny(num_blocks=64), prompts())
    llm = tiny(**KEPT, executor="process")
    assert answers(llm, prompts()) == expected
    assert len(tier(llm)) > 0
    os.kill(llm.engine.executor.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert answers(llm, prompts()) == expected == answers(llm, prompts())


def test_an_emptied_cache_finds_nothing(tiny: Tiny) -> None:
    llm = tiny(**KEPT)
    expected = answers(llm, prompts())
    assert llm.reset_prefix_cache()
    assert not len(tier(llm))
    loaded = tier(llm).num_loaded
    assert answers(llm, prompts(1)) == expected[:1] and tier(llm).num_loaded == loaded


def test_what_a_failed_step_has_moved_is_not_believed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(tiny(num_blocks=64), prompts())
    llm = tiny(**KEPT)
    plain, count = OffloadedBlocks.move, iter(range(1 << 30))

    def move(self: OffloadedBlocks, blocks: np.ndarray, places: np.ndarray) -> None:
        if next(count) % 5 == 3:  # half way
            plain(self, blocks[: len(blocks) // 2], places[: len(blocks) // 2])
            raise MemoryError("no pages")
        plain(self, blocks, places)

    monkeypatch.setattr(OffloadedBlocks, "move", move)
    for _ in range(6):
        try:
            assert answers(llm, prompts()) == expected
        except MemoryError:
            continue
        llm.engine.scheduler.check()
    monkeypatch.undo()
    assert answers(llm, prompts()) == expected


# ------------------------------------------------------------------------------------------------------------ the parts
def test_moves_are_in_order() -> None:
    """A block that comes back where another one went to its place, and goes again."""
    tier = OffloadTier(2)
    assert tier.store(b"a", 5) is None and tier.store(b"b", 6) is None
    assert tier.find(b"a") and not tier.find(b"c")
    tier.load(b"a", 7)
    assert tier.store(b"c", 8) == b"b", "the least recently used goes"
    assert tier.store(b"a", 7) is None, "it is here already"
    blocks, places = tier.take_moves()
    assert blocks.tolist() == [5, 6, 7, 8] and places.tolist() == [0, 1, -1, 1]
    assert not len(tier.take_moves()[0]) and (tier.num_stored, tier.num_loaded) == (3, 1)
    tier.check()
    tier.forget()
    assert b"a" not in tier and len(tier) == 0
    tier.check()
    tier._free.pop()
    with pytest.raises(InvariantError, match="a place is lost, or has two keys"):
        tier.check()


def test_all_of_a_block_goes_and_comes(tiny: Tiny) -> None:
    backend = ReferenceBackend(torch.bfloat16)
    cache = backend.cache(3, 6, 2, 32, 8)
    for plane in (cache.k, cache.v):
        plane.copy_(torch.randn(plane.shape))
    cache.tokens.copy_(torch.arange(48, dtype=torch.int32))
    before = [x.clone() for x in (cache.k, cache.v, cache.tokens)]
    offload = OffloadedBlocks(cache, 4, backend)
    offload.move(np.array([2, 4], np.int32), np.array([3, 0], np.int32))
    backend.poison(cache, np.array([2, 4]))
    offload.move(np.array([4, 2, 5], np.int32), np.array([-1, -4, -1], np.int32))
    for block, origin in ((0, 0), (2, 2), (4, 4), (5, 4)):
        assert torch.equal(cache.k[:, block], before[0][:, origin]) and torch.equal(
            cache.v[:, block], before[1][:, origin]
        )
        assert torch.equal(cache.tokens[block * 8 : block * 8 + 8], before[2][origin * 8 : origin * 8 + 8])


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_mistakes_are_named(tiny: Tiny) -> None:
    with pytest.raises(
        InvalidArgument, match=f"kv_offload_memory is 100: must be at least {BLOCK}, the bytes of a block"
    ):
        tiny(kv_offload_memory=100)
    with pytest.raises(InvalidArgument, match="kv_offload_memory is 1024: must be none without enable_prefix_caching"):
        EngineConfig.from_kwargs(kv_offload_memory=1024, enable_prefix_caching=False)
    with pytest.raises(InvalidArgument, match=r"kv_offload_memory is 'much': must be a number of bytes"):
        EngineConfig.from_kwargs(kv_offload_memory="much")
