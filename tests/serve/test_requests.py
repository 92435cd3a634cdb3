"""What a request may say beside what is decoded: each of it has an effect, and the same one as offline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagedec import LLM, BeamSearchParams
from pagedec.client.asking import as_chat
from pagedec.serve.access import Client
from pagedec.serve.calls import RPC, Rpc
from pagedec.serve.generation_service import GenerationService
from pagedec.serve.orders import read_chat
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import prompt_pb2
from tests.algorithms.reconsider import ReconsiderParams
from tests.in_step import step_when_read
from tests.serve.serving import WAIT, Serving, details, greedy, parameters, prompt, reason, streamed

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
LARGE = {"num_blocks": 1024, "max_model_len": 16384}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": name} for name in ("day", "hour", "place", "unit")},
            "required": ["place"],
        },
    },
}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"day": 1, "unit": "F"}}}
    ],
}


def ask(serving: Serving, own: pp.Parameters, **fields: Any) -> pb.GenerateResponse:
    request = pb.GenerateRequest(**{"prompt": prompt(PROMPT), "parameters": own, **fields})
    response: pb.GenerateResponse = serving.generation.Generate(request)
    return response


def wrong(serving: Serving, own: pp.Parameters) -> tuple[str, str]:
    """The field that an error is about, and what it says."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(serving, own)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details(caught.value)["BadRequest"].field_violations
    return violation.field, violation.description


# ---- a decoder by its name
def custom(name: str, stopping: int = 24, **given: Any) -> pp.Parameters:
    own = pp.Parameters(custom=pp.CustomDecoder(name=name), stopping=pp.Stopping(max_tokens=stopping), seed=3)
    own.custom.parameters.update(given)
    return own


def test_a_registered_decoder(serve: Serve, llm: LLM) -> None:
    params = ReconsiderParams(n=2, piece=3, retries=2, threshold=-1.5, max_tokens=24, seed=3)
    [want] = llm.generate([PROMPT], params, use_tqdm=False)
    serving, own = serve(), custom("reconsider", n=2, piece=3, retries=2, threshold=-1.5)
    answers = ask(serving, own).answers
    assert [list(answer.token_ids) for answer in answers] == [answer.token_ids for answer in want.outputs]
    stream = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own))
    assert [tokens for _, tokens in streamed(list(stream), 2)] == [answer.token_ids for answer in want.outputs]


def test_its_mistakes_name_the_message_s_fields(serve: Serve) -> None:
    serving = serve(max_answers=8)
    assert wrong(serving, custom("reconsider", piece=0))[0] == "parameters.custom.parameters.piece"
    assert wrong(serving, custom("reconsider", n=9))[0] == "parameters.custom.parameters.n"
    assert "did you mean piece?" in wrong(serving, custom("reconsider", piec=2))[1]
    for name in ("output_kind", "stream_interval"):  # how it is told is the service's own
        assert name in wrong(serving, custom("reconsider", **{name: 2}))[1]


@pytest.mark.parametrize("name", ["nobody's", "score", "ngram"])
def test_only_decoders_that_a_model_tells_of_are_found(serve: Serve, name: str) -> None:
    """Scores are a session's, and drafts a table's: a decoder of theirs would answer nothing, or not draft."""
    serving = serve()
    known = serving.models.GetModel(mb.GetModelRequest()).model.decoders
    assert name not in known and {"beam", "sampling", "reconsider"} <= set(known)
    with pytest.raises(grpc.RpcError, match=f"known are {', '.join(known)}") as caught:
        ask(serving, custom(name, continuations=[[5, 6]]))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason(caught.value) == "DECODER_NOT_FOUND"


# ---- who comes first, and who shares
def test_lower_priorities_go_first(serve: Serve) -> None:
    serving, ends = serve(engine={"max_num_seqs": 1}), list[int]()
    serving.llm.loop.pause().result(10)
    calls = []
    for priority in (0, 5, -5, 3):
        request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(4), priority=priority)
        call = serving.generation.Generate.future(request)
        call.add_done_callback(lambda _, priority=priority: ends.append(priority))
        calls.append(call)
        while len(serving.server.gateway.running) < len(calls):
            time.sleep(0.002)
    serving.llm.loop.pause(False).result(10)
    assert all(call.result().answers for call in calls)
    serving.whole()
    assert ends == [-5, 0, 3, 5]


def test_prefixes_are_shared_under_the_same_salt_alone(serve: Serve) -> None:
    serving = serve()
    cached = [ask(serving, greedy(2), cache_salt=salt).usage.cached_tokens > 0 for salt in ("a", "b", "a", "", "")]
    assert cached == [False, False, True, False, True]


