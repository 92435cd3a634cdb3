"""Steps with reports, planned while the one before is carried out: to the bit what is told of one step at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core import forward, scheduler
from pagedec.core.ahead import Unforeseen, unforeseen
from pagedec.kernels.device_memory import Staging
from pagedec.models.buffers import READ_ROWS
from tests.algorithms.beam import BeamParams
from tests.engine.crowd import SMALL, Tiny
from tests.engine.test_failures import DeviceLost, break_at, raising
from tests.kernels import cuda_library
from tests.models.checkpoints import make_checkpoint, variant

AHEAD: dict[str, Any] = {"async_scheduling": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
EMULATED = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
# with room for too few
NARROW: dict[str, Any] = {**SMALL, **AHEAD, "max_num_seqs": 6}


def told(llm: LLM, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """All that a crowd is told: tokens, ends, reports of answers and of prompts."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def in_turn(llm: LLM, prompts: list[list[int]], params: list[Any]) -> list[Any]:
    """The same with no step planned ahead."""
    llm.engine.drain()
    before, is_ahead = llm.engine.stats.num_steps_ahead, llm.engine.steps.is_ahead
    llm.engine.steps.is_ahead = False
    said = told(llm, prompts, params)
    llm.engine.steps.is_ahead = is_ahead
    assert llm.engine.stats.num_steps_ahead == before
    return said


def reported() -> tuple[list[list[int]], list[Any]]:
    """Some report more than others, or nothing, or their prompts alone; some end by tokens, some have rules."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 131) for _ in range(length)] for length in (3, 40, 17, 16, 1, 33, 8, 5)]
    ends = [*range(3, 131, 5)]
    params = [
        GREEDY.clone(logprobs=2),
        SamplingParams(seed=1, logprobs=0, prompt_logprobs=3, max_tokens=9, stop_token_ids=ends),
        SamplingParams(seed=2, max_tokens=11),
        SamplingParams(seed=3, n=3, logprobs=5, max_tokens=7, repetition_penalty=1.4),
        GREEDY.clone(logprobs=131, frequency_penalty=0.5, logit_bias={7: 3.0}),
        SamplingParams(seed=5, prompt_logprobs=0, max_tokens=3),
        SamplingParams(seed=6, logprobs=2, min_tokens=4, max_tokens=12, stop_token_ids=ends),
        BeamParams(3, max_tokens=6),
    ]
    return prompts, params


@pytest.mark.sampled(8)
@pytest.mark.parametrize("where", ["inline", "process", pytest.param("device", marks=EMULATED)])
def test_reports_of_a_crowd(tiny: Tiny, device: Tiny, where: str) -> None:
    """To the bit, and nobody waits for them; where there is too little room for all."""
    make = device if where == "device" else tiny
    llm = make(**NARROW, executor="process" if where == "process" else "inline")
    want, got = in_turn(llm, *reported()), told(llm, *reported())
    assert got == want
    llm.engine.drain()
    stats = llm.engine.stats
    assert stats.num_steps_ahead > 10 and stats.num_failed_steps == 0
    llm.engine.scheduler.check()


@pytest.mark.parametrize("caching", [False, True])
def test_rows_of_prompts_are_evaluated_once(tiny: Tiny, caching: bool) -> None:
    """Also where the reports of the rows before are on their way still; those of a prompt that is known, all again."""
    llm = tiny(**NARROW | {"num_blocks": 64}, enable_prefix_caching=caching)
    prompts = [[5 + i % 100, *range(3, 100)] for i in range(3)]
    params = [GREEDY.clone(prompt_logprobs=i, logprobs=i, max_tokens=3 + i) for i in range(3)]
    rows, said = list[int](), list[Any]()
    for tell in (in_turn, told, told):
        before = llm.engine.stats.num_rows
        said.append(tell(llm, prompts, params))
        rows.append(llm.engine.stats.num_rows - before)
    assert said[0] == said[1] == said[2]
    assert rows == [sum(98 + 2 + i for i in range(3))] * 3 and llm.engine.stats.num_steps_ahead > 20


@EMULATED
def test_no_call_waits_for_what_is_reported(device: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes with the draws, of which the device has room for more and more, or in as many pieces as it
    takes; rows that report stand between others, and prompts cross what is read out at once."""
    llm, num = device(num_blocks=192, max_num_batched_tokens=512), list[int]()
    receive = Staging.receive
    monkeypatch.setattr(Staging, "receive", lambda own: num.append(1) or receive(own))
    prompts = [[5 + i % 100, 9 + i % 7, i % 131] for i in range(6)] + [[7 + i % 90 for i in range(READ_ROWS + 9)]]
    params: list[Any] = [
        SamplingParams(seed=i, max_tokens=3 + i % 5, ignore_eos=True, logprobs=(None, 1, 4)[i % 3]) for i in range(6)
    ]
    params.append(GREEDY.clone(prompt_logprobs=2, logprobs=3, max_tokens=4))
    want = in_turn(llm, prompts, params)
    assert told(llm, prompts, params) == want and told(llm, prompts, params) == want
    llm.engine.drain()
    assert not num and llm.engine.stats.num_steps_ahead > 5 and llm.engine.stats.num_failed_steps == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["inline", pytest.param("device", marks=EMULATED)])
