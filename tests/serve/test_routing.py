"""Where requests go: whose prefix wins, what outweighs it, and what a router remembers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pagedec.errors import InvalidArgument, NotFound
from pagedec.serve.routing import Choice, Key, NoReplica, ReplicaLoad, Router, SessionLost, prefix_keys
from pagedec.serve.routing_config import RoutingConfig

SMALL = RoutingConfig(chunk_bytes=8, chunk_ids=4, max_chunks=4, min_match=0.0)


def keys(text: str) -> tuple[Key, ...]:
    """One key for each 8 characters."""
    return prefix_keys(text, config=SMALL)


def router(count: int, **options: object) -> Router:
    fields: dict[str, object] = {"chunk_bytes": 8, "chunk_ids": 4, "max_chunks": 4, "min_match": 0.0, **options}
    made = Router(RoutingConfig(**fields))  # type: ignore[arg-type]
    for i in range(count):
        made.add(f"r{i}")
    return made


# ---- who wins
def test_most_matched_chunks_win() -> None:
    routes = router(8)
    first = routes.choose(keys("a" * 8 + "b" * 8))
    assert (first.num_matched, first.why) == (0, "load")
    assert routes.choose(keys("a" * 8 + "b" * 8 + "c" * 8)) == Choice(first.replica, 2, "prefix")
    assert routes.choose(keys("a" * 16)) == Choice(first.replica, 1, "prefix")
    assert routes.choose(keys("b" * 16)).why == "load"
    assert routes.choose(()).why == "load"


def test_too_small_a_part_is_no_reason() -> None:
    routes = router(2, min_match=0.5)
    home = routes.choose(keys("a" * 8 + "b" * 24)).replica
    for _ in range(4):
        routes.done(home)
    assert routes.choose(keys("a" * 8 + "c" * 24)).why == "load"
    assert routes.choose(keys("a" * 8 + "b" * 8 + "d" * 16)) == Choice(home, 2, "prefix")


@pytest.mark.parametrize(("least", "have", "stays"), [(0, 8, True), (0, 9, False), (20, 30, True), (20, 31, False)])
def test_the_overloaded_give_way(least: int, have: int, stays: bool) -> None:
    routes = router(2)
    home = routes.choose(keys("a" * 32)).replica
    other = "r1" if home == "r0" else "r0"
    routes.report(home, ReplicaLoad(have - have // 2, have // 2))
    routes.report(other, ReplicaLoad(least))
    found = routes.choose(keys("a" * 32))
    assert found == (Choice(home, 4, "prefix") if stays else Choice(other, 0, "load", overridden=True))
    if not stays:  # now both have it
        assert routes.choose(keys("a" * 32)) == Choice(other, 4, "prefix", overridden=False)


def test_load_is_in_proportion_to_seats() -> None:
    routes = router(2)
    home = routes.choose(keys("a" * 32)).replica
    routes.report(home, ReplicaLoad(100, num_seats=128))
    routes.report("r1" if home == "r0" else "r0", ReplicaLoad(50, num_seats=64))
    assert routes.choose(keys("a" * 32)).replica == home
    assert routes.choose(keys("b" * 32)).replica != home  # 101 of 128 to 50 of 64


def test_a_full_pool_gives_way() -> None:
    routes = router(2)
    home = routes.choose(keys("a" * 32)).replica
    routes.report(home, ReplicaLoad(1, kv_usage=0.95))
    assert routes.choose(keys("a" * 32)).overridden
    for name in routes.replicas:
        routes.report(name, ReplicaLoad(1, kv_usage=0.97))
    assert routes.choose(keys("a" * 32)).why == "prefix"


def test_a_prefix_that_all_have_pulls_nobody() -> None:
    routes, system = router(8), "system prompt   "
    for i in range(4000):
        routes.choose(keys(system + f"{i:08}"))
    loads = [routes.load(name) for name in routes.replicas]
    assert sum(loads) == 4000 and max(loads) < 1.6 * min(loads)


def test_a_prefix_that_gets_hot_spreads() -> None:
    routes = router(8)
    found = [routes.choose(keys("hot" * 11)) for _ in range(72)]
    assert [choice.replica for choice in found[:8]] == [found[0].replica] * 8
    assert {choice.replica for choice in found} == {*routes.replicas}
    loads = [routes.load(name) for name in routes.replicas]
    assert max(loads) <= min(loads) + 9  # balance_abs, and the one that went beyond


def test_all_overloaded_alike_keep_their_prefixes() -> None:
    routes = router(4)
    homes = {text: routes.choose(keys(text * 32)).replica for text in "abcdefgh"}
    for name in routes.replicas:
        routes.report(name, ReplicaLoad(64, 10_000, 1.0))
    assert {text: routes.choose(keys(text * 32)).replica for text in "abcdefgh"} == homes


def test_sessions_stay_and_end_with_their_replica() -> None:
    routes = router(2)
    routes.report("r0", ReplicaLoad(64, 1000, 1.0))
    routes.choose(keys("a" * 32), among={"r1"})
    assert routes.choose(keys("a" * 32), session="r0", among={"r1"}) == Choice("r0", 0, "session")
    routes.remove("r0")
    with pytest.raises(SessionLost) as caught:
        routes.choose((), session="r0")
    assert str(caught.value) == "replica 'r0' does not exist; the sessions that it held have ended with it"
    routes.remove("r1")
    with pytest.raises(NoReplica, match="no replica is there to take the request"):
        routes.choose(keys("a" * 32))


def test_only_those_in_question_are_chosen() -> None:
    routes = router(4)
    home = routes.choose(keys("a" * 32)).replica
    rest = {*routes.replicas} - {home}
    assert routes.choose(keys("a" * 32), among=rest).replica in rest
    with pytest.raises(NoReplica):
        routes.choose((), among=[])


# ---- what is known of load
def test_a_burst_between_two_reports_spreads() -> None:
    routes = router(4)
    for name in routes.replicas:
        routes.report(name, ReplicaLoad(5))
    for i in range(400):
        routes.choose(keys(f"{i:08}"))
    assert all(85 <= routes.load(name) <= 125 for name in routes.replicas)


def test_ends_and_reports() -> None:
    routes = router(1)
    for now in (1.0, 2.0, 3.0):
        routes.choose((), now=now)
    routes.report("r0", ReplicaLoad(2), at=2.0)  # measured before the third was sent
    assert routes.load("r0") == 3
    routes.done("r0", now=4.0)
    assert routes.load("r0") == 2
    routes.report("r0", ReplicaLoad(2))
    assert routes.load("r0") == 2
    for now in (5.0, 6.0, 7.0):
        routes.done("r0", now=now)  # one more than was sent
    assert routes.load("r0") == 0
    routes.report("r0", ReplicaLoad(9), at=1.5)  # overtaken by the first
    assert routes.load("r0") == 0
    routes.choose((), now=8.0)
    routes.choose((), now=9.0)
    routes.report("r0", ReplicaLoad(7), at=8.0)
    assert routes.load("r0") == 8


def test_reports_that_never_come() -> None:
    routes = router(2)
    for i in range(3000):
        routes.choose((), now=float(i))
    for i in range(2000):
        routes.done(f"r{i % 2}", now=3000.0 + i)
    assert routes.load("r0") + routes.load("r1") == 1000
    assert abs(routes.load("r0") - routes.load("r1")) < 60


def test_removal_during_flight() -> None:
    routes = router(2)
    home = routes.choose(keys("a" * 32)).replica
    routes.remove(home)
    routes.done(home)
    routes.report(home, ReplicaLoad(9))
    assert routes.num_chunks == 0
    other = routes.choose(keys("a" * 32))
    assert other.replica != home and other.num_matched == 0
    routes.add(home)  # anew: what is left of its former life is none of its own
    routes.done(home)
    assert routes.load(home) == 0
    assert routes.choose(keys("a" * 32), among={home}).num_matched == 0


# ---- what is remembered
def test_the_index_is_bounded_and_forgets() -> None:
    routes = router(0)
    routes.add("r0", num_tokens=40)  # 10 chunks
    routes.add("r1", num_tokens=1)
    for i in range(500):
        routes.choose(keys(f"{i:08}" * 4))
    assert routes.num_chunks == 11
    assert len(routes._holders) == 11
    routes.remove("r0")
    routes.remove("r1")
    assert routes.num_chunks == 0 and not routes._holders


def test_a_flood_of_unique_prompts_leaves_what_is_used() -> None:
    """40 chunks a replica: what comes back before 9 others of 4 chunks have gone there stays."""
    routes = router(2, replica_chunks=40, balance_abs=1_000_000)
    hot = [keys(f"hot {i:04}" * 4) for i in range(8)]
    homes = [routes.choose(one).replica for one in hot]
    num = 0
    for _ in range(200):
        for home, one in zip(homes, hot, strict=True):
            assert routes.choose(one) == Choice(home, 4, "prefix")
            num += 1
            routes.choose(keys(f"{num:08}" * 4))
    for _ in range(100):  # nobody asks for them any more: gone
        num += 1
        routes.choose(keys(f"{num:08}" * 4))
    assert {routes.choose(one).num_matched for one in hot} == {0}


def test_the_same_calls_choose_alike() -> None:
    def run(seed: int) -> list[Choice]:
        routes, rng = router(16, seed=seed), random.Random(1)
        return [routes.choose(keys(f"{rng.randrange(40):08}" * 4)) for _ in range(300)]

    assert run(3) == run(3) != run(4)


class Oracle:
    """Each replica's chunks with when they were used last, and nothing clever."""

    def __init__(self, config: RoutingConfig) -> None:
        self.config = config
        self.used: dict[str, dict[bytes, tuple[int, int]]] = {}
        self.loads: dict[str, int] = {}
        self.clock = 0

    def matched(self, name: str, chain: tuple[Key, ...]) -> int:
        return max([n for n in range(len(chain) + 1) if all(key in self.used[name] for key in chain[:n])])

    def overloaded(self, name: str) -> bool:
        load, least = self.loads[name], min(self.loads.values())
        return load > least + self.config.balance_abs and load > least * self.config.balance_rel

    def check(self, chain: tuple[Key, ...], choice: Choice) -> None:
        matches = {name: self.matched(name, chain) for name in self.loads}
        ready = [n for name, n in matches.items() if n >= max(1, len(chain) * 0.25) and not self.overloaded(name)]
        assert choice.num_matched == matches[choice.replica]
        assert choice.why == ("prefix" if ready else "load")
        if ready:
            assert choice.num_matched == max(ready) and not self.overloaded(choice.replica)
        better = [name for name, n in matches.items() if n > choice.num_matched and n >= max(1, len(chain) * 0.25)]
        assert choice.overridden == bool(better)
        if len(self.loads) == 2 and not ready:
            assert self.loads[choice.replica] == min(self.loads.values())

    def send(self, chain: tuple[Key, ...], name: str) -> None:
        self.clock += 1
        self.loads[name] += 1
        used = self.used[name]
        used.update({key: (self.clock, -depth) for depth, key in enumerate(chain)})
        while len(used) > self.config.replica_chunks:
            del used[min(used, key=used.__getitem__)]


