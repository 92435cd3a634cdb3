"""When a request that rests is asked again."""

import pytest

from pagedec.core.standing import FIRST_REST, LONGEST_REST, Method, Standing


def at_rest(num_running: int) -> Standing:
    """Asked in vain beside so many, until it rests."""
    standing, step = Standing(Method()), 0
    while not standing.rest_left:
        assert not standing.rests(step, num_running)
        standing.asked(gained=0.0, asking=1.0, load=(num_running, num_running), num_running=num_running)
        step += 1
    return standing


@pytest.mark.parametrize(
    ("since", "now", "rests"),
    [(1, 1, True), (1, 2, False), (4, 7, True), (4, 8, False), (4, 9, False), (4, 3, True), (4, 2, False)],
)
def test_half_or_twice_as_many_beside_it_wake_it_at_once(since: int, now: int, rests: bool) -> None:
    assert at_rest(since).rests(1000, now) == rests


def test_each_rest_in_vain_is_twice_as_long_up_to_a_limit() -> None:
    standing, step, lengths = at_rest(4), 1000, []
    for _ in range(6):
        begun = step
        while standing.rests(step, 4):
            step += 1
        lengths.append(step - begun)
        while not standing.rest_left:
            assert not standing.rests(step, 4)
            standing.asked(gained=0.0, asking=1.0, load=(4, 4), num_running=4)
            step += 1
    assert lengths == [FIRST_REST, 16, 32, 64, LONGEST_REST, LONGEST_REST]
