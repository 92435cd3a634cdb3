"""Beams with drafts on a Spec-Bench file: the same n-best, in fewer steps.

    python benchmarks/beam_speculation.py questions.jsonl [--widths 4 8] [--prompts 24] [--max-tokens 32]
        [--methods oracle ngram lookahead] [--depth 3] [--draft-model PATH]

The file has a line for each question, with its "category" and its "turns", of which the first is asked through the
model's chat template; prompts are taken from all categories in turn. A method is a name, or a table such as
'{"method": "ngram", "num_candidates": 2}'. "oracle" drafts `--depth` levels from what the plain search has found, so it
shows what a step of so many rows costs and what drafts could give at most. "levels a step" is how many levels of the
search a step has taken, "coverage" how many of the beams that lived at drafted depths were drafted, "rows a step" what
a step evaluates. "ratio" is the plain run's time over the drafted one's of the same round, prompts included. All
answers are compared with the plain search's, with their scores and ancestry: another one ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import heading, interleave, ratio, self_spread, table

from pagedec import LLM, BeamSearchParams, RequestOutput
from pagedec.core.draft import Draft
from pagedec.core.protocol import DecoderContext, Query
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.decoders.beam import Beam
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.decoders.guesses import Tree

Text = tuple[int, ...]
Script = dict[Text, list[int]]
"""What follows each text of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedParams(BeamSearchParams):
    """A plain search that fills in `script`."""

    script: Script = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleParams(BeamSearchParams):
    """Drafts `depth` levels from `script`."""

    script: Script = field(default_factory=dict, repr=False)
    depth: int = 3


def own_text(context: DecoderContext, branch: Branch) -> Text:
    """What a beam has generated."""
    return tuple(context.history.tokens(branch.tip)[context.prompt_length :])


@decoder("benchmark-recorded-beam", params=RecordedParams)
class Recorded(Beam):
    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        for branch in branches:
            text = own_text(self.context, branch)
            if text and text[-1] not in self.params.script.setdefault(text[:-1], []):
                self.params.script[text[:-1]].append(text[-1])
        return super().propose(branches, room)


@decoder("benchmark-oracle-beam", params=OracleParams)
class Oracle(DraftedBeam):
    def __init__(self, params: OracleParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.script, self.depth = params.script, params.depth

    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft]:
        trees = [Tree(room) for _ in beams]
        level = [(tree, 0, own_text(self.context, beam)) for tree, beam in zip(trees, beams, strict=True)]
        for _ in range(self.depth):
            level = [
                (tree, tree.add(token, node), (*text, token))
                for tree, node, text in level
                for token in self.script.get(text, ())
            ]
        return [tree.draft() for tree in trees]


@dataclass
class Run:
    """What the last run of a contestant did."""

    outputs: list[RequestOutput]
    num_steps: int
    num_rows: int
    levels: float = 1.0
    coverage: float = 0.0


