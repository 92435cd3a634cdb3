"""Streams that go on: a server that breaks off, or is killed, costs its clients no token and gives them none twice."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import BeamSearchParams, RequestOutput, SamplingParams
from pagedec.client import AsyncClient, Client, ServerError
from pagedec.client.failures import pause_between
from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.serve.generation_service import GenerationService
from pagedec.serve.lifecycle import DRAINING
from pagedec.serve.statuses import Refusal
from pagedec.structured import StructuredOutputsParams
from pagedec.v1 import generation_service_pb2 as pb
from tests.engine.lora_models import Adapted
from tests.in_step import step_when_read
from tests.serve.adapter_cases import LORA, lora_flags
from tests.serve.serving import Serving, client_of, details, parameters, plain, prompt, reason, streamed
from tests.serve.test_serve_command import Process

Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 70, 12]
STORY = "Once upon a time there was a"


class Breaking:
    """Servers whose streams break off behind so many messages that bring something, as long as they are told to."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.asked: list[pb.GenerateStreamRequest] = []
        self.status = grpc.StatusCode.UNAVAILABLE
        """What they break off with."""
        self.is_full = False
        """A proxy before them turns one away that comes to go on, as Ray Serve's does: without details."""

    def around(self, whole: Any) -> Any:
        async def broken(service: Any, request: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
            self.asked.append(request)
            if self.is_full and request.HasField("resume"):
                self.is_full = False
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "dropped due to backpressure")
            num_told = 0
            async for message in whole(service, request, context):
                yield message
                num_told += bool(message.deltas)
                if num_told == self.after and self.status is grpc.StatusCode.CANCELLED:
                    await context.abort(self.status)
                if num_told == self.after:
                    raise Refusal("UNAVAILABLE", "ENGINE_FAILED", "it is gone")

        return broken


@pytest.fixture
def serve(serve: Serve) -> Serve:
    """Their messages have a step's tokens each, so that it is certain where a stream breaks off."""

    def make(**given: Any) -> Serving:
        serving = serve(**given)
        step_when_read(serving.llm)
        return serving

    return make


@pytest.fixture(scope="module")
def breaking() -> Iterator[Breaking]:
    made = Breaking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationService, "GenerateStream", made.around(GenerationService.GenerateStream))
        patch.setattr("pagedec.client.failures.FIRST_PAUSE", 0.001)
        yield made


@pytest.fixture(autouse=True)
def _whole_at_first(breaking: Breaking) -> None:
    breaking.after, breaking.status = None, grpc.StatusCode.UNAVAILABLE
    breaking.asked.clear()