# ---- bounds
def test_what_one_request_may_ask_for(serve: Serve) -> None:
    serving = serve(max_answers=4, max_request_tokens=100)
    field, said = wrong(serving, parameters(8, n=5))
    assert field == "parameters.sampling.n" and "at most 4, the server's max_answers" in said
    beams = pp.Parameters(beam_search=pp.BeamSearch(beam_width=5, num_return_sequences=1))
    assert wrong(serving, beams) == (
        "parameters.stopping.max_tokens",
        "parameters.stopping.max_tokens is None: must be given: a beam search ends where all paths have a length",
    )
    beams.stopping.max_tokens = 4
    assert wrong(serving, beams)[0] == "parameters.beam_search.beam_width"
    field, said = wrong(serving, parameters(26, n=4))
    assert field == "parameters.stopping.max_tokens" and "at most 25" in said
    assert len(ask(serving, parameters(25, n=4)).answers) == 4
    assert wrong(serving, parameters(None))[0] == "parameters.stopping.max_tokens", "what is unset is a field, too"


# ---- streams
def beams() -> pp.Parameters:
    search = pp.BeamSearch(beam_width=3, num_return_sequences=2)
    return pp.Parameters(beam_search=search, stopping=pp.Stopping(max_tokens=120, ignore_eos=True))


def test_each_answer_s_end_is_told_once(serve: Serve) -> None:
    """Of answers that end at different times."""
    own = parameters(200, n=8, temperature=1.0)
    own.seed = 5
    serving = serve(engine=LARGE)
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own)
    step_when_read(serving.llm)
    ends = [[answer.index for answer in m.finished] for m in serving.generation.GenerateStream(request, timeout=WAIT)]
    assert sorted(index for told in ends for index in told) == list(range(8)) and sum(map(bool, ends)) > 2


def test_what_beams_have_in_common_is_told_before_the_end(serve: Serve, llm: LLM) -> None:
    """Each delta for all answers is the same tokens of each; what comes last is the rest."""
    params = BeamSearchParams(beam_width=3, num_return_sequences=2, max_tokens=120, ignore_eos=True)
    [want] = llm.generate([PROMPT], params, use_tqdm=False)
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=beams())
    serving = serve()
    step_when_read(serving.llm)
    messages = list(serving.generation.GenerateStream(request, timeout=WAIT))
    settled = [delta for message in messages[:-1] for delta in message.deltas]
    assert settled and all(delta.all_answers for delta in settled)
    common = [token for delta in settled for token in delta.token_ids]
    assert len(common) > 4 and all(answer.token_ids[: len(common)] == common for answer in want.outputs)
    assert [tokens for _, tokens in streamed(messages, 2)] == [answer.token_ids for answer in want.outputs]


@pytest.mark.parametrize("own", [greedy(400), parameters(200, n=3, temperature=1.0), beams()], ids=["1", "3", "beams"])
def test_who_reads_slowly_gets_what_came_meanwhile_in_one_message(serve: Serve, own: pp.Parameters) -> None:
    serving = serve(engine=LARGE)
    own.stopping.ignore_eos, own.seed = True, 5
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own)

    async def slowly() -> list[pb.GenerateStreamResponse]:
        RPC.set(Rpc("", Client(name="somebody"), Untimed(), 0.0))
        stream = GenerationService(serving.server.gateway).GenerateStream(request, None)
        messages = [await anext(stream)]
        while not serving.llm.engine.idle or serving.llm.engine.unfinished:
            time.sleep(0.01)  # the event loop is held up: nobody reads
        for paused in (True, False):  # what the last step brought has been told
            serving.llm.loop.pause(paused).result(10)
        return messages + [message async for message in stream]

    messages = serving.loop.run(slowly())
    assert len(messages) == 2 and messages[1].HasField("usage")
    whole = serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own))
    told = [tokens for _, tokens in streamed(messages, len(whole.answers))]
    assert told == [list(answer.token_ids) for answer in whole.answers]


