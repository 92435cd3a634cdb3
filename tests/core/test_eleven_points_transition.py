"""What the transition and the scheduler must get right: points 1 to 5 and 10 of the eleven, each test named after its
point."""

from __future__ import annotations

import pytest

from pagedec.core.draft import Draft
from pagedec.core.protocol import Child, Verdict
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, reserve
from pagedec.errors import InvalidArgument
from pagedec.params import SamplingParams
from tests.algorithms.interactive import InteractiveParams
from tests.core.lane import TREE, Lane, drafted, engine_of, execute, generate, session
from tests.core.world import BLOCK, Case

GREEDY = SamplingParams(temperature=0.0)


# ------------------------------------------------------------------------------------------------------------------ 1
def test_01_fork_all_then_release_then_write() -> None:
    """Three children of a dying parent inside a block: two copies, and the last one writes in place."""
    lane = Lane(6, 6)
    before = lane.root.table.blocks()
    children = lane.next([lane.root], Verdict(tuple(Child(lane.root, (token,)) for token in (1, 2, 3))))
    assert lane.pool.num_available == 20 - 2, "the transition itself allocates nothing"
    assert [child.table.blocks() for child in children] == [before] * 3
    assert reserve([(child.table, 1) for child in children], lane.copies)
    assert lane.copies.num_blocks == 2 and children[-1].table.blocks() == before
    assert len({child.table.blocks()[-1] for child in children}) == 3
    lane.check(children)


def test_01_the_first_plain_child_is_its_parent() -> None:
    lane = Lane(6, 6)
    first, second, third = lane.next([lane.root], Verdict((Child(lane.root, (7,)), Child(lane.root), Child(lane.root))))
    assert second is lane.root and first is not lane.root and third is not lane.root
    assert third.tip == lane.root.tip and lane.history.token[first.tip] == 7
    lane.check([first, second, third])


def test_01_children_stand_at_their_parents_place() -> None:
    lane = Lane(6, 6)
    a, b, c = lane.next([lane.root], Verdict(tuple(Child(lane.root, (token,)) for token in (1, 2, 3))))
    verdict = Verdict((Child(c, (1,)), Child(a, (5,)), Child(a, (4,))), drop=(b,))
    generation = lane.next([a, b, c], verdict)
    assert [lane.history.tokens(branch.tip)[6:] for branch in generation] == [[1, 5], [1, 4], [3, 1]]
    lane.check(generation)
    assert a.table is generation[1].table, "the last child takes over its parent's table"


def test_01_the_untouched_live_on() -> None:
    lane = Lane(6, 6)
    a, b = lane.next([lane.root], Verdict((Child(lane.root, (1,)), Child(lane.root, (2,)))))
    assert lane.next([a, b], Verdict((Child(b, (3,)),)))[0] is a
    assert lane.next([a, b], Verdict(), {a: Draft()}) == [b], "queried and not mentioned: it dies"


# ------------------------------------------------------------------------------------------------------------------ 2
def test_02_a_findable_block_is_never_overwritten() -> None:
    """Writable means one reference and not published."""
    lane = Lane(8, 8)
    table = lane.root.table
    table.pool.publish(table.blocks()[1], lane.history.block_key(lane.root.tip, 8))
    published = table.blocks()[1]
    table.truncate(6)
    assert reserve([(table, 1)], lane.copies)
    assert table.blocks()[1] != published and lane.copies.num_blocks == 1
    assert lane.pool.lookup(lane.history.block_key(lane.root.tip, 8)) == published
    lane.check([lane.root])


def test_02_two_references_from_different_trees_are_shared() -> None:
    """A block found in the prefix cache is held by two trees: neither writes it."""
    lane = Lane(8, 8)
    other = BlockTable(lane.pool)
    for block in lane.root.table.blocks():
        other.extend(block)
    for table in (lane.root.table, other):
        table.truncate(7)
    assert reserve([(lane.root.table, 1), (other, 1)], lane.copies)
    assert lane.copies.num_blocks == 1, "the second of two writers is alone"
    assert lane.root.table.blocks()[1] != other.blocks()[1]
    lane.pool.check([lane.root.table, other])


# ------------------------------------------------------------------------------------------------------------------ 3
def test_03_a_path_moves_in_increasing_order() -> None:
    lane = Lane(6, 6)
    table = lane.root.table
    evaluated = drafted(lane, TREE)
    slot = [table.slot(index) for index in range(11)]
    [child] = lane.next([lane.root], Verdict((Child(lane.root, (15,), (2, 4, 5)),)), evaluated)
    base = 5
    assert lane.moves() == [(slot[base + node], slot[base + i]) for i, node in enumerate((2, 4, 5), start=1)]
    assert child.table.length == 9 and lane.history.tokens(child.tip)[6:] == [11, 13, 14, 15]
    lane.check([child])


def test_03_a_chain_moves_nothing() -> None:
    lane = Lane(6, 6)
    evaluated = drafted(lane, Draft.chain((10, 11, 12)))
    [child] = lane.next([lane.root], Verdict((Child(lane.root, (15,), (1, 2)),)), evaluated)
    assert lane.moves() == [] and child.table.length == 8
    assert child.table.num_blocks == 2, "rollback is a truncate"
    lane.check([child])