def told(client: Client, what: Any, params: RequestParams) -> RequestOutput:
    """The last of a stream's outputs, which are held against what they say."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for last in client.stream(what, params.clone(output_kind=RequestOutputKind.DELTA)):
        for answer in last.outputs:
            texts[answer.index] = texts.get(answer.index, "") + answer.text
            tokens[answer.index] = tokens.get(answer.index, []) + list(answer.token_ids)
    *_, output = client.stream(what, params)
    assert last.finished and output.finished
    assert [(texts[a.index], tokens[a.index]) for a in output.outputs] == [
        (a.text, list(a.token_ids)) for a in output.outputs
    ]
    return output


CASES: dict[str, RequestParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(seed=3, max_tokens=20, min_tokens=9),
    "several": SamplingParams(n=3, seed=5, max_tokens=20),
    "penalties": SamplingParams(
        seed=4, max_tokens=20, presence_penalty=0.5, frequency_penalty=0.7, no_repeat_ngram_size=2, ignore_eos=True
    ),
    "logprobs": SamplingParams(n=2, seed=6, max_tokens=14, logprobs=2, prompt_logprobs=1),
    "drafted": SamplingParams(seed=7, max_tokens=24, speculative={"method": "ngram", "num_speculative_tokens": 3}),
    "beams": BeamSearchParams(beam_width=3, max_tokens=16, length_penalty=0.0),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_if_nothing_had_happened(serve: Serve, breaking: Breaking, name: str) -> None:
    params = CASES[name]
    with client_of(serve()) as client:
        want = told(client, PROMPT, params)
        for breaking.after in (1, 2, 5):
            breaking.asked.clear()
            assert plain(told(client, PROMPT, params)) == plain(want)
            if breaking.after == 1:  # a slow reader finds several messages in one
                assert len(breaking.asked) > 2 and breaking.asked[-1].HasField("resume")


TEXTS: dict[str, RequestParams] = {
    "stop strings": SamplingParams(temperature=0, max_tokens=16, stop=["ome anim"], min_tokens=2),
    "stop string, shown": SamplingParams(
        n=2, seed=2, max_tokens=14, stop=["."], include_stop_str_in_output=True, repetition_penalty=1.2
    ),
    "grammar": SamplingParams(
        seed=8, max_tokens=16, structured_outputs=StructuredOutputsParams(regex=r"[a-z]{4} [0-9]{3}-[0-9]{3}!")
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", TEXTS)
def test_texts_end_as_if_nothing_had_happened(text_server_breaking: Serving, breaking: Breaking, name: str) -> None:
    params = TEXTS[name]
    with client_of(text_server_breaking) as client:
        want = told(client, STORY, params)
        breaking.after = 2
        assert plain(told(client, STORY, params)) == plain(want)
        assert breaking.asked[-1].HasField("resume")


@pytest.fixture(scope="module")
def text_server_breaking(server_loop: Any, breaking: Breaking) -> Iterator[Serving]:
    from pagedec import AsyncLLM

    serving = Serving(server_loop, lambda: AsyncLLM("smollm2", num_blocks=32, max_model_len=128)).ready()
    yield serving
    serving.whole()
    serving.close()


def test_an_adapter_goes_on(serve: Serve, breaking: Breaking, adapted: Adapted) -> None:
    """As the request's model; not where it was unloaded meanwhile."""
    serving, params = serve(engine=LORA, lora=lora_flags(adapted)), CASES["greedy"]
    with client_of(serving, model="a1") as client:
        want = told(client, PROMPT, params)
        assert want.outputs[0].token_ids == adapted.want(adapted.loras[0], PROMPT, 20)
        for breaking.after in (1, 5):
            breaking.asked.clear()
            assert plain(told(client, PROMPT, params)) == plain(want)
            assert len(breaking.asked) > 2 and {asked.model for asked in breaking.asked} == {"a1"}
        outputs = client.stream(PROMPT, params)
        next(outputs)
        serving.server.gateway.models.unload("a1")
        with pytest.raises(ServerError, match="could not go on: model 'a1' does not exist; .*, a2, a3$") as caught:
            list(outputs)
        assert caught.value.output is not None and len(caught.value.output.outputs[0].token_ids) == 5


def test_a_seed_that_the_server_has_drawn(serve: Serve, breaking: Breaking) -> None:
    """It is told first, and kept."""
    with client_of(serve()) as client:
        breaking.after = 4
        [*_, output] = client.stream(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        first, second, third = (request.resume for request in breaking.asked[:3])
        assert not first.answers and second.seed == third.seed and second.seed > 2**32
        before, after = (len(each.answers[0].token_ids) for each in (second, third))
        assert 4 <= before < after < 60
        breaking.after = None
        [*_, again] = client.stream(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, seed=second.seed))
    assert plain(again) == plain(output)


