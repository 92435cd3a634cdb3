"""Tokens: over every service, several of several clients, read anew, with limits of each client's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagedec.errors import InvalidArgument
from pagedec.serve.access import Client, Keys, read_clients
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from pagedec.v1 import session_service_pb2 as sb
from tests.serve.serving import Serving, details, greedy, parameters, prompt, reason

Serve = Callable[..., Serving]
ALICE, OLD_ALICE, BOB, ROOT = (name * 8 for name in ("al", "ol", "bo", "ro"))
PROMPT = [5, 9, 33, 21] * 10
KEYS = f"""
[alice]
tokens = ["{ALICE}", "{OLD_ALICE}"]
max_requests = 1
[bob]
tokens = ["{BOB}"]
max_tokens = 100
[root]
tokens = ["{ROOT}"]
is_admin = true
"""


def of(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def refused(what: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        what()
    return caught.value.code().name, reason(caught.value)


def ask(serving: Serving, token: str, max_tokens: int = 4) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(max_tokens))
    return serving.generation.Generate(request, metadata=of(token))


def test_every_service_asks_for_a_token(serve: Serve, keys: Path) -> None:
    serving = serve(api_keys=str(keys), admin_port=0, probe_port=0)
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)

        def reflected(over: grpc.Channel, token: str) -> list[str]:
            stub = reflection_pb2_grpc.ServerReflectionStub(over)
            [answer] = stub.ServerReflectionInfo(iter([wanted]), metadata=of(token) if token else ())
            return [service.name for service in answer.list_services_response.service]

        health, front = health_pb2_grpc.HealthStub, serving.channel
        calls: list[Callable[[str], object]] = [
            lambda token: serving.generation.Generate(pb.GenerateRequest(), metadata=of(token) if token else ()),
            lambda token: list(serving.generation.GenerateStream(pb.GenerateStreamRequest(), metadata=of(token))),
            lambda token: list(serving.generation.GenerateBatch(iter([]), metadata=of(token) if token else ())),
            lambda token: serving.models.ListModels(mb.ListModelsRequest(), metadata=of(token) if token else ()),
            lambda token: health(front).Check(health_pb2.HealthCheckRequest(), metadata=of(token) if token else ()),
            lambda token: reflected(front, token),
            lambda token: admin.GetStats(ab.GetStatsRequest(), metadata=of(token) if token else ()),
            lambda token: list(admin.WatchCache(ab.WatchCacheRequest(), metadata=of(token))),
            lambda token: reflected(channel, token),
        ]
        for call in calls:
            assert refused(lambda call=call: call("x" * 16)) == ("UNAUTHENTICATED", "TOKEN_UNKNOWN")
        for call in (calls[0], calls[2], calls[3], calls[4], calls[5], calls[6], calls[8]):
            assert refused(lambda call=call: call("")) == ("UNAUTHENTICATED", "TOKEN_MISSING")
        for call in calls[6:]:
            assert refused(lambda call=call: call(ALICE)) == ("PERMISSION_DENIED", "NOT_ADMIN")
        assert admin.GetStats(ab.GetStatsRequest(), metadata=of(ROOT)).num_blocks == 64
        assert "pagedec.v1.AdminService" in reflected(channel, ROOT)
        names = reflected(front, ALICE)
        assert "pagedec.v1.GenerationService" in names and "pagedec.v1.AdminService" not in names
        assert ask(serving, ALICE).answers and ask(serving, OLD_ALICE).answers and ask(serving, ROOT).answers
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.probe_port}") as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        with pytest.raises(grpc.RpcError) as caught:  # nothing else is there
            admin_service_pb2_grpc.AdminServiceStub(channel).GetStats(ab.GetStatsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as caught:  # nor is anything large taken from whom nobody knows
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_nobody_s_message_is_waited_for(serve: Serve, keys: Path, method: str) -> None:
    """It may have megabytes, and never come to its end."""
    serving, over = serve(api_keys=str(keys)), threading.Event()

    def never() -> Iterator[pb.GenerateRequest]:
        over.wait(60)
        yield from ()

    def asked() -> None:
        path = f"/pagedec.v1.GenerationService/{method}"
        list(serving.channel.stream_stream(path, pb.GenerateRequest.SerializeToString)(never(), timeout=20))

    try:
        assert refused(asked) == ("UNAUTHENTICATED", "TOKEN_MISSING")
    finally:
        over.set()


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", "Bearer \xff"]
)
def test_what_is_no_token(keys: Path, header: str) -> None:
    from pagedec.serve.statuses import Refusal

    with pytest.raises(Refusal):
        Keys(str(keys)).client({"authorization": header})
    assert Keys(str(keys)).client({"authorization": f"bearer {ALICE}"}).name == "alice"


def test_limits_of_one_client_are_no_other_s(serve: Serve, keys: Path) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, api_keys=str(keys))
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own)
    call = serving.generation.GenerateStream(request, metadata=of(ALICE))
    next(call)
    with pytest.raises(grpc.RpcError) as caught:
        ask(serving, OLD_ALICE)
    found = details(caught.value)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(caught.value) == "CLIENT_REQUESTS"
    assert [violation.subject for violation in found["QuotaFailure"].violations] == ["api_keys.alice.max_requests"]
    assert found["RetryInfo"].retry_delay.ToMilliseconds() >= 100
    with serving.server.gateway.admission.seat(Client(name="bob"), 50, None):
        assert refused(lambda: ask(serving, BOB, 40)) == ("RESOURCE_EXHAUSTED", "CLIENT_TOKENS")
    assert ask(serving, BOB, 40).answers and ask(serving, ROOT).answers
    call.cancel()
    serving.whole()
    assert ask(serving, ALICE).answers


def test_what_alone_is_more_than_a_client_may_have_is_never_let_in(serve: Serve, keys: Path) -> None:
    """No later try would end otherwise, so none is asked for."""
    serving = serve(api_keys=str(keys))
    more = "may together come to 100 tokens (api_keys.bob.max_tokens)"
    stopping, drawn = "parameters.stopping.max_tokens", "parameters.sampling.n"
    for num_tokens, own, field, said in (
        (40, greedy(61), stopping, f"is 61: must be at most 60: a client's requests, prompts included, {more}, of"),
        (40, parameters(31, n=2), stopping, "is 31: must be at most 30: "),
        (97, parameters(1, n=4), drawn, "is 4: must be at most 3: "),
        (100, greedy(1), "prompt", "is 100 tokens: must be at most 99 tokens long: "),
    ):  # fmt: skip
        asked = {"prompt": prompt([5] * num_tokens), "parameters": own}
        with pytest.raises(grpc.RpcError) as once:
            serving.generation.Generate(pb.GenerateRequest(**asked), metadata=of(BOB))
        with pytest.raises(grpc.RpcError) as growing:
            list(serving.generation.GenerateStream(pb.GenerateStreamRequest(**asked), metadata=of(BOB)))
        for error in (once.value, growing.value):
            found = details(error)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "RetryInfo" not in found
            [violation] = found["BadRequest"].field_violations
            assert violation.field == field and str(error.details()).startswith(f"{field} {said}")
    opened = serving.sessions.OpenSession(sb.OpenSessionRequest(prompt=prompt(PROMPT)), metadata=of(BOB))
    named = {"session_id": opened.session_id, "branch": opened.branch.name}
    going = sb.GenerateOnBranchRequest(**named, parameters=greedy(61))
    scored = sb.ScoreRequest(**named, continuations=[sb.Continuation(text="a" * 61)])
    whole = sb.AppendRequest(**named, token_ids=prompt([5] * 60).token_ids)
    say = serving.sessions
    for ask_it, field in (
        (lambda: list(say.GenerateOnBranch(going, metadata=of(BOB))), stopping),
        (lambda: say.Score(scored, metadata=of(BOB)), "continuations"),
        (lambda: say.Append(whole, metadata=of(BOB)) and list(say.GenerateOnBranch(going, metadata=of(BOB))), "branch"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask_it()
        assert [entry.field for entry in details(caught.value)["BadRequest"].field_violations] == [field]
    serving.whole()


def test_clients_share_no_prefixes(serve: Serve, keys: Path) -> None:
    serving = serve(api_keys=str(keys))
    assert [ask(serving, token).usage.cached_tokens > 0 for token in (ALICE, BOB, OLD_ALICE, ROOT, BOB)] == [
        False, False, True, False, True,
    ]  # fmt: skip


def test_requests_of_two_clients_may_have_the_same_name(serve: Serve, keys: Path) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, api_keys=str(keys))
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    request = pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own, client_request_id="same")
    calls = [serving.generation.GenerateStream(request, metadata=of(token)) for token in (ALICE, ROOT)]
    assert [next(call).request_id for call in calls] == ["same", "same"]
    for call in calls:
        call.cancel()


# ---- the file
NONE = ("5", "1.5", "true", "1979-05-27T07:32:00Z", "[]", "{}", "[12345678901234567]", "[[['sixteencharacters']]]")
"""What are no tokens."""
NAMES = ("", "a/b", "a\\u0000b", "a\\nb")
"""What cannot be clients' names, as TOML has them."""


