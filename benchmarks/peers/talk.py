"""A contestant's side of a run: jobs come as lines of JSON, answers go back as such. Only the standard library, so that
every environment can import it.

A job is {"prompts": [[token, ...], ...], "new": [count, ...]}: write exactly so many tokens behind each, greedily,
whatever the end token says. The answer is {"seconds": ..., "tokens": [[token, ...], ...]}. Or it is {"score": [[token,
...], ...]}, answered by {"scores": [[log-probability of each token but the first], ...]}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Tokens = list[list[int]]
Generate = Callable[[Tokens, list[int]], Tokens]
Score = Callable[[Tokens], list[list[float]]]


def own_output() -> int:
    """Return a descriptor for answers; what a library prints goes to standard error from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(answers: int, facts: str, generate: Generate, score: Score | None = None) -> None:
    """Say `facts`, then answer jobs until there are no more."""

    def say(value: dict[str, object]) -> None:
        data = json.dumps(value).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    say({"facts": facts})
    for line in sys.stdin:
        job = json.loads(line)
        if "score" in job:
            assert score is not None, "this contestant does not score"
            say({"scores": score(job["score"])})
            continue
        began = time.perf_counter()
        tokens = generate(job["prompts"], job["new"])
        say({"seconds": time.perf_counter() - began, "tokens": tokens})
