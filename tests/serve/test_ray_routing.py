"""The router and the replica as Ray Serve calls them, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("starlette", reason="ray[serve] is not installed")

import grpc
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from pagedec.engine.census import Census
from pagedec.errors import DeviceError
from pagedec.serve.lifecycle import State
from pagedec.serve.ray_routing import SILENT_SECONDS, PrefixRouter, ReplicaGone, name_of
from pagedec.serve.ray_serve import LOST_SECONDS, Replica
from pagedec.serve.watching import CensusTaker
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import session_service_pb2
from tests.serve.serving import prompt

DEPLOYMENT = DeploymentID("pagedec", "app")


class Known:
    """A replica as a router knows it."""

    def __init__(self, name: str, **told: Any) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.replica_metadata, self.max_ongoing_requests = {"num_tokens": 4096}, 2
        self.routing_stats = {"at": 0.0, "num_running": 0, "num_waiting": 0, "kv_usage": 0.0, "num_seats": 8, **told}
        self.node_id, self.availability_zone = "node", None

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Pending:
    """A request that is to be placed."""

    def __init__(self, method: str, message: Any, number: int) -> None:
        self.args = [pickle.dumps(SimpleNamespace(user_request_proto=message))]
        self.metadata = SimpleNamespace(
            call_method=method, internal_request_id=str(number), grpc_context=None, multiplexed_model_id=""
        )
        self.future: asyncio.Future[Any] = asyncio.Future()
        self.routing_context = SimpleNamespace(should_backoff=False)


def routed(test: Callable[[PrefixRouter], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        source = DeploymentHandleSource.REPLICA
        router = PrefixRouter(DEPLOYMENT, source, use_replica_queue_len_cache=True)
        router.initialize_state(chunk_ids=2)
        await test(router)

    asyncio.run(run())


def set_clocks(monkeypatch: pytest.MonkeyPatch, **clocks: Callable[[], float]) -> None:
    """Where Serve has run in this process, the router's methods have other globals than their module: cloudpickle has
    put its copies into the class."""
    for method in (PrefixRouter._hear, PrefixRouter.choose_replicas, PrefixRouter.update_replicas):
        monkeypatch.setitem(method.__globals__, "time", SimpleNamespace(**clocks))


async def first(router: PrefixRouter, pending: Pending) -> str:
    groups = await router.choose_replicas(list(router.curr_replicas.values()), pending)
    [one] = groups[0]
    pending.future.set_result(one)
    await asyncio.sleep(0)
    return name_of(one.replica_id)


def asking(ids: list[int], number: int = 0) -> Pending:
    return Pending("Generate", pb.GenerateRequest(prompt=prompt(ids)), number)


def test_a_prompt_goes_where_it_was_and_a_session_where_it_is() -> None:
    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a"), Known("b")])
        home = await first(router, asking([1, 2, 3, 4]))
        assert {await first(router, asking([1, 2, 3, 4, i], i)) for i in range(1, 4)} == {home}
        other = "b" if home == "a" else "a"
        fork = session_service_pb2.ForkRequest(session_id=f"{other}.x")
        assert await first(router, Pending("Fork", fork, 9)) == other
        groups = await router.choose_replicas(
            list(router.curr_replicas.values()),
            Pending("Fork", session_service_pb2.ForkRequest(session_id=f"{other}.x"), 10),
        )
        assert len(groups) == 1, "nobody else is asked about a session"
        router.on_replica_actor_died(ReplicaID(unique_id=home, deployment_id=DEPLOYMENT))
        assert await first(router, asking([1, 2, 3, 4], 11)) == other
        gone = session_service_pb2.ForkRequest(session_id=f"{home}.x")
        assert await first(router, Pending("Fork", gone, 12)) == other

    routed(test)


def test_who_is_not_ready_or_full_is_passed_over() -> None:
    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a", is_ready=False), Known("b")])
        assert {await first(router, asking([i] * 4, i)) for i in range(8)} == {"b"}
        router.update_replicas([Known("a"), Known("b")])
        await asyncio.sleep(0.05)  # they are asked how many they have
        router.on_new_queue_len_info(ReplicaID(unique_id="b", deployment_id=DEPLOYMENT), 2)
        assert await first(router, asking([1] * 4, 20)) == "a"

    routed(test)


def test_what_is_placed_elsewhere_counts_there_and_what_is_given_up_nowhere() -> None:
    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a"), Known("b")])
        loads = lambda: {name: router._router.load(name) for name in ("a", "b")}  # noqa: E731
        pending = asking([5, 6, 7, 8])
        groups = await router.choose_replicas(list(router.curr_replicas.values()), pending)
        chosen, [other] = name_of(groups[0][0].replica_id), groups[1]
        assert loads()[chosen] == 1
        groups = await router.choose_replicas(list(router.curr_replicas.values()), pending)
        assert sum(loads().values()) == 1, "asked again, it counts once"
        pending.future.set_result(other)
        await asyncio.sleep(0)
        assert loads() == {chosen: 0, name_of(other.replica_id): 1}
        router.on_request_completed(other.replica_id, "0")
        given_up = asking([9, 9, 9, 9], 1)
        await router.choose_replicas(list(router.curr_replicas.values()), given_up)
        given_up.future.cancel()
        await asyncio.sleep(0)
        assert sum(loads().values()) == 0 and not router._sent

    routed(test)


def test_a_report_that_is_said_again_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever one replica reports, Serve repeats what all have said."""
    clock = [1000.0]
    set_clocks(monkeypatch, time=lambda: clock[0], monotonic=lambda: clock[0])

    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a", at=999.9)])
        for number in range(3):
            await first(router, asking([number] * 4, number))
        clock[0] += 5.0
        router.update_replicas([Known("a", at=999.9), Known("b", at=1004.9)])
        assert router._router.load("a") == 3
        router.update_replicas([Known("a", at=1004.9), Known("b", at=1004.9)])
        assert router._router.load("a") == 0, "its own words count"

    routed(test)


