"""What a server logs: a line for each call with the names of its requests, and never what anybody has sent."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pagedec.errors import NotFound
from pagedec.serve import logs
from pagedec.serve.calls import RPC, Calls
from pagedec.serve.logs import OTHERS, begin_logging
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from pagedec.v1 import open_inference_service_pb2 as ob
from pagedec.v1 import open_inference_service_pb2_grpc as oip
from pagedec.v1 import prompt_pb2 as pr
from pagedec.v1 import session_service_pb2 as sp
from tests.serve.serving import Serving, greedy, parameters, prompt
from tests.support import wait_for

Serve = Callable[..., Serving]
MARKER = "xyzzy plugh"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], io.StringIO]]:
    logger, written = logging.getLogger("pagedec"), io.StringIO()
    loggers = [logger, *map(logging.getLogger, OTHERS)]
    before = [(own.handlers[:], own.level, own.propagate) for own in loggers]

    def begin(form: str) -> io.StringIO:
        begin_logging("debug", form)
        logger.handlers[0].stream = written
        return written

    yield begin
    for own, (handlers, level, propagate) in zip(loggers, before, strict=True):
        own.handlers[:], own.level, own.propagate = handlers, level, propagate


@pytest.mark.parametrize("protocol", ["batch", "triton"])
def test_our_own_mistakes_with_one_of_many_are_told_of(
    text_server: Serving, log: Callable[[str], io.StringIO], monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The stream goes on, and its own status says nothing of them."""
    written = log("json")

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(MARKER)

    monkeypatch.setattr(text_server.server.gateway, "outputs", broken)
    if protocol == "batch":
        item = pb.GenerateBatchRequest(item_id="a", request=pb.GenerateRequest(prompt=prompt("Hi")))
        [answer] = text_server.generation.GenerateBatch(iter([item]))
        assert answer.error.code == grpc.StatusCode.INTERNAL.value[0]
    else:
        asked = ob.ModelInferRequest(model_name=text_server.server.gateway.model)
        asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Hi")
        [response] = oip.GRPCInferenceServiceStub(text_server.channel).ModelStreamInfer(iter([asked]))
        assert "an error of the server, which its log tells of" in response.error_message
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    [trace] = [line["exception"] for line in lines if "exception" in line]
    assert "ZeroDivisionError" in trace and MARKER not in written.getvalue()


