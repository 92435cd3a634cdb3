"""Health: what checks, watchers, probes and the command `pagedec health` are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedec import AsyncLLM
from pagedec.cli.main import main
from pagedec.errors import InvariantError
from pagedec.serve.leases import Leases
from pagedec.serve.lifecycle import State
from pagedec.v1 import generation_service_pb2 as pb
from tests.serve.certificates import Authority
from tests.serve.serving import Serving, parameters, prompt
from tests.support import wait_for

Serve = Callable[..., Serving]
SERVICE = "pagedec.v1.GenerationService"
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_what_checks_are_told(serve: Serve) -> None:
    serving = serve(probe_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.probe_port}") as probe:
        for channel in (serving.channel, probe):
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE, "pagedec.v1.ModelService"):
                assert stub.Check(asked(name)).status == SERVING
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(asked("no.such.Service"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            if hasattr(health_pb2, "HealthListRequest"):  # newer packages know it
                assert set(stub.List(health_pb2.HealthListRequest()).statuses) >= {"", SERVICE}


def test_all_watchers_are_told_when_one_leaves(serve: Serve) -> None:
    serving = serve()
    stub, lifecycle = health_pb2_grpc.HealthStub(serving.channel), serving.server.lifecycle
    calls = [stub.Watch(asked(SERVICE)) for _ in range(5)]
    stranger = stub.Watch(asked("no.such.Service"))
    assert [next(call).status for call in calls] == [SERVING] * 5 and next(stranger).status == UNKNOWN

    def set_state(state: State) -> None:
        serving.loop.events.call_soon_threadsafe(lifecycle.set, state)

    calls.pop(2).cancel()
    set_state(State.DRAINING)
    assert [next(call).status for call in calls] == [NOT_SERVING] * 4
    calls.pop(0).cancel()
    set_state(State.SERVING)
    assert [next(call).status for call in calls] == [SERVING] * 3
    late = stub.Watch(asked(SERVICE))
    assert next(late).status == SERVING
    for call in (*calls, late, stranger):
        call.cancel()


def test_a_scheduler_that_stalls_is_not_serving(serve: Serve) -> None:
    """Requests run, and no step ends; when one does, all is well again. Liveness stays."""
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, stall_timeout=0.5)
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt([5, 9]), parameters=own))
    next(call)
    watch = health_pb2_grpc.HealthStub(serving.channel).Watch(asked(SERVICE), timeout=30)
    assert any(told.status == SERVING for told in watch), "of a busy machine it may have been said before"
    hold = threading.Event()
    serving.llm.loop.call(lambda engine: hold.wait(30))
    assert next(watch).status == NOT_SERVING
    assert serving.server.lifecycle.state is State.STALLED
    assert health_pb2_grpc.HealthStub(serving.channel).Check(asked("")).status == SERVING
    hold.set()
    assert next(watch).status == SERVING
    call.cancel()
    watch.cancel()


def test_nobody_who_waits_is_a_stall(serve: Serve) -> None:
    serving = serve(stall_timeout=0.1)
    time.sleep(0.4)
    assert serving.server.lifecycle.state is State.SERVING


def test_what_ends_a_watch_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else sessions would outlive their leases, and nobody knew why."""

    async def fail(leases: Leases, llm: AsyncLLM) -> None:
        raise InvariantError("made up")

    monkeypatch.setattr(Leases, "watch", fail)
    serve()
    wait_for(lambda: "a watch has ended: made up" in caplog.text)


