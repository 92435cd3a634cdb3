"""Ranks on CUDA devices that exchange their parts by NCCL: emulated devices, and what stands in for it between them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import LLM, BeamSearchParams, SamplingParams, environment
from pagedec.errors import InvalidArgument, InvariantError
from pagedec.kernels import reference
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, AllGatherArgs, GatherArgs, KernelError, Library, OpList, load
from pagedec.kernels.places import nccl_path
from pagedec.kernels.sized_lists import SizedLists, SizedRecords
from pagedec.runtime import links
from pagedec.runtime.nccl import BROADCAST, NcclLink, why_not_all
from tests.engine.crowd import SMALL, right_answers
from tests.engine.deaths import executor_of, hang
from tests.kernels import cuda_library
from tests.kernels.cuda_build import ROOT, tool
from tests.models.checkpoints import make_checkpoint, variant
from tests.parallel.pairs import beside
from tests.parallel.test_processes import MODES, PROMPTS

emulated = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
MOST, DIM, WIDTHS = 40, 130, [37, 30]  # rows of more bytes than the stand-in moves at a time


@pytest.fixture(autouse=True)
def _by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_LINK", "nccl")


def backend(library: Library | None = None) -> DeviceBackend:
    return DeviceBackend(library or load(EMULATED_DEVICE), torch.float32)


def linked(rank: int, exchange: links.Exchange, seconds: float = 20.0) -> tuple[DeviceBackend, NcclLink]:
    device = backend()
    link = links.connect(rank, 2, exchange, device, seconds)
    assert isinstance(link, NcclLink)
    device.link = link
    return device, link


def values(rank: int, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank)) * 1e3


def exchanged(rank: int, exchange: links.Exchange) -> None:
    """A sum and columns of logits, for steps of several sizes: each list is carried out, recorded and repeated."""
    device, link = linked(rank, exchange)
    rows, read = (device.zeros((1,), torch.int32) for _ in range(2))
    parts, again = (link.parts((MOST, DIM), torch.float32) for _ in range(2))
    logits = link.parts((MOST * max(WIDTHS),), torch.float32)
    assert parts.data_ptr() == again.data_ptr() and link.received.numel() == 2 * MOST * DIM
    out, joined = device.zeros((MOST, DIM), torch.float32), device.zeros((MOST, sum(WIDTHS)), torch.float32)
    program = device.program()
    for each in (parts, again):  # the second adds what the first has given once more
        program.sum_parts(rows, each, out, add=each is again)
    program.join_parts(read, logits, WIDTHS, joined)
    program.finish()
    for seed, (n, m) in enumerate([(1, 1), (3, 3), (4, 2), (3, 4), (MOST, 5), (3, 3), (33, 16)]):
        for counter, count in ((rows, n), (read, m)):
            device.write(counter, np.array([count], np.int32))
        own, columns = values(rank, seed, n, DIM), values(rank, seed, m, WIDTHS[rank])
        device.memory.fill_from(parts[rank][:n], own)
        device.memory.fill_from(logits[rank][: columns.numel()], columns.flatten())
        program.run()
        whole = torch.stack([values(other, seed, n, DIM) for other in range(2)])
        expected = reference.add_parts(whole)
        assert torch.equal(device.memory.get(out[:n]), expected + expected)
        if rank == 0:
            side = [values(other, seed, m, width) for other, width in enumerate(WIDTHS)]
            assert torch.equal(device.memory.get(joined[:m]), torch.cat(side, dim=1))
    lists = program._last
    assert isinstance(lists, SizedLists) and set(lists._by_sizes) == {(1, 1), (4, 4), (MOST, 16)}
    assert all(own.program.recording for own in lists._by_sizes.values())
    tokens = np.arange(BROADCAST + 7, dtype=np.int32) * (rank + 1)
    link.broadcast(tokens)
    assert np.array_equal(tokens, np.arange(BROADCAST + 7))
    with pytest.raises(InvariantError, match="nothing is sent"):
        link.gather_first(parts, 1)


@emulated
def test_values_come_in_the_order_of_ranks() -> None:
    with beside(lambda exchange: exchanged(1, exchange)) as (exchange, end):
        exchanged(0, exchange)
        assert end() == 0


def recorded_anew(rank: int, exchange: links.Exchange) -> None:
    """The plan of one rank grows in steps in which the other's does not: both record anew, or the exchange fails."""
    device, link = linked(rank, exchange)
    plan, cache = device.plan(AttentionShape(1, 1, 16, 8, 0.25)), device.cache(1, 64, 1, 16, 8)
    rows, (q, out) = device.zeros((1,), torch.int32), (device.zeros((1, 16), torch.float32) for _ in range(2))
    parts, program = link.parts((1, 16), torch.float32), device.program()
    program.attention(rows, plan, q, cache, 0, out)
    program.sum_parts(rows, parts, out, add=False)
    program.finish()
    device.write(rows, np.ones(1, np.int32))
    for long in (None, None, None, 0, 1, None, None):
        kv_len = np.array([500 if rank == long else 4], np.int32)
        plan.update(np.array([0, 1], np.int32), kv_len, np.arange(64, dtype=np.int32)[None], None)
        device.memory.fill_from(parts[rank], torch.full((1, 16), rank + 1.0))
        program.run()
        assert torch.equal(device.memory.get(out), torch.full((1, 16), 3.0))


