"""A request's time: when it is over, the request ends with what it has. The clock is the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, InvalidArgument, SamplingParams
from pagedec.core.protocol import DecoderContext, Hypothesis
from pagedec.core.request import Branch, Failed
from pagedec.decoders import decoder
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.errors import InvariantError
from tests.algorithms.beam import Beam, BeamParams
from tests.algorithms.interactive import InteractiveParams
from tests.support import add, step

Tiny = Callable[..., LLM]
PROMPT = [5, 17, 40, 99, 3]
LONG = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)


class Clock:
    """Stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def stopped(engine: Engine) -> Clock:
    engine.clock = Clock()
    return engine.clock


def tokens(finished: FinishedRequest) -> list[list[int]]:
    return [answer.token_ids for answer in finished.answers]


def whole(engine: Engine, params: Any, prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    add(engine, "whole", list(prompt), params)
    while True:
        for finished in step(engine):
            return tokens(finished)


def limits(finished: FinishedRequest) -> set[tuple[str, str | None]]:
    return {(answer.finish_reason, answer.limited_by) for answer in finished.answers}


def test_samples_end_as_they_stand_and_neighbours_go_on(tiny: Tiny) -> None:
    engine = tiny().engine
    clock, params = stopped(engine), LONG.clone(n=3, max_time=2.5)
    expected, neighbour = whole(engine, params), whole(engine, LONG)
    add(engine, "timed", PROMPT, params)
    add(engine, "other", PROMPT, LONG)
    for _ in range(7):
        assert step(engine) == []
    clock.now += 2.499
    assert step(engine) == []
    clock.now += 0.001
    [finished] = step(engine)
    assert finished.request.id == "timed" and limits(finished) == {("length", "max_time")}
    assert tokens(finished) == [answer[:8] for answer in expected]
    assert finished.metrics.latency == 2.5 and finished.metrics.num_output_tokens == 24
    rest = []
    while not rest:
        rest = step(engine)
    assert tokens(rest[0]) == neighbour and limits(rest[0]) == {("length", "max_tokens")}
    engine.scheduler.check()


def test_who_waits_or_is_in_his_prompt_has_answers_without_tokens(tiny: Tiny) -> None:
    engine = tiny(max_num_seqs=3, max_num_batched_tokens=4).engine
    clock = stopped(engine)
    add(engine, "long prompt", list(range(3, 43)), LONG.clone(n=3, max_time=1, prompt_logprobs=1))
    add(engine, "waits", PROMPT, LONG.clone(n=2, max_time=1))
    for _ in range(3):
        assert step(engine) == []
    clock.now += 1
    done = step(engine)
    assert [finished.request.id for finished in done] == ["long prompt", "waits"]
    for finished, num in zip(done, (3, 2), strict=True):
        assert tokens(finished) == [[]] * num and limits(finished) == {("length", "max_time")}
        assert finished.metrics.first_token_time is None and finished.metrics.time_to_first_token is None
    assert engine.idle and not engine.scheduler.requests
    engine.scheduler.check()


def test_what_has_ended_keeps_its_reason(tiny: Tiny) -> None:
    engine = tiny().engine
    clock, params = stopped(engine), SamplingParams(n=6, seed=5, max_tokens=25, max_time=1)
    expected = whole(engine, params)
    ended = sorted(len(answer) for answer in expected)
    assert ended[0] < ended[-1], "some end before others"
    add(engine, "timed", PROMPT, params)
    for _ in range(ended[0]):
        step(engine)
    clock.now += 1
    [finished] = step(engine)
    assert tokens(finished) == [answer[: ended[0]] for answer in expected]
    reasons = {(len(full) == ended[0], got.limited_by) for full, got in zip(expected, finished.answers, strict=True)}
    assert reasons == {(True, None), (False, "max_time")}


def test_what_ends_in_time_is_not_touched(tiny: Tiny) -> None:
    engine = tiny().engine
    clock, params = stopped(engine), LONG.clone(max_time=5)
    expected = whole(engine, params)
    clock.now += 100
    assert whole(engine, params) == expected
    add(engine, "aborted", PROMPT, params)
    engine.abort("aborted")
    clock.now += 100
    assert step(engine) == [] and not engine._deadlines


def test_a_gang_s_branches_as_they_stand(tiny: Tiny) -> None:
    engine = tiny().engine
    clock = stopped(engine)
    add(engine, "beams", PROMPT, BeamParams(4, max_tokens=30, ignore_eos=True, max_time=1))
    for _ in range(5):
        step(engine)
    clock.now += 1
    [finished] = step(engine)
    scores = [answer.score for answer in finished.answers]
    assert [len(answer) for answer in tokens(finished)] == [5] * 4 and scores == sorted(scores, reverse=True)
    assert limits(finished) == {("length", "max_time")}
    engine.scheduler.check()


def test_a_request_that_waits_for_its_client(tiny: Tiny) -> None:
    engine = tiny().engine
    clock = stopped(engine)
    add(engine, "session", PROMPT, InteractiveParams(max_time=1))
    for _ in range(3):
        step(engine)
    clock.now += 1
    [finished] = step(engine)
    assert len(finished.answers) == 1


@dataclass(frozen=True, slots=True)
class ConcludingParams(BeamParams):
    """Beams that say themselves what they have."""

    answer: Any = None


@decoder("test-concluding", params=ConcludingParams)
class Concluding(Beam):
    def __init__(self, params: ConcludingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.answer = params.answer

    def conclude(self, branches: Sequence[Branch]) -> Sequence[Hypothesis]:
        return self.answer(branches)  # type: ignore[no-any-return]


def best(branches: Sequence[Branch]) -> list[Hypothesis]:
    found = max(branches, key=lambda branch: branch.score)
    return [Hypothesis(found.tip, (7, 8), score=-0.5, reason="length")]


def test_a_decoder_s_own_conclusion(tiny: Tiny) -> None:
    engine = tiny().engine
    clock = stopped(engine)
    add(engine, "beams", PROMPT, ConcludingParams(4, max_tokens=30, ignore_eos=True, max_time=1, answer=best))
    for _ in range(5):
        step(engine)
    clock.now += 1
    [finished] = step(engine)
    [answer] = finished.answers
    assert answer.token_ids[5:] == [7, 8] and answer.score == -0.5
    assert limits(finished) == {("length", "max_time")}


def wrong(branches: Sequence[Branch]) -> Any:
    raise ZeroDivisionError("a user's mistake")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (wrong, "its decoder cannot conclude: ZeroDivisionError"),
        (lambda branches: 7, "conclude is 7: must return a list or a tuple of hypotheses, or None"),
        (lambda branches: [7], r"done\[0\] is 7: must be a Hypothesis"),
        (lambda branches: [Hypothesis(10**6)], r"done\[0\].tip"),
        (lambda branches: [Hypothesis(branches[0].tip, (10**6,))], r"done\[0\].tokens"),
    ],
)
def test_a_wrong_conclusion_fails_its_request_alone(tiny: Tiny, answer: Any, message: str) -> None:
    engine = tiny().engine
    clock, expected = stopped(engine), whole(engine, LONG)
    params = ConcludingParams(4, max_tokens=30, ignore_eos=True, max_time=1, answer=answer)
    add(engine, "beams", PROMPT, params)
    add(engine, "also timed", PROMPT, LONG.clone(max_time=1))
    add(engine, "other", PROMPT, LONG)
    for _ in range(5):
        step(engine)
    clock.now += 1
    seen = engine.step()
    [timed] = [event for event in seen if isinstance(event, FinishedRequest)]
    [failed] = [event for event in seen if isinstance(event, Failed)]
    assert failed.request.id == "beams"
    with pytest.raises(type(failed.error), match=message):
        raise failed.error
    assert tokens(timed) == [expected[0][:5]]
    rest: list[FinishedRequest] = []
    while not rest:
        rest = step(engine)
    assert tokens(rest[0]) == expected
    engine.scheduler.check()


