"""The lines of streams: who asks for a place, in which order, how long, and that nothing is left of whoever leaves."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from pagedec.serve import queueing
from pagedec.serve.access import Client
from pagedec.serve.admission import Admission
from pagedec.serve.lifecycle import DRAINING
from pagedec.serve.queueing import Queued, Queueing
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import Refusal

ADA, BOB = Client(name="ada"), Client(name="bob")


class World:
    """A server's places, streams' requests that hold one until they are told to go, and a clock of their patience."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        self.now, self.num_asked = 0.0, 0
        monkeypatch.setattr(queueing, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.admission = Admission(ServerConfig(**options), 8, lambda: self.now)
        self.entered: list[str] = []
        self.queued: dict[str, Queued] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.refusal: Refusal | None = None
        self._go: dict[str, asyncio.Event] = {}

    def come(self, name: str, line: Queueing, num_tokens: int = 1, client: Client = ADA) -> None:
        self.queued[name], self._go[name] = Queued(line), asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._request(name, num_tokens, client))

    def end(self, name: str) -> None:
        self._go[name].set()

    def others(self, client: Client = BOB, num_tokens: int = 1) -> contextlib.ExitStack:
        """One that does not wait. Raises `Refusal`."""
        held = contextlib.ExitStack()
        held.enter_context(self.admission.seat(client, num_tokens, None))
        return held

    async def _request(self, name: str, num_tokens: int, client: Client) -> None:
        def seat(num_of_stream: int) -> contextlib.AbstractContextManager[None]:
            self.num_asked += 1
            if self.refusal is not None:
                raise self.refusal
            return self.admission.seat(client, num_tokens, None, num_of_stream)

        queued = self.queued[name]
        with contextlib.ExitStack() as held:
            await queued.queueing.enter(queued, held, self.admission, seat)
            if not queued.is_aborted:
                self.entered.append(name)
                await self._go[name].wait()

    def check(self, *lines: Queueing) -> None:
        """Nothing is left."""
        own = self.admission
        assert own.num_inside == 0 and not own._requests and not own._tokens and not own._wakes
        for line in lines:
            assert not line._line and line._num_inside == 0 and line._idle_since is None


async def soon() -> None:
    """All that is woken by now has looked."""
    for _ in range(30):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one does not take the place that others wait for, and one place stays free."""

    async def scenario() -> None:
        world, line = World(monkeypatch, max_requests=4), Queueing()
        for i in range(6):
            world.come(f"{i}", line)
        await soon()
        assert world.entered == ["0", "1", "2"]
        world.end("1")
        world.come("6", line)
        await soon()
        world.end("0")
        world.come("7", line)
        await soon()
        assert world.entered == ["0", "1", "2", "3", "4"]
        with world.others():
            world.end("2")
            await soon()
            assert len(world.entered) == 5 and world.admission.num_inside == 3, "the last place is left to others"
        for i in range(3, 8):
            world.end(f"{i}")
            await soon()
        assert world.entered == [f"{i}" for i in range(8)]
        world.check(line)

    run(scenario)


def test_one_of_many_tokens_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world, line = World(monkeypatch, max_client_tokens=100), Queueing()
        for name, num_tokens in (("a", 50), ("b", 50), ("large", 90), ("c", 10), ("d", 10)):
            world.come(name, line, num_tokens)
        await soon()
        world.end("a")
        world.come("e", line, 10)
        await soon()
        assert world.entered == ["a", "b"]
        world.end("b")
        await soon()
        assert world.entered == ["a", "b", "large", "c"]
        world.end("large")
        await soon()
        assert world.entered[4:] == ["d", "e"]
        for name in "cde":
            world.end(name)
        await soon()
        world.check(line)

    run(scenario)


def test_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world, lines = World(monkeypatch, max_requests=1), [Queueing() for _ in range(3)]
        for i in range(3):
            for k, line in enumerate(lines):
                world.come(f"{k}.{i}", line)
        for i in range(3):
            for k in range(3):
                await soon()
                world.end(f"{k}.{i}")
        await soon()
        assert world.entered == [f"{k}.{i}" for i in range(3) for k in range(3)]
        world.check(*lines)

    run(scenario)


def test_one_of_each_stream_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others of those that have nothing running wait until it has gone in, or given up."""

    async def scenario() -> None:
        world, began = World(monkeypatch, max_client_requests=1), time.monotonic()

        def again() -> float:
            """How often all lines may have asked again by now."""
            return 4 * (time.monotonic() - began) / queueing.PAUSE

        lines = [Queueing() for _ in range(4)]
        held = world.others(ADA)
        for k, line in enumerate(lines):
            for i in range(100):
                world.come(f"{k}.{i}", line)
        await soon()
        assert 4 <= world.num_asked <= 4 + again()
        await asyncio.sleep(0.5)
        assert 4 < world.num_asked <= 4 + again()
        world.now += queueing.PATIENCE + 1
        told = await asyncio.gather(*world.tasks.values(), return_exceptions=True)
        assert {error.reason for error in told if isinstance(error, Refusal)} == {"CLIENT_REQUESTS"}
        assert len(told) == 400 and world.num_asked <= 400 + again()
        held.close()
        world.check(*lines)

    run(scenario)