@emulated
def test_ranks_record_at_a_time() -> None:
    with beside(lambda exchange: recorded_anew(1, exchange)) as (exchange, end):
        recorded_anew(0, exchange)
        assert end() == 0


def gathered(device: DeviceBackend, is_late: bool = False) -> None:
    """One exchange, waited for; `is_late`: by its own copy to the host."""
    own, parts = device.zeros((4,), torch.float32), device.zeros((8,), torch.float32)
    device.context.call(AllGatherArgs(own.data_ptr(), parts.data_ptr(), 4))
    if is_late:
        fetch, out = device.context.new_fetch(parts.nbytes), np.empty(8, np.float32)
        fetch.begin(parts.data_ptr(), parts.nbytes)
        return fetch.end(out.ctypes.data)
    device.memory.get(parts)
    return None


@emulated
@pytest.mark.parametrize(
    ("seconds", "dies", "problem"),
    [
        # found by who looks, or by the next exchange
        (20.0, True, "nccl(CommGetAsyncError|AllGather): remote process exited or there was a network error"),
        (0.2, False, "await: rank 0 of 2 is not through after 0.2 s: another one may not have come"),
    ],
    ids=["dies", "hangs"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_does_not_come(seconds: float, dies: bool, problem: str, is_late: bool) -> None:
    """Whoever waits for it fails, and everybody who exchanges something afterwards."""

    def second(exchange: links.Exchange) -> None:
        device, _ = linked(1, exchange, seconds)
        gathered(device)
        if not dies:
            signal.pause()

    with beside(second) as (exchange, end):
        device, link = linked(0, exchange, seconds)
        gathered(device)
        if dies:
            assert end() == 0
        with pytest.raises(KernelError, match=problem):
            gathered(device, is_late)
        with pytest.raises(KernelError, match="the ranks were left: " + problem.split(":")[0]):
            gathered(device)
        assert device.library.functions.pd_nccl_world(device.context.handle) == 0


def recorded(device: DeviceBackend) -> OpList:
    """A list with an exchange that has been recorded."""
    own, parts = device.zeros((4,), torch.float32), device.zeros((8,), torch.float32)
    program = OpList([AllGatherArgs(own.data_ptr(), parts.data_ptr(), 4)])
    for _ in range(2):
        device.context.run(program)
    device.memory.get(parts)
    assert program.program.recording
    return program


@emulated
def test_ranks_are_left_although_there_are_recordings() -> None:
    """NCCL waits for the end of all graphs with exchanges before it gives a communicator up, whoever has failed, and
    also where a context ends before the lists that it has recorded."""

    def second(exchange: links.Exchange) -> None:
        recorded(linked(1, exchange)[0])

    with beside(second) as (exchange, end):
        device, _ = linked(0, exchange)
        program = recorded(device)
        assert end() == 0
        with pytest.raises(KernelError, match="remote process exited"):
            device.context.run(program)  # ranks ask one another whether it is to be recorded anew
        with pytest.raises(KernelError, match="the ranks were left: ncclCommGetAsyncError"):
            device.context.run(program)
        device.context.close()
    ended = backend()
    ended.library.open_nccl(nccl_path(ended.library.path))
    ended.context.join(ended.library.nccl_id(), 0, 1, 1.0)
    program = recorded(ended)
    ended.context.close()
    program.belong_to(ended.library)


@emulated
def test_a_rank_that_does_not_join() -> None:
    library, device = load(EMULATED_DEVICE), backend()
    library.open_nccl(nccl_path(library.path))
    with pytest.raises(KernelError, match="ncclCommInitRankConfig: rank 1 of 2 has waited 0.1 s for the others"):
        device.context.join(library.nccl_id(), 1, 2, 0.1)
    with pytest.raises(KernelError, match="pd_all_gather: the context has joined no ranks; pd_nccl_join must come"):
        gathered(device)


@emulated
@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((2, 2, 1.0), "pd_nccl_join: rank is 2; it must be 0 to 1"),
        ((0, 0, 1.0), "pd_nccl_join: world is 0; it must be 1 to 65536"),
        ((0, 1, float("nan")), "pd_nccl_join: seconds is nan; it must be above 0 and finite"),
    ],
)
def test_mistakes_are_named(numbers: tuple[int, int, float], problem: str) -> None:
    with pytest.raises(KernelError, match=problem):
        backend().context.join(bytes(128), *numbers)
    for record, name in ((AllGatherArgs(64, 64, 0), "num_values is 0"), (GatherArgs(None, 64, 1), "own is NULL")):
        with pytest.raises(KernelError, match=name):
            load(EMULATED_DEVICE).context().call(record)
    with pytest.raises(KernelError, match="NCCL is for CUDA devices; a processor has none"):
        load("scalar").open_nccl(None)


