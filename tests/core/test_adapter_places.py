"""Low-rank adapters share the device's places: who has one in a step, and that no row goes through another's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pagedec.core.adapter_places import AdapterPlaces
from pagedec.core.limits import SchedulerLimits
from pagedec.core.stopping import Stopping
from pagedec.params import SamplingParams
from tests.core.fake import FakeEngine
from tests.core.test_ahead import LateEngine
from tests.core.world import Case, World, limits


def needed(places: AdapterPlaces, *adapters: int) -> list[int]:
    """The places of those of a step's adapters for which there is room, -1 of others."""
    places.begin()
    found = []
    for adapter in adapters:
        found.append(places.place_for(adapter) if places.has_room(adapter) else -1)
        if found[-1] >= 0:
            places.take(adapter)
    return found


def loads(places: AdapterPlaces) -> list[tuple[int, int]]:
    taken = places.take_loads()
    return list(zip(*(array.tolist() for array in taken), strict=True))


def test_a_place_is_kept_until_another_needs_it() -> None:
    places = AdapterPlaces(2)
    assert needed(places, 7, 9) == [0, 1]
    assert loads(places) == [(0, 7), (1, 9)]
    assert needed(places, 9) == [1] and loads(places) == []
    assert needed(places, 5) == [0] and loads(places) == [(0, 5)], "7 was used longest ago"
    assert needed(places, 7) == [1] and loads(places) == [(1, 7)], "then 9"


def test_none_that_the_step_needs_gives_way() -> None:
    places = AdapterPlaces(2)
    assert needed(places, 1, 2, 3, 1, 4) == [0, 1, -1, 0, -1]
    assert needed(places, 3, 1, 2) == [1, 0, -1], "2 was used before 1"


def test_who_has_no_rows_keeps_no_place() -> None:
    places = AdapterPlaces(1)
    places.begin()
    assert places.place_for(1) == 0 and places.has_room(2) and places.place_for(2) == 0
    places.take(2)
    assert not places.has_room(1) and loads(places) == [(0, 2)]


def test_without_places_nobody_has_room() -> None:
    assert needed(AdapterPlaces(0), 1) == [-1]


def test_loads_wait_for_a_step_that_is_carried_out() -> None:
    places = AdapterPlaces(1)
    needed(places, 1)
    needed(places, 2)  # the first step came to nothing
    assert loads(places) == [(0, 1), (0, 2)] and loads(places) == []


def test_a_device_that_has_lost_all_is_told_again() -> None:
    places = AdapterPlaces(2)
    needed(places, 1, 2)
    places.reset()
    assert loads(places) == [] and needed(places, 2) == [0] and loads(places) == [(0, 2)]


def test_what_could_not_be_loaded_has_no_place() -> None:
    """Its place is the next one's, and itself it is loaded anew."""
    places = AdapterPlaces(3)
    assert needed(places, 1, 2) == [0, 1] and len(loads(places)) == 2
    places.forget(1)
    places.forget(7)
    assert needed(places, 2, 3, 1) == [1, 0, 2] and loads(places) == [(0, 3), (2, 1)]
    assert needed(places, 4) == [1], "2 was used longest ago"


class Worlds(World):
    """The same requests without an adapter and through three."""

    def __init__(self, seed: int, kind: type[FakeEngine] = FakeEngine) -> None:
        super().__init__(seed)
        others = [World(seed, adapter) for adapter in (1, 2, 3)]
        self.kind, self.adapted = kind, {i: world.target for i, world in enumerate(others, 1)}
        for adapter, world in enumerate(others, 1):
            self.cases += [replace(case, name=f"{case.name}, {adapter=}", adapter=adapter) for case in world.cases]

    def engine(self, limits: SchedulerLimits) -> FakeEngine:
        return self.kind(self.models, limits, self.costs, self.adapted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [FakeEngine, LateEngine])
@pytest.mark.parametrize("num_places", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_all_decoders_through_several_adapters(seed: int, num_places: int, kind: type[FakeEngine]) -> None:
    """In a crowd that is preempted and aborted, in pools that are too small, more adapters than places: each gives
    what it gives alone, and rows see KV of their own adapter only."""
    world, rng = Worlds(seed, kind), random.Random(seed)
    rng.shuffle(world.cases)
    shape = limits(
        rng.choice([24, 30, 60]), max_num_batched_tokens=rng.choice([5, 16, 64]), num_adapter_places=num_places
    )
    engine = world.compare(world.cases, shape, rng)
    assert engine.runner.num_loads >= 3


def plain(adapter: int, name: str, **changes: Any) -> Case:
    values: dict[str, Any] = {"stopping": Stopping(max_tokens=6), **changes}
    return Case(name, SamplingParams(temperature=0), [1, 2, 3, 4, 5], None, adapter=adapter, **values)


def engine_of(num_places: int) -> FakeEngine:
    world = Worlds(0)
    return FakeEngine(world.models, limits(60, num_adapter_places=num_places), adapted=world.adapted)


def rows_of(engine: FakeEngine) -> list[str]:
    """Whose rows the next step has."""
    plan = engine.scheduler.plan()
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    engine.check()
    return [work.request.id for work in plan.works]


def test_who_waits_for_a_place_holds_nobody_up() -> None:
    engine = engine_of(1)
    for i, (adapter, name) in enumerate(((1, "first"), (2, "waits"), (0, "none"), (1, "same"))):
        replace(plain(adapter, name), prompt=[i, 2, 3, 4, 5]).add(engine.scheduler)
    while "first" in (now := rows_of(engine)):
        assert "waits" not in now and "none" in now and "same" in now
    assert now == ["waits"] and engine.runner.num_loads == 2
    engine.run()
    engine.check_whole()


def test_a_more_important_request_takes_the_place_of_one_that_runs() -> None:
    engine = engine_of(1)
    plain(1, "early").add(engine.scheduler)
    assert rows_of(engine) == ["early"]
    plain(2, "urgent").add(engine.scheduler, priority=-1)
    assert rows_of(engine) == ["urgent"] == rows_of(engine)
    engine.run()
    assert engine.runner.num_loads == 3
    engine.check_whole()


def test_what_was_lost_is_loaded_again() -> None:
    engine = engine_of(2)
    plain(1, "a").add(engine.scheduler)
    rows_of(engine)
    engine.scheduler.forget_kv()
    engine.runner.places = [None, None]
    engine.runner.kv["target"] = [None] * len(engine.runner.kv["target"])
    engine._published = {}
    engine.run()
    assert engine.runner.num_loads == 2


def test_who_finds_no_rows_has_nothing_loaded() -> None:
    """One who waits for a branch of a step evicts nobody, step after step."""
    world = Worlds(0)
    engine = FakeEngine(world.models, limits(60, num_adapter_places=1, max_num_seqs=1), adapted=world.adapted)
    plain(1, "runs").add(engine.scheduler)
    rows_of(engine)
    plain(2, "waits").add(engine.scheduler)
    while "waits" not in rows_of(engine):
        assert engine.runner.num_loads == 1
    engine.run()
    assert engine.runner.num_loads == 2
    engine.check_whole()
