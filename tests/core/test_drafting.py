"""Drafts come from what all chains leave: no row, no block, and no place on the draft lane that a living chain
needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec.core.draft import Draft, Roll
from pagedec.core.forward import LaneForward
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.core.stopping import Stopping
from pagedec.decoders import Sampling, decoder
from pagedec.params import SamplingParams
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import VOCABULARY, FakeEngine, FakeRunner
from tests.core.world import Case, World, limits, results

LONG = Stopping(max_tokens=20)


@dataclass(frozen=True, slots=True)
class GreedyDraftParams(SamplingParams):
    """A chain of as many tokens as there is room for, or always of `size`."""

    size: int = 0


@decoder("test-greedy-draft", params=GreedyDraftParams)
class GreedyDraft(Sampling):
    def __init__(self, params: GreedyDraftParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.size, self.rooms = params.size, list[int]()

    def draft(self, branch: Branch, room: int) -> Draft:
        self.rooms.append(room)
        return Draft.chain([1 + i % 7 for i in range(self.size or min(room, 12))])


def engine_of(num_blocks: int, **changes: Any) -> FakeEngine:
    return FakeEngine(World(3).models, limits(num_blocks, block_size=16, max_blocks_per_table=40, **changes))


def prompt(i: int, length: int = 10) -> list[int]:
    return [(3 * i + j * j) % VOCABULARY for j in range(length)]


def test_no_chain_misses_a_row_because_of_a_draft() -> None:
    """4 lookaheads whose windows and guesses fill 64 rows, and 24 plain requests behind them: all 28 advance in every
    step."""
    wide = LookaheadParams(temperature=0, columns=6, levels=4, guesses=3)
    engine = engine_of(2000, max_num_batched_tokens=64)
    drafting = [Case(f"draft {i}", wide, prompt(i), None, LONG).add(engine.scheduler) for i in range(4)]
    plain = [
        Case(f"plain {i}", SamplingParams(seed=i), prompt(i), None, LONG).add(engine.scheduler, i % 3)
        for i in range(24)
    ]
    while any(request.first_step < 0 for request in plain):
        engine.step()
    drafted = 0
    while not any(request.closed for request in (*drafting, *plain)):
        before = [request.history.depth[request.branches[0].tip] for request in (*drafting, *plain)]
        plan = engine.scheduler.plan()
        assert {work.request for work in plan.works} == {*drafting, *plain}
        drafted += sum(work.draft.num_nodes for work in plan.works)
        assert plan.num_rows <= 64
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
        for request, length in zip((*drafting, *plain), before, strict=True):
            assert not request.branches or request.history.depth[request.branches[0].tip] > length
    assert drafted > 0, "what was left was used"


def test_no_chain_gives_way_to_a_draft() -> None:
    """With blocks for the chains of all and no more, drafts find none, and nobody is preempted for them."""
    engine = engine_of(6, max_num_batched_tokens=200)
    first = Case("draft", GreedyDraftParams(size=40), prompt(1), None, LONG).add(engine.scheduler)
    others = [
        Case(f"plain {i}", SamplingParams(seed=i), prompt(i), None, Stopping(max_tokens=6)).add(engine.scheduler)
        for i in range(2)
    ]
    engine.run()
    assert not any(request.num_preemptions for request in (first, *others))


def test_room_is_what_chains_leave() -> None:
    """A decoder is told of the rows that no running chain needs, and what it drafts within them is run."""
    engine = engine_of(200, max_num_batched_tokens=32)
    requests = [
        Case(f"draft {i}", GreedyDraftParams(), prompt(i, 6), None, LONG).add(engine.scheduler) for i in range(3)
    ]
    for i in range(5):
        Case(f"plain {i}", SamplingParams(seed=i), prompt(i, 6), None, LONG).add(engine.scheduler)
    for _ in range(3):
        engine.step()
    plan = engine.scheduler.plan()
    nodes = {work.request: work.draft.num_nodes for work in plan.works}
    drafted = [nodes[request] for request in requests]
    rooms = [request.decoder.rooms[-1] for request in requests]  # type: ignore[attr-defined]
    assert rooms == [24, 12, 0] and drafted == [12, 12, 0], (
        "8 chains of 32 rows; each is told what those before it leave"
    )
    engine.scheduler.settle(plan, engine.runner.execute(plan))


def test_who_is_asked_first_of_all_is_told_what_his_own_chain_leaves() -> None:
    engine = engine_of(200, max_num_batched_tokens=16)
    request = Case("draft", GreedyDraftParams(), prompt(1, 5), None, LONG).add(engine.scheduler)
    plan = engine.scheduler.plan()
    assert request.decoder.rooms == [11]  # type: ignore[attr-defined]
    assert [work.draft.num_nodes for work in plan.works] == [11]
    engine.scheduler.settle(plan, engine.runner.execute(plan))


def test_room_is_what_a_prompt_in_chunks_leaves_too() -> None:
    engine = engine_of(200, max_num_batched_tokens=16, max_chunk=10)
    first = Case("first", GreedyDraftParams(), prompt(1, 6), None, LONG).add(engine.scheduler)
    engine.step()
    Case("long", GreedyDraftParams(), prompt(2, 40), None, LONG).add(engine.scheduler)
    for _ in range(3):
        plan = engine.scheduler.plan()
        engine.scheduler.settle(plan, engine.runner.execute(plan))
    assert first.decoder.rooms[-2:] == [5, 5]  # type: ignore[attr-defined]
    assert sorted((work.num_tokens, work.draft.num_nodes) for work in plan.works) == [(1, 5), (10, 0)]


def test_a_gang_drafts_as_a_whole_or_not_at_all() -> None:
    """Beams whose drafts find no room go on without them, all in one step."""
    from tests.algorithms.beam import Beam, BeamParams

    class DraftingBeam(Beam):
        def propose(self, branches: Sequence[Branch], room: int) -> Any:
            queries = super().propose(branches, room)
            return [type(query)(query.branch, query.asks, Draft.chain((1, 2, 3))) for query in queries]

        def advance(self, queries: Any, answers: Any) -> Any:
            cut = [type(answer)(Draft(), (tuple(part[:1] for part in answer.values[0]),)) for answer in answers]
            return super().advance(queries, cut)

    want = None
    for rows in (8, 11, 12, 64):
        engine = engine_of(60, max_num_batched_tokens=rows)

        def make(context: DecoderContext) -> Beam:
            return DraftingBeam(BeamParams(3, max_tokens=8), context)

        request = engine.scheduler.admit("beams", make, prompt(2, 5), Stopping(max_tokens=8))
        engine.scheduler.add(request)
        drafts = []
        while not request.closed:
            plan = engine.scheduler.plan()
            drafts.append([work.draft.num_nodes for work in plan.works])
            engine.scheduler.settle(plan, engine.runner.execute(plan))
            engine.check()
        assert all(len(set(nodes)) == 1 for nodes in drafts)
        assert any(nodes == [3, 3, 3] for nodes in drafts) == (rows >= 12)
        want = want or results(request)
        assert results(request) == want


# ------------------------------------------------------------------------------------------------------- the draft lane
class Checked(FakeRunner):
    """A draft model with a context and a vocabulary of its own: reading past either is what a device may not
    survive."""

    def __init__(self, engine: FakeEngine, longest: int, vocab_size: int) -> None:
        self.__dict__ |= engine.runner.__dict__
        self.longest, self.vocab = longest, vocab_size
        self.num_rolled = 0

    def _read_out(self, lane: str, forward: LaneForward) -> Any:
        if lane == "draft":
            assert not len(forward.positions) or forward.positions.max() < self.longest, "past the rope table"
            assert not len(forward.token_ids) or forward.token_ids.max() < self.vocab, "past the embedding"
            for roll in forward.rolls:
                assert forward.positions[roll["draw"]["row"]] + roll["count"] - 1 < self.longest, (
                    "a roll past the rope table"
                )
                self.num_rolled += int(roll["count"])
        return super()._read_out(lane, forward)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("longest", [1, 12, 13, 16, 17, 31, 64])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_draft_model_with_a_short_context(longest: int, count: int) -> None:
    """It drafts while it can read the text; the target goes on without it, to the same tokens."""
    engine = engine_of(60, max_positions={"draft": longest}, max_chunk=5)
    engine.runner = runner = Checked(engine, longest, VOCABULARY)
    cases = [
        Case(f"{i}", SpeculativeParams(seed=i, count=count), prompt(i, 9 + 4 * i), None, Stopping(max_tokens=30))
        for i in range(3)
    ]
    requests = [case.add(engine.scheduler) for case in cases]
    engine.run()
    roomy = engine_of(60)
    want = [case.add(roomy.scheduler) for case in cases]
    roomy.run()
    assert [results(request) for request in requests] == [results(request) for request in want]
    assert (runner.num_rolled > 0) == (longest >= 9 + count - 1), "the shortest prompt has 9 tokens"
    engine.check_whole()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_text_beyond_a_draft_model_s_context_holds_no_blocks_of_it(lag: int) -> None:
    """Nothing of a prompt that is too long is read, and what has outgrown the context leaves its blocks to others: with
    two of them, others are drafted while it goes on."""
    limits = {"max_positions": {"draft": 7}, "lags": {"draft": lag}, "draft_blocks": 2}
    engine = engine_of(60, **limits)
    long = [
        Case(f"{i}", SpeculativeParams(seed=i), prompt(i, 4 + 9 * i), None, Stopping(max_tokens=26)) for i in (0, 1)
    ]
    requests = [case.add(engine.scheduler) for case in long]
    for _ in range(12):
        engine.step()
    for request in requests:
        assert all(not branch.tables["draft"].num_blocks for branch in request.branches) and request.branches
    Case("late", SpeculativeParams(seed=9, count=2), prompt(9, 3), None, Stopping(max_tokens=8)).add(engine.scheduler)
    rolled = 0
    while engine.scheduler.requests:
        plan = engine.scheduler.plan()
        rolled += sum(work.roll >= 0 and work.request.id == "late" for work in plan.works)
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
    assert rolled > 0
    engine.check_whole()


def test_a_draft_model_with_a_smaller_vocabulary() -> None:
    """A text with a token that it does not know is not drafted behind that token."""
    known = VOCABULARY - 2
    engine = engine_of(60, vocab_sizes={"draft": known})
    engine.runner = runner = Checked(engine, 1 << 20, known)
    runner.models = {**runner.models, "draft": lambda tokens: [*World(3).models["draft"](tokens)[:known], -1e9, -1e9]}
    cases = [
        Case(f"{i}", SpeculativeParams(seed=i), [token % known for token in prompt(i)], None, Stopping(max_tokens=30))
        for i in range(4)
    ]
    unknown = Case("unknown", SpeculativeParams(seed=1), [1, VOCABULARY - 1, 2, 3], None, Stopping(max_tokens=10))
    requests = [case.add(engine.scheduler) for case in (*cases, unknown)]
    engine.run()
    roomy = engine_of(60)
    want = [case.add(roomy.scheduler) for case in (*cases, unknown)]
    roomy.run()
    assert [results(request) for request in requests] == [results(request) for request in want]
    assert runner.num_rolled > 0 and requests[-1].acceptance.num_drafted == 0


def test_a_roll_of_nothing_is_no_draft() -> None:
    class Resting(Sampling):
        lanes: tuple[str, ...] = ("target", "draft")

        def draft(self, branch: Branch, room: int) -> Roll:
            return Roll(0)

    engine = engine_of(60)
    request = engine.scheduler.admit(
        "r", lambda context: Resting(SamplingParams(seed=1), context), prompt(1), Stopping(max_tokens=5)
    )
    engine.scheduler.add(request)
    engine.run()
    assert len(results(request)[0]) == 15 and request.acceptance.num_drafted == 0
