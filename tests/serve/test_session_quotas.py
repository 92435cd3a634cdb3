"""What a client's sessions may hold together: refused beyond it, and counted once, whatever calls are on their way."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from pagedec import AsyncLLM
from pagedec.serve.answers import Events
from pagedec.serve.calls import Calls
from pagedec.v1 import prompt_pb2
from pagedec.v1 import session_service_pb2 as pb
from tests.serve.serving import Loop, Serving, close_sessions, details, greedy, parameters, prompt, reason
from tests.serve.test_session_service import ADA, BOB, KEYS, PROMPT, Held, ids, refused
from tests.support import wait_for

Serve = Callable[..., Serving]
FULL = ("RESOURCE_EXHAUSTED", "SESSION_LIMIT")


def test_quotas_are_each_client_s_own(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve(api_keys=str(tmp_path / "keys.toml"))
    ada, bob = Held(serving, metadata=ADA), Held(serving, metadata=BOB)
    ada.call("Fork", pb.ForkRequest, count=2)
    with pytest.raises(grpc.RpcError) as caught:
        ada.call("Fork", pb.ForkRequest, count=2)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason(caught.value) == "SESSION_LIMIT"
    [violation] = details(caught.value)["QuotaFailure"].violations
    quota, more = "api_keys.ada.max_branches", "they hold 3 branches, and 2 more are asked for"
    assert violation.subject == quota
    assert violation.description == f"{quota} is 4: a client's sessions may hold no more; {more}"
    assert refused(lambda: ada.generate(parameters(2, n=2), keep=pb.Keep(all=True))) == FULL
    ada.generate(parameters(2, n=1), keep=pb.Keep(all=True))
    assert refused(lambda: Held(serving, metadata=ADA)) == FULL
    bob.call("Fork", pb.ForkRequest, count=9)
    assert refused(lambda: bob.call("Append", pb.AppendRequest, token_ids=ids(*PROMPT, *PROMPT))) == FULL
    with pytest.raises(grpc.RpcError, match="api_keys.bob.max_session_tokens is 100: "):
        bob.generate(greedy(61))
    bob.generate(greedy(60))
    ada.close("0.0", "0.1", "0.2")
    ada.call("Fork", pb.ForkRequest, count=3)
    ada.close()
    Held(serving, metadata=ADA).close()
    bob.close()
    assert len(serving.server.leases) == 0 and not serving.server.leases._branches


def test_what_was_taken_back_makes_room(serve: Serve, tmp_path: Path) -> None:
    """A quota counts what lives where it would refuse somebody; a neighbour's tokens are his, whoever is counted."""
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve(api_keys=str(tmp_path / "keys.toml"))
    bob, other = Held(serving, metadata=BOB), Held(serving, metadata=ADA)
    other.generate(greedy(8))
    wanted, room = other.tokens(), 100 - len(PROMPT)
    for token in (5, 6, 7):
        bob.call("Append", pb.AppendRequest, token_ids=ids(*[token] * room))
        assert refused(lambda: bob.call("Append", pb.AppendRequest, token_ids=ids(9))) == FULL
        bob.call("Rollback", pb.RollbackRequest, num_tokens=room)
    rows = [pb.Continuation(token_ids=ids(*[token] * 10)) for token in (8, 9)]
    bob.call("Score", pb.ScoreRequest, continuations=rows)
    bob.call("Append", pb.AppendRequest, token_ids=ids(*[10] * room))
    other.call("Rollback", pb.RollbackRequest, num_tokens=8)
    other.generate(greedy(8))
    assert other.tokens() == wanted
    bob.close(), other.close()


def test_without_quotas_a_client_may_have_half_of_what_there_is(serve: Serve, tmp_path: Path) -> None:
    keys = "[eve]\ntokens = ['0123456789abcdef-eve']\n[ann]\ntokens = ['0123456789abcdef-ann']\n"
    (tmp_path / "keys.toml").write_text(keys, encoding="utf-8")
    engine = {"max_parked_branches": 9, "max_parked_tokens": 4 * len(PROMPT)}
    serving = serve(engine, api_keys=str(tmp_path / "keys.toml"))
    eve = (("authorization", "Bearer 0123456789abcdef-eve"),)
    ann = (("authorization", "Bearer 0123456789abcdef-ann"),)
    first, second = Held(serving, metadata=eve), Held(serving, metadata=eve)
    assert refused(lambda: Held(serving, metadata=eve)) == FULL, "of tokens"
    first.call("Fork", pb.ForkRequest, count=2)
    with pytest.raises(grpc.RpcError) as caught:
        second.call("Fork", pb.ForkRequest, count=1)
    said = (
        "max_client_branches is 4: a client's sessions may hold no more; they hold 4 branches, and 1 more is asked for"
    )
    assert caught.value.details() == said
    other = Held(serving, metadata=ann)
    other.call("Fork", pb.ForkRequest, count=3)
    for held in (first, second, other):
        held.close()


