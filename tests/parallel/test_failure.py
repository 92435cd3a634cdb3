"""What goes wrong in a worker is told to the engine, whatever its class is like."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.executor.channel import Channel, Gone, Kind
from pagedec.executor.child import _carry_out, serve, work
from pagedec.executor.failure import pack_error, unpack_error
from pagedec.executor.ray import _Actor
from pagedec.executor.reception import HELLO_BYTES
from pagedec.runtime.loading import Ranks
from tests.parallel.test_ranks_ahead import Sleepy, Told, step_of

HERE = __name__


class OfTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unshown(ValueError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("made up")

    def __repr__(self) -> str:
        raise RuntimeError("of repr")


class Another(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("made up",)


def of_a_function() -> Exception:
    class Inner(ValueError):
        pass

    return Inner("made up")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OfTwo(1, 2), r"OfTwo\('1 and 2'\)"),
        (Unshown(1, 2), "a Unshown that cannot be shown"),
        (Another("made up"), r"Another\('made up'\)"),
        (of_a_function(), r"Inner\('made up'\)"),
        (ValueError("made up", threading.Lock()), r"ValueError\('made up', <unlocked"),
    ],
)
def test_what_cannot_be_made_again_says_the_same(error: Exception, text: str) -> None:
    error.add_note("there")
    with pytest.raises(RuntimeError, match=f"^{text}") as caught:
        raise unpack_error(pack_error(error))
    assert caught.value.__notes__ == ["there"]


def test_a_class_that_the_engine_lacks() -> None:
    """As that of a model whose code came with it."""
    module = types.ModuleType("test_failure_elsewhere")
    module.Elsewhere = type("Elsewhere", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    payload = pack_error(module.Elsewhere("made up"))
    del sys.modules[module.__name__]
    with pytest.raises(RuntimeError, match=r"^Elsewhere\('made up'\)$"):
        raise unpack_error(payload)


def test_others_stay_what_they_are() -> None:
    error = InvalidArgument("field", 3, "must be 4")
    error.add_note("there")
    again = unpack_error(pack_error(error))
    assert type(again) is InvalidArgument and str(again) == str(error) and again.__notes__ == ["there"]
    assert len(pack_error(ValueError(threading.Lock(), "x" * 10**6))) < 10**4


def cut_off(config: EngineConfig, ranks: Ranks) -> NoReturn:
    pickle.loads(b"")
    raise AssertionError


def refused(config: EngineConfig, ranks: Ranks) -> NoReturn:
    raise InvalidArgument("field", 3, "must be 4")


@pytest.fixture
def loading() -> Iterator[Callable[[str], Any]]:
    """What a worker says that loads so, in a thread of the test."""
    ends = list(map(Channel, socket.socketpair()))

    def work(load: str) -> None:
        try:
            serve(ends[1], f"{HERE}:{load}")
        except EOFError:
            ends[1].close()

    def load(name: str) -> Any:
        threads.append(threading.Thread(target=work, args=(name,)))
        threads[0].start()
        config = EngineConfig.from_kwargs(model="none", skip_tokenizer_init=True).to_kwargs()
        ends[0].send(Kind.LOAD, json.dumps({"config": config, "rank": 0, "world": 1}).encode())
        kind, payload = ends[0].receive()
        assert kind == Kind.FAILED
        return unpack_error(payload)

    threads: list[threading.Thread] = []
    yield load
    ends[0].close()
    threads[0].join(20)
    assert not threads[0].is_alive()


def test_a_file_that_was_cut_off_is_not_an_engine_that_is_gone(loading: Callable[[str], Any]) -> None:
    """The worker ended, in silence, and was started again, as often."""
    error = loading("cut_off")
    assert isinstance(error, EOFError) and not isinstance(error, Gone)
    assert "in cut_off" in error.__notes__[0], "where it comes from"


def test_what_the_caller_has_done_wrong_is_said_in_a_line(loading: Callable[[str], Any]) -> None:
    error = loading("refused")
    assert isinstance(error, InvalidArgument) and not hasattr(error, "__notes__")


at_work, is_over = threading.Event(), threading.Event()


def waits_for_a_rank(config: EngineConfig, ranks: Ranks) -> NoReturn:
    at_work.set()
    is_over.wait(20)
    raise AssertionError


def test_an_engine_that_is_gone_while_a_rank_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told one of a step and was killed: the rank waited for as long as a step may take, ten minutes."""
    monkeypatch.setattr("pagedec.executor.child.PULSE_SECONDS", 0.01)
    ours, theirs = map(Channel, socket.socketpair())
    config = EngineConfig.from_kwargs(model="none", skip_tokenizer_init=True).to_kwargs()
    ours.send(Kind.LOAD, json.dumps({"config": config, "rank": 0, "world": 1}).encode())
    left = threading.Event()
    with ThreadPoolExecutor() as pool:
        run = pool.submit(work, theirs, f"{HERE}:waits_for_a_rank", when_left=left.set)
        assert at_work.wait(20)
        ours.close()
        told = left.wait(20)
        is_over.set()
        run.result(20)
    theirs.close()
    assert told


def test_an_actor_that_cannot_read_what_it_is_told() -> None:
    """A node of a cluster with another version, say: Ray names the method that has ended, and not why."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        token, niceness = "token", os.getpriority(os.PRIO_PROCESS, 0)
        given = "127.0.0.1", listener.getsockname()[1], token, 0, niceness, f"{HERE}:refused"
        with ThreadPoolExecutor() as pool:
            run = pool.submit(_Actor("[]").run, *given)
            end, _ = listener.accept()
            with end:
                assert json.loads(end.recv(HELLO_BYTES, socket.MSG_WAITALL))["token"] == token
                channel = Channel(end)
                order = {"config": {"of_another_version": 1}, "rank": 0, "world": 1}
                channel.send(Kind.LOAD, json.dumps(order).encode())
                kind, payload = channel.receive()
            assert isinstance(run.exception(20), InvalidArgument)
    error = unpack_error(payload)
    assert kind == Kind.BROKEN and isinstance(error, InvalidArgument) and "of_another_version" in str(error)


def test_a_step_that_reads_what_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: Any) -> NoReturn:
        raise EOFError("Ran out of input")

    worker = Sleepy()
    monkeypatch.setattr(worker, "execute", execute)
    monkeypatch.setattr(worker, "is_lost", lambda: False)
    kind, payload = _carry_out(Told(), worker, step_of(1, masked=False))  # type: ignore[arg-type]
    assert kind == Kind.FAILED and isinstance(payload, bytes)
    assert isinstance(unpack_error(payload), EOFError)
