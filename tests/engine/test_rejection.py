"""Drafts that are verified by rejection, end to end: the target's distribution, ends inside a path, both pools whole.
Not the tokens of plain sampling."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, SamplingParams, TokenTrie
from pagedec.core.draft import Roll
from pagedec.core.request import Branch
from pagedec.decoders import decoder, registry
from pagedec.decoders.sampling import Sampling
from pagedec.errors import InvalidArgument, RequestError
from pagedec.models.buffers import READ_ROWS
from pagedec.runtime.runner import LaneRunner
from tests.engine.crowd import SMALL, Tiny, workload
from tests.engine.test_sampling_distribution import LEAST_P, next_logits, p_value, processed
from tests.engine.test_speculation import TABLES, drafted_by
from tests.support import add, step

PROMPT = [5, 17, 40, 99, 3]
REJECTION = {"method": "draft_model", "verify": "rejection", "num_speculative_tokens": 3}
WIDE = {**REJECTION, "num_candidates": 3, "adaptive": False}


def engine(tiny: Tiny, path: Path, num_candidates: int = 1, **own: Any) -> LLM:
    return tiny(
        **{"num_blocks": 300, "max_num_seqs": 128, "max_num_batched_tokens": 2048, **own},
        speculative_config=drafted_by(path, verify="rejection", num_candidates=num_candidates),
    )


def texts(llm: LLM, num: int, max_tokens: int = 2, **own: Any) -> list[list[int]]:
    params = [SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True, **own) for i in range(num)]
    outputs = llm.generate([PROMPT] * num, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


# ---- the distribution
CASES = [
    {"temperature": 1.0}, {"temperature": 2.5, "top_k": 60}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("num_candidates", [1, 4])
@pytest.mark.parametrize("own", CASES, ids=str)
def test_tokens_are_distributed_as_the_targets(
    tiny: Tiny, other_path: Path, own: dict[str, Any], num_candidates: int
) -> None:
    """The first token, which was drafted; and the second behind the commonest first ones."""
    llm = engine(tiny, other_path, num_candidates)
    num = 2400 if "top_p" in own else 1200
    drawn = texts(llm, num, 3, **own)
    counts = llm.engine.stats.drafts["draft_model"]
    assert counts.drafted[0] >= num, "the first token of each was drafted"
    assert 0.05 < counts.accepted[0] / counts.drafted[0] < 0.95, "there is something to accept and to reject"
    params = SamplingParams(**own)
    assert p_value([text[0] for text in drawn], processed(next_logits(llm, PROMPT), params)) > LEAST_P
    firsts, sizes = np.unique([text[0] for text in drawn], return_counts=True)
    for first in firsts[sizes > 250].tolist():
        seconds = [text[1] for text in drawn if text[0] == first]
        assert p_value(seconds, processed(next_logits(llm, [*PROMPT, first]), params)) > LEAST_P / 2


@pytest.mark.long
def test_penalties_are_in_both_distributions(tiny: Tiny, other_path: Path) -> None:
    """p and q are what is left after the request's own rules; a banned token is never answered."""
    llm = engine(tiny, other_path)
    rules: dict[str, Any] = {"repetition_penalty": 2.0, "logit_bias": {7: 3.0}, "allowed_token_ids": list(range(3, 60))}
    drawn = texts(llm, 1000, 2, temperature=1.2, **rules)
    logits = next_logits(llm, PROMPT)
    logits[[token for token in range(len(logits)) if not 3 <= token < 60]] = -np.inf
    logits[7] += 3
    for token in (token for token in set(PROMPT) if 3 <= token < 60):
        logits[token] = logits[token] / 2 if logits[token] > 0 else logits[token] * 2
    assert p_value([text[0] for text in drawn], processed(logits, SamplingParams(temperature=1.2))) > LEAST_P


