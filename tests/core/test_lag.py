"""A draft lane whose slots lag a token behind: each row reads features that the target has evaluated before. The fake
device looks at every row's, and fails where a slot that was rolled is read by a later step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedec.core.block import BlockPool
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.rolling import Rolls
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.errors import InvalidArgument
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.world import BLOCK, Case, World, limits, results

LAG = {"draft": 1}


def rolled_by(plan: StepPlan) -> dict[str, int]:
    """How many tokens each request's roll has in a plan."""
    return {work.request.id: work.draft.num_nodes for work in plan.works if work.roll >= 0 and work.query is not None}


@pytest.mark.parametrize("seed", range(1, 25))
def test_every_case_in_every_company(seed: int) -> None:
    """Few blocks, small chunks, a host tier, preemptions and aborts: what comes out is what each is alone."""
    world = World(seed)
    own = limits(24, [6, 40][seed % 2], max_chunk=[3, None][seed % 3 == 0], num_offload_blocks=10, lags=LAG)
    world.run(world.cases, own, random.Random(seed))


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 23, 24, 25, 47])
def test_a_draft_depends_on_the_text_alone(length: int) -> None:
    """What is rolled behind each text is the same beside others and alone, in one piece, in chunks, and from the prefix
    cache; of a prompt of one token nothing is rolled, since the target has no features of it yet."""
    world = World(3)
    rng = random.Random(length)
    prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
    params = SpeculativeParams(seed=5)
    known: list[list[list[int]]] = []
    for chunk, crowd in ((None, 0), (3, 0), (None, 3), (5, 2)):
        engine = FakeEngine(world.models, limits(80, 80, max_chunk=chunk, lags=LAG, max_num_batched_tokens=64))
        for again in range(2):
            case = Case(f"{chunk} {crowd} {again}", params, prompt, None, Stopping(max_tokens=9))
            request = case.add(engine.scheduler)
            for i in range(crowd):
                text = [rng.randrange(VOCABULARY) for _ in range(7 + i)]
                Case(f"other {i} {again}", SpeculativeParams(seed=i), text, None, Stopping(max_tokens=20)).add(
                    engine.scheduler
                )
            rolled: dict[int, list[int]] = {}
            while not request.closed:
                plan = engine.scheduler.plan()
                answers = engine.runner.execute(plan)
                for work in plan.works:
                    if work.request is request and work.roll >= 0 and work.query is not None:
                        counts = plan.forwards["draft"].rolls["count"]
                        first = int(counts[: work.roll].sum())
                        chain = answers["draft"].rolled[first : first + int(counts[work.roll])]
                        rolled[request.history.depth[work.branch.tip]] = chain.tolist()
                engine.scheduler.settle(plan, answers)
                engine.check()
            assert length not in rolled or length > 1
            known.append([results(request), *([at, *own] for at, own in sorted(rolled.items()))])
            engine.run()
            engine.check_whole()
    answers = {str(own[0]) for own in known}
    assert len(answers) == 1
    texts: dict[int, list[int]] = {}
    for own in known:
        for at, *chain in own[1:]:
            longest = texts.setdefault(at, chain)
            assert longest[: len(chain)] == chain[: len(longest)]
    assert texts, "nothing was rolled"


def test_a_roll_follows_in_the_step_behind_the_prompt() -> None:
    """The lane reads what the target has evaluated before the step: a prompt's last token has no roll behind it, the
    next step reads the prompt and rolls at once."""
    engine = FakeEngine(World(2).models, limits(80, 80, max_num_batched_tokens=64, lags=LAG))
    Case("r", SpeculativeParams(seed=1), [1, 2, 3, 4, 5, 6], None, Stopping(max_tokens=12)).add(engine.scheduler)
    plan = engine.scheduler.plan()
    assert rolled_by(plan) == {} and "draft" not in plan.forwards
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    plan = engine.scheduler.plan()
    draft = plan.forwards["draft"]
    assert rolled_by(plan)["r"] > 0 and draft.token_ids[:5].tolist() == [2, 3, 4, 5, 6]
    assert draft.positions.tolist() == list(range(6)) and len(draft.feature_slots) == 6
    assert draft.rolls["draw"]["position"].tolist() == [7] and draft.rolls["prompt_length"].tolist() == [5]
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    [table] = [branch.tables["draft"] for branch in engine.scheduler.requests[0].branches]
    assert (table.length, table.tail, table.num_blocks) == (6, (), 2), "what was rolled is not kept"


def test_tables_keep_what_tokens_alone_have_made() -> None:
    pool = BlockPool("draft", 20, BLOCK, 8, lag=1)
    table = BlockTable(pool)
    assert reserve([(table, 9)], CopyPlan(pool))
    table.length = 9
    assert [table.num_valid(n) for n in (0, 1, 2, 9, 10, 11)] == [0, 0, 1, 8, 9, 9]
    table.keep(6)
    assert (table.length, table.num_blocks) == (5, 2)
    table.keep(0)
    assert (table.length, table.num_blocks) == (0, 0)


def test_features_are_where_the_target_has_the_tokens() -> None:
    """Of several branches, over block boundaries, from anywhere."""
    pool, tables, rolls = BlockPool("target", 40, BLOCK, 16), list[BlockTable](), Rolls()
    for length in (50, 3, 17):
        tables.append(BlockTable(pool))
        assert reserve([(tables[-1], length)], CopyPlan(pool))
    assert rolls.feature_slots().tolist() == []
    read = [(0, 0, 50), (2, 4, 4), (1, 2, 1), (0, 7, 30), (2, 16, 1), (0, 49, 1), (1, 0, 3)]
    for table, start, count in read:
        rolls.read_features(tables[table], start, count)
    found = rolls.feature_slots()
    assert found.dtype == np.int32
    assert found.tolist() == [tables[t].slot(i) for t, start, count in read for i in range(start, start + count)]


@pytest.mark.parametrize("lags", [{"draft": 2}, {"draft": -1}, {"target": 1}])
def test_lags_that_there_are_not(lags: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="lags"):
        SchedulerLimits({"target": 4, "draft": 4}, VOCABULARY, lags=lags)
