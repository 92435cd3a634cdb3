"""A tiny language that drives the scheduler, and the golden transcripts written in it.

A transcript is a text of commands, each followed by `----` and what the scheduler answered:

    limits blocks=16 draft=8 block_size=4 rows=24 seqs=256 chunk=3 caching=0
    add a method=sampling prompt=1-9 n=2 max_tokens=4 seed=1 priority=0 salt=x stop=3 min_tokens=2
    step [count]      plan, run on the fake device, settle; prints the plan and the events
    abort a           preempt a       lose-device       fork a branch      roll-back a branch length      close a branch

    python -m tests.engine.transcripts [--rewrite]
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pagedec.core.forward import LaneForward
from pagedec.core.plan import StepPlan
from pagedec.core.protocol import Child, Verdict
from pagedec.core.request import Ended, Event, Failed, Progress, Request, Waiting
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.errors import PagedecError
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams
from tests.algorithms.interactive import InteractiveParams
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import EOS, FakeEngine, LanguageModel
from tests.core.world import limits

TESTDATA = Path(__file__).parent / "testdata"
METHODS: dict[str, Callable[..., Any]] = {
    "sampling": SamplingParams, "ngram": NGramParams, "lookahead": LookaheadParams,
    "speculative": partial(SpeculativeParams, num_candidates=1), "interactive": InteractiveParams,
}  # fmt: skip


def numbers(text: str) -> list[int]:
    """ "1-4,7" is 1, 2, 3, 4, 7; token ids wrap around in the small vocabulary."""
    out: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return [number % 8 for number in out]


class Driver:
    """Carries out one transcript's commands."""

    def __init__(self, array_settle: bool) -> None:
        self.array_settle = array_settle
        self.models = {"target": LanguageModel(7, 3), "draft": LanguageModel(7, 3, noisy=0.25)}
        self.engine = FakeEngine(self.models, limits(16, array_settle=array_settle))

    def run(self, line: str) -> str:
        """The answer to one command."""
        name, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        command: Callable[..., str] = getattr(self, name.replace("-", "_"))
        try:
            return command(*plain, **options)
        except PagedecError as error:
            return f"{error.code}: {error}"

    def limits(self, **options: str) -> str:
        given = {name: int(value) for name, value in options.items()}
        own = limits(
            given.get("blocks", 16),
            given.get("draft"),
            block_size=given.get("block_size", 4),
            array_settle=self.array_settle,
            max_num_batched_tokens=given.get("rows", 24),
            max_num_seqs=given.get("seqs", 256),
            max_chunk=given.get("chunk"),
            enable_prefix_caching=bool(given.get("caching", 1)),
        )
        self.engine = FakeEngine(self.models, own)
        return "ok"

    def add(self, name: str, prompt: str = "1", method: str = "sampling", **options: str) -> str:
        priority, salt = int(options.pop("priority", "0")), options.pop("salt", "")
        stops = tuple(numbers(options.pop("stop", "")))
        min_tokens, max_tokens = int(options.pop("min_tokens", "0")), int(options.pop("max_tokens", "4"))
        text = numbers(prompt)
        limit = len(text) + max_tokens
        params: Any
        if method == "beam":
            params, stopping = BeamParams(int(options["width"]), max_tokens=max_tokens), Stopping()
        else:
            stopping = Stopping((), stops, min_tokens, None if method == "interactive" else max_tokens)
            seed = options.get("seed")
            temperature = 0.0 if seed is None else 1.0
            params = METHODS[method](n=int(options.get("n", "1")), temperature=temperature, seed=seed and int(seed))
        request = self.engine.scheduler.admit(
            name,
            lambda context: make_decoder(params, context),
            text,
            stopping,
            limit,
            priority=priority,
            salt=salt,
            eos_token_ids=(EOS,),
        )
        self.engine.scheduler.add(request)
        return "ok"

    def abort(self, name: str) -> str:
        self.engine.scheduler.abort(name)
        return self._state()

    def preempt(self, name: str) -> str:
        self.engine.scheduler.preempt(name)
        return self._state()

    def lose_device(self) -> str:
        self.engine.scheduler.forget_kv()
        self.engine._published.clear()
        return self._state()

    # ---- a session's edits
    def generate(self, name: str, number: str, count: str) -> str:
        branch = self._branch(name, number)
        state = type(branch.state)(f"{branch.tip}", branch.state.stream, remaining=int(count))
        return self._edit(name, Verdict((Child(branch, state=state),)))

    def fork(self, name: str, number: str) -> str:
        branch = self._branch(name, number)
        other = type(branch.state)(f"{branch.tip}", branch.state.stream + 1, remaining=branch.state.remaining)
        return self._edit(name, Verdict((Child(branch), Child(branch, state=other))))

    def roll_back(self, name: str, number: str, length: str) -> str:
        return self._edit(name, Verdict((Child(self._branch(name, number), keep=int(length)),)))

    def close(self, name: str, number: str) -> str:
        return self._edit(name, Verdict(drop=(self._branch(name, number),)))

    def _branch(self, name: str, number: str) -> Any:
        return self.engine.scheduler.get(name).branches[int(number)]

    def _edit(self, name: str, verdict: Verdict) -> str:
        events = self.engine.scheduler.edit(name, verdict)
        return "\n".join([*map(describe_event, events), self._state()])

    # ---- steps
    def step(self, count: str = "1") -> str:
        lines: list[str] = []
        for _ in range(int(count)):
            scheduler = self.engine.scheduler
            plan = scheduler.plan()
            lines += describe_plan(plan, scheduler.requests)
            events = scheduler.settle(plan, self.engine.runner.execute(plan))
            lines += ["  " + describe_event(event) for event in events]
            self.engine.check()
        return "\n".join([*lines, self._state()])

    def _state(self) -> str:
        pools = self.engine.scheduler.pools
        lanes = ", ".join(f"{pool.lane} {pool.num_available} of {pool.num_blocks} left" for pool in pools.values())
        held = " ".join(
            f"{request.id}:{'/'.join(str(branch.table.length) for branch in request.branches)}"
            for request in self.engine.scheduler.requests
        )
        return f"{lanes}; cached {held or 'nothing'}"


