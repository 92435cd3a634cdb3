"""Searches over a server's sessions find what they find over those of `LLM`; the example runs."""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedec import LLM
from pagedec.search import ModelJudge, best_of_n, mcts, self_consistency, step_beam_search
from tests.serve.serving import Serving, client_of

PROMPT = "Question: What do you need to bake bread?\nAnswer:"
JUDGE = ModelJudge("\nIs this about food?", " Yes", " No")
FIELDS = {"max_tokens": 6, "temperature": 1.0}


def vowels(branch: Any) -> float:
    return float(sum(letter in "aeiou" for letter in branch.text))


def nodes(root: Any) -> list[tuple[str, float, int]]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        found.append((node.branch.text, node.total, node.visits))
        waiting += node.children
    return found


SEARCHES: dict[str, Callable[[Any], Any]] = {
    "best of n": lambda s: [(f.branch.text, f.score, f.ended) for f in [best_of_n(s, vowels, n=3, **FIELDS)]],
    "self-consistency": lambda s: self_consistency(s, lambda text: len(text.split()), n=4, **FIELDS),
    "steps": lambda s: [
        (found.branch.text, found.branch.name, found.score, found.ended)
        for found in step_beam_search(s, JUDGE, width=2, samples=2, steps=2, delimiter=",", **FIELDS)
    ],
    "mcts": lambda s: nodes(mcts(s, vowels, simulations=3, samples=2, delimiter=",", **FIELDS)),
}


def test_searches_find_the_same(text_server: Serving, text_llm: LLM) -> None:
    llm = text_llm
    with client_of(text_server) as client:
        for name, search in SEARCHES.items():
            with llm.session(PROMPT, seed=1) as own, client.session(PROMPT, seed=1) as far:
                assert search(far) == search(own), name
                assert far.text == PROMPT


def test_the_example(text_server: Serving) -> None:
    example = Path(__file__).parents[2] / "examples" / "grpc_client.py"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        runpy.run_path(str(example))["main"](f"127.0.0.1:{text_server.server.port}")
    first, second, stream, *rest = shown.getvalue().split("\n")
    assert first.startswith("'The capital of France is' -> ") and second.startswith("'The capital of Italy is' -> ")
    parts = stream.split("\r")[1:]
    assert len(parts) > 3 and all(len(part) <= len(parts[-1]) for part in parts)
    assert all("'Two and two" in line for line in rest[:3])
    assert "lighthouse keeper" in rest[3] and rest[4].startswith("2 branches behind")
