"""Short prompts beside a long one that came before, in the order of requests and within their priority."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from pagedec.core.demand import Forecast
from pagedec.core.history import History
from pagedec.core.overtaking import MOST_LOOKED_AT, SHARE
from pagedec.core.parked import Call, Parked
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable
from pagedec.decoders import make_decoder
from pagedec.decoders.scoring import ScoreParams
from pagedec.errors import RequestError
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams
from tests.core.test_pausing import Steps
from tests.core.world import results

ROWS = 200
KEPT = ROWS // SHARE


def steps_of(**changes: Any) -> Steps:
    return Steps(None, max_num_batched_tokens=ROWS, **changes)


def test_a_short_prompt_goes_beside_a_long_one_that_came_before() -> None:
    steps = steps_of()
    steps.add("long", 700)
    assert steps.step() == {"long": 200}
    steps.add("short", 20)
    assert steps.step() == {"long": 180, "short": 20}
    assert steps.step() == {"long": 199, "short": 1}


def test_many_take_no_more_than_their_share() -> None:
    """The others wait for its end, by age. Two long ones leave them the same."""
    steps = steps_of()
    steps.add("long", 500)
    steps.add("longer", 500)
    for i in range(9):
        steps.add(f"{i}", 12)
    assert steps.step() == {"long": ROWS - 48, "0": 12, "1": 12, "2": 12, "3": 12}
    for long, passing in ((ROWS - 4 - 36, (4, 5, 6)), (500 - 152 - 160, ())):
        had = steps.step()
        assert had["long"] == long and all(had[str(i)] == 12 for i in passing)
        assert all(had[str(i)] == 1 for i in range(4))


@pytest.mark.parametrize("length", [KEPT, KEPT + 1])
def test_what_is_longer_goes_by_age(length: int) -> None:
    steps = steps_of()
    steps.add("long", 450)
    steps.add("next", length)
    assert steps.step().get("next", 0) == (length if length <= KEPT else 0)


def test_who_is_through_in_this_step_leaves_nothing() -> None:
    steps = steps_of()
    steps.add("first", ROWS - 5)
    steps.add("short", 20)
    assert steps.step() == {"first": ROWS - 5, "short": 5}


def test_no_one_of_a_lower_priority_passes() -> None:
    steps = steps_of()
    steps.add("long", 450)
    steps.add("low", 10, priority=1)
    steps.add("high", 10, priority=-1)
    assert steps.step() == {"high": 10, "long": ROWS - 10}


def test_who_writes_keeps_his_row() -> None:
    steps = steps_of()
    for i in range(30):
        steps.add(f"writes {i}", 2, max_tokens=40)
    steps.step()
    steps.add("long", 450)
    steps.add("short", 40)
    had = steps.step()
    assert had.pop("long") == ROWS - 30 - 40 and had.pop("short") == 40
    assert list(had.values()) == [1] * 30


@pytest.mark.parametrize("params", [BeamParams(beam_width=3), SamplingParams(seed=1, n=3)], ids=["a search", "samples"])
def test_long_prompts_of_several_answers(params: Any) -> None:
    steps = steps_of()
    steps.add("long", 450, params=params)
    steps.add("short", 20)
    assert steps.step() == {"long": ROWS - 20, "short": 20}


def test_scores_of_many_leave_rows_too() -> None:
    """Each of their branches is short, all of them are not."""
    steps = steps_of()
    texts = tuple(product(range(1, 8), repeat=4))
    steps.add("scores", 5, 4, params=ScoreParams(continuations=texts, max_tokens=4))
    while sum(steps.step().values()) < ROWS:
        pass
    steps.add("short", 20)
    had = steps.step()
    assert had["short"] == 20 and had["scores"] > ROWS // 2


def test_what_is_cached_is_not_lacking() -> None:
    """A chat's next turn: its text is long, but for the end of it nothing is to be evaluated."""
    steps = steps_of(enable_prefix_caching=True)
    steps.add("turn", 300, max_tokens=1)
    while steps.engine.scheduler.requests:
        steps.step()
    steps.add("strange", 480)  # its tokens are others': they count from the length of its name
    steps.step()
    steps.add("next", 300)
    assert "turn" != "next" and len("turn") == len("next")
    had = steps.step()
    assert 0 < had["next"] <= KEPT and had["strange"] + had["next"] == ROWS


def test_a_session_goes_on_behind_its_own_blocks() -> None:
    steps = steps_of(enable_prefix_caching=False)
    scheduler, make = steps.engine.scheduler, partial(make_decoder, SamplingParams(seed=1))
    history, tip = History.of(8, "", [1 + i % 7 for i in range(300)])
    parked = Parked((history, tip), {"target": BlockTable(scheduler.pools["target"])})
    scheduler.parking.add(parked)
    home = Call(parked, scheduler.parking)
    scheduler.add(scheduler.admit("first", make, parked.tokens(), Stopping(max_tokens=2), home=home))
    while scheduler.requests:
        steps.step()
    [(_, held)] = home.answers
    steps.add("long", 480)
    steps.step()
    home = Call(held, scheduler.parking)
    scheduler.add(scheduler.admit("next", make, held.tokens(), Stopping(max_tokens=3), home=home))
    had = steps.step()
    assert held.length == 302 and had == {"long": ROWS - had["next"], "next": had["next"]} and had["next"] <= 2