def test_mistake_raw_q_is_seen(tiny: Tiny, other_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test finds drafts that were drawn under top-k and scored without it."""
    drafted = LaneRunner.drafted

    def raw(self: LaneRunner, *given: Any) -> Any:
        found = drafted(self, *given)
        found.draws["top_k"] = 0
        return found

    monkeypatch.setattr(LaneRunner, "drafted", raw)
    llm = engine(tiny, other_path)
    own = {"temperature": 2.5, "top_k": 60}
    p = processed(next_logits(llm, PROMPT), SamplingParams(**own))
    assert p_value([text[0] for text in texts(llm, 1200, 3, **own)], p) < LEAST_P


@dataclass(frozen=True, slots=True)
class SharedParams(SamplingParams):
    """A roll with the target's noise that is to be rejected."""


def test_mistake_one_noise_key_is_refused(tiny: Tiny, other_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_params", dict(registry._by_params))

    @decoder("test-shared", params=SharedParams)
    class Shared(Sampling):
        lanes: tuple[str, ...] = ("target", "draft")

        def draft(self, branch: Branch, room: int) -> Roll:
            return Roll(2, self.sampler, branch.state[0], rejects=True)

    llm = engine(tiny, other_path)
    add(llm.engine, "shared", PROMPT, SharedParams(seed=1, max_tokens=4))
    with pytest.raises(RequestError, match=r"queries\[0\]\.draft\.stream is 0: must not be the Sample's"):
        while not llm.engine.idle:
            step(llm.engine)
    add(llm.engine, "several", PROMPT, SharedParams(seed=1, max_tokens=4, n=2))
    with pytest.raises(RequestError, match=r"queries\[0\]\.draft\.rejects is True: needs one Sample, of every node"):
        while not llm.engine.idle:
            step(llm.engine)


def test_several_answers_share_no_drafted_token(tiny: Tiny, other_path: Path) -> None:
    """Pairs of answers of one request are independent: what both stand for is not drafted."""
    llm = engine(tiny, other_path)
    params = [SamplingParams(n=2, seed=i, max_tokens=1, top_k=3, ignore_eos=True) for i in range(900)]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    p = processed(next_logits(llm, PROMPT), params[0])
    kept = np.flatnonzero(p).tolist()
    number = {pair: i for i, pair in enumerate(itertools.product(kept, kept))}
    drawn = [number[tuple(answer.token_ids[0] for answer in output.outputs)] for output in outputs]
    assert p_value(drawn, np.array([p[a] * p[b] for a, b in number])) > LEAST_P


# ---- what is not changed
def test_greedy_is_plain_greedy(tiny: Tiny, other_path: Path) -> None:
    llm = engine(tiny, other_path)
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=2)
    got = llm.generate([PROMPT], params, use_tqdm=False)
    assert got[0].outputs == llm.generate([PROMPT], params.clone(speculative=False), use_tqdm=False)[0].outputs


def test_alone_and_with_a_fixed_width_it_can_be_repeated(tiny: Tiny, other_path: Path) -> None:
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    llms = [engine(tiny, other_path, executor=executor) for executor in ("inline", "process")]
    first, again = (llm.generate([PROMPT], params, use_tqdm=False)[0].outputs for llm in llms)
    assert first == again
    assert all(token in entry for token, entry in zip(first[0].token_ids, first[0].logprobs or [], strict=True))


def test_a_request_may_ask_for_it_or_for_coupling(tiny: Tiny, other_path: Path) -> None:
    llm = tiny(speculative_config=drafted_by(other_path))
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    ways = (False, None, {**REJECTION, "verify": "coupling"}, REJECTION)
    plain, default, coupled, rejected = (
        llm.generate([PROMPT], params.clone(speculative=way), use_tqdm=False)[0].outputs[0].token_ids for way in ways
    )
    assert plain == default == coupled != rejected


# ---- endings
def test_mistake_max_tokens_is_never_overshot(tiny: Tiny, tiny_path: Path) -> None:
    """Whatever is accepted: the draft model is the target itself, so all of it."""
    llm = engine(tiny, tiny_path)
    for max_tokens in range(1, 12):
        [output] = llm.generate(
            [PROMPT], SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == max_tokens and output.outputs[0].finish_reason == "length"


def test_mistake_the_last_draft_of_a_full_acceptance_is_evaluated(tiny: Tiny, tiny_path: Path) -> None:
    """Its KV is missing on the draft lane: the next step evaluates it beside the token behind it. Debug builds refuse
    to read a slot that nobody wrote."""
    llm = engine(tiny, tiny_path)
    rows = []
    execute = llm.engine.executor.execute

    def counting(forwards: Any, *rest: Any) -> Any:
        if "draft" in forwards:
            rows.append(len(forwards["draft"].token_ids))
        return execute(forwards, *rest)

    llm.engine.executor.execute = counting  # type: ignore[method-assign]
    llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=24, ignore_eos=True), use_tqdm=False)
    counts = llm.engine.stats.drafts["draft_model"]
    assert counts.num_accepted == counts.num_drafted > 12, "p is q: all of it is accepted"
    assert rows == [5, 2, 2, 2, 2, 2]


