"""A step that should not take longer: engines learn what rows take, and prompts get what fits beside writers."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole

ROW = 0.01  # seconds, by the clock of these tests
WRITERS = [[5, 7, 9 + i] for i in range(3)]
LONG = [3 + i * i % 120 for i in range(150)]


def by_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have a row take ROW, by the engine's clock; returns (rows, of the long prompt) of each step to come."""
    steps, now, taken = llm.engine.steps, [0.0], list[tuple[int, int]]()
    execute = steps.executor.execute

    def timed(forwards: Any, *others: Any) -> Any:
        num_rows = len(forwards["target"].token_ids)
        now[0] += ROW * num_rows
        taken.append((num_rows, max(forwards["target"].row_indptr[1:] - forwards["target"].row_indptr[:-1])))
        return execute(forwards, *others)

    monkeypatch.setattr(steps, "clock", lambda: now[0])
    monkeypatch.setattr(steps.executor, "execute", timed)
    return taken


def said(llm: LLM) -> list[list[int]]:
    """What three write, beside whom a long prompt is read when each has some tokens."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in WRITERS]
    for stream in streams:
        next(stream)
    beside = llm.generate([LONG], SamplingParams(seed=1, max_tokens=3, ignore_eos=True), use_tqdm=False)
    ended = [list(stream)[-1] for stream in streams]
    return [output.outputs[0].token_ids for output in (*ended, *beside)]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_steps_beside_writers_are_as_short_as_they_should_be(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    sizes = {"num_blocks": 120, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    want = said(tiny(**sizes))
    llm = tiny(**sizes, target_step_time=0.4, async_scheduling=is_ahead)
    taken = by_rows(llm, monkeypatch)
    assert said(llm) == want
    beside = [(rows, longest) for rows, longest in taken if longest > 3]
    assert sum(longest for _, longest in beside) >= len(LONG) - 3 and max(rows for rows, _ in beside) <= 48
    assert llm.engine.stats.num_steps_ahead > 0 or not is_ahead
    del taken[:]
    assert said(llm) == want  # known from before
    assert [rows for rows, longest in taken if longest > 3] == [40, 40, 40, 40]


def test_who_is_alone_has_all_rows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(num_blocks=120, max_num_batched_tokens=128, target_step_time=0.2)
    taken = by_rows(llm, monkeypatch)
    llm.generate([LONG], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert taken[0][0] == 128


@pytest.mark.parametrize("seconds", [1e-6, 0.02])
def test_a_crowd_that_is_preempted(tiny: Tiny, expected: list[Tokens], seconds: float) -> None:
    llm = tiny(**SMALL, target_step_time=seconds)
    assert_whole(llm, expected)
    assert llm.engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("value", [0, -1, 2e6, float("nan"), "fast"])
def test_a_wrong_time_is_named(tiny: Tiny, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="target_step_time is "):
        tiny(target_step_time=value)