def test_the_file_is_read_anew(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    known = Keys(str(keys), lambda: now[0])
    assert known.client(dict(of(BOB))).name == "bob"
    keys.write_text(KEYS.replace(BOB, "bobsnewtoken1234"))
    now[0] += 2
    assert known.client(dict(of("bobsnewtoken1234"))).max_tokens == 100
    with pytest.raises(ValueError, match="the token is nobody's"):
        known.client(dict(of(BOB)))
    for wrong in ("[bob", "[bob]\ntokens = 5", f'[""]\ntokens = ["{BOB}"]', "a = " + "[" * 5000):
        caplog.clear()
        keys.write_text(wrong)
        now[0] += 2
        assert known.client(dict(of("bobsnewtoken1234"))).name == "bob", "a file that cannot be read changes nothing"
        assert "the tokens of before stay in force" in caplog.text
    keys.unlink()
    now[0] += 2
    assert known.client(dict(of("bobsnewtoken1234"))).name == "bob"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")])
def test_a_file_is_read_as_soon_as_it_can_be(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    """A mode that is mended leaves the time at which the file was written, and what the process itself was out of
    leaves the file as it is."""
    now = [0.0]
    known = Keys(str(keys), lambda: now[0])
    keys.write_text(KEYS.replace(BOB, "bobsnewtoken1234"))

    def unreadable(*_: object, **__: object) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", unreadable)
        for _ in range(3):
            now[0] += 2
            assert known.client(dict(of(BOB))).name == "bob"
    assert caplog.text.count("the tokens of before stay in force") == 1
    now[0] += 2
    assert known.client(dict(of("bobsnewtoken1234"))).name == "bob"
    with pytest.raises(ValueError, match="the token is nobody's"):
        known.client(dict(of(BOB)))


def test_a_file_that_an_editor_has_marked_as_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8-sig")
    assert len(read_clients(tmp_path / "keys.toml")) == 4


def test_a_revoked_token_is_refused_by_a_running_server(serve: Serve, keys: Path) -> None:
    serving = serve(api_keys=str(keys))
    assert ask(serving, BOB).answers
    keys.write_text(KEYS.replace(BOB, "bobsnewtoken1234"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ask(serving, BOB)
        except grpc.RpcError as error:
            assert reason(error) == "TOKEN_UNKNOWN"
            break
    assert ask(serving, "bobsnewtoken1234").answers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "is not TOML"),
        ("a = 3", "api_keys.a.table is not a table: must hold a client's tokens and limits in "),
        ("[a]", "must be a list of at least one token, each of at least 16 characters"),
        ('[a]\ntokens = ["short"]', "must be a list of at least one token, each of at least 16 characters"),
        (f'[a]\ntokens = ["{ALICE} "]', "each of at least 16 characters, with no space around it"),
        *(
            (f'[a]\ntokens = ["{ALICE}{sign}"]', "and none that is not printable ASCII")
            for sign in ("ü", r"\n1", r"\u0001")
        ),
        (f'[a]\ntokens = "{ALICE}"', "must be a list of at least one token, each of at least 16 characters"),
        (f'[a]\ntokens = ["{ALICE}"]\nmax_request = 3', "did you mean max_requests?"),
        (f'[a]\ntokens = ["{ALICE}"]\nmax_requests = 0', "api_keys.a.max_requests is 0"),
        (f'[a]\ntokens = ["{ALICE}"]\n[b]\ntokens = ["{ALICE}"]', "must be of one client only"),
        *((f"[a]\ntokens = {tokens}", "must be a list of at least one token, each of at least 16") for tokens in NONE),
        ("[[a]]", "api_keys.a.table is not a table"),
        ("[[a.tokens]]\nname = 3", "must be a list of at least one token, each of at least 16 characters"),
        (f'[a]\ntokens = ["{ALICE}"]\n[a.max_requests]', "api_keys.a.max_requests is given: must be a whole number"),
        (f'[a]\ntokens = ["{ALICE}"]\nmax_requests = 0x{"f" * 5000}', "api_keys.a.max_requests is a int that cannot"),
        (f'[a]\ntokens = ["{ALICE}"]\nmax_requests = {"9" * 5000}', "is not TOML"),
        (f'[a]\ntokens = ["{ALICE}"]\nis_admin = "no"', "api_keys.a.is_admin is given: must be true or false"),
        ("a = " + "[" * 5000, "is nested too deeply to be read"),
        ('[a]\ntokens = ["\udcff"]', "is not TOML"),
        *((f'["{name}"]\ntokens = ["{ALICE}"]', "must name each client by a text that is not empty") for name in NAMES),
    ],
)
def test_files_that_are_not_as_they_should_be(tmp_path: Path, text: str, message: str) -> None:
    """No message shows a token."""
    (tmp_path / "keys.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgument) as caught:
        read_clients(tmp_path / "keys.toml")
    assert message in str(caught.value) and ALICE not in str(caught.value) and "short" not in str(caught.value)


def test_nobody_has_no_name() -> None:
    """What a client may is checked whatever he is called."""
    with pytest.raises(InvalidArgument, match="name is '': must be a text that is not empty"):
        Client(name="")
    with pytest.raises(InvalidArgument, match="is_admin is 'no': must be true or false"):
        Client(name="ann", is_admin="no")  # type: ignore[arg-type]


def test_a_client_s_salt_is_nobody_else_s() -> None:
    alice, bob = (Client(name=name, tokens=("given",)) for name in ("alice", "bob"))
    salts = {client.salted(salt) for client in (alice, bob) for salt in ("", "x", "alice", "bob\0x")}
    assert len(salts) == 8
    assert alice.salted("x") == Client(name="alice", tokens=("given",)).salted("x")
    assert all(len(client.salted("x" * 1_000_000)) < 64 for client in (alice, bob, Client(name="ipv4:127.0.0.1")))
    shared = [Client(name=name, tokens=("given",), cache_salt="team").salted("x") for name in ("alice", "bob")]
    assert shared[0] == shared[1]


@pytest.mark.parametrize(
    "line",
    [
        "tokens = ['SECRET-0123456789', 12345678901234567]", "tokens = ['SECRET-0123456789', ['SECRET-0123456789']]",
        "tokens = {SECRET-0123456789 = 1}", "tokens = ['SECRET-0123456789']\nmax_requests = 'SECRET-0123456789'",
        "token = 'SECRET-0123456789'", "tokens = 'SECRET-0123456789",
    ],
)  # fmt: skip
def test_no_error_about_the_file_shows_a_token(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"[ann]\n{line}\n", encoding="utf-8")
    with pytest.raises(InvalidArgument) as caught:
        read_clients(tmp_path / "keys")
    assert "SECRET" not in str(caught.value)
