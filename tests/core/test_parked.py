"""Parked branches: who gives way first, what a call takes along and leaves, and a history without its dead."""

from __future__ import annotations

import random

import pytest

from pagedec.core.block import BlockPool
from pagedec.core.history import History
from pagedec.core.parked import Call, Parked, Parking
from pagedec.core.protocol import Hypothesis
from pagedec.core.request import Branch
from pagedec.core.table import BlockTable, CopyPlan, reserve
from pagedec.decoders.scoring import followed
from pagedec.errors import InvariantError

SIZE = 4


def make_pool(num_blocks: int = 16) -> BlockPool:
    return BlockPool("target", num_blocks, SIZE, 16)


def parked(parking: Parking, pool: BlockPool, num_tokens: int, priority: int = 0) -> Parked:
    """A branch that is evaluated but for its last token."""
    history, table = History(SIZE), BlockTable(pool)
    tip = history.append(0, list(range(num_tokens)))
    assert reserve([(table, num_tokens - 1)], CopyPlan(pool))
    table.length = num_tokens - 1
    made = Parked((history, tip), {"target": table}, priority)
    parking.add(made)
    return made


def test_who_gives_way_first() -> None:
    pool = make_pool()
    parking = Parking({"target": pool})
    a, b, c, d = (parked(parking, pool, 9, priority) for priority in (0, 1, 0, 1))
    parking.touch(b)  # used last
    order = []
    while parking.give_way("target"):
        order += [own for own in (a, b, c, d) if own not in order and not own.tables["target"].num_blocks]
        pool.check(parking.tables("target"))
    assert order == [d, b, a, c] and not parking.holds_blocks("target")
    assert pool.num_available == pool.num_blocks and len(parking) == 4
    assert [own.length for own in order] == [9] * 4


def test_the_pool_counts_what_is_parked() -> None:
    pool = make_pool()
    parking = Parking({"target": pool})
    own = parked(parking, pool, 9)
    with pytest.raises(InvariantError):
        pool.check([])
    pool.check(parking.tables("target"))
    parking.remove(own)
    pool.check([])


def test_a_branch_takes_over_an_answer() -> None:
    pool = make_pool()
    parking = Parking({"target": pool})
    own, held = parked(parking, pool, 5), parked(parking, pool, 11)
    blocks = held.tables["target"].blocks()
    parking.take_over(own, held, 5)
    assert own.length == 11 and own.tables["target"].blocks() == blocks and len(parking) == 1
    pool.check(parking.tables("target"))
    assert parking.give_way("target") and pool.num_available == pool.num_blocks


def test_a_lane_that_an_answer_has_nothing_on_is_kept_as_far_as_they_agree() -> None:
    """A draft model has read the branch, and not the answer."""
    target, draft = make_pool(), BlockPool("draft", 16, SIZE, 16)
    parking = Parking({"target": target, "draft": draft})
    own, held = parked(parking, target, 9), parked(parking, target, 9)
    own.tables["draft"] = table = BlockTable(draft)
    assert reserve([(table, 8)], CopyPlan(draft))
    table.length = 8
    parking.take_over(own, held, 6)
    assert own.tables["draft"].length == 6 and own.tables["target"].length == 8
    for lane, pool in (("target", target), ("draft", draft)):
        pool.check(parking.tables(lane))


class Asked:
    """What a call looks at of a request."""

    def __init__(self, history: History, branches: list[Branch]) -> None:
        self.history, self.branches, self.scored_from = history, branches, None


