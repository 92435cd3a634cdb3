"""Every decoder on the fake device returns what plain lists return: alone and in a crowd, in chunks and whole,
preempted or not, on a prefix-cache hit or a miss, in a pool that is far too small."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pagedec.core import planning, preemption, reuse, table, transition
from pagedec.core.protocol import Child, Verdict
from pagedec.core.request import Ended, Finished, Progress
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams
from tests.algorithms.interactive import InteractiveParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.world import BLOCK, METHODS, Case, World, limits, results


def alone_and_mixed(seed: int) -> None:
    """Each request alone equals its reference; so does every mixture, for every chunk size, cache on or off."""
    world = World(seed)
    for case in world.cases:
        world.compare([case], limits(24, max_chunk=world.rng.choice([1, 3, None])))
    is_caching = seed % 5 != 0
    for chunk in (1, 3, None):
        batch = world.cases if chunk == 3 and seed % 3 == 0 else world.rng.sample(world.cases, 6)
        disturb = random.Random(seed) if seed % 2 else None
        own = limits(
            24 + seed % 4,
            max_chunk=chunk,
            enable_prefix_caching=is_caching,
            num_offload_blocks=[0, 1, 5, 60][seed % 4] if is_caching else 0,
            array_settle=seed % 7 != 0,
            max_num_seqs=[256, 4][seed % 2],
        )
        world.compare(batch, own, disturb)


def streams(seed: int) -> None:
    """Four samples of one request are the four single requests with these streams."""
    world = World(seed)
    world.stops, world.min_tokens, world.max_tokens = (), 0, 12
    for method in (SamplingParams, RandomTreeParams, SpeculativeParams):
        text = world.prompt()
        params = method(n=4, temperature=1.0, seed=seed)
        case = Case("n=4", params, text, None, Stopping(max_tokens=12))
        samples = world.run([case], limits(32))[0]["n=4"]
        assert samples == world.want(seed, range(4), text), "n=4 differs from four streams"
        assert len({tuple(sample) for sample in samples}) > 1, "n=4 gave equal samples"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "seed", [*range(14), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(14, 40)), 1239]
)
def test_alone_and_mixed(seed: int) -> None:
    """Seed 1239: beams of which one comes back from the prefix cache while another waits for what they share."""
    alone_and_mixed(seed)


@pytest.mark.parametrize("seed", range(10))
def test_streams(seed: int) -> None:
    streams(seed)


@pytest.mark.long
def test_many_worlds() -> None:
    for seed in range(1000, 2500):
        alone_and_mixed(seed)


@pytest.mark.parametrize("seed", range(20))
def test_settling_without_a_block(seed: int) -> None:
    """With not one block left, the tokens are kept and the KV is recomputed."""
    world = World(seed)
    [case] = [case for case in world.cases if case.name.startswith("oracle")]
    engine = FakeEngine(world.models, limits(40))
    scheduler, pool = engine.scheduler, engine.scheduler.pools["target"]
    request = case.add(scheduler)
    while scheduler.requests:
        plan = scheduler.plan()
        answers = engine.runner.execute(plan)
        hoard = [pool.take() for _ in range(pool.num_available)]
        scheduler.settle(plan, answers)
        for block in hoard:
            assert block is not None
            pool.drop(block)
        engine.check()
    assert results(request) == case.want
    engine.check_whole()


def test_prefix_cache_hit_equals_miss() -> None:
    """A full hit recomputes one read-only row; another tenant does not see the blocks; twins compute a prompt once."""
    world = World(1)
    prompt = [world.rng.randrange(VOCABULARY) for _ in range(4 * BLOCK)]
    engine = FakeEngine(world.models, limits(16, max_chunk=3))
    scheduler = engine.scheduler
    outputs = []
    for tenant, cached, rows in (("a", 0, 16), ("a", 16, 1), ("b", 0, 16)):
        request = Case("r", SamplingParams(temperature=0.0), prompt, None, Stopping(max_tokens=6)).add(
            scheduler, salt=tenant
        )
        computed = 0
        while scheduler.requests:
            plan = scheduler.plan()
            if request.history.depth[request.branches[0].tip] == len(prompt):
                computed += plan.num_rows
            scheduler.settle(plan, engine.runner.execute(plan))
            engine.check()
        assert (request.num_cached_tokens, computed) == (cached, rows)
        outputs.append(results(request))
    assert outputs[0] == outputs[1] == outputs[2]
    twins = [
        Case(f"twin {i}", SamplingParams(temperature=0.0), prompt[::-1], None, Stopping(max_tokens=1)).add(scheduler)
        for i in range(2)
    ]
    written = 0
    while scheduler.requests:
        plan = scheduler.plan()
        written += int((plan.forwards["target"].slots >= 0).sum())
        scheduler.settle(plan, engine.runner.execute(plan))
    assert written == len(prompt) and results(twins[0]) == results(twins[1]), "twins computed a prompt twice"
    assert twins[1].num_cached_tokens == len(prompt)
    engine.check_whole()


def test_rare_events_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixtures above are worth something only if they meet what is rare."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, event: Callable[[Any], str | None]) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            counts[event(value) or ""] += 1
            return value

        monkeypatch.setattr(owner, name, counted)

    count(preemption.Room, "make", lambda made: "room made" if made else "no room")
    count(preemption.Room, "make_on_draft_lane", lambda made: "draft table dropped" if made else None)
    count(preemption, "preempt", lambda held: "preempted" if held else None)
    count(reuse.Reuse, "_wait_for_trunk", lambda waits: "waited for a trunk" if waits else None)
    count(reuse.Reuse, "must_wait", lambda waits: "waited" if waits else None)
    count(planning.Planner, "_recompute_gang", lambda _: "gang recomputed")
    count(table.BlockTable, "extend", lambda _: "prefix block hit")
    count(transition, "compact_path", lambda _: "paths")
    for seed in range(1, 41, 2):
        world = World(seed)
        own = limits(24, 6, max_chunk=3, num_offload_blocks=10)
        _, engine = world.run(world.cases, own, random.Random(seed))
        pool = engine.scheduler.pools["target"]
        assert pool.offload is not None
        counts["evictions"] += pool.num_evictions
        counts["offloaded"] += pool.offload.num_stored
        counts["brought back"] += pool.offload.num_loaded
    for event in (
        "room made", "no room", "draft table dropped", "preempted", "waited for a trunk", "waited", "gang recomputed",
        "prefix block hit", "evictions", "offloaded", "brought back",
    ):  # fmt: skip
        assert counts[event] > 0, f"{event}: never happened"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_drafting_saves_steps_or_costs_none(method: type[SamplingParams]) -> None:
    """Speculation changes the number of read-outs, never upwards."""
    for seed in range(6):
        world = World(seed)
        case = world.sampling_case(method, None, 1)
        _, engine = world.run([case], limits(40))
        assert engine.runner.num_read_outs[case.name] <= len(case.want[0]) - len(case.prompt)


def test_events_tell_the_whole_story() -> None:
    """Progress of each rank adds up to its answer; every answer and every end is reported once."""
    world = World(3)
    cases = [case for case in world.cases if not case.is_session]
    engine = FakeEngine(world.models, limits(60))
    requests = {case.name: case.add(engine.scheduler) for case in cases}
    text: dict[tuple[str, int], list[int]] = {}
    ended: Counter[str] = Counter()
    while not engine.scheduler.idle:
        for event in engine.step():
            name = event.request.id
            if isinstance(event, Progress):
                text.setdefault((name, event.rank), []).extend(event.tokens)
            elif isinstance(event, Finished):
                if not event.request.decoder.gang:
                    assert text[name, event.hypothesis.rank] == event.request.output(event.hypothesis)
            elif isinstance(event, Ended):
                ended[name] += 1
    assert ended == Counter(dict.fromkeys(requests, 1))
    assert not any(requests[name].decoder.gang for name, _ in text)


def test_fork_costs() -> None:
    """What a fork costs: nothing at a block boundary, k-1 copies inside a block, k inside a published one."""
    for length, generated, kept, children, want in ((8, 1, 8, 8, 0), (6, 1, 6, 5, 4), (8, 1, 6, 5, 5)):
        world = World(0)
        engine = FakeEngine(world.models, limits(32))
        case = Case("s", InteractiveParams(seed=1), [i % VOCABULARY for i in range(length)], None, limit=20)
        request = case.add(engine.scheduler)
        state = request.branches[0].state
        more = [type(state)(str(i), i, remaining=2) for i in range(children)]
        engine.scheduler.edit("s", Verdict((Child(request.branches[0], state=type(state)(remaining=generated)),)))
        engine.step()
        engine.scheduler.edit("s", Verdict((Child(request.branches[0], keep=kept),)))
        pool = engine.scheduler.pools["target"]
        held = pool.num_blocks - pool.num_available
        engine.scheduler.edit("s", Verdict(tuple(Child(request.branches[0], state=own) for own in more)))
        assert pool.num_blocks - pool.num_available == held, "a fork allocated"
        plan = engine.scheduler.plan()  # read-only roots: the branch is already evaluated
        assert not len(plan.forwards["target"].copy_src) and (plan.forwards["target"].slots == -1).all()
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        plan = engine.scheduler.plan()
        copies = plan.copies["target"].num_blocks
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        assert copies == want, (length, kept)
        engine.scheduler.abort("s")
        engine.check_whole()


def test_refusals_change_nothing() -> None:
    """The caller's mistakes are found before anything changes, and named."""
    engine = FakeEngine(World(0).models, limits(16))
    scheduler = engine.scheduler
    request = Case("s", InteractiveParams(seed=1), [1, 2, 3], None, limit=12).add(scheduler)
    [root] = request.branches
    other = Case("t", InteractiveParams(seed=1), [1, 2, 3], None, limit=12).add(scheduler).branches[0]
    wrong = [
        Verdict((Child(root, path=(1,)),)), Verdict((Child(root, keep=0),)), Verdict((Child(root, keep=4),)),
        Verdict((Child(root, keep=1, path=(1,)),)), Verdict((Child(other),)), Verdict(drop=(other,)),
        Verdict((Child(root),), drop=(root,)), Verdict((Child(root, tokens=(1,) * 10),)),
        Verdict((Child(root, tokens=(VOCABULARY,)),)),
    ]  # fmt: skip
    for verdict in wrong:
        with pytest.raises(InvalidArgument):
            scheduler.edit("s", verdict)
    greedy, once = SamplingParams(temperature=0.0), Stopping(max_tokens=1)
    refused = [
        Case("large", greedy, [1] * 70, None, once), Case("wide", BeamParams(30, max_tokens=2), [1], None, limit=3),
        Case("s", greedy, [1], None, once), Case("empty", greedy, [], None, once),
        Case("unknown token", greedy, [VOCABULARY], None, once), Case("endless", greedy, [1], None),
        Case("full", greedy, [1, 2], None, once, limit=2), Case("long", greedy, [1], None, limit=1000),
    ]  # fmt: skip
    for case in refused:
        with pytest.raises(InvalidArgument):
            case.add(scheduler)
    assert request.branches == [root] and [r.id for r in scheduler.requests] == ["s", "t"] and root.prompt_length == 3
    scheduler.check()