def test_not_while_a_step_is_out(tiny: Tiny) -> None:
    engine = tiny().engine
    add(engine, "a", PROMPT, LONG)
    engine.scheduler.plan()
    with pytest.raises(InvariantError, match="conclude while step 1 is out"):
        engine.scheduler.conclude("a")
    engine.scheduler.forget_kv()
    engine.abort("a")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1"])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max_time is .*: must be a finite number above 0 in 32 bits or None"):
        SamplingParams(max_time=value)


# ------------------------------------------------------------------------------------------------------ from outside
class Running(Clock):
    """Goes on by one second whenever it is read."""

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_calls_and_streams(tiny: Tiny) -> None:
    llm = tiny()
    [full] = llm.generate([PROMPT], LONG, use_tqdm=False)
    llm.engine.clock = Running()
    timed, short = LONG.clone(max_time=30), LONG.clone(max_tokens=2)
    outputs = llm.generate([PROMPT, PROMPT], [timed, short], use_tqdm=False)
    answer = outputs[0].outputs[0]
    assert answer.limited_by == "max_time" and 2 < len(answer.token_ids) < 30
    assert answer.token_ids == full.outputs[0].token_ids[: len(answer.token_ids)]
    assert outputs[1].outputs[0].limited_by == "max_tokens"
    *_, last = llm.stream(PROMPT, timed)
    assert last.finished and last.outputs[0].limited_by == "max_time"
    assert last.outputs[0].token_ids == full.outputs[0].token_ids[: len(last.outputs[0].token_ids)] != []


def test_coroutines(tiny_path: Any) -> None:
    async def main() -> Any:
        async with AsyncLLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64) as llm:
            llm.engine.clock = Running()
            async for output in llm.generate(PROMPT, LONG.clone(n=2, max_time=30)):
                last = output
            return last

    last = asyncio.run(main())
    assert {answer.limited_by for answer in last.outputs} == {"max_time"} and last.finished
