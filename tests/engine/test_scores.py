"""Scores of continuations behind a session: what a prompt's reports say, and how much is computed for them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.protocol import Verdict
from pagedec.decoders import scoring
from pagedec.decoders.scoring import ScoreParams
from tests.engine.crowd import Tiny
from tests.engine.test_session_programs import assert_nothing_left

DRAWN = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
PROMPT = list(range(3, 40))


def test_scores_are_a_prompt_s_reports(tiny: Tiny) -> None:
    for settings in ({}, {"enable_prefix_caching": False, "max_num_batched_tokens": 7, "num_blocks": 14}):
        llm = tiny(**settings)
        rows = [[5], [5, 6], [5, 6, 7], [9] * 30, [5, 8, 9], [5, 8, 10], [], [5, 6]]
        with llm.session(PROMPT, seed=3) as session:
            for _ in range(2):  # the second time there is more in the prefix cache
                scores = session.score(rows, logprobs=2)
                for score, row in zip(scores, rows, strict=True):
                    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
                    [output] = llm.generate([PROMPT + row], params, use_tqdm=False)
                    assert score.logprobs == (output.prompt_logprobs or [])[len(PROMPT) :]
                    assert score.logprob == pytest.approx(sum(score.token_logprobs))
                session.generate(DRAWN, max_tokens=4)
                session.rollback(4)
            assert session.token_ids == PROMPT
        assert_nothing_left(llm)


def test_scores_share_what_they_have_in_common(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        session.score([[4]])
        before = llm.engine.stats.num_rows
        session.score([[7] * 20 + [last] for last in range(10, 20)])
        # one row reads the root, 20 are the common part, and its last one is read once more
        assert llm.engine.stats.num_rows - before <= 22


def test_continuations_that_begin_alike_do_not_wait_for_one_another(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        session.score([[4]])
        stats, choices = llm.engine.stats, [[7, 8, first, first, last] for first in range(10, 20) for last in (4, 5)]
        steps, rows = stats.num_steps, stats.num_rows
        session.score([*choices, [7], [7, 8], [7, 8, 12, 12]])  # those come with the others
        # the root, [7, 8], and what follows in one
        assert (stats.num_steps - steps, stats.num_rows - rows) == (3, 1 + 2 + 10 * 2)


def test_however_few_branches_live_at_once_scores_are_the_same(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    rows = [[rng.choice((5, 6)) for _ in range(rng.randrange(1, 8))] for _ in range(40)]
    llm, advance, live = tiny(), scoring.GivenText.advance, list[int]()

    def watched(self: scoring.GivenText, *given: Any) -> Verdict:
        live.append(len(self._branches))
        return advance(self, *given)

    monkeypatch.setattr(scoring.GivenText, "advance", watched)
    with llm.session(PROMPT, seed=3) as session:
        wanted = session.score(rows)
        for most in (1, 2, 3, 7):
            monkeypatch.setattr(scoring, "AT_ONCE", most)
            live.clear()
            assert session.score(rows) == wanted
            assert max(live) <= most + 1  # and the root
    assert_nothing_left(llm)


def test_branches_that_lost_their_blocks_find_one_that_waits_for_them(tiny: Tiny) -> None:
    """Far more branches than blocks: those that gave way recompute what they have in common once. Each was answered
    behind all of its own tokens and went, and with it what the others were waiting for."""
    rng = random.Random(5)
    rows = [[rng.randrange(60) for _ in range(3)] for _ in range(1000)]
    llm = tiny(enable_prefix_caching=False, num_blocks=24, max_model_len=80)
    with llm.session(PROMPT, seed=3) as session:
        scores = session.score(rows)
        assert llm.engine.stats.num_steps < 80
    assert_nothing_left(llm)
    with tiny(num_blocks=1000).session(PROMPT, seed=3) as session:
        assert session.score(rows) == scores


@pytest.mark.parametrize("num_rows", [16, 64])
def test_a_prompt_of_scores_may_be_reported_too(tiny: Tiny, num_rows: int) -> None:
    """In one step, and in pieces of which each is known when the next one comes."""
    llm = tiny(max_num_batched_tokens=num_rows)
    params = ScoreParams(continuations=((5, 6), (7, 8, 9)), max_tokens=3, logprobs=0, prompt_logprobs=0)
    request = llm.engine.admit("scores", PROMPT, params)
    llm.engine.add(request)
    for _ in range(8):
        llm.engine.step()
    assert request.closed and request.reports is not None and len(request.reports.edges) == 5
    [want] = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [None if one is None else one.logprob for one in request.reports.prompt]
    pairs = zip(want.prompt_logprobs, PROMPT, strict=True)
    assert found == [None if one is None else one[token].logprob for one, token in pairs]