class Contest:
    """One engine, and searches of one width through it, one prompt at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        draft = None if arguments.draft_model is None else {"model": arguments.draft_model}
        self.llm = LLM(enable_prefix_caching=False, max_model_len=2048, speculative_config=draft)
        self.runs: dict[str, Run] = {}
        self.searches: list[DraftedBeam] = []
        admit = self.llm.engine.scheduler.admit

        def noted(*given: Any, **named: Any) -> Any:
            request = admit(*given, **named)
            if isinstance(request.decoder, DraftedBeam):
                self.searches.append(request.decoder)
            return request

        self.llm.engine.scheduler.admit = noted  # type: ignore[method-assign]

    def contestant(
        self, name: str, prompts: Sequence[list[int]], params: Sequence[BeamSearchParams]
    ) -> Callable[[], None]:
        def run() -> None:
            stats, outputs = self.llm.engine.stats, []
            steps, rows = stats.num_steps, stats.num_rows
            self.searches.clear()
            for prompt, own in zip(prompts, params, strict=True):
                outputs += self.llm.generate([{"prompt_token_ids": prompt}], own, use_tqdm=False)
            last = self.runs[name] = Run(outputs, stats.num_steps - steps, stats.num_rows - rows)
            if self.searches:
                found = self.searches
                last.levels = sum(one.num_levels for one in found) / sum(one.num_steps for one in found)
                last.coverage = sum(one.num_covered for one in found) / max(1, sum(one.num_wanted for one in found))

        return run


def same(one: RequestOutput, other: RequestOutput) -> bool:
    """Texts, scores and ancestry."""
    return [(a.token_ids, a.score, a.ancestry) for a in one.outputs] == [
        (a.token_ids, a.score, a.ancestry) for a in other.outputs
    ]


def compare(contest: Contest, prompts: list[list[int]], width: int, arguments: argparse.Namespace) -> None:
    plain = {"beam_width": width, "max_tokens": arguments.max_tokens}
    scripts: list[Script] = [{} for _ in prompts]
    contest.contestant("recorded", prompts, [RecordedParams(**plain, script=script) for script in scripts])()
    runs = {
        "plain": contest.contestant("plain", prompts, [BeamSearchParams(**plain, speculative=False)] * len(prompts))
    }
    for method in arguments.methods:
        if method == "oracle":
            own = [OracleParams(**plain, script=script, depth=arguments.depth) for script in scripts]
            runs[method] = contest.contestant(method, prompts, own)
            continue
        speculative = json.loads(method) if method.startswith("{") else {"method": method}
        params = BeamSearchParams(**plain, speculative=speculative)
        runs[method] = contest.contestant(method, prompts, [params] * len(prompts))
    timings = interleave(runs, arguments.rounds, warmup=0)
    rows, want = [], contest.runs["plain"]
    for name in runs:
        run = contest.runs[name]
        wrong = sum(not same(got, expected) for got, expected in zip(run.outputs, want.outputs, strict=True))
        if wrong:
            raise SystemExit(f"{name}: {wrong} of {len(prompts)} n-best lists are not the plain search's")
        middle, half = ratio(timings["plain"], timings[name])
        rows.append([
            width, name, f"{timings[name].median:.2f}", f"{middle:.2f} ± {half:.2f}", run.num_steps,
            f"{run.num_rows / run.num_steps:.1f}", f"{run.levels:.2f}", f"{run.coverage:.0%}",
        ])  # fmt: skip
    columns = ["width", "drafts", "seconds", "ratio", "steps", "rows a step", "levels a step", "coverage"]
    table(columns, rows)
    print(f"All {len(prompts)} n-best lists are the plain search's; plain/plain varies by ", end="")
    print(f"{self_spread(timings['plain']):.3f}\n", flush=True)


def questions(path: Path, count: int) -> list[str]:
    """First turns, from all categories in turn."""
    by_category: dict[str, list[str]] = {}
    for line in path.open(encoding="utf-8"):
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    for own in by_category.values():
        random.Random(0).shuffle(own)
    longest = max(map(len, by_category.values()))
    return [own[i] for i in range(longest) for own in by_category.values() if i < len(own)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-prompt", type=int, default=512, help="prompts are cut to their last tokens")
    parser.add_argument("--methods", nargs="+", default=["oracle", "ngram", "lookahead"])
    parser.add_argument("--depth", type=int, default=3, help="of the oracle")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--draft-model")
    arguments = parser.parse_args()
    heading("Beams with drafts")
    contest = Contest(arguments)
    tokenizer = contest.llm.get_tokenizer()
    prompts = []
    for text in questions(arguments.file, arguments.prompts):
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        prompts.append(list(ids)[-arguments.max_prompt :])
    contest.llm.generate([{"prompt_token_ids": prompts[0]}], BeamSearchParams(max_tokens=2), use_tqdm=False)
    for width in arguments.widths:
        compare(contest, prompts, width, arguments)


if __name__ == "__main__":
    main()
