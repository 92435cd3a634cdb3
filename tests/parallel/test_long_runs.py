"""Long runs on two ranks: ten kills in a row under load, and what is left behind by thousands of requests."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie
from pagedec.executor.group import WorkerGroup
from pagedec.executor.process import ProcessExecutor
from tests.engine.deaths import is_running
from tests.equivalence.test_configurations import FaultyParams
from tests.models.checkpoints import VOCAB
from tests.parallel.kills import Kill, Killer
from tests.support import wait_for

pytestmark = pytest.mark.long
TRIE = TokenTrie([[5, 6, 7], [5, 6, 8, 9], [90, 91], [90, 91, 92, 93, 94]])
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 4}
LOOKAHEAD = {"method": "lookahead", "window_size": 8, "ngram_size": 2, "num_guesses": 8}


@pytest.fixture
def two(path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines on two processes with a draft model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_DEBUG", "1")

        def make(**arguments: Any) -> LLM:
            drafting = {"model": str(path), "num_speculative_tokens": 3}
            settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 60, "max_num_seqs": 48,
                        "max_num_batched_tokens": 100, "speculative_config": drafting, **arguments}  # fmt: skip
            return LLM(str(path), tensor_parallel_size=2, **settings)

        yield make


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": 30, "ignore_eos": True, "logprobs": 1, **changes})


def load(seed: int, count: int, longest: int) -> tuple[list[list[int]], list[Any]]:
    """Requests of all kinds, and one that fails."""
    rng = random.Random(seed)
    start = [rng.randrange(3, VOCAB) for _ in range(60)]
    kinds: list[Any] = [
        sampled(temperature=0, speculative=False),
        sampled(n=3, top_p=0.9, speculative=False),
        BeamSearchParams(beam_width=4, max_tokens=longest),
        sampled(speculative=DRAFTED),
        sampled(temperature=0, speculative=NGRAM),
        sampled(temperature=0, speculative=LOOKAHEAD),
        sampled(token_trie=TRIE, ignore_eos=False, speculative=False),
        sampled(repetition_penalty=1.3, min_tokens=3, ignore_eos=False),
        BeamSearchParams(beam_width=3, max_tokens=longest, do_sample=True, temperature=0.9, seed=4),
        sampled(speculative=DRAFTED, allowed_token_ids=list(range(40, 120))),
    ]
    prompts = [
        [*start[: rng.randrange(60)], *(rng.randrange(3, VOCAB) for _ in range(rng.choice([3, 17, 60])))]
        for _ in range(count)
    ]
    return [*prompts, prompts[0]], [
        *(kinds[i % len(kinds)].clone(seed=i, max_tokens=longest - i % 10) for i in range(count)),
        FaultyParams(seed=3, n=2, max_tokens=20, after=4),
    ]


def answered(llm: LLM, seed: int, count: int = 22, longest: int = 30) -> list[Any]:
    """What a round of requests, sessions and a client who leaves is told: a thread for each of the three."""

    def crowd() -> list[Any]:
        outputs = llm.generate(*load(seed, count, longest), use_tqdm=False, on_error="return")
        assert [output.error is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert isinstance(outputs[-1].error.__cause__, ZeroDivisionError)
        return [[(a.token_ids, a.logprobs, a.score) for a in output.outputs] for output in outputs[:-1]]

    def session() -> list[Any]:
        with llm.session([7, 9, 11, 13] * 9, seed=seed) as root:
            said = [root.generate(sampled(speculative=NGRAM)).outputs[0].token_ids]
            forks = root.fork(3)
            said += [fork.generate(sampled()).outputs[0].token_ids for fork in forks]
            forks[0].rollback(5)
            said.append(forks[0].generate(sampled(speculative=DRAFTED)).outputs[0].token_ids)
            said.append([score.logprob for score in forks[1].score([[5, 6, 7], [5, 6, 8]])])
        return said

    def leave() -> None:
        stream = llm.stream([9] * 40, sampled(seed=seed, max_tokens=60))
        next(stream)
        stream.close()

    with ThreadPoolExecutor(3) as pool:
        said = [pool.submit(each) for each in (crowd, session, leave)]
        return [each.result() for each in said]


def assert_nothing_runs(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert scheduler.requests == [] and scheduler.rules == {}
    scheduler.check()
    for pool in scheduler.pools.values():
        assert pool.num_available == pool.num_blocks and not any(pool.refs) and not any(pool.pins)


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children() -> set[int]:
    """Processes that this one has started, the dead that nobody has waited for among them."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_ten_kills_in_a_row(two: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank in turn, killed and stopped, in steps of each kind: the answers of an undisturbed run."""
    seeds, rng = range(3), random.Random(11)
    with two() as llm:
        want = [answered(llm, seed) for seed in seeds]
        assert_nothing_runs(llm)
    kinds = ["prefill", "verify", "beams", "masks", "any"] * 2
    rng.shuffle(kinds)
    kills = [
        Kill(i % 2, kind, signal.SIGSTOP if i in (3, 8) else signal.SIGKILL) for i, kind in enumerate(kinds)
    ]  # fmt: skip
    killer = Killer(kills, seed=12)
    gc.collect()
    before = descriptors(), children(), set(os.listdir("/dev/shm")), threading.active_count()
    monkeypatch.setattr(WorkerGroup, "begin", killer.around(WorkerGroup.begin))
    num_rounds = 0
    with two(step_timeout=3.0) as llm:
        while not killer.is_done or num_rounds % len(seeds):
            assert answered(llm, seeds[num_rounds % len(seeds)]) == want[num_rounds % len(seeds)], kills
            num_rounds += 1
            assert num_rounds < 60, f"not all were due: {kills}"
        assert_nothing_runs(llm)
        own = set(llm.engine.executor.pids)  # type: ignore[attr-defined]
        assert llm.engine.stats.num_failed_steps >= len(kills)
        assert not [pid for pid in killer.pids - own if is_running(pid)], "those before them are gone"
    gc.collect()
    print(f"\n{num_rounds} rounds of 25 requests;", killer.summary(), *kills, sep="\n  ")
    assert all(kill.seconds is not None for kill in kills) and not any(map(is_running, killer.pids))
    wait_for(lambda: threading.active_count() <= before[3])
    assert (descriptors(), children(), set(os.listdir("/dev/shm"))) == before[:3]