def test_a_clock_that_is_put_back_holds_up_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = [5000.0], [100.0]
    set_clocks(monkeypatch, time=lambda: wall[0], monotonic=lambda: steady[0])

    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a", at=4999.9)])
        wall[0], steady[0] = 1400.0, 101.0
        router.update_replicas([Known("a", at=1399.9, num_running=7)])
        assert router._router.load("a") == 7

    routed(test)


def test_who_has_reported_nothing_for_long_gets_sessions_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs takes whatever it is given. Where nobody reports, as without Serve's controller, that says nothing."""
    clock = [1000.0]
    set_clocks(monkeypatch, time=lambda: clock[0], monotonic=lambda: clock[0])
    fork = session_service_pb2.ForkRequest(session_id="a.x")

    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a", at=999.9), Known("b", at=999.9)])
        assert {await first(router, asking([i] * 4, i)) for i in range(8)} == {"a", "b"}
        clock[0] += SILENT_SECONDS + 1
        router.update_replicas([Known("a", at=999.9), Known("b", at=clock[0])])
        assert {await first(router, asking([i] * 4, i)) for i in range(8, 16)} == {"b"}
        assert await first(router, Pending("Fork", fork, 16)) == "a"
        router.update_replicas([Known("a", at=clock[0]), Known("b", at=clock[0])])
        clock[0] += SILENT_SECONDS + 1
        assert {await first(router, asking([i] * 4, i)) for i in range(17, 33)} == {"a", "b"}

    routed(test)


