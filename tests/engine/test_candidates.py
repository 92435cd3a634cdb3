"""Candidates beside what a draft model rolls: verified with it, and nothing is rolled behind them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.decoders.draft_model import widths_within
from tests.engine.crowd import Tiny
from tests.engine.test_failures import Unwell
from tests.engine.test_speculation import drafted_by
from tests.support import add, step


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_candidates_beside_the_chain(tiny: Tiny, other_path: Path, temperature: float) -> None:
    """More of them are accepted, in blocks that a path crosses; the answers are the same."""
    prompts = [[(i * 7 + j * j) % 131 for j in range(5 + 4 * i)] for i in range(6)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
    want = [output.outputs for output in tiny(num_blocks=200).generate(prompts, params, use_tqdm=False)]
    found = []
    for block_size, num_candidates in ((16, 1), (16, 2), (8, 5)):
        own = drafted_by(other_path, num_candidates=num_candidates)
        llm = tiny(num_blocks=300, block_size=block_size, speculative_config=own)
        assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == want
        drafts = llm.engine.stats.drafts["draft_model"]
        assert drafts.num_drafted <= drafts.num_drafts * 3 * num_candidates
        found.append(drafts.num_accepted)
    assert found[0] < found[1] < found[2]


def test_candidates_within_their_room() -> None:
    """The first places have theirs first; a chain has no widths."""
    assert widths_within(3, 1, 3) == widths_within(3, 4, 3) == ()
    assert widths_within(3, 3, 9) == widths_within(3, 3, 100) == (3, 3, 3)
    assert widths_within(3, 3, 4) == (2, 1, 1) and widths_within(3, 3, 6) == (3, 2, 1)
    assert widths_within(1, 16, 7) == (7,)


def asked(rng: random.Random, seed: int) -> SamplingParams:
    way: dict[str, Any] = {
        "method": "draft_model", "num_candidates": rng.randrange(1, 17), "num_speculative_tokens": rng.randrange(1, 9),
        "adaptive": rng.random() < 0.3,
    }  # fmt: skip
    rules = rng.choice([{}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"allowed_token_ids": [5]}])
    temperature, num = rng.choice([0.0, 0.9]), rng.choice([1, 1, 3])
    return SamplingParams(
        temperature=temperature, seed=seed, n=num, max_tokens=rng.randrange(1, 40), ignore_eos=True, speculative=way,
        **rules,
    )  # fmt: skip


def test_beside_who_leaves_on_a_device_that_fails(tiny: Tiny, other_path: Path) -> None:
    """Few blocks on both lanes, a budget smaller than some trees: no bit of an answer differs, and both pools are
    whole."""
    rng, table = random.Random(3), drafted_by(other_path, num_candidates=4, num_blocks=20)
    llm = tiny(num_blocks=40, block_size=8, max_num_batched_tokens=48, speculative_config=table)
    engine, given, got, num_left = llm.engine, dict[str, Any](), dict[str, Any](), 0
    unwell = Unwell(llm, lambda count, _: rng.random() < 0.02)
    while unwell.count < 400 or not engine.idle:
        if unwell.count < 400 and len(engine.scheduler.requests) < 8:
            prompt, name = [rng.randrange(3, 131) for _ in range(rng.randrange(1, 70))], str(len(given))
            given[name] = prompt, asked(rng, len(given))
            add(engine, name, *given[name])
        got |= {done.request.id: [answer.token_ids for answer in done.answers] for done in step(engine)}
        if engine.scheduler.requests and rng.random() < 0.05:
            engine.abort(rng.choice(engine.scheduler.requests).id)
            num_left += 1
        engine.scheduler.check()
    engine.scheduler.reset_prefix_cache()
    for pool in engine.scheduler.pools.values():
        assert len(pool.free) == pool.num_blocks and not any(pool.refs) and not any(pool.pins)
    assert num_left > 5 and unwell.num_failures > 3 and engine.stats.drafts["draft_model"].num_accepted > 50
    names = [*got][::2]
    plain = tiny(num_blocks=400)
    prompts, params = zip(*(given[name] for name in names), strict=True)
    outputs = plain.generate(list(prompts), [own.clone(speculative=False) for own in params], use_tqdm=False)
    assert [got[name] for name in names] == [[answer.token_ids for answer in o.outputs] for o in outputs]