def test_a_proxy_that_is_full(serve: Serve, breaking: Breaking, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says no more than RESOURCE_EXHAUSTED, as gRPC does of an answer that is too large, which is not asked anew."""
    monkeypatch.setattr("pagedec.client.failures.LONG_PAUSE", 0.01)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    served, breaking.after = serve(), None
    with client_of(served) as client:
        whole, breaking.asked = list(client.stream(PROMPT, params))[-1], []
        breaking.after, breaking.is_full = 2, True
        told = list(client.stream(PROMPT, params))[-1]
    assert told.outputs[0].token_ids == whole.outputs[0].token_ids
    assert not breaking.is_full and len(breaking.asked) > 2
    assert pause_between(ServerError("RESOURCE_EXHAUSTED", "", "larger than max"), 0) is None


def test_for_coroutines(serve: Serve, breaking: Breaking) -> None:
    serving = serve()

    async def last(params: SamplingParams) -> RequestOutput:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}") as client:
            return [output async for output in client.generate(PROMPT, params)][-1]

    want = asyncio.run(last(CASES["several"]))  # type: ignore[arg-type]
    for breaking.status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        breaking.after = 2
        assert plain(asyncio.run(last(CASES["several"]))) == plain(want)  # type: ignore[arg-type]


def test_answers_alike_of_which_one_was_told_further(serve: Serve) -> None:
    """What was told of the one are reports of its own: the other's tokens, which are the same, have theirs."""
    llm = serve().llm
    params = SamplingParams(n=2, top_k=1, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)

    async def answers(resume: Resume | None = None) -> list[Any]:
        stream = llm.resumable(PROMPT, params.clone(output_kind=RequestOutputKind.FINAL_ONLY), resume=resume)
        return [output async for output in stream][-1].outputs

    want, _ = whole = asyncio.run(answers())
    own = [table[token].logprob for token, table in zip(want.token_ids, want.logprobs, strict=True)]
    known = [ToldAnswer(tuple(want.token_ids[:count]), 0, tuple(own[:count])) for count in (8, 3)]
    found = asyncio.run(answers(Resume(tuple(known))))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in whole]
    assert found[1].logprobs[3:] == want.logprobs[3:] and found[0].logprobs[8:] == want.logprobs[8:]


def test_where_it_does_not_go_on_what_had_come_is_told(serve: Serve, breaking: Breaking) -> None:
    serving, breaking.after = serve(), 3
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with client_of(serving, resume=0) as client:
        with pytest.raises(ServerError, match="^UNAVAILABLE, ENGINE_FAILED: it is gone$") as caught:
            list(client.stream(PROMPT, params))
        assert caught.value.output is not None and len(caught.value.output.outputs[0].token_ids) >= 3
    with client_of(serving) as client, pytest.raises(ServerError) as caught:
        for _ in client.stream(PROMPT, params):
            serving.loop.run(_forget(serving))
    assert str(caught.value) == (
        "UNAVAILABLE, ENGINE_FAILED: it is gone; and it could not go on: FAILED_PRECONDITION, RESUME_MODEL: "
        "resume.fingerprint.model is another: tokens of one model mean nothing to another one"
    )
    assert caught.value.output is not None and len(caught.value.output.outputs[0].token_ids) >= 3


async def _forget(serving: Serving) -> None:
    executor = serving.llm.engine.executor
    executor.geometry = dataclasses.replace(executor.geometry, model="other")


def resumed(serving: Serving, asked: dict[str, Any], **resume: Any) -> list[pb.GenerateStreamResponse]:
    geometry = serving.llm.engine.executor.geometry
    own = pb.Fingerprint(model=geometry.model, numerics=geometry.numerics)
    request = pb.GenerateStreamRequest(
        prompt=prompt(PROMPT), resume=pb.Resume(**{"fingerprint": own, "seed": 3, **resume}), **asked
    )
    return list(serving.generation.GenerateStream(request))


