"""One test for each status: its code, its reason, and the details by which a program knows what to do."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from pagedec import AsyncLLM
from pagedec.errors import (
    BranchBusy,
    BranchClosed,
    DeviceError,
    FeatureNotAvailable,
    InvalidArgument,
    ModelFileError,
    NotFound,
    RequestError,
    SessionLimit,
    SessionTooSmall,
)
from pagedec.serve.statuses import Refusal, code_of, status_of
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc, open_inference_service_pb2_grpc, prompt_pb2
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from pagedec.v1 import open_inference_service_pb2 as ob
from pagedec.v1 import session_service_pb2 as sb
from tests.serve.serving import Loop, Serving, details, greedy, parameters, prompt, reason

Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 21]
SECRET = "xyzzy-plugh"
LARGE = {"num_blocks": 1024, "max_model_len": 16384}


def failed(what: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        what()
    error: grpc.RpcError = caught.value
    return error


def endless(**fields: object) -> pb.GenerateStreamRequest:
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    return pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own, **fields)


def simple(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2), **fields)


def test_invalid_argument(serve: Serve) -> None:
    serving = serve()
    request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=parameters(8, top_p=1.5))
    error = failed(lambda: serving.generation.Generate(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(error) == "INVALID_FIELD"
    [violation] = details(error)["BadRequest"].field_violations
    assert violation.field == "parameters.sampling.top_p" and "1.5" in violation.description
    error = failed(lambda: serving.generation.Generate(pb.GenerateRequest(parameters=greedy(2))))
    assert details(error)["BadRequest"].field_violations[0].field == "prompt"
    long = pb.GenerateRequest(prompt=prompt([5] * 300), parameters=greedy(2))
    error = failed(lambda: serving.generation.Generate(long))
    assert details(error)["BadRequest"].field_violations[0].field == "prompt"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_call_without_its_message(serve: Serve, method: str) -> None:
    """gRPC's library has no answer to it."""
    call = serve().channel.stream_stream(f"/pagedec.v1.GenerationService/{method}")(iter([]), timeout=20)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(caught.value) == "MESSAGE_MALFORMED"


def test_not_found(serve: Serve) -> None:
    serving = serve()
    error = failed(lambda: serving.generation.Generate(simple(model="gpt-2")))
    assert error.code() is grpc.StatusCode.NOT_FOUND and reason(error) == "MODEL_NOT_FOUND"
    own = greedy(2)
    own.constraint.trie = "items"
    error = failed(lambda: serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own)))
    assert error.code() is grpc.StatusCode.NOT_FOUND and reason(error) == "TRIE_NOT_FOUND"


def test_failed_precondition(serve: Serve) -> None:
    serving = serve(admin_port=0)
    serving.server.lifecycle.is_ending = True
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        error = failed(lambda: admin_service_pb2_grpc.AdminServiceStub(channel).Resume(ab.ResumeRequest()))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "WRONG_STATE"


