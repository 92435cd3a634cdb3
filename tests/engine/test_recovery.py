"""Which requests are given up behind failed steps: those that cannot be carried out, after few failures."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from pagedec.core.request import Request
from pagedec.engine.recovery import MAX_ALONE, MAX_FAILURES, RETRIES, Recovery


class Asked:
    """What is looked at of a request."""

    def __init__(self, is_poisonous: bool) -> None:
        self.is_poisonous, self.closed, self.idle, self.num_answers = is_poisonous, False, False, 0


def run(
    num: int,
    poisonous: Collection[int],
    rooms: Sequence[int],
    most_answers: int = 2,
    recovery: Recovery | None = None,
) -> tuple[list[int] | None, int]:
    """Whom a device gives up that carries out no step with a poisonous request in it, None: everybody; and how many
    steps have failed. Its n-th step has room for `rooms[n]` requests, and so have those behind the last of these.
    `most_answers`: with which a request is over."""
    recovery, asked = recovery or Recovery(), [Asked(i in poisonous) for i in range(num)]
    given_up, num_failed, num_steps = list[int](), 0, 0
    while running := [one for one in asked if not one.closed]:
        only = cast(Any, recovery.only)
        step = [one for one in running if only is None or one in only][: rooms[min(num_steps, len(rooms) - 1)]]
        num_steps += 1
        requests, everyone = cast(list[Request], step), cast(list[Request], running)
        if any(one.is_poisonous for one in step):
            num_failed += 1
            gone = recovery.failed(requests, everyone)
            if gone is None:
                return None, num_failed
            for one in cast(list[Asked], gone):
                one.closed = True
                given_up.append(asked.index(one))
            continue
        recovery.passed(requests)
        for one in step:
            one.num_answers += 1
            one.closed = one.num_answers == most_answers
    return given_up, num_failed


@pytest.mark.parametrize("num", [1, 2, 3, 17, 64])
def test_one_is_told_apart_by_halves(num: int) -> None:
    for poisonous in {0, num // 2, num - 1}:
        given_up, num_failed = run(num, [poisonous], [num])
        assert given_up == [poisonous] and num_failed <= 1 + RETRIES + math.ceil(math.log2(num))


def test_who_was_in_a_failed_step_has_no_further_retries_in_a_smaller_one() -> None:
    """Of eight the first two fail; the others are on trial still, the last of them too."""
    assert run(8, [0, 7], [8, 2]) == ([0, 7], 7)


@pytest.mark.parametrize("num", [MAX_FAILURES, 60])
def test_one_healthy_request_among_many(num: int) -> None:
    """It gets through alone, the last of all, so it is not the device: the others are given up, each by itself."""
    given_up, num_failed = run(num, range(num - 1), [num], most_answers=20)
    assert given_up is not None and sorted(given_up) == [*range(num - 1)]
    assert num_failed <= MAX_FAILURES + 3 * num


def test_where_nobody_gets_through_it_is_the_device() -> None:
    recovery = Recovery()
    given_up, num_failed = run(100, range(100), [100], recovery=recovery)
    assert given_up is None and num_failed <= MAX_FAILURES + MAX_ALONE
    assert run(4, [2], [4], recovery=recovery) == run(4, [2], [4]), "and it has come back"


@pytest.mark.parametrize("seed", range(20))
def test_the_poisonous_are_given_up_and_nobody_else(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randrange(1, 40)
    poisonous = [i for i in range(num) if rng.random() < rng.choice([0.05, 0.3])][: num - 1]
    given_up, _ = run(num, poisonous, [rng.randrange(1, num + 1) for _ in range(50)])
    assert given_up is not None and sorted(given_up) == poisonous
