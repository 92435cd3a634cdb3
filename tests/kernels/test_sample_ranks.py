"""Draws of a rank: what comes so many places behind the token that is drawn."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.kernels import reference_readout as reference
from pagedec.kernels.library import Context, KernelError, available_isas, load
from pagedec.kernels.native import NativeBackend
from pagedec.speculation import MOST_CANDIDATES
from tests.kernels import calls
from tests.kernels.test_sample import PARAMETERS, SHAPES, logits, shaped


def in_order(context: Context, row: np.ndarray, draw: Any) -> list[int]:
    """All tokens that may be drawn, by log p + G, or by logit."""
    scores = np.where(np.isnan(row), -np.inf, row).astype(np.float64)
    if draw["temperature"] > 0:
        noise = context.gumbel(int(draw["seed"]), int(draw["stream"]), int(draw["position"]), 0, len(row))
        scores = reference.log_probabilities(row, draw) + noise.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    found: list[int] = order[scores[order] > -np.inf].tolist()
    return found


def ranked(draws: np.ndarray, ranks: range | list[int]) -> np.ndarray:
    """Each of the draws with all of the ranks, one behind the other."""
    out = draws.repeat(len(ranks))
    out["rank"] = np.tile(np.array(ranks), len(draws))
    return out


@pytest.mark.sampled(20)
@pytest.mark.same_bits
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 130, 5000, 49152])
def test_a_rank_is_a_place_in_the_order(context: Context, vocab: int, kind: str) -> None:
    """Where fewer tokens may be drawn than that, the first one again."""
    x = shaped(kind, vocab, vocab + len(kind))
    sets = [own for own in PARAMETERS if own.get("temperature") != 1e-6]  # at 1e6 fp32 has no room for the noise
    draws = np.concatenate([calls.draws(1, **parameters) for parameters in [*sets, {"temperature": 0.0}]])
    draws["seed"], draws["stream"], draws["position"] = 11, np.arange(len(draws)), 5
    found = calls.sample(context, x, ranked(draws, range(MOST_CANDIDATES))).reshape(len(draws), -1).tolist()
    for draw, tokens in zip(draws, found, strict=True):
        order = in_order(context, x[0], draw)
        wanted = [order[rank] if rank < len(order) else order[0] for rank in range(MOST_CANDIDATES)]
        assert tokens == wanted, draw


@pytest.mark.same_bits
def test_ranks_in_any_order_among_others(context: Context) -> None:
    """What the draw before has found is used again where it is of the same noise and set alone."""
    x, rng = logits(700, 5, rows=3), np.random.default_rng(2)
    sets = np.concatenate([calls.draws(3, stream=np.arange(3) // 2, **parameters) for parameters in PARAMETERS[:9]])
    sets["temperature"][::5] = 0.0
    draws = ranked(sets, [0, 1, 2, 4, 3, 3, 4, 15])
    draws["row"] = np.arange(len(draws)) // 7 % 3
    alone = np.array([int(calls.sample(context, x, draws[i : i + 1])[0]) for i in range(len(draws))])
    assert calls.sample(context, x, draws).tolist() == alone.tolist()
    shuffled = rng.permutation(len(draws))
    assert calls.sample(context, x, draws[shuffled]).tolist() == alone[shuffled].tolist()
    assert reference.sample(x, draws).tolist() == alone.tolist()


def test_every_instruction_set_finds_the_same(contexts: list[Context]) -> None:
    for kind, vocab in itertools.product(SHAPES, (1, 63, 130, 3001)):
        x = shaped(kind, vocab, 4)
        sets = np.concatenate([calls.draws(4, stream=np.arange(4), **parameters) for parameters in PARAMETERS])
        first, *others = (calls.sample(context, x, ranked(sets, [0, 1, 5, 6])).tolist() for context in contexts)
        assert all(other == first for other in others)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_cannot_be_drawn_has_no_rank(context: Context, temperature: float) -> None:
    x = np.full((3, 200), -np.inf, np.float32)
    x[0, [3, 70, 190]] = [1.0, 2.0, np.nan]
    x[1, [0, 130]] = [np.inf, np.inf]
    draws = ranked(calls.draws(3, row=range(3), temperature=temperature), range(4))
    first, infinite, none = calls.sample(context, x, draws).reshape(3, 4).tolist()
    assert set(first[:2]) == {3, 70} and first[2:] == [first[0]] * 2
    assert set(infinite[:2]) == {0, 130} and infinite[2:] == [infinite[0]] * 2
    assert none == [0] * 4


@pytest.mark.parametrize("rank", [-1, MOST_CANDIDATES])
def test_a_rank_that_there_is_not_is_named(context: Context, rank: int) -> None:
    with pytest.raises(KernelError, match=rf"^pd_sample: draws\[1\].rank is {rank}; it must be 0 to 15$"):
        calls.sample(context, logits(20, 1), ranked(calls.draws(1), [0, rank]))


@pytest.mark.skipif(not available_isas(), reason="there are no compiled kernels")
def test_the_backend_asks_for_ranks_where_all_are_greedy() -> None:
    """A draw of each row is the argmax, but not of one behind it."""
    backend, x = NativeBackend(load(available_isas()[0]), torch.float32), logits(90, 3, rows=2)
    draws = calls.draws(2, row=range(2), temperature=0.0, rank=[0, 1])
    assert backend.sample(torch.from_numpy(x), draws).tolist() == [int(x[0].argmax()), int(np.argsort(-x[1])[1])]