@emulated
def test_what_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another library, which has opened none yet."""
    library = Library(Path(shutil.copy(load(EMULATED_DEVICE).path, tmp_path)))
    with pytest.raises(InvalidArgument, match="PAGEDEC_LINK is 'nccl': NCCL cannot be had: rank 0: .*; install nvidia"):
        links.connect(0, 2, lambda own: [own, own], backend(library), 1.0)
    monkeypatch.setenv("PAGEDEC_NCCL", str(load("scalar").path))
    with pytest.raises(KernelError, match=r"pd_nccl_open: .*scalar.so has no function nccl\w+: it must be NCCL 2.14"):
        library.open_nccl(nccl_path(library.path))
    with pytest.raises(KernelError, match="pd_nccl_id: no library is open; pd_nccl_open must come first"):
        library.nccl_id()
    monkeypatch.setenv("PAGEDEC_NCCL", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="PAGEDEC_NCCL is .*; it must be an existing file"):
        nccl_path(library.path)


def test_who_can_exchange_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a device each, which processes may number from 0 each for itself."""
    told = [{"nccl": "", "place": ["one", place]} for place in ("0", "1")]
    assert why_not_all(told) == ""
    assert why_not_all([*told, {"nccl": "no", "place": None}]) == "rank 2: no"
    assert why_not_all([*told, told[0]]) == "ranks 0 and 2 share a device"
    assert why_not_all([{"nccl": "", "place": None}] * 3) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert [environment.visible_device(number) for number in (0, 1, 2)] == ["3", "GPU-5", "2"]


def test_sizes_hold_what_is_exchanged() -> None:
    for base, most in ((2, 2048), (4, 128), (2, 40)):
        sized = SizedRecords(torch.zeros(1), most, base, lambda n: [])
        sizes = {n: sized.size(n) for n in range(1, most + 1)}
        assert all(n <= size < max(2, base * n) and size <= most for n, size in sizes.items())
        assert len(set(sizes.values())) <= 12


