"""Speculation on a Spec-Bench file: each method against plain decoding, in alternating runs over the same prompts.

    python benchmarks/speculative.py questions.jsonl [--methods ngram suffix lookahead jacobi] [--batch 1 8 32]
        [--categories rag summarization agent] [--prompts 8] [--max-tokens 128] [--rounds 5] [--sampled]
        [--draft-model PATH | --head PATH] [--widths] [--changing]

The file has a line for each question, with its "category" and its "turns", of which the first is asked through the
model's chat template. A method is a name, or a table such as '{"method": "ngram", "num_candidates": 3}'. One run gives
all prompts of a category to the engine, `batch` at a time, prompts included; "ratio" is the plain run's time over the
method's of the same round, "plain/plain" what that varies by from one plain run to the next. Methods draft as widely as
pays; with --widths each is measured beside fixed widths too, and "of best" is the best of their medians over its own.
With --changing, seven of eight answers end after a quarter of the tokens, so that the load changes while the others
run. "agent" is a category that is made here, of calls of a tool, which have much in common. No run finds what another
one has left. "tokens a step" is what a sequence gains in a step in which it decodes, "granted" the share of the rows of
weighed drafts that were run, "places" the share of drafts that were taken up to their first, second and further tokens.
All answers are compared with the plain ones: another token ends the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import heading, interleave, ratio, self_spread, table

from pagedec import LLM, RequestOutput, SamplingParams
from pagedec.core.archive import Archive

PLACES = 6
"""Places of a draft that are shown."""
WIDTHS: dict[str, list[dict[str, Any]]] = {
    "ngram": [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 5}, {"num_speculative_tokens": 10}],
    "suffix": [{"suffix_decoding_max_spec_factor": factor} for factor in (0.5, 1.0, 2.0)],
    "lookahead": [
        {"window_size": 5, "ngram_size": 3, "num_guesses": 5},
        {"window_size": 15, "ngram_size": 5, "num_guesses": 15},
    ],
    "jacobi": [{"num_speculative_tokens": 4}, {"num_speculative_tokens": 8}],
    "draft_model": [{"num_speculative_tokens": size} for size in (2, 4, 7, 14)],
    "eagle3": [{"num_speculative_tokens": size} for size in (1, 2, 4, 7)],
}
"""Fixed widths that a method is measured against."""
AGENT = "agent"
"""The category that is made here."""
EXAMPLE = (
    "Letter: The kettle of order 2041 arrived with a broken lid. Anna Bell",
    'Call: {"tool": "create_ticket", "arguments": {"order": 2041, "customer": "Anna Bell", "item": "kettle", '
    '"problem": "arrived with a broken lid", "priority": "normal", "reply": "Dear Anna Bell, we are sorry that the '
    "kettle of order 2041 arrived with a broken lid. We have opened a ticket and will send you a new one within three "
    'working days."}}',
)
"""A step of an agent's: what it is told, and what it does."""
NAMES = ["Omar Reed", "Lena Fox", "Ivo Hart", "Mia Stone", "Paul Wood", "Nora Lane", "Tim Cole"]
ITEMS = ["lamp", "chair", "radio", "blender", "desk"]
PROBLEMS = ["does not switch on", "has a deep scratch", "came without its manual", "is of the wrong colour"]


@dataclass
class Run:
    """What the last run of a contestant did."""

    outputs: list[RequestOutput]
    num_steps: int
    places: list[float]
    granted: float
    """Share of the rows that drafts would have had."""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for output in self.outputs for answer in output.outputs)

    @property
    def tokens_a_step(self) -> float:
        """Each accepted token saves its sequence a step."""
        accepted = sum(output.metrics.num_accepted_tokens for output in self.outputs if output.metrics is not None)
        return self.num_tokens / (self.num_tokens - accepted)


class Contest:
    """One engine, and runs of one category's prompts through it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        draft = None if arguments.draft_model is None else {"model": arguments.draft_model}
        if arguments.head is not None:
            draft = {"method": "eagle3", "model": arguments.head}
        self.llm = LLM(
            enable_prefix_caching=False,
            max_num_seqs=64,
            max_model_len=4096,
            speculative_config=draft,
            quantization=arguments.quantization,
        )
        gc.collect()
        gc.freeze()  # or one run in many has a pause of 110 ms, in which all that torch has imported is gone through
        self.max_tokens, self.changing = arguments.max_tokens, arguments.changing
        self.runs: dict[str, Run] = {}

    def contestant(
        self,
        name: str,
        prompts: list[list[int]],
        batch: int,
        speculative: dict[str, Any] | bool,
        sampled: bool,
    ) -> Callable[[], None]:
        """A run: all prompts, `batch` at a time."""
        own = {"temperature": 0.7, "top_p": 0.95} if sampled else {"temperature": 0.0}
        params = [
            SamplingParams(
                max_tokens=self.max_tokens // (4 if self.changing and i % 8 else 1),
                seed=i,
                speculative=speculative,
                **own,
            )
            for i in range(len(prompts))
        ]

        def run() -> None:
            stats, outputs = self.llm.engine.stats, []
            self.llm.engine.scheduler.archive = Archive()
            steps, wished, granted = stats.num_steps, stats.num_wished_rows, stats.num_granted_rows
            stats.drafts.clear()
            for i in range(0, len(prompts), batch):
                outputs += self.llm.generate(prompts[i : i + batch], params[i : i + batch], use_tqdm=False)
            share = (stats.num_granted_rows - granted) / max(1, stats.num_wished_rows - wished)
            counts = next((own for own in stats.drafts.values() if own.num_drafts), None)
            places = [] if counts is None else [a / d for a, d in zip(counts.accepted, counts.drafted, strict=True)]
            self.runs[name] = Run(outputs, stats.num_steps - steps, places, share)
            plain = self.runs["plain"].outputs
            for one, other in zip(outputs, plain, strict=True):
                assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs], (
                    f"{name}: other tokens"
                )

        return run

    def prompt(self, question: str, is_chat: bool) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        if not is_chat:
            return list(tokenizer.encode(question))
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        return list(ids)[: 4096 - self.max_tokens]


def read_questions(path: Path, categories: list[str] | None, most: int) -> dict[str, list[str]]:
    """The first turns by category, at most `most` of each."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if categories is None or record["category"] in categories:
            found.setdefault(record["category"], []).append(record["turns"][0])
    if categories is not None and AGENT in categories:
        found[AGENT] = ["\n".join((*EXAMPLE, letter(i), "Call:")) for i in range(most)]
    return {category: questions[:most] for category, questions in found.items()}


