"""Beams with drafts on a device that checks every slot: eight tokens and short memories, so that scores are often equal
and drafts often right."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pagedec.core.logprobs import Reporting, answer_reports
from pagedec.core.stopping import Stopping
from pagedec.decoders import drafted_beam, make_decoder
from pagedec.decoders.beam_guesses import GuessedBeam
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.params import BeamSearchParams
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.world import World, limits


def search(
    seed: int, params: BeamSearchParams, disturb: bool, num_blocks: int = 300, num_rows: int = 300
) -> tuple[list[Any], Any]:
    """All that a search says, and its decoder."""
    engine = FakeEngine(World(seed).models, limits(num_blocks, max_num_batched_tokens=num_rows))
    rng = random.Random(seed)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 20))]
    stopping = Stopping((3,), max_tokens=params.max_tokens, min_tokens=params.min_tokens)
    limit = len(prompt) + (params.max_tokens or 0)
    request = engine.scheduler.admit(
        "beams", lambda context: make_decoder(params, context), prompt, stopping, limit, reporting=Reporting(1)
    )
    engine.scheduler.add(request)
    while not engine.scheduler.idle:
        if disturb and rng.random() < 0.2:
            engine.scheduler.preempt("beams")
        engine.step()
    engine.check_whole()
    assert not engine.failed
    told = [(request.output(h), h.score, h.reason, h.ancestry, answer_reports(request, h)) for h in request.done]
    return told, request.decoder


@pytest.mark.sampled(10)
@pytest.mark.parametrize("changes", [{}, {"do_sample": True, "temperature": 1.3}, {"num_beam_groups": 2}], ids=str)
@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_drafts_change_nothing_where_scores_are_often_equal(
    method: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never rest, whatever became of those before."""
    monkeypatch.setattr(drafted_beam, "LEAST_FIRST", 0.0)
    num_levels = num_steps = 0
    for seed in range(8):
        params = BeamSearchParams(beam_width=4, max_tokens=14, min_tokens=seed % 5, seed=seed, **changes)
        want, _ = search(seed, params, False, num_blocks=300)
        for disturb, num_blocks, num_rows in ((False, 300, 300), (True, 60, 30)):
            own = replace(params, speculative={"method": method})
            got, decoder = search(seed, own, disturb, num_blocks, num_rows)
            assert got == want, f"{own}, {num_blocks} blocks"
            assert isinstance(decoder, DraftedBeam)
            num_levels, num_steps = num_levels + decoder.num_levels, num_steps + decoder.num_steps
    assert num_levels > 1.1 * num_steps


def test_drafts_that_fail_rest_and_are_tried_again() -> None:
    params = BeamSearchParams(
        beam_width=4, max_tokens=14, seed=0, speculative={"method": "ngram", "num_speculative_tokens": 5}
    )
    _, decoder = search(0, params, False)
    decoder.odds.clear()
    decoder.num_taken, depths = 0, []
    for _ in range(8):
        depths.append(decoder.depth())
        decoder._note_depth(depths[-1])
    assert depths[0] == 5 and depths == sorted(depths, reverse=True) and depths[-1] == 0
    for _ in range(200):
        decoder._note_depth(0)
    assert decoder.depth() > 0


@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_level_is_cut_below_its_beams(num_groups: int) -> None:
    """One that some beams miss is never reached; what is cut of a wider one is the worst of each group."""
    params = BeamSearchParams(
        beam_width=4, num_beam_groups=num_groups, max_tokens=20, seed=0, speculative={"method": "ngram"}
    )
    engine = FakeEngine(World(1).models, limits(300, max_num_batched_tokens=300))
    request = engine.scheduler.admit("beams", lambda context: make_decoder(params, context), [1, 2], Stopping(), 22)
    engine.scheduler.add(request)
    decoder = request.decoder
    assert isinstance(decoder, GuessedBeam)
    for token in range(VOCABULARY):
        decoder.followers.note((token,), (range(VOCABULARY), [-1.0 - i for i in range(VOCABULARY)]))
    for least in (4 // num_groups, 4):  # behind the root there may be equal beams in several groups
        decoder.odds = [1.0] * decoder.deepest
        beams, levels = sorted(request.branches, key=lambda branch: branch.state), set[int]()
        for room in range(1, 40):
            counts = Counter[tuple[int, int]]()
            for beam, draft in zip(beams, decoder.draft(beams, room), strict=True):
                counts.update((depth, beam.state // decoder.group_width) for depth in draft.depths()[1:])
            assert counts.total() <= room and (counts.total() > 0) == (room >= least)
            for depth in {depth for depth, _ in counts}:
                groups = [count for (at, _), count in counts.items() if at == depth]
                assert least <= sum(groups) and max(groups) - min(groups) <= 1
                levels.add(sum(groups))
        assert levels == {*range(least, 8 + 1)}
        while request.history.depth[request.branches[0].tip] < 8:
            engine.step()