def resident(pid: int) -> int:
    """Bytes of a process that are its own or of files it has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


NUM_ROUNDS, NUM_WARM, NUM_CROWD = 80, 10, 60
GROWTH = 6 << 20
"""Bytes that a process may have more after all rounds than after the first ones: freed memory lies scattered."""


def test_thousands_of_requests_leave_nothing(two: Callable[..., LLM]) -> None:
    with two() as llm:
        executor = llm.engine.executor
        assert isinstance(executor, ProcessExecutor)
        pids = (os.getpid(), *executor.pids)
        want = {seed: answered(llm, seed, NUM_CROWD, 12) for seed in range(5)}
        seen: list[list[tuple[int, int]]] = []
        for i in range(NUM_ROUNDS):
            assert answered(llm, i % 5, NUM_CROWD, 12) == want[i % 5]
            gc.collect()
            seen.append([(resident(pid), descriptors(pid)) for pid in pids])
        assert_nothing_runs(llm)
        assert executor.pids == pids[1:] and llm.engine.stats.num_failed_steps == 0
    num_requests = (NUM_ROUNDS + len(want)) * (NUM_CROWD + 3)
    for name, first, last in zip(("engine", "rank 0", "rank 1"), seen[NUM_WARM], seen[-1], strict=True):
        print(f"{num_requests} requests, {name}: RSS {first[0] >> 10} KiB after {NUM_WARM} rounds, {last[0] >> 10} "
              f"KiB after {NUM_ROUNDS}; {first[1]} and {last[1]} descriptors")  # fmt: skip
        assert last[0] - first[0] < GROWTH and last[1] == first[1], name
