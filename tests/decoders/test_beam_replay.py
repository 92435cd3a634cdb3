"""Rows that were ranked by themselves, ranked together: the order and the bits of ranking them at once, or no order
where rounding leaves it open."""

from __future__ import annotations

import numpy as np
import pytest

from pagedec.core.protocol import Candidates
from pagedec.core.sampler import Sampler
from pagedec.decoders.beam_replay import MARGIN, merged
from pagedec.kernels.reference_best import best

GROUP = np.dtype([
    ("k", int), ("is_drawn", int), ("seed", int), ("first", int), ("stop", int), ("top_k", int), ("top_p", float),
    ("min_p", float), ("temperature", np.float32), ("min_tokens_to_keep", int),
])  # fmt: skip
ROW = np.dtype([("row", int), ("place", int), ("score", np.float32), ("stream", int), ("position", int)])
VOCAB = 60


def ranked(logits: np.ndarray, totals: np.ndarray, k: int, sampler: Sampler | None, alone: bool) -> list[Candidates]:
    """All rows together, or each by itself behind a score of 0."""
    count = len(logits)
    rows = np.zeros(count, ROW)
    rows["row"] = np.arange(count)
    rows["place"], rows["score"] = (0, 0) if alone else (np.arange(count), totals)
    rows["stream"], rows["position"] = 7 + np.arange(count), 11
    groups = np.zeros(count if alone else 1, GROUP)
    groups["k"], groups["stop"] = k, np.arange(1, count + 1) if alone else count
    groups["first"] = groups["stop"] - (1 if alone else count)
    groups["temperature"] = groups["top_p"] = groups["min_tokens_to_keep"] = 1
    if sampler is not None:
        groups["is_drawn"], groups["seed"], groups["temperature"] = 1, sampler.seed, sampler.temperature
        groups["top_k"], groups["top_p"] = sampler.top_k, sampler.top_p
    lse = np.array([np.log(np.exp(row.astype(np.float64)).sum()) for row in logits], np.float32)
    found = best(logits, lse, rows, groups)
    return [Candidates(f["place"], f["token"], f["score"], f["logprob"], f["key"]) for f in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sampler", [None, Sampler(0.7, seed=3), Sampler(1.0, top_k=5, top_p=0.9, seed=4)], ids=str)
def test_the_order_is_that_of_ranking_all_at_once(sampler: Sampler | None) -> None:
    """Numbers are coarse every other time, so that some are equal."""
    rng, decided = np.random.default_rng(5), 0
    for turn in range(150):
        count, k = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        logits = rng.normal(size=(count, VOCAB)).astype(np.float32) * 3
        totals = -rng.random(count).astype(np.float32) * 20
        if turn % 2:
            logits, totals = np.round(logits), np.round(totals * 4) / 4
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        asked = k + (MARGIN if sampler is not None else 0)
        [want] = ranked(logits, totals, k, sampler, alone=False)
        rows = ranked(logits, totals, asked, sampler, alone=True)
        got = merged(range(count), totals, rows, asked, k, sampler is not None)
        if got is None:
            continue
        decided += 1
        for name in ("parents", "tokens", "scores", "logprobs"):
            assert np.array_equal(getattr(got, name), getattr(want, name)), name
    assert decided > 75


def row(tokens: list[int], logprobs: list[float], keys: list[float] | None = None) -> Candidates:
    values = np.array(logprobs, np.float32)
    own = values if keys is None else np.array(keys, np.float32)
    return Candidates(np.zeros(len(tokens), np.int32), np.array(tokens, np.int32), values, values, own)


def test_equal_scores_of_two_rows_are_left_to_the_device() -> None:
    totals = np.array([-1.0, -2.0], np.float32)
    rows = [row([3, 4], [-1.5, -2.0]), row([5, 6], [-0.5, -9.0])]
    assert merged([0, 1], totals, rows, 2, 1, False) is None  # -2.5 twice
    rows[1] = row([5, 6], [-0.25, -9.0])
    found = merged([0, 1], totals, rows, 2, 2, False)
    assert found is not None and found.tokens.tolist() == [5, 3] and found.parents.tolist() == [1, 0]


def test_keys_that_rounding_may_have_changed_are_left_to_the_device() -> None:
    totals = np.array([-100.0, -100.0], np.float32)
    near, far = np.float32(1.0) + np.float32(2e-7), 2.0
    rows = [row([3], [-1.0], [1.0]), row([5], [-1.0], [near])]
    assert merged([0, 1], totals, rows, 9, 2, True) is None
    rows[1] = row([5], [-1.0], [far])
    found = merged([0, 1], totals, rows, 9, 2, True)
    assert found is not None and found.tokens.tolist() == [5, 3]


def test_what_a_drawn_row_did_not_tell_may_matter() -> None:
    """Two of a row were told: a third may be as good as the second but for its rounding."""
    totals = np.array([-1.0], np.float32)
    told = [row([3, 4], [-1.0, -2.0], [1.0, 0.5])]
    assert merged([0], totals, told, 2, 2, True) is None
    assert merged([0], totals, told, 3, 2, True) is not None
    assert merged([0], totals, told, 2, 1, True) is not None
