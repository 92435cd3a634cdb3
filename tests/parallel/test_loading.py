"""Groups that do not get as far as to have loaded, or load something else than those before them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument, WorkerLost, WorkersGone
from pagedec.executor import group as group_module
from pagedec.executor import remote
from pagedec.executor.channel import Channel, Kind
from pagedec.executor.failure import pack_error
from pagedec.executor.group import WorkerGroup
from pagedec.executor.remote import RemoteExecutor
from pagedec.runtime.geometry import Geometry, LaneGeometry
from pagedec.runtime.pool import KvPool

CONFIG = EngineConfig.from_kwargs(model="none", skip_tokenizer_init=True)
GEOMETRY = Geometry(
    {"target": LaneGeometry(16, 100, 64)}, KvPool(16, 16, 1024, "told"), (2,), "reference", "float32", None, 1,
    2, "model", "numerics",
)  # fmt: skip


@dataclass
class Played:
    """A worker's end in a thread of the test."""

    play: Callable[[Channel], None]
    pid: int = 7
    is_gone: bool = False
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        threading.Thread(target=self._run, args=(Channel(theirs),), daemon=True).start()

    def _run(self, end: Channel) -> None:
        try:
            self.play(end)
        except EOFError:
            pass
        finally:
            end.close()

    def has_ended(self) -> bool:
        return self.is_gone

    def end(self) -> str:
        return "has ended"

    def kill(self) -> None:
        self.is_gone = True
        self.channel.close()

    def stop(self) -> None:
        self.channel.close()

    def abandon(self) -> None:
        self.channel.close()


def loads(geometry: Geometry = GEOMETRY, *told: tuple[str, str]) -> Callable[[Channel], None]:
    def play(end: Channel) -> None:
        while end.receive()[0] == Kind.LOAD:
            end.send(Kind.READY, json.dumps({"geometry": geometry.to_json(), "warnings": told}).encode())

    return play


def falls_silent(end: Channel) -> None:
    end.receive()
    end.send(Kind.PULSE, b"")
    end.receive()


def is_slow(end: Channel) -> None:
    end.receive()
    for _ in range(10):
        time.sleep(0.05)
        end.send(Kind.PULSE, b"")
    loads_now = {"geometry": GEOMETRY.to_json(), "warnings": []}
    end.send(Kind.READY, json.dumps(loads_now).encode())
    end.receive()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "LOAD_SILENT_SECONDS", 0.3)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_hangs_while_it_loads(rank: int) -> None:
    """Stopped, or on a machine that was cut off: nobody else would ever say so."""
    workers = [Played(loads()), Played(loads())]
    workers[rank] = Played(falls_silent, pid=11)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"the worker process 11 has not answered for 0\.3 s, and was killed"):
        WorkerGroup(workers).load(CONFIG)
    assert time.monotonic() - began < 20 and all(worker.is_gone for worker in workers)


@pytest.mark.usefixtures("hasty")
def test_one_that_loads_for_long_is_waited_for() -> None:
    """And so is one that has loaded long before."""
    workers = [Played(is_slow), Played(loads())]
    assert WorkerGroup(workers).load(CONFIG) == GEOMETRY


def test_ranks_with_parts_of_two_models() -> None:
    """On a machine whose copy is older, say: what they said together was no model's, and nobody was told."""
    workers = [Played(loads()), Played(loads()), Played(loads(replace(GEOMETRY, model="older")))]
    with pytest.raises(
        InvalidArgument, match="model is 'none': must have the same .* of rank 0 .* model, of rank 2 older"
    ):
        WorkerGroup(workers).load(CONFIG)
    assert all(worker.is_gone for worker in workers)


def test_ranks_that_compute_in_two_ways() -> None:
    """Of two builds, or on devices of two generations: the group's bits are not those of the first rank's kind."""
    workers = [Played(loads()), Played(loads(replace(GEOMETRY, numerics="others")))]
    assert WorkerGroup(workers).load(CONFIG) == replace(GEOMETRY, numerics="numerics+others")


def test_a_rank_that_warns_of_its_own_machine() -> None:
    weights, links = ("WeightsWarning", "too large for this one"), ("LinkWarning", "on the host")
    workers = [Played(loads(GEOMETRY, links)), Played(loads(GEOMETRY, ("LinkWarning", "on the host, too"), weights))]
    with pytest.warns() as seen:
        WorkerGroup(workers).load(CONFIG)
    assert [(each.category.__name__, str(each.message)) for each in seen] == [links, weights]