def test_a_session_that_is_closed_while_its_last_message_is_made_counts_no_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is done in a thread where much is reported."""
    making, going_on, make = threading.Event(), threading.Event(), Events._message

    def waits(events: Events, output: Any, text: Any) -> Any:
        if output.finished:
            making.set()
            assert going_on.wait(60)
        return make(events, output, text)

    monkeypatch.setattr(Events, "_message", waits)
    serving = serve(max_client_branches=5)
    own = parameters(60, n=4)
    own.reports.logprobs = 20
    for closed in ((), ("0",)):
        held = Held(serving)
        answers = held.call(
            "GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own, keep=pb.Keep(all=True), final_only=True
        )
        assert making.wait(60)
        held.close(*closed)
        going_on.set()
        assert refused(functools.partial(list, answers))[0] in ("NOT_FOUND", "FAILED_PRECONDITION")
        leases = serving.server.leases
        assert not leases._leases and not leases._branches
        wait_for(lambda: not serving.llm.engine.sessions.num_branches)
        making.clear(), going_on.clear()
    Held(serving).close()


def test_what_was_kept_is_counted_once_while_the_last_message_is_sent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for as long as its client reads nothing."""
    sending, going_on, send = threading.Event(), threading.Event(), Calls._send

    async def waits(calls: Calls, context: Any, message: Any) -> None:
        if isinstance(message, pb.GenerateOnBranchResponse) and message.finished:
            sending.set()
            assert await asyncio.to_thread(going_on.wait, 60)
        await send(calls, context, message)

    monkeypatch.setattr(Calls, "_send", waits)
    serving = serve(max_client_branches=8, max_client_session_tokens=200)
    held = Held(serving)
    own = parameters(20, n=4)
    own.stopping.ignore_eos = True
    answers = held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own, keep=pb.Keep(all=True))
    assert sending.wait(60)
    held.call("Fork", pb.ForkRequest, "0.0", count=2)  # 7 branches
    other = Held(serving)  # 8, and two prompts of 40 tokens with four answers of 20
    with pytest.raises(grpc.RpcError, match="they hold 8 branches, and 1 more is asked for"):
        held.call("Fork", pb.ForkRequest, "0.0", count=1)
    other.call("Append", pb.AppendRequest, token_ids=ids(*PROMPT))
    with pytest.raises(grpc.RpcError, match="they hold 200 tokens, and 1 more is asked for"):
        other.call("Append", pb.AppendRequest, token_ids=ids(5))
    going_on.set()
    assert len(list(answers)[-1].branches) == 4
    held.close(), other.close()
    assert not serving.server.leases._branches and not serving.server.leases._tokens


@pytest.mark.parametrize("rpc", ["GenerateOnBranch", "Score"])
def test_what_is_promised_and_not_kept_counts_for_its_client_while_it_runs(
    serve: Serve, tmp_path: Path, rpc: str
) -> None:
    """The engine counts it among all sessions' tokens: else one client's calls keep the others out."""
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve({"max_parked_tokens": 200}, api_keys=str(tmp_path / "keys.toml"))
    leases, sessions = serving.server.leases, serving.llm.engine.sessions

    def begun(bob: Held, num_tokens: int) -> Any:
        if rpc == "GenerateOnBranch":
            own = greedy(num_tokens)
            own.stopping.ignore_eos = True
            return bob.call(rpc, pb.GenerateOnBranchRequest, parameters=own, keep=pb.Keep(none=True), final_only=True)
        rows = [
            pb.Continuation(token_ids=ids(*range(5, 5 + num_tokens - 10))),
            pb.Continuation(token_ids=ids(*[9] * 10)),
        ]
        asked = pb.ScoreRequest(session_id=bob.id, branch="0", continuations=rows)
        return serving.sessions.Score.future(asked, metadata=BOB)

    def ended(call: Any) -> None:
        call.result() if rpc == "Score" else list(call)

    for is_cancelled in (True, False):
        bob = Held(serving, metadata=BOB)
        never = functools.partial(lambda held: ended(begun(held, 101)), bob)
        assert refused(never) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        serving.llm.loop.pause().result()
        call = begun(bob, 50)
        wait_for(lambda: sessions._num_promised == 50)
        assert leases._tokens == {"bob": 50}
        more = functools.partial(bob.call, "Append", pb.AppendRequest, token_ids=ids(*[5] * 11))
        assert refused(more) == FULL
        assert refused(lambda: Held(serving, metadata=BOB)) == FULL
        Held(serving, metadata=ADA).close()
        if is_cancelled:
            call.cancel()
        serving.llm.loop.pause(False).result()
        if not is_cancelled:
            ended(call)
        wait_for(lambda: not leases._tokens and not sessions._num_promised)
        bob.close()


