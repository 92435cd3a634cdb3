"""How long short prompts wait for their first token beside a long one, and what that costs the long one.

    python benchmarks/overtaking.py [--prompt-len 4000] [--short-len 40] [--every 0.25] [--num-short 8]

One engine with the default model in bfloat16. A round is a prompt of `--prompt-len` tokens, and short ones of 8 tokens
of answer that come every `--every` seconds behind it; with rows kept for those that came later, and in turns without
(`pagedec/core/overtaking.py` looks at no request then). Tokens are checked to be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial
from statistics import median
from unittest import mock

from common import heading, interleave, ratio, self_spread, table

from pagedec import AsyncLLM, RequestOutputKind, SamplingParams
from pagedec.core import overtaking

Tokens = list[tuple[int, ...]]


class Contest:
    """Rounds with so many requests looked at, and what prompts waited in them."""

    def __init__(self, llm: AsyncLLM, num_looked_at: int, arguments: argparse.Namespace) -> None:
        self.llm, self.num_looked_at, self.arguments = llm, num_looked_at, arguments
        self.long: list[float] = []
        self.short: list[float] = []
        self.tokens: Tokens = []

    def run(self) -> None:
        with mock.patch.object(overtaking, "MOST_LOOKED_AT", self.num_looked_at):
            self.tokens = asyncio.run(self._round())

    # ---- inside
    async def _round(self) -> Tokens:
        own = self.arguments
        asked = [self._prompt(0, own.prompt_len, 1, self.long)]
        asked += [self._prompt(i, own.short_len, 8, self.short) for i in range(1, own.num_short + 1)]
        going = []
        for prompt in asked:
            going.append(asyncio.ensure_future(prompt))
            await asyncio.sleep(own.every)
        return list(await asyncio.gather(*going))

    async def _prompt(self, i: int, length: int, num_tokens: int, waits: list[float]) -> tuple[int, ...]:
        prompt = {"prompt_token_ids": [(7 * i + 13 * j) % 40000 + 100 for j in range(length)]}
        kind = RequestOutputKind.CUMULATIVE
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)
        began, tokens = time.perf_counter(), ()
        async for output in self.llm.generate(prompt, params):
            if not tokens:
                waits.append(time.perf_counter() - began)
            tokens = tuple(output.outputs[0].token_ids)
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-len", type=int, default=4000)
    parser.add_argument("--short-len", type=int, default=40)
    parser.add_argument("--num-short", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.25, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    heading(f"{arguments.num_short} prompts of {arguments.short_len} tokens behind one of {arguments.prompt_len}")
    llm = AsyncLLM(dtype="bfloat16", max_model_len=8192, enable_prefix_caching=False)
    looked_at = {"in turn": 0, "short ones beside it": overtaking.MOST_LOOKED_AT}
    contests = {name: Contest(llm, num, arguments) for name, num in looked_at.items()}
    for contest in contests.values():
        contest.run()
        contest.long, contest.short = [], []
    times = interleave({name: partial(contest.run) for name, contest in contests.items()}, arguments.rounds, warmup=0)
    base, *_ = contests
    rows: list[list[object]] = []
    for name, contest in contests.items():
        assert contest.tokens == contests[base].tokens, f"{name}: other tokens"
        middle, spread = ratio(times[name], times[base])
        waits = median(contest.short), max(contest.short), median(contest.long)
        rows.append([name, *(f"{seconds:.2f}" for seconds in waits), f"{middle:.2f} ± {spread:.2f}"])
    table(["prompts", "s to a short one's token", "longest", "s to the long one's", f"a round, of {base}'s"], rows)
    print(f"one round of {base} against the next varies by {self_spread(times[base]):.2f}")
    llm.close()


if __name__ == "__main__":
    main()