def test_no_line_holds_a_prompt(
    text_server: Serving, log: Callable[[str], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of good calls, of refused ones, and of our own mistakes."""
    written, serving = log("json"), text_server
    own = greedy(4)
    own.stopping.stop.append(MARKER)
    good = pb.GenerateRequest(prompt=prompt(MARKER), parameters=own, client_request_id="good")
    serving.generation.Generate(good)
    list(serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(MARKER), parameters=own)))
    bad = pb.GenerateRequest(prompt=prompt(MARKER), parameters=parameters(4, temperature=-1.0))
    too_long = pb.GenerateRequest(prompt=prompt(MARKER * 5000), parameters=greedy(4))
    schema = pb.GenerateRequest(prompt=prompt(MARKER), parameters=greedy(4))
    schema.parameters.constraint.regex = "(a"
    for wrong in (bad, too_long, schema):
        with pytest.raises(grpc.RpcError) as caught:
            serving.generation.Generate(wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert MARKER not in f"{caught.value.details()} {caught.value.trailing_metadata()}"

    def broken(name: str) -> None:
        try:
            raise KeyError(MARKER)
        except KeyError as error:
            raise RuntimeError(f"cannot take {MARKER}") from error

    monkeypatch.setattr(serving.server.gateway, "chosen", broken)
    with pytest.raises(grpc.RpcError):
        serving.generation.Generate(good)
    monkeypatch.undo()
    serving.models.Tokenize(mb.TokenizeRequest(prompt=prompt(MARKER)))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert MARKER not in written.getvalue()
    calls = [line for line in lines if line["logger"] == "pagedec.calls" and "code" in line]
    assert [line["code"] for line in calls] == [
        "OK", "OK", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "INVALID_ARGUMENT", "INTERNAL", "OK",
    ]  # fmt: skip
    assert calls[0]["request_ids"][0].endswith("/good") and calls[1]["request_ids"][0].startswith("request-")
    assert calls[0]["method"] == "/pagedec.v1.GenerationService/Generate" and calls[0]["seconds"] > 0
    [trace] = [line["exception"] for line in lines if "exception" in line]
    assert "KeyError" in trace and "RuntimeError" in trace and "in broken" in trace


def test_no_error_of_any_service_repeats_what_was_sent(text_server: Serving, log: Callable[[str], io.StringIO]) -> None:
    """Sessions, Triton's service and models, each in all ways in which a text may be wrong."""
    written, serving = log("text"), text_server
    infer = oip.GRPCInferenceServiceStub(serving.channel)
    own = serving.sessions.OpenSession(sp.OpenSessionRequest(prompt=prompt(MARKER)))
    branch = {"session_id": own.session_id, "branch": "0"}
    chat = pr.ChatMessage(role=MARKER, content=MARKER)
    wrong: list[tuple[Callable[[Any], Any], Any]] = [
        (serving.sessions.OpenSession, sp.OpenSessionRequest(prompt=prompt(MARKER * 9000))),
        (serving.sessions.OpenSession, sp.OpenSessionRequest(prompt=pr.Prompt(chat=pr.Chat(messages=[chat] * 600)))),
        (serving.sessions.OpenSession, sp.OpenSessionRequest(model=MARKER)),
        (serving.sessions.Append, sp.AppendRequest(**branch, text=MARKER * 9000)),
        (serving.sessions.Append, sp.AppendRequest(**branch, message=chat)),
        (serving.sessions.Append, sp.AppendRequest(session_id=MARKER, branch=MARKER, text=MARKER)),
        (serving.sessions.Append, sp.AppendRequest(session_id=own.session_id, branch=MARKER, text=MARKER)),
        (
            serving.sessions.Score,
            sp.ScoreRequest(**branch, continuations=[sp.Continuation(text=MARKER), sp.Continuation(text=MARKER * 999)]),
        ),
        (
            serving.sessions.Rollback,
            sp.RollbackRequest(**branch, mark=sp.Mark(num_tokens=2, digest=MARKER.encode())),
        ),
        (serving.sessions.ListSessions, sp.ListSessionsRequest(page_token=MARKER)),
        (serving.models.GetModel, mb.GetModelRequest(name=MARKER)),
        (serving.models.Tokenize, mb.TokenizeRequest(prompt=prompt(MARKER * 9000))),
        (
            serving.models.ApplyChatTemplate,
            mb.ApplyChatTemplateRequest(chat=pr.Chat(messages=[pr.ChatMessage(role="", content=MARKER)])),
        ),
        (infer.ModelInfer, _inference(serving, MARKER * 9000, "{}")),
        (infer.ModelInfer, _inference(serving, MARKER, MARKER)),
        (infer.ModelInfer, _inference(serving, MARKER, json.dumps({"temperature": MARKER}))),
        (infer.ModelInfer, _inference(serving, MARKER, json.dumps({"stop": [MARKER, 5]}))),
        (infer.ModelInfer, ob.ModelInferRequest(model_name=MARKER)),
    ]
    for call, asked in wrong:
        with pytest.raises(grpc.RpcError) as caught:
            call(asked)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), asked
        assert MARKER not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
    asked = sp.GenerateOnBranchRequest(**branch, parameters=greedy(2))
    asked.parameters.custom.name = MARKER
    with pytest.raises(grpc.RpcError) as caught:
        list(serving.sessions.GenerateOnBranch(asked))
    assert MARKER not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
    for response in infer.ModelStreamInfer(iter([_inference(serving, MARKER * 9000, "{}")])):
        assert response.error_message and MARKER not in str(response)
    serving.sessions.CloseSession(sp.CloseSessionRequest(session_id=own.session_id))
    assert written.getvalue() and MARKER not in written.getvalue()


def test_tasks_that_nobody_waits_for_tell_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    """What asyncio would say of them has the error's words in it."""
    script = f"""
import asyncio, gc
from pagedec.errors import InvalidArgument
from pagedec.serve.logs import begin_logging, quiet_tasks

async def main():
    async def fails():
        raise InvalidArgument("prompt", "{MARKER}", "{MARKER}")
    quiet_tasks(asyncio.get_running_loop())
    task = asyncio.create_task(fails())
    await asyncio.sleep(0.01)
    del task
    gc.collect()

begin_logging("info", "text")
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    told = capfd.readouterr().err
    assert "Task exception was never retrieved" in told and "InvalidArgument" in told and MARKER not in told


class Gone:
    """The context of a call whose client has gone before anybody was told."""

    def peer(self) -> str:
        return ""

    def time_remaining(self) -> float | None:
        return None

    async def abort(self, code: Any, details: str, trailing_metadata: Any) -> None:
        raise grpc.aio.InternalError(MARKER)

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError(MARKER)


@pytest.mark.parametrize("kind", ["sends", "is refused", "fails"])
def test_calls_that_are_gone_leave_a_line(log: Callable[[str], io.StringIO], kind: str) -> None:
    """Not a trace of what gRPC says when it cannot send; our own mistakes have theirs."""
    written, context = log("json"), Gone()

    async def call() -> None:
        async with Calls(None, send_timeout=1.0).around("/a/B", (), context):
            assert RPC.get().client.name == "unknown"
            if kind == "is refused":
                raise NotFound("session", "a", "")
            if kind == "fails":
                raise ZeroDivisionError
            await context.write("a message")

    with pytest.raises(asyncio.CancelledError):  # of which gRPC's library logs nothing
        asyncio.run(call())
    *traces, line = [json.loads(line) for line in written.getvalue().splitlines()]
    code = {"sends": "CANCELLED", "is refused": "NOT_FOUND", "fails": "INTERNAL"}[kind]
    assert (line["message"], line["client"]) == (f"/a/B {code}", "unknown")
    assert [trace["exception"].splitlines()[-1] for trace in traces] == ["ZeroDivisionError"] * (kind == "fails")


def _inference(serving: Serving, text: str, table: str) -> ob.ModelInferRequest:
    made = ob.ModelInferRequest(model_name=serving.server.gateway.model)
    for name, own in (("text_input", text), ("sampling_parameters", table)):
        made.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(own.encode())
    return made


def test_lines_of_text(serve: Serve, log: Callable[[str], io.StringIO]) -> None:
    written, serving = log("text"), serve()
    serving.generation.Generate(
        pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2), client_request_id="one")
    )
    line = next(line for line in written.getvalue().splitlines() if "/Generate" in line)
    when, level, method, code, *fields = line.split()
    assert when.endswith("Z") and (level, code) == ("info", "OK") and method.endswith("/Generate")
    assert "code=OK" in fields and any(field.startswith("request_ids=") for field in fields)


def test_a_name_makes_no_lines_of_its_own(
    serve: Serve, log: Callable[[str], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the line of a call, nor in that of our own mistake."""
    written, serving = log("text"), serve()

    def broken(*given: object) -> None:
        raise KeyError

    monkeypatch.setattr(serving.server.gateway.admission, "seat", broken)
    named = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2), client_request_id="one\nerror: all is lost")
    with pytest.raises(grpc.RpcError):
        serving.generation.Generate(named)
    assert "all is lost" in written.getvalue()
    assert not any(line.startswith("error: all") for line in written.getvalue().splitlines())


