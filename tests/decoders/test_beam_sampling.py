"""Beam sampling draws what transformers draws: how often each outcome comes is counted, and compared with exact
probabilities, which are added up over all ways in which `torch.multinomial` could draw without replacement."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pagedec.core.protocol import Candidates
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.decoders.beam import Beam as Decoder
from pagedec.decoders.beam import Group
from pagedec.decoders.beam_pool import Pool
from pagedec.decoders.beam_selection import continued, select
from pagedec.params import BeamSearchParams
from tests.decoders.beam_driver import Search, best, gumbel

EOS, VOCAB, WIDTH, MAX_TOKENS = 1, 5, 2, 2
NUM_SEEDS = 1200
P_VALUE = 1e-4
Beam = tuple[tuple[int, ...], float]
State = tuple[tuple[Beam, ...], tuple[Beam, ...]]
"""Beams that run, and answers that have ended with their scores, both best first."""
Settings = dict[str, Any]


@lru_cache(maxsize=4)
def rows(seed: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=1.3, size=(VOCAB + 1, VOCAB))
    return np.asarray((logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32))


def logprobs(text: Sequence[int]) -> np.ndarray:
    """Behind the last token; the prompt's is no token of the answers'."""
    return np.asarray(rows(1)[text[-1]])


def warped(row: np.ndarray, settings: Settings) -> np.ndarray:
    """As transformers' warpers do, with min_tokens_to_keep = 2: temperature, top_k, top_p."""
    row = row / np.float32(settings.get("temperature") or 1.0)
    if settings.get("top_k"):
        row = np.where(row < np.sort(row)[-max(settings["top_k"], 2)], -np.inf, row)
    if settings.get("top_p", 1.0) < 1:
        order = np.argsort(row, kind="stable")  # ascending
        cumulative = np.cumsum(np.exp(row[order]) / np.exp(row).sum())
        removed = cumulative <= 1 - settings["top_p"]
        removed[-2:] = False
        row = row.copy()
        row[order[removed]] = -np.inf
    return np.asarray(row, np.float32)