# ---- the command
def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPC_VERBOSITY", "NONE")  # the command sets it where nobody has
        status = main(["health", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serving = serve()
    address = f"127.0.0.1:{serving.server.port}"
    assert said(capsys, address) == (0, "SERVING\n", "")
    assert said(capsys, address, "--service", SERVICE) == (0, "SERVING\n", "")
    status, out, err = said(capsys, address, "--service", "no.such.Service")
    assert (status, out) == (1, "") and err.startswith(f"pagedec: {address}: NOT_FOUND: ")
    serving.loop.events.call_soon_threadsafe(serving.server.lifecycle.set, State.DRAINING)
    time.sleep(0.1)
    assert said(capsys, address, "--service", SERVICE) == (1, "NOT_SERVING\n", "")
    status, out, err = said(capsys, "127.0.0.1:1", "--timeout", "2")
    assert (status, out) == (1, "") and err.startswith("pagedec: 127.0.0.1:1: UNAVAILABLE: ")
    assert said(capsys, address, "--tls-cert", "x.pem") == (
        2, "", "pagedec: error: tls_key is null: must be given, since tls_cert is\n".replace("null", "none")
    )  # fmt: skip


def test_the_command_over_tls_with_a_token(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = Authority("ours")
    cert, key = ours.write("server", tmp_path)
    client, client_key = ours.write("client", tmp_path)
    (tmp_path / "ca.pem").write_bytes(ours.pem)
    (tmp_path / "keys.toml").write_text('[probe]\ntokens = ["sixteencharacters"]')
    (tmp_path / "token").write_text("sixteencharacters\n", "utf-8-sig")
    ca = str(tmp_path / "ca.pem")
    serving = serve(tls_cert=cert, tls_key=key, tls_client_ca=ca, api_keys=str(tmp_path / "keys.toml"))
    address = f"127.0.0.1:{serving.server.port}"
    flags = ["--tls-ca", ca, "--tls-cert", client, "--tls-key", client_key, "--timeout", "3"]
    assert said(capsys, address, *flags, "--token-file", str(tmp_path / "token")) == (0, "SERVING\n", "")
    status, _, err = said(capsys, address, *flags)
    assert status == 1 and "UNAUTHENTICATED" in err
    status, _, err = said(capsys, address, "--tls-ca", ca, "--timeout", "3")
    assert status == 1 and "UNAVAILABLE" in err
    status, _, err = said(capsys, address, "--tls-ca", str(tmp_path / "none.pem"))
    assert status == 2 and err.startswith("pagedec: error: tls_ca is ") and "cannot be read" in err
    (tmp_path / "none.pem").write_text("no certificate")
    none = tmp_path / "none.pem"
    told = f"pagedec: error: tls_ca is {none}: must hold certificates in PEM form\n"
    assert said(capsys, address, "--tls-ca", str(none)) == (2, "", told)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "must hold a token, text of one line as a header has it: there is none"),
        (b" \n", "must hold a token, text of one line as a header has it: there is none"),
        (b"sixteen\ncharacters\n", "must hold a token, text of one line as a header has it"),
        ("sixteen-charäcters".encode(), "must hold a token, text of one line as a header has it"),
        (b"\0\xff\xfe\x80sixteencharacters", "must hold a token, text of one line as a header has it"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_holds_no_token_is_named(
    data: bytes | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is asked."""
    file = tmp_path / "token"
    file.mkdir() if data is None else file.write_bytes(data)
    told = f"pagedec: error: token_file is {file}: {problem}\n"
    assert said(capsys, "127.0.0.1:1", "--token-file", str(file)) == (2, "", told)


def test_the_command_says_where_tls_is_the_reason(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Authority("ours")
    cert, key = ours.write("server", tmp_path)
    (tmp_path / "ca.pem").write_bytes(ours.pem)
    ca = str(tmp_path / "ca.pem")
    plain, secure, mutual = (
        f"127.0.0.1:{serve(**options).server.port}"
        for options in ({}, {"tls_cert": cert, "tls_key": key}, {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca})
    )
    for address, flags, hint in (
        (plain, ["--tls"], "; the server does not speak TLS: ask without --tls, --tls-ca and --tls-cert\n"),
        (secure, [], "; the server may want TLS: --tls or --tls-ca\n"),
        (secure, ["--tls"], "; its certificate is of no authority that is trusted: --tls-ca names a file of those to "),
        (mutual, ["--tls-ca", ca], "; the server may want a certificate of its clients: --tls-cert and --tls-key\n"),
    ):
        status, out, err = said(capsys, address, *flags)
        assert (status, out) == (1, "") and err.startswith(f"pagedec: {address}: UNAVAILABLE: ") and hint in err, err
    assert "TLS" not in said(capsys, "127.0.0.1:1")[2]
