"""CUDA's read-out: what can go wrong besides what the modules of all libraries ask. Orders of
threads, vocabularies in parts, and sets of tokens that are found in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.library import (
    BestArgs,
    Context,
    Library,
    SampleArgs,
    TopkLseArgs,
    VerifyArgs,
    load,
)
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.reference_best import CANDIDATE_DTYPE
from pagedec.kernels.reference_readout import largest, log_probabilities
from tests.kernels import calls, cuda_library, host_memory
from tests.kernels.processing_cases import random_case, simple_case
from tests.kernels.test_best import groups_of, rows_of
from tests.kernels.test_guard_pages import guarded
from tests.kernels.test_sample import PARAMETERS, SHAPES, shaped
from tests.kernels.test_verify import cases, verify

Kernel = Callable[[Context], list[torch.Tensor]]
X = calls.normal(7, 1000, seed=1)
DRAWS = np.concatenate([calls.draws(1, stream=3, **parameters) for parameters in PARAMETERS])


@pytest.fixture(scope="module", params=cuda_library.cases())
def device(request: pytest.FixtureRequest) -> Library:
    return cuda_library.open_library(request.param)


def native(context: Context, num_threads: int = 0) -> NativeBackend:
    return calls.native(context, num_threads)


# ---- the order of threads
def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def top(context: Context) -> list[torch.Tensor]:
    x = X.numpy()
    return tensors(calls.argmax(context, x), *calls.topk_lse(context, x, 7), *calls.topk_lse(context, x, 700))


def drawn(context: Context) -> list[torch.Tensor]:
    return tensors(calls.sample(context, X.numpy(), DRAWS), context.gumbel(1, 2, 3, 5, 5000))


def verified(context: Context) -> list[torch.Tensor]:
    return tensors(*(verify(context, *case) for case in list(cases((300, 280), 3))[::9]))


def ruled(context: Context) -> list[torch.Tensor]:
    backend = native(context, context.num_threads)
    return [random_case(seed).process(backend) for seed in range(3)]


def ranked(context: Context) -> list[torch.Tensor]:
    found = []
    for is_drawn in (0, 1):
        rows, groups = rows_of([3, 4], np.arange(7, dtype=np.float32)), groups_of([3, 4], [9, 1100], is_drawn=is_drawn)
        groups["top_p"] = 0.95
        found += native(context, context.num_threads).best(X, None, rows, groups)
    return [torch.from_numpy(candidates.view(np.int32)) for candidates in found]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kernel", [top, drawn, verified, ruled, ranked], ids=lambda kernel: kernel.__name__)
def test_no_order_changes_a_bit(device: Library, kernel: Kernel) -> None:
    """Nor how many blocks there are."""
    found = []
    for seed, num_threads in enumerate((1, 2, 5, 3)):
        cuda_library.shuffle(device, seed)
        found.append(kernel(device.context(num_threads)))
    cuda_library.shuffle(device, 1)
    for other in found[1:]:
        assert all(calls.same_bits(a, b) for a, b in zip(found[0], other, strict=True))


# ---- which tokens may be drawn
CUTS: list[dict[str, Any]] = [
    {"top_k": 3}, {"top_k": 300}, {"top_k": 513}, {"top_k": 2500}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.9999},
    {"top_p": 1e-30}, {"top_p": 0.7, "temperature": 50.0}, {"min_p": 0.1}, {"min_p": 1.0},
    {"top_k": 1000, "top_p": 0.8}, {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 2000, "top_p": 0.97, "min_p": 0.01, "temperature": 2.0},
]  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", [*SHAPES, "zeros"])
@pytest.mark.parametrize("vocab", [700, 3000])
def test_the_tokens_kept_are_those_of_the_definition(device: Library, vocab: int, kind: str) -> None:
    """All of them are candidates of a draw without replacement that wants them all."""
    x = np.zeros((1, vocab), np.float32) if kind == "zeros" else shaped(kind, vocab, 3)
    for cut in CUTS:
        groups = groups_of([1], [vocab], is_drawn=1, **cut)
        [found] = native(device.context()).best(torch.from_numpy(x), None, rows_of([1], 0.0), groups)
        [draw] = calls.draws(1, **cut)
        wanted = np.flatnonzero(log_probabilities(x[0], draw) > -np.inf)
        assert sorted(found["token"].tolist()) == wanted.tolist(), cut
        assert (np.diff(found["key"]) <= 0).all()


@pytest.mark.parametrize("always", [2, 400, 600])
def test_tokens_that_are_always_kept(device: Library, always: int) -> None:
    x = shaped("ties", 2000, 5)
    for cut in ({"top_k": 3}, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 700, "top_p": 0.5, "min_p": 0.9}):
        groups = groups_of([1], [2000], is_drawn=1, min_tokens_to_keep=always, **cut)
        [found] = native(device.context()).best(torch.from_numpy(x), None, rows_of([1], 0.0), groups)
        [draw] = calls.draws(1, **cut)
        alone = np.flatnonzero(log_probabilities(x[0], draw) > -np.inf)
        assert set(found["token"].tolist()) == {*largest(x[0], always).tolist(), *alone.tolist()}


# ---- many rows, large vocabularies
@pytest.mark.parametrize("rows", [140, pytest.param(600, marks=pytest.mark.long)])
def test_many_rows(device: Library, rows: int) -> None:
    context, plain = device.context(), NativeBackend(load("scalar"), torch.float32).context
    x = np.floor(calls.normal(rows, 37, seed=4, scale=3.0).numpy())
    draws = calls.draws(rows, row=np.arange(rows), stream=np.arange(rows), top_p=0.9, temperature=1.3)
    assert np.array_equal(calls.sample(context, x, draws), calls.sample(plain, x, draws))
    for mine, theirs in zip(calls.topk_lse(context, x, 5)[:2], calls.topk_lse(plain, x, 5)[:2], strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("vocab", [8192, 8193, 40000, 262144, 262145, 300001])
def test_rules_of_a_vocabulary_in_parts(device: Library, vocab: int) -> None:
    """Tokens at the ends of each part, met once and often."""
    edges = [t for t in (0, 8191, 8192, 16383, 16384, 262143, 262144, vocab - 2, vocab - 1) if t < vocab]
    rng = np.random.default_rng(vocab)
    histories = [rng.choice(edges, 60).tolist(), rng.integers(0, vocab, 500).tolist()]
    allowed = tuple(edges[::2]) + tuple(rng.integers(0, vocab, 50).tolist())
    for rules in (LogitsRules(repetition_penalty=1.3, frequency_penalty=0.25, presence_penalty=0.5),
                  LogitsRules(allowed_token_ids=allowed, frequency_penalty=-1.5)):  # fmt: skip
        case = simple_case(histories, calls.normal(2, vocab, seed=2), rules, prompt=7)
        expected = case.process(NativeBackend(load("scalar"), torch.float32))
        assert calls.same_bits(case.process(native(device.context())), expected)


def test_top_of_rows_with_equals_everywhere(device: Library) -> None:
    """More equals than there is room for, in runs that end among them."""
    x = np.zeros((2, 5000), np.float32)
    x[1, ::3] = -0.0
    x[1, 4000:] = 1.0
    ids, values, _ = calls.topk_lse(device.context(), x, 4500)
    assert ids[0].tolist() == list(range(4500)) and (values[0] == 0).all()
    assert ids[1].tolist() == [*range(4000, 5000), *range(3500)]


# ---- nothing in front of an array and nothing behind it is touched: an error is a segmentation fault
@pytest.mark.sampled(8)
@pytest.mark.parametrize("at_front", [False, True])
@pytest.mark.parametrize("vocab", [1, 5, 1001])
def test_ends_of_arrays(device: Library, vocab: int, at_front: bool) -> None:
    if not host_memory.reaches_all(device.isa):
        pytest.skip("the device does not reach the pages")
    context = device.context()
    kept: list[torch.Tensor] = []

    def at(array: np.ndarray | torch.Tensor) -> int:
        data = torch.from_numpy(array.view(np.uint8).copy()) if isinstance(array, np.ndarray) else array
        kept.append(guarded(data, at_front=at_front))
        return kept[-1].data_ptr()

    x, lse, two = calls.normal(2, vocab, seed=3), torch.zeros(2), calls.count(2)
    for k in {0, 1, min(40, vocab), min(600, vocab), vocab}:
        ids, values = torch.zeros(2, k, dtype=torch.int32), torch.zeros(2, k)
        context.call(TopkLseArgs(at(two), at(x), None, at(ids), at(values), at(lse), vocab, k))
    draws = np.concatenate([calls.draws(2, row=[0, 1], **parameters) for parameters in PARAMETERS])
    n, tokens = calls.count(len(draws)), np.zeros(len(draws), np.int32)
    context.call(SampleArgs(at(n), at(draws), at(x), at(tokens), vocab))
    context.call(VerifyArgs(at(n), at(draws), at(draws), at(tokens), at(x), at(x), at(tokens), vocab, vocab))
    for is_drawn in (0, 1):
        rows, groups = rows_of([2], 0.0), groups_of([2], [2 * vocab], is_drawn=is_drawn, top_p=0.9)
        found, counts = np.zeros(2 * vocab, CANDIDATE_DTYPE), np.zeros(1, np.int32)
        context.call(BestArgs(at(two), at(x), at(lse), at(rows), at(groups), at(found), at(counts), 1, vocab))
    case = random_case(3, vocab=vocab)
    logits, plane = guarded(case.logits, at_front=at_front), guarded(case.plane, at_front=at_front)
    backend = native(context)
    backend.process_logits(logits, 0, case.forward, replace(case.cache(), tokens=plane), case.known(backend))
    assert calls.same_bits(logits, case.expected())