class Untimed:
    """The context of a call without a deadline."""

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize("blocked", ["a later message", "the first message"])
def test_who_reads_nothing_is_ended_and_holds_up_nobody(serve: Serve, blocked: str) -> None:
    serving = serve(engine=LARGE, send_timeout=0.5)
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos, own.reports.logprobs = True, 20
    asked = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own, client_request_id="lazy")
    if blocked == "the first message":
        asked = pb.GenerateStreamRequest(prompt=prompt([5] * 100), parameters=greedy(1))
        asked.parameters.reports.prompt_logprobs = 20
    few = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.port}", few) as channel:
        path = "/pagedec.v1.GenerationService/GenerateStream"
        stub = channel.unary_stream(path, pb.GenerateStreamRequest.SerializeToString)
        lazy = stub(asked, timeout=20)
        quick = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=greedy(30))
        deadline = time.monotonic() + 20
        while not serving.server.gateway.running:
            assert time.monotonic() < deadline
        while serving.server.gateway.running:
            assert sum(len(m.deltas[0].token_ids) for m in serving.generation.GenerateStream(quick) if m.deltas) == 30
            assert time.monotonic() < deadline
        with pytest.raises(grpc.RpcError) as caught:
            list(lazy)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(caught.value) == "READER_TOO_SLOW"


# ---- texts
def test_a_text_s_forms(text_server: Serving) -> None:
    own = greedy(6)
    asked = prompt("The capital of France is")
    plain = ask(text_server, own, prompt=asked)
    own.reports.no_text = True
    bare = ask(text_server, own, prompt=asked)
    assert plain.answers[0].text and not bare.answers[0].text
    assert bare.answers[0].token_ids == plain.answers[0].token_ids
    own = greedy(6)
    own.truncate_prompt_tokens = 2
    assert ask(text_server, own, prompt=asked).prompt.num_tokens == 2 < plain.prompt.num_tokens
    chat = prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", content="Say hello.")])
    talked = ask(text_server, greedy(3), prompt=prompt_pb2.Prompt(chat=chat))
    written = text_server.models.ApplyChatTemplate(mb.ApplyChatTemplateRequest(chat=chat))
    assert talked.prompt.text == written.text and talked.prompt.token_ids == written.token_ids
    assert "Say hello." in written.text and not plain.prompt.text


def test_the_model_s_services(text_server: Serving) -> None:
    models = text_server.models
    [listed] = models.ListModels(mb.ListModelsRequest()).models
    model = models.GetModel(mb.GetModelRequest()).model
    assert model == listed == models.GetModel(mb.GetModelRequest(name="smollm2")).model
    assert (model.name, model.max_model_len, model.num_blocks, model.has_chat_template) == ("smollm2", 512, 96, True)
    assert (
        model.kv_cache_dtype == "auto"
        and model.block_size == 16
        and model.vocab_size > 40_000
        and model.end_token_ids
        and model.max_num_seqs > 1
    )
    assert {"ngram", "lookahead"} <= {*model.speculation_methods} and {"sampling", "beam"} <= {*model.decoders}
    read = models.Tokenize(mb.TokenizeRequest(prompt=prompt("Hello, world")))
    assert "".join(read.texts) == "Hello, world" and len(read.texts) == len(read.token_ids)
    assert models.Detokenize(mb.DetokenizeRequest(token_ids=read.token_ids)).text == "Hello, world"
    ended = [*read.token_ids, model.end_token_ids[0]]
    assert models.Detokenize(mb.DetokenizeRequest(token_ids=ended)).text == "Hello, world"
    assert len(models.Detokenize(mb.DetokenizeRequest(token_ids=ended, special_tokens=True)).text) > 12
    with pytest.raises(grpc.RpcError) as caught:
        models.Detokenize(mb.DetokenizeRequest(token_ids=[2**31]))
    assert details(caught.value)["BadRequest"].field_violations[0].field == "token_ids"
    for call in (
        lambda: models.GetModel(mb.GetModelRequest(name="other")),
        lambda: models.Tokenize(mb.TokenizeRequest(prompt=prompt("x"), model="other")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert reason(caught.value) == "MODEL_NOT_FOUND"


def test_tools_are_written_in_one_order_that_is_the_usual_one() -> None:
    """The messages' tables have none: in each process, and so on each replica, the prompt was another one."""
    chat = as_chat(
        [{"role": "user", "content": "Hi"}, CALLS], tools=[TOOL], template_kwargs={"b": 1, "a": {"z": 1, "c": 2}}
    )
    for _ in range(3):
        chat = prompt_pb2.Chat.FromString(chat.SerializeToString())
        messages, options = read_chat(chat)
        assert json.dumps(options["tools"]) == json.dumps([TOOL])
        assert json.dumps(messages[1]) == json.dumps(CALLS)
        assert json.dumps(options["template_kwargs"]) == '{"a": {"c": 2, "z": 1}, "b": 1}'