def test_patience_is_for_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little while before one ran, however that ended, is not counted to the while behind it."""

    async def scenario() -> None:
        world, line = World(monkeypatch, max_requests=1), Queueing()
        held = world.others()
        for name in "ab":
            world.come(name, line)
        await soon()
        world.now += 1
        held.close()
        await soon()
        assert world.entered == ["a"]
        world.now += 3 * queueing.PATIENCE
        world.tasks["a"].cancel()
        while world.admission.num_inside:
            await asyncio.sleep(0)
        with world.others():
            await asyncio.sleep(2 * queueing.PAUSE)
            world.now += queueing.PATIENCE - 1
            await asyncio.sleep(2 * queueing.PAUSE)
            assert not world.tasks["b"].done()
            world.now += 2
            with pytest.raises(Refusal, match="which is max_requests"):
                await world.tasks["b"]
        world.check(line)

    run(scenario)


def test_others_and_a_stream_take_turns_for_the_only_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world, line = World(monkeypatch, max_requests=1), Queueing()
        for i in range(4):
            world.come(f"{i}", line)
        await soon()
        with pytest.raises(Refusal):
            world.others()
        world.now += 1
        world.end("0")
        await soon()
        with world.others():  # it has come again
            await soon()
            with pytest.raises(Refusal):
                world.others()
        await soon()
        assert world.entered == ["0", "1"], "nobody is kept waiting for twice"
        with pytest.raises(Refusal):
            world.others()
        world.end("1")
        await soon()
        assert world.entered == ["0", "1"] and world.admission.num_inside == 0
        world.now += 2
        await asyncio.sleep(2 * queueing.PAUSE)
        assert world.entered == ["0", "1", "2"], "nor for ever for one that does not come again"
        world.end("2"), world.end("3")
        await soon()
        world.check(line)

    run(scenario)


def test_a_refusal_that_no_waiting_helps_is_all_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world, line = World(monkeypatch, max_requests=2), Queueing()
        for i in range(20):
            world.come(f"{i}", line)
        await soon()
        world.refusal = DRAINING
        told = await asyncio.gather(*list(world.tasks.values())[1:], return_exceptions=True)
        assert told == [DRAINING] * 19
        world.end("0")
        await soon()
        world.check(line)

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Requests that are cancelled and aborted wherever they stand, among others that come and go."""
    draw = random.Random(seed)
    monkeypatch.setattr(queueing, "PAUSE", 0.001)

    async def scenario() -> None:
        options = {"max_requests": draw.choice([1, 2, 4]), "max_client_requests": draw.choice([1, 3]),
                   "max_client_tokens": 10}  # fmt: skip
        world, lines = World(monkeypatch, **options), [Queueing() for _ in range(3)]
        left, held = set[str](), list[contextlib.ExitStack]()
        for i in range(60):
            world.come(f"{i}", draw.choice(lines), draw.randint(1, 10), draw.choice([ADA, BOB]))
            some = f"{draw.randrange(i + 1)}"
            what = draw.randrange(6)
            if what == 0:
                left.add(some)
                world.tasks[some].cancel()
            elif what == 1 and some not in world.entered:
                left.add(some)
                world.queued[some].abort()
            elif what == 2:
                with contextlib.suppress(Refusal):
                    held.append(world.others(draw.choice([ADA, BOB])))
            elif what == 3 and held:
                held.pop().close()
            else:
                world.end(some)
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        for one in held:
            one.close()
        for name in world.tasks:
            world.end(name)
        for _ in range(2000):  # others who were refused are waited for
            world.now += 0.1
            await asyncio.sleep(0.001)
            if all(task.done() for task in world.tasks.values()):
                break
        told = await asyncio.gather(*world.tasks.values(), return_exceptions=True)
        assert all(error is None or isinstance(error, asyncio.CancelledError) for error in told)
        assert set(world.entered) | left == set(world.tasks)
        world.check(*lines)

    run(scenario)
