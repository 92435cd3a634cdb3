"""Constraints on a step: what a row's mask costs, and a step of constrained branches against one of free branches.

    PYTHONPATH=. python benchmarks/constraints.py [--rows 16 64 128] [--rounds 5] [--sequences N] [--build N]

All contestants generate as many tokens for as many branches, in turns, in one engine. The trie's sequences are 8 tokens
long, the schema's answers never end before the last token. Forced tokens are drafted in the last rows only, where a
step stands for several tokens: its time is that of the whole run over the tokens of one branch. A mask's time is its
thread's own. Reach: a trie of
100,000 sequences at 128 rows at most 1.2 x the free step; 50 us for a row's mask of a usual schema; 10 million
sequences built in a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from typing import Any

import numpy as np
from common import heading, interleave, ratio, table

from pagedec import LLM, SamplingParams, TokenTrie
from pagedec.core import masking

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]}, "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}  # fmt: skip
SHORT = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string", "maxLength": 12}}}
PEOPLE, BOUNDED = ({"type": "array", "items": items, "minItems": 100} for items in (PERSON, SHORT))
LEVELS = (5, 5, 4, 5, 4, 5, 5)


class MaskClock:
    """Seconds and rows of all masks that are made while it is on."""

    def __init__(self) -> None:
        self.seconds, self.rows = 0.0, 0
        self._make = masking.StepMasks.__call__

    def __enter__(self) -> MaskClock:
        def timed(own: Any, rolled: np.ndarray) -> Any:
            began = time.thread_time()
            masks = self._make(own, rolled)
            self.seconds += time.thread_time() - began
            self.rows += len(masks.places)
            return masks

        masking.StepMasks.__call__ = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        masking.StepMasks.__call__ = self._make  # type: ignore[method-assign]


def trie_of(count: int) -> TokenTrie:
    """So many sequences of 8 tokens, which fork at every token."""
    rng = np.random.default_rng(0)
    last = -(-count // int(np.prod(LEVELS)))
    codes = [rng.choice(np.arange(1000, 40000), size, replace=False).tolist() for size in (*LEVELS, last)]
    return TokenTrie(np.array(list(itertools.islice(itertools.product(*codes), count)), np.int32))


def allowed(tokens: list[int]) -> np.ndarray:
    """A function's answer: 50 tokens."""
    return np.arange(tokens[-1] % 7 + 500, 1500, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--build", type=int, default=10_000_000)
    arguments = parser.parse_args()
    trie = trie_of(arguments.sequences)
    heading(f"Constraints: a trie of {len(trie)} sequences, a JSON schema, a function; SmolLM2-135M, bfloat16")
    llm = LLM(num_blocks=4096)
    kinds: dict[str, dict[str, Any]] = {
        "free": {}, "trie": {"token_trie": trie}, "function": {"allowed_tokens_fn": allowed},
        "free, 48 tokens": {}, "schema": {"structured_outputs": {"json": PEOPLE}},
        "schema of short strings": {"structured_outputs": {"json": BOUNDED}},
        "schema, forced tokens drafted": {"structured_outputs": {"json": PEOPLE}},
        "schema without whitespace, drafted": {"structured_outputs": {"json": PEOPLE, "disable_any_whitespace": True}},
    }  # fmt: skip
    long = [name for name in kinds if "schema" in name or "48" in name]
    rows = []
    for count in arguments.rows:
        clocks = {name: MaskClock() for name in kinds}

        def run(name: str, count: int = count, clocks: dict[str, MaskClock] = clocks) -> None:
            scheduler = llm.engine.scheduler
            scheduler.limits = dataclasses.replace(scheduler.limits, draft_forced="drafted" in name)
            num_tokens = 48 if name in long else 8
            common: dict[str, Any] = {"temperature": 1.0, "ignore_eos": name.startswith("free"), "detokenize": False}
            params = [SamplingParams(**common, max_tokens=num_tokens, seed=i, **kinds[name]) for i in range(count)]
            with clocks[name]:
                outputs = llm.generate([f"Here are people as JSON, list {i}: " for i in range(count)], params)
            assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

        timings = interleave({name: lambda name=name: run(name) for name in kinds}, arguments.rounds)
        for name, timing in timings.items():
            base = timings["free, 48 tokens" if name in long else "free"]
            clock = clocks[name]
            middle, spread = ratio(timing, base)
            mask = f"{clock.seconds / clock.rows * 1e6:.0f}" if clock.rows else "-"
            step = timing.median / (48 if name in long else 8)
            rows.append([count, name, mask, f"{step * 1e3:.1f}", f"{middle:.2f} ± {spread:.2f}"])
    table(["rows", "", "mask, us a row", "step, ms", "against free"], rows)
    if arguments.build:
        codes = np.random.default_rng(0).integers(0, 4096, (arguments.build, 6)).astype(np.int32)
        codes[:, 4], codes[:, 5] = np.arange(arguments.build) // 4096, np.arange(arguments.build) % 4096
        began = time.perf_counter()
        built = TokenTrie(codes)
        print(f"{len(built)} sequences of 6 tokens, {len(built.tokens)} nodes: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