def step(state: State, length: int, settings: Settings) -> dict[State, float]:
    """All states after one step, with their probabilities, as transformers' code goes on from the tokens drawn."""
    running, finished = state
    scores = np.concatenate(
        [np.float32(total) + warped(logprobs((VOCAB, *text)), settings) for text, total in running]
    ).astype(np.float32)
    possible = [i for i in range(len(scores)) if np.isfinite(scores[i])]
    weights = np.exp(scores.astype(np.float64))
    number = min(2 * WIDTH, len(possible))
    out: Counter[State] = Counter()
    for drawn in itertools.permutations(possible, number):
        probability, left = 1.0, sum(weights[i] for i in possible)
        for i in drawn:
            probability *= weights[i] / left
            left -= weights[i]
        order = list(drawn) if settings.get("as_drawn") else sorted(drawn, key=lambda i: -scores[i])
        found = [((*running[i // VOCAB][0], i % VOCAB), float(scores[i])) for i in order]
        out[_next(found, finished, length, settings)] += probability
    return out


def _next(found: list[Beam], finished: tuple[Beam, ...], length: int, settings: Settings) -> State:
    last, old = length == MAX_TOKENS, settings["hf_semantics"] == "4.38"
    ended = [beam for beam in found[:WIDTH] if beam[0][-1] == EOS or (last and not old)]
    running = sorted((beam for beam in found if beam[0][-1] != EOS), key=lambda beam: -beam[1])[:WIDTH]
    pool = sorted([*finished, *((t, total / length) for t, total in ended)], key=lambda beam: -beam[1])[:WIDTH]
    full = len(pool) == WIDTH and settings["early_stopping"]
    if last or full:
        if old and not full:
            pool = sorted([*pool, *((t, total / length) for t, total in running)], key=lambda beam: -beam[1])[:WIDTH]
        running = []
    return tuple(running), tuple((text, round(score, 4)) for text, score in pool)


def exact(settings: Settings) -> dict[tuple[tuple[int, ...], ...], float]:
    """The probability of each list of answers."""
    states: dict[State, float] = {((((), 0.0),), ()): 1.0}
    for length in range(1, MAX_TOKENS + 1):
        following: Counter[State] = Counter()
        for state, probability in states.items():
            if not state[0]:
                following[state] += probability
                continue
            for new, chance in step(state, length, settings).items():
                following[new] += probability * chance
        states = following
    out: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for (_, finished), probability in states.items():
        out[tuple(text for text, _ in finished)] += probability
    return out


@pytest.mark.sampled(10)
@pytest.mark.parametrize("semantics", ["5", "4.38"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6, "top_k": 4}, {"temperature": 1.5, "top_p": 0.9}], ids=str)
def test_outcomes_come_as_often_as_they_should(semantics: str, changes: Settings) -> None:
    settings: Settings = {"hf_semantics": semantics, "early_stopping": True, **changes}
    want = exact(settings)
    assert sum(want.values()) == pytest.approx(1)
    counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for seed in range(NUM_SEEDS):
        own = BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS, do_sample=True, seed=seed, **settings)
        found = Search(own, [VOCAB], logprobs, VOCAB, (EOS,)).run()
        counts[tuple(map(tuple, found.texts()))] += 1
    assert set(counts) <= {outcome for outcome, probability in want.items() if probability > 0}
    often = [outcome for outcome, probability in want.items() if probability * NUM_SEEDS >= 5]
    assert len(often) > 3
    observed = [counts[outcome] for outcome in often]
    expected = [want[outcome] * NUM_SEEDS for outcome in often]
    rest = NUM_SEEDS - sum(expected)
    if rest >= 5:
        observed, expected = [*observed, NUM_SEEDS - sum(observed)], [*expected, rest]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert statistic < stats.chi2.ppf(1 - P_VALUE, len(expected) - (rest >= 5)), statistic


def test_answers_that_end_in_the_order_drawn_are_told_apart() -> None:
    """As before transformers 5.24; else the test above would not see such a mistake."""
    settings: Settings = {"hf_semantics": "5", "early_stopping": True}
    new, old = exact(settings), exact({**settings, "as_drawn": True})
    assert sum(abs(new.get(o, 0) - old.get(o, 0)) for o in {*new, *old}) > 0.1


def test_candidates_are_included_as_often_as_without_replacement() -> None:
    """Of one step, with many candidates: each one's chance to be among those drawn."""
    row, k, count = rows(2)[0], 3, 6000
    weights = np.exp(row.astype(np.float64))
    want = np.zeros(VOCAB)
    for drawn in itertools.permutations(range(VOCAB), k):
        probability, left = 1.0, weights.sum()
        for i in drawn:
            probability, left = probability * weights[i] / left, left - weights[i]
        want[list(drawn)] += probability
    own = BeamSearchParams(beam_width=k, max_tokens=1, do_sample=True, seed=1)
    search = Search(own, [VOCAB], logprobs, VOCAB)
    [query] = search.decoder.propose(search.branches, 0)
    ask: Any = query.asks[0]
    sampler, seen = Sampler(1.0, seed=7), np.zeros(VOCAB)
    for position in range(count):
        found = best([(0, 0.0, row)], ask, [gumbel(sampler, 5, position, VOCAB)])
        seen[found.tokens[:k]] += 1
    deviations = np.sqrt(count * want * (1 - want))
    assert (np.abs(seen - count * want) < 4.5 * deviations).all()


def test_a_paths_name_follows_from_its_tokens() -> None:
    """Not from its place among the beams; and no two of many paths share one."""
    start = np.zeros(1, np.uint64)
    a = continued(continued(start, np.array([3])), np.array([4]))
    both = continued(np.zeros(2, np.uint64), np.array([9, 3]))
    assert continued(both[[1, 0]], np.array([4, 4]))[0] == a[0]
    names = start
    for _ in range(3):
        names = np.concatenate([continued(names, np.full(len(names), token)) for token in range(40)])
    assert len(set(names.tolist())) == 40**3


def test_drawn_candidates_live_on_and_end_by_score() -> None:
    """Those that stop strings have made room for stand behind the others, and may be better ones."""
    stopping = Stopping((1,), strings=StopStrings(["a"]), pieces=[b"a", b"", b"c", b"d", b"e", b"f", b"g"])
    own = BeamSearchParams(beam_width=2, max_tokens=4, do_sample=True, seed=1)
    decoder = Search(own, [6], lambda text: np.zeros(7, np.float32), 7, (1,), stopping).decoder
    assert isinstance(decoder, Decoder)
    decoder.length = 1
    root = Branch(decoder.context.history.append(0, [6]), {}, 0, stopping.start, 1)
    scores = np.array([-3, -1, -2, -0.5, -0.75], np.float32)
    chosen = {}
    for tokens in ([2, 3, 4, 5, 6], [0, 3, 1, 5, 6], [0, 5, 0, 0, 6], [0, 0, 1, 0, 6]):
        found = Candidates(np.zeros(5, np.int32), np.array(tokens, np.int32), scores, scores)
        group = Group(0, Pool(2, decoder.groups[0].pool.scoring))
        living = decoder._choose(group, found, [root])
        chosen[tuple(tokens)] = living.tokens.tolist(), [entry.hypothesis.tokens for entry in group.pool.entries]
    assert list(chosen.values()) == [([5, 3], []), ([5, 3], []), ([6, 5], [(0,)]), ([6], [(0,), (0,)])]


def test_one_look_at_many_candidates() -> None:
    running, ended = select(np.array([True] * 4 + [False] * 2), 2)
    assert running.tolist() == [4, 5] and ended.tolist() == [0, 1], "those behind the fourth fill up what is missing"
