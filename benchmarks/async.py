"""Streams of coroutines against one call of `LLM.generate` with the same requests, in turns.

    python benchmarks/async.py [--streams 256]

Both have the default model in bfloat16 and sample with seeds, so that their answers are equal, which is checked. Every
coroutine reads its stream to the end, all on one event loop, with text. The ratio is of whole runs: prompts in, last
text out. The device's time for the same steps drifts by more than what is looked for, so the time outside of it is
shown by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

from common import heading, interleave, ratio, self_spread, table

from pagedec import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from pagedec.engine.engine import Engine

OFFLINE = "LLM.generate"
ENGINE = {"dtype": "bfloat16", "max_model_len": 1024, "num_blocks": 8192}


def requests(count: int, tokens: int) -> list[tuple[str, SamplingParams]]:
    """Short prompts that differ, and answers of `tokens` tokens."""
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=tokens, ignore_eos=True) for i in range(count)]
    return [(f"Story number {i}, about the sea:", own) for i, own in enumerate(params)]


def offline(llm: LLM, job: list[tuple[str, SamplingParams]]) -> list[str]:
    outputs = llm.generate([prompt for prompt, _ in job], [params for _, params in job], use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def streamed(llm: AsyncLLM, job: list[tuple[str, SamplingParams]], kind: RequestOutputKind) -> tuple[list[str], int]:
    """All texts, and how many outputs they came in."""

    async def one(prompt: str, params: SamplingParams) -> tuple[str, int]:
        text, count = "", 0
        async for output in llm.generate(prompt, params.clone(output_kind=kind)):
            piece = output.outputs[0].text
            text = text + piece if kind is RequestOutputKind.DELTA else piece
            count += 1
        return text, count

    async def all_of_them() -> list[tuple[str, int]]:
        return await asyncio.gather(*(one(prompt, params) for prompt, params in job))

    results = asyncio.run(all_of_them())
    return [text for text, _ in results], sum(count for _, count in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    job = requests(arguments.streams, arguments.tokens)
    heading(f"{len(job)} streams on one event loop against LLM.generate, {arguments.tokens} tokens each")
    llm, asynchronous = LLM(**ENGINE), AsyncLLM(**ENGINE)
    want = offline(llm, job)
    counts = {}
    for kind in RequestOutputKind:
        texts, counts[kind] = streamed(asynchronous, job, kind)
        assert texts == want, f"{kind}: not the texts of LLM.generate"
    outside: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, engine: Engine, run: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            began, executed = time.perf_counter(), engine.stats.execute_seconds
            run()
            outside[name].append(time.perf_counter() - began - (engine.stats.execute_seconds - executed))

        return both

    contestants = {OFFLINE: timed(OFFLINE, llm.engine, lambda: offline(llm, job))}
    for kind in RequestOutputKind:
        run = partial(streamed, asynchronous, job, kind)
        contestants[kind.name] = timed(kind.name, asynchronous.engine, run)
    times = interleave(contestants, arguments.rounds)
    rows: list[list[object]] = []
    base = times[OFFLINE]
    for name, timing in times.items():
        middle, spread = ratio(timing, base)
        outputs = "" if name == OFFLINE else counts[RequestOutputKind[name]]
        rate = arguments.streams * arguments.tokens / timing.median
        own = median(outside[name])
        more = (own - median(outside[OFFLINE])) / base.median
        shown = [f"{timing.median:.2f}", f"{rate:.0f}", outputs, f"{middle:.3f} ± {spread:.3f}"]
        rows.append([name, *shown, f"{own:.3f}", f"{more:.1%}"])
    header = [
        "",
        "seconds",
        "tokens/s",
        "outputs",
        "time / LLM.generate's",
        "s outside the device",
        "more, of LLM.generate's time",
    ]
    table(header, rows)
    print(f"one round of LLM.generate against the next varies by {self_spread(base):.3f}")
    asynchronous.close()
    llm.close()


if __name__ == "__main__":
    main()