def test_warnings_are_lines_too(log: Callable[[str], io.StringIO]) -> None:
    written = log("json")
    warnings.warn("the pool is small", UserWarning, stacklevel=1)
    [line] = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (line["level"], line["message"]) == ("warning", "the pool is small")


@pytest.mark.parametrize("name", ["opentelemetry.exporter.otlp.proto.grpc.exporter", "grpc._cython.cygrpc", "asyncio"])
def test_what_libraries_log_are_lines_too(
    log: Callable[[str], io.StringIO], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """As of spans that no collector takes. Without the words of an exception, which may be a client's."""
    written = log("json")
    try:
        raise ValueError(MARKER)
    except ValueError:
        logging.getLogger(name).exception("it failed")
    logging.getLogger(name).info("not worth a line")
    [line] = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (line["level"], line["logger"], line["message"]) == ("error", name, "it failed")
    assert line["exception"].endswith("ValueError") and capfd.readouterr().err == ""


def test_a_header_that_is_no_text_is_not_repeated(serve: Serve, log: Callable[[str], io.StringIO]) -> None:
    """gRPC's library would, of whatever has a wrong byte in it: a token, too."""
    serving, written = serve(), log("json")
    with socket.create_connection(("127.0.0.1", serving.server.port)) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 5, 1, headers()))
        wait_for(lambda: "ListModels" in written.getvalue())
    assert "Invalid encoding on 19 bytes" in written.getvalue() and MARKER not in written.getvalue()


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    """One of HTTP/2."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def headers() -> bytes:
    """Of a call with a token that has a wrong byte, each as it is."""
    given = {
        b":method": b"POST", b":scheme": b"http", b":path": b"/pagedec.v1.ModelService/ListModels", b":authority": b"x",
        b"te": b"trailers", b"content-type": b"application/grpc",
        b"authorization": b"Bearer " + MARKER.encode() + b"\xff",
    }  # fmt: skip
    return b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in given.items())


def test_what_ends_a_thread_is_a_line_too(
    log: Callable[[str], io.StringIO], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: that of an engine's the server tells of itself."""
    written = log("json")
    monkeypatch.setattr(threading, "excepthook", None)
    logs.quiet_threads({"told"})

    def fail(error: BaseException) -> None:
        raise error

    for name, error in (("told", ValueError(MARKER)), ("one", ValueError(MARKER)), ("two", SystemExit(1))):
        thread = threading.Thread(target=fail, args=(error,), name=name)
        thread.start()
        thread.join()
    [line] = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (line["level"], line["message"]) == ("error", "the thread one has ended")
    assert line["exception"].endswith("ValueError") and capfd.readouterr().err == ""


