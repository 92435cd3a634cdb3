"""Templates and tokens, of which admission counts nothing: a client's calls take turns, and others do not wait."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import AsyncLLM
from pagedec.serve import gateway
from pagedec.serve.access import Client
from pagedec.serve.calls import RPC, Rpc
from pagedec.serve.preparing import SEATS, Preparing
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from pagedec.v1 import prompt_pb2
from pagedec.v1 import session_service_pb2 as sb
from tests.serve.conftest import Compiling
from tests.serve.serving import Loop, Serving, greedy, prompt
from tests.support import wait_for

KEYS = "[alice]\ntokens = ['alice-0123456789abcdef']\nmax_requests = 1\n[bob]\ntokens = ['bob-0123456789abcdef']\n"
ALICE = (("authorization", "Bearer alice-0123456789abcdef"),)
BOB = (("authorization", "Bearer bob-0123456789abcdef"),)


def chat(content: str) -> prompt_pb2.Chat:
    return prompt_pb2.Chat(messages=[prompt_pb2.ChatMessage(role="user", content=content)])


class Held:
    """Work that ends when it is let."""

    def __init__(self) -> None:
        self.going_on, self.lock = threading.Event(), threading.Lock()
        self.begun: list[int] = []
        self.num_inside = self.most = 0

    def work(self, number: int) -> int:
        with self.lock:
            self.begun.append(number)
            self.num_inside += 1
            self.most = max(self.most, self.num_inside)
        assert self.going_on.wait(60)
        with self.lock:
            self.num_inside -= 1
        return number


def asked(client: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """As in a call of this client's."""

    async def answer() -> Any:
        RPC.set(Rpc("", Client(name=client), None, 0.0))
        return await work

    return asyncio.create_task(answer())


def test_grammars_that_wait_for_one_that_is_compiled_have_no_threads(
    text_server: Serving, compiling: Compiling
) -> None:
    """Threads are few, and what is long of all calls needs them: sessions, long prompts, what an operator asks."""
    calls = []
    for i in range(40):  # Python's own threads are at most 32
        asked = pb.GenerateRequest(prompt=prompt([5, 9]), parameters=greedy(1))
        asked.parameters.constraint.regex = f"[0-9]{{2}}line{i}"
        calls.append(text_server.generation.Generate.future(asked))
    try:
        assert compiling.begun.wait(30)
        wait_for(lambda: len(text_server.server.gateway.running) == len(calls), 30)
        opened = text_server.sessions.OpenSession(sb.OpenSessionRequest(prompt=prompt([5, 9])), timeout=30)
        text_server.sessions.CloseSession(sb.CloseSessionRequest(session_id=opened.session_id), timeout=30)
    finally:
        compiling.go_on.set()
    for call in calls:
        call.result(60)


def test_a_client_s_work_takes_turns_and_others_do_not_wait() -> None:
    async def run() -> None:
        preparing, held = Preparing(), Held()
        own = [asked("alice", preparing.in_thread(functools.partial(held.work, i))) for i in range(2 * SEATS + 1)]
        await asyncio.to_thread(wait_for, lambda: held.num_inside == SEATS, 30)
        assert await asked("bob", preparing.in_thread(lambda: "through")) == "through"
        assert held.begun == list(range(SEATS)) and not any(task.done() for task in own)
        held.going_on.set()
        assert await asyncio.gather(*own) == list(range(2 * SEATS + 1))
        assert held.most == SEATS and sorted(held.begun) == list(range(2 * SEATS + 1))
        await asyncio.sleep(0)
        assert not preparing._seats and not preparing._num_users and not preparing._running

    asyncio.run(run())


def test_what_is_cancelled_or_fails_gives_its_seat_back() -> None:
    """That of a thread which has begun only when it has ended: else whoever cancels has as many as he likes."""

    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        preparing, held = Preparing(), Held()
        for _ in range(2 * SEATS):
            with pytest.raises(ValueError, match="no"):
                await asked("alice", preparing.in_thread(fail))
        first = [asked("alice", preparing.in_thread(functools.partial(held.work, i))) for i in range(SEATS)]
        await asyncio.to_thread(wait_for, lambda: held.num_inside == SEATS, 30)
        waiting = [asked("alice", preparing.in_thread(functools.partial(held.work, i + SEATS))) for i in range(3)]
        await asyncio.sleep(0)
        for task in (*first, waiting[0]):
            task.cancel()
        done = await asyncio.gather(*first, waiting[0], return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in done)
        assert held.begun == list(range(SEATS)), "those that wait go on waiting"
        held.going_on.set()
        assert await asyncio.gather(*waiting[1:]) == [SEATS + 1, SEATS + 2]
        assert held.most == SEATS and SEATS not in held.begun
        await asyncio.gather(*preparing._running)  # those of who was cancelled
        await asyncio.sleep(0)
        assert not preparing._seats and not preparing._num_users and not preparing._running

    asyncio.run(run())


def test_a_client_who_floods_the_templates_holds_up_nobody(
    server_loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    load: Callable[[], AsyncLLM] = functools.partial(AsyncLLM, "smollm2", num_blocks=96, max_model_len=512)
    serving = Serving(server_loop, load, api_keys=str(tmp_path / "keys.toml")).ready()
    own = pb.GenerateRequest(prompt=prompt_pb2.Prompt(chat=chat("hello")), parameters=greedy(4))
    wanted, held, render = serving.generation.Generate(own, metadata=BOB), Held(), gateway.render_chat

    def holds(tokenizer: Any, messages: Any, **options: Any) -> str:
        if messages[0]["content"].startswith("flood"):
            held.work(int(messages[0]["content"].removeprefix("flood")))
        return render(tokenizer, messages, **options)

    monkeypatch.setattr(gateway, "render_chat", holds)
    count = 40
    requests = [mb.ApplyChatTemplateRequest(chat=chat(f"flood{i}")) for i in range(count)]
    flood = [serving.models.ApplyChatTemplate.future(request, metadata=ALICE) for request in requests]
    wait_for(lambda: held.num_inside == SEATS, 60)
    got = serving.generation.Generate(own, metadata=BOB, timeout=60)
    assert list(got.answers[0].token_ids) == list(wanted.answers[0].token_ids)
    assert got.answers[0].text == wanted.answers[0].text
    for call in flood[count // 2 :]:
        call.cancel()
    held.going_on.set()
    assert all(call.result().token_ids for call in flood[: count // 2])
    assert all(call.code() is grpc.StatusCode.CANCELLED for call in flood[count // 2 :]) and held.most == SEATS
    wait_for(lambda: not serving.server.gateway.preparing._seats)
    serving.whole()
    serving.close()
