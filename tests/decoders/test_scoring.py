"""The trie that scores are read from: every node is asked once, in few steps, by few branches at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec.core.draft import EMPTY
from pagedec.core.history import History
from pagedec.core.protocol import Answer, DecoderContext
from pagedec.core.request import Branch
from pagedec.core.stopping import Stopping
from pagedec.decoders import scoring
from pagedec.decoders.scoring import GivenText, ScoreParams, followed

Tokens = tuple[int, ...]


@dataclass
class Run:
    """What a score was asked, in the order of its steps."""

    asked: dict[Tokens, Tokens]
    num_steps: int = 0
    num_rows: int = 0
    most_live: int = 0


def run(continuations: list[list[int]], num_served: int = 1 << 30) -> Run:
    """Score them, with no more than so many branches served in a step."""
    history = History(16)
    context = DecoderContext(history, 0, 1000, 1 << 20)
    decoder = GivenText(ScoreParams(continuations=tuple(map(tuple, continuations))), context)
    branches = [Branch(0, {}, decoder.initial_state, Stopping().start, 0)]
    found = Run({})
    while queries := decoder.propose(branches, 512):
        assert found.num_steps < 10_000, "it does not come to an end"
        found.num_steps += 1
        found.most_live = max(found.most_live, len(branches))
        served = list(queries)[:num_served]
        for query in served:
            place, tokens = tuple(history.tokens(query.branch.tip)), query.branch.state[1]
            assert place not in found.asked, "a node is asked twice"
            found.asked[place] = tokens
        verdict = decoder.advance(served, [Answer(EMPTY, ()) for _ in served])
        gone = {query.branch for query in served} | set(verdict.drop) | {child.parent for child in verdict.live}
        made = [
            Branch(history.append(child.parent.tip, child.tokens), {}, child.state, Stopping().start, 0)
            for child in verdict.live
        ]
        found.num_rows += sum(len(child.tokens) for child in verdict.live)
        branches = [branch for branch in branches if branch not in gone] + made
    assert not branches, "branches are left that are never asked"
    return found


CONTINUATIONS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(CONTINUATIONS, st.integers(1, 9), st.sampled_from([1, 2, 5, 1000]))
def test_every_node_is_asked_once(continuations: list[list[int]], most: int, num_served: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "AT_ONCE", most)
        found = run(continuations, num_served)
    assert found.asked == followed(tuple(map(tuple, continuations)))
    assert found.most_live <= most + 1  # and the root


def of(count: int, vocabulary: int, length: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize(
    ("continuations", "most_steps"),
    [
        (of(4000, 400, 8), 30),  # 400 words with ten continuations each: 4,370 branches, 256 at a time
        (of(4000, 20, 6), 35),
        ([[group] * 30 + [last, last] for group in range(300) for last in range(300, 320)], 40),
        ([list(range(count)) for count in range(1, 300)], 2),  # each begins the next one
    ],
    ids=["400 words", "20 words", "behind 30 tokens", "one chain"],
)
def test_who_waits_for_room_takes_none_from_others(continuations: list[list[int]], most_steps: int) -> None:
    """Where several go on alike, branches stand where they part, until all behind them are made. Had all of these come
    first, there would be no room for what is behind them but for one at a time."""
    found = run(continuations)
    assert found.num_steps <= most_steps
    assert found.num_rows <= 1.01 * len({tuple(row[:end]) for row in continuations for end in range(1, len(row) + 1)})
