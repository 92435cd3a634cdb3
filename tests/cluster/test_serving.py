"""Two replicas behind Ray Serve's proxy: what they say is what an engine says, and nothing is lost with one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.client import AsyncClient, Client, ServedLora
from pagedec.errors import BranchClosed, InvalidArgument, NotFound
from pagedec.params import RequestOutputKind
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc, session_service_pb2_grpc
from pagedec.v1 import session_service_pb2 as session_pb
from tests.batch.tiny import make_tiny
from tests.cluster.replicas import ENGINE, is_idle, replicas, started
from tests.serve.adapter_cases import byte_lora
from tests.serve.serving import details, greedy, prompt, reason
from tests.support import wait_for

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("starlette", reason="ray[serve] is not installed")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.9, seed=11, max_tokens=160, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_tiny(tmp_path_factory.mktemp("tiny"))
    byte_lora(path / "tuned", 3)
    return str(path)


@pytest.fixture(scope="module")
def target(tiny: str, cluster: Any) -> Iterator[str]:
    """Where the proxy listens."""
    from ray import serve

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", "none")  # as slow as it has to be to be killed in the middle
            port = started(tiny)
        yield f"127.0.0.1:{port}"
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[Client]:
    with Client(target) as made:
        yield made


@pytest.fixture(scope="module")
def stub(target: str) -> Iterator[Any]:
    with grpc.insecure_channel(target) as channel:
        yield generation_service_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_ISA", "none")
        with LLM(tiny, **ENGINE) as made:
            yield made


def asked(what: str, max_tokens: int = 400) -> pb.GenerateStreamRequest:
    made = pb.GenerateStreamRequest(prompt=prompt(what), parameters=greedy(max_tokens))
    made.parameters.stopping.ignore_eos = True
    return made


def test_the_deployment_is_as_it_was_asked_for() -> None:
    from pagedec.serve.ray_serve import deployment
    from pagedec.serve.replica_config import read_arguments

    given = {"tensor_parallel_size": 2, "num_threads": 3, "max_num_seqs": 20, "min_replicas": 2, "max_replicas": 5}
    made = deployment(read_arguments({**given, "target_kv_usage": 0.7, "drain_timeout": 9}))
    config = made._deployment_config
    assert made._replica_config.placement_group_bundles == [{"CPU": 3.0}] * 2
    assert (config.max_ongoing_requests, config.graceful_shutdown_timeout_s) == (40, 9)
    scaling = config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 10.0)
    assert scaling.policy.get_policy().__name__ == "QueueAndKvPolicy"
    assert scaling.policy.policy_kwargs == {"target_ongoing_requests": 10.0, "target_kv_usage": 0.7}
    router = config.request_router_config
    assert router.get_request_router_class().__name__ == "PrefixRouter"
    alone = deployment(read_arguments({"num_threads": 4}))
    assert alone.num_replicas == 1 and alone.ray_actor_options["num_cpus"] == 4.0
    assert alone.ray_actor_options["num_gpus"] == 0


def test_ranks_on_gpus_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedec.serve.ray_serve import deployment
    from pagedec.serve.replica_config import read_arguments

    monkeypatch.setenv("PAGEDEC_ISA", "cuda")
    over_ray, inside = (
        deployment(read_arguments({"tensor_parallel_size": 2, "num_threads": 3, "executor": executor}))
        for executor in ("ray", "process")
    )
    assert over_ray._replica_config.placement_group_bundles == [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert not over_ray.ray_actor_options.get("num_gpus")
    assert inside.ray_actor_options["num_gpus"] == 2 and inside.ray_actor_options["num_cpus"] == 6.0


def test_tokens_are_those_of_an_engine(client: Client, llm: LLM) -> None:
    prompts = ["hello there", "something else, and rather longer", "x"]
    want = [output.outputs for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [output.outputs for output in client.generate(prompts, GREEDY)] == want
    for what, outputs in zip(prompts, want, strict=True):
        parts = list(client.stream(what, GREEDY.clone(output_kind=RequestOutputKind.DELTA)))
        assert [token for part in parts for token in part.outputs[0].token_ids] == outputs[0].token_ids
        assert len(parts) > 1


def test_adapters_are_those_of_an_engine(client: Client, llm: LLM, tiny: str) -> None:
    """At whichever replica; and a session stays where it is, and its adapter with it."""
    prompts, own = ["hello there", "something else, and rather longer"], LoRARequest("tuned", 1, f"{tiny}/tuned")
    assert [(model.name, model.parent) for model in client.models()] == [("tiny", ""), ("tuned", "tiny")]
    loras, names = [own, None], [ServedLora("tuned"), None]
    want = [llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora) for lora in loras]
    for name, outputs in zip(names * 2, want * 2, strict=True):
        told = client.generate(prompts, GREEDY, lora_request=name)
        assert [one.outputs[0].token_ids for one in told] == [one.outputs[0].token_ids for one in outputs]
        streamed = [list(client.stream(what, GREEDY, lora_request=name))[-1] for what in prompts]
        assert [one.outputs[0].token_ids for one in streamed] == [one.outputs[0].token_ids for one in outputs]
    with client.session(prompts[0], lora_request=ServedLora("tuned")) as story:
        for count in (10, 14):
            story.generate(GREEDY.clone(max_tokens=count))
        assert story.token_ids[-24:] == want[0][0].outputs[0].token_ids
    with pytest.raises(NotFound, match="^model .*nobody's.* does not exist; known are tiny, tuned$"):
        client.generate(prompts[0], GREEDY, lora_request=ServedLora("nobody's"))


def test_an_unmodified_triton_client(target: str, llm: LLM) -> None:
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed")
    command = [sys.executable, "-m", "tests.serve.triton_program", target, "tiny", "hello there"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    [output] = llm.generate(["hello there"], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert (found["ready"], found["model"], found["other"]) == (True, True, False)
    assert found["greedy"]["texts"] == [output.outputs[0].text]
    assert "".join(piece for [piece] in found["greedy streamed"]["pieces"]) == output.outputs[0].text
    assert "temperature is -1" in found["wrong"]["error"]


def check_wrong_prompt(error: grpc.RpcError) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason(error) == "INVALID_FIELD"
    assert details(error)["BadRequest"].field_violations[0].field == "prompt"


def test_errors_are_the_same(client: Client, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(prompt=prompt("a" * 5000), client_request_id="mine"))
    assert dict(caught.value.trailing_metadata())["x-request-id"] == "mine"
    check_wrong_prompt(caught.value)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.GenerateStream(asked("a" * 5000)))
    check_wrong_prompt(caught.value)
    with pytest.raises(InvalidArgument, match="^prompt is "):
        list(client.stream("a" * 5000, GREEDY))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(prompt=prompt("a"), model="other"))
    assert reason(caught.value) == "MODEL_NOT_FOUND"


def test_many_requests_over_one_stream(stub: Any, client: Client) -> None:
    request = pb.GenerateRequest(prompt=prompt("one of many"), parameters=greedy(8))
    items = [pb.GenerateBatchRequest(item_id=str(i), request=request) for i in range(3)]
    answers = {one.item_id: one.response.answers[0].text for one in stub.GenerateBatch(iter(items))}
    [want] = client.generate(["one of many"], SamplingParams(temperature=0, max_tokens=8))
    assert answers == dict.fromkeys("012", want.outputs[0].text)


def test_who_leaves_or_is_late_leaves_no_blocks(stub: Any) -> None:
    call = stub.GenerateStream(asked("somebody who leaves"))
    next(call)
    call.cancel()
    wait_for(is_idle)
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stub.GenerateStream(asked("somebody who is late"), timeout=0.05):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(is_idle)


def test_a_prefix_finds_its_blocks(client: Client) -> None:
    """Each shared beginning is evaluated by one replica alone."""
    seen = []
    for round_ in range(6):
        for which in "abcd":
            text = f"{which} " + 10 * f"is a shared beginning {which} " + f"and the end {round_}"
            [output] = client.generate([text], SamplingParams(temperature=0, max_tokens=1))
            assert output.metrics is not None
            seen.append(output.metrics.num_cached_tokens)
    assert not any(seen[:4]) and all(cached > 200 for cached in seen[4:])


def test_sessions_stay_where_they_are(target: str, client: Client) -> None:
    sessions = list[Any]()

    def are_everywhere() -> bool:
        sessions.append(client.session(f"{len(sessions)} is how this session begins"))
        return {session.session_id.partition(".")[0] for session in sessions} == set(replicas())

    wait_for(are_everywhere)
    tags = set(replicas())
    for session in sessions:
        before = session.num_tokens
        branches = session.fork(2)
        for branch in branches:
            told = branch.generate(SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
            assert [(len(a.token_ids), a.finish_reason) for a in told.outputs] == [(3, "length")]
        assert [branch.num_tokens for branch in branches] == [before + 3] * 2
        session.close()
    with grpc.insecure_channel(target) as channel:
        stub = session_service_pb2_grpc.SessionServiceStub(channel)
        for unknown in ("gone.abc", f"{tags.pop()}.abc", "abc"):
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetSession(session_pb.GetSessionRequest(session_id=unknown))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason(caught.value) == "SESSION_NOT_FOUND"
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListSessions(session_pb.ListSessionsRequest())
    assert reason(caught.value) == "NOT_OVER_REPLICAS"


def test_a_replica_is_killed_in_the_middle(target: str, llm: LLM) -> None:
    """Its streams go on at the other one: every token once. What was asked at once is asked there. Its sessions are
    gone."""
    what = "a story that is told in two parts"
    [want] = llm.generate([what], LONG, use_tqdm=False)
    with Client(target) as client, ThreadPoolExecutor(1) as threads:
        session = client.session(what)  # goes where the same prompt goes
        home = session.session_id.partition(".")[0]
        at_once = threads.submit(client.generate, [what], LONG)
        streams = [iter(client.stream(what, LONG.clone(output_kind=RequestOutputKind.DELTA))) for _ in range(3)]
        told = [list(next(stream).outputs[0].token_ids) for stream in streams]
        os.kill(replicas()[home], signal.SIGKILL)
        assert max(map(len, told)) < 100
        for tokens, stream in zip(told, streams, strict=True):
            for output in stream:
                tokens += output.outputs[0].token_ids
        assert told == [want.outputs[0].token_ids] * 3
        assert at_once.result(60)[0].outputs == want.outputs
        with pytest.raises(BranchClosed):
            session.generate(GREEDY)


@pytest.mark.long
def test_more_calls_than_grpc_has_room_for(target: str, client: Client) -> None:
    """Those that nobody has looked at yet it ends as CANCELLED, some of more than 1000: they are asked again."""
    few = SamplingParams(temperature=0, max_tokens=2)

    async def run() -> list[Any]:
        async def ask() -> Any:
            return [output async for output in crowd.generate("one of many", few)][-1].outputs

        async with AsyncClient(target, retries=100) as crowd:
            return await asyncio.gather(*(ask() for _ in range(1800)))

    assert asyncio.run(run()) == [client.generate(["one of many"], few)[0].outputs] * 1800


@pytest.mark.long
def test_all_replicas_are_killed(stub: Any, client: Client) -> None:
    """Whoever does not go on by itself is told that it may; others take their places."""
    wait_for(lambda: len(replicas()) == 2)
    before = replicas()
    call = stub.GenerateStream(asked("a stream that breaks off"))
    assert next(call).HasField("resume")
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the replica that answered is gone"
    wait_for(lambda: len(replicas()) == 2 and not set(replicas()) & set(before))
    assert client.generate(["again"], GREEDY)[0].finished


@pytest.mark.long
def test_replicas_go_and_come(stub: Any, tiny: str) -> None:
    """Where there is little to do one goes, behind its streams; where there is much one comes."""
    from ray import serve

    from pagedec.serve.ray_serve import app

    wait_for(lambda: len(replicas()) == 2)
    calls = [stub.GenerateStream(asked(f"{i} is one of several streams")) for i in range(6)]
    for call in calls:
        next(call)
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay": 0, "downscale_delay": 0}
    arguments = {"model": tiny, "served_model_name": "tiny", "target_ongoing_requests": 1000, **scaling}
    serve.run(app({**ENGINE, **arguments}), name="pagedec", route_prefix="/")
    for call in calls:
        *_, last = call
        assert last.usage.completion_tokens == 400
    wait_for(lambda: len(replicas()) == 1)
    serve.run(app({**ENGINE, **arguments, "target_ongoing_requests": 1}), name="pagedec", route_prefix="/")

    def is_busy() -> bool:
        for call in [stub.GenerateStream(asked(f"{i} is one of several streams")) for i in range(6)]:
            list(call)
        return len(replicas()) == 2

    wait_for(is_busy)


@pytest.mark.long
def test_a_replica_has_its_ranks_in_its_placement_group(target: str, tiny: str, llm: LLM) -> None:
    """One replica of two actors takes the cluster's two processors; a rank that is killed is a pause."""
    from ray import serve
    from ray.util.placement_group import placement_group_table

    from pagedec.serve.ray_serve import app

    serve.delete("pagedec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_ISA", "none")
        arguments = {"model": tiny, "tensor_parallel_size": 2, "num_threads": 1}
        serve.run(app({**ENGINE, **arguments}), name="pagedec", route_prefix="/")
    [want] = llm.generate(["shared by two"], GREEDY, use_tqdm=False)
    with Client(target) as client:
        assert client.generate(["shared by two"], GREEDY)[0].outputs == want.outputs
        groups = [one for one in placement_group_table().values() if one["state"] == "CREATED"]
        assert [one["bundles"] for one in groups] == [{0: {"CPU": 1.0}, 1: {"CPU": 1.0}}]
        stream = iter(client.stream("shared by two", LONG))
        next(stream)
        os.kill(rank_pid(), signal.SIGKILL)
        *_, last = stream
        [whole] = llm.generate(["shared by two"], LONG, use_tqdm=False)
        assert last.outputs[0].token_ids == whole.outputs[0].token_ids


def rank_pid() -> int:
    """Of one of the processes that are ranks: Ray calls them by their class."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::_Actor") and _is_ours(path.parent):
                return int(path.parent.name)
    raise AssertionError("there is no rank")


def _is_ours(process: Path) -> bool:
    """It works for this cluster: others may run on this machine."""
    session = ray._private.worker._global_node.get_session_dir_path()
    return any(session in os.readlink(one) for one in (process / "fd").iterdir())
