"""What a device has answered, in the shapes that the asks' docstrings promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedec.core.draft import Draft
from pagedec.core.forward import LaneAnswers
from pagedec.core.plan import Work
from pagedec.core.protocol import Answer, Best, Candidates, LogProbs, Roll, RowBest, Sample, TopK


def read_answer(
    work: Work, answers: LaneAnswers, rolled: Sequence[tuple[int, ...]], candidates: Sequence[Candidates] = ()
) -> Answer:
    """What a query's asks were answered, in the shapes their docstrings promise. `candidates`: of each group."""
    query, draft = work.query, work.draft
    assert query is not None
    if isinstance(draft, Roll):
        draft = Draft.chain(rolled[work.roll])
    values: list[Any] = []
    for ask, part in zip(query.asks, work.asks, strict=True):
        first, stop = part.first, part.first + part.num_nodes
        if isinstance(ask, Sample):
            stop = first + part.num_nodes * part.width
            values.append(answers.draws[first:stop].reshape(part.num_nodes, part.width))
        elif isinstance(ask, Best):
            values.append(candidates[first])
        elif isinstance(ask, RowBest):
            values.append(candidates[first:stop])
        elif isinstance(ask, TopK):
            values.append((answers.topk_tokens[first:stop, : ask.k], answers.topk_logprobs[first:stop, : ask.k]))
        else:
            assert isinstance(ask, LogProbs)
            values.append(answers.logprobs[first:stop])
    return Answer(draft, tuple(values))


def candidates_of(answers: LaneAnswers) -> list[Candidates]:
    """Of each group of a forward, what its queries are answered."""
    out, first = [], 0
    for count in answers.best_counts.tolist():
        part = slice(first, first + count)
        out.append(
            Candidates(
                answers.best_parents[part],
                answers.best_tokens[part],
                answers.best_scores[part],
                answers.best_logprobs[part],
                answers.best_keys[part],
            )
        )
        first += count
    return out
