"""From `LLM.generate` back to the distribution: drawn tokens against the exact one, in float64 from the model's logits.

Chi-square with fixed seeds. Tokens expected less than five times are pooled into one cell. A right sampler fails a case
with probability 1e-4, but the seeds are fixed, so it either never does or always.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.stats import chi2

from pagedec import LLM, SamplingParams
from pagedec.kernels.library import available_isas
from tests.support import all_logits

Tiny = Callable[..., LLM]
Floats = np.ndarray
PROMPT = [5, 17, 40, 99, 3]
TEXT = "The weather in the north of the country is"
NUM_DRAWS = 3000
LEAST_EXPECTED = 5.0  # a cell: below that the statistic is not chi-square distributed
LEAST_P = 1e-4
MARGIN = 1e-6  # a cut nearer than this to a token's edge could go either way in fp32


def next_logits(llm: LLM, tokens: Sequence[int]) -> Floats:
    """float64 [vocab]: what the model says of the token behind `tokens`."""
    model = llm.engine.executor.worker.lanes["target"].model
    return all_logits(model, tokens)[-1].double().numpy()


def processed(logits: Floats, params: SamplingParams) -> Floats:
    """The distribution that `params` ask for: temperature, then the cuts by top_k, top_p and min_p, renormalised."""
    scaled = logits / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        cumulated = np.cumsum(p[order])
        assert np.abs(cumulated - params.top_p).min() > MARGIN, "choose a top_p that does not fall on a token's edge"
        p[order[1 + int(np.searchsorted(cumulated, params.top_p)) :]] = 0
        p /= p.sum()
    if params.min_p:
        least = params.min_p * p.max()
        assert np.abs(p / least - 1).min() > MARGIN, "choose a min_p that does not fall on a token's edge"
        p[p < least] = 0
    return p / p.sum()


def p_value(drawn: Sequence[int], p: Floats) -> float:
    """How likely a sampler of `p` is to stray this far. 0 where something was drawn that cannot be."""
    counts = np.bincount(drawn, minlength=len(p))
    if counts[p == 0].any():
        return 0.0
    expected = p * len(drawn)
    rare = expected < LEAST_EXPECTED
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        cells.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, wanted = (np.concatenate(part) for part in zip(*cells, strict=True))
    assert len(wanted) > 1, "one cell says nothing"
    return float(chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.21),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.93),
    SamplingParams(temperature=0.8, top_k=30, min_p=0.03),
    SamplingParams(temperature=1.5, top_k=60, top_p=0.9, min_p=0.05),
]


def with_seed(params: SamplingParams, seed: int, n: int, max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(
        n=n,
        seed=seed,
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        ignore_eos=True,
    )


def first_tokens(llm: LLM, prompt: str | list[int], params: SamplingParams) -> list[int]:
    """Drawn in batches, each with a seed of its own."""
    batches = [with_seed(params, seed, NUM_DRAWS // 6) for seed in range(6)]
    outputs = llm.generate([prompt] * 6, batches, use_tqdm=False)
    return [answer.token_ids[0] for output in outputs for answer in output.outputs]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("params", CASES, ids=lambda p: f"T{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p}")
def test_first_token_of_the_tiny_model(tiny: Tiny, params: SamplingParams) -> None:
    llm = tiny(max_num_seqs=512)
    p = processed(next_logits(llm, PROMPT), params)
    drawn = first_tokens(llm, PROMPT, params)
    assert len(drawn) == NUM_DRAWS
    assert p_value(drawn, p) > LEAST_P


@pytest.mark.sampled(3)
@pytest.mark.parametrize("params", [CASES[0], CASES[4], CASES[8]], ids=["plain", "top-p", "all"])
def test_first_token_of_the_default_model(text_llm: LLM, params: SamplingParams) -> None:
    assert text_llm.tokenizer is not None
    p = processed(next_logits(text_llm, text_llm.tokenizer.encode(TEXT)), params)
    assert (p * NUM_DRAWS > LEAST_EXPECTED).sum() > 15
    assert p_value(first_tokens(text_llm, TEXT, params), p) > LEAST_P


@pytest.mark.parametrize("kernels", ["reference", *(["native"] if available_isas() else [])])
def test_one_draw_from_each_seed(tiny: Tiny, kernels: str) -> None:
    """Seeds in a row are as independent as streams of one seed."""
    llm = tiny(attention_backend=kernels, num_blocks=300)
    params = [with_seed(CASES[0], seed, 1) for seed in range(NUM_DRAWS // (10 if kernels == "reference" else 1))]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    drawn = [output.outputs[0].token_ids[0] for output in outputs]
    assert p_value(drawn, processed(next_logits(llm, PROMPT), CASES[0])) > LEAST_P


def test_second_token_behind_each_first_one(tiny: Tiny) -> None:
    """Given the first token, the second is drawn from its own distribution: noise at two positions is independent."""
    llm, params = tiny(max_num_seqs=512, num_blocks=1200), SamplingParams(temperature=1.0, top_k=8)
    batches = [with_seed(params, seed, 1000, max_tokens=2) for seed in range(5)]
    outputs = llm.generate([PROMPT] * 5, batches, use_tqdm=False)
    pairs = [tuple(answer.token_ids) for output in outputs for answer in output.outputs]
    followers: dict[int, list[int]] = {}
    for first, second in pairs:
        followers.setdefault(first, []).append(second)
    common = [first for first, seconds in followers.items() if len(seconds) > 250]
    assert len(common) >= 3
    for first in common:
        p = processed(next_logits(llm, [*PROMPT, first]), params)
        assert p_value(followers[first], p) > LEAST_P / len(common)


def test_streams_of_one_prompt_are_independent(tiny: Tiny) -> None:
    """Pairs of samples of one request: the joint distribution is the product."""
    llm, params = tiny(), SamplingParams(temperature=1.0, top_k=4)
    requests = [with_seed(params, seed, 2) for seed in range(2000)]
    outputs = llm.generate([PROMPT] * len(requests), requests, use_tqdm=False)
    p = processed(next_logits(llm, PROMPT), params)
    kept = np.flatnonzero(p).tolist()
    pairs = Counter(tuple(answer.token_ids[0] for answer in output.outputs) for output in outputs)
    cells = list(itertools.product(range(4), repeat=2))
    number = {(kept[a], kept[b]): i for i, (a, b) in enumerate(cells)}
    drawn = [number[pair] for pair in pairs.elements()]
    assert p_value(drawn, np.array([p[kept[a]] * p[kept[b]] for a, b in cells])) > LEAST_P


def test_the_tokens_that_may_not_end_are_drawn_from_the_rest(tiny: Tiny) -> None:
    """Banned tokens leave the others' proportions as they are."""
    llm = tiny(max_num_seqs=512)
    logits = next_logits(llm, PROMPT)
    banned = np.argsort(-logits)[:3].tolist()
    batches = [SamplingParams(n=500, seed=s, max_tokens=1, min_tokens=1, stop_token_ids=banned) for s in range(6)]
    outputs = llm.generate([PROMPT] * 6, batches, use_tqdm=False)
    drawn = [answer.token_ids[0] for output in outputs for answer in output.outputs]
    logits[[*banned, 2]] = -np.inf
    assert p_value(drawn, processed(logits, SamplingParams())) > LEAST_P


@pytest.mark.parametrize(
    ("asked", "judged"),
    [
        (SamplingParams(temperature=1.0), SamplingParams(temperature=1.25)),
        (SamplingParams(temperature=1.0, top_k=8), SamplingParams(temperature=1.0, top_k=7)),
        (SamplingParams(temperature=1.0, top_p=0.8), SamplingParams(temperature=1.0, top_p=0.72)),
        (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, min_p=0.02)),
    ],
    ids=["temperature", "top-k", "top-p", "min-p"],
)
def test_a_slightly_wrong_distribution_is_seen(tiny: Tiny, asked: SamplingParams, judged: SamplingParams) -> None:
    llm = tiny(max_num_seqs=512)
    p = processed(next_logits(llm, PROMPT), judged)
    assert p_value(first_tokens(llm, PROMPT, asked), p) < LEAST_P
