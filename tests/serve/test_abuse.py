"""What hostile clients send: refused with a proper status before it costs anybody else anything."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from pagedec.errors import InvalidArgument, NotFound
from pagedec.serve import answers, orders
from pagedec.serve.statuses import MAX_MESSAGE, status_of
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2, open_inference_service_pb2, parameters_pb2, prompt_pb2, session_service_pb2
from pagedec.v1 import open_inference_service_pb2_grpc as oip
from tests.serve.conftest import Compiling
from tests.serve.serving import Serving, details, greedy, prompt, reason

Serve = Callable[..., Serving]
CHAT = prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", content="hello")])


def refused(call: Callable[..., Any], request: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    return caught.value


def of(change: Callable[[pb.GenerateRequest], object]) -> pb.GenerateRequest:
    made = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2))
    change(made)
    return made


def chat(change: Callable[[prompt_pb2.Chat], object]) -> pb.GenerateRequest:
    made = prompt_pb2.Chat()
    made.CopyFrom(CHAT)
    change(made)
    return pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=made), parameters=greedy(2))


def custom(request: pb.GenerateRequest, name: str, value: float = 1.0) -> None:
    request.parameters.custom.name = "sampling"
    request.parameters.custom.parameters.fields[name].number_value = value


def table(request: pb.GenerateRequest, count: int) -> None:
    values = request.parameters.speculation.table.fields["method"].list_value.values
    for _ in range(count):
        values.add(number_value=1.0)


def tools(given: prompt_pb2.Chat, count: int) -> None:
    for _ in range(count):
        given.tools.add().update({"x": "y" * 100_000})


JSON = (
    "must be at most {} bytes: a conversation's fields, tools and variables may together have 1048576, the server's "
    "max_json_size"
)
NUMBERS = "NaN or infinite somewhere: must be what JSON can say"
MANY = "must be at most 131, the size of the vocabulary"
LARGE = "must be at most 65536 bytes, the server's max_constraint_size"
LONG = "tokens: must be at most 1048576 tokens long"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (of(lambda m: custom(m, "temperature", math.inf)), f"parameters.custom.parameters is {NUMBERS}"),
        (of(lambda m: custom(m, "x" * 70_000)), f"parameters.custom is 70033 bytes: {LARGE}"),
        (of(lambda m: table(m, 20_000)), f"parameters.speculation.table is 220024 bytes: {LARGE}"),
        (
            of(lambda m: m.parameters.logits_rules.allowed_token_ids.extend([5] * 132)),
            f"parameters.logits_rules.allowed_token_ids is 132 entries: {MANY}",
        ),
        (
            of(lambda m: m.parameters.logits_rules.logit_bias.update(dict.fromkeys(range(132), 0.5))),
            f"parameters.logits_rules.logit_bias is 132 entries: {MANY}",
        ),
        (
            of(lambda m: m.parameters.stopping.stop_token_ids.extend([5] * 132)),
            f"parameters.stopping.stop_token_ids is 132 entries: {MANY}",
        ),
        (pb.GenerateRequest(prompt=prompt([5] * 1_048_577)), f"prompt is 1048577 {LONG}"),
        (
            chat(lambda c: c.messages[0].fields.update({"x": math.nan})),
            f"prompt.chat.messages[0].fields is {NUMBERS}",
        ),
        (chat(lambda c: c.tools.add().update({"x": math.nan})), f"prompt.chat.tools[0] is {NUMBERS}"),
        (chat(lambda c: c.template_variables.update({"x": math.inf})), f"prompt.chat.template_variables is {NUMBERS}"),
        (
            chat(lambda c: c.messages[0].fields.update({"x": "y" * 1_100_000})),
            f"prompt.chat.messages[0].fields is 1100015 bytes: {JSON.format(1048576)}",
        ),
        (chat(lambda c: tools(c, 11)), f"prompt.chat.tools[10] is 100015 bytes: {JSON.format(48426)}"),
        (
            chat(lambda c: (tools(c, 10), c.template_variables.update({"x": "y" * 50_000}))),
            f"prompt.chat.template_variables is 50015 bytes: {JSON.format(48426)}",
        ),
        (
            chat(lambda c: c.messages.extend(CHAT.messages[:] * 256)),
            "prompt.chat.messages is 257 of them: must be at most 256: each has a token at least, and the context "
            "holds no more",
        ),
    ],
)
def test_what_is_too_large_or_no_number_is_not_read(
    abused: Serving, request_: pb.GenerateRequest, message: str
) -> None:
    error = refused(abused.generation.Generate, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details() == message
    details(error)


def test_lists_of_other_services_are_bounded_too(abused: Serving) -> None:
    ids = [5] * 1_048_577
    opened = abused.sessions.OpenSession(session_service_pb2.OpenSessionRequest(prompt=prompt([5])))
    own = {"session_id": opened.session_id, "branch": "0"}
    token_ids = prompt_pb2.TokenIds(ids=ids)
    asked = session_service_pb2.AppendRequest(**own, token_ids=token_ids)
    assert refused(abused.sessions.Append, asked).details() == f"token_ids.ids is 1048577 {LONG}"
    asked = session_service_pb2.AppendRequest(**own)
    asked.message.fields.update({"x": "y" * 1_100_000})
    assert (
        refused(abused.sessions.Append, asked).details() == f"message.fields is 1100015 bytes: {JSON.format(1048576)}"
    )
    open_ = session_service_pb2.OpenSessionRequest(prompt=prompt(ids))
    assert refused(abused.sessions.OpenSession, open_).details() == f"prompt is 1048577 {LONG}"
    score = session_service_pb2.ScoreRequest(**own, continuations=[session_service_pb2.Continuation()] * 65_537)
    limit = "continuations is 65537 of them: must be at most 65536"
    assert refused(abused.sessions.Score, score).details() == limit
    abused.sessions.CloseSession(session_service_pb2.CloseSessionRequest(session_id=opened.session_id))


def test_token_ids_of_the_model_service_are_bounded(text_server: Serving) -> None:
    ids = [5] * 1_048_577
    tokenize = model_service_pb2.TokenizeRequest(prompt=prompt(ids))
    assert refused(text_server.models.Tokenize, tokenize).details() == f"prompt is 1048577 {LONG}"
    detokenize = model_service_pb2.DetokenizeRequest(token_ids=ids)
    assert refused(text_server.models.Detokenize, detokenize).details() == f"token_ids is 1048577 {LONG}"


@pytest.mark.parametrize("table", ['{"\\ud800": 1}', '{"structured_outputs": {"\\ud800": 1}}'])
def test_halves_of_characters_are_told_of(text_server: Serving, table: str) -> None:
    """JSON can hold them, and a status cannot."""
    asked = open_inference_service_pb2.ModelInferRequest(model_name=text_server.server.gateway.model)
    for name, text in (("text_input", "hello"), ("sampling_parameters", table)):
        asked.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    error = refused(oip.GRPCInferenceServiceStub(text_server.channel).ModelInfer, asked)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(error) == "INVALID_FIELD"
    assert "\\ud800" in str(error.details())


def test_a_status_has_room_in_trailers() -> None:
    for error in (InvalidArgument("字" * 9999, 1, "字" * 9999), NotFound("model", "字" * 9999, "字" * 9999)):
        made = status_of(error)
        assert len(made.message.encode()) <= MAX_MESSAGE + 4
        assert made.ByteSize() < 5 * MAX_MESSAGE


def test_beams_count_as_tokens_of_their_client(serve: Serve) -> None:
    """Also those that are not answered with."""
    serving = serve(max_client_tokens=100)
    asked = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=parameters_pb2.Parameters())
    asked.parameters.stopping.max_tokens = 20
    asked.parameters.beam_search.beam_width = 8
    asked.parameters.beam_search.num_return_sequences = 1
    error = refused(serving.generation.Generate, asked)
    assert reason(error) == "INVALID_FIELD"
    assert str(error.details()).startswith("parameters.stopping.max_tokens is 20: must be at most 12: ")


def test_a_grammar_that_is_being_compiled_holds_up_nobody(text_server: Serving, compiling: Compiling) -> None:
    asked = of(lambda m: m.parameters.constraint.__setattr__("regex", "[0-9]{2}slow"))
    future = text_server.generation.Generate.future(asked)
    assert compiling.begun.wait(30)
    text_server.generation.Generate(pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2)), timeout=20)
    assert not future.done()
    compiling.go_on.set()
    future.result()


def test_branches_that_are_named_a_million_times_are_told_of_once(abused: Serving) -> None:
    opened = abused.sessions.OpenSession(session_service_pb2.OpenSessionRequest(prompt=prompt([5])))
    named: dict[str, Any] = {"session_id": opened.session_id, "branches": ["0"] * 1_000_000}
    session = abused.sessions.GetSession(session_service_pb2.GetSessionRequest(**named), timeout=30)
    tree = abused.sessions.GetTree(session_service_pb2.GetTreeRequest(**named), timeout=30)
    assert [branch.name for branch in (*session.branches, *tree.branches)] == ["0", "0"]
    abused.sessions.CloseSession(session_service_pb2.CloseSessionRequest(session_id=opened.session_id))


def test_long_messages_are_read_where_nobody_waits(abused: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million fields take seconds."""
    opened = abused.sessions.OpenSession(session_service_pb2.OpenSessionRequest(prompt=prompt([5])))
    asked = session_service_pb2.AppendRequest(session_id=opened.session_id, branch="0")
    asked.message.fields.update({"x": [1.5] * 20_000})
    chat = prompt_pb2.Chat(messages=[asked.message])
    opening = session_service_pb2.OpenSessionRequest(prompt=prompt_pb2.Prompt(chat=chat))
    threads, read = set[str](), orders.as_table

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(orders, "as_table", noted)
    refused(abused.sessions.Append, asked)
    refused(abused.sessions.OpenSession, opening)
    assert len(threads) > 0 and "servers" not in threads
    given = session_service_pb2.GenerateOnBranchRequest(session_id=opened.session_id, branch="0", parameters=greedy(2))
    table = given.parameters.speculation.table
    table.fields["method"].list_value.values.extend([struct_pb2.Value(number_value=1.0)] * 5000)
    threads.clear()
    refused(lambda message, timeout: list(abused.sessions.GenerateOnBranch(message, timeout=timeout)), given)
    assert len(threads) > 0 and "servers" not in threads
    abused.sessions.CloseSession(session_service_pb2.CloseSessionRequest(session_id=opened.session_id))


