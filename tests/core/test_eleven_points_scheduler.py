"""What the transition and the scheduler must get right: points 6 to 9 and 11 of the eleven, each test named after its
point."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec.core.block import BlockPool
from pagedec.core.demand import Forecast
from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.protocol import Child, Hypothesis, Verdict
from pagedec.core.request import Request
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.errors import InvariantError
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams
from tests.algorithms.oracle_tree import OracleTreeParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import EOS, VOCABULARY, FakeEngine, LanguageModel
from tests.core.lane import Lane, drafted, engine_of, execute, generate, session
from tests.core.world import BLOCK, Case, World, limits, results

GREEDY = SamplingParams(temperature=0.0)


# ------------------------------------------------------------------------------------------------------------------ 6
def test_06_a_finishing_request_leaves_its_blocks() -> None:
    engine = engine_of()
    for cached in (0, 11):
        request = Case("r", GREEDY, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], None, Stopping(max_tokens=2)).add(
            engine.scheduler
        )
        engine.run()
        assert request.num_cached_tokens == cached // BLOCK * BLOCK


def test_06_a_gang_publishes_what_all_beams_share() -> None:
    """What only some beams hold can still be displaced."""
    engine = engine_of(60)
    case = Case("beam", BeamParams(3, max_tokens=12), [1, 2, 3, 4, 5], None, limit=20)
    request = case.add(engine.scheduler)
    seen_private = False
    while not engine.scheduler.idle:
        engine.step()
        branches = request.branches
        if not branches:
            break
        history = request.history
        shared = min(history.common_length(branches[0].tip, branch.tip) for branch in branches)
        pool = engine.scheduler.pools["target"]
        for branch in branches:
            blocks = branch.table.blocks()
            findable = [number for number, block in enumerate(blocks) if pool.key_of[block] is not None]
            assert all((number + 1) * BLOCK <= shared for number in findable)
            seen_private |= branch.table.length // BLOCK > shared // BLOCK
    assert seen_private, "no beam ever held a full block of its own"


def test_06_first_publisher_wins() -> None:
    pool = BlockPool("target", 4, BLOCK, 4)
    a, b = pool.take(), pool.take()
    assert a is not None and b is not None
    pool.publish(a, b"key")
    pool.publish(b, b"key")
    assert pool.lookup(b"key") == a and pool.key_of[b] is None


def test_06_a_branch_waits_for_a_block_that_is_being_computed() -> None:
    engine = engine_of(max_num_batched_tokens=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    for name in "ab":
        Case(name, GREEDY, prompt, None, Stopping(max_tokens=3)).add(engine.scheduler)
    first = execute(engine)
    assert [work.request.id for work in first.works] == ["a"]
    second = execute(engine)
    assert [(work.request.id, work.start, work.num_tokens) for work in second.works] == [("a", 10, 1), ("b", 8, 2)]


# ------------------------------------------------------------------------------------------------------------------ 7
def test_07_a_valid_root_is_a_row_that_only_reads() -> None:
    """Forking an evaluated branch eight ways at a block boundary copies, takes and unpublishes nothing."""
    engine = engine_of()
    request = session(engine, [1, 2, 3, 4, 5, 6, 7, 1])
    engine.scheduler.edit("session", Verdict((Child(request.branches[0], state=generate(1)),)))
    execute(engine)
    engine.scheduler.edit("session", Verdict((Child(request.branches[0], keep=8),)))
    forks = tuple(Child(request.branches[0], state=generate(1, str(i), i)) for i in range(8))
    engine.scheduler.edit("session", Verdict(forks))
    pool = engine.scheduler.pools["target"]
    before = pool.num_available, dict(pool.block_of)
    plan = engine.scheduler.plan()
    forward = plan.forwards["target"]
    assert forward.slots.tolist() == [-1] * 8 and not len(forward.copy_src)
    assert forward.positions.tolist() == [7] * 8 and forward.kv_len.tolist() == [8] * 8
    assert (pool.num_available, dict(pool.block_of)) == before
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    assert len({request.history.token[branch.tip] for branch in request.branches}) > 1, "they draw with their own noise"


def test_07_a_draft_may_hang_under_a_valid_root() -> None:
    """The root's row writes nothing, the draft's rows lie behind it."""
    world = World(2)
    world.stops, world.min_tokens, world.max_tokens = (), 0, 4
    text = [1, 2, 3, 4, 5, 6, 7, 1]
    params = OracleTreeParams(n=2, seed=2, oracle=world.draw(2), wrong=EOS)
    engine = FakeEngine(world.models, limits(40))
    case = Case("r", params, text, None, Stopping(max_tokens=4))
    case.add(engine.scheduler)
    engine.run()
    request = case.add(engine.scheduler)
    plan = engine.scheduler.plan()
    forward = plan.forwards["target"]
    assert forward.slots[0] == -1 and (forward.slots[1:] >= 0).all() and len(forward.slots) == 1 + 7
    assert forward.parents is not None and forward.parents.tolist() == [-1, 0, 0, 0, 2, 3, 4, 5]
    assert forward.positions.tolist() == [7, 8, 8, 8, 9, 9, 10, 10] and forward.kv_len.tolist() == [15]
    engine.scheduler.settle(plan, engine.runner.execute(plan))
    engine.run()
    assert results(request) == world.want(2, range(2), text)


# ------------------------------------------------------------------------------------------------------------------ 8
def test_08_reservation_is_exact_and_atomic() -> None:
    lane = Lane(6, 6, num_blocks=4)
    children = lane.next([lane.root], Verdict(tuple(Child(lane.root, (token,)) for token in range(4))))
    wants = [(child.table, 1) for child in children]
    before = [table.blocks() for table, _ in wants]
    assert not reserve(wants, lane.copies), "three copies, two blocks"
    assert [table.blocks() for table, _ in wants] == before and len(lane.copies) == 0 and lane.pool.num_available == 2
    children[0].release()
    assert reserve(wants[1:], lane.copies) and lane.pool.num_available == 0
    lane.check(children)


def held(request: Request) -> list[int]:
    return [branch.table.num_blocks for branch in request.branches]


def test_08_the_order_of_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, idle branches, the youngest request, then the request's own youngest branches; the oldest never."""
    monkeypatch.setattr(Forecast, "admits", lambda *_: True)  # who is let in too early is who must give way
    engine = engine_of(12, enable_prefix_caching=False, max_num_batched_tokens=64)
    scheduler = engine.scheduler
    old = Case("old", SamplingParams(n=4, seed=1), [1, 2, 3, 4, 5, 6], None, Stopping(max_tokens=22)).add(scheduler)
    idle = session(engine, [1] * 8, limit=12, name="idle")
    scheduler.edit("idle", Verdict((Child(idle.branches[0], state=generate(1)),)))
    middle = Case("middle", GREEDY, [2] * 6, None, Stopping(max_tokens=12)).add(scheduler)
    young = Case("young", GREEDY, [3] * 6, None, Stopping(max_tokens=12)).add(scheduler)
    order: list[str] = []
    while not old.closed:
        before = {"idle": held(idle), "middle": held(middle), "young": held(young), "own": held(old)}
        tips = [branch.tip for branch in old.branches]
        plan = scheduler.plan()
        assert [work for work in plan.works if work.request is old], "the oldest always advances"
        for name, request in (("idle", idle), ("young", young), ("middle", middle)):
            if sum(before[name]) and not sum(held(request)) and name not in order:
                order.append(name)
        own = held(old)
        assert own == sorted(own, key=bool, reverse=True) or len(tips) < 4, "its own youngest branches go first"
        if any(was and not is_now for was, is_now in zip(before["own"], own, strict=True)) and "own" not in order:
            order.append("own")
        scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
    assert order == ["idle", "young", "middle", "own"]
    assert old.num_preemptions == 0 and young.num_preemptions > 0
    engine.run()
    assert len(results(middle)[0]) == 18 and len(results(young)[0]) == 18


