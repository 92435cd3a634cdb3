"""Searches on sessions beside the same searches with resubmitted prompts, and what a session's operations cost.

    python benchmarks/search.py [--prompts 20] [--no-uncached] [--only costs|search] [--budget SECONDS]

The searches are those of `pagedec.search`, unchanged: step-level beam search (width 4, 4 continuations, 6 steps) and
Monte-Carlo tree search (8 simulations of 4), each with the model as its judge. "Resubmitted" gives them branches that
are token lists: each call is a plain request over all of a branch's tokens, and a judge's question asks for its two
words, one request each. Seeds are those of the sessions, so all ways find the same texts with the same scores, which is
checked. Blocks are the most that a step used, what is parked too, but not what only the prefix cache remembers; "kept
behind it" is what that had at a search's end. Each prompt is searched in all ways before the
next one, with empty prefix caches.

Costs: a fork of an evaluated branch of 4,096 tokens; a step of 16 requests with 5,000 parked branches beside it; and
the scores of 64 continuations of a prompt of 2,048 tokens, beside 64 requests that evaluate the same rows over the
cached prompt.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import Timing, heading, ratio, self_spread, table

from pagedec import LLM, SamplingParams
from pagedec.engine.open_branches import seed_of
from pagedec.search import ModelJudge, mcts, step_beam_search
from pagedec.text.conversation import encode_behind

SUBJECTS = (
    "a train",
    "a baker",
    "a farmer",
    "a school",
    "a river",
    "a shop",
    "a team",
    "a library",
    "a ship",
    "a town",
)
JUDGE = ModelJudge("\nIs this right? Answer:", " Yes", " No")
STEP = SamplingParams(temperature=0.8, max_tokens=16)


def prompt(number: int) -> str:
    """A problem with some worked ones before it, which no other prompt has."""
    rng, parts = random.Random(number), []
    for _ in range(5):
        who, a, b = rng.choice(SUBJECTS), rng.randrange(2, 90), rng.randrange(2, 90)
        parts.append(f"Problem: {who} had {a} apples, and then got {b} more. How many were there?\n")
        parts.append(
            f"Answer: There were {a} at first. Then {b} came. {a} and {b} are {a + b}. The answer is {a + b}.\n\n"
        )
    who, a, b = rng.choice(SUBJECTS), rng.randrange(2, 90), rng.randrange(2, 90)
    parts.append(f"Problem: {who} had {a + b} apples, and then lost {b}. How many were left? Think in steps.\nAnswer:")
    return "".join(parts)


@dataclass
class Resubmitted:
    """What a search needs of a branch, with nothing kept but tokens."""

    llm: LLM
    tokens: list[int]
    seed: int
    name: str = "0"
    num_forks: int = 0
    epoch: int = 0
    outputs: list[Any] = field(default_factory=list)
    branches: list[Resubmitted] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.tokens

    @property
    def room(self) -> int:
        return self.llm.engine.room(len(self.tokens))

    def fork(self) -> Resubmitted:
        made = Resubmitted(self.llm, list(self.tokens), self.seed, f"{self.name}.{self.num_forks}")
        self.num_forks += 1
        return made

    def append(self, text: str) -> None:
        self.tokens = self.tokens + (encode_behind(self.llm.get_tokenizer(), self.tokens, text) or [])

    def close(self) -> None:
        """There is nothing to let go."""

    def generate(self, params: Any, keep: str, **fields: Any) -> Resubmitted:
        return self.generate_all([self], params, keep=keep, **fields)[0]

    def generate_all(self, branches: Sequence[Resubmitted], params: Any, keep: str, **fields: Any) -> list[Resubmitted]:
        each = [params.clone(seed=seed_of(own.seed, own.name, own.epoch), **fields) for own in branches]
        outputs = self.llm.generate([own.tokens for own in branches], each, use_tqdm=False)
        for own, output in zip(branches, outputs, strict=True):
            own.outputs, own.branches = output.outputs, []
            for answer in output.outputs:
                own.branches.append(own.fork())
                own.branches[-1].tokens = own.tokens + answer.token_ids
            own.epoch += 1
        return list(branches)

    def score_all(self, branches: Sequence[Resubmitted], continuations: Sequence[Sequence[str]]) -> list[list[Score]]:
        """One token each: a request that may answer nothing else."""
        tokenizer, prompts, params = self.llm.get_tokenizer(), [], []
        for own, texts in zip(branches, continuations, strict=True):
            for text in texts:
                [token] = encode_behind(tokenizer, own.tokens, text) or []
                prompts.append(own.tokens)
                params.append(SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[token], logprobs=0))
        outputs = iter(self.llm.generate(prompts, params, use_tqdm=False))
        return [[Score(next(outputs).outputs[0].cumulative_logprob or 0.0) for _ in texts] for texts in continuations]


@dataclass
class Score:
    logprob: float


@dataclass
class Way:
    """One way to search, and what it has cost."""

    llm: LLM
    uses_sessions: bool
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    blocks: int = 0
    filled: int = 0

    def run(self, search: Callable[[Any], list[Any]], number: int) -> list[Any]:
        llm = self.llm
        llm.reset_prefix_cache()
        before, llm.engine.stats.max_blocks_used = llm.engine.stats.num_rows, 0
        began = time.perf_counter()
        if self.uses_sessions:
            with llm.session(prompt(number), seed=number) as session:
                found = search(session)
        else:
            found = search(Resubmitted(llm, llm.get_tokenizer().encode(prompt(number)), number))
        self.seconds.append(time.perf_counter() - began)
        self.rows += llm.engine.stats.num_rows - before
        self.blocks = max(self.blocks, llm.engine.stats.max_blocks_used)
        pool = llm.engine.scheduler.pools["target"]
        self.filled = max(self.filled, pool.num_blocks - len(pool.free))
        return found


def tokens_of(branch: Any) -> list[int]:
    return branch.tokens if isinstance(branch, Resubmitted) else branch.token_ids


def beams(branch: Any) -> list[Any]:
    found = step_beam_search(branch, JUDGE, width=4, samples=4, steps=6, delimiter=".", sampling_params=STEP)
    return [(tokens_of(one.branch), one.score) for one in found]


def tree(branch: Any) -> list[Any]:
    root = mcts(branch, JUDGE, simulations=8, samples=4, delimiter=".", sampling_params=STEP)
    found = [(tokens_of(node.branch), node.score, node.visits) for node in root.line()]
    root.close()
    return found


def searches(num_prompts: int, uncached: bool, budget: float) -> None:
    heading("Search on sessions and with resubmitted prompts")
    cached = {"max_model_len": 2048, "num_blocks": 1024}
    for title, search in (("step beams", beams), ("MCTS", tree)):
        ways = {
            "sessions": Way(LLM("smollm2", **cached), True),
            "resubmitted, prefix cache": Way(LLM("smollm2", **cached), False),
        }
        if uncached:
            ways["resubmitted, no cache"] = Way(LLM("smollm2", **cached, enable_prefix_caching=False), False)
        began, done = time.perf_counter(), 0
        for number in range(num_prompts):
            if time.perf_counter() - began > budget:
                break
            done += 1
            results = [way.run(search, number) for way in ways.values()]
            assert all(result == results[0] for result in results), "the ways have found different texts"
        own, rows = ways["sessions"], []
        for name, way in ways.items():
            times, spread = ratio(Timing(tuple(way.seconds)), Timing(tuple(own.seconds)))
            rows.append(
                [name, way.rows, way.blocks, way.filled, f"{sum(way.seconds):.2f}", f"{times:.2f} +- {spread:.2f}"]
            )
        print(f"{title}, {done} prompts\n")
        table(["", "tokens evaluated", "most KV blocks", "kept behind it", "seconds", "of sessions' time"], rows)
        for way in ways.values():
            way.llm.close()


def costs() -> None:
    heading("What a session's operations cost")
    llm = LLM("smollm2", max_model_len=4400, num_blocks=2600, max_num_batched_tokens=512)
    rng = random.Random(0)

    def text(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    rows = [_forks(llm, text(4096))]
    rows += [_parked(llm, text), _scores(llm, text)]
    table(["", "measured", "bound"], rows)
    llm.close()


def _forks(llm: LLM, tokens: list[int]) -> list[object]:
    with llm.session(tokens, seed=0) as session:
        session.generate(max_tokens=4, ignore_eos=True)
        steps, copies = llm.engine.stats.num_steps, llm.engine.scheduler.pools["target"].num_copied
        seconds, forks = [], []
        for _ in range(200):
            began = time.perf_counter()
            forks.append(session.fork())
            seconds.append(time.perf_counter() - began)
        assert llm.engine.stats.num_steps == steps
        assert llm.engine.scheduler.pools["target"].num_copied == copies
        timing = Timing(tuple(seconds))
    return ["fork at 4,096 tokens", f"{timing.median * 1e3:.3f} ms +- {timing.spread:.0%}", "0.1 ms"]


def _parked(llm: LLM, text: Callable[[int], list[int]]) -> list[object]:
    """Host time of steps with and without parked branches, in turns."""
    session = llm.session(text(300), seed=0)
    session.generate(max_tokens=2, ignore_eos=True)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000)
    streams = [llm.stream({"prompt_token_ids": text(8)}, params) for _ in range(16)]
    for stream in streams:
        next(stream)
    engine, forks, host = llm.engine, list[Any](), dict[bool, list[float]]({False: [], True: []})
    for turn in range(12):
        parked = turn % 2 == 1
        if parked:
            forks = session.fork(5000)
        for _ in range(40):
            before = engine.stats.plan_seconds + engine.stats.settle_seconds
            began = engine.stats.num_steps
            while engine.stats.num_steps == began:
                next(streams[0])
            now = engine.stats.plan_seconds + engine.stats.settle_seconds
            host[parked].append((now - before) / (engine.stats.num_steps - began))
        for fork in forks:
            fork.close()
        forks = []
    for stream in streams:
        stream.close()
    session.close()
    off, on = (Timing(tuple(host[key])) for key in (False, True))
    added = (on.median - off.median) * 1e3
    return ["5,000 parked branches, added to a step", f"{added:.3f} ms (of {off.median * 1e3:.3f})", "0.2 ms"]


def _scores(llm: LLM, text: Callable[[int], list[int]]) -> list[object]:
    prefix, rows = text(2048), [text(8) for _ in range(64)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    session = llm.session(prefix, seed=0)
    session.score(rows)
    expected = llm.generate(
        [[*prefix, *row] for row in rows[:4]],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    for score, output in zip(session.score(rows[:4]), expected, strict=True):
        assert score.logprobs == (output.prompt_logprobs or [])[len(prefix) :]

    def plain() -> None:
        llm.reset_prefix_cache()
        llm.generate([prefix], params, use_tqdm=False)

    def requests() -> None:
        llm.generate([[*prefix, *row[:-1]] for row in rows], params, use_tqdm=False)

    seconds: dict[str, list[float]] = {"score": [], "requests": []}
    for _ in range(8):
        plain()
        for name, run in (("score", lambda: session.score(rows)), ("requests", requests)):
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    score, other = Timing(tuple(seconds["score"])), Timing(tuple(seconds["requests"]))
    times, spread = ratio(score, other)
    noise = self_spread(other)
    session.close()
    measured = f"{times:.2f} +- {spread:.2f} x {other.median * 1e3:.0f} ms (itself +- {noise:.0%})"
    return ["64 scores over 2,048 tokens, of as many rows in requests", measured, "1.3 x"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which each search begins no prompt")
    parser.add_argument("--no-uncached", action="store_true", help="leave out the way without a prefix cache")
    parser.add_argument("--only", choices=("costs", "search"))
    arguments = parser.parse_args()
    if arguments.only != "search":
        costs()
    if arguments.only != "costs":
        searches(arguments.prompts, not arguments.no_uncached, arguments.budget)