def test_what_is_declared_is_nvidia_s(tmp_path: Path) -> None:
    """By NCCL's own header, where there is one."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    headers = [Path(place) / "include" for place in (found.submodule_search_locations or ())] if found else []
    nvcc = tool("nvcc")  # which knows where CUDA's headers are
    if nvcc is None or not any((place / "nccl.h").is_file() for place in headers):
        pytest.skip("no nvcc, or no nccl.h")
    places = [f"-I{place}" for place in (*headers, ROOT / "csrc", ROOT / "csrc" / "include")]
    source = str(Path(__file__).parent / "nccl_declared.cpp")
    subprocess.run([nvcc, "-std=c++20", "-c", *places, source, "-o", str(tmp_path / "out.o")], check=True)


# -------------------------------------------------------------------------------------------------------------- engines
PLAIN: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
PARAMS: list[Any] = [
    SamplingParams(temperature=0, speculative={"method": "ngram", "num_speculative_tokens": 4}, **PLAIN),
    SamplingParams(seed=3, n=2, logprobs=2, speculative=False, **PLAIN),
    SamplingParams(seed=5, **PLAIN),
    BeamSearchParams(beam_width=3, max_tokens=5),
]


def two_of(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded from now on is for devices, two of them."""
    if isa == CUDA and (not cuda_library.has_device() or load(CUDA).num_devices < 2):
        pytest.skip("no two CUDA devices")
    monkeypatch.setenv("PAGEDEC_ISA", isa)


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_two_processes_say_what_one_says(tmp_path: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, of a model too, samples and beams, in steps that read more or fewer rows; and again when a rank is killed
    while others run. Ranks have as many heads, so they do not agree on when to record."""
    path = tmp_path / "model"
    make_checkpoint(variant("even", length=8, num_attention_heads=4, num_key_value_heads=2, head_dim=16), path)
    arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **SMALL}
    arguments["speculative_config"] = {"model": str(path), "num_speculative_tokens": 3}
    prompts, said = [[7, 9, 11, 7, 9, 11, 7], [3] * 30, [50, 60, 70], list(range(5, 25))], []
    for world in (1, 2):
        if world == 2:
            two_of(isa, monkeypatch)
        with LLM(str(path), tensor_parallel_size=world, step_timeout=20.0, **arguments) as llm:
            for kills in (False, True)[:world]:
                killed = executor_of(llm).pids if kills else ()
                timer = threading.Timer(0.05, lambda pids=killed: os.kill(pids[1], signal.SIGKILL))
                if kills:
                    timer.start()
                outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
                said.append([[answer.token_ids for answer in output.outputs] for output in outputs])
                if kills:
                    timer.join()
                    assert not set(executor_of(llm).pids) & set(killed)
                assert kills or llm.engine.stats.num_failed_steps == 0
            llm.engine.scheduler.check()
    assert said[0] == said[1] == said[2]


@pytest.mark.long
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_everything_that_ranks_do(path: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to generate, each alone and all at once; and a rank of each kind hangs."""
    drafting = {"model": str(path), "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
    prompts, params = PROMPTS * len(MODES), [own for own in MODES.values() for _ in PROMPTS]
    said = []
    with LLM(str(path), speculative_config=drafting, **settings) as llm:
        said.append(llm.generate(prompts, params, use_tqdm=False))
        expected = right_answers(llm)
    two_of(isa, monkeypatch)
    with LLM(str(path), tensor_parallel_size=2, speculative_config=drafting, **settings) as llm:
        said.append(llm.generate(prompts, params, use_tqdm=False))
        said.append([llm.generate([p], own, use_tqdm=False)[0] for p, own in zip(prompts, params, strict=True)])
    tokens = [[[answer.token_ids for answer in output.outputs] for output in outputs] for outputs in said]
    assert tokens[0] == tokens[1] == tokens[2]
    with LLM(str(path), tensor_parallel_size=2, step_timeout=2.0, **{**settings, **SMALL}) as llm:
        for rank in (0, 1):
            hang(llm, expected, rank)