def test_08_a_draft_is_stripped_before_anybody_gives_way() -> None:
    """The younger request's blocks are in the draft's way: the older one goes on without a draft until they are
    free."""
    world = World(2)
    world.stops, world.min_tokens, world.max_tokens = (), 0, 9
    text = [1, 2, 3, 4, 5, 6, 7]
    params = OracleTreeParams(n=1, seed=2, oracle=world.draw(2), depth=3, wrong=EOS)
    engine = FakeEngine(world.models, limits(5, enable_prefix_caching=False))
    young = Case("young", GREEDY, [1, 2, 3, 4, 5, 6, 7, 1, 2], None, Stopping(max_tokens=2)).add(
        engine.scheduler, priority=1
    )
    execute(engine)
    request = Case("r", params, text, None, Stopping(max_tokens=9)).add(engine.scheduler)
    drafted = []
    while not request.closed:
        drafted += [len(work.draft.tokens) for work in execute(engine).works if isinstance(work.draft, Draft)]
    assert drafted[:2] == [0, 0] and 4 in drafted, "two rows, one of them of the younger request, then drafts"
    assert young.closed and young.num_preemptions == 0 and request.acceptance.num_accepted > 0
    assert request.acceptance.num_drafted == sum(drafted)
    assert results(request) == world.want(2, [0], text)