def test_resource_exhausted(serve: Serve) -> None:
    serving = serve(engine=LARGE, max_requests=1)
    call = serving.generation.GenerateStream(endless())
    next(call)
    error = failed(lambda: serving.generation.Generate(simple()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(error) == "QUEUE_FULL"
    assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() >= 100
    assert "max_requests" in error.details()
    call.cancel()
    large = pb.GenerateRequest(prompt=prompt("x" * 2**21), parameters=greedy(2))
    small = serve(max_message_size=2**20)
    assert failed(lambda: small.generation.Generate(large)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unavailable_while_the_model_is_loaded(server_loop: Loop) -> None:
    """It is told when to come again; the process lives, and no service is there yet."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    hold = threading.Event()

    def load() -> AsyncLLM:
        hold.wait(30)
        raise InvalidArgument("model", "nowhere", "must be somewhere")

    serving = Serving(server_loop, load, probe_port=0, admin_port=0, metrics_port=0)
    try:
        for call in (
            lambda: serving.generation.Generate(simple()),
            lambda: list(serving.generation.GenerateStream(endless())),
            lambda: serving.models.ListModels(mb.ListModelsRequest()),
        ):
            error = failed(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "LOADING"
            assert details(error)["RetryInfo"].retry_delay.ToSeconds() == 1
        health = health_pb2_grpc.HealthStub(serving.channel)
        told = {
            name: health.Check(health_pb2.HealthCheckRequest(service=name)).status
            for name in ("", "pagedec.v1.GenerationService", "pagedec.v1.ModelService")
        }
        assert list(told.values()) == [1, 2, 2]
        with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            assert admin.GetStats(ab.GetStatsRequest()).state == ab.SERVER_STATE_LOADING
            assert reason(failed(lambda: admin.Pause(ab.PauseRequest()))) == "LOADING"
    finally:
        hold.set()
        with pytest.raises(InvalidArgument):
            serving.starting.result(30)
        serving.channel.close()


def test_deadline_exceeded(serve: Serve) -> None:
    serving = serve(engine=LARGE)
    error = failed(lambda: list(serving.generation.GenerateStream(endless(), timeout=0.3)))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    serving.whole()


def test_cancelled(serve: Serve) -> None:
    serving = serve(engine=LARGE)
    call = serving.generation.GenerateStream(endless())
    next(call)
    call.cancel()
    assert failed(lambda: next(call)).code() is grpc.StatusCode.CANCELLED
    serving.whole()


def test_already_exists(serve: Serve) -> None:
    serving = serve(engine=LARGE)
    call = serving.generation.GenerateStream(endless(client_request_id="one"))
    next(call)
    error = failed(lambda: serving.generation.Generate(simple(client_request_id="one")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS and reason(error) == "REQUEST_EXISTS"
    call.cancel()


def test_unimplemented(serve: Serve) -> None:
    serving = serve()
    call = serving.channel.unary_unary("/pagedec.v1.GenerationService/Embed")
    assert failed(lambda: call(b"")).code() is grpc.StatusCode.UNIMPLEMENTED


def test_internal_says_nothing_of_its_cause(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = serve()

    def broken(name: str) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(serving.server.gateway, "chosen", broken)
    error = failed(lambda: serving.generation.Generate(simple()))
    assert error.code() is grpc.StatusCode.INTERNAL and reason(error) == "INTERNAL"
    assert SECRET not in str(error.details()) + str(error.trailing_metadata())
    monkeypatch.undo()
    assert serving.generation.Generate(simple()).answers


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unavailable_when_the_engine_has_failed(
    server_loop: Loop, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread has ended: liveness says so, and nobody waits for what will not come."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    engine = {"dtype": "float32", "skip_tokenizer_init": True, **LARGE}
    serving = Serving(server_loop, lambda: AsyncLLM(str(tiny_path), **engine), admin_port=0).ready()
    opened = serving.sessions.OpenSession(sb.OpenSessionRequest(prompt=prompt(PROMPT)))
    call = serving.generation.GenerateStream(endless())
    next(call)

    def broken() -> None:
        serving.llm.loop.after_step.remove(broken)
        raise RuntimeError(SECRET)

    serving.llm.loop.after_step.append(broken)
    error = failed(lambda: list(call))
    assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED"), "what runs"
    health, deadline = health_pb2_grpc.HealthStub(serving.channel), time.monotonic() + 10
    while health.Check(health_pb2.HealthCheckRequest()).status != 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    error = failed(lambda: serving.generation.Generate(simple()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "ENGINE_FAILED"
    _calls_on_sessions_say_so(serving, opened.session_id)
    with monkeypatch.context() as patch:  # it dies when they have been let in, and before its turn
        patch.setattr(serving.server.gateway, "require_engine", lambda: None)
        patch.setattr(serving.server.gateway, "require_serving", lambda: None)
        _calls_on_sessions_say_so(serving, opened.session_id, need_none={"ListSessions"})
    serving.sessions.CloseSession(sb.CloseSessionRequest(session_id=opened.session_id))  # it has ended with its engine
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        stats = admin_service_pb2_grpc.AdminServiceStub(channel).GetStats(ab.GetStatsRequest())
        assert stats.state == ab.SERVER_STATE_FAILED
    triton = open_inference_service_pb2_grpc.GRPCInferenceServiceStub(serving.channel)
    assert not triton.ServerLive(ob.ServerLiveRequest()).live
    assert not triton.ServerReady(ob.ServerReadyRequest()).ready
    serving.loop.run(serving.server.wait())
    serving.close()
    [told] = [record for record in caplog.records if record.exc_info is not None]
    assert told.getMessage() == "the engine has failed" and isinstance(told.exc_info[1], RuntimeError)


def _asked(call: Callable[..., Any], request: Message) -> None:
    answer = call(request)
    if hasattr(answer, "__next__"):
        list(answer)


def _calls_on_sessions_say_so(serving: Serving, session_id: str, need_none: Collection[str] = ()) -> None:
    """`need_none`: which have no turn in the engine."""
    own: dict[str, Any] = {"session_id": session_id}
    branch: dict[str, Any] = {**own, "branch": "0"}
    calls: dict[str, Message] = {
        "OpenSession": sb.OpenSessionRequest(prompt=prompt(PROMPT)),
        "Append": sb.AppendRequest(token_ids=prompt_pb2.TokenIds(ids=[5]), **branch),
        "Fork": sb.ForkRequest(**branch),
        "Rollback": sb.RollbackRequest(num_tokens=1, **branch),
        "Score": sb.ScoreRequest(continuations=[sb.Continuation(token_ids=prompt_pb2.TokenIds(ids=[5]))], **branch),
        "GetBranch": sb.GetBranchRequest(**branch),
        "GetSession": sb.GetSessionRequest(**own),
        "GetTree": sb.GetTreeRequest(**own),
        "ListSessions": sb.ListSessionsRequest(),
        "CloseSession": sb.CloseSessionRequest(branches=["0"], **own),
        "GenerateOnBranch": sb.GenerateOnBranchRequest(parameters=greedy(2), **branch),
    }
    assert set(calls) == set(sb.DESCRIPTOR.services_by_name["SessionService"].methods_by_name)
    for name, request in calls.items():
        if name in need_none:
            continue
        ask = getattr(serving.sessions, name)
        error = failed(functools.partial(_asked, ask, request))
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED"), name


# ---- every error of the package
@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidArgument("n", 0, "must be more"), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (FeatureNotAvailable("lora", "x", "is not there"), "UNIMPLEMENTED", "FEATURE_NOT_AVAILABLE"),
        (SessionLimit("max_parked_branches", 3, "no more"), "RESOURCE_EXHAUSTED", "SESSION_LIMIT"),
        (SessionTooSmall("max_session_branches", 3, "never"), "INVALID_ARGUMENT", "SESSION_TOO_SMALL"),
        (NotFound("request", "x"), "NOT_FOUND", "REQUEST_NOT_FOUND"),
        (BranchBusy("0", "fork"), "FAILED_PRECONDITION", "BRANCH_BUSY"),
        (BranchClosed("0", "was closed"), "NOT_FOUND", "BRANCH_CLOSED"),
        (DeviceError("x", "is gone"), "UNAVAILABLE", "DEVICE_FAILED"),
        (RequestError("x", "cannot go on"), "FAILED_PRECONDITION", "REQUEST_FAILED"),
        (ModelFileError("/srv/secret/config.json", "is broken"), "FAILED_PRECONDITION", "MODEL_FILE"),
        (ModelFileError("/srv/secret/a", "is gone", "lora_request", "a"), "FAILED_PRECONDITION", "MODEL_FILE"),
        (Refusal("UNAVAILABLE", "DRAINING", "no more", 2.0), "UNAVAILABLE", "DRAINING"),
        (ZeroDivisionError(SECRET), "INTERNAL", "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_has_a_status(error: BaseException, code: str, reason: str) -> None:
    from google.rpc import error_details_pb2

    status = status_of(error)
    info = error_details_pb2.ErrorInfo()
    assert code_of(status).name == code and status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "pagedec.dev")
    kinds = [detail.TypeName() for detail in status.details]
    assert len(set(kinds)) == len(kinds), "at most one detail of each kind"
    assert len(status.SerializeToString()) < 4096
    assert SECRET not in str(status) and "/srv/secret" not in str(status)


def test_the_page_names_every_reason() -> None:
    """In the table of its status."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "serving.md").read_text("utf-8")
    told: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `[A-Z_]+`.*$", page, re.MULTILINE):
        statuses, reasons = (set(re.findall(r"`([A-Z_]+)`", cell)) for cell in row.split("|")[1:3])
        for status in statuses:
            told.setdefault(status, set()).update(reasons)
    sources = "".join(path.read_text("utf-8") for path in (root / "pagedec" / "serve").glob("*.py"))
    made = re.findall(r"(?:Refusal|_Status)\(\s*\"([A-Z_]+)\",\s*\"([A-Z_]+)\"", sources)
    assert len(made) > 20
    assert [(status, reason) for status, reason in made if reason not in told.get(status, ())] == []
    known = {reason for _, reason in made}
    assert {r for own in told.values() for r in own if r not in known and not r.endswith("_NOT_FOUND")} == set()


def test_values_that_a_client_sent_are_not_repeated() -> None:
    status = status_of(InvalidArgument("parameters.stopping.stop", SECRET, "must be shorter"))
    assert SECRET not in str(status) and "must be shorter" in status.message
    assert len(status_of(InvalidArgument("x", 1, "y" * 10_000)).message) < 1100