def test_a_call_takes_along_what_there_is_and_leaves_its_answers() -> None:
    pool = make_pool()
    parking = Parking({"target": pool})
    own = parked(parking, pool, 7)
    history, tip = own.place
    call = Call(own, parking)
    branch = Branch(tip, {"target": BlockTable(pool)}, None, 0, 7)
    request = Asked(history, [branch])
    call.enter(request)  # type: ignore[arg-type]
    assert branch.table.length == 6 and branch.table.blocks() == own.tables["target"].blocks()
    copies = CopyPlan(pool)
    assert reserve([(branch.table, 4)], copies) and copies.num_blocks == 1  # the one that both hold
    branch.table.length, branch.tip = 10, history.append(tip, [50, 51, 52])
    answers = [Hypothesis(branch.tip, (53,)), Hypothesis(tip, (60, 61), rank=1)]
    call.hold(request, answers)  # type: ignore[arg-type]
    branch.release()
    copies.finish()
    assert own.tables["target"].length == 7  # it has what the request has evaluated of it
    first, second = (held for _, held in call.answers)
    assert first.tokens() == [*range(7), 50, 51, 52, 53] and first.tables["target"].length == 10
    assert second.tokens() == [*range(7), 60, 61] and second.tables["target"].length == 7
    pool.check(parking.tables("target"))
    assert call.end([answers[1]]) == [second] and len(parking) == 2
    pool.check(parking.tables("target"))


def test_a_history_without_its_dead() -> None:
    rng = random.Random(0)
    for _ in range(50):
        history, tips = History(SIZE, "salt"), [0]
        for _ in range(30):
            tip = history.append(rng.choice(tips), [rng.randrange(3) for _ in range(rng.randrange(1, 12))])
            tips.append(tip)
            history.notes[tip] = history.tokens(tip)
        alive = rng.sample(tips[1:], 3)
        keys = {tip: [history.block_key(tip, end) for end in range(0, history.depth[tip], SIZE)] for tip in alive}
        new, number = history.pruned(alive)
        nodes = {tuple(history.tokens(tip)[:length]) for tip in alive for length in range(1, history.depth[tip] + 1)}
        assert len(new) == len(nodes) == history.alive(alive)[0] <= len(history)
        for tip in alive:
            moved = number(tip)
            assert new.tokens(moved) == history.tokens(tip) == new.notes[moved]
            assert keys[tip] == [new.block_key(moved, end) for end in range(0, new.depth[moved], SIZE)]
            assert new.append(0, history.tokens(tip)) == moved
        again, _ = new.pruned([number(tip) for tip in alive])
        assert len(again) == len(new)


def test_what_has_grown_side_by_side_is_one_run_each_when_it_is_written_anew() -> None:
    history = History(SIZE)
    tips = [history.append(0, [1, 2, 3])] * 5
    for i in range(400):
        tips = [history.append_one(tip, i + j) for j, tip in enumerate(tips)]
    tips.append(history.append(tips[0], range(30)))
    assert history.alive(tips) == (3 + 5 * 400 + 30, 5 * 400 + 1)
    new, number = history.pruned(tips)
    moved = [number(tip) for tip in tips]
    assert new.alive(moved) == (len(new), 6) and len(new) == 3 + 5 * 400 + 30
    assert [new.tokens(tip) for tip in moved] == [history.tokens(tip) for tip in tips]
    assert new.common_length(moved[1], moved[2]) == 3 and new.common_length(moved[0], moved[5]) == 403


def test_where_continuations_are_asked_for() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows = [tuple(rng.randrange(3) for _ in range(rng.randrange(0, 6))) for _ in range(rng.randrange(1, 8))]
        asked = followed(rows)
        inline = {node[:i]: {node[i]} for node in asked for i in range(1, len(node))}
        for node in asked:
            for i in range(1, len(node)):
                inline[node[:i]].add(node[i])
        for row in rows:  # each token is asked for, or reported on the way of some branch
            for i, token in enumerate(row):
                assert token in asked.get(row[:i], ()) or (i and token in inline.get(row[:i], ()))
        parting = {row[:i] for row in rows for i in range(len(row))}
        for node in parting:  # where several follow, one branch asks for all
            following = {row[len(node)] for row in rows if len(row) > len(node) and row[: len(node)] == node}
            assert len(following) == 1 or set(asked[node]) == following
