"""A request's own rules on the real model: drawing under them is a loop over whole texts, and reports have the same
bits wherever they come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedec import SamplingParams
from pagedec.core.forward import DRAW_DTYPE
from pagedec.core.layout import draw_record
from pagedec.core.logits_rules import LogitsRules
from pagedec.core.logprobs import TokenLogprobs
from pagedec.decoders.sampling import sampler_of
from pagedec.engine.engine import Engine
from pagedec.engine.options import read_options
from tests.algorithms.random_tree import RandomTreeParams
from tests.core.oracle import process
from tests.equivalence.conftest import vocabulary
from tests.equivalence.harness import SPECULATIONS, Case, Scratch, prompts, run

Make = Callable[..., Engine]
PROMPTS = prompts(4, 12, 24, seed=31)
FEW = tuple(sorted(set(PROMPTS[0])))[:12]
MAX_TOKENS = 8
NEAR = 2e-4  # of a log-probability
RULES = (
    SamplingParams(temperature=0, max_tokens=MAX_TOKENS, repetition_penalty=1.4, presence_penalty=0.5, logprobs=4),
    SamplingParams(temperature=0, max_tokens=MAX_TOKENS, allowed_token_ids=FEW, no_repeat_ngram_size=3, logprobs=0),
    SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, max_tokens=MAX_TOKENS, allowed_token_ids=FEW, frequency_penalty=0.7,
        repetition_penalty=0.8, logit_bias={FEW[0]: 2.5, FEW[3]: -1.0}, logprobs=2,
    ),
    SamplingParams(temperature=0.7, seed=6, max_tokens=MAX_TOKENS, bad_words=["the", "a little", ","], logprobs=3),
)  # fmt: skip


def loop(scratch: Scratch, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], list[TokenLogprobs]]:
    """One whole text after the other: the model's logits, reported; the rules, applied on the host; a draw."""
    rules: LogitsRules = read_options(params, scratch.model.arch.vocab_size, (), vocabulary()).rules
    tokens, reports, sampler, backend = list(prompt), [], sampler_of(params), scratch.model.backend
    for _ in range(params.max_tokens or 0):
        raw = scratch.logits(tokens)
        ruled = torch.tensor([process(raw[0].tolist(), tokens, len(prompt), rules)], dtype=torch.float32)
        draw = np.frombuffer(bytearray(draw_record(sampler, 0)), DRAW_DTYPE)
        draw["position"] = len(tokens)
        token = int(backend.sample(ruled, draw)[0])
        ids, values, lse = backend.topk(raw, np.zeros(1, np.int32), params.logprobs or 0)
        row = raw[0].numpy()
        own, top = float(np.float32(row[token] - lse[0])), tuple((values - lse)[0].astype(np.float32).tolist())
        reports.append(TokenLogprobs(token, own, 1 + int((row > row[token]).sum()), tuple(ids[0].tolist()), top))
        tokens.append(token)
    return tokens[len(prompt) :], reports


def alone(engine: Make, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], list[TokenLogprobs]]:
    """What one request is told by itself, with room for everything."""
    [answer] = run(engine(), [Case("alone", prompt, params)]).finished["alone"].answers
    assert answer.logprobs is not None
    return answer.token_ids, list(answer.logprobs)


def assert_near(found: Sequence[TokenLogprobs], whole: Sequence[TokenLogprobs]) -> None:
    """The reports of ranks, whose sums are made in another order than the whole model's."""
    for ours, theirs in zip(found, whole, strict=True):
        assert ours.token_id == theirs.token_id
        assert (ours.logprob, *ours.top_logprobs) == pytest.approx((theirs.logprob, *theirs.top_logprobs), abs=NEAR)


@pytest.mark.sampled(10, alike=["kind"])
def test_ruled_sampling_is_a_loop_over_whole_texts(engine: Make, scratch: Scratch, kind: str) -> None:
    """All of it bitwise, from a batch under preemption, with and without drafts. Ranks: the loop's tokens, and the bits
    of one request alone."""
    methods = ("plain", "random tree", *SPECULATIONS)
    cases, want = [], {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, RULES, strict=True)):
        params = replace(params, ignore_eos=True)
        expected = whole = loop(scratch, prompt, params)
        if kind == "ranks":
            expected = alone(engine, prompt, params)
            assert expected[0] == whole[0]
            assert_near(expected[1], whole[1])
        for method in methods if i in (1, 2) else methods[: 1 + i]:
            name, own = f"{method} {i}", replace(params, speculative=SPECULATIONS.get(method))
            if method == "random tree":
                own = RandomTreeParams(**{field: getattr(params, field) for field in params.__dataclass_fields__})
            cases.append(Case(name, prompt, own))
            want[name] = expected
    outcome = run(engine(num_blocks=9, max_num_batched_tokens=40), cases, random.Random(3))
    assert outcome.num_preemptions > 2 and outcome.num_accepted > 0
    for name, (tokens, reports) in want.items():
        [answer] = outcome.finished[name].answers
        assert answer.token_ids == tokens, f"{name}: tokens differ"
        assert answer.logprobs == reports, f"{name}: reports differ"


@pytest.mark.sampled(8, alike=["kind"])
@pytest.mark.parametrize("rows", [7, 64])
def test_prompts_are_reported_with_the_same_bits_in_any_chunks(engine: Make, rows: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    cases = [Case(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    alone = {}
    roomy = engine()
    for case in cases:
        alone |= run(roomy, [case]).finished
    outcome = run(engine(num_blocks=6, max_num_batched_tokens=rows), cases, random.Random(rows))
    for case in cases:
        got, want = outcome.finished[case.name], alone[case.name]
        assert got.prompt_logprobs == want.prompt_logprobs and got.answers == want.answers
        assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == len(case.prompt)
