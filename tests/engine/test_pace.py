"""What steps take is learned from a clock: here from invented ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from pagedec.core.costs import StepShape
from pagedec.engine.pace import BARE_EVERY, BARE_STEPS, StepPace, place_of


def stair(rows: int) -> float:
    return 0.005 + 0.002 * -(-rows // 16)


def serve(pace: StepPace, cost: Callable[[int], float], rows: list[int], noise: random.Random | None = None) -> None:
    for num_rows in rows:
        factor = 1.0 if noise is None else noise.lognormvariate(0, 0.05) * (10 if noise.random() < 0.02 else 1)
        pace.note(StepShape(num_rows), num_rows, 0, 1e-4, cost(num_rows) * factor)


def test_places_never_cross_a_tile() -> None:
    assert [place_of(rows) for rows in range(1, 17)] == [*range(1, 17)]
    groups = [list(group) for _, group in itertools.groupby(range(1, 600), key=place_of)]
    assert len(groups) < 70
    assert all((group[0] - 1) // 16 == (group[-1] - 1) // 16 for group in groups if group[-1] <= 128)
    assert all(place_of(rows) in group for group in groups[:-1] for rows in group)


@pytest.mark.parametrize("first", [[(30, 20.0)], [(30, 60.0), (30, 9.0)], [(512, 60.0)], [(8, 0.02), (48, 60.0)]])
def test_who_avoids_what_is_slow_is_not_kept_from_it_by_steps_that_were_slow_once(
    first: list[tuple[int, float]],
) -> None:
    """The first steps, while weights come from a disk: what would fit is found out again, also what would not."""
    pace, num_long = StepPace(is_wary=True), 0
    for num_rows, seconds in first:
        pace.note(StepShape(num_rows), 1, 0, 0.0, seconds)
    for i in range(1000):
        rows = 8 + (max(16, pace.costs.most_rows(0.2, 512) - 8) if i % 5 else 0)
        seconds = 0.02 + 0.0018 * rows if rows <= 160 else 1.0
        num_long += seconds > 0.21
        pace.note(StepShape(rows), 1, 0, 0.0, seconds)
    assert 96 <= pace.costs.most_rows(0.2, 512) <= 101 and num_long < 6


def test_a_curve_is_learned_through_noise() -> None:
    rng = random.Random(1)
    pace = StepPace()
    serve(pace, stair, [rng.choice([1, 2, 8, 16, 17, 20, 32, 40, 64]) for _ in range(2000)], rng)
    for rows in (1, 8, 16, 17, 32, 64):
        assert float(pace.costs.of(rows)) == pytest.approx(stair(rows), rel=0.12)
    assert list(pace.costs.seconds) == sorted(pace.costs.seconds)


def test_what_is_slower_with_fewer_rows_is_noise() -> None:
    pace = StepPace()
    serve(pace, lambda rows: 0.02 if rows < 8 else 0.01, [4, 8, 12] * 50)
    costs = pace.costs
    assert list(costs.seconds) == sorted(costs.seconds) and 0.01 < float(costs.of(8)) < 0.02


def test_a_machine_that_changes_is_followed() -> None:
    """Where it is measured again at once; elsewhere as far as all of it changed."""
    pace = StepPace()
    serve(pace, stair, [1, 16, 32] * 60)
    serve(pace, lambda rows: 3 * stair(rows), [1] * 300)
    assert float(pace.costs.of(1)) == pytest.approx(3 * stair(1), rel=0.1)
    assert float(pace.costs.of(32)) > 1.5 * stair(32)
    serve(pace, lambda rows: 3 * stair(rows), [32] * 40)
    assert float(pace.costs.of(32)) == pytest.approx(3 * stair(32), rel=0.15)


def test_prompts_say_nothing_of_decoding() -> None:
    pace = StepPace()
    serve(pace, stair, [4] * 20)
    before = pace.costs
    for _ in range(50):
        pace.note(StepShape(400, is_steady=False), 4, 0, 1e-4, 2.0)
    assert pace.costs == before


def test_rolls_and_asking_are_told_apart_from_rows() -> None:
    pace = StepPace()
    for _ in range(60):
        pace.note(StepShape(8), 8, 0, 8e-5, stair(8))
        pace.note(StepShape(8, num_asked=8), 8, 0, 8 * 4e-5, stair(8))
        pace.note(StepShape(24), 8, 0, 8e-5, stair(24))
        pace.note(StepShape(24, 8, num_rolls=8, roll_depth=2), 8, 16, 8 * 4e-5, stair(24) + 2 * 0.003)
        masked = StepShape(24, 8, num_rolls=8, roll_depth=2, is_masked=True)
        pace.note(masked, 8, 16, 8 * 4e-5, stair(24) + 2 * 0.007)
    costs = pace.costs
    assert costs.asking == pytest.approx(3e-5, rel=0.2)
    assert costs.rolls[3] == pytest.approx(0.003, rel=0.1) and costs.masked_rolls[3] == pytest.approx(0.007, rel=0.1)
    assert costs.rolls[0] == costs.rolls[3], "of other sizes what is known"


def test_a_bare_step_every_now_and_then() -> None:
    pace = StepPace()
    found = []
    for _ in range(3 * BARE_EVERY):
        found.append(pace.costs.is_bare)
        pace.note(StepShape(5 if not found[-1] else 1), 1, 0 if found[-1] else 4, 1e-4, 0.01)
    assert sum(found) == 2 * BARE_STEPS


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_machine_that_changes_is_followed_where_every_step_rolls(factor: float) -> None:
    """Only steps without a roll tell its time from theirs: they are made as soon as a roll seems to take another."""
    rng, pace, num_bare = random.Random(3), StepPace(), 0
    for i in range(700):
        speed = 0.01 * (factor if i >= 300 else 1.0) * rng.lognormvariate(0, 0.05)
        if i < 20 or pace.costs.is_bare:
            num_bare += i >= 20
            pace.note(StepShape(8), 8, 0, 1e-4, speed)
        else:
            pace.note(StepShape(16, 8, 8, 1), 8, 8, 1e-4, speed * 1.25)
        if i in (299, 399, 699):
            costs, now = pace.costs, 0.01 * (factor if i >= 300 else 1.0)
            rolled = float(costs.of(16) + costs.of_rolls(8, 1, False))
            assert float(costs.of(8)) == pytest.approx(now, rel=0.12) and rolled == pytest.approx(1.25 * now, rel=0.12)
    assert num_bare < 50


@pytest.mark.parametrize("depths", [[1], [1, 14]])
def test_steps_without_drafts_stay_few_on_an_unsteady_machine(depths: list[int]) -> None:
    """Nor where a roll has a start that takes time, so that no cost for each token fits."""
    rng, pace, num_bare = random.Random(4), StepPace(), 0
    for i in range(3000):
        noise = rng.lognormvariate(0, 0.2) * (3 if rng.random() < 0.05 else 1)
        if i < 20 or pace.costs.is_bare:
            num_bare += i >= 20
            pace.note(StepShape(8), 8, 0, 1e-4, 0.01 * noise)
        else:
            depth = rng.choice(depths)
            pace.note(StepShape(8 + 8 * depth, 8, 8, depth), 8, 8, 1e-4, (0.011 + 0.002 * depth) * noise)
    assert num_bare <= 3000 * 0.05
