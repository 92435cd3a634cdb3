"""Who is let in: rows evaluated and tokens a second in pools that are too small, beside letting in everybody whose
prompt fits.

    python benchmarks/admission.py [--requests 96] [--rounds 3]

Answers' lengths are known to nobody before they end: a decoder ends them. The pool has a half and a quarter of the
blocks that all of them would like to have at once, as a run with room for everything shows. Rows needed are that run's.
Contestants take turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from common import Timing, heading, ratio, table

from pagedec import LLM, SamplingParams
from pagedec.core.demand import Forecast
from pagedec.core.protocol import Answer, DecoderContext, Hypothesis, Query, Verdict
from pagedec.decoders import Sampling, decoder


@dataclass(frozen=True, slots=True)
class HiddenParams(SamplingParams):
    """Ends after `length` tokens, which only its decoder knows."""

    length: int = 1


@decoder("hidden", params=HiddenParams)
class Hidden(Sampling):
    def __init__(self, params: HiddenParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.left = params.length

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        verdict = super().advance(queries, answers)
        self.left -= 1
        if self.left:
            return verdict
        return Verdict(done=tuple(Hypothesis(child.parent.tip, child.tokens) for child in verdict.live))


def make_job(count: int, kind: str) -> tuple[list[dict[str, list[int]]], list[HiddenParams]]:
    rng = random.Random(0)
    prompts, params = [], []
    for i in range(count):
        long = kind == "long prompts"
        length = rng.randint(16, 400) if long else rng.randint(4, 48)
        answer = rng.randint(16, 128) if long else min(800, 16 + int(rng.expovariate(1 / 150)))
        prompts.append({"prompt_token_ids": [rng.randrange(3, 49000) for _ in range(length)]})
        params.append(HiddenParams(temperature=0.8, seed=i, ignore_eos=True, length=answer))
    return prompts, params


@dataclass(slots=True)
class Result:
    seconds: float
    num_rows: int
    peak: int
    preemptions: list[int]


def run(llm: LLM, job: tuple[list[dict[str, list[int]]], list[HiddenParams]]) -> Result:
    llm.reset_prefix_cache()
    stats = llm.engine.stats
    rows, stats.max_blocks_used = stats.num_rows, 0
    began = time.perf_counter()
    outputs = llm.generate(job[0], job[1], use_tqdm=False)
    seconds = time.perf_counter() - began
    preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
    return Result(seconds, stats.num_rows - rows, stats.max_blocks_used, preemptions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    heading(f"Admission: {arguments.requests} requests of unknown length, default model, bf16")
    lines: list[list[object]] = []
    for kind in ("long prompts", "long answers"):
        job = make_job(arguments.requests, kind)
        roomy = LLM(dtype="bfloat16", max_model_len=1024, num_blocks=8192)
        needed = run(roomy, job)
        roomy.close()
        tokens = sum(params.length for params in job[1])
        for share in (0.5, 0.25):
            llm = LLM(dtype="bfloat16", max_model_len=1024, num_blocks=max(66, int(needed.peak * share)))
            results: dict[str, list[Result]] = {"by expected demand": [], "whose prompt fits": []}
            for _ in range(arguments.rounds):
                results["by expected demand"].append(run(llm, job))
                with mock.patch.object(Forecast, "admits", lambda *_: True):
                    results["whose prompt fits"].append(run(llm, job))
            llm.close()
            times = {name: Timing(tuple(one.seconds for one in found)) for name, found in results.items()}
            for name, found in results.items():
                middle, spread = ratio(times[name], times["whose prompt fits"])
                lines.append(
                    [
                        kind,
                        share,
                        name,
                        f"{found[0].num_rows / needed.num_rows:.2f}",
                        max(found[0].preemptions),
                        sum(found[0].preemptions),
                        f"{tokens / times[name].median:.0f}",
                        f"{middle:.2f} ± {spread:.2f}",
                    ]
                )
    columns = [
        "job",
        "share of blocks",
        "lets in",
        "rows / needed",
        "most preemptions of one",
        "preemptions",
        "tokens/s",
    ]
    table([*columns, "time / whose prompt fits"], lines)


if __name__ == "__main__":
    main()
