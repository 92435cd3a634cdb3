"""Steps planned while the one before is carried out: the same answers, whatever fails, ends or leaves meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.settling import Settler
from pagedec.engine.recovery import Recovery
from pagedec.engine.steps import Steps
from pagedec.errors import InvariantError, RequestError
from pagedec.models.buffers import READ_ROWS
from pagedec.runtime.worker import Worker
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers, workload
from tests.engine.test_failures import DeviceLost, Unwell, break_at, raising
from tests.kernels import cuda_library

AHEAD: dict[str, Any] = {"async_scheduling": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
EMULATED = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_crowd_that_is_preempted(tiny: Tiny, expected: list[Tokens], executor: str) -> None:
    llm = tiny(**SMALL, **AHEAD, executor=executor)
    assert_whole(llm, expected)
    stats = llm.engine.stats
    assert 0 < stats.num_steps_ahead < stats.num_steps and stats.num_failed_steps == 0


@EMULATED
def test_a_device_that_is_late(device: Tiny, expected: list[Tokens]) -> None:
    """It is told of a step before it has carried out the one before, unless it is told not to be."""
    late, prompt = device(**SMALL), device(**SMALL, async_scheduling=False)
    assert_whole(late, expected)
    assert late.engine.stats.num_steps_ahead > 10 and late.engine.stats.num_failed_steps == 0
    assert right_answers(prompt) == expected and prompt.engine.stats.num_steps_ahead == 0


@EMULATED
def test_more_rows_than_are_read_out_at_once(device: Tiny, tiny: Tiny) -> None:
    """And draws for which there was no room yet, rules that read the tokens before, and lengths that all differ."""
    num = READ_ROWS + 7
    prompts = [[5 + i % 100, 9 + i % 7, i % 131] for i in range(num)]
    params = [
        SamplingParams(seed=i, max_tokens=2 + i % 3, min_tokens=i % 3, repetition_penalty=1 + i % 2) for i in range(num)
    ]
    rows = {"num_blocks": 2 * num, "max_num_seqs": 256, "max_num_batched_tokens": 512}
    said = []
    for llm in (tiny(**rows, async_scheduling=False), device(**rows)):
        few = llm.generate(prompts[:3], params[:3], use_tqdm=False)
        many = llm.generate(prompts, params, use_tqdm=False)
        said.append([output.outputs[0].token_ids for output in (*few, *many)])
        assert llm.engine.stats.num_failed_steps == 0
    assert said[0] == said[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("late", [False, True], ids=["before the step", "answers lost"])
@pytest.mark.parametrize("step", [1, 2, 3, 8, 19])
def test_the_device_fails_once(tiny: Tiny, expected: list[Tokens], step: int, late: bool) -> None:
    """The step behind the one that failed is given up, too."""
    llm = tiny(**SMALL, **AHEAD)
    break_at(llm, step, raising(DeviceLost("gone")), late)
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == 1
    assert_whole(llm, expected)


def test_an_interrupt_while_two_steps_are_out(tiny: Tiny, expected: list[Tokens]) -> None:
    llm = tiny(**SMALL, **AHEAD)
    break_at(llm, 9, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        right_answers(llm)
    assert_whole(llm, expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_stays_of_who_is_aborted_behind_an_interrupt(
    tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """What a step had brought him is taken with the next one's events, when he is forgotten."""
    llm, passed = tiny(**SMALL, async_scheduling=ahead), Recovery.passed

    def interrupted(self: Recovery, *given: Any) -> None:
        passed(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Recovery, "passed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        right_answers(llm)
    monkeypatch.undo()
    assert right_answers(llm) == expected
    assert_whole(llm, expected)


def test_settling_fails_beside_a_step_that_is_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own bug costs that step, too: whose answers they were fails, the others draw the same tokens again."""
    llm, prompts, advance = tiny(**AHEAD), workload()[0], Settler._advance_plain
    want = [output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    num_out = list[int]()

    def hurt(self: Settler, request: Any, works: Any) -> None:
        num_out.append(len(llm.engine.steps._out))
        if len(num_out) == 2 * len(prompts):
            raise InvariantError("made up")
        advance(self, request, works)

    monkeypatch.setattr(Settler, "_advance_plain", hurt)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert num_out[2 * len(prompts) - 1] == 1
    assert [output.error is not None for output in outputs].count(True) == 1
    assert all(output.error or output.outputs == answers for output, answers in zip(outputs, want, strict=True))
    assert not llm.engine.scheduler.requests and not llm.engine._first


@pytest.mark.parametrize("where", ["_note_begun", "_finish"])
def test_a_second_interrupt_beside_the_steps_that_are_out(
    tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It comes anywhere, here before the next step is begun, and when it is and nobody waits for the first yet."""
    llm, inner, left = tiny(**SMALL, **AHEAD), getattr(Steps, where), [9]

    def interrupted(steps: Steps, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return inner(steps, *arguments)

    monkeypatch.setattr(Steps, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        right_answers(llm)
    assert not llm.engine.scheduler.plans
    assert_whole(llm, expected)
    assert llm.engine.stats.num_failed_steps == 0


class Heard:
    """A sink that keeps the tokens that it is told."""

    def __init__(self) -> None:
        self.tokens_told, self.is_over = list[int](), False

    def tokens(self, rank: int, token_ids: Any, logprobs: Any) -> None:
        self.tokens_told += token_ids

    def settled(self, token_ids: Any, logprobs: Any) -> None: ...

    def ended(self, event: Any) -> None: ...

    def finished(self, result: Any) -> None:
        self.is_over = True

    def failed(self, error: RequestError) -> None:
        self.is_over = True


def test_an_interrupt_in_a_step_that_is_begun_behind_one(tiny: Tiny) -> None:
    """One that waits for what is settled is begun before anybody is told of that: its tokens and ends are told later,
    or who waits for them would wait for ever."""
    masked = GREEDY.clone(allowed_tokens_fn=lambda tokens: [*range(3, 90)])
    [want] = tiny().generate([[7, 8, 9]], GREEDY, use_tqdm=False)
    for num_tokens in (1, 2, 3):  # until the prompt beside it is evaluated, which takes as many steps and one more
        llm, heard = tiny(max_num_batched_tokens=24, **AHEAD), Heard()
        [(_, request)] = llm.prepare([[7, 8, 9]], GREEDY.clone(max_tokens=num_tokens))
        llm.loop.submit(request, heard)
        break_at(llm, num_tokens + 1, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * (20 + 22 * num_tokens)], masked, use_tqdm=False)
        assert llm.engine.stats.num_steps_ahead == num_tokens
        llm.loop.drive(lambda heard=heard, llm=llm: heard.is_over or llm.engine.idle)
        assert heard.is_over and heard.tokens_told == want.outputs[0].token_ids[:num_tokens]


def test_an_interrupt_before_a_worker_knows_the_rules_of_a_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told them with the next one."""
    own, inner, left = GREEDY.clone(repetition_penalty=1.4), Worker._tell, [0]
    [want] = tiny().generate([[7, 8, 9]], own, use_tqdm=False)

    def tell(worker: Worker, step: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        inner(worker, step)

    monkeypatch.setattr(Worker, "_tell", tell)
    for step in (1, 2):
        llm, heard, left[0] = tiny(**AHEAD), Heard(), step
        [(_, request)] = llm.prepare([[7, 8, 9]], own)
        llm.loop.submit(request, heard)
        with pytest.raises(KeyboardInterrupt):
            llm.loop.drive(lambda heard=heard: heard.is_over)
        llm.loop.drive(lambda heard=heard: heard.is_over)
        assert heard.tokens_told == want.outputs[0].token_ids and llm.engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("poisonous", ["0", "23"])
def test_poisonous_requests_are_told_apart(tiny: Tiny, expected: list[Tokens], poisonous: str) -> None:

    llm = tiny(**SMALL, **AHEAD)
    unwell = Unwell(llm, lambda count, names: not names.isdisjoint(poisonous))
    outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    assert {output.request_id for output in outputs if output.error is not None} == set(poisonous)
    for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
        assert str(i) in poisonous or [answer.token_ids for answer in output.outputs] == want
    llm.engine.executor = unwell.inner
    assert_whole(llm, expected)


def test_who_leaves_while_a_step_is_out(tiny: Tiny, expected: list[Tokens]) -> None:
    """At each token; neighbours keep theirs, and what it held is free."""
    llm = tiny(**SMALL, **AHEAD)
    want = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for num_read in range(1, 12):
        leaving, staying = llm.stream([7, 8, 9], GREEDY), llm.stream([7, 8, 9], GREEDY)
        for _ in range(num_read):
            last = next(staying)
            next(leaving)
        leaving.close()
        for output in staying:
            last = output
        assert last.outputs[0].token_ids == want
    assert_whole(llm, expected)


def test_rules_of_who_ends_beside_a_step_that_waits(tiny: Tiny) -> None:
    """A step with masks is begun when the one before is settled, in which somebody may have ended whose rules it
    names."""
    prompts = [[5, 9, 33], [7] * 20, [100, 3]]
    params = [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, stop_token_ids=[*range(3, 131, 2)]),
        SamplingParams(temperature=0, max_tokens=9, frequency_penalty=0.4, stop_token_ids=[*range(4, 131, 2)]),
        SamplingParams(temperature=0, max_tokens=20, allowed_tokens_fn=lambda tokens: [*range(3, 90)]),
    ]
    want = [
        tiny().generate([prompt], own, use_tqdm=False)[0].outputs for prompt, own in zip(prompts, params, strict=True)
    ]
    for late in range(1, 6):
        llm = tiny(**AHEAD)
        streams = [llm.stream(prompts[i], params[i]) for i in (0, 1)]
        for _ in range(late):
            for stream in streams:
                next(stream, None)
        [masked] = llm.generate([prompts[2]], params[2], use_tqdm=False)
        assert masked.outputs == want[2]
        for stream in streams:
            stream.close()
        assert llm.engine.stats.num_failed_steps == 0


def test_a_branch_goes_on_where_its_answer_ended(tiny: Tiny) -> None:
    """Also where a row more was computed, whose room is another's by then."""
    said = []
    for llm in (tiny(num_blocks=12), tiny(num_blocks=12, **AHEAD)):
        with llm.session([5, 9, 33, 70, 12]) as session:
            ends = [*range(3, 131, 3)]
            texts = []
            for _ in range(6):
                texts.append(session.generate(SamplingParams(temperature=0, max_tokens=9, stop_token_ids=ends)))
                fork = session.fork()
                texts.append(fork.generate(GREEDY))
                fork.close()
            said.append([output.outputs[0].token_ids for output in texts] + [session.token_ids])
        llm.engine.scheduler.check()
    assert said[0] == said[1]


def test_what_happens_between_steps_waits_for_the_one_that_is_out(tiny: Tiny) -> None:
    """An emptied cache, a client's edit, a time that is over, a pause."""
    llm = tiny(**AHEAD)
    engine = llm.engine
    stream = llm.stream([7, 8, 9], GREEDY)
    next(stream)
    assert engine.scheduler.plans
    llm.loop.at_once(lambda engine: engine.reset_prefix_cache())
    assert not engine.scheduler.plans
    want = tiny().generate([[7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert [*stream][-1].outputs[0].token_ids == want
    stream = llm.stream([7, 8, 9], GREEDY)
    next(stream)
    llm.loop.pause()
    llm.loop.at_once(lambda engine: None)
    assert not engine.scheduler.plans
    llm.loop.pause(False)
    assert [*stream][-1].outputs[0].token_ids == want
    ticks = iter(range(10**6))
    engine.clock = lambda: float(next(ticks))
    [cut] = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_time=30, ignore_eos=True), use_tqdm=False)
    assert 0 < len(cut.outputs[0].token_ids) < 12 and cut.outputs[0].token_ids == want[: len(cut.outputs[0].token_ids)]
    engine.scheduler.check()


def test_what_a_pause_waits_for_is_told(tiny: Tiny) -> None:
    """The last token and the end of a request, too: whoever reads does not wait for the pause to end."""
    llm = tiny(**AHEAD)
    stream = llm.stream([7, 8, 9], GREEDY.clone(max_tokens=3))
    next(stream)
    next(stream)
    llm.loop.pause()
    assert [*stream][-1].finished and not llm.engine.unfinished
    llm.loop.pause(False)


def test_nothing_is_begun_behind_a_step_that_could_not_be_begun(tiny: Tiny, expected: list[Tokens]) -> None:
    llm = tiny(**SMALL, **AHEAD)
    inner, told = llm.engine.executor.execute, list[bool]()

    def fails(forwards: Any, *others: Any) -> Any:
        told.append(bool((forwards["target"].token_ids < 0).any()))
        if len(told) == 6:
            raise DeviceLost("gone")
        return inner(forwards, *others)

    llm.engine.executor.execute = fails  # type: ignore[method-assign]
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == 1
    assert any(told[:6]) and not told[6]  # behind it all KV is given up, and no row names a draw


@EMULATED
def test_room_for_draws_that_there_is_not_at_once(device: Tiny, expected: list[Tokens]) -> None:
    """The step is tried again, and there is nothing left of the first try."""
    llm = device(**SMALL)
    room = llm.engine.executor.worker.lanes["target"]._drawn._room
    context, left = room._context, [1]

    class Once:
        def __getattr__(self, name: str) -> Any:
            return getattr(context, name)

        def new_fetch(self, max_bytes: int) -> Any:
            if left[0]:
                left[0] -= 1
                raise MemoryError("for once")
            return context.new_fetch(max_bytes)

    room._context = Once()
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == 1 and not left[0]


def test_a_time_that_is_over_when_the_request_has_failed(tiny: Tiny) -> None:
    engine = tiny().engine
    ticks = iter(range(10**6))
    engine.clock = lambda: float(next(ticks))
    engine.add(engine.admit("a", [7, 8, 9], GREEDY.clone(max_time=1.0)))
    engine.fail("a", RequestError("a", "made up"))
    assert [type(event).__name__ for event in engine.step()] == ["Failed"]
