"""What a server is told of itself: its name for the model, its tries, whether it shows its contract, its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagedec import AsyncLLM
from pagedec.cli.console import spelled
from pagedec.cli.serve import _loop_factory
from pagedec.constraints import TokenTrie
from pagedec.errors import InvalidArgument, PagedecError
from pagedec.serve.lifecycle import Lifecycle, State
from pagedec.serve.server import Server
from pagedec.serve.server_config import ServerConfig
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2 as mb
from tests.serve.serving import Serving, greedy, parameters, prompt

Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 21] * 10


def test_a_name_for_clients(serve: Serve) -> None:
    serving = serve(served_model_name="mine")
    assert [model.name for model in serving.models.ListModels(mb.ListModelsRequest()).models] == ["mine"]
    request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=greedy(2), model="mine")
    assert serving.generation.Generate(request).answers


def test_tries_by_their_names(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("9 8 7\n11 12\n")
    TokenTrie([[21, 22]]).save(tmp_path / "one.trie")
    serving = serve(trie=(f"few={tmp_path / 'few.txt'}", f"one={tmp_path / 'one.trie'}"))
    assert list(serving.models.GetModel(mb.GetModelRequest()).model.tries) == ["few", "one"]
    for name, wanted in (("few", ([9, 8, 7], [11, 12])), ("one", ([21, 22],))):
        own = greedy(5)
        own.constraint.trie = name
        [answer] = serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own)).answers
        assert list(answer.token_ids) in wanted
    for wrong in ("few", "=x", "few=", f"few={tmp_path / 'few.txt'}"):
        with pytest.raises(InvalidArgument, match="trie"):
            serve(trie=(f"few={tmp_path / 'few.txt'}", wrong))


def test_a_trie_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("9 8 7\n,\n")
    (tmp_path / "text.trie").write_text("9 8 7\n")
    for name, said in (
        ("empty.txt", "sequences[1] is []: must have at least one token"),
        ("text.trie", "is no trie that TokenTrie.save has written"),
        ("none.trie", "cannot be read: No such file or directory"),
    ):
        given = f"few={tmp_path / name}"
        with pytest.raises(PagedecError) as caught:
            Server(ServerConfig(trie=(given,)), AsyncLLM)
        assert str(caught.value) == f"trie is '{given}': {said}"
        assert spelled(caught.value) == f"trie is {given}: {said}"


@pytest.mark.parametrize("field", ["api_keys", "tls_cert", "tls_key", "tls_client_ca"])
def test_a_path_has_no_nul(field: str) -> None:
    """The system's own error of it names nothing."""
    files = {"tls_cert": "cert.pem", "tls_key": "key.pem", field: "keys\0.toml"}
    with pytest.raises(InvalidArgument, match="must be a path, which has no NUL character") as caught:
        ServerConfig(**files)
    assert (caught.value.field, caught.value.value) == (field, "keys\0.toml")


@pytest.mark.parametrize("field", ["host", "metrics_host"])
def test_an_address_is_a_name_that_can_be_looked_up(field: str) -> None:
    """Python's own error of others is no error of the system, and names nothing."""
    for wrong in ("a..b", "a" * 64, "a\0b", "."):
        with pytest.raises(InvalidArgument, match="must be an address, or a name that can be looked up") as caught:
            ServerConfig(**{field: wrong, "insecure": True})
        assert (caught.value.field, caught.value.value) == (field, wrong)
    for right in ("::1", "[::1]", "0.0.0.0", "a.b.", "fe80::1%eth0", "müller.example"):
        assert ServerConfig(**{field: right, "insecure": True})


def test_the_contract_may_be_kept(serve: Serve) -> None:
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(serve(reflection=False).channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ServerReflectionInfo(iter([wanted])))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_event_loop() -> None:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    assert _loop_factory() is uvloop.new_event_loop


# ---- how it stands
def test_a_pause_is_no_stall_and_a_drain_ends_it(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, admin_port=0, stall_timeout=0.1)
    own = parameters(100, temperature=0.0)
    own.stopping.ignore_eos = True
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        admin.Pause(ab.PauseRequest())
        call = serving.generation.Generate.future(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own))
        with pytest.raises(grpc.FutureTimeoutError):
            call.result(0.4)
        assert serving.server.lifecycle.state is State.PAUSED
        assert admin.Drain(ab.DrainRequest(), timeout=10).num_aborted == 0
        assert len(call.result(1).answers[0].token_ids) == 100


def test_a_request_is_aborted_by_the_server_s_own_name(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, admin_port=0)
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True
    call = serving.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt(PROMPT), parameters=own))
    name = next(call).request_id
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        assert admin.Abort(ab.AbortRequest(request_ids=[name])).num_aborted == 1
    assert [answer.finish.reason for answer in list(call)[-1].finished] == [3]


def test_a_stall_is_told_and_taken_back() -> None:
    """By steps and by whether anybody wants one; a drain that has begun stays one."""

    async def scenario() -> None:
        lifecycle, steps, busy, broken = Lifecycle(("a",), 0.04), [0], [True], [False]
        lifecycle.open()

        async def no_worker() -> None:
            raise AssertionError("nothing is lost")

        watching = asyncio.create_task(
            lifecycle.watch(lambda: steps[0], lambda: busy[0], lambda: broken[0], lambda: None, no_worker)
        )

        async def becomes(state: State) -> None:
            async with asyncio.timeout(5):
                while lifecycle.state is not state:
                    await asyncio.sleep(0.005)

        await becomes(State.STALLED)
        steps[0] += 1
        await becomes(State.SERVING)
        await becomes(State.STALLED)
        busy[0] = False
        await becomes(State.SERVING)
        busy[0] = True
        lifecycle.set(State.DRAINING)
        await asyncio.sleep(0.15)
        assert lifecycle.state is State.DRAINING
        broken[0] = True
        await becomes(State.FAILED)
        await watching
        assert lifecycle.refusal is not None and lifecycle.refusal.reason == "ENGINE_FAILED"

    asyncio.run(scenario())


def test_lost_workers_are_told_whatever_was_told_before() -> None:
    """Behind a stall, too, and in a pause, which goes on when they are back; a stall is then counted anew."""

    async def scenario() -> None:
        lifecycle, problem, tries, seconds = Lifecycle(("a",), 0.2), ["rank 1 is gone"], [0], 0.2
        told: list[tuple[State, float]] = []
        set_state = lifecycle.set

        def note(state: State) -> None:
            told.append((state, time.monotonic()))
            set_state(state)

        lifecycle.set = note  # type: ignore[method-assign]
        lifecycle.open()

        async def mend() -> None:
            tries[0] += 1
            if tries[0] % 8 == 0:
                problem.clear()

        watching = asyncio.create_task(
            lifecycle.watch(lambda: 0, lambda: True, lambda: False, lambda: problem[0] if problem else None, mend)
        )
        for before in (State.SERVING, State.STALLED, State.PAUSED):
            told.clear()
            lifecycle.set(before)
            problem[:] = ["rank 1 is gone"]
            async with asyncio.timeout(10):
                while told[-1][0] is not State.LOST:
                    await asyncio.sleep(0.005)
                while len(told) < 3 or (before is not State.PAUSED and told[-1][0] is not State.STALLED):
                    await asyncio.sleep(0.005)
            after = [State.PAUSED] if before is State.PAUSED else [State.SERVING, State.STALLED]
            assert [state for state, _ in told] == [before, State.LOST, *after]
            if before is not State.PAUSED:
                assert told[3][1] - told[2][1] >= seconds
        watching.cancel()

    asyncio.run(scenario())