def test_stops_and_min_tokens_inside_an_accepted_path(tiny: Tiny, tiny_path: Path) -> None:
    llm = engine(tiny, tiny_path)
    params = SamplingParams(seed=2, max_tokens=20, ignore_eos=True, temperature=0.5)
    text = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    for place in range(1, 8):
        stop = text[place]
        got = llm.generate([PROMPT], params.clone(stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
        assert got.token_ids == text[: text.index(stop) + 1] and got.finish_reason == "stop"
        least = params.clone(stop_token_ids=[stop], min_tokens=place + 3)
        got = llm.generate([PROMPT], least, use_tqdm=False)[0].outputs[0]
        assert stop not in got.token_ids[: place + 3] and len(got.token_ids) >= place + 3


def test_a_constraint_is_kept(tiny: Tiny, other_path: Path) -> None:
    """Its masks are made of rolled tokens: rolls come first, then masks, then the verification. What stands beside the
    chain has masks of its own."""
    paths = [[a, b, c, d] for a in range(10, 14) for b in range(20, 26) for c in (30, 31) for d in range(40, 43)]
    for executor, num_candidates in (("inline", 1), ("process", 1), ("inline", 4), ("process", 3)):
        llm = engine(tiny, other_path, num_candidates, executor=executor)
        params = [SamplingParams(seed=i, max_tokens=8, token_trie=TokenTrie(paths)) for i in range(30)]
        for output in llm.generate([PROMPT] * 30, params, use_tqdm=False):
            assert output.outputs[0].token_ids[:4] in paths


# ---- both pools
def test_more_rows_than_are_read_out_at_once(tiny: Tiny, other_path: Path) -> None:
    """32 requests of 8 rows in one step: verified in pieces, with the tokens that each gets alone."""
    own = drafted_by(other_path, num_speculative_tokens=7, verify="rejection")
    llm = tiny(num_blocks=400, max_num_batched_tokens=2048, speculative_config=own)
    most: list[int] = []
    execute = llm.engine.executor.execute

    def counting(forwards: Any, *rest: Any) -> Any:
        most.append(len(forwards["target"].read_rows))
        return execute(forwards, *rest)

    llm.engine.executor.execute = counting  # type: ignore[method-assign]
    prompts = [[(i * 7 + j * j) % 131 for j in range(5 + i)] for i in range(32)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(32)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert max(most) == 32 * 8 > READ_ROWS
    for i in range(0, 32, 7):
        alone = llm.generate([prompts[i]], params[i], use_tqdm=False)[0]
        assert together[i].outputs == alone.outputs


def toss(llm: LLM, rng: random.Random, num_steps: int) -> int:
    """Requests that come at random and are aborted at random, drafted in every way; how many were aborted."""
    own, first, number, num_aborted = llm.engine, llm.engine.stats.num_steps, 0, 0
    prompts, params = workload()
    while own.stats.num_steps - first < num_steps:
        if len(own.scheduler.requests) < 6 and rng.random() < 0.6:
            asked = params[number % len(params)]
            if isinstance(asked, SamplingParams):
                asked = asked.clone(speculative=rng.choice([None, None, REJECTION, WIDE, False, *TABLES.values()]))
            add(own, str(number), prompts[number % len(prompts)], asked)
            number += 1
        step(own)
        if own.scheduler.requests and rng.random() < 0.1:
            own.abort(rng.choice(own.scheduler.requests).id)
            num_aborted += 1
        own.scheduler.check()
    while not own.idle:
        step(own)
    return num_aborted


def test_aborts_at_any_moment_leave_both_pools_whole(tiny: Tiny, other_path: Path) -> None:
    llm = tiny(**SMALL, speculative_config=drafted_by(other_path, verify="rejection", num_blocks=8))
    assert toss(llm, random.Random(1), 300) > 10
    assert llm.engine.stats.num_failed_steps == 0
    assert_empty(llm)


def assert_empty(llm: LLM) -> None:
    """Nothing holds a block, on either lane."""
    llm.engine.scheduler.check()
    for pool in llm.engine.scheduler.pools.values():
        assert pool.num_available == pool.num_blocks and not any(pool.refs) and not any(pool.pins)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_fifty_thousand_steps(tiny: Tiny, other_path: Path, seed: int) -> None:
    llm = tiny(**SMALL, speculative_config=drafted_by(other_path, verify="rejection", num_blocks=8))
    assert toss(llm, random.Random(seed), 10_000) > 500
    assert llm.engine.stats.num_failed_steps == 0
    assert_empty(llm)


# ---- errors
def test_it_is_the_draft_models_alone(tiny: Tiny, other_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"config\.verify is 'rejection': must be left out: guesses of ngram have"
    ):
        tiny(speculative_config={"method": "ngram", "verify": "rejection"})
    with pytest.raises(InvalidArgument, match=r"verify is 'typical': must be .*coupling.*rejection"):
        tiny(speculative_config=drafted_by(other_path, verify="typical"))
    for count in (0, 256, 2000):
        with pytest.raises(InvalidArgument, match=rf"speculative_config\.num_speculative_tokens is {count}"):
            tiny(speculative_config=drafted_by(other_path, num_speculative_tokens=count))