# ------------------------------------------------------------------------------------------------ those that come after
class Groups:
    """Groups that are launched one after the other, as many as there are plays; the last goes on for ever."""

    def __init__(self, *plays: Callable[[Channel], None]) -> None:
        self.plays, self.made = plays, list[list[Played]]()

    def __call__(self) -> WorkerGroup:
        play = self.plays[min(len(self.made), len(self.plays) - 1)]
        self.made.append([Played(play), Played(play)])
        return WorkerGroup(self.made[-1])


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(RemoteExecutor, "_wait", lambda _, seconds: found.append(seconds))
    return found


def test_another_model_is_not_gone_on_with(pauses: list[float]) -> None:
    """Files were replaced meanwhile, or a node has others: what was told was the old one's."""
    groups = Groups(loads(), loads(replace(GEOMETRY, model="other")))
    executor = RemoteExecutor(CONFIG, groups)
    groups.made[0][1].is_gone = True
    with pytest.raises(WorkersGone, match="new workers have another model: other, not model"):
        executor.mend()
    assert executor.problem is not None and "another model" in executor.problem
    assert all(worker.is_gone for made in groups.made for worker in made)
    executor.stop()


def test_other_bits_are_told(pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """A node with another instruction set: what is drawn goes on, and whoever asks is told."""
    other = replace(GEOMETRY, isa="other", numerics="others")
    groups = Groups(loads(), loads(other))
    executor = RemoteExecutor(CONFIG, groups)
    groups.made[0][0].is_gone = True
    executor.mend()
    assert executor.problem is None and executor.geometry == other
    assert "their numbers have other bits than those before: float32 on other of 2 ranks" in caplog.text
    executor.stop()


def test_workers_that_end_whenever_nobody_asks_are_paused_for(pauses: list[float]) -> None:
    """Not brought back as fast as they die, for ever."""
    groups = Groups(loads())
    executor = RemoteExecutor(CONFIG, groups)
    for _ in range(remote.MOST_LOST + 8):
        groups.made[-1][0].is_gone = True
        executor.mend()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    executor.stop()


def test_causes_are_cut_to_what_a_log_can_bear(pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    def fails(end: Channel) -> None:
        end.receive()
        end.send(Kind.FAILED, pack_error(ValueError("x" * 10**6)))

    groups = Groups(loads(), fails)
    executor = RemoteExecutor(CONFIG, groups)
    groups.made[0][0].is_gone = True
    with pytest.raises(WorkersGone) as caught:
        executor.mend()
    assert executor.problem is not None and executor.problem.startswith("ValueError: xxxx")
    assert max(len(executor.problem), len(str(caught.value)), len(caplog.text)) < 9000
    assert len(str(caught.value.__cause__)) == 10**6
    executor.stop()


def test_a_fork_starts_no_workers_of_its_own(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(loads())
    executor = RemoteExecutor(CONFIG, groups)
    groups.made[0][0].is_gone = True  # nobody in a fork knows better
    monkeypatch.setattr(remote.os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="a fork of that has none"):
        executor.mend()
    monkeypatch.undo()
    assert len(groups.made) == 1
    executor.stop()


def fails(end: Channel) -> None:
    end.receive()
    end.send(Kind.FAILED, pack_error(ValueError("no such file")))


def takes_minutes(end: Channel) -> None:
    end.receive()
    while True:
        end.send(Kind.PULSE, b"")
        time.sleep(0.05)


@pytest.mark.parametrize("play", [fails, takes_minutes])
def test_who_closes_does_not_wait_for_workers_to_load(play: Callable[[Channel], None]) -> None:
    """Large weights take minutes, and a pause is up to half of one, which is more than most give a server that is to
    end."""
    groups = Groups(loads(), play)
    executor = RemoteExecutor(CONFIG, groups)
    executor._num_failed, executor._pause = int(play is fails), 20.0
    executor._alive.kill()  # type: ignore[union-attr]
    told: list[BaseException] = []

    def mend() -> None:
        try:
            executor.mend()
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=mend, daemon=True)
    thread.start()
    time.sleep(0.1)
    executor.give_up()
    thread.join(10)
    assert [str(error) for error in told] == ["the executor is stopped"]
    assert all(worker.is_gone for made in groups.made for worker in made)
    executor.stop()
