"""GenerationService gives what `LLM.generate` gives for the same request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import session_service_pb2 as sb
from tests.in_step import step_when_read
from tests.serve.serving import WAIT, Serving, details, greedy, parameters, prompt, reason, streamed

Serve = Callable[..., Serving]
LONG = [5 + i * 7 % 120 for i in range(45)]
PROMPT = [5, 9, 33, 21]
DRAFTED = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def table(values: dict[str, object]) -> pp.Speculation:
    made = pp.Speculation()
    made.table.update(values)
    return made


CASES: dict[str, tuple[pp.Parameters, SamplingParams | BeamSearchParams]] = {
    "greedy": (greedy(40), SamplingParams(temperature=0, max_tokens=40)),
    "sampled": (
        pp.Parameters(
            sampling=pp.Sampling(n=3, temperature=0.9, top_p=0.95, top_k=40, min_p=0.01),
            stopping=pp.Stopping(max_tokens=30, min_tokens=2, stop_token_ids=[7], ignore_eos=True),
            logits_rules=pp.LogitsRules(
                presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={3: 1.5, 9: -100},
                no_repeat_ngram_size=3,
            ),
            reports=pp.Reports(logprobs=2, prompt_logprobs=1),
            seed=2**64 - 1,
        ),
        SamplingParams(
            n=3, temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, max_tokens=30, min_tokens=2, stop_token_ids=[7],
            ignore_eos=True, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1,
            logit_bias={3: 1.5, 9: -100}, no_repeat_ngram_size=3, logprobs=2, prompt_logprobs=1, seed=2**64 - 1,
        ),
    ),
    "beams": (
        pp.Parameters(
            beam_search=pp.BeamSearch(
                beam_width=5, num_return_sequences=3, length_penalty=0.6, early_stopping=pp.EARLY_STOPPING_NEVER
            ),
            stopping=pp.Stopping(max_tokens=20),
            reports=pp.Reports(logprobs=0),
        ),
        BeamSearchParams(
            beam_width=5, num_return_sequences=3, length_penalty=0.6, early_stopping="never", max_tokens=20, logprobs=0
        ),
    ),
    "beam sampling": (
        pp.Parameters(
            beam_search=pp.BeamSearch(beam_width=4, do_sample=True, temperature=1.3, top_k=30),
            stopping=pp.Stopping(max_tokens=20), seed=11,
        ),
        BeamSearchParams(beam_width=4, do_sample=True, temperature=1.3, top_k=30, max_tokens=20, seed=11),
    ),
    "drafted": (
        pp.Parameters(
            sampling=pp.Sampling(temperature=0), stopping=pp.Stopping(max_tokens=60), speculation=table(DRAFTED)
        ),
        SamplingParams(temperature=0, max_tokens=60, speculative=DRAFTED),
    ),
    "one of a few tokens": (
        pp.Parameters(
            sampling=pp.Sampling(temperature=1.0), stopping=pp.Stopping(max_tokens=9), seed=3,
            logits_rules=pp.LogitsRules(allowed_token_ids=[4, 8, 15, 16, 23, 42]),
        ),
        SamplingParams(max_tokens=9, seed=3, allowed_token_ids=[4, 8, 15, 16, 23, 42]),
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("interval", [1, 7])
def test_the_same_as_offline(serve: Serve, tiny_path: Path, name: str, interval: int) -> None:
    own, params = CASES[name]
    llm = LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64, max_model_len=256)
    [want] = llm.generate([LONG], params, use_tqdm=False)
    llm.close()
    serving = serve()
    got = serving.generation.Generate(pb.GenerateRequest(prompt=prompt(LONG), parameters=own))
    assert [list(answer.token_ids) for answer in got.answers] == [answer.token_ids for answer in want.outputs]
    reasons = {"stop": 1, "length": 2}
    for mine, answer in zip(got.answers, want.outputs, strict=True):
        assert mine.finish.reason == reasons[str(answer.finish_reason)]
        assert (mine.score if mine.HasField("score") else None) == answer.score
        assert list(mine.ancestry) == (answer.ancestry or [])
        for report, entries in zip(mine.logprobs, answer.logprobs or (), strict=True):
            assert {c.token_id: c.rank for c in report.candidates} == {t: e.rank for t, e in (entries or {}).items()}
    assert len(got.prompt_logprobs) == (len(LONG) if params.prompt_logprobs is not None else 0)
    request = pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own, stream_interval=interval)
    messages = list(serving.generation.GenerateStream(request))
    assert [tokens for _, tokens in streamed(messages, len(want.outputs))] == [a.token_ids for a in want.outputs]
    assert [message.HasField("prompt") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert sorted(a.index for message in messages for a in message.finished) == list(range(len(want.outputs)))
    assert messages[-1].usage.completion_tokens == sum(len(answer.token_ids) for answer in want.outputs)
    most = max(len(answer.token_ids) for answer in want.outputs)
    assert len(messages) <= len(want.outputs) * (most // interval + 3)


def test_stream_intervals_make_messages(serve: Serve) -> None:
    """The first token is told of at once, and so is the end."""
    serving = serve()
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=greedy(23), stream_interval=8)
    request.parameters.stopping.ignore_eos = True
    step_when_read(serving.llm)
    messages = serving.generation.GenerateStream(request, timeout=WAIT)
    assert [len(m.deltas[0].token_ids) for m in messages if m.deltas] == [1, 8, 8, 6]


def test_text_and_stop_strings(text_server: Serving) -> None:
    own = greedy(40)
    own.stopping.stop.append("\n")
    request = pb.GenerateRequest(prompt=prompt("Name three colors:"), parameters=own, client_request_id="colors")
    whole = text_server.generation.Generate(request)
    assert whole.request_id == "colors" and len(whole.answers) == 1
    stream = pb.GenerateStreamRequest(prompt=prompt("Name three colors:"), parameters=own)
    [(text, tokens)] = streamed(list(text_server.generation.GenerateStream(stream)))
    assert (text, tokens) == (whole.answers[0].text, list(whole.answers[0].token_ids)) and text
    assert whole.answers[0].finish.stop_text in ("\n", "")


def test_batches_answer_what_they_can(serve: Serve) -> None:
    """An item that fails is answered with its status, and ends no other."""
    serving = serve()
    good = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(8))
    bad = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=parameters(8, temperature=-1.0))
    items = [pb.GenerateBatchRequest(item_id=str(i), request=bad if i % 3 == 1 else good) for i in range(300)]
    answers = {answer.item_id: answer for answer in serving.generation.GenerateBatch(iter(items))}
    assert sorted(answers, key=int) == [str(i) for i in range(300)]
    alone = serving.generation.Generate(good).answers
    for i in range(300):
        if i % 3 == 1:
            assert answers[str(i)].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        else:
            assert answers[str(i)].response.answers == alone


def test_an_error_names_the_message_s_field(serve: Serve) -> None:
    serving = serve()
    with pytest.raises(grpc.RpcError) as caught:
        serving.generation.Generate(
            pb.GenerateRequest(prompt=prompt(PROMPT), parameters=parameters(8, temperature=-1.0))
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(caught.value) == "INVALID_FIELD"
    [violation] = details(caught.value)["BadRequest"].field_violations
    assert violation.field == "parameters.sampling.temperature"
    assert "-1.0" in violation.description and "1e-05" in violation.description


def test_an_error_of_a_grammar_that_runs_names_the_message_s_field(text_server: Serving) -> None:
    """It comes as the cause of a request's failure."""
    own = greedy(3)
    field = {"type": "string", "maxLength": 9999}
    own.constraint.json_schema = json.dumps({"type": "object", "properties": {f"p{i}": field for i in range(1200)}})
    opened = text_server.sessions.OpenSession(sb.OpenSessionRequest(prompt=prompt("Hello")))
    branch = {"session_id": opened.session_id, "branch": "0"}
    for call in (
        lambda: text_server.generation.Generate(pb.GenerateRequest(prompt=prompt("Hello"), parameters=own)),
        lambda: list(text_server.sessions.GenerateOnBranch(sb.GenerateOnBranchRequest(parameters=own, **branch))),
    ):
        with pytest.raises(grpc.RpcError, match="must be what llguidance can carry out") as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(caught.value) == "INVALID_FIELD"
        [violation] = details(caught.value)["BadRequest"].field_violations
        assert violation.field == "parameters.constraint.json_schema"
    text_server.sessions.CloseSession(sb.CloseSessionRequest(session_id=opened.session_id))


def test_a_client_that_leaves_frees_all_within_a_step(serve: Serve) -> None:
    serving = serve()
    own = parameters(None, temperature=0.0)
    own.stopping.ignore_eos = True
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(LONG), parameters=own))
    next(call)
    call.cancel()
    serving.whole()


def test_a_deadline_frees_all(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    with pytest.raises(grpc.RpcError) as caught:
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    serving.whole()


def test_a_time_limit_returns_what_there_is(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    own.stopping.time_limit.FromMilliseconds(200)
    [answer] = serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own)).answers
    assert answer.finish.reason == 4 and 0 < len(answer.token_ids) < 16000


def test_a_name_is_of_one_running_request(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own, client_request_id="mine")
    call = serving.generation.GenerateStream(request)
    assert next(call).request_id == "mine"
    assert dict(call.initial_metadata())["x-request-id"] == "mine"
    with pytest.raises(grpc.RpcError) as caught:
        serving.generation.Generate(
            pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2), client_request_id="mine")
        )
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS and reason(caught.value) == "REQUEST_EXISTS"
    call.cancel()
    serving.whole()
    again = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2), client_request_id="mine")
    assert serving.generation.Generate(again).request_id == "mine"
