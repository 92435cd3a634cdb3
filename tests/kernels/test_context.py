"""Contexts: what one has of its own, and that any number of them compute side by side, in one thread and in several."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels import records
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.library import Context, Epilogue, KernelError, Library, OpList
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.prototypes import PROTOTYPES
from tests.kernels import calls, test_gemm_int8
from tests.kernels.attention_cases import Batch, Branch, Cache, make_plan, run_plan
from tests.kernels.plan_emulation import FlatPlan
from tests.kernels.processing_cases import simple_case
from tests.kernels.test_gemm import Linear

SHAPE = AttentionShape(6, 2, 64, 16, 0.125)


def num_workers(context: Context, cache: Cache, branches: list[Branch]) -> int:
    return FlatPlan.parse(make_plan(context, cache, Batch(branches)).words()).header["num_workers"]


def test_each_has_its_own_number_of_threads(library: Library) -> None:
    cache, before = Cache(SHAPE, 64, torch.float32, seed=1), torch.get_num_threads()
    branches = [cache.branch(700, 3)]
    one, two, five, own = (library.context(n) for n in (1, 2, 5, 0))
    for _ in range(2):
        assert [context.num_threads for context in (one, two, five)] == [1, 2, 5]
        assert [num_workers(context, cache, branches) for context in (five, one, two)] == [5, 1, 2]
    try:
        torch.set_num_threads(before + 1)  # OpenMP's own choice follows it, and no other does
        assert [context.num_threads for context in (one, two, five, own)] == [1, 2, 5, before + 1]
        assert own.num_threads == num_workers(own, cache, branches)
    finally:
        torch.set_num_threads(before)


def test_the_instruction_that_multiplies_bytes_is_left_out_in_one_context_alone(context: Context) -> None:
    without, beside = calls.without_vnni(context), context.library.context()
    assert beside.allow_vnni(True) == context.allow_vnni(True)
    x, weight = calls.normal(70, 300, seed=1), calls.normal(64, 300, seed=2)
    results = [test_gemm_int8.linear(each, x, weight) for each in (without, beside, without)]
    assert all(calls.same_bits(results[0], result) for result in results)


def work(context: Context, seed: int) -> Callable[[], list[Tensor]]:
    """Every kernel that works in memory of its context; each call answers the same, whatever else is under way."""
    x, long = calls.normal(90, 700, seed=seed), calls.normal(40, 4096, seed=seed, dtype=torch.bfloat16)
    weight, bias = calls.normal(160, 700, seed=seed + 1), calls.normal(160, seed=seed + 2)
    plain = Linear.pack(context, calls.normal(320, 4096, seed=seed + 3, dtype=torch.bfloat16))
    cache = Cache(SHAPE, 256, torch.bfloat16, seed=seed)
    branches = [cache.branch(1500 + 64 * seed, 3), cache.branch(90, 9, [-1, 0, 0, 1, 2, 3, 4, 5, 6])]
    plan, q = make_plan(context, cache, Batch(branches)), cache.query(12)
    logits = calls.normal(12, 5000 + seed, seed=seed, scale=3.0)
    rules = LogitsRules(repetition_penalty=1.2, presence_penalty=0.5, no_repeat_ngram_size=2)
    histories = [torch.randint(0, 60, (40,), generator=calls.generator(i)).tolist() for i in range(12)]
    backend = NativeBackend(context.library, torch.float32)
    backend.context = context
    draws = calls.draws(12, seed=seed, row=np.arange(12), position=3, top_p=0.9, temperature=np.arange(1, 13) / 6)

    def once() -> list[Tensor]:
        case = simple_case(histories, logits.clone(), rules)
        processed = case.process(backend)
        array = processed.numpy().copy()
        ids, values, lse = calls.topk_lse(context, array, 300)
        fresh = make_plan(context, cache, Batch(branches))
        return [
            test_gemm_int8.linear(context, x, weight, bias), plain(long, Epilogue.GELU),
            run_plan(context, plan, cache, q).float(), run_plan(context, fresh, cache, q).float(), processed,
            *map(torch.from_numpy, (ids, values, lse, calls.sample(context, array, draws), fresh.words())),
        ]  # fmt: skip

    return once


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(calls.same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_in_turns_each_answers_as_alone(library: Library) -> None:
    works = [work(library.context(threads), seed) for seed, threads in enumerate((1, 3, 2))]
    alone = [once() for once in works]
    for _ in range(2):
        assert all(equal(once(), expected) for once, expected in zip(works, alone, strict=True))


def test_at_the_same_time_each_answers_as_alone(libraries: list[Library]) -> None:
    """Threads with contexts of their own, of one library, with different numbers of threads."""
    works = [work(libraries[-2].context(threads), seed) for seed, threads in enumerate((2, 1, 3))]
    alone = [once() for once in works]
    start = threading.Barrier(len(works))

    def repeat(once: Callable[[], list[Tensor]], expected: list[Tensor]) -> list[bool]:
        start.wait()
        return [equal(once(), expected) for _ in range(12)]

    with ThreadPoolExecutor(len(works)) as pool:
        assert all(all(same) for same in pool.map(repeat, works, alone))


def test_two_threads_in_one_context_are_told(context: Context) -> None:
    """Whoever comes second; and what the other computes is right."""
    context = context.library.context(1)
    linear, x = Linear.pack(context, calls.normal(64, 256, seed=1)), calls.normal(40, 256, seed=2)
    rows, y, told = calls.count(40), torch.empty(40, 64), set[str]()
    program, empty, expected = OpList([linear.record(rows, x, y)] * 3000), OpList([]), linear(x)

    def run(program: OpList) -> bool:
        try:
            context.run(program)
        except KernelError as error:
            told.add(str(error))
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        while not told:
            first = pool.submit(run, program)
            while not first.done() and not told:
                run(empty)
    while not run(program):
        pass
    assert told == {"pd_run: another thread works in this context"}
    assert calls.same_bits(y, expected)
    context.run(empty)


def test_a_plan_outlives_the_context_that_made_it(context: Context) -> None:
    """It is words alone, the same whatever was planned there before."""
    cache = Cache(SHAPE, 256, torch.bfloat16, seed=3)
    large, small = Batch([cache.branch(1500, 20), cache.branch(70, 3, [-1, 0, 0])]), Batch([cache.branch(600, 2)])
    maker, q = context.library.context(3), cache.query(large.num_rows)
    first = make_plan(maker, cache, large)
    make_plan(maker, cache, small)
    second = make_plan(maker, cache, large)
    maker.close()
    assert np.array_equal(first.words(), second.words())
    want = run_plan(context, make_plan(context, cache, large), cache, q)
    assert all(calls.same_bits(run_plan(context, plan, cache, q), want) for plan in (first, second))


@pytest.mark.parametrize("num_threads", [-1, 4097])
def test_a_number_of_threads_that_cannot_be_is_named(library: Library, num_threads: int) -> None:
    """OpenMP would end the process where it cannot start so many."""
    with pytest.raises(KernelError, match=f"^pd_context_new: num_threads is {num_threads}; it must be 0 to 4096$"):
        library.context(num_threads)
    with pytest.raises(KernelError, match=f"^pd_context_new: num_threads is {num_threads}; it must be 0 to 4096$"):
        NativeBackend(library, torch.float32, num_threads=num_threads)


def test_a_processor_has_one_device_and_no_stream(library: Library) -> None:
    for device in (-1, 1):
        with pytest.raises(KernelError, match=f"^pd_context_new: device is {device}; the only one of a CPU is 0$"):
            Context(library, 1, device)
    assert library.functions.pd_stream(library.context().handle) is None


def test_no_context_is_named(library: Library) -> None:
    functions = library.functions
    for name, (kinds, result) in PROTOTYPES.items():
        if not kinds or kinds[0] is not ctypes.c_void_p or "plan" in name.removeprefix("pd_attn_plan"):
            continue
        if name in ("pd_context_free", "pd_stream", "pd_memory_free", "pd_fetch_free"):
            assert getattr(functions, name)(None) is None
            continue
        if name in ("pd_memory_unmap", "pd_nccl_id"):  # take no context
            continue
        blank = [None if hasattr(kind, "contents") or kind is ctypes.c_void_p else 0 for kind in kinds]
        failed = None if name in ("pd_memory_new", "pd_fetch_new") else -1
        assert getattr(functions, name)(*blank) == failed and result is not None
        caller = "pd_run" if name in {f"pd_{kind.name.lower()}" for kind in records.OpKind} else name
        assert library.last_error().startswith(f"{caller}: context is NULL")


def test_a_context_is_freed_twice_safely(library: Library) -> None:
    context = library.context()
    context.close()
    context.close()
    assert context.handle is None
    with pytest.raises(KernelError, match="^pd_run_program: context is NULL"):
        context.run(OpList([]))