def test_08_a_shortage_on_the_draft_lane_never_blocks_the_target() -> None:
    """Two blocks of draft cache: rolls happen or not, the tokens are the same and nobody waits."""
    world = World(4)
    world.stops, world.min_tokens, world.max_tokens = (), 0, 10
    text = [1, 2, 3, 4, 5]
    for blocks in (1, 2, 4, 16):
        engine = FakeEngine(world.models, limits(32, draft_blocks=blocks))
        requests = [
            Case(name, SpeculativeParams(seed=4), text, None, Stopping(max_tokens=10)).add(engine.scheduler)
            for name in "ab"
        ]
        steps = 0
        while not engine.scheduler.idle:
            execute(engine)
            steps += 1
        assert steps <= 11
        assert [results(request) for request in requests] == [world.want(4, [0], text)] * 2


def test_08_the_accepted_part_of_a_rolled_tail_becomes_valid() -> None:
    lane = Lane(6, 6)
    pool = BlockPool("draft", 20, BLOCK, 16)
    draft = BlockTable(pool)
    assert reserve([(draft, 9)], CopyPlan(pool))
    draft.length = 6
    draft.truncate(6, (10, 11, 12))
    lane.root.tables["draft"] = draft
    evaluated = drafted(lane, Draft.chain((10, 11, 99)))
    [child] = lane.next([lane.root], Verdict((Child(lane.root, (7,), (1, 2)),)), evaluated)
    assert child.tables["draft"].length == 8 and child.tables["draft"].tail == ()