def test_more_reports_than_can_wait(tiny: Tiny, device: Tiny, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Such steps are read piece by piece, and waited for, between others that are not."""
    seen: list[Any] = []
    monkeypatch.setattr(scheduler, "unforeseen", lambda plan: seen.append(unforeseen(plan)) or seen[-1])
    monkeypatch.setattr(forward, "MOST_REPORTED", 130)
    llm = (device if where == "device" else tiny)(**NARROW)
    want, got = in_turn(llm, *reported()), told(llm, *reported())
    assert got == want
    assert seen.count(Unforeseen.SIZE) > 3 < seen.count(None) and llm.engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("step", [2, 5, 11])
def test_a_step_with_reports_fails(tiny: Tiny, step: int) -> None:
    """With the one behind it; what was reported before is not reported twice, and nothing is missing."""
    llm = tiny(**NARROW)
    want = in_turn(llm, *reported())
    break_at(llm, step, raising(DeviceLost("gone")), late=True)
    assert told(llm, *reported()) == want
    assert llm.engine.stats.num_failed_steps == 1


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_reports_that_do_not_come(tiny: Tiny, step: int) -> None:
    """Of a step that fails when it is asked for them, with the next one behind it: parts of prompts run again."""
    llm, left = tiny(**NARROW), [step]
    want, inner = in_turn(llm, *reported()), llm.engine.executor.execute

    class Lost:
        def result(self) -> Any:
            raise DeviceLost("gone")

    def execute(*arguments: Any) -> Any:
        pending, left[0] = inner(*arguments), left[0] - 1
        return Lost() if left[0] == 0 else pending

    llm.engine.executor.execute = execute  # type: ignore[method-assign]
    assert told(llm, *reported()) == want
    assert llm.engine.stats.num_failed_steps == 1


def test_reports_beside_who_leaves(tiny: Tiny) -> None:
    """Answers of rows that are nobody's any more are left out, also where their neighbours' reports stand behind."""
    llm = tiny(**NARROW)
    params = GREEDY.clone(logprobs=3)
    [want] = in_turn(llm, [[7, 8, 9]], [params])
    for num_read in range(1, 9):
        leaving, staying = llm.stream([9, 8, 7, 7], params.clone(logprobs=5)), llm.stream([7, 8, 9], params)
        for _ in range(num_read):
            next(leaving)
            last = next(staying)
        leaving.close()
        for output in staying:
            last = output
        assert (last.outputs, last.prompt_logprobs) == want
    llm.engine.drain()
    pool = llm.engine.scheduler.pools["target"]
    assert pool.num_available == pool.num_blocks and not any(pool.refs)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget", [24, 512, 600])
def test_prompts_and_answers_across_a_chunk_of_attention(tmp_path: Path, budget: int) -> None:
    """512 positions, which a prompt ends right before, at and behind, and which answers cross."""
    make_checkpoint(variant("long", length=8, initializer_range=0.15, max_position_embeddings=700), tmp_path)
    rng = random.Random(5)
    start = [rng.randrange(3, 131) for _ in range(520)]
    prompts = [[*start[:length], 5 + length % 100] for length in (504, 510, 511, 512, 3)]
    params: list[Any] = [SamplingParams(seed=i, max_tokens=10 - i, ignore_eos=True, logprobs=i % 2) for i in range(4)]
    params.append(SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    params[1] = params[1].clone(prompt_logprobs=1)
    size: dict[str, Any] = {"num_blocks": 110, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, **size, **AHEAD) as llm:
        want = in_turn(llm, prompts, params)
        for _ in range(2):  # with a cache, too
            assert told(llm, prompts, params) == want
        stats = llm.engine.stats
        assert stats.num_steps_ahead > 20 and stats.num_failed_steps == 0
