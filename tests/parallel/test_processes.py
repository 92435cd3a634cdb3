"""Processes that share a model: what one process says, whatever is asked for, and after any of them has died."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from tests.engine.crowd import SMALL, Tokens, right_answers
from tests.engine.deaths import executor_of, hang, kill_at_any_time, poison
from tests.models.draft_heads import Head
from tests.parallel.ranks import engine_of
from tests.support import wait_for

PROMPTS = [[7, 9, 11, 13, 7, 9, 11], [3] * 70, list(range(3, 120)), [50, 60, 70, 50, 60]]
NGRAM = {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 4}
LOOKAHEAD = {"method": "lookahead", "window_size": 8, "ngram_size": 2, "num_guesses": 8}
TRIE = TokenTrie([[5, 6, 7], [5, 6, 8, 9], [90, 91], [90, 91, 92, 93, 94]])


def engine(path: Path, world: int, **arguments: Any) -> LLM:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, **arguments}
    return LLM(str(path), tensor_parallel_size=world, **settings)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[LLM]:
    with engine(path, 1, speculative_config={"model": str(path), "num_speculative_tokens": 3}) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[LLM]:
    with engine(path, 2, speculative_config={"model": str(path), "num_speculative_tokens": 3}) as llm:
        yield llm
        llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def expected(one: LLM) -> list[Tokens]:
    return right_answers(one)


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 5, "max_tokens": 14, "ignore_eos": True, **changes})


MODES: dict[str, Any] = {
    "greedy": sampled(temperature=0, speculative=False),
    "sampled": sampled(n=3, top_p=0.9, logprobs=2, speculative=False),
    "rules": sampled(repetition_penalty=1.3, logit_bias={5: 2.0}, min_tokens=3, prompt_logprobs=1, ignore_eos=False),
    "beams": BeamSearchParams(beam_width=4, max_tokens=12),
    "beam sampling": BeamSearchParams(beam_width=3, max_tokens=12, do_sample=True, temperature=0.9, seed=4),
    "draft model": sampled(speculative={"method": "draft_model", "num_speculative_tokens": 3}),
    "ngram": sampled(temperature=0, speculative=NGRAM),
    "lookahead": sampled(temperature=0, speculative=LOOKAHEAD),
    "trie": sampled(token_trie=TRIE, ignore_eos=False),
    "callable": sampled(allowed_tokens_fn=lambda tokens: range(10 + len(tokens) % 7, 60 + len(tokens) % 9)),
    "beams in a trie": BeamSearchParams(beam_width=3, max_tokens=6, token_trie=TRIE),
    "drafted and constrained": sampled(
        speculative={"method": "draft_model", "num_speculative_tokens": 3}, allowed_token_ids=list(range(40, 120))
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
def test_what_one_process_says(one: LLM, two: LLM, mode: str) -> None:
    left, right = (llm.generate(PROMPTS, MODES[mode], use_tqdm=False) for llm in (one, two))
    assert [[a.token_ids for a in o.outputs] for o in left] == [[a.token_ids for a in o.outputs] for o in right]


def test_everything_at_once_equals_each_alone(two: LLM) -> None:
    """Bitwise: against itself."""
    prompts = [prompt for prompt in PROMPTS for _ in MODES]
    params = [MODES[mode] for _ in PROMPTS for mode in MODES]
    crowd = two.generate(prompts, params, use_tqdm=False)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        [alone] = two.generate([prompt], own, use_tqdm=False)
        for left, right in zip(alone.outputs, crowd[i].outputs, strict=True):
            assert (left.token_ids, left.logprobs) == (right.token_ids, right.logprobs)


def test_sessions(one: LLM, two: LLM) -> None:
    said = []
    for llm in (one, two):
        with llm.session(PROMPTS[2], seed=3) as root:
            first = root.generate(sampled()).outputs[0].token_ids
            forks = root.fork(3)
            answers = [fork.generate(sampled()).outputs[0].token_ids for fork in forks]
            forks[0].rollback(5)
            scores = [score.logprob for score in forks[1].score([[5, 6, 7], [5, 6, 8]])]
            said.append((first, answers, forks[0].generate(sampled()).outputs[0].token_ids))
            said.append([round(score, 3) for score in scores])  # type: ignore[arg-type]
    assert said[0] == said[2] and said[1] == pytest.approx(said[3], abs=2e-3)


def test_the_geometry_says_how_many_share(two: LLM) -> None:
    geometry = two.engine.executor.geometry
    assert geometry.world == 2 and len(set(executor_of(two).pids)) == 2
    assert geometry.kv_cache.num_bytes < 64 * 16 * 2 * 2 * 3 * 16 * 4  # of a rank: two of the three heads


def test_how_many_share_a_model_is_told_apart(one: LLM, two: LLM) -> None:
    """By streams that go on: numbers have other bits."""
    left, right = (llm.engine.executor.geometry for llm in (one, two))
    assert left.model == right.model and left.numerics != right.numerics


def test_one_process_cannot_share(path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match="executor is 'inline': must be process or ray where tensor_parallel_size"
    ):
        engine(path, 2, executor="inline")


def test_more_ranks_than_heads(path: Path) -> None:
    config = EngineConfig.from_kwargs(model=str(path), dtype="float32", num_blocks=16, executor="process")
    with pytest.raises(InvalidArgument, match="tensor_parallel_size is 10: must be at most 9"):
        engine_of(config, 10)


def test_what_cannot_be_cut_starts_no_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("pagedec.executor.process.WorkerProcess", started)
    with pytest.raises(InvalidArgument, match="tensor_parallel_size is 10: must be at most 9"):
        LLM(str(path), tensor_parallel_size=10, num_blocks=16, skip_tokenizer_init=True)
    with pytest.raises(
        InvalidArgument, match="tensor_parallel_size is 2: must be 1 for a model that runs its modeling"
    ):
        LLM(str(path), tensor_parallel_size=2, num_blocks=16, skip_tokenizer_init=True, model_impl="transformers")


def test_the_log_says_who_is_gone_and_when_others_go_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(path), tensor_parallel_size=2, num_blocks=16, skip_tokenizer_init=True) as llm:
        assert "of 2 ranks, context" in repr(llm)
        executor = executor_of(llm)
        gone = executor.pids
        os.kill(gone[1], signal.SIGKILL)
        wait_for(lambda: executor.problem is not None)
        executor.mend()
        assert executor.num_restarts == 1 and executor.restart_seconds > 0
        told = [record.getMessage() for record in caplog.records]
        assert told[0] == (
            f"the worker process {gone[1]} has ended; others are started for the worker processes {gone[0]}, {gone[1]}"
        )
        assert re.fullmatch(
            rf"the worker processes {executor.pids[0]}, {executor.pids[1]} go on after [0-9.]+ s", told[1]
        )


# --------------------------------------------------------------------------------------------------------------- deaths
@pytest.fixture(scope="module")
def small(path: Path) -> Iterator[LLM]:
    """With too little room for all at once. Whoever kills leaves it whole."""
    with engine(path, 2, **SMALL, step_timeout=2.0) as llm:
        yield llm
        llm.engine.scheduler.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_a_head_drafts(path: Path, tmp_path: Path, rank: int) -> None:
    """Features, KV and the head go with the group; the next one drafts again, and answers are what they are without."""
    head = Head(AutoConfig.from_pretrained(path), (1, 0, 1), torch.arange(0, 131, 2)).write(tmp_path)
    table = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    prompts = [[5 + i, 9, *range(20, 20 + 9 * i)] for i in range(5)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    with engine(path, 2, num_blocks=40, max_num_batched_tokens=32, speculative_config=table) as llm:
        plain = [own.clone(speculative=False) for own in params]
        want = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, plain, use_tqdm=False)]
        streams = [llm.stream(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for stream in streams:
            next(stream)
        os.kill(executor_of(llm).pids[rank], signal.SIGKILL)
        ends = [list(stream)[-1] for stream in streams]
        assert [list(end.outputs[0].token_ids) for end in ends] == want and executor_of(llm).num_restarts == 1
        before = llm.engine.stats.drafts["eagle3"].num_drafts
        assert [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)] == want
        assert llm.engine.stats.drafts["eagle3"].num_drafts > before > 0
        llm.engine.scheduler.check()
        for pool in llm.engine.scheduler.pools.values():
            assert pool.num_available == pool.num_blocks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_at_any_time(small: LLM, expected: list[Tokens], rank: int) -> None:
    """Prefilling, decoding, among beams, beside others."""
    kill_at_any_time(small, expected, seed=rank, rank=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_hangs(small: LLM, expected: list[Tokens], rank: int) -> None:
    hang(small, expected, rank)


@pytest.mark.long
def test_what_kills_a_rank_every_time_dies_alone(
    small: LLM, expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(small, expected, monkeypatch, rank=1)
