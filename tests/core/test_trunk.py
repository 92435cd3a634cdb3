"""What branches of one request have in common: marks of a history against plain walks, and who finds it for all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedec.core import reuse
from pagedec.core.forward import LaneAnswers
from pagedec.core.limits import SchedulerLimits
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams
from tests.core.test_history import CHOICES, grown


@given(CHOICES, st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=30))
def test_marks_are_what_walks_find(choices: list[tuple[int, int, int]], calls: list[tuple[int, bool]]) -> None:
    history, _ = grown(choices)
    marks, owners = history.marks(), dict[int, int]()
    for who, (which, is_marked) in enumerate(calls):
        node, way = which % (len(history) + 1), []
        met = node
        while met and met not in owners:
            way.append(met)
            met = history.parent[met]
        assert marks.find(node) == (met, owners.get(met))
        if is_marked:
            assert marks.mark(node, who) == (met, owners.get(met))
            owners |= dict.fromkeys(way, who)


class Sampled:
    """A request of several answers behind a long prompt, all of which are being written."""

    def __init__(self, length: int, num_answers: int) -> None:
        sizes = {"max_blocks_per_table": 400, "max_num_batched_tokens": 512}
        self.scheduler = Scheduler(SchedulerLimits({"target": 1000}, vocab_size=100, **sizes))
        make = partial(make_decoder, SamplingParams(n=num_answers, seed=1, max_tokens=60))
        prompt, self.num_steps = [i % 97 for i in range(length)], 0
        self.request = self.scheduler.admit("many", make, prompt, Stopping(max_tokens=60))
        self.scheduler.add(self.request)
        while len(self.request.branches) < num_answers:
            self.step()
        for _ in range(50):
            self.step()

    def step(self) -> int:
        """How many rows one had."""
        plan = self.scheduler.plan()
        self.num_steps += 1
        draws = np.arange(len(plan.forwards["target"].draws), dtype=np.int32) * self.num_steps % 90
        self.scheduler.settle(plan, {"target": LaneAnswers(draws=draws)})
        self.scheduler.check()
        return plan.num_rows

    def num_nodes(self) -> int:
        """Nodes of all tables, each once."""
        nodes = set()
        for branch in self.request.branches:
            node = branch.table.leaf
            while node is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        return len(nodes)


@pytest.mark.parametrize("length", [505, 511, 512, 2000])
def test_one_of_them_looks_in_the_prefix_cache_for_all(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption: each had found all blocks of the prompt by itself, one node each, and planning the step took
    seconds where there were many."""
    lookups, extend = list[int](), reuse._extend_from_cache

    def noting(branch: reuse.Branch, request: reuse.Request) -> None:
        before = branch.table.num_blocks
        extend(branch, request)
        lookups.append(branch.table.num_blocks - before)

    many = Sampled(length, 12)
    num_nodes = many.num_nodes()
    monkeypatch.setattr(reuse, "_extend_from_cache", noting)
    many.scheduler.preempt("many")
    rows = [many.step() for _ in range(3)]
    assert rows[-1] == 12 and sum(rows[:2]) <= 12 * 18, "all whole blocks were found, each branch's own, too"
    prompt = length // 16
    assert max(lookups) >= prompt and sum(found >= prompt for found in lookups) == 1
    assert many.num_nodes() <= num_nodes + 12
