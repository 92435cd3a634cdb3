"""Beam search beside a plain batch of as many rows and beside transformers' beam search, step by step in turns.

    python benchmarks/beam.py [--widths 1 4 16 64 256] [--prompts 32 1024] [--rounds 48] [--no-transformers]

One run of "beams" is one step of the whole engine (plan, forward, read-out, settle) that gives every beam of one
request a token; of "plain", one step of as many greedy requests. Both have the prefix cache on, and the same prompt, so
that all rows of both attend to the same blocks. Host is the time of a step outside the device. Blocks are those that
are held at the end; copies are the token slots that a step copies because a beam writes into a block that others have.
transformers' own beam search runs in a thread of its own and is let on by one step at a time; it holds its cache once
for each beam, so it is left out where that would be more than --peer-tokens.
"""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Timing, heading, interleave, ratio, self_spread, table
from decode import load_transformers

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.engine.engine import Engine

WARMUP = 3
REACH = {4: 0.95, 16: 0.95, 64: 0.90, 256: 0.85}
LONG_REACH, LONG_WIDTH = 0.85, 16


@dataclass(slots=True)
class Side:
    """An engine that steps, and what its steps cost."""

    engine: Engine
    copies: int = 0
    _before: tuple[float, int] = field(default=(0.0, 0))

    def __post_init__(self) -> None:
        execute = self.engine.executor.execute

        def counting(forwards: Any, rules: Any, masks: Any = None) -> Any:
            self.copies += sum(len(forward.copy_src) for forward in forwards.values())
            return execute(forwards, rules, masks)

        self.engine.executor.execute = counting  # type: ignore[method-assign]

    def begin(self, requests: list[tuple[list[int], Any]]) -> None:
        """Add requests, and evaluate their prompts."""
        engine = self.engine
        engine.scheduler.reset_prefix_cache()
        for i, (prompt, params) in enumerate(requests):
            engine.add(engine.admit(str(i), prompt, params))
        length = len(requests[0][0])
        while any(branch.table.length < length for r in engine.scheduler.requests for branch in r.branches):
            engine.step()
        for _ in range(WARMUP):
            engine.step()
        self.copies, self._before = 0, self._totals()

    def end(self) -> tuple[float, int]:
        """Host milliseconds a step, and blocks held; all requests are gone then."""
        seconds, steps = self._totals()
        host = (seconds - self._before[0]) / (steps - self._before[1]) * 1e3
        pool = self.engine.scheduler.pools["target"]
        blocks = pool.num_blocks - pool.num_available
        for request in list(self.engine.scheduler.requests):
            self.engine.abort(request.id)
        return host, blocks

    def _totals(self) -> tuple[float, int]:
        stats = self.engine.stats
        return stats.plan_seconds + stats.settle_seconds, stats.num_steps


class PeerBeams:
    """transformers' beam search, one step at a time: from one look at the logits to the next."""

    def __init__(self, peer: Any, prompt: list[int], width: int, steps: int) -> None:
        self._go, self._done, self._free = threading.Semaphore(0), threading.Semaphore(0), False
        ids = torch.tensor([prompt])
        given = {"num_beams": width, "do_sample": False, "max_new_tokens": steps, "min_new_tokens": steps}

        def run() -> None:
            with torch.inference_mode():
                peer.generate(
                    ids, attention_mask=torch.ones_like(ids), pad_token_id=0, logits_processor=[self._pause], **given
                )

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._done.acquire()

    def _pause(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._free:
            self._done.release()
            self._go.acquire()
        return scores

    def step(self) -> None:
        self._go.release()
        self._done.acquire()

    def end(self) -> None:
        """Let it run to its end."""
        self._free = True
        self._go.release()
        self._thread.join()


def pair(a: Timing, b: Timing) -> str:
    middle, spread = ratio(a, b)
    return f"{middle:.2f} ± {spread:.2f}"


def contest(
    sides: tuple[Side, Side], peer: Any, width: int, length: int, rounds: int, peer_tokens: int
) -> tuple[list[object], Timing]:
    """One line, and the times of the beams' steps."""
    rng = random.Random(width + length)
    prompt = [rng.randrange(1000, 40_000) for _ in range(length)]
    steps = rounds + 2 * WARMUP + 8
    beams, plain = sides
    beams.begin([(prompt, BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True))])
    plain.begin([(prompt, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))] * width)
    contestants: dict[str, Callable[[], object]] = {"beams": beams.engine.step, "plain": plain.engine.step}
    theirs = None
    if peer is not None and width * (length + steps) <= peer_tokens:
        theirs = PeerBeams(peer, prompt, width, steps)
        contestants["transformers"] = theirs.step
    timings = interleave(contestants, rounds, warmup=WARMUP)
    copies = beams.copies / (rounds + WARMUP)
    if theirs is not None:
        theirs.end()
    (host, blocks), (plain_host, plain_blocks) = beams.end(), plain.end()
    own, other = timings["beams"], timings["plain"]
    row: list[object] = [
        width, length, f"{1 / own.median:.1f}", f"{1 / other.median:.1f}", pair(other, own),
        f"{self_spread(own):.2f}", f"{host:.2f}", f"{plain_host:.2f}", blocks, plain_blocks, f"{copies:.0f}",
    ]  # fmt: skip
    if peer is not None:
        peers = timings.get("transformers")
        row += ["", ""] if peers is None else [f"{1 / peers.median:.1f}", pair(peers, own)]
    return row, own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 1024])
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--peer-tokens", type=int, default=20_000)
    arguments = parser.parse_args()
    heading("Beam search beside a plain batch and transformers: SmolLM2-135M, bfloat16")
    most = max(arguments.widths) * (arguments.rounds // 16 + 3) + max(arguments.prompts) // 16 + 64
    made = [LLM(dtype="bfloat16", max_model_len=2048, num_blocks=max(most, 256)) for _ in range(2)]
    sides = Side(made[0].engine), Side(made[1].engine)
    peer = None if arguments.no_transformers else load_transformers(made[0])
    rows, speeds = [], dict[tuple[int, int], Timing]()
    for length in arguments.prompts:
        for width in arguments.widths:
            row, speeds[width, length] = contest(sides, peer, width, length, arguments.rounds, arguments.peer_tokens)
            rows.append(row)
    columns = ["width", "prompt", "beams, steps/s", "plain, steps/s", "beams / plain", "noise", "host, ms"]
    columns += ["plain host, ms", "blocks", "plain blocks", "copies a step"]
    table(columns + ([] if peer is None else ["transformers, steps/s", "beams / transformers"]), rows)
    reach = ", ".join(f"{width}: {share:.2f}" for width, share in REACH.items())
    print(f"Reach, beams / plain by width: {reach}; host work at width 64 at most 1 ms.")
    short, long = (speeds.get((LONG_WIDTH, length)) for length in (min(arguments.prompts), max(arguments.prompts)))
    if short is not None and long is not None and short is not long:
        share = short.median / long.median
        lengths = f"{max(arguments.prompts)} tokens, of its speed on {min(arguments.prompts)}"
        print(f"Width {LONG_WIDTH} on a prompt of {lengths}: {share:.2f}; reach {LONG_REACH}.")


if __name__ == "__main__":
    main()
