"""Workers from elsewhere come to a port that anybody can reach."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pagedec.executor import reception
from pagedec.executor.channel import Kind
from pagedec.executor.reception import HELLO_BYTES, MOST_WAITING, introduce, receive_ranks

TOKEN = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as made:
        yield made


@pytest.fixture
def connect(listener: socket.socket) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def begin(said: bytes = b"") -> socket.socket:
        made.append(socket.create_connection(listener.getsockname(), 5.0))
        made[-1].sendall(said)
        return made[-1]

    yield begin
    for end in made:
        end.close()


def nothing() -> None:
    """Nobody has ended."""


def hello(**changed: object) -> bytes:
    return json.dumps({"token": TOKEN, "rank": 0, "pid": 7, **changed}).encode().ljust(HELLO_BYTES)


STRANGERS = [
    b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES),
    b"\xff" * HELLO_BYTES,
    b"[1]".ljust(HELLO_BYTES),
    hello(token="guess"),
    hello(token=3),
    hello(token="\u00e9"),
    hello(token="\ud800"),
    hello(token=[]),
    (b'{"rank": ' + b"[" * 240).ljust(HELLO_BYTES),
    hello(rank=2),
    hello(rank=-1),
    hello(rank="0"),
    hello(rank=True),
    hello(pid=None),
]


def test_who_knows_the_token_comes_in_and_nobody_else(
    listener: socket.socket, connect: Callable[..., socket.socket]
) -> None:
    strangers = [connect(said) for said in STRANGERS]
    gone = connect(b"{")
    gone.shutdown(socket.SHUT_WR)
    silent, slow = connect(), connect(hello()[:100])
    ranks = [connect() for _ in range(2)]
    for rank in (1, 0):
        introduce(ranks[rank], TOKEN, rank)
    began = time.monotonic()
    found = receive_ranks(listener, TOKEN, 2, 30.0, nothing)
    assert time.monotonic() - began < 20  # who says nothing keeps nobody waiting
    for (channel, _), end in zip(found, ranks, strict=True):
        channel.send(Kind.PULSE, b"x")
        assert end.recv(9) == bytes([Kind.PULSE, 0, 0, 0, 1, 0, 0, 0]) + b"x"
        channel.close()
    for stranger in (*strangers, gone, silent, slow):
        stranger.settimeout(5.0)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass


def test_a_second_of_a_rank_is_turned_away(listener: socket.socket, connect: Callable[..., socket.socket]) -> None:
    first, second = connect(hello(rank=1)), connect()
    threading.Timer(0.3, lambda: introduce(second, TOKEN, 1)).start()
    threading.Timer(0.6, lambda: connect(hello())).start()
    found = receive_ranks(listener, TOKEN, 2, 30.0, nothing)
    found[1][0].send(Kind.PULSE, b"")
    assert first.recv(1) == bytes([Kind.PULSE])
    assert second.recv(1) == b""
    for channel, _ in found:
        channel.close()


def test_more_strangers_than_are_kept(listener: socket.socket, connect: Callable[..., socket.socket]) -> None:
    crowd = [connect() for _ in range(MOST_WAITING)]
    connect(hello()[: HELLO_BYTES - 1])
    threading.Timer(0.3, lambda: connect(hello())).start()
    [(channel, pid)] = receive_ranks(listener, TOKEN, 1, 30.0, nothing)
    assert pid == 7
    channel.close()
    crowd[0].settimeout(5.0)
    assert crowd[0].recv(1) == b""


def test_nobody_comes(
    listener: socket.socket, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "LOOK_SECONDS", 0.05)
    one = connect(hello(rank=1))
    with pytest.raises(TimeoutError, match=r"no worker has come for rank 0, 2 in 0\.3 s"):
        receive_ranks(listener, TOKEN, 3, 0.3, nothing)
    assert one.recv(1) == b""


def test_what_ends_a_worker_that_is_due(listener: socket.socket, connect: Callable[..., socket.socket]) -> None:
    one = connect(hello(rank=1))
    asked: list[int] = []

    def ended() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise RuntimeError("the actor has died")

    with pytest.raises(RuntimeError, match="the actor has died"):
        receive_ranks(listener, TOKEN, 2, 30.0, ended)
    assert one.recv(1) == b""
