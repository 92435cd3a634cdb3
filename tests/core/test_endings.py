"""How requests end, wait, or are given up: by a stop, by nothing left to do, by our own mistake; never by somebody
else's doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pagedec.core.history import History
from pagedec.core.planning import Planner
from pagedec.core.protocol import Answer, Child, DecoderContext, Query, Verdict
from pagedec.core.request import Branch, Ended, Failed, Request, Waiting
from pagedec.core.settling import Settler
from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling
from pagedec.errors import InvalidArgument, InvariantError
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams, beam
from tests.algorithms.interactive import Interactive, InteractiveParams, SessionState
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.lane import session
from tests.core.test_hostile import PROMPT, alone, neighbours, wrong
from tests.core.world import Case, World, limits, results


@pytest.mark.parametrize("seed", range(8))
def test_a_stop_under_a_gang_is_a_candidate_that_ends(seed: int) -> None:
    """Width 3 gives three answers of three ranks, those of beam search on lists, whatever tokens stop it."""
    world = World(seed)
    stops = tuple(sorted(world.rng.sample(range(VOCABULARY), 2)))
    params = BeamParams(3, seed % 2 == 0, max_tokens=8)
    want = beam(world.target, PROMPT, params, stops)
    case = Case("beams", params, PROMPT, want, Stopping((stops[0],), stops[1:], max_tokens=8))
    for own in (limits(40), limits(30, max_chunk=2, enable_prefix_caching=False)):
        engine = world.compare([case], own)
        assert not engine.failed
    engine = FakeEngine(world.models, limits(40))
    request = case.add(engine.scheduler)
    engine.run()
    assert sorted(hypothesis.rank for hypothesis in request.done) == list(range(len(want)))
    for hypothesis in request.done:
        ended = hypothesis.tokens[-1] in stops
        assert (hypothesis.reason, hypothesis.stop_token) == (
            ("stop", hypothesis.tokens[-1]) if ended else ("length", None)
        )


def test_a_verdict_that_leaves_nothing_ends_its_request() -> None:
    engine = FakeEngine(World(0).models, limits(40))
    request = engine.scheduler.admit("quiet", wrong(change_verdict=lambda _: Verdict()), PROMPT, Stopping(max_tokens=9))
    engine.scheduler.add(request)
    events = []
    while not engine.scheduler.idle:
        events += engine.step()
    assert isinstance(events[-1], Ended) and request.closed and request.done == [] and not engine.failed
    engine.check_whole()


def test_appended_text_stops_nothing() -> None:
    """Templates hold end tokens. What a client appends is taken whole, and what is generated behind it is stopped as
    ever."""
    stop = 3
    engine = FakeEngine(World(1).models, limits(60))
    params = InteractiveParams(temperature=0)
    request = Case("s", params, PROMPT, None, Stopping((stop,), (), max_tokens=4), limit=60).add(engine.scheduler)
    engine.scheduler.edit("s", Verdict((Child(request.branches[0], (stop, 1, stop) * 4),)))
    [branch] = request.branches
    assert request.history.tokens(branch.tip) == [*PROMPT, *(stop, 1, stop) * 4] and request.done == []
    engine.scheduler.edit("s", Verdict((Child(branch, state=SessionState(remaining=9)),)))
    engine.run()
    [answer] = request.done
    generated = request.history.tokens(answer.tip)[len(PROMPT) + 12 :] + list(answer.tokens)
    assert len(generated) == 4 or generated[-1] == stop
    assert stop not in generated[:-1]


def test_stop_strings_do_not_begin_in_appended_text() -> None:
    pieces = [b"%d" % token for token in range(VOCABULARY)]
    world = World(1)
    drawn = max(range(VOCABULARY), key=lambda token: (world.target([*PROMPT, 1])[token], -token))
    stopping = Stopping((), (), max_tokens=3, strings=StopStrings((f"1{drawn}",)), pieces=pieces)
    engine = FakeEngine(world.models, limits(60))
    request = Case("s", InteractiveParams(temperature=0), PROMPT, None, stopping, limit=60).add(engine.scheduler)
    appended = Child(request.branches[0], (1,), state=SessionState(remaining=1))
    engine.scheduler.edit("s", Verdict((appended,)))
    engine.step()
    assert request.done == [] and request.history.token[request.branches[0].tip] == drawn


class Naming(Sampling):
    """Asks of its first branch only, and gives its second a token that ends it."""

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        return super().propose(branches[:1], room)

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        verdict = super().advance(queries, answers)
        if len(verdict.live) == 2:
            self.second = verdict.live[1].state
            return verdict
        second = [branch for branch in self.branches() if branch.state == self.second]
        return Verdict((*verdict.live, *(Child(branch, (7,)) for branch in second)))

    def branches(self) -> Sequence[Branch]:
        return self.request.branches

    request: Request


def test_a_child_that_is_cut_takes_its_parent_with_it() -> None:
    """Also where the parent was not asked: it must not live on without what was appended."""
    engine = FakeEngine(World(0).models, limits(40))
    made: list[Naming] = []

    def make(context: DecoderContext) -> Naming:
        made.append(Naming(SamplingParams(n=2, seed=5), context))
        return made[0]

    request = engine.scheduler.admit("r", make, PROMPT, Stopping((7,), (), max_tokens=9))
    made[0].request = request
    engine.scheduler.add(request)
    engine.step()
    assert len(request.branches) == 2
    engine.step()
    assert [hypothesis.tokens[-1:] for hypothesis in request.done if hypothesis.rank == 1] == [(7,)]
    assert all(branch.state != (1,) for branch in request.branches)


def test_what_waits_for_a_client_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wakes with an edit."""
    calls = []
    original = Interactive.propose

    def propose(self: Interactive, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        calls.append(engine.scheduler.step)
        return original(self, branches, room)

    monkeypatch.setattr(Interactive, "propose", propose)
    engine = FakeEngine(World(0).models, limits(60))
    request = session(engine, [1, 2, 3])
    Case("other", SamplingParams(temperature=0), PROMPT, None, Stopping(max_tokens=9)).add(engine.scheduler)
    events = [event for _ in range(6) for event in engine.step()]
    assert calls == [1] and [event.request for event in events if isinstance(event, Waiting)] == [request]
    engine.scheduler.edit("session", Verdict((Child(request.branches[0], state=SessionState(remaining=1)),)))
    engine.run()
    assert len(calls) == 3 and len(request.history.token) == 5


# --------------------------------------------------------------------------------------------------------- our mistakes
@pytest.mark.parametrize("array_settle", [True, False])
def test_our_own_mistake_while_settling(monkeypatch: pytest.MonkeyPatch, array_settle: bool) -> None:
    """Half way through one request: that one fails, all KV is given up, and the others draw the same tokens again."""
    want = alone()
    engine = FakeEngine(World(0).models, limits(60, array_settle=array_settle))
    requests = {case.name: case.add(engine.scheduler) for case in neighbours()}
    publish = Settler._publish_generation

    def broken(self: Settler, request: Request) -> None:
        if request.id == "beams" and len(request.branches) == 3:
            request.branches[0].table.num_blocks += 1  # torn
            raise InvariantError("made up")
        publish(self, request)

    monkeypatch.setattr(Settler, "_publish_generation", broken)
    engine._published.clear()
    while not engine.scheduler.idle:
        lost = engine.scheduler.step
        plan = engine.scheduler.plan()
        events = engine.scheduler.settle(plan, engine.runner.execute(plan))
        if any(isinstance(event, Failed) for event in events):
            [failed] = [event for event in events if isinstance(event, Failed)]
            assert failed.request.id == "beams" and isinstance(failed.error.__cause__, InvariantError)
            assert lost + 1 == engine.scheduler.step
            engine._published.clear()
            engine.runner.kv = {lane: [None] * len(kv) for lane, kv in engine.runner.kv.items()}
        engine.check()
    assert {name: results(request) for name, request in requests.items() if name != "beams"} == {
        name: answer for name, answer in want.items() if name != "beams"
    }
    engine.check_whole()


def test_nobody_else_pays_for_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that finds no row with the whole device to itself fails; one that waits for its client does not."""
    engine = FakeEngine(World(0).models, limits(60))
    waits = session(engine, [1, 2, 3])
    engine.step()
    Case("stuck", SamplingParams(temperature=0), PROMPT, None, Stopping(max_tokens=4)).add(engine.scheduler)
    fine = Case("fine", SamplingParams(seed=1), PROMPT, None, Stopping(max_tokens=4)).add(engine.scheduler)
    plan_plain = Planner._plan_plain

    def blind(self: Planner, request: Request, *args: Any) -> bool:
        return request.id != "stuck" and plan_plain(self, request, *args)

    monkeypatch.setattr(Planner, "_plan_plain", blind)
    engine.run()
    assert list(engine.failed) == ["stuck"] and "with the whole device to itself" in str(engine.failed["stuck"])
    assert fine.closed and len(fine.done) == 1 and not waits.closed
    engine.scheduler.abort("session")
    engine.check_whole()


def test_an_edit_that_is_refused_changes_nothing() -> None:
    engine = FakeEngine(World(0).models, limits(60))
    request = session(engine, [1, 2, 3])
    before = (request.branches[0], request.branches[0].tip, len(request.history.token))
    for tokens in ((-1,), (VOCABULARY,), (1.5,), ("a",)):
        with pytest.raises(InvalidArgument, match=r"live\[0\].tokens"):
            engine.scheduler.edit("session", Verdict((Child(request.branches[0], tokens),)))
    assert (request.branches[0], request.branches[0].tip, len(request.history.token)) == before


def test_common_parts_of_a_gang_are_looked_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the prefix cache on, a step of 64 beams compares 64 tips, not 64 x 64."""
    calls = [0]
    common = History._common

    def counted(self: History, a: int, b: int) -> int:
        calls[0] += 1
        return common(self, a, b)

    monkeypatch.setattr(History, "_common", counted)
    own = limits(400, block_size=16, max_num_batched_tokens=512, max_blocks_per_table=80)
    engine = FakeEngine(World(5).models, own)
    prompt = [(i * i + i // 7) % VOCABULARY for i in range(100)]
    request = Case("beam", BeamParams(64, max_tokens=20), prompt, None, limit=120).add(engine.scheduler)
    while not request.closed:
        calls[0] = 0
        engine.step()
        assert calls[0] <= 63
