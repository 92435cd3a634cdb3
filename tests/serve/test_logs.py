"""What a server logs: a line for each call with the names of its requests, and never what anybody has sent."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import grpc
import pytest

from pagedec.serve.logs import begin_logging
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from tests.serve.serving import Serving, greedy, parameters, prompt

Serve = Callable[..., Serving]
MARKER = "xyzzy plugh"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], io.StringIO]]:
    logger, written = logging.getLogger("pagedec"), io.StringIO()
    before = logger.handlers[:], logger.level, logger.propagate

    def begin(form: str) -> io.StringIO:
        begin_logging("debug", form)
        logger.handlers[0].stream = written
        return written

    yield begin
    logger.handlers[:], logger.level, logger.propagate = before


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

    monkeypatch.setattr(serving.server.gateway, "check_model", broken)
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


def test_lines_of_text(serve: Serve, log: Callable[[str], io.StringIO]) -> None:
    written, serving = log("text"), serve()
    serving.generation.Generate(
        pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(2), client_request_id="one")
    )
    line = next(line for line in written.getvalue().splitlines() if "/Generate" in line)
    when, level, method, code, *fields = line.split()
    assert when.endswith("Z") and (level, code) == ("info", "OK") and method.endswith("/Generate")
    assert "code=OK" in fields and any(field.startswith("request_ids=") for field in fields)