# ------------------------------------------------------------------------------------------------------------------ 9
@pytest.mark.parametrize("caching", [False, True])
def test_09_recompute_follows_the_history(caching: bool) -> None:
    """64 beams over 1,024 tokens: after preemption every edge of the trie is evaluated once, and the gang holds no more
    blocks than before, plus one for each root that the prefix cache had."""
    models: dict[str, Any] = {"target": LanguageModel(5, 4)}
    own = limits(
        400,
        block_size=16,
        max_num_batched_tokens=512,
        max_blocks_per_table=80,
        enable_prefix_caching=caching,
    )
    engine = FakeEngine(models, own)
    prompt = [(i * i + i // 7) % VOCABULARY for i in range(1024)]
    request = Case("beam", BeamParams(64, max_tokens=30), prompt, None, limit=1054).add(engine.scheduler)
    for _ in range(9):
        execute(engine)
    assert len(request.branches) == 64
    blocks = {block for branch in request.branches for block in branch.table.blocks()}
    edges = {node for branch in request.branches for node in ancestors(request.history, branch.tip)}
    engine.scheduler.preempt("beam")
    assert engine.scheduler.pools["target"].num_available == 400
    tips = [branch.tip for branch in request.branches]
    evaluated = written = 0
    while [branch.tip for branch in request.branches] == tips:
        plan = engine.scheduler.plan()
        if any(work.query for work in plan.works):
            after = {block for branch in request.branches for block in branch.table.blocks()}
            copies = plan.copies["target"].num_blocks
            found = sum(work.num_tokens == 0 for work in plan.works)
        evaluated += sum(work.num_tokens for work in plan.works)
        written += int((plan.forwards["target"].slots >= 0).sum())
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
    assert evaluated == written
    if caching:
        assert evaluated == len(edges) - len(prompt) - found, "the prompt came from the prefix cache"
    else:
        assert evaluated == len(edges) and found == 0
    assert len(after) <= len(blocks) + copies + found


def ancestors(history: History, tip: int) -> list[int]:
    out = []
    while tip:
        out.append(tip)
        tip = history.parent[tip]
    return out


# ----------------------------------------------------------------------------------------------------------------- 11
def test_11_the_check_finds_what_is_wrong() -> None:
    def broken(change: Any) -> None:
        lane = Lane(10, 10)
        lane.check([lane.root])
        change(lane.pool, lane.root.table)
        with pytest.raises(InvariantError):
            lane.check([lane.root])

    broken(lambda pool, table: pool.share(table.blocks()[0]))
    broken(lambda pool, table: pool.take())
    broken(lambda pool, table: pool.free.pop())
    broken(lambda pool, table: pool.pins.__setitem__(pool.free[0], 1))
    broken(lambda pool, table: table.fork())
    broken(lambda pool, table: setattr(table, "length", 4))
    broken(lambda pool, table: pool.row_view.__setitem__(table.row * pool.width, 19))
    broken(lambda pool, table: pool.block_of.__setitem__(b"key", 3))
    broken(lambda pool, table: pool.take_row())
    with pytest.raises(InvariantError):
        pool = BlockPool("target", 2, BLOCK, 2)
        pool.drop(0)


def test_11_a_plan_is_settled_once_and_alone() -> None:
    engine = engine_of()
    Case("r", GREEDY, [1, 2, 3], None, Stopping(max_tokens=3)).add(engine.scheduler)
    request = session(engine, [1, 2])
    plan = engine.scheduler.plan()
    for call in (
        engine.scheduler.plan, lambda: engine.scheduler.preempt("r"),
        lambda: engine.scheduler.edit("session", Verdict((Child(request.branches[0], (1,)),))),
    ):  # fmt: skip
        with pytest.raises(InvariantError):
            call()
    answers = engine.runner.execute(plan)
    engine.scheduler.settle(plan, answers)
    with pytest.raises(InvariantError):
        engine.scheduler.settle(plan, answers)


def test_11_abort_while_a_plan_is_out() -> None:
    """Answers for it are ignored; nothing leaks."""
    for array_settle in (True, False):
        engine = engine_of(array_settle=array_settle)
        for name in "ab":
            Case(name, SamplingParams(n=2, seed=1), [1, 2, 3, 4, 5], None, Stopping(max_tokens=6)).add(engine.scheduler)
        for _ in range(3):
            execute(engine)
        plan = engine.scheduler.plan()
        engine.scheduler.abort("a")
        answers = engine.runner.execute(plan)
        events = engine.scheduler.settle(plan, answers)
        assert {event.request.id for event in events} == {"b"}
        engine.run()
        engine.check_whole()


def test_11_a_lost_device_costs_a_recompute() -> None:
    """With the cache gone, even in the middle of a step, every request goes on from its history."""
    world = World(5)
    engine = FakeEngine(world.models, limits(60))
    cases = [case for case in world.cases if not case.is_session]
    requests = [case.add(engine.scheduler) for case in cases]
    for step in range(5000):
        if engine.scheduler.idle:
            break
        if step % 7 == 5:
            engine.scheduler.plan()
            engine.scheduler.forget_kv()
            engine.runner.kv = {lane: [None] * len(kv) for lane, kv in engine.runner.kv.items()}
            engine._published.clear()
        engine.step()
    assert [results(request) for request in requests] == [case.want for case in cases]
    engine.check_whole()


def test_11_hypotheses_hold_no_block() -> None:
    """A finished answer is a tip, and numbers and texts."""
    ending = {"reason", "stop_token", "stop_string", "excess_bytes", "is_stranded"}
    numbers = {"tip", "tokens", "rank", "score", "ancestry", "prompt_length"}
    assert set(Hypothesis.__slots__) == numbers | ending