def test_nothing_is_kept_for_who_waits_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has no room for him, and none when an answer has ended in each step."""
    steps = steps_of()
    for i in range(5):
        steps.add(f"ends {i}", 2, max_tokens=3 + i)
    steps.step()
    steps.add("first", 1250)
    steps.step()
    steps.add("late", 40)
    monkeypatch.setattr(Forecast, "admits", lambda *_: False)
    for num_writing in (5, 4, 3, 2, 1):
        had = steps.step()
        assert sum(had.values()) == ROWS and had["first"] >= ROWS - num_writing and "late" not in had
    monkeypatch.undo()
    steps.engine.scheduler._demand.num_changes += 1
    assert steps.step()["first"] <= ROWS


def test_writers_leave_it_most_of_what_they_leave() -> None:
    """A quarter is kept of what is left by who writes, however many short ones come."""
    steps = steps_of(max_num_seqs=400)
    for i in range(160):
        steps.add(f"writes {i}", 2, max_tokens=14)
    for _ in range(4):
        steps.step()
    steps.add("long", 150)
    rows = []
    for i in range(5):
        for k in range(4):
            steps.add(f"short {i} {k}", 9, max_tokens=1)
        rows.append(steps.step()["long"])
    assert rows[0] == 40 - 9 and sum(rows) >= 5 * 28


def test_writers_before_it_are_not_looked_at() -> None:
    steps = steps_of()
    for i in range(MOST_LOOKED_AT + 10):
        steps.add(f"writes {i}", 2, max_tokens=40)
    steps.step()
    steps.add("long", 450)
    steps.add("short", 20)
    assert steps.step()["short"] == 20


@pytest.mark.parametrize("num_seqs", [2, 3])
def test_nothing_is_kept_for_who_finds_no_seat(num_seqs: int) -> None:
    steps = steps_of(max_num_seqs=num_seqs)
    steps.add("writes", 2, max_tokens=40)
    steps.step()
    steps.add("long", 450)
    for i in range(4):
        steps.add(f"short {i}", 12)
    had = steps.step()
    assert sum(had.values()) == ROWS and len(had) == num_seqs


def test_nothing_is_kept_for_adapters_without_a_place() -> None:
    steps = steps_of(num_adapter_places=1)
    for name, length, adapter in (("long", 450, 1), ("same", 12, 1), ("other", 13, 2), ("none", 14, 0)):
        steps.add(name, length).adapter = adapter
    plan = steps.engine.scheduler.plan()
    assert {work.request.id: work.num_tokens for work in plan.works} == {"long": ROWS - 26, "same": 12, "none": 14}


def test_strange_prompts_are_not_read_to_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the prefix cache has the most of one: its first block says that it has not."""
    steps = steps_of(enable_prefix_caching=True)
    steps.add("long", 450)
    for i in range(20):
        steps.add(f"{'x' * i}", 1000)
    places, block_key = list[int](), History.block_key

    def noting(history: History, tip: int, end: int) -> bytes:
        places.append(end)
        return block_key(history, tip, end)

    monkeypatch.setattr(History, "block_key", noting)
    steps.engine.scheduler.plan()
    assert sorted(set(places)) == [*range(8, ROWS + 1, 8)], "what the long one computes, and a block of each other"


def test_a_long_queue_costs_no_more_than_its_beginning() -> None:
    steps = steps_of()
    for i in range(MOST_LOOKED_AT + 1):
        steps.add(f"long {i}", 201)
    steps.add("short", 3)
    assert steps.step() == {"long 0": ROWS}


@pytest.mark.parametrize("hostile", ["abort short", "abort long", "fails", "loses its blocks"])
def test_neighbours_keep_their_bits(hostile: str) -> None:
    """In pieces of 24 rows over blocks of 8, while somebody leaves, fails, or has to begin again."""

    def run(names: list[str], is_hostile: bool = False) -> tuple[Steps, dict[str, list[list[int]]]]:
        steps = Steps(None, max_num_batched_tokens=24, enable_prefix_caching=True)
        scheduler, requests = steps.engine.scheduler, {}
        for number, name in enumerate(names):
            length = 150 if "long" in name else 5 + len(name) % 3
            requests[name] = steps.add(name, length, max_tokens=9, params=SamplingParams(seed=len(name), n=2))
            for _ in range(2 if len(names) > 1 else 0):
                steps.make()
            if is_hostile and number == 3:
                if hostile == "fails":
                    scheduler.fail(requests["long one"], RequestError("long one", "its own fault"))
                elif hostile == "loses its blocks":
                    scheduler.preempt("long one")
                else:
                    scheduler.abort("long one" if "long" in hostile else name)
        while scheduler.requests:
            steps.make()
        steps.engine.check_whole()
        return steps, {name: results(request) for name, request in requests.items()}

    names = ["long one", "a", "ab", "abc", "abcd", "another long", "abcde"]
    _, found = run(names, is_hostile=True)
    gone = {"abort short": ["abc"], "abort long": ["long one"], "fails": ["long one"]}.get(hostile, [])
    for name in names:
        if name not in gone:
            assert found[name] == run([name])[1][name] and len(found[name]) == 2, name
