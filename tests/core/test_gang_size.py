"""What a gang takes: its rows, its blocks, and what comes back after it gave way."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec.core.logprobs import Reporting
from pagedec.core.request import Request
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument
from pagedec.params import SamplingParams
from tests.core.fake import VOCABULARY, FakeEngine, LanguageModel
from tests.core.gangs import How, add, answers_of
from tests.core.world import Case, limits

SIZES = [(16, 64), (8, 61)]
"""Block size and prompt length."""


def device(block_size: int = 16, num_blocks: int = 6000, **changes: Any) -> FakeEngine:
    values: dict[str, Any] = {"max_num_batched_tokens": 512, "max_blocks_per_table": 160} | changes
    return FakeEngine({"target": LanguageModel(5, 4)}, limits(num_blocks, block_size=block_size, **values))


def prompt_of(length: int) -> list[int]:
    return [(i * i + i // 7) % VOCABULARY for i in range(length)]


def used(engine: FakeEngine) -> int:
    pool = engine.scheduler.pools["target"]
    return pool.num_blocks - pool.num_available


def own_bound(request: Request, size: int) -> int:
    """The prompt, the beams' own suffixes, and one block a beam."""
    prompt = request.prompt_length
    suffixes = [request.history.depth[branch.tip] - prompt for branch in request.branches]
    return -(-prompt // size) + sum(-(-length // size) + 1 for length in suffixes)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("block_size", "length"), SIZES)
@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("arrays", [False, True])
def test_kv_in_use_is_the_prompt_and_what_the_beams_have_of_their_own(
    block_size: int, length: int, width: int, arrays: bool
) -> None:
    engine = device(block_size)
    request, _ = add(engine.scheduler, How(width, count=34, arrays=arrays), prompt_of(length))
    while request.branches:
        plan = engine.scheduler.plan()
        assert used(engine) <= own_bound(request, block_size)
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
        assert used(engine) <= own_bound(request, block_size)
    assert engine.scheduler.idle and used(engine) == 0, "it leaves at once"
    pool = engine.scheduler.pools["target"]
    assert pool.num_copied <= pool.num_forks


@pytest.mark.sampled(10)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("arrays", [False, True])
def test_a_preempted_gang_comes_back_with_the_blocks_that_it_had(caching: bool, arrays: bool) -> None:
    """Beside its undisturbed twin: at equal lengths it never uses more."""
    runs = []
    for disturbed in (False, True):
        engine = device(num_blocks=2000, enable_prefix_caching=caching)
        request, _ = add(engine.scheduler, How(64, count=24, arrays=arrays), prompt_of(513))
        sizes: dict[int, int] = {}
        while not engine.scheduler.idle:
            lengths = {request.history.depth[branch.tip] for branch in request.branches}
            if disturbed and max(lengths) == 513 + 17 and not request.num_preemptions:
                engine.scheduler.preempt("gang")
                assert used(engine) == 0
            engine.step()
            if request.branches and all(branch.table.num_blocks for branch in request.branches):
                sizes[request.history.depth[request.branches[0].tip]] = used(engine)
        runs.append((sizes, answers_of(request)))
        assert request.num_preemptions == disturbed
    (whole, wanted), (after, found) = runs
    assert found == wanted
    for length, size in after.items():
        assert size <= whole[length], f"at {length} tokens"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("width", [256, 257, 512])
def test_a_gang_may_be_as_wide_as_a_step_has_rows(width: int) -> None:
    """Whatever `max_num_seqs` says: it counts as one, and its neighbours keep their bits."""
    engine = device(max_num_seqs=2)
    stopping = Stopping(max_tokens=9)
    other = Case("other", SamplingParams(temperature=0.0), prompt_of(70), None, stopping)
    alone = device()
    wanted = other.add(alone.scheduler)
    alone.run()
    early = other.add(engine.scheduler)
    request, keep = add(engine.scheduler, How(width, count=6, arrays=True), prompt_of(513))
    late = Case("late", SamplingParams(temperature=0.0), prompt_of(70), None, stopping).add(engine.scheduler)
    engine.run()
    engine.check_whole()
    assert not engine.failed and len(request.done) == width
    for plain in (early, late):
        assert [plain.output(h) for h in plain.done] == [wanted.output(h) for h in wanted.done]
    by_row = device()
    same, ranked = add(by_row.scheduler, How(width, count=6, by_row=True), prompt_of(513))
    by_row.run()
    assert answers_of(same) == answers_of(request) and ranked.seen == keep.seen


def test_what_cannot_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="width is 513: must be at most max_num_batched_tokens, 512"):
        add(device().scheduler, How(513), [1])
    with pytest.raises(
        InvalidArgument, match=r"must need at most 40 blocks, the target lane's; 64 x 13 tokens may need"
    ):
        add(device(num_blocks=40).scheduler, How(64), [1])


def test_nothing_is_kept_of_what_was_not_accepted() -> None:
    """Reports of a gang grow with what lives on, not with its candidates."""
    engine = device()
    request, keep = add(engine.scheduler, How(8, count=30, arrays=True), prompt_of(20), reporting=Reporting(2))
    engine.run()
    assert request.reports is not None
    accepted = sum(len(step) for step in keep.seen)
    assert len(request.reports.edges) <= accepted