def chains(rng: random.Random) -> list[tuple[Key, ...]]:
    """Prompts of 1 to 4 chunks that share beginnings."""
    return [keys("".join(rng.choice("abc") * 8 for _ in range(rng.randint(1, 4)))) for _ in range(60)]


@pytest.mark.parametrize(("count", "capacity"), [(2, 12), (5, 20), (5, 1000)])
def test_against_an_oracle(count: int, capacity: int) -> None:
    routes = router(count, replica_chunks=capacity, balance_abs=3, min_match=0.25)
    oracle, rng, born = Oracle(routes.config), random.Random(capacity), count
    for name in routes.replicas:
        oracle.used[name], oracle.loads[name] = {}, 0
    prompts: Sequence[tuple[Key, ...]] = chains(rng)
    for _ in range(2500):
        what, name = rng.random(), rng.choice(routes.replicas)
        if what < 0.6:
            chain = rng.choice(prompts)
            choice = routes.choose(chain)
            oracle.check(chain, choice)
            oracle.send(chain, choice.replica)
        elif what < 0.85:
            load = rng.randint(0, 12)
            routes.report(name, ReplicaLoad(load))
            oracle.loads[name] = load
        elif what > 0.995:
            routes.remove(name)
            routes.add(f"r{born}")
            del oracle.used[name], oracle.loads[name]
            oracle.used[f"r{born}"], oracle.loads[f"r{born}"] = {}, 0
            born += 1
        assert {name: routes.load(name) for name in routes.replicas} == oracle.loads
        assert routes.num_chunks == sum(map(len, oracle.used.values()))


# ---- what is refused
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0: must be a whole number from 1 to 1048576"),
        ({"min_match": 1.5}, "min_match is 1.5: must be a finite number at least 0 and at most 1"),
        ({"balance_rel": 0.5}, "balance_rel is 0.5: must be a finite number at least 1 and at most 1e+06"),
    ],
)
def test_settings_are_checked(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RoutingConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == text


def test_loads_and_names_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="kv_usage is 1.01: must be"):
        ReplicaLoad(kv_usage=1.01)
    with pytest.raises(InvalidArgument, match="num_seats is 0: must be"):
        ReplicaLoad(num_seats=0)
    routes = router(1)
    with pytest.raises(InvalidArgument, match="replica is 'r0': must not be the name of one that is there"):
        routes.add("r0")
    with pytest.raises(InvalidArgument, match="num_tokens is 0: must be at least 1, or None"):
        routes.add("r1", num_tokens=0)
    with pytest.raises(NotFound, match="replica 'r1' does not exist"):
        routes.remove("r1")
    with pytest.raises(NotFound, match="replica 'r1' does not exist"):
        routes.load("r1")
