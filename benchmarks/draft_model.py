"""A draft model: what a roll costs beside its kernels, speed against plain decoding and against what acceptance and
costs allow, and the filtering of logits beside transformers' processors.

    python benchmarks/train_draft.py DIR
    python benchmarks/draft_model.py questions.jsonl --model DIR

Questions are a line of JSON each, with "category" and "turns". `a` is the share of drafted tokens that were accepted
where all before them were, `c` the time of a rolled token over that of a plain step, `v` the time of a verifying step
over that of a plain one, both measured in the runs themselves on the device's side. The bound is (1 - a^(g+1)) / ((1 -
a) (g c + v)). Greedy and coupled answers are compared with the plain ones: another token ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import heading, interleave, ratio, self_spread, table
from torch import Tensor

from pagedec import LLM, SamplingParams
from pagedec.core.acceptance import Acceptance
from pagedec.core.forward import DRAW_DTYPE
from pagedec.kernels.backend import Drafted
from pagedec.runtime.runner import LaneRunner

Speculative = bool | dict[str, Any]


def median_of(run: Callable[[], object], times: int = 30) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Clock:
    """Times what the lanes of an engine carry out: seconds by lane and number of rows."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.lanes: dict[str, LaneRunner] = llm.engine.executor.worker.lanes
        self.seconds: dict[tuple[str, int], list[float]] = {}
        self._wrap("target", "execute", lambda forward: len(forward.token_ids))
        self._wrap("draft", "roll", lambda forward: int(forward.rolls["count"].max()))

    def _wrap(self, lane: str, name: str, size: Callable[[Any], int]) -> None:
        runner = self.lanes[lane]
        own = getattr(runner, name)

        def timed(forward: Any, *rest: Any) -> Any:
            began = time.perf_counter()
            out = own(forward, *rest)
            self.seconds.setdefault((lane, size(forward)), []).append(time.perf_counter() - began)
            return out

        setattr(runner, name, timed)

    def median(self, lane: str, size: int) -> float:
        return statistics.median(self.seconds[lane, size])


def share_of(counts: Acceptance) -> float:
    """Of tokens whose predecessors in the draft were accepted, how many were."""
    tried = counts.drafted[0] + sum(counts.accepted[:-1]) if counts.drafted else 0
    return counts.num_accepted / tried if tried else 0.0


def bound_of(a: float, g: int, c: float, v: float) -> float:
    tokens = (1 - a ** (g + 1)) / (1 - a) if a < 1 else g + 1.0
    return float(tokens / (g * c + v))


# ---- one prompt after the other
class Contest:
    """Runs of some prompts, plain and with drafts of several widths."""

    def __init__(self, clock: Clock, prompts: list[list[int]], max_tokens: int, sampled: bool) -> None:
        self.llm, self.prompts, self.clock = clock.llm, prompts, clock
        clock.seconds.clear()
        own = {"temperature": 0.7, "top_p": 0.95} if sampled else {"temperature": 0.0}
        self.params = [SamplingParams(max_tokens=max_tokens, seed=i, **own) for i in range(len(prompts))]
        self.texts: dict[str, list[list[int]]] = {}
        self.shares: dict[str, float] = {}

    def contestant(self, name: str, speculative: Speculative) -> Callable[[], None]:
        exact = not isinstance(speculative, dict) or speculative.get("verify") != "rejection"

        def run() -> None:
            stats = self.llm.engine.stats
            stats.drafts.clear()
            texts = []
            for prompt, params in zip(self.prompts, self.params, strict=True):
                own = params.clone(speculative=speculative)
                texts.append(self.llm.generate([prompt], own, use_tqdm=False)[0].outputs[0].token_ids)
            self.texts[name] = texts
            for counts in stats.drafts.values():
                self.shares[name] = share_of(counts)
            assert not exact or texts == self.texts["plain"], f"{name}: other tokens"

        return run

    def measure(self, widths: list[int], verify: str, rounds: int) -> None:
        ways: dict[str, Speculative] = {"plain": False}
        fixed = {"method": "draft_model", "verify": verify, "adaptive": False}
        ways |= {str(g): {**fixed, "num_speculative_tokens": g} for g in widths}
        timings = interleave({name: self.contestant(name, way) for name, way in ways.items()}, rounds, warmup=1)
        plain, rows = timings["plain"], list[list[object]]()
        step = self.clock.median("target", 1)
        for name, timing in timings.items():
            speed = sum(map(len, self.texts[name])) / timing.median
            if name == "plain":
                rows.append([name, f"{speed:.0f}", "", "", "", "", "", ""])
                continue
            g = int(name)
            value, spread = ratio(plain, timing)
            value *= sum(map(len, self.texts[name])) / sum(map(len, self.texts["plain"]))
            a, c = self.shares[name], self.clock.median("draft", g) / g / step
            v = self.clock.median("target", g + 1) / step
            bound = bound_of(a, g, c, v)
            shown = [f"{number:.2f}" for number in (a, c, v, bound, value / bound)]
            rows.append([name, f"{speed:.0f}", f"{value:.2f} +- {spread:.2f}", *shown])
        columns = ["gamma", "tokens/s", "ratio to plain", "a", "c", "v", "bound", "of the bound"]
        table(columns, rows)
        print(f"plain/plain varies by {self_spread(plain):.2f}; a plain step is {1e3 * step:.2f} ms\n", flush=True)


