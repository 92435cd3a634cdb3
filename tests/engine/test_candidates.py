"""Candidates beside what a draft model rolls: verified with it, and nothing is rolled behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedec import SamplingParams
from pagedec.decoders.draft_model import widths_within
from tests.engine.crowd import Tiny
from tests.engine.test_speculation import drafted_by


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