def test_03_two_children_accept_different_paths() -> None:
    """Each of them has its own copy of the blocks into which it moves."""
    lane = Lane(6, 6)
    evaluated = drafted(lane, TREE)
    nodes = [lane.root.table.slot(5 + node) for node in range(6)]
    a, b = lane.next(
        [lane.root], Verdict((Child(lane.root, (7,), (1, 3)), Child(lane.root, (7,), (2, 4, 5)))), evaluated
    )
    device = {slot: f"node {node}" for node, slot in enumerate(nodes)}
    for source, target in lane.moves():
        device[target] = device.get(source, "")
    assert [device[a.table.slot(5 + i)] for i in (1, 2)] == ["node 1", "node 3"]
    assert [device[b.table.slot(5 + i)] for i in (1, 2, 3)] == ["node 2", "node 4", "node 5"]
    assert (a.table.length, b.table.length) == (8, 9)
    lane.check([a, b])


# ------------------------------------------------------------------------------------------------------------------ 4
def test_04_settling_never_fails() -> None:
    """Without a block for compaction the tokens are kept and KV is truncated to the chain."""
    lane = Lane(6, 6, num_blocks=4)
    evaluated = drafted(lane, TREE)
    while lane.pool.take() is not None:
        pass
    verdict = Verdict((Child(lane.root, (7,), (2, 4, 5)), Child(lane.root, (8,), (1, 3))))
    a, b = lane.next([lane.root], verdict, evaluated)
    assert lane.history.tokens(a.tip)[6:] == [11, 13, 14, 7] and lane.history.tokens(b.tip)[6:] == [10, 12, 8]
    assert a.table.length == 6, "its first move needs a block of its own"
    assert b.table.length == 7, "node 1 lies where it belongs; its second move needs a block too"


# ------------------------------------------------------------------------------------------------------------------ 5
def test_05_pins_prevent_reuse_but_not_writing_in_place() -> None:
    """k children cost k - 1 copies, and a copy's source is not handed out before the copy has run."""
    lane = Lane(6, 6)
    children = lane.next([lane.root], Verdict(tuple(Child(lane.root, (token,)) for token in range(5))))
    source = children[0].table.blocks()[1]
    assert reserve([(child.table, 1) for child in children], lane.copies)
    assert lane.copies.num_blocks == 4 and children[4].table.blocks()[1] == source
    for child in children:
        child.release()
    taken = [lane.pool.take() for _ in range(lane.pool.num_available)]
    assert source not in taken and len(taken) == 20 - 5, "both ends of every copy are pinned"
    for block in taken:
        assert block is not None
        lane.pool.drop(block)
    lane.copies.finish()
    assert lane.pool.num_available == 20
    lane.check([])


def test_05_copies_keep_their_order() -> None:
    """A later copy may read what an earlier one wrote."""
    lane = Lane(6, 6)
    lane.copies.copy_block(3, 4, 2)
    lane.copies.move_slot(4 * BLOCK + 1, 5 * BLOCK)
    assert lane.moves() == [(12, 16), (13, 17), (17, 20)]


def test_05_cancelled_copies_leave_nothing_to_find() -> None:
    """A block that was published for what a copy was still to bring must not be found when the copy never runs."""
    lane = Lane(6, 6)
    evaluated = drafted(lane, TREE)
    [child] = lane.next([lane.root], Verdict((Child(lane.root, (15,), (2, 4)),)), evaluated)
    key = lane.history.block_key(child.tip, 8)
    lane.pool.publish(child.table.blocks()[1], key)
    child.release()
    lane.copies.cancel()
    assert lane.pool.lookup(key) is None and lane.pool.num_available == 20
    lane.check([])


# ----------------------------------------------------------------------------------------------------------------- 10
def test_10_a_path_belongs_to_this_steps_query() -> None:
    lane = Lane(6, 6)
    evaluated = drafted(lane, TREE)
    branch = lane.root
    wrong = [
        ((Child(branch, path=(3,)),), evaluated), ((Child(branch, path=(1, 2)),), evaluated),
        ((Child(branch, path=(9,)),), evaluated), ((Child(branch, path=(0,)),), evaluated),
        ((Child(branch, path=(1,)),), {}), ((Child(branch, path=(1,), keep=3),), evaluated),
        ((Child(branch, keep=0),), evaluated), ((Child(branch, keep=7),), evaluated),
    ]  # fmt: skip
    for live, behind in wrong:
        with pytest.raises(InvalidArgument):
            lane.next([branch], Verdict(live), behind)
    assert branch.table.length == 6 and branch.table.num_blocks == 3, "nothing has changed"


def test_10_rollback_into_the_prompt_shortens_it() -> None:
    engine = engine_of()
    request = session(engine, [1, 2, 3, 4, 5])
    engine.scheduler.edit("session", Verdict((Child(request.branches[0]), Child(request.branches[0], keep=2))))
    assert [branch.prompt_length for branch in request.branches] == [5, 2]
    assert [branch.table.length for branch in request.branches] == [0, 0]


def test_10_rollback_takes_the_stopping_state_back() -> None:
    """A branch that was rolled back has as many tokens left as if it had never gone further."""
    engine = engine_of()
    request = Case("s", InteractiveParams(seed=1), [1, 2, 3], None, Stopping(max_tokens=20), limit=23).add(
        engine.scheduler
    )
    engine.scheduler.edit("s", Verdict((Child(request.branches[0], state=generate(4)),)))
    for _ in range(4):
        execute(engine)
    assert request.branches[0].stop_state == 4
    engine.scheduler.edit("s", Verdict((Child(request.branches[0], keep=5),)))
    assert request.branches[0].stop_state == 2
    engine.scheduler.edit("s", Verdict((Child(request.branches[0], keep=2),)))
    assert request.branches[0].stop_state == 0
