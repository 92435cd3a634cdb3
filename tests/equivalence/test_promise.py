"""Exact: a request returns the same bits alone or in a crowd, chunked or whole, preempted or not, on a prefix cache hit
or a miss, as one of n samples or by itself, speculated or not. Tokens and eight log-probabilities a position are
compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pagedec import SamplingParams
from pagedec.core.protocol import DecoderContext
from pagedec.decoders import Sampling, decoder
from pagedec.engine.engine import Engine
from tests.algorithms.random_tree import RandomTreeParams
from tests.equivalence.conftest import NATIVE
from tests.equivalence.harness import SPECULATIONS, Case, Outcome, prompts, run, traced

Make = Callable[..., Engine]
Calm = tuple[list[Case], Outcome]
Once = Callable[[str, Callable[[], Calm]], Calm]


@dataclass(frozen=True, slots=True)
class StreamParams(SamplingParams):
    """One stream by its name."""

    stream: int = 0


@decoder("test-stream", params=StreamParams)
class Stream(Sampling):
    """What sample `stream` of n would be, by itself."""

    def __init__(self, params: StreamParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.initial_state = (params.stream,)


GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12)


def cases(count: int, low: int = 3, high: int = 60) -> list[Case]:
    """Greedy and seeded requests in turn, traced."""
    return [
        Case(f"request {i}", prompt, traced(GREEDY if i % 2 else replace(SEEDED, seed=i)))
        for i, prompt in enumerate(prompts(count, low, high))
    ]


def fresh(case: Case, name: str = "", **changes: object) -> Case:
    """The same request with an empty trace."""
    inner = replace(case.params.inner, **changes) if changes else case.params.inner
    return Case(name or case.name, case.prompt, traced(inner))


def assert_same(a: list[Case], b: list[Case], left: Outcome, right: Outcome) -> None:
    """Tokens and traced bits of two runs of the same requests. A draft may be accepted past the end of an answer, so
    the second may have looked at more positions."""
    for one, other in zip(a, b, strict=True):
        assert left.tokens[one.name] == right.tokens[other.name], f"{one.name}: tokens differ"
        assert one.params.trace.items() <= other.params.trace.items(), f"{one.name}: equal tokens from different bits"
        assert one.params.trace, f"{one.name}: nothing was traced"


def alone(engine: Engine, requests: list[Case]) -> Outcome:
    outcome = Outcome({})
    for case in requests:
        outcome.tokens |= run(engine, [case]).tokens
    return outcome


@pytest.fixture(scope="module")
def once(kind: str) -> Once:
    """What several tests are compared with, made by the first of them."""
    known: dict[str, Calm] = {}

    def result(name: str, make: Callable[[], Calm]) -> Calm:
        if name not in known:
            known[name] = make()
        return known[name]

    return result


@pytest.mark.sampled(10, alike=["kind"])
def test_alone_equals_in_a_crowd_of_16_mixed_lengths(engine: Make) -> None:
    one, crowd = cases(16), cases(16)
    assert_same(one, crowd, alone(engine(enable_prefix_caching=False), one), run(engine(), crowd))


@NATIVE
@pytest.mark.sampled(10, alike=["kind"])
@pytest.mark.parametrize("rows", [5, 33])
def test_chunked_equals_whole(engine: Make, rows: int) -> None:
    whole, chunked = cases(5, 40, 150), cases(5, 40, 150)
    assert_same(whole, chunked, run(engine(), whole), run(engine(max_num_batched_tokens=rows), chunked))


@pytest.mark.sampled(10, alike=["kind"])
def test_preempted_equals_not(engine: Make) -> None:
    calm, tossed = cases(8), cases(8)
    outcome = run(engine(num_blocks=12), tossed, random.Random(1))
    assert outcome.num_preemptions > 3
    assert_same(calm, tossed, run(engine(), calm), outcome)


@NATIVE
@pytest.mark.sampled(3, alike=["kind"])
def test_prefix_hit_equals_miss(engine: Make) -> None:
    miss, hit, warm = cases(5, 33, 90), cases(5, 33, 90), engine()
    first = run(warm, miss)
    second = run(warm, hit)
    assert second.num_cached >= sum(len(case.prompt) // 16 * 16 for case in hit)
    assert_same(miss, hit, first, second)


@NATIVE
@pytest.mark.sampled(3, alike=["kind"])
def test_four_samples_equal_their_streams_alone(engine: Make) -> None:
    prompt = prompts(1, 20, 40)[0]
    together = Case("n=4", prompt, traced(replace(SEEDED, n=4)))
    answers = run(engine(), [together]).tokens["n=4"]
    assert len({tuple(answer) for answer in answers}) == 4
    trace: dict[tuple[int, int], bytes] = {}
    for stream in range(4):
        params = StreamParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, stream=stream)
        single = Case(f"stream {stream}", prompt, traced(params))
        assert run(engine(), [single]).tokens[single.name] == [answers[stream]]
        trace |= single.params.trace
    assert trace == together.params.trace


@NATIVE
@pytest.mark.sampled(6, alike=["kind"])
@pytest.mark.parametrize("method", [*SPECULATIONS, "a random tree"])
def test_speculated_equals_not(engine: Make, once: Once, method: str) -> None:
    def calm() -> Calm:
        plain = [fresh(case, max_tokens=24) for case in cases(6, 10, 70)]
        return plain, run(engine(), plain)

    def drafted(case: Case) -> Case:
        params = replace(case.params.inner, speculative=SPECULATIONS.get(method))
        if method not in SPECULATIONS:
            p = case.params.inner
            params = RandomTreeParams(n=p.n, temperature=p.temperature, top_p=p.top_p, seed=p.seed, max_tokens=24)
        return Case(case.name, case.prompt, traced(params))

    plain, want = once("plain", calm)
    speculated = [drafted(case) for case in plain]
    outcome = run(engine(), speculated)
    assert outcome.num_accepted > 0, "no draft was ever accepted: nothing was shown"
    assert_same(plain, speculated, want, outcome)


LENGTHS = (63, 64, 65, 127, 129, 511, 512, 513, 550)
"""Around the ends of tiles of 64 positions and of the chunk of 512; some end in the answer."""


@NATIVE
@pytest.mark.sampled(20, alike=["kind"])
@pytest.mark.parametrize("shape", [
    {"max_num_batched_tokens": 64, "block_size": 8}, {"max_num_batched_tokens": 300, "block_size": 64},
    {"max_num_batched_tokens": 513, "num_blocks": 80}, {"max_num_batched_tokens": 129, "enable_prefix_caching": False},
], ids=str)  # fmt: skip
def test_long_texts(engine: Make, once: Once, shape: dict[str, object]) -> None:
    """Whole, alone and without the prefix cache equals a crowd in chunks that end anywhere, in blocks of any size."""

    def texts() -> list[Case]:
        params = [traced(GREEDY if i % 2 else replace(SEEDED, seed=i)) for i in range(len(LENGTHS))]
        pieces = [prompts(1, length, length, seed=length // 2)[0] for length in LENGTHS]
        return [
            Case(f"{length} tokens", *pair)
            for length, pair in zip(LENGTHS, zip(pieces, params, strict=True), strict=True)
        ]

    def calm() -> Calm:
        roomy, one = engine(num_blocks=512, max_num_batched_tokens=1024, enable_prefix_caching=False), texts()
        return one, alone(roomy, one)

    (one, want), crowd = once("long texts", calm), texts()
    got = run(engine(**{"num_blocks": 1024, **shape}), crowd, random.Random(3))
    assert_same(one, crowd, want, got)
