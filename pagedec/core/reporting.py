"""Log-probabilities that a request reports: of the model's own logits, before anything is done to them.

They belong to a request and its history, not to a decoder: for every row that answers a decoder's asks, whatever it asks for,
the tokens that may come of it are reported as well, and kept under the tokens before them. What is accepted then has its report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Reporting:
    """What a request reports: of each generated token, and of each prompt token but the first, its own log-probability and rank
    and those of the most probable tokens, as many as are named here. None: no report; 0: the token's own only."""

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


NO_REPORTING = Reporting()


class TokenLogprobs(NamedTuple):
    """What is reported of one token. `rank` 1 is the most probable; equally probable tokens have the same rank.

    `top_ids` and `top_logprobs` are in descending order, ties to the lower id. Log-probabilities are fp32 values.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class Reports:
    """A request's reports so far."""

    reporting: Reporting
    prompt: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Of the first prompt tokens; the very first has no report."""
    edges: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of the tokens that came of a row: history node << 32 | the token behind it."""
