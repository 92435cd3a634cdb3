"""What is said where there is no cluster, or one without room."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from pagedec import LLM
from pagedec.errors import InvalidArgument
from pagedec.executor import ray as ray_executor

ray = pytest.importorskip("ray", reason="ray is not installed")
WANTED = "must be HOST:PORT of a running cluster's head (6379 where nothing else was said), auto, or unset"


@pytest.fixture(autouse=True)
def is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no such cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)


def test_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would go on trying for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as end:
        address = f"127.0.0.1:{end.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InvalidArgument) as caught:
        LLM(tensor_parallel_size=2, executor="ray")
    said = f"RAY_ADDRESS is {address!r}: nothing listens there ([Errno 111] Connection refused); {WANTED}"
    assert str(caught.value) == said


@pytest.mark.parametrize("address", ["nonsense", "head:", "head:port"])
def test_no_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InvalidArgument) as caught:
        ray_executor.connect()
    assert str(caught.value) == f"RAY_ADDRESS is {address!r}: {WANTED}"


def test_what_ray_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(InvalidArgument) as caught:
        ray_executor.connect()
    assert str(caught.value) == "RAY_ADDRESS is 'auto': cannot be joined: no such cluster"
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(ConnectionError):  # of a cluster that is started here
        ray_executor.connect()


def test_a_cluster_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's driver finds the token of a cluster of this machine by itself, unless RAY_ADDRESS says where it is."""

    def refuse(**_: Any) -> None:
        try:
            raise RuntimeError(
                "Last connection error: ... ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"
            )
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379") from error

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(InvalidArgument) as caught:
        ray_executor.connect()
    wants = "it lets nobody in without its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token"
    assert str(caught.value) == f"RAY_ADDRESS is 'auto': cannot be joined: {wants}"


class Full:
    """A placement group that a cluster has no room for."""

    num_waits = 0

    def wait(self, seconds: float) -> bool:
        self.num_waits += 1
        return False


def test_who_closes_does_not_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "available_resources", dict)
    group = Full()

    def check() -> None:
        if group.num_waits == 2:
            raise RuntimeError("the executor is stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ray_executor._wait_for_room(ray, group, 2, {"CPU": 1.0}, check)
    assert group.num_waits == 2


def test_who_waits_for_room_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"memory": 1.0})
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidArgument) as caught:
        ray_executor._wait_for_room(ray, Full(), 2, {"CPU": 1.0}, lambda: None)
    has = "needs 2 times 1 CPU of the cluster, which has 2 CPU, 0 of them free"
    assert caplog.messages == [f"tensor_parallel_size 2 {has}; waiting for 120 s"]
    assert str(caught.value) == f"tensor_parallel_size is 2: {has}, and has had no room for 120 s"