def letter(i: int) -> str:
    """What an agent is told."""
    item, problem, name = ITEMS[i % len(ITEMS)], PROBLEMS[i % len(PROBLEMS)], NAMES[i % len(NAMES)]
    return f"Letter: The {item} of order {3000 + 37 * i} {problem}. {name}"


def method_of(text: str, widths: bool) -> list[tuple[str, dict[str, Any]]]:
    """A method's name as it is shown and its table; with `widths` those of its fixed widths behind it."""
    own = json.loads(text) if text.startswith("{") else {"method": text}
    numbers = " ".join(str(value) for name, value in own.items() if name != "method")
    found = [(f"{own['method']} {numbers}".strip(), own)]
    for fixed in WIDTHS[own["method"]] if widths else ():
        shown = " ".join(str(value) for value in fixed.values())
        found.append((f"{own['method']} fixed {shown}", {**own, **fixed, "adaptive": False}))
    return found


def measure(contest: Contest, prompts: list[list[int]], batch: int, sampled: bool, given: argparse.Namespace) -> None:
    """One table: every method against plain decoding."""
    groups = [method_of(text, given.widths) for text in given.methods]
    contestants = {"plain": contest.contestant("plain", prompts, batch, False, sampled)}
    for name, own in (pair for group in groups for pair in group):
        contestants[name] = contest.contestant(name, prompts, batch, own, sampled)
    timings = interleave(contestants, given.rounds, warmup=1)
    plain, rows = timings["plain"], []
    best = {group[0][0]: min(timings[name].median for name, _ in group[1:]) for group in groups if len(group) > 1}
    for name, timing in timings.items():
        run = contest.runs[name]
        value, spread = ratio(plain, timing)
        shown = " ".join(f"{place:.2f}" for place in run.places[:PLACES])
        speed = run.num_tokens / timing.median
        rows.append(
            [
                name,
                run.num_tokens,
                run.num_steps,
                f"{run.tokens_a_step:.2f}",
                f"{speed:.0f}",
                f"{value:.2f} +- {spread:.2f}",
                f"{best[name] / timing.median:.2f}" if name in best else "",
                f"{run.granted:.2f}",
                shown,
            ]
        )
    columns = ["method", "tokens", "target steps", "tokens a step", "tokens/s", "ratio", "of best", "granted", "places"]
    table(columns, [list(row) for row in rows])
    print(f"plain/plain varies by {self_spread(plain):.2f}")
    costs = contest.llm.engine.stats.costs
    if costs is not None:
        curve = ", ".join(f"{rows:.0f}: {1e3 * s:.1f}" for rows, s in zip(costs.rows, costs.seconds, strict=True))
        print(f"believed ms by rows: {curve}; asking {1e6 * costs.asking:.0f} us, roll {1e3 * costs.rolls[0]:.1f} ms")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix", "lookahead", "jacobi"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--categories", nargs="+")
    parser.add_argument("--prompts", type=int, default=8, help="most prompts of a category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sampled", action="store_true", help="seeded sampling at 0.7 besides greedy decoding")
    parser.add_argument("--draft-model", help="for the method draft_model")
    parser.add_argument("--head", help="for the method eagle3")
    parser.add_argument("--widths", action="store_true", help="each method's fixed widths beside it")
    parser.add_argument("--changing", action="store_true", help="seven of eight answers end early")
    parser.add_argument("--quantization", choices=["int8"])
    given = parser.parse_args()
    heading("Speculation")
    contest = Contest(given)
    for category, questions in read_questions(given.questions, given.categories, given.prompts).items():
        prompts = [contest.prompt(question, category != AGENT) for question in questions]
        for batch in given.batch:
            for sampled in (False, True) if given.sampled else (False,):
                kind = "sampled" if sampled else "greedy"
                print(f"### {category}, batch {batch}, {kind}, {len(prompts)} prompts\n")
                measure(contest, prompts, batch, sampled, given)


if __name__ == "__main__":
    main()
