"""How long streams pause while others' prompts are read, by `max_num_batched_tokens` and `target_step_time`, in turns.

    python benchmarks/pauses.py [--rows 512 256 128 64 32] [--seconds 0.3 0.1] [--streams 8] [--prompts 4]

Each contestant is an engine of its own with the default model in bfloat16, that differs in nothing else; those of
--seconds have as many rows as the first of --rows. `--streams`
answers are being written when the first prompt of `--prompt-len` tokens comes; each further one comes when the one
before has its first token. A pause is the time between two tokens of a stream, from the first prompt's coming to the
last one's token. Tokens are the same in all of them, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial
from statistics import median, quantiles

from common import heading, interleave, ratio, self_spread, table

from pagedec import AsyncLLM, RequestOutputKind, SamplingParams

Tokens = list[tuple[int, ...]]


class Contest:
    """One engine, and what its streams and prompts went through in all rounds so far."""

    def __init__(self, num_rows: int, seconds: float | None, arguments: argparse.Namespace) -> None:
        self.llm = AsyncLLM(
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=num_rows,
            target_step_time=seconds,
            enable_prefix_caching=False,
        )
        self.num_streams, self.num_prompts = arguments.streams, arguments.prompts
        self.length: int = arguments.prompt_len
        self.pauses: list[float] = []
        self.first: list[float] = []
        self.tokens: Tokens = []

    def run(self) -> None:
        asyncio.run(self._round())

    # ---- inside
    async def _round(self) -> None:
        come = [asyncio.Event() for _ in range(self.num_streams)]
        over = asyncio.Event()
        streams = [asyncio.ensure_future(self._stream(i, event, over)) for i, event in enumerate(come)]
        for event in come:
            await event.wait()
        began, tokens = time.perf_counter(), []
        for i in range(self.num_prompts):
            asked = time.perf_counter()
            tokens.append(await self._prompt(i))
            self.first.append(time.perf_counter() - asked)
        ended = time.perf_counter()
        over.set()
        for times in await asyncio.gather(*streams):
            inside = [at for at in times if began <= at <= ended]
            self.pauses += [b - a for a, b in zip(inside, inside[1:], strict=False)]
        self.tokens = tokens

    async def _stream(self, i: int, come: asyncio.Event, over: asyncio.Event) -> list[float]:
        """When each token came, from the first one until `over`."""
        params = SamplingParams(seed=i, max_tokens=4000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        times: list[float] = []
        async for _ in self.llm.generate(f"Story number {i}, about the sea:", params):
            times.append(time.perf_counter())
            come.set()
            if over.is_set():
                break
        return times

    async def _prompt(self, i: int) -> tuple[int, ...]:
        prompt = {"prompt_token_ids": [(7 * i + 13 * j) % 40000 + 100 for j in range(self.length)]}
        params = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
        [output] = [output async for output in self.llm.generate(prompt, params)]
        return tuple(output.outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 256, 128, 64, 32])
    parser.add_argument("--seconds", type=float, nargs="*", default=[0.3, 0.15], help="target_step_time")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    heading(
        f"{arguments.streams} streams beside prompts of {arguments.prompt_len} tokens, by rows and seconds of a step"
    )
    contests = {str(num_rows): Contest(num_rows, None, arguments) for num_rows in arguments.rows}
    most = arguments.rows[0]
    contests |= {f"{most}, {seconds:g} s": Contest(most, seconds, arguments) for seconds in arguments.seconds}
    for contest in contests.values():
        contest.run()
        contest.pauses, contest.first = [], []
    times = interleave({name: partial(contest.run) for name, contest in contests.items()}, arguments.rounds, warmup=0)
    base, *_ = contests
    rows: list[list[object]] = []
    for name, contest in contests.items():
        assert contest.tokens == contests[base].tokens, f"{name}: other tokens"
        pauses = sorted(contest.pauses)
        shown = [f"{seconds * 1e3:.0f}" for seconds in (median(pauses), quantiles(pauses, n=100)[98], pauses[-1])]
        middle, spread = ratio(times[name], times[base])
        rows.append([name, *shown, f"{median(contest.first):.2f}", f"{middle:.2f} ± {spread:.2f}"])
    table(["rows", "pause ms, median", "99 %", "longest", "s to the prompt's token", f"a round, of {base}'s"], rows)
    print(f"one round of {base} against the next varies by {self_spread(times[base]):.2f}")
    for contest in contests.values():
        contest.llm.close()


if __name__ == "__main__":
    main()
