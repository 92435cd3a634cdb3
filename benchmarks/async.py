"""Streams of coroutines against one call of `LLM.generate` with the same requests, in turns.

    python benchmarks/async.py [--streams 256]

Both have the default model in bfloat16 and sample with seeds, so that their answers are equal, which is checked. Every coroutine
reads its stream to the end, all on one event loop, with text. The ratio is of whole runs: prompts in, last text out.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from common import Timing, heading, interleave, ratio, self_spread, table

from pagedec import LLM, AsyncLLM, RequestOutputKind, SamplingParams

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
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    job = requests(arguments.streams, arguments.tokens)
    heading(f"{len(job)} streams on one event loop against LLM.generate, {arguments.tokens} tokens each")
    llm, asynchronous = LLM(**ENGINE), AsyncLLM(**ENGINE)
    want = offline(llm, job)
    counts = {}
    for kind in RequestOutputKind:
        texts, counts[kind] = streamed(asynchronous, job, kind)
        assert texts == want, f"{kind}: not the texts of LLM.generate"
    cpu: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            began = time.process_time()
            run()
            cpu[name] = time.process_time() - began

        return both

    contestants = {"LLM.generate": timed("LLM.generate", lambda: offline(llm, job))}
    for kind in RequestOutputKind:
        contestants[kind.name] = timed(kind.name, lambda kind=kind: streamed(asynchronous, job, kind))  # type: ignore[misc]
    times = interleave(contestants, arguments.rounds)
    rows: list[list[object]] = []
    base = times["LLM.generate"]
    for name, timing in times.items():
        middle, spread = ratio(timing, base)
        outputs = "" if name == "LLM.generate" else counts[RequestOutputKind[name]]
        rate = arguments.streams * arguments.tokens / timing.median
        rows.append([name, f"{timing.median:.2f}", f"{rate:.0f}", outputs, f"{middle:.3f} ± {spread:.3f}"])
    table(["", "seconds", "tokens/s", "outputs", "time / LLM.generate's"], rows)
    print(f"one round of LLM.generate against the next varies by {self_spread(base):.3f}")
    assert isinstance(base, Timing)
    asynchronous.close()
    llm.close()


if __name__ == "__main__":
    main()
