"""pagedec beside llama.cpp, OpenVINO GenAI and vLLM on this processor: one model, the same prompts, all taking turns.

    python benchmarks/peers/compare.py [--text FILE] [--forms bf16 "4 bits"] [--parts decode prefill mixed] [--rounds 3]

Every contestant is a process of its own, with --threads threads, that waits while another works. All write exactly the
tokens asked for, greedily. "decode": tokens a second of --batch sequences behind prompts of 32 tokens, the time of a
job with --new tokens less that of one with a single token. "prefill": a prompt of 1,024 tokens and one new token.
"mixed": --requests requests at once, prompts of 16 to 1,024 tokens, answers of 16 to 256; all new tokens over the time
of the whole job. "same" is the share of new tokens in front of each answer's first one that is not pagedec's of the
same form: a check that all compute the same model, since roundings alone end it sooner or later.

Peers live in environments of their own under --cache, made at the first run (gigabytes, and many minutes for what is
compiled); one that cannot be installed, loaded or run is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Timing, heading, table
from stock import commands

from pagedec.formats.resolve import resolve_model
from pagedec.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent.parent.parent / "tests" / "data" / "prompts.jsonl"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagedec-peers"
PROMPT, PREFILL = 32, 1024
Job = dict[str, Any]


class Contestant:
    """A process that does jobs (see talk.py). `why` says what went wrong; then it does no more of them."""

    def __init__(self, name: str, command: Callable[[], list[str]], threads: int) -> None:
        self.name, self.why, self.facts = name, "", ""
        self.log = tempfile.TemporaryFile("w+")
        self.process: subprocess.Popen[str] | None = None
        try:
            words = command()
        except (RuntimeError, OSError) as error:
            self.why = f"not there: {error}"
            return
        here = Path(__file__).resolve()
        paths = os.pathsep.join([str(here.parents[1]), str(here.parents[2])])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if name.startswith("pagedec"):
            environment["PYTHONPATH"] = paths
        else:
            environment.pop("PYTHONPATH", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=environment)
        answer = self._answer()
        if answer:
            self.facts = answer["facts"]

    def _answer(self) -> Job | None:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["nothing"]
        self.why = f"ended with {self.process.wait()}, its last words: {lines[-1][-160:]}"
        return None

    def do(self, job: Job) -> Job | None:
        if self.why:
            return None
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer() says why
        answer = self._answer()
        time.sleep(0.3)  # its threads have stopped waiting awake by the next one's turn
        return answer

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(60)


def make_jobs(ids: list[int], arguments: argparse.Namespace) -> dict[str, list[Job]]:
    """Jobs by the name of their row; a row is one job, or one from whose time another's is taken."""
    rng = random.Random(0)

    def cut(length: int) -> list[int]:
        start = rng.randrange(len(ids) - length)
        return ids[start : start + length]

    jobs: dict[str, list[Job]] = {}
    if "decode" in arguments.parts:
        for size in arguments.batch:
            prompts = [cut(PROMPT) for _ in range(size)]
            jobs[f"decode, batch {size}"] = [
                {"prompts": prompts, "new": [count] * size} for count in (arguments.new + 1, 1)
            ]
    if "prefill" in arguments.parts:
        jobs[f"prefill of {PREFILL}"] = [{"prompts": [cut(PREFILL)], "new": [1]}]
    if "mixed" in arguments.parts:
        lengths = [(rng.randint(16, PREFILL), rng.randint(16, 256)) for _ in range(arguments.requests)]
        jobs[f"mixed, {arguments.requests} requests"] = [
            {"prompts": [cut(length) for length, _ in lengths], "new": [new for _, new in lengths]}
        ]
    return jobs


def counted(row: str, jobs: list[Job]) -> int:
    """Tokens that a row's rate counts."""
    if row.startswith("prefill"):
        return len(jobs[0]["prompts"][0])
    return sum(jobs[0]["new"]) - (sum(jobs[1]["new"]) if len(jobs) > 1 else 0)


def same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens in front of each answer's first other one."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        equal += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return equal / sum(map(len, ours))


def form_of(name: str) -> str:
    return name.split(" ", 1)[1]


def contest(contestants: list[Contestant], jobs: dict[str, list[Job]], rounds: int, warmup: int) -> None:
    """Each row's jobs by everybody, round after round, behind `warmup` of them that are not counted."""
    rows: list[list[object]] = []
    for row, parts in jobs.items():
        seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
        tokens: dict[str, list[list[int]]] = {}
        for turn in range(warmup + rounds):
            for contestant in contestants:
                answers = [contestant.do(part) for part in parts]
                if None in answers:
                    continue
                times = [answer["seconds"] for answer in answers if answer]
                tokens[contestant.name] = answers[0]["tokens"] if answers[0] else []
                if turn >= warmup:
                    seconds[contestant.name].append(times[0] - sum(times[1:]))
        count = counted(row, parts)
        for contestant in contestants:
            if not seconds[contestant.name]:
                continue
            own = f"pagedec {form_of(contestant.name)}"
            timing = Timing(tuple(seconds[contestant.name]))
            behind, equal = "", ""
            if seconds.get(own) and own != contestant.name:
                pairs = zip(seconds[contestant.name], seconds[own], strict=True)
                ratio = Timing(tuple(theirs / ours for theirs, ours in pairs))
                behind = f"{ratio.median:.2f} ± {ratio.spread * ratio.median:.2f}"
                equal = f"{100 * same(tokens[own], tokens[contestant.name]):.0f} %"
            rate = f"{count / timing.median:.0f} ± {100 * timing.spread:.0f} %"
            rows.append([row, contestant.name, rate, behind, equal])
            print(*rows[-1], file=sys.stderr, flush=True)
    table(["part", "contestant", "tokens/s", "its time / pagedec's, same form", "same"], rows)


def main() -> None:
    summary, _, notes = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXTS, help="any long text; prompts are cut from it")
    parser.add_argument("--model", default="smollm2", help="a model of pagedec's whose weights are one GGUF file")
    parser.add_argument("--only", nargs="+", help='contestants, as in "llama.cpp bf16" "pagedec bf16"; default: all')
    parser.add_argument("--forms", nargs="+", default=["bf16", "4 bits"], choices=["bf16", "int8", "4 bits"])
    parser.add_argument("--parts", nargs="+", default=["decode", "prefill", "mixed"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--new", type=int, default=32, help="tokens that a decoding job times")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rounds in front that are not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default: {CACHE}")
    parser.add_argument(
        "--prepare", action="store_true", help="install, convert and load each once, and measure nothing"
    )
    arguments = parser.parse_args()
    file = resolve_model(arguments.model).weights
    assert file is not None and file.suffix == ".gguf", "--model is one whose weights are a GGUF file"
    ids = Tokenizer.from_path(file).encode(arguments.text.read_text(encoding="utf-8"))
    while len(ids) < 2 * PREFILL:
        ids += ids
    contestants = []
    for name, command in commands(arguments.cache, arguments.model, file, arguments.threads).items():
        if name in arguments.only if arguments.only else form_of(name) in arguments.forms:
            contestants.append(Contestant(name, command, arguments.threads))
            print(name, contestants[-1].facts or contestants[-1].why, file=sys.stderr, flush=True)
    heading("Beside other runtimes")
    if not arguments.prepare:
        contest(contestants, make_jobs(ids, arguments), arguments.rounds, arguments.warmup)
    table(["contestant", "what it is"], [[c.name, c.why or c.facts] for c in contestants])
    for contestant in contestants:
        contestant.end()


if __name__ == "__main__":
    main()
