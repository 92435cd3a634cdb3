"""A device that fails, or our own bug: it costs a pause. No block is lost, every answer is right, and whoever cannot be
carried out is found and told why."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagedec import LLM, SamplingParams
from pagedec.core.adapter_places import AdapterFiles
from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.core.request import Failed, Request
from pagedec.core.rows import Rows
from pagedec.core.settling import Settler
from pagedec.engine.engine import FinishedRequest
from pagedec.errors import DeviceError, InvariantError, RequestError, RequestsFailed
from pagedec.executor.base import NO_ADAPTERS
from pagedec.executor.inline import InlineExecutor
from tests.algorithms.interactive import InteractiveParams
from tests.engine.crowd import NUM_PROMPTS, SMALL, Tiny, Tokens, assert_whole, right_answers, workload
from tests.support import add

SHORT = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)


class DeviceLost(Exception):
    """What a device says when it goes."""


class Breaking:
    """An executor that hurts at one step, in one way, and whose cache is then gone."""

    def __init__(self, inner: InlineExecutor, step: int, hurt: Callable[[], None], late: bool = False) -> None:
        self.inner, self.left, self.hurt, self.late = inner, step, hurt, late

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Future[Answers]:
        self.left -= 1
        done = self.inner.execute(forwards, rules, masks, adapters) if self.left or self.late else None
        if self.left == 0:
            assert self.inner.worker is not None
            for lane in self.inner.worker.lanes.values():
                lane.cache.k.fill_(float("nan"))
                lane.cache.v.fill_(float("nan"))
            self.hurt()
        assert done is not None
        return done

    def give_up(self) -> None:
        self.inner.give_up()

    def stop(self) -> None:
        self.inner.stop()


def break_at(llm: LLM, step: int, hurt: Callable[[], None], late: bool = False) -> None:
    inner = llm.engine.executor
    assert isinstance(inner, InlineExecutor)
    llm.engine.executor = Breaking(inner, step, hurt, late)


def raising(error: BaseException) -> Callable[[], None]:
    def hurt() -> None:
        raise error

    return hurt


def test_the_small_engine_is_right_to_begin_with(tiny: Tiny, expected: list[Tokens]) -> None:
    llm = tiny(**SMALL)
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_steps > 30


@pytest.mark.sampled(8)
@pytest.mark.parametrize("late", [False, True], ids=["before the step", "answers lost"])
@pytest.mark.parametrize("error", [DeviceLost("gone"), MemoryError(), InvariantError("made up")], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 5, 19])
def test_the_device_fails_once(tiny: Tiny, expected: list[Tokens], step: int, error: Exception, late: bool) -> None:
    """It costs a pause: all KV is gone, and every answer is what it would have been."""
    llm = tiny(**SMALL)
    break_at(llm, step, raising(error), late)
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == 1
    assert_whole(llm, expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("late", [False, True], ids=["before the step", "answers lost"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 5, 19])
def test_somebody_wants_to_leave(
    tiny: Tiny, expected: list[Tokens], step: int, error: BaseException, late: bool
) -> None:
    llm = tiny(**SMALL)
    break_at(llm, step, raising(error), late)
    with pytest.raises(type(error)) as caught:
        right_answers(llm)
    assert error in (caught.value, caught.value.__cause__)  # an interrupt brings the finished answers along
    assert_whole(llm, expected)


class Unwell:
    """An executor that fails at some of its steps, or whenever somebody is in a step."""

    def __init__(self, llm: LLM, fails: Callable[[int, set[str]], bool]) -> None:
        self.inner, self.engine, self.fails, self.count, self.num_failures = (
            llm.engine.executor,
            llm.engine,
            fails,
            0,
            0,
        )
        self.engine.executor = self

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Future[Answers]:
        plan = self.engine.scheduler.plans[-1]
        self.count += 1
        if self.fails(self.count, {work.request.id for work in plan.works}):
            self.num_failures += 1
            raise DeviceLost("unwell")
        return self.inner.execute(forwards, rules, masks, adapters)

    def give_up(self) -> None:
        self.inner.give_up()

    def stop(self) -> None:
        self.inner.stop()


@pytest.mark.parametrize("seed", range(4))
def test_the_device_fails_now_and_then(tiny: Tiny, expected: list[Tokens], seed: int) -> None:
    llm, rng = tiny(**SMALL), random.Random(seed)
    unwell = Unwell(llm, lambda count, names: rng.random() < 0.2)
    assert right_answers(llm) == expected
    assert unwell.num_failures > 1
    llm.engine.executor = unwell.inner
    assert_whole(llm, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("poisonous", ["0", "3", "23", "06", "135"])
@pytest.mark.parametrize("roomy", [False, True], ids=["small", "roomy"])
def test_poisonous_requests_are_told_apart(tiny: Tiny, expected: list[Tokens], poisonous: str, roomy: bool) -> None:
    """No step with one of them ever comes back. The others are answered as if they had not been there."""
    llm = tiny() if roomy else tiny(**SMALL)
    unwell = Unwell(llm, lambda count, names: not names.isdisjoint(poisonous))
    prompts, params = workload()
    outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    assert {output.request_id for output in outputs if output.error is not None} == set(poisonous)
    for output, want in zip(outputs, expected, strict=True):
        if output.error is None:
            assert [answer.token_ids for answer in output.outputs] == want
        else:
            assert output.finished and output.outputs == [] and isinstance(output.error.__cause__, DeviceLost)
            assert "DeviceLost('unwell')" in str(output.error)
    llm.engine.executor = unwell.inner
    assert_whole(llm, expected)


def test_a_request_that_turns_poisonous_late(tiny: Tiny, expected: list[Tokens]) -> None:
    """In the middle of its answer, beside others in the middle of theirs, and some that come only later."""
    llm = tiny()
    engine = llm.engine

    def fails(count: int, names: set[str]) -> bool:
        return "2" in names and engine.scheduler.get("2").branches[0].stop_state >= 4

    unwell = Unwell(llm, fails)
    outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    got = [[answer.token_ids for answer in output.outputs] for output in outputs]
    assert got == [want if i != 2 else [] for i, want in enumerate(expected)]
    assert 3 <= unwell.num_failures < 12, "three tries of all, then halves"
    engine.executor = unwell.inner
    assert_whole(llm, expected)


def test_a_device_that_never_comes_back(tiny: Tiny, expected: list[Tokens]) -> None:
    """Everybody is told why, after a bounded number of tries; and when it is there again, so are the answers."""
    llm = tiny(**SMALL)
    unwell = Unwell(llm, lambda count, names: True)
    with pytest.raises(RequestsFailed, match="cannot be evaluated.*and 6 more of 7 requests failed") as caught:
        right_answers(llm)
    assert len(caught.value.errors) == NUM_PROMPTS and unwell.count < 60
    assert all(isinstance(error.__cause__, DeviceLost) for error in caught.value.errors)
    llm.engine.executor = unwell.inner
    assert_whole(llm, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda answers: answers.draws.__setitem__(0, -1), lambda answers: answers.draws.__setitem__(0, 131),
        lambda answers: setattr(answers, "draws", answers.draws[:-1]),
    ],
    ids=["negative", "unknown", "too few"],
)  # fmt: skip
def test_a_device_that_answers_nonsense_is_a_device_that_fails(
    tiny: Tiny, expected: list[Tokens], change: Callable[[Any], None]
) -> None:
    llm = tiny(**SMALL)
    execute, left = llm.engine.executor.execute, [6]

    def nonsense(*step: Any) -> Future[Answers]:
        done = execute(*step)
        left[0] -= 1
        if left[0] <= 0 and len(done.result()["target"].draws) and not left.append(0) and len(left) == 2:
            change(done.result()["target"])
        return done

    llm.engine.executor.execute = nonsense  # type: ignore[method-assign]
    assert right_answers(llm) == expected
    assert llm.engine.stats.num_failed_steps == 1
    assert_whole(llm, expected)


@pytest.mark.parametrize("lane", ["target", "draft"])
def test_a_model_whose_weights_are_no_numbers(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """Its answers would be token 0, again and again."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "0")
    bad = shutil.copytree(tiny_path, tmp_path / "bad")
    weights = load_file(bad / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    paths = {"target": tiny_path, "draft": tiny_path, lane: bad}
    speculative = {"model": str(paths["draft"]), "num_speculative_tokens": 3}
    limits = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
    with LLM(str(paths["target"]), speculative_config=speculative if lane == "draft" else None, **limits) as llm:
        for _ in range(2):
            with pytest.raises(RequestError, match="cannot be evaluated.*logits are NaN: weights that are no numbers"):
                llm.generate([{"prompt_token_ids": [5, 7, 11]}], SHORT, use_tqdm=False)
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.pools["target"].num_available == 64


@pytest.mark.parametrize("step", [1, 3, 11])
def test_settling_fails(tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Our own bug, half way through a step's answers: whose they were fails, the others draw the same tokens again."""
    llm, left, note = tiny(**SMALL), [step * 2], Settler._note_cached

    def note_cached(self: Settler, work: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise InvariantError("made up")
        note(self, work)

    monkeypatch.setattr(Settler, "_note_cached", note_cached)
    outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    [failed] = [output for output in outputs if output.error is not None]
    assert failed.error is not None and isinstance(failed.error.__cause__, InvariantError)
    for output, want in zip(outputs, expected, strict=True):
        assert output is failed or [answer.token_ids for answer in output.outputs] == want
    assert_whole(llm, expected)


def test_settling_fails_after_a_decoder_did(
    tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own error, and neither is asked again."""
    llm, advance = (
        tiny(**SMALL | {"max_num_batched_tokens": 512, "num_blocks": 64, "max_num_seqs": 64}),
        Settler._advance,
    )
    asked: Counter[str] = Counter()

    def hurt(self: Settler, request: Request, works: Any) -> None:
        asked[request.id] += request.id in "13"
        if request.id == "1":
            raise RequestError(request.id, "its decoder cannot advance: made up")
        if request.id == "3":
            raise InvariantError("made up")
        advance(self, request, works)

    monkeypatch.setattr(Settler, "_advance", hurt)
    outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
        if i not in (1, 3):
            assert [answer.token_ids for answer in output.outputs] == want
    assert "its decoder cannot advance: made up" in str(outputs[1].error) and asked["1"] == asked["3"] == 1
    assert outputs[3].error is not None and isinstance(outputs[3].error.__cause__, InvariantError)
    monkeypatch.undo()
    assert_whole(llm, expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_an_interrupt_while_answers_are_carried_in(
    tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    """A second Ctrl-C comes anywhere, here before or after an answer's request has lost its last branch: everybody is
    told of an end."""
    llm, finish, left = tiny(**SMALL), Settler._finish, [number]

    def interrupted(self: Settler, request: Request, hypothesis: Any) -> None:
        left[0] -= 1
        if when == "after" or left[0] != -1:
            finish(self, request, hypothesis)
        if left[0] == -1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Settler, "_finish", interrupted)
    prompts, params = workload()
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        add(llm.engine, f"{i}", prompt, own)
    ended: dict[str, Any] = {}
    interrupts = 0
    while not llm.engine.idle:
        try:
            events = llm.engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        ended |= {event.request.id: event for event in events if isinstance(event, (FinishedRequest, Failed))}
    assert interrupts == 1 and len(ended) == len(prompts) and not llm.engine.scheduler.requests
    failed = [event for event in ended.values() if isinstance(event, Failed)]
    assert len(failed) <= 1 and all("was interrupted" in str(event.error) for event in failed)
    for name, event in ended.items():
        if isinstance(event, FinishedRequest) and len(event.answers) == len(expected[int(name)]):
            assert [answer.token_ids for answer in event.answers] == expected[int(name)]
    monkeypatch.undo()
    assert_whole(llm, expected)


@pytest.mark.parametrize("culprit", [None, "3"], ids=["once", "always for one"])
def test_planning_fails(
    tiny: Tiny, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch, culprit: str | None
) -> None:
    """Our own bug, once, or whenever one request is planned: then that one is found, and fails."""
    llm = tiny(**SMALL)
    left, take = [9], Rows.take

    def broken(self: Rows, request: Request, *args: Any) -> None:
        left[0] -= 1
        if (left[0] == 0 and culprit is None) or request.id == culprit:
            raise InvariantError("made up")
        take(self, request, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "take", broken)
        outputs = llm.generate(*workload(), use_tqdm=False, on_error="return")
    assert [output.request_id for output in outputs if output.error is not None] == ([culprit] if culprit else [])
    for output, want in zip(outputs, expected, strict=True):
        assert output.error is not None or [answer.token_ids for answer in output.outputs] == want
    assert_whole(llm, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("poisonous", [range(10), range(16, 48), range(60), range(0, 64, 2)], ids=str)
def test_many_poisonous_requests_stand_in_the_way(tiny: Tiny, poisonous: range) -> None:
    """More of them in a row than there are tries: whoever is innocent is answered all the same."""
    llm = tiny(num_blocks=256)
    unwell = Unwell(llm, lambda count, names: any(int(name) in poisonous for name in names))
    prompts = [[5, 3 + i, 7] for i in range(64)]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False, on_error="return")
    assert [i for i, output in enumerate(outputs) if output.error is not None] == list(poisonous)
    assert all(type(output.error) in (RequestError, type(None)) for output in outputs)
    llm.engine.executor = unwell.inner
    again = llm.generate(prompts, SHORT, use_tqdm=False)
    for before, after in zip(outputs, again, strict=True):
        assert before.error is not None or before.outputs[0].token_ids == after.outputs[0].token_ids


def test_poison_after_poison_is_no_lost_device(tiny: Tiny) -> None:
    """One at a time, each with all its tries; who comes with one of them is answered, and who waits for a client goes
    on waiting."""
    llm = tiny()
    unwell = Unwell(llm, lambda count, names: any(int(name) % 2 for name in names))
    [(_, session)] = llm.prepare([[5, 3, 7]], InteractiveParams(max_tokens=20))
    llm.engine.add(session)
    llm.engine.step()
    assert session.idle
    for _ in range(12):
        outputs = llm.generate([[5, 6], [6, 5]], SHORT, use_tqdm=False, on_error="return")
        assert [output.error is not None for output in outputs] == [int(output.request_id) % 2 for output in outputs]
    unwell.fails = lambda count, names: True
    with pytest.raises(RequestsFailed, match="cannot be evaluated") as caught:
        llm.generate([[5, 6]] * 20, SHORT, use_tqdm=False)
    assert any(isinstance(error, DeviceError) for error in caught.value.errors) and len(caught.value.errors) == 20
    assert llm.engine.scheduler.requests == [session]
    llm.engine.abort(session.id)