@pytest.mark.parametrize("length", [100, 5000])
def test_nobody_waits_for_who_reads_no_lines(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """As where a terminal was stopped, or what keeps lines hangs: what is missing is told of when he reads again."""
    monkeypatch.setattr(logs, "PATIENCE", 0.01)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0) as read, open(writing, "w") as stream:
        handler = logs._Stream(stream)
        handler.setFormatter(logs._Json())

        def say(text: str) -> None:
            handler.handle(logging.LogRecord("pagedec.calls", logging.INFO, "", 0, text, (), None))

        for i in range(1500):
            say(f"{i:04d} " + "x" * length)
        before = b"".join(iter(lambda: read.read(2**16) or b"", b"")).decode()
        say("again")
        after = b"".join(iter(lambda: read.read(2**16) or b"", b"")).decode()
    whole = [json.loads(line)["message"] for line in before.split("\n")[:-1]]
    missing, last = [json.loads(line)["message"] for line in after.split("\n")[-3:-1]]
    assert [int(text[:4]) for text in whole] == list(range(len(whole))) and len(whole) > 3
    assert missing == f"{1500 - len(whole)} lines are missing: nobody has read standard error" and last == "again"


def test_a_long_stream_has_a_short_line(serve: Serve, log: Callable[[str], io.StringIO]) -> None:
    written, serving = log("json"), serve()
    one = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(1))
    items = [pb.GenerateBatchRequest(item_id=str(i), request=one) for i in range(150)]
    assert len(list(serving.generation.GenerateBatch(iter(items)))) == 150
    [line] = [json.loads(line) for line in written.getvalue().splitlines() if "GenerateBatch" in line]
    assert len(line["request_ids"]) == 100