def test_what_is_refused(serve: Serve) -> None:
    serving = serve()
    asked = {"parameters": parameters(4)}
    beams = {"parameters": parameters(4)}
    beams["parameters"].beam_search.beam_width = 2
    for given, field, message in (
        ([pb.ToldAnswer(token_ids=[5, 131])], "answers[0].token_ids", "131: token ids must be from 0 to 130"),
        ([pb.ToldAnswer(token_ids=[5] * 5)], "answers[0].token_ids", "5 tokens: must be at most 4 tokens long"),
        ([pb.ToldAnswer(token_ids=[2, 5])], "answers[0].token_ids", "the answer ends with token 1"),
        ([pb.ToldAnswer(), pb.ToldAnswer()], "answers", "must be at most 1: the request has no more answers"),
        ([pb.ToldAnswer(token_ids=[5], num_characters=9)], "answers[0].num_characters", "is 9: must be at most 0"),
        ([pb.ToldAnswer(token_ids=[5], logprobs=[-1, -2])], "answers[0].logprobs", "must be 1, or none"),
        ([pb.ToldAnswer(token_ids=[5], logprobs=[float("nan")])], "answers[0].logprobs", "is nan: must be numbers"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            resumed(serving, asked, answers=given)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == f"resume.{field}"
        assert message in error.details()
    other = pb.Fingerprint(model=serving.llm.engine.executor.geometry.model, numerics="other")
    for given_asked, fingerprint, why in (
        (asked, pb.Fingerprint(), "RESUME_MODEL"),
        (beams, other, "RESUME_NUMERICS"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            resumed(serving, given_asked, fingerprint=fingerprint)
        assert reason(caught.value) == why and caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError) as caught:
        resumed(serving, {"parameters": _with_seed(4)})
    assert "resume.seed is 3: must be the request's own seed, 4" in str(caught.value)
    with pytest.raises(grpc.RpcError, match="must be what the request comes to"):
        resumed(serving, beams, answers=[pb.ToldAnswer(token_ids=[5, 6])] * 2)
    messages = resumed(serving, asked, fingerprint=other, answers=[pb.ToldAnswer(token_ids=[5, 6])])
    assert messages[0].resume.fingerprint.numerics != "other" and messages[0].resume.seed == 3
    assert len(streamed(messages)[0][1]) <= 2
    serving.whole()


def _with_seed(seed: int) -> Any:
    made = parameters(4)
    made.seed = seed
    return made


def test_tokens_that_a_constraint_forbids_are_refused(text_server_breaking: Serving) -> None:
    given = parameters(8)
    given.constraint.regex = "[0-9]+"
    word = text_server_breaking.llm.get_tokenizer().encode("word")
    with pytest.raises(grpc.RpcError, match=r"resume.answers\[0\].token_ids is 1 token: token .* is not allowed"):
        resumed(text_server_breaking, {"parameters": given}, answers=[pb.ToldAnswer(token_ids=word[:1])])


def test_other_numbers_are_reported(serve: Serve, breaking: Breaking, caplog: pytest.LogCaptureFixture) -> None:
    serving, breaking.after = serve(), 1

    async def change() -> None:
        executor = serving.llm.engine.executor
        executor.geometry = dataclasses.replace(executor.geometry, numerics="other")

    with client_of(serving) as client:
        stream = client.stream(PROMPT, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        next(stream)
        serving.loop.run(change())
        *_, last = stream
    assert len(last.outputs[0].token_ids) == 200
    said, *_ = [record.getMessage() for record in caplog.records if record.name == "pagedec.client"]
    assert said.endswith("goes on where numbers have other bits than where it began")


def test_a_server_that_drains_for_too_long(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams end as what they are, interrupted, and go on when it is open again."""
    monkeypatch.setattr(DRAINING, "retry", 0.02)
    serving = serve()
    params = SamplingParams(seed=9, max_tokens=200, ignore_eos=True)
    with client_of(serving) as client:
        *_, want = client.stream(PROMPT, params)
        stream = client.stream(PROMPT, params)
        assert len(next(stream).outputs[0].token_ids) < 200
        assert serving.loop.run(serving.server.drain(0.0, 0.001)) == 1
        serving.loop.run(_opened(serving))
        *_, last = stream
    assert plain(last) == plain(want)


async def _opened(serving: Serving) -> None:
    serving.server.lifecycle.open()


@pytest.mark.long
def test_a_server_that_is_killed_and_started_anew(tiny_path: Path) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=400, ignore_eos=True)
    server = Process(tiny_path).ready()
    again: Process | None = None
    try:
        with Client(f"127.0.0.1:{server.port}") as client:
            [*_, want] = client.stream(PROMPT, params)
            tokens: list[list[int]] = [[], []]
            for output in client.stream(PROMPT, params.clone(output_kind=RequestOutputKind.DELTA)):
                for answer in output.outputs:
                    tokens[answer.index] += answer.token_ids
                if again is None and len(tokens[0]) > 20:
                    server.signal(signal.SIGKILL)
                    assert server.wait() == -signal.SIGKILL
                    again = Process(tiny_path, "--port", str(server.port))
        assert again is not None, "the stream was over before it was interrupted"
        assert tokens == [list(answer.token_ids) for answer in want.outputs]
        assert output.outputs[0].finish_reason == "length"
    finally:
        for process in (server, again):
            if process is not None:
                process.popen.kill()
                process.wait()
