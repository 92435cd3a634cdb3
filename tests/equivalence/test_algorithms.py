"""The protocol carries every algorithm: the decoders of tests/algorithms on the real model, alone and mixed in one
batch, with pools so small that preemption and eviction never stop. Lossless methods return what plain decoding returns;
beams and sessions what plain lists return, computed from whole texts without any cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pagedec import SamplingParams
from pagedec.core.sampler import Sampler
from pagedec.engine.engine import Engine
from tests.algorithms.beam import BeamParams, beam
from tests.algorithms.interactive import Client, InteractiveParams, session
from tests.algorithms.oracle_tree import OracleTreeParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.equivalence.conftest import NATIVE
from tests.equivalence.harness import SPECULATIONS, Case, Scratch, prompts, run
from tests.support import add

Make = Callable[..., Engine]
Plain = Callable[[Case], list[list[int]]]
MAX_TOKENS = 10
SESSION_ROOM = 24  # tokens a session's branch may have in all, its prompt included
METHODS: dict[str, Callable[..., SamplingParams]] = {
    "plain": SamplingParams,
    "random tree": RandomTreeParams,
    **{name: partial(SamplingParams, speculative=table) for name, table in SPECULATIONS.items()},
}


def sampled(i: int, method: Callable[..., SamplingParams]) -> SamplingParams:
    """Greedy, one seeded answer, or several, in turn."""
    if i % 3 == 0:
        return method(temperature=0, seed=0, max_tokens=MAX_TOKENS)
    return method(temperature=0.8, seed=i, n=1 if i % 3 == 1 else 3, max_tokens=MAX_TOKENS)


def plain_params(params: SamplingParams) -> SamplingParams:
    names = ("n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    return SamplingParams(**{name: getattr(params, name) for name in names})


def lossless() -> list[Case]:
    methods = [name for name in METHODS for _ in range(2)]
    texts = prompts(len(methods), 5, 40, seed=3)
    return [
        Case(f"{name} {i}", text, sampled(i, METHODS[name]))
        for i, (name, text) in enumerate(zip(methods, texts, strict=True))
    ]


def assert_plain(cases: list[Case], tokens: dict[str, list[list[int]]], plain: Plain) -> None:
    for case in cases:
        want = plain(Case(f"plain {case.name}", case.prompt, plain_params(case.params)))
        assert tokens[case.name] == want, f"{case.name} differs from plain decoding"


@pytest.mark.sampled(10, alike=["kind"])
def test_each_method_alone_equals_plain_decoding(engine: Make, plain: Plain) -> None:
    own = engine()
    for case in lossless()[::2]:
        assert_plain([case], run(own, [case]).tokens, plain)


@pytest.mark.sampled(10, alike=["kind"])
@pytest.mark.parametrize(("num_blocks", "rows"), [(14, 64), (16, 16)])
def test_all_methods_in_one_batch_under_preemption(engine: Make, plain: Plain, num_blocks: int, rows: int) -> None:
    cases = lossless()
    outcome = run(engine(num_blocks=num_blocks, max_num_batched_tokens=rows), cases, random.Random(num_blocks + rows))
    assert outcome.num_preemptions > 2, "nothing was shown"
    assert_plain(cases, outcome.tokens, plain)


@NATIVE
@pytest.mark.sampled(10, alike=["kind"])
def test_interleaved_true_continuations_settle_by_compaction(engine: Make, scratch: Scratch, plain: Plain) -> None:
    """Several streams accept different paths of one tree in one step, none of them a chain."""
    own = engine()
    for n, seed in ((1, 5), (3, 6)):
        sampler = Sampler(temperature=0.8, seed=seed)
        params = OracleTreeParams(
            n=n,
            temperature=0.8,
            seed=seed,
            max_tokens=MAX_TOKENS,
            oracle=partial(scratch.draw, sampler=sampler),
            depth=2,
            wrong=0,
        )
        case = Case(f"oracle {n}", prompts(1, 12, 30, seed=seed)[0], params)
        outcome = run(own, [case])
        assert outcome.num_accepted >= n * 2
        assert_plain([case], outcome.tokens, plain)


def beams(count: int) -> list[Case]:
    texts = prompts(count, 6, 24, seed=9)
    return [
        Case(
            f"beam {i}",
            text,
            BeamParams(2 + 2 * (i % 2), max_tokens=5, early_stopping=i % 2 == 0, length_penalty=0.5 + 0.5 * (i % 3)),
        )
        for i, text in enumerate(texts)
    ]


@pytest.mark.sampled(10, alike=["kind"])
def test_beams_equal_beam_search_on_lists(engine: Make, scratch: Scratch) -> None:
    roomy, tight = engine(), engine(num_blocks=17, max_num_batched_tokens=24)
    cases, eos = beams(2), roomy.limits.eos_token_ids
    want = {
        case.name: [text[len(case.prompt) :] for text in beam(scratch.logprobs, case.prompt, case.params, eos)]
        for case in cases
    }
    assert run(roomy, cases).tokens == want
    outcome = run(tight, [*cases, *lossless()[:4]], random.Random(6))
    assert outcome.num_preemptions > 0
    assert {case.name: outcome.tokens[case.name] for case in cases} == want


@pytest.mark.sampled(8, alike=["kind"])
@pytest.mark.parametrize("num_blocks", [64, 6])
def test_sessions_equal_plain_lists(engine: Make, scratch: Scratch, num_blocks: int) -> None:
    """Forks, rollbacks and appends in a client's own hands, beside requests that fight for the blocks."""
    own = engine(num_blocks=num_blocks, max_num_batched_tokens=32)
    prompt, seed, vocab_size = prompts(1, 8, 12, seed=4)[0], 3, own.limits.vocab_size
    limit = SESSION_ROOM
    params = InteractiveParams(temperature=0.8, seed=seed, max_tokens=200, ignore_eos=True)
    request = add(own, "session", prompt, params)
    client = Client(
        lambda: request.branches,
        lambda verdict: own.edit("session", verdict),
        request.history.tokens,
        seed,
        limit,
        vocab_size,
    )
    add(own, "beside", prompts(1, 20, 30, seed=5)[0], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for _ in range(500):
        if not own.scheduler.requests:
            break
        if not request.closed:
            client.act()
        own.step()
    sampler = Sampler(temperature=0.8, seed=seed)
    want = session(partial(scratch.draw, sampler=sampler), prompt, seed, limit, vocab_size)
    assert client.texts == want
    own.scheduler.check()


@pytest.mark.sampled(10, alike=["kind"])
def test_one_row_is_enough_to_advance_every_method(engine: Make, plain: Plain) -> None:
    """With the smallest budget nothing can be drafted, and everything still ends, with the same tokens."""
    cases = [replace(case, name=f"{case.name}, one row") for case in lossless()[:6]]
    assert_plain(cases, run(engine(max_num_batched_tokens=1), cases).tokens, plain)