def describe_plan(plan: StepPlan, requests: list[Request]) -> Iterator[str]:
    """Who has which rows, in which blocks, and what is copied first."""
    yield f"plan {plan.step}: {plan.num_rows} rows"
    for lane, forward in plan.forwards.items():
        works = [work for work in plan.works if work.table.pool.lane == lane]
        for i, work in enumerate(works):
            drafted = work.draft.num_nodes if lane == "target" else 0
            number = work.request.branches.index(work.branch)
            rows = slice(int(forward.row_indptr[i]), int(forward.row_indptr[i + 1]))
            used = -(-int(forward.kv_len[i]) // work.table.pool.block_size)
            yield (
                f"  {lane} {work.request.id}.{number} from {work.start} +{work.num_tokens}"
                + (f" draft {drafted}" if drafted else "")
                + (" read" if work.draw >= 0 or work.query is not None else "")
                + (" roll" if lane == "draft" and work.roll >= 0 else "")
                + f" tokens {forward.token_ids[rows].tolist()} slots {forward.slots[rows].tolist()}"
                + f" blocks {forward.block_table[i, :used].tolist()}"
            )
        yield from describe_reads(forward)


def describe_reads(forward: LaneForward) -> Iterator[str]:
    """What is copied, and what is read out of which rows."""
    copies = zip(forward.copy_src.tolist(), forward.copy_dst.tolist(), strict=True)
    if len(forward.copy_src):
        yield f"  {forward.lane} copies " + " ".join(f"{source}>{target}" for source, target in copies)
    draws = [
        (int(d["seed"]), int(d["stream"]), int(forward.read_rows[d["row"]]), int(d["position"])) for d in forward.draws
    ]
    if draws:
        yield f"  {forward.lane} draws (seed, stream, row, position) " + " ".join(map(str, draws))
    if len(forward.topk_rows):
        yield f"  {forward.lane} top {forward.topk_k} of rows {forward.read_rows[forward.topk_rows].tolist()}"
    banned = zip(forward.read_rows[forward.banned_rows].tolist(), forward.banned_tokens.tolist(), strict=True)
    if len(forward.banned_rows):
        yield f"  {forward.lane} banned " + " ".join(f"{token} at row {row}" for row, token in banned)


def describe_event(event: Event) -> str:
    if isinstance(event, Progress):
        return f"{event.request.id}[{event.rank}] += {list(event.tokens)}"
    if isinstance(event, Ended):
        request = event.request
        return (
            f"{request.id} ended: {len(request.done)} answers, {request.num_cached_tokens} tokens cached,"
            f" {request.num_preemptions} preemptions, {request.acceptance.num_accepted} of"
            f" {request.acceptance.num_drafted} accepted"
        )
    if isinstance(event, Waiting):
        return f"{event.request.id} waits for its client"
    if isinstance(event, Failed):
        return f"{event.request.id} failed: {event.error}"
    hypothesis = event.hypothesis
    stop = "" if hypothesis.stop_token is None else f" at {hypothesis.stop_token}"
    return f"{event.request.id}[{hypothesis.rank}] done: {event.request.output(hypothesis)} {hypothesis.reason}{stop}"


def replay(text: str, array_settle: bool) -> str:
    """The transcript with its answers made anew."""
    driver = Driver(array_settle)
    blocks = []
    for block in text.strip().split("\n\n"):
        command = block.split("\n----", 1)[0]
        lines = [line for line in command.splitlines() if line and not line.startswith("#")]
        answers = [driver.run(line) for line in lines]
        blocks.append("\n".join([command, "----", *answers]) if lines else command)
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the golden transcripts with what the scheduler does now.")
    parser.add_argument("--rewrite", action="store_true", help="write down what it does now")
    rewrite = parser.parse_args().rewrite
    for path in sorted(TESTDATA.glob("*.txt")):
        before = path.read_text(encoding="utf-8")
        after = replay(before, array_settle=True)
        if rewrite:
            path.write_text(after, encoding="utf-8")
        print("".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), "now")), end="")


if __name__ == "__main__":
    main()
