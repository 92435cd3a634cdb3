"""Who gets rows: by invented costs and chances, against every other choice there is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pagedec.core.costs import StepCosts
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.granting import MARGIN, SLOWER, Load, Wish, cut, grant
from pagedec.core.odds import Odds

STAIR = StepCosts((1, 16, 17, 32, 33, 48), (1.0, 1.0, 1.5, 1.5, 2.0, 2.0))
"""Tiles of 16 rows."""
LINEAR = StepCosts((1, 100), (1.0, 100.0))
FLAT = StepCosts((1, 100), (1.0, 1.001))


def chain(chance: float, length: int) -> Wish:
    return Wish([chance**i for i in range(1, length + 1)])


def counts(*wishes: Wish, costs: StepCosts, rows: int = 1, tokens: int = 1, left: int = 500, **load: bool) -> list[int]:
    return [len(nodes) for nodes in grant(wishes, Load(rows, tokens, left, **load), costs).nodes]


def test_a_tile_is_used_to_its_end() -> None:
    """The next one is opened where it pays, however little its first row does."""
    assert counts(chain(0.8, 40), costs=STAIR) == [15]
    assert counts(chain(0.99, 47), costs=STAIR) == [47], "past two stairs"
    assert counts(chain(0.5, 40), chain(0.5, 40), costs=STAIR, rows=14, tokens=14) == [1, 1]
    assert counts(chain(0.9, 8), costs=STAIR, rows=16, tokens=16) == [0], "a tile for one request of 16"


def test_where_every_row_costs_a_step_nothing_is_drafted() -> None:
    assert counts(chain(0.98, 20), costs=LINEAR) == [0]
    assert counts(chain(0.9, 20), costs=LINEAR, rows=40, tokens=40) == [0]
    assert counts(chain(0.6, 6), costs=FLAT) == [6]


def test_what_gains_next_to_nothing_is_not_drafted() -> None:
    least = MARGIN - 1
    assert counts(Wish([least / 2]), costs=FLAT) == [0] and counts(Wish([2 * least]), costs=FLAT) == [1]


def test_what_there_is_no_room_for_stands_in_nobodys_way() -> None:
    whole = Wish([9.0, *[0.0] * 9], is_whole=True)
    assert counts(whole, chain(0.8, 3), costs=FLAT, left=9) == [0, 3]
    assert counts(whole, chain(0.8, 3), costs=FLAT, left=13) == [10, 3]


def test_rows_go_to_whom_they_help() -> None:
    wishes = [chain(0.9, 10), chain(0.2, 10), chain(0.5, 10)]
    good, bad, middling = counts(*wishes, costs=STAIR, rows=3, tokens=3)
    assert good + bad + middling == 13 and good > middling > bad > 0
    slope = StepCosts((1, 50), (1.0, 3.0))
    good, bad, middling = counts(*wishes, costs=slope, rows=3, tokens=3)
    assert good > middling > bad == 0
    assert counts(*wishes, costs=STAIR, rows=3, tokens=3, left=4) == [4, 0, 0]


def test_plain_requests_wait_at_most_a_tenth_longer() -> None:
    slope = StepCosts((8, 108), (1.0, 2.0))
    wish = chain(0.98, 60)
    alone = counts(wish, costs=slope, rows=8, tokens=8)
    shared = grant([wish], Load(8, 8, 500, is_shared=True), slope)
    assert alone == [60] and shared.bare_seconds < shared.seconds <= SLOWER * shared.bare_seconds
    assert len(shared.nodes[0]) == 10
    assert counts(wish, costs=STAIR, rows=16, tokens=16, is_shared=True) == [0]
    assert counts(wish, costs=STAIR, rows=15, tokens=15, is_shared=True) == [1]


def test_what_a_roll_takes_counts() -> None:
    """A token deeper costs a token of the draft model, for one sequence or for two."""
    dear = StepCosts((1, 30), (1.0, 1.0), rolls=(0.6, 0.6), masked_rolls=(2.0, 2.0))
    cheap = StepCosts((1, 30), (1.0, 1.0), rolls=(0.01, 0.01))
    roll = Wish([0.8**i for i in range(1, 11)], range(1, 11))
    assert counts(roll, costs=cheap) == [10]
    rates = [sum(0.8**i for i in range(depth + 1)) / (1 + 0.1 * depth) for depth in range(11)]
    assert counts(roll, costs=StepCosts((1, 30), (1.0, 1.0), rolls=(0.1,))) == [rates.index(max(rates))] == [6]
    assert counts(roll, costs=dear) == [1]
    assert counts(roll, roll, costs=dear, rows=2, tokens=2) == [1, 1]
    assert counts(roll, costs=dear, is_masked=True) == [0], "roll and verification are two executes"


def test_what_cannot_be_cut_comes_whole_or_not_at_all() -> None:
    window = Wish([0.8] + [0.0] * 29, is_whole=True)
    flat = StepCosts((1, 31), (1.0, 1.4))
    assert counts(window, costs=flat) == [30]
    assert counts(window, costs=flat, left=29) == [0]
    assert counts(window, costs=LINEAR) == [0]
    assert counts(window, chain(0.5, 2), costs=flat) == [30, 2]


def test_the_likeliest_nodes_hold_their_parents() -> None:
    tree = Wish([0.9, 0.3, 0.6, 0.6, 0.0, 0.0])
    assert tree.likeliest(3) == [1, 3, 4] and tree.likeliest(5) == [1, 3, 4, 2, 5]
    assert sum(tree.gains[node - 1] for node in tree.likeliest(3)) == pytest.approx(tree.gain(3))


def test_nothing_to_grant() -> None:
    assert grant([], Load(3, 3, 9), FLAT).nodes == []
    assert counts(Wish([]), costs=FLAT) == [0]
    assert counts(chain(0.9, 3), costs=FLAT, left=0) == [0]
    assert counts(chain(0.9, 3), costs=FLAT, rows=60, tokens=0) == [3], "nobody else is in the step"


def random_tree(rng: random.Random, size: int) -> tuple[Draft, Wish]:
    parents = [rng.randrange(i + 1) if rng.random() < 0.4 else i for i in range(size)]
    gains = [1.0]
    for parent in parents:
        gains.append(gains[parent] * rng.uniform(0.05, 0.98))
    return Draft(tuple(range(size)), tuple(parents)), Wish(gains[1:])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200))
def test_no_other_choice_is_faster(seed: int) -> None:
    """Of small trees all subsets that hold every parent are tried. What is granted holds every parent, too, fits the
    rows and the bound, and is the fastest, or nothing is faster by more than the margin."""
    rng = random.Random(seed)
    rows = sorted(rng.sample(range(1, 40), 6))
    costs = StepCosts(tuple(rows), tuple(sorted(rng.uniform(1, 2.5) for _ in rows)))
    trees = [random_tree(rng, rng.randrange(5)) for _ in range(2)]
    load = Load(rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(8), rng.random() < 0.3)
    found = grant([wish for _, wish in trees], load, costs)
    bare = float(costs.of(load.num_rows))

    def rate(nodes: list[tuple[int, ...]]) -> float:
        gain = sum(wish.gains[node - 1] for (_, wish), own in zip(trees, nodes, strict=True) for node in own)
        seconds = float(costs.of(load.num_rows + sum(map(len, nodes))))
        fits = sum(map(len, nodes)) <= load.rows_left and (not load.is_shared or seconds <= SLOWER * bare)
        return (load.num_tokens + gain) / seconds if fits else 0.0

    def closed(draft: Draft) -> list[tuple[int, ...]]:
        sets = itertools.chain.from_iterable(
            itertools.combinations(range(1, draft.num_nodes + 1), size) for size in range(draft.num_nodes + 1)
        )
        return [own for own in sets if all(draft.parents[node - 1] in (0, *own) for node in own)]

    chosen = [tuple(sorted(nodes)) for nodes in found.nodes]
    assert all(own in closed(draft) for (draft, _), own in zip(trees, chosen, strict=True))
    best = max(rate(list(pair)) for pair in itertools.product(*(closed(draft) for draft, _ in trees)))
    if any(chosen):
        assert rate(chosen) == pytest.approx(best)
    else:
        assert best < MARGIN * load.num_tokens / bare * (1 + 1e-9)


def test_cut() -> None:
    tree = Draft((5, 6, 7, 8), (0, 1, 0, 3), grade=2)
    assert cut(tree, [1, 2, 3, 4]) is tree
    assert cut(tree, []) is EMPTY
    assert cut(tree, [3, 4, 1]) == Draft((5, 7, 8), (0, 0, 2)) and cut(tree, [3]).grade == 2  # type: ignore[union-attr]
    assert cut(Roll(5, stream=3), [1, 2]) == Roll(2, stream=3)


def test_cut_a_wide_roll() -> None:
    """Of each place as many as were chosen of it, its first ones."""
    roll = Roll(3, stream=3, widths=(3, 2, 2))
    assert cut(roll, [1, 2, 3, 4, 5, 6, 7]) is roll and cut(roll, []) is EMPTY
    assert cut(roll, [1, 4, 6]) == Roll(3, stream=3) and cut(roll, [1]) == Roll(1, stream=3)
    assert cut(roll, [2, 1]) == Roll(1, stream=3, widths=(2,))
    assert cut(roll, [4, 3, 1, 5]) == Roll(2, stream=3, widths=(2, 2))
    assert cut(Roll(4, widths=(1, 1, 2, 1)), [1, 2, 3]) == Roll(3)


def test_who_rolls_counts_once_however_wide() -> None:
    """What a roll takes is by sequences and depth; beside its chain there are only rows."""
    costs = StepCosts((1, 30), (1.0, 1.0), rolls=(0.1, 5.0))
    wide = Wish([0.5, 0.3, 0.2, 0.25, 0.15], (1, 1, 1, 2, 2))
    assert counts(wide, costs=costs) == [5] and counts(wide, wide, costs=costs, tokens=2, rows=2) == [1, 0]
    found = grant([wide], Load(1, 1, 3), costs)
    assert found.nodes == [[1, 2, 4]] and found.seconds == pytest.approx(1.2)
    assert wide.roll_depth(wide.likeliest(2)) == 1 and wide.roll_depth(wide.likeliest(3)) == 2


def test_a_candidate_is_not_granted_without_what_is_rolled() -> None:
    """However often others than the rolled token were right: it would be the one that runs, and its roll be free."""
    odds, roll = Odds(memory=50), Roll(2, widths=(3, 2))
    for accepted in [[2]] * 20 + [[1]] * 2:
        odds.note(roll.draft([7, 8, 9, 5, 6]), accepted)
    gains = odds.gains(roll)
    assert gains[1] == gains[0] >= gains[2] and gains[4] <= gains[3] <= gains[0]
    tree = odds.gains(Draft((7, 8), (0, 0)))
    assert tree[1] > tree[0], "of a draft that is not rolled each counts for itself"
    costs = StepCosts((1, 30), (1.0, 1.0), rolls=(2.0,))
    assert counts(Wish(gains, roll.depths()[1:]), costs=costs) == [0]


def test_odds_of_what_stands_beside_a_chain() -> None:
    odds, roll = Odds(memory=50), Roll(2, widths=(2, 3))
    for accepted in [[1, 3]] * 10 + [[2]] * 10 + [[1, 4]] * 10:
        odds.note(roll.draft([7, 8, 9, 5, 6]), accepted)
    first, second, *deeper = odds.gains(roll)
    assert 0.5 < first < 0.8 and 0.2 < second < 0.5 and first + second < 1.01
    assert all(gain < first for gain in deeper) and deeper[2] < 0.1 < min(deeper[:2])


# ----------------------------------------------------------------------------------------------------------------- odds
def test_odds_are_learned_by_place_and_forgotten() -> None:
    whole = Odds(memory=100)
    odds = Odds(memory=20, whole=whole)
    draft = Draft.chain([1, 2, 3])
    assert odds.gains(draft) == [0.5, 0.25, 0.125], "hope"
    for _ in range(60):
        odds.note(draft, [1, 2])
    first, second, third = odds.gains(draft)
    assert first > 0.9 and second > 0.85 and third < 0.1
    assert Odds(20, whole).gains(draft)[0] > 0.9, "others begin with what is known"
    for _ in range(60):
        odds.note(draft, [])
    assert odds.gains(draft)[0] < 0.1 < Odds(20, whole).gains(draft)[0]


def test_odds_of_grades_and_siblings() -> None:
    odds = Odds(memory=50)
    for _ in range(30):
        odds.note(Draft((1, 2, 3), (0, 0, 2), grade=1), [2, 3])
        odds.note(Draft((1, 2), (0, 1), grade=3), [1])
    gains = odds.gains(Draft((1, 2, 3), (0, 0, 2), grade=1))
    assert gains[0] < 0.1 and gains[1] > 0.8 and gains[2] > 0.6
    assert odds.gains(Draft((1, 2), (0, 1), grade=3))[0] > 0.9
    assert all(gain < 1 for gain in gains) and odds.gains(EMPTY) == []


def test_a_node_is_worth_less_than_its_parent() -> None:
    odds = Odds(memory=50)
    draft = Draft.chain(range(40))
    for _ in range(500):
        odds.note(draft, range(1, 41))
    gains = odds.gains(draft)
    assert all(after < before for before, after in itertools.pairwise(gains)) and gains[20] > 0.4
    assert odds.gains(Roll(40))[:5] == gains[:5]


def test_costs_between_and_beyond_what_is_known() -> None:
    costs = StepCosts((4, 8), (1.0, 2.0))
    assert costs.of(np.array([1, 4, 6, 8, 12])).tolist() == [0.625, 1.0, 1.5, 2.0, 2.5]
    assert StepCosts((1,), (1.0,)).of(11) > 1.0, "a row is not free"
