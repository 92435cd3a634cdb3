"""Drafts as wide as pays, on devices whose clock is invented: what is granted follows from what steps take, and no
token follows from what is granted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pagedec.core import weighing
from pagedec.core.costs import StepCosts
from pagedec.core.granting import SLOWER, Grants, Load, Wish
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Decoder, DecoderContext
from pagedec.core.request import Request
from pagedec.core.standing import FIRST_REST, LONGEST_REST, MOST_ALLOWED, SHARE, Standing
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling, make_decoder
from pagedec.engine.pace import StepPace
from pagedec.params import SamplingParams
from tests.algorithms.lookahead import LookaheadParams
from tests.core import world
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.world import Case, World, limits, results

Clock = Callable[[int], float]
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}


def flat(rows: int) -> float:
    return 1.0 + 0.001 * rows


def linear(rows: int) -> float:
    return float(rows)


def dear(rows: int) -> float:
    """More for a row than a drafted token gives, however often it is accepted."""
    return 1.5 * rows - 0.5


def tile(rows: int) -> float:
    """Of 16 rows; another one takes as long again."""
    return 1.0 * -(-rows // 16)


def curve(clock: Clock) -> StepCosts:
    """The clock, known exactly."""
    return StepCosts(tuple(range(1, 65)), tuple(clock(rows) for rows in range(1, 65)))


class Machine:
    """A device that takes as long as a clock says, and an engine that finds it out."""

    def __init__(self, clock: Clock, is_known: bool = False, order: int = 2, **changes: Any) -> None:
        own = World(3)
        own.models["target"] = world.LanguageModel(3, order)
        changes = {"max_num_batched_tokens": 64, "max_blocks_per_table": 400, "enable_prefix_caching": False} | changes
        self.clock, self.pace, self.is_known = clock, StepPace(), is_known
        self.engine = FakeEngine(own.models, limits(2000, **changes))
        self.seconds, self.plans = 0.0, list[StepPlan]()
        self.granted: list[int] = []

    def add(self, name: str, speculative: Any = None, max_tokens: int = 400, seed: int | None = None) -> Request:
        """Greedy text soon repeats itself; drawn text does not."""
        own: dict[str, Any] = {"temperature": 0.0} if seed is None else {"seed": seed}
        params = SamplingParams(speculative=speculative, **own)
        prompt = [(i * i + len(name)) % VOCABULARY for i in range(6)]
        return Case(name, params, prompt, None, Stopping(max_tokens=max_tokens)).add(self.engine.scheduler)

    def run(self, num_steps: int = 10_000) -> None:
        scheduler = self.engine.scheduler
        for _ in range(num_steps):
            if scheduler.idle:
                return
            plan = scheduler.plan(costs=curve(self.clock) if self.is_known else self.pace.costs)
            scheduler.settle(plan, self.engine.runner.execute(plan))
            self.engine.check()
            shape = plan.shape
            assert shape is not None
            taken = self.clock(max(1, shape.num_rows))
            if shape.is_steady:
                self.seconds += taken
            self.pace.note(shape, len(plan.works), plan.num_granted, 0.0, taken)
            self.plans.append(plan)
            self.granted.append(plan.num_granted)


def seconds_of(
    clock: Clock, speculative: Any, num_requests: int = 1, **own: Any
) -> tuple[float, list[list[list[int]]]]:
    machine = Machine(clock)
    requests = [machine.add(f"{i}", speculative, **own) for i in range(num_requests)]
    machine.run()
    return machine.seconds, [results(request) for request in requests]


# ------------------------------------------------------------------------------------------------------------ what pays
@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_requests", [1, 8])
def test_where_rows_are_dear_it_is_plain(num_requests: int) -> None:
    plain, want = seconds_of(linear, False, num_requests)
    took, got = seconds_of(linear, NGRAM, num_requests)
    assert got == want and took < plain * (1 + SHARE) + MOST_ALLOWED * linear(num_requests) * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_requests", [1, 8])
def test_where_rows_are_cheap_it_is_as_fast_as_the_best_width(num_requests: int) -> None:
    plain, want = seconds_of(flat, False, num_requests)
    took, got = seconds_of(flat, NGRAM, num_requests)
    fixed, _ = seconds_of(flat, {**NGRAM, "adaptive": False}, num_requests)
    assert got == want and took < 0.4 * plain and took < 1.05 * fixed


def test_a_tile_is_filled_and_not_overfilled() -> None:
    machine = Machine(tile)
    for i in range(4):
        machine.add(f"{i}", {**NGRAM, "num_speculative_tokens": 16})
    machine.run(60)
    rows = [plan.num_rows for plan in machine.plans[30:]]
    assert sorted(rows)[len(rows) // 2] == 16 and max(rows) <= 48


def test_rows_go_to_the_request_whose_drafts_come_true() -> None:
    machine = Machine(tile, order=3)
    good = machine.add("good", NGRAM)
    bad = [machine.add(f"bad {i}", NGRAM, seed=i) for i in range(6)]
    machine.run(150)
    rates = [request.acceptance.num_drafted / max(1, request.acceptance.num_drafts) for request in (good, *bad)]
    assert rates[0] > 2 * max(rates[1:])
    assert good.acceptance.num_accepted > 3 * max(request.acceptance.num_accepted for request in bad)


# --------------------------------------------------------------------------------------------------------------- change
def test_it_changes_its_mind_when_the_machine_does() -> None:
    """From dear rows to cheap ones and back: a few rests, or a few steps, later it drafts, or does not."""
    machine = Machine(linear, max_blocks_per_table=1000)
    request = machine.add("0", NGRAM, max_tokens=2400)
    machine.run(200)
    assert sum(count > 0 for count in machine.granted[50:]) < 25
    machine.clock = flat
    machine.run(2 * LONGEST_REST)
    assert sum(count > 0 for count in machine.granted[-20:]) >= 18, "it drafts nearly always"
    machine.clock = dear
    machine.run(60)
    assert sum(machine.granted[-20:]) <= 8 and not request.closed


def test_it_drafts_when_the_others_are_gone() -> None:
    """A tile that 16 requests fill leaves no room; of one request alone all drafts are free."""
    machine = Machine(tile)
    requests = [machine.add(f"{i}", NGRAM, max_tokens=400 if not i else 60) for i in range(16)]
    machine.run(45)
    assert sum(machine.granted[20:]) <= 16, "a try now and then"
    while any(not request.closed for request in requests[1:]):
        machine.run(1)
    machine.run(12)
    assert sum(count > 0 for count in machine.granted[-8:]) == 8


def test_a_rest_doubles_while_trying_is_of_no_use() -> None:
    machine = Machine(linear, is_known=True)
    request = machine.add("0", NGRAM, max_tokens=1200)
    asked = []
    for step in range(1000):
        machine.run(1)
        asked += [step] if request.asked_in == machine.engine.scheduler.step else []
    rests = [after - before - 1 for before, after in zip(asked, asked[1:], strict=False) if after > before + 1]
    assert rests[:5] == [FIRST_REST * 2**i for i in range(5)] and set(rests[5:]) == {LONGEST_REST}
    lost = sum(plan.num_rows - 1 for plan in machine.plans[1:]) - request.acceptance.num_accepted
    assert sum(machine.granted) > 0 and lost <= SHARE * 1000 + MOST_ALLOWED + 4, "trying costs little of all time"


def test_plain_requests_wait_at_most_a_tenth_longer() -> None:
    """Whatever drafts beside them; and none of them misses a step."""
    costs = curve(lambda rows: 10.0 + rows * (0.1 if rows < 30 else 1.0))
    machine = Machine(lambda rows: float(costs.of(rows)), is_known=True)
    plain = [machine.add(f"plain {i}", None, seed=i, max_tokens=200) for i in range(5)]
    for i in range(12):
        machine.add(f"draft {i}", {**NGRAM, "num_candidates": 3})
    machine.run(150)
    for plan in machine.plans[1:]:
        drafted = sum(work.draft.num_nodes for work in plan.works)
        assert costs.of(plan.num_rows) <= SLOWER * float(costs.of(plan.num_rows - drafted)) + 1e-9
        assert {work.request for work in plan.works} >= {request for request in plain if not request.closed}
    assert sum(machine.granted) > 300


def test_fixed_widths_are_as_wide_as_they_are() -> None:
    machine = Machine(linear)
    request = machine.add("0", {**NGRAM, "adaptive": False})
    machine.run(100)
    assert request.standing is None and sum(machine.granted) == 0
    sizes = [plan.works[0].draft.num_nodes for plan in machine.plans[20:40]]
    assert sizes == [8] * 20


def test_a_request_that_rests_is_not_asked() -> None:
    machine = Machine(linear, is_known=True)
    request = machine.add("0", NGRAM)
    machine.run(400)
    later = [work for plan in machine.plans[100:] for work in plan.works]
    assert sum(work.draw < 0 for work in later) < len(later) / 10
    assert request.acceptance.num_drafts < 30


def test_who_was_asked_in_vain_is_stepped_plainly_and_counted() -> None:
    """What it costs to ask must stay known, though there is neither a query nor a verdict."""
    machine = Machine(linear, is_known=True)
    request = machine.add("0", NGRAM)
    in_vain = 0
    for _ in range(100):
        machine.run(1)
        plan, asked = machine.plans[-1], request.asked_in == machine.engine.scheduler.step
        assert plan.shape is not None and plan.shape.num_asked == asked
        if asked and not plan.num_granted and plan.num_rows == 1:
            assert [work.draw for work in plan.works] == [0] and plan.works[0].query is None
            in_vain += 1
    assert in_vain > 2


def test_the_same_costs_give_the_same_plans() -> None:
    def plans(seed: int) -> list[tuple[int, int]]:
        rng = random.Random(seed)
        machine = Machine(lambda rows: 1 + rows * rng.choice([0.001, 0.3]))
        for i in range(5):
            machine.add(f"{i}", NGRAM, seed=i if i % 2 else None, max_tokens=80)
        machine.run()
        return [(plan.num_rows, plan.num_granted) for plan in machine.plans]

    assert plans(4) == plans(4) != plans(5)


# ---------------------------------------------------------------------------------------------------------- same tokens
def adaptive(params: Any, context: DecoderContext) -> Decoder:
    """Every decoder that drafts, as one whose drafts are granted."""
    decoder = make_decoder(params, context)
    if isinstance(decoder, Sampling) and decoder.plain_sampler is None:
        decoder.resting_sampler = decoder.sampler
        if isinstance(params, LookaheadParams):
            decoder.grant_sizes = (4, 12)
    return decoder


class Caprice:
    """Grants any nodes whose parents it grants, and lets anybody rest."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_granted = rng, 0

    def costs(self) -> StepCosts:
        rows = sorted(self.rng.sample(range(1, 30), 4))
        seconds = sorted(self.rng.uniform(1, 4) for _ in rows)
        return StepCosts(tuple(rows), tuple(seconds), is_bare=self.rng.random() < 0.1)

    def grant(self, wishes: list[Wish], load: Load, costs: StepCosts) -> Grants:
        nodes: list[list[int]] = []
        left = load.rows_left
        for wish in wishes:
            size = len(wish.gains)
            count = self.rng.choice([0, size]) if wish.is_whole else self.rng.randrange(size + 1)
            nodes.append([*range(1, min(count, left) + 1)] if not wish.is_whole or count <= left else [])
            left -= len(nodes[-1])
            self.num_granted += len(nodes[-1])
        return Grants(nodes, 1.0, self.rng.uniform(1, 2), max(1.0, load.num_tokens * 1.5))

    def rests(self, standing: Standing, step: int, num_running: int) -> bool:
        if standing._rested_in != step:
            standing._rested_in, standing._rests = step, self.rng.random() < 0.3
        return standing._rests


@pytest.mark.parametrize("seed", range(12))
def test_no_token_follows_from_what_is_granted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods, beams and sessions in one crowd with too few blocks, late, preempted and aborted: with grants at
    random the texts are those of plain lists."""
    rng = random.Random(seed)
    caprice = Caprice(rng)
    monkeypatch.setattr(world, "make_decoder", adaptive)
    monkeypatch.setattr(weighing, "grant", caprice.grant)
    monkeypatch.setattr(Standing, "rests", lambda own, step, num: caprice.rests(own, step, num))
    own = World(seed)
    own.costs = caprice.costs
    engine = own.compare(own.cases, limits(rng.choice([24, 60]), max_num_batched_tokens=rng.choice([24, 60])), rng)
    assert caprice.num_granted > 0 and engine.num_steps > 5


@pytest.mark.parametrize("seed", range(8))
def test_nor_from_what_steps_are_said_to_take(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    caprice = Caprice(rng)
    monkeypatch.setattr(world, "make_decoder", adaptive)
    own = World(100 + seed)
    own.costs = lambda: caprice.costs() if rng.random() < 0.9 else None
    own.compare(own.cases, limits(40, max_num_batched_tokens=40), rng)