def test_continuations_count_by_their_tokens(text_server: Serving) -> None:
    """However many characters they have."""
    opened = text_server.sessions.OpenSession(pb.OpenSessionRequest(prompt=prompt("Once upon a time")))
    rows = [pb.Continuation(text=" there was a king"), pb.Continuation(text=" there were many kings")]
    asked = pb.ScoreRequest(session_id=opened.session_id, branch="0", continuations=rows)
    text_server.llm.loop.pause().result()
    call = text_server.sessions.Score.future(asked)
    wait_for(lambda: text_server.llm.engine.sessions._num_promised)
    assert list(text_server.server.leases._tokens.values()) == [text_server.llm.engine.sessions._num_promised]
    text_server.llm.loop.pause(False).result()
    assert len(call.result().scores) == 2 and not text_server.server.leases._tokens
    text_server.sessions.CloseSession(pb.CloseSessionRequest(session_id=opened.session_id))


def test_messages_count_for_as_long_as_a_branch_has_them(text_server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken back by one, they make room when no other has them either."""
    close_sessions(text_server)
    leases, stub = text_server.server.leases, text_server.sessions
    monkeypatch.setattr(leases, "_config", replace(leases._config, max_client_session_tokens=2000))
    table = struct_pb2.Struct()
    table.update({"x": "y" * 4000})
    hello = prompt_pb2.ChatMessage(role="user", content="hello")
    chat = prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=[hello]))
    name = stub.OpenSession(pb.OpenSessionRequest(prompt=chat)).session_id
    own = {"session_id": name, "branch": "0"}
    mark = stub.GetBranch(pb.GetBranchRequest(**own)).mark

    def filled() -> None:
        for _ in range(3):
            stub.Append(pb.AppendRequest(message=said, **own))

    said = prompt_pb2.ChatMessage(role="user", content="and", fields=table)
    more = functools.partial(stub.Append, pb.AppendRequest(message=said, **own))
    filled()
    assert refused(more) == FULL
    stub.Rollback(pb.RollbackRequest(mark=mark, **own))
    with leases.bringing(leases._leases[name]):
        assert refused(more) == FULL, "a call may just have given them to a branch"
    filled()
    stub.Fork(pb.ForkRequest(**own))
    stub.Rollback(pb.RollbackRequest(mark=mark, **own))
    assert refused(more) == FULL, "the fork has them"
    stub.CloseSession(pb.CloseSessionRequest(session_id=name, branches=["0.0"]))
    filled()
    assert refused(more) == FULL
    stub.CloseSession(pb.CloseSessionRequest(session_id=name))
    assert not leases._num_bytes and not leases._tokens


@pytest.mark.filterwarnings("ignore:tools change nothing")
def test_what_a_chat_keeps_that_is_no_token_counts_by_its_bytes(server_loop: Loop) -> None:
    """Of tools that a template does not write, and fields and variables that it does not read: else a session of some
    tokens may hold megabytes."""
    load = functools.partial(AsyncLLM, "smollm2", num_blocks=96, max_model_len=512)
    serving = Serving(server_loop, load, max_client_session_tokens=2000).ready()
    hello, padding, stub = prompt_pb2.ChatMessage(role="user", content="hello"), {"x": "y" * 4000}, serving.sessions

    def opened(**given: Any) -> str:
        chat = prompt_pb2.Chat(messages=[hello], **given)
        return stub.OpenSession(pb.OpenSessionRequest(prompt=prompt_pb2.Prompt(chat=chat))).session_id

    table = struct_pb2.Struct()
    table.update(padding)
    names = [opened(tools=[table]), opened(template_variables=table), opened(), opened()]
    said = prompt_pb2.ChatMessage(role="user", content="and", fields=table)
    for i, kept in enumerate((True, False, False)):
        call = functools.partial(stub.Append, pb.AppendRequest(session_id=names[2], branch="0", message=said))
        if kept:
            assert call().branch.num_tokens < 100
        else:
            assert refused(call) == FULL, i
    assert refused(lambda: opened(tools=[table])) == FULL
    with pytest.raises(grpc.RpcError, match="prompt is 16075 bytes, which count as 2010 tokens"):
        opened(tools=[table] * 4)
    held = stub.GetSession(pb.GetSessionRequest(session_id=names[2])).session.num_tokens
    assert held < 100, "tokens as they are"
    for name in names:
        stub.CloseSession(pb.CloseSessionRequest(session_id=name))
    assert not serving.server.leases._num_bytes and not serving.server.leases._tokens
    serving.whole()
    serving.close()