def test_many_reports_are_written_where_nobody_waits(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = serve(engine={"max_logprobs": -1})
    threads, write = set[str](), answers.as_logprobs

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return write(*given)

    monkeypatch.setattr(answers, "as_logprobs", noted)
    asked = pb.GenerateStreamRequest(prompt=prompt([5] * 100), parameters=greedy(2))
    asked.parameters.reports.prompt_logprobs = -1
    assert sum(len(message.prompt_logprobs) for message in serving.generation.GenerateStream(asked)) == 100
    assert any(name != "servers" for name in threads)
    sessions, many = serving.sessions, greedy(20)
    many.stopping.ignore_eos, many.reports.logprobs = True, -1
    session_id = sessions.OpenSession(session_service_pb2.OpenSessionRequest(prompt=prompt([5]))).session_id
    named: dict[str, Any] = {"session_id": session_id, "branch": "0"}
    list(sessions.GenerateOnBranch(session_service_pb2.GenerateOnBranchRequest(**named, parameters=many)))
    threads.clear()
    branch = sessions.GetBranch(session_service_pb2.GetBranchRequest(**named, logprobs=True))
    assert len(branch.logprobs) == 21 and len(threads) > 0 and "servers" not in threads


@pytest.fixture
def abused(serve: Serve) -> Serving:
    return serve()