@pytest.mark.parametrize("wrong", [{"kv_usage": 7.0}, {"num_running": -1}, {"num_seats": None}, {"at": "now"}])
def test_what_cannot_be_read_is_no_report(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Of another version, say: what is raised here would be the last thing that Serve's controller tells a proxy."""

    async def test(router: PrefixRouter) -> None:
        other = Known("a", **wrong)
        other.replica_metadata = {"num_tokens": "many"}
        nameless = Known("b")
        del nameless.routing_stats["num_waiting"]
        for _ in range(2):
            router.update_replicas([other, nameless, Known("c", at=1.0, num_running=5)])
        assert router._router.replicas == ("a", "b", "c") and router._router.load("c") == 5
        assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["a", "b"]
        assert {await first(router, asking([i] * 4, i)) for i in range(8)} == {"a", "b"}
        router.update_replicas([Known("a", at=2.0, num_running=7)])
        assert router._router.load("a") >= 7 and router._garbled == {"a"}, "what was said once is not said again"

    with caplog.at_level("WARNING", "pagedec.serve"):
        routed(test)


def test_nothing_is_kept_of_a_replica_that_has_died() -> None:
    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a"), Known("b")])
        router.on_replica_actor_died(Known("a").replica_id)
        router.update_replicas([Known("b")])
        assert set(router._heard) == {"b"} and router._router.replicas == ("b",)

    routed(test)


def test_a_request_that_waits_for_room_costs_no_more_with_each_try() -> None:
    class Counting(asyncio.Future[Any]):
        num_watchers = 0

        def add_done_callback(self, *given: Any, **named: Any) -> None:
            self.num_watchers += 1
            super().add_done_callback(*given, **named)

    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a")])
        pending, known = asking([5, 6, 7, 8]), list(router.curr_replicas.values())
        pending.future = future = Counting()
        for _ in range(20):
            await router.choose_replicas(known, pending)
        assert future.num_watchers == 1 and router._router.load("a") == 1
        future.set_result(known[0])
        await asyncio.sleep(0)
        assert not router._sent and router._router.load("a") == 1

    routed(test)


def test_what_fails_to_be_placed_counts_nowhere() -> None:
    async def test(router: PrefixRouter) -> None:
        router.update_replicas([Known("a")])
        pending = asking([5, 6, 7, 8])
        await router.choose_replicas(list(router.curr_replicas.values()), pending)
        pending.future.set_exception(RuntimeError("the application was deleted"))
        await asyncio.sleep(0)
        assert router._router.load("a") == 0 and not router._sent

    routed(test)


def test_a_replica_that_has_died_is_unavailable() -> None:
    async def test(router: PrefixRouter) -> None:
        from ray.serve._private.grpc_util import get_grpc_response_status

        class Result:
            async def get_async(self) -> Any:
                raise RayActorError

            async def __anext__(self) -> Any:
                return "message"

        result: Any = Result()
        router.on_request_routed(None, Known("a").replica_id, result)
        assert await result.__anext__() == "message"
        with pytest.raises(ReplicaGone) as caught:
            await result.get_async()
        status = get_grpc_response_status(caught.value, None, "request")
        assert (status.code, status.message) == (grpc.StatusCode.UNAVAILABLE, "the replica that answered is gone")

    routed(test)


def test_a_report_is_as_old_as_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long step the engine answers behind it, and the last count is said again: with its own time, or routers
    would forget what they have sent since."""
    monkeypatch.setattr("pagedec.serve.watching.PATIENCE", 0.01)
    busy: Future[Census] = Future()
    calls: list[Future[Census]] = [Future(), busy]
    calls[0].set_result(Census(num_running=3, num_blocks=8, num_blocks_used=2, taken_at=1000.0))
    limits = SimpleNamespace(max_num_seqs=8)
    engine = SimpleNamespace(scheduler=SimpleNamespace(limits=limits))
    taker = CensusTaker()
    taker.llm = cast(Any, SimpleNamespace(loop=SimpleNamespace(call=lambda _: calls.pop(0)), engine=engine))
    replica: Any = object.__new__(Replica)
    lifecycle = SimpleNamespace(is_ready=True)
    replica._server = SimpleNamespace(census=taker.take, lifecycle=lifecycle, gateway=SimpleNamespace(llm=taker.llm))
    first, second = (asyncio.run(replica.record_routing_stats()) for _ in range(2))
    assert first == second == {
        "at": 1000.0, "is_ready": True, "num_running": 3, "num_waiting": 0, "kv_usage": 0.25, "num_seats": 8,
    }  # fmt: skip
    busy.set_result(Census(num_running=4, num_blocks=8, taken_at=1007.5))
    third = asyncio.run(replica.record_routing_stats())
    assert (third["at"], third["num_running"]) == (1007.5, 4)


def test_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost workers have time to come back; an engine that has failed has none."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    replica: Any = object.__new__(Replica)
    executor = SimpleNamespace(problem="rank 1 is gone")
    llm = SimpleNamespace(loop=SimpleNamespace(closed=False), engine=SimpleNamespace(executor=executor))
    lifecycle = SimpleNamespace(state=State.SERVING)
    replica._server, replica._lost_since = SimpleNamespace(lifecycle=lifecycle, gateway=SimpleNamespace(llm=llm)), None
    replica._patience = LOST_SECONDS
    replica.check_health()
    lifecycle.state = State.LOST
    replica.check_health()
    now = LOST_SECONDS
    replica.check_health()
    now = LOST_SECONDS + 1.0
    with pytest.raises(DeviceError, match="its workers do not come back in 60 s: rank 1 is gone"):
        replica.check_health()
    lifecycle.state = State.SERVING
    replica.check_health()
    lifecycle.state = State.LOST
    replica.check_health()
    lifecycle.state = State.FAILED
    with pytest.raises(DeviceError, match="the engine has failed"):
        replica.check_health()
