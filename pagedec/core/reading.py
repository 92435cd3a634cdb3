"""What a device has answered, in the shapes that the asks' docstrings promise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pagedec.core.draft import Roll
from pagedec.core.forward import Answers, Forwards, LaneAnswers, LaneForward, num_rolled
from pagedec.core.plan import Work
from pagedec.core.protocol import Answer, Best, Candidates, LogProbs, RowBest, Sample, TopK
from pagedec.errors import InvariantError


def read_answer(
    work: Work, answers: LaneAnswers, rolled: Sequence[tuple[int, ...]], candidates: Sequence[Candidates] = ()
) -> Answer:
    """What a query's asks were answered, in the shapes their docstrings promise. `candidates`: of each group."""
    query, draft = work.query, work.draft
    assert query is not None
    if isinstance(draft, Roll):
        draft = draft.draft(rolled[work.roll])
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


def check_answers(forwards: Forwards, answers: Answers, vocab_size: int) -> None:
    """Raise `InvariantError` unless a device's answers are ones: as many as were asked for, of tokens that there
    are."""
    for lane, forward in forwards.items():
        given = answers.get(lane)
        if given is None:
            raise InvariantError(f"lane {lane} was not answered")
        expected = (len(forward.draws),), (len(forward.topk_rows), forward.topk_k), (len(forward.logprob_rows),)
        if lane == "target" and (given.draws.shape, given.topk_tokens.shape, given.logprobs.shape) != expected:
            found = given.draws.shape, given.topk_tokens.shape, given.logprobs.shape
            raise InvariantError(f"lane {lane} was answered in shapes {found}, not {expected}")
        if len(given.rolled) != num_rolled(forward):
            raise InvariantError(f"lane {lane} has rolled {len(given.rolled)} tokens, not {num_rolled(forward)}")
        _check_best_answers(lane, forward, given)
        for tokens in (given.draws, given.topk_tokens, given.best_tokens, given.rolled):
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                wrong = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
                raise InvariantError(f"lane {lane} has answered token {wrong}; there are {vocab_size}")
        for logprobs in (given.topk_logprobs, given.logprobs, given.best_logprobs, given.best_scores, given.best_keys):
            if logprobs.size and np.isnan(logprobs).any():
                raise InvariantError(f"lane {lane} has answered log-probabilities that are no numbers")


def _check_best_answers(lane: str, forward: LaneForward, given: LaneAnswers) -> None:
    """As many candidates of each group as there are, at most its k, of the group's own rows."""
    groups, counts = forward.best_groups, given.best_counts.tolist()
    arrays = given.best_parents, given.best_tokens, given.best_scores, given.best_logprobs, given.best_keys
    sizes = {len(array) for array in arrays}
    if len(counts) != len(groups) or sizes != {sum(counts)}:
        raise InvariantError(f"lane {lane} has answered {len(counts)} of {len(groups)} gangs, {counts} in {sizes}")
    if not counts:
        return
    most = groups["k"].tolist()
    if any(not 0 <= count <= k for count, k in zip(counts, most, strict=True)):
        raise InvariantError(f"lane {lane} has answered {counts} candidates where {most} were asked for")
    places, parents, ends = forward.best_rows["place"].tolist(), given.best_parents.tolist(), groups["stop"].tolist()
    for first, stop, end, count in zip([0, *ends], ends, accumulate(counts), counts, strict=False):
        strangers = set(parents[end - count : end]).difference(places[first:stop])
        if strangers:
            raise InvariantError(f"lane {lane} has answered a candidate of place {min(strangers)}, which was not asked")