def read_prompts(llm: LLM, path: Path, most: int) -> list[list[int]]:
    """The first turns, of all categories alike."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["category"], []).append(record["turns"][0])
    mixed = [questions[i] for i in range(most) for questions in found.values() if i < len(questions)][:most]
    tokenizer = llm.get_tokenizer()
    asked = [[{"role": "user", "content": question}] for question in mixed]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True))[:1500] for chat in asked]


# ---- parts
def measure_host(llm: LLM, batch: int, gamma: int) -> None:
    """What a rolled token costs beyond its kernels: one step's rolls again and again, in one call and with a call for
    each token, less the programs and draws run by themselves."""
    runner: LaneRunner = llm.engine.executor.worker.lanes["draft"]
    seen, own, roller = list[Any](), runner.roll, runner._roller

    def noting(forward: Any) -> Any:
        if len(forward.rolls) == batch == len(forward.token_ids) and forward.rolls["count"].min() == gamma:
            seen.append(forward)
        return own(forward)

    runner.roll = noting  # type: ignore[method-assign]
    way = {"method": "draft_model", "num_speculative_tokens": gamma, "adaptive": False}
    kind = {"temperature": 0.8, "max_tokens": 64, "ignore_eos": True}
    params = [SamplingParams(seed=i, speculative=way, **kind) for i in range(batch)]
    llm.generate([[5 + i, 9, 40, 5, 9] for i in range(batch)], params, use_tqdm=False)
    runner.roll = own  # type: ignore[method-assign]
    draws = seen[-1].rolls["draw"].copy()
    draws["row"] = np.arange(batch)
    rows = list[list[object]]()
    for name, way_of in (("one", roller), ("one for each token", None)):
        runner._roller = way_of
        whole = median_of(lambda: own(seen[-1]), 40) / gamma
        program = median_of(runner.programs.whole.run, 40)
        sample = median_of(lambda: runner.backend.sample(runner.buffers.logits[:batch], draws), 40)
        rows.append([batch, name, *(f"{1e6 * x:.0f}" for x in (whole, program, sample, whole - program - sample))])
    runner._roller = roller
    table(["rolls", "calls", "us a token of each", "its program", "its draws", "the rest"], rows)


def measure_filters(llm: LLM, rows: int = 8) -> None:
    """Temperature, top-k, top-p, min-p and draws of 8 rows in one call, and their verification, beside transformers."""
    backend = llm.engine.executor.worker.lanes["target"].backend
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 49152, generator=generator) * 2.5
    drafts = logits + 0.5 * torch.randn(rows, 49152, generator=generator)
    draws = np.zeros(rows, DRAW_DTYPE)
    draws["row"], draws["position"] = np.arange(rows), np.arange(1, rows + 1)
    out = list[list[object]]()
    for name, top_k, top_p, min_p in (("temperature", 0, 1.0, 0.0), ("top-p", 0, 0.95, 0.0), ("all", 50, 0.95, 0.02)):
        draws["temperature"], draws["top_k"], draws["top_p"], draws["min_p"] = 0.8, top_k, top_p, min_p
        drawn = draws.copy()
        drawn["stream"] = 1 << 63
        drafted = Drafted(drafts, drawn, backend.sample(drafts, drawn))
        filters = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(0.8)])
        if top_k:
            filters.append(transformers.TopKLogitsWarper(top_k))
        if top_p < 1:
            filters.append(transformers.TopPLogitsWarper(top_p))
        if min_p:
            filters.append(transformers.MinPLogitsWarper(min_p))

        def theirs(filters: Any = filters) -> Tensor:
            return torch.multinomial(filters(None, logits).softmax(-1), 1)

        times = [
            median_of(lambda: backend.sample(logits, draws)),
            median_of(lambda drafted=drafted: backend.verify(logits, draws, drafted)),  # type: ignore[misc]
            median_of(theirs),
        ]
        out.append([name, *(f"{1e3 * seconds:.2f}" for seconds in times)])
    table(["filters", "ms, draws", "ms, verification of 8", "ms, transformers' draws"], out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model", required=True, help="the draft model's directory")
    parser.add_argument("--quantization", choices=["int8"], help="of the target")
    parser.add_argument("--draft-quantization", choices=["int8"])
    parser.add_argument("--gamma", nargs="+", type=int, default=[2, 4, 7, 14])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["greedy", "coupling", "rejection"])
    given = parser.parse_args()
    heading("A draft model")
    config = {"model": given.model, "quantization": given.draft_quantization}
    llm = LLM(
        max_model_len=2048, enable_prefix_caching=False, quantization=given.quantization, speculative_config=config
    )
    print("### What a roll costs\n")
    for batch in (1, 8):
        measure_host(llm, batch, 5)
    print("### Filtering 8 rows of 49,152\n")
    measure_filters(llm)
    prompts, clock = read_prompts(llm, given.questions, given.prompts), Clock(llm)
    for kind in given.kinds:
        print(f"### {kind}, {len(prompts)} prompts, one after the other\n")
        contest = Contest(clock, prompts, given.max_tokens, kind != "greedy")
        contest.measure(given.gamma, "coupling" if kind == "greedy" else kind, given.rounds)


if __name__ == "__main__":
    main()
