"""A finished answer, as users get it."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.core.logprobs import TokenLogprobs, answer_reports
from pagedec.core.protocol import Hypothesis
from pagedec.core.request import Request


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. `token_ids` include the stop token, and all tokens of a stop string; `score` is the
    decoder's own, None where it compares nothing. `ancestry` is a gang's: behind which branch each token was chosen.

    The text of the tokens has `excess_bytes` behind the end of `stop_string`. `logprobs` has an entry for each token,
    None for one that a client appended; `cumulative_logprob` is their sum. Both are None where they were not asked for.
    `item_id` is that of the sequence that was chosen from a trie.
    """

    token_ids: list[int]
    finish_reason: str
    stop_token: int | None
    score: float | None
    stop_string: str | None = None
    excess_bytes: int = 0
    logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float | None = None
    limited_by: str | None = None
    ancestry: list[int] | None = None
    item_id: int | None = None


def answer_of(request: Request, hypothesis: Hypothesis) -> Completion:
    """One finished answer of a request, others may still run."""
    logprobs, token_ids = answer_reports(request, hypothesis), request.output(hypothesis)
    return Completion(
        token_ids,
        hypothesis.reason,
        hypothesis.stop_token,
        hypothesis.score if request.decoder.gang or hypothesis.score else None,
        hypothesis.stop_string,
        hypothesis.excess_bytes,
        logprobs,
        None if logprobs is None else float(sum(entry.logprob for entry in logprobs if entry is not None)),
        _limited_by(request, hypothesis) if hypothesis.reason == "length" else None,
        list(hypothesis.ancestry) or None,
        None if request.constraint is None else request.constraint.item(token_ids),
    )


def _limited_by(request: Request, hypothesis: Hypothesis) -> str:
    length = request.history.depth[hypothesis.tip] + len(hypothesis.tokens)
    if length >= request.limit:
        return request.limited_by
    if hypothesis.is_stranded:
        return "rules"
    return "max_time" if request.concluded else request.limited_by
