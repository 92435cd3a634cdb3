"""Beam search over steps of text, chosen by a judge instead of by probability (Yao et al. 2023 call it a tree of
thoughts)."""

from __future__ import annotations

from typing import Any

from pagedec.search.scorers import Found, Scorer, Searchable, best, check_search, has_ended, scored, step_fields


def step_beam_search(
    branch: Searchable,
    judge: Scorer,
    *,
    width: int = 4,
    samples: int = 4,
    steps: int = 6,
    delimiter: str = "\n",
    sampling_params: Any = None,
    **fields: Any,
) -> list[Found]:
    """The `width` branches that `judge` likes best after `steps` steps, the best first.

    A step draws `samples` continuations of each branch that has not ended, all in one batch, each up to `delimiter` and
    with it; the judge looks at all of them, and the `width` best go on. A branch ends where the model ends its answer,
    or the context is full; it keeps its score and competes, equal ones as one. `branch` stays as it is.
    """
    check_search(branch, "judge", judge, width=width, samples=samples, steps=steps)
    given = step_fields(delimiter, samples, fields)
    beams = [Found(branch.fork(), 0.0)]
    for _ in range(steps):
        live = [beam.branch for beam in beams if not beam.ended]
        if not live:
            break
        outputs = branch.generate_all(live, sampling_params, keep="all", **given)
        for parent in live:
            parent.close()
        made = [new for output in outputs for new in output.branches]
        answers = [answer for output in outputs for answer in output.outputs]
        ended = [has_ended(new, answer, delimiter) for new, answer in zip(made, answers, strict=True)]
        candidates = [Found(*found) for found in zip(made, scored(judge, made), ended, strict=True)]
        beams = best([*(beam for beam in beams if beam.ended), *candidates], width)
    return beams
