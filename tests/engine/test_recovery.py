"""Which requests are given up behind failed steps: those that cannot be carried out, after few failures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import pytest

from pagedec import SamplingParams
from pagedec.core.request import Request
from pagedec.engine.recovery import MAX_ALONE, MAX_FAILURES, RETRIES, Recovery
from pagedec.errors import RequestError
from tests.engine.crowd import Tiny
from tests.engine.test_failures import Unwell


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


# ---- prompts of many steps
LONG = [(7 * i) % 131 for i in range(150)]
"""Read in 75 steps of two tokens."""
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def answered(tiny: Tiny, fails: Callable[[int, int], bool], others: int = 0) -> tuple[list[Any], Unwell]:
    """What a long prompt and others are answered where a step fails by its number and by how far it was to bring the
    long one."""
    llm = tiny(max_num_batched_tokens=2 + 2 * others, num_blocks=200)
    scheduler = llm.engine.scheduler

    def looked_at(count: int, names: set[str]) -> bool:
        works = [work for work in scheduler.plans[-1].works if work.request.prompt_length == len(LONG)]
        return bool(works) and fails(count, works[0].start + works[0].num_tokens)

    unwell = Unwell(llm, looked_at)
    prompts = [LONG, *([5 + i, 9] for i in range(others))]
    outputs = llm.generate(prompts, [SHORT] * len(prompts), use_tqdm=False, on_error="return")
    llm.engine.executor = unwell.inner
    scheduler.check()
    assert all(len(pool.free) + len(pool.evictable) == pool.num_blocks for pool in scheduler.pools.values())
    return outputs, unwell


def test_failures_pass_between_the_parts_of_a_prompt(tiny: Tiny) -> None:
    """Three of them, each further on: whoever gets past the place of the last one has had a failure that passed."""
    [want], _ = answered(tiny, lambda *_: False)
    [output], unwell = answered(tiny, lambda count, _: count in (40, 90, 150, 215))
    assert unwell.num_failures == 4 and output.outputs == want.outputs


@pytest.mark.parametrize("others", [0, 3])
def test_poison_within_a_long_prompt_is_found_as_soon(tiny: Tiny, others: int) -> None:
    """It never gets past its place, however many steps lie before it."""
    [output, *rest], unwell = answered(tiny, lambda _, end: end > 77, others)
    assert isinstance(output.error, RequestError) and unwell.num_failures <= 1 + RETRIES + 3
    assert all(other.error is None and len(other.outputs[0].token_ids) == 4 for other in rest)


def test_who_fails_at_every_new_place_is_given_up(tiny: Tiny) -> None:
    """That comes of no passing failure any more."""
    seen = set[int]()

    def fails(_: int, end: int) -> bool:
        return end not in seen and not seen.add(end)  # type: ignore[func-returns-value]

    [output], unwell = answered(tiny, fails)
    assert isinstance(output.error, RequestError) and MAX_FAILURES <= unwell.num_failures <= MAX_FAILURES + RETRIES
