"""Workers as Ray actors: the same tokens as in processes, and what a death costs is a pause."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, BeamSearchParams
from pagedec.errors import InvalidArgument
from pagedec.kernels.library import EMULATED_DEVICE
from tests.cluster.conftest import ROOM
from tests.engine.crowd import SMALL, Tokens, assert_whole, right_answers
from tests.kernels import cuda_library
from tests.parallel.conftest import make_three_heads
from tests.support import wait_for

ray = pytest.importorskip("ray", reason="ray is not installed")


pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Each rank takes its share of torch's threads, which are this process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_three_heads(tmp_path_factory.mktemp("three"))


def engine(path: Path, **arguments: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **arguments})


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Tokens]:
    with engine(path) as llm:
        return right_answers(llm)


def free() -> float:
    return float(ray.available_resources().get("CPU", 0))


DEATHS = [(0, signal.SIGKILL), (1, signal.SIGSTOP), (1, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("links", "deaths"),
    [
        pytest.param(["sockets", "memory"], DEATHS[:1], id="sockets, memory"),
        pytest.param(["nccl"], [], id="nccl", marks=pytest.mark.long),
        pytest.param(["memory"], DEATHS, id="memory, deaths", marks=pytest.mark.long),
        pytest.param(["sockets"], DEATHS, id="sockets, deaths", marks=pytest.mark.long),
    ],
)
def test_two_actors_say_what_one_process_says(
    path: Path,
    expected: list[Tokens],
    links: list[str],
    deaths: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where one is killed while others run, or stopped: new actors take the places of all, by the next link, and
    the cluster's room is given back. A fork leaves them to its parent."""
    monkeypatch.setenv("PAGEDEC_LINK", links[0])
    beams = BeamSearchParams(beam_width=3, max_tokens=5)
    with engine(path) as one:
        [alone] = one.generate([[5, 6, 7]], beams, use_tqdm=False)
    if "nccl" in links:
        if cuda_library.path() is None:
            pytest.skip("the emulated device is not built")
        monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
    # who is stopped is found by it alone; a step may wait for long where other tests run
    limit = 3.0 if any(number == signal.SIGSTOP for _, number in deaths) else 30.0
    with engine(path, **SMALL, tensor_parallel_size=2, executor="ray", step_timeout=limit) as llm:
        assert_whole(llm, expected)
        assert len(set(pids(llm))) == 2 and os.getpid() not in pids(llm)
        [output] = llm.generate([[5, 6, 7]], beams, use_tqdm=False)
        assert [a.token_ids for a in output.outputs] == [a.token_ids for a in alone.outputs]
        check_a_fork_leaves_them(llm, expected)
        monkeypatch.setenv("PAGEDEC_LINK", links[-1])
        for rank, number in deaths:
            before = pids(llm)
            timer = threading.Timer(0.05, os.kill, (before[rank], number))
            timer.start()
            assert right_answers(llm) == expected
            timer.join()
            assert_whole(llm, expected)
            assert not set(pids(llm)) & set(before)
    _wait_for_room()


def pids(llm: LLM) -> tuple[int, ...]:
    return llm.engine.executor.pids  # type: ignore[attr-defined, no-any-return]


def _wait_for_room() -> None:
    """Until all is given back, and the cluster counts no node that is gone: its death is noted after a while."""
    wait_for(lambda: free() == 2.0 and ray.cluster_resources().get("CPU") == 2.0)


def check_a_fork_leaves_them(llm: LLM, expected: list[Tokens]) -> None:
    """Dropped and stopped in a child, they work on here."""
    gc.collect()  # what other tests have left of Ray is not for the child to drop
    child = os.fork()
    if child == 0:
        llm.engine.executor.stop()
        del llm
        gc.collect()
        os._exit(0)
    wait_for(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    time.sleep(1.0)
    assert llm.engine.executor.problem is None
    assert right_answers(llm) == expected
    assert llm.engine.executor.num_restarts == 0


@pytest.mark.long
def test_a_node_is_removed(path: Path, expected: list[Tokens], cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two with a worker each, while they work; the group goes to what is left. One was started without a niceness,
    as by somebody else."""
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setenv("PAGEDEC_LINK", "sockets")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_worker_niceness")
        node = cluster.add_node(num_cpus=1, **ROOM)
    cluster.wait_for_nodes()
    half = placement_group([{"CPU": 1.0, "node:__internal_head__": 0.001}])
    assert half.wait(60)
    with engine(path, **SMALL, tensor_parallel_size=2, executor="ray", num_threads=1, step_timeout=30.0) as llm:
        remove_placement_group(half)
        before = pids(llm)
        if os.geteuid() == 0:  # who may lower a niceness; Ray's own is 15
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in before} == {own}
        assert right_answers(llm) == expected
        ending = threading.Thread(target=cluster.remove_node, args=(node, False))
        ending.start()

        def have_moved() -> bool:
            assert right_answers(llm) == expected
            return not set(pids(llm)) & set(before)

        wait_for(have_moved)
        ending.join()
        assert_whole(llm, expected)
    _wait_for_room()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root lowers a niceness")
def test_an_actor_runs_at_the_engine_s_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own is 15 where a node was not told otherwise."""
    from pagedec.executor import ray as places

    own, (reading, writing) = os.getpriority(os.PRIO_PROCESS, 0), os.pipe()
    found = lambda *_: os.write(writing, str(os.getpriority(os.PRIO_PROCESS, 0)).encode())  # noqa: E731
    monkeypatch.setattr(places, "work", found)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                os.nice(4)
                places._Actor("[]").run(*listener.getsockname(), "0" * 32, 0, own, "")
            finally:
                os._exit(0)
        os.close(writing)
        assert os.read(reading, 10).decode() == str(own)
        os.waitpid(child, 0)
    os.close(reading)


def test_a_cluster_without_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedec.executor import ray as places

    monkeypatch.setattr(places, "PLACE_SECONDS", 1.0)
    with pytest.raises(
        InvalidArgument,
        match="tensor_parallel_size is 3: needs 3 times 1 CPU of the cluster, which has 2 CPU, 2 of them free",
    ):
        engine(path, tensor_parallel_size=3, executor="ray")
    monkeypatch.setattr(places, "gpus_of_a_rank", lambda: 1)
    needs = "needs 1 times 1 CPU and 1 GPU of the cluster, which has 2 CPU, 2 of them free and 0 GPU, 0 of them free"
    with pytest.raises(InvalidArgument, match=needs):
        engine(path, executor="ray", num_threads=1)
    _wait_for_room()


def test_without_ray(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidArgument, match=r"executor is 'ray': needs the package ray: install pagedec\[ray\]"):
        engine(path, executor="ray")


def test_sigterm_stays_the_server_s(cluster: Any) -> None:
    """A server loads its model in a thread; there Ray had SIGTERM abort the process."""
    code = """
import os, signal, threading
from pagedec.executor.ray import connect
got = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: got.set())
thread = threading.Thread(target=connect)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print("taken" if got.wait(10) else "not taken")
"""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["taken"]), ended.stderr
