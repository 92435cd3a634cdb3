"""A server ends whatever hangs: a step that never does, a collector that does not answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from pagedec.serve import ending, gateway, server
from tests.serve.serving import WAIT, Loop, Serving

Serve = Callable[..., Serving]


def test_what_ends_what_fails_and_what_does_neither(server_loop: Loop) -> None:
    hold, done = threading.Event(), list[str]()

    def fail() -> None:
        raise KeyError("wrong")

    assert server_loop.run(ending.ended_within(WAIT, lambda: done.append("done"))) and done == ["done"]
    with pytest.raises(KeyError, match="wrong"):
        server_loop.run(ending.ended_within(WAIT, fail))
    before = set(threading.enumerate())
    assert not server_loop.run(ending.ended_within(0.01, hold.wait))
    [left] = [thread for thread in threading.enumerate() if thread not in before and thread.name == "pagedec-ending"]
    assert left.daemon, "or the process would wait for it"
    hold.set()
    left.join(WAIT)


def test_a_step_that_hangs_keeps_no_server_from_ending(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway, "CLOSE_SECONDS", 0.05)
    serving, hold = serve(), threading.Event()
    stuck = serving.llm.loop.call(lambda engine: hold.wait(WAIT))
    with caplog.at_level(logging.ERROR, "pagedec.serve"):
        serving.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a step has not ended within 0.05 s: the engine is left as it is"]
    hold.set()
    assert stuck.result(WAIT)


def test_a_collector_that_does_not_answer_keeps_no_server_from_ending(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        def __init__(self) -> None:
            self.hold = threading.Event()

        def close(self) -> None:
            self.hold.wait(WAIT)

    monkeypatch.setattr(server, "CLOSE_SECONDS", 0.05)
    serving, silent = serve(), Silent()
    serving.server._tracer = silent  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "pagedec.serve"):
        serving.close()
    silent.hold.set()
    assert "takes no spans: the last ones are lost" in caplog.text
