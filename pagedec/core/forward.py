"""A step as arrays: what a device is given, and what it gives back. Frozen, flat, built once; nobody writes into them.

They cross processes as they are: `wire.py` makes one buffer of them. So nothing here is known by its identity, and what
a request has done to its logits is named by a number under which the device was told of it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from pagedec.core.logits_rules import LogitsRules

DRAW_DTYPE = np.dtype(
    [
        ("seed", "<u8"), ("stream", "<u8"), ("row", "<i4"), ("position", "<i4"), ("top_k", "<i4"),
        ("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("rank", "<i4"), ("reserved", "<i4"),
    ]
)  # fmt: skip
"""One token to be drawn. `row` counts the read-out rows of its forward; `position` is the drawn token's index. `rank`
r, below `MOST_CANDIDATES`: what comes r places behind the token that is drawn with 0; that one where fewer are left."""

ROLL_DTYPE = np.dtype(
    [
        ("draw", DRAW_DTYPE), ("branch", "<i4"), ("count", "<i4"), ("target_row", "<i4"), ("prompt_length", "<i4"),
        ("rule_id", "<i8"), ("is_kept", "<i4"), ("reserved", "<i4"),
    ]
)  # fmt: skip
"""A chain of `count` tokens to be rolled behind `branch`. `draw` says how each is drawn, the first at its `row` of the
forward's rows and at its `position`; the others follow one by one. `LaneForward.roll_indptr` says of how many ranks
tokens are drawn at each place. All go to the rows from `target_row` on of the target's forward; -1: nowhere. `rule_id`
-1: logits stay as they are; else `prompt_length` tokens of the branch were not generated. `is_kept` 1: what its tokens
are drawn from is kept until the target has verified them."""

BEST_ROW_DTYPE = np.dtype([("stream", "<u8"), ("row", "<i4"), ("place", "<i4"), ("position", "<i4"), ("score", "<f4")])
"""One row of a gang whose continuations are ranked. `row` counts the read-out rows of its forward, `place` the step's
queries of its request; `position` is the chosen token's index, `score` the branch's."""

BEST_GROUP_DTYPE = np.dtype(
    [
        ("seed", "<u8"), ("first", "<i4"), ("stop", "<i4"), ("k", "<i4"), ("top_k", "<i4"), ("temperature", "<f4"),
        ("top_p", "<f4"), ("min_p", "<f4"), ("min_tokens_to_keep", "<i4"), ("is_drawn", "<i4"), ("reserved", "<i4"),
    ]
)  # fmt: skip
"""Rows `first` .. `stop - 1` that are ranked together, and how: their `k` best by score where `is_drawn` is 0; else of
what the sampler keeps in each row, by score and noise."""

MOST_REPORTED = 1 << 20
"""Top tokens of a step, 8 bytes each, that wait until they are asked for; of more, some are read before others."""
NO_INTS = np.empty(0, np.int32)
NO_DRAWS = np.empty(0, DRAW_DTYPE)
NO_ROLLS = np.empty(0, ROLL_DTYPE)
NO_BEST_ROWS = np.empty(0, BEST_ROW_DTYPE)
NO_BEST_GROUPS = np.empty(0, BEST_GROUP_DTYPE)
NO_FLOATS = np.empty(0, np.float32)
for _none in (NO_INTS, NO_DRAWS, NO_ROLLS, NO_BEST_ROWS, NO_BEST_GROUPS, NO_FLOATS):
    _none.flags.writeable = False


def _ints() -> Any:
    """A field that is an empty array by default."""
    return field(default_factory=lambda: NO_INTS)


@dataclass(frozen=True, slots=True)
class ProcessRows:
    """The read-out rows of one forward whose logits are processed, one entry a row, in the order of `rows`."""

    rows: np.ndarray  # int32 [num_processed], into LaneForward.read_rows, ascending, each once
    branches: np.ndarray  # int32 [num_processed]: the branch of the forward that the row belongs to
    prompt_lengths: np.ndarray  # int32 [num_processed]: tokens of the history that were not generated
    rule_ids: np.ndarray  # int64 [num_processed]: the number of the request's rules
    of_logprobs: np.ndarray  # int32 [num_processed]: 1 where the rules change log-probabilities, 0 where logits


@dataclass(frozen=True, slots=True)
class ReportRows:
    """The read-out rows of one forward that are reported.

    Every draw, top-k entry and given token of these rows is reported; and the tokens given here, those that a prompt
    goes on with.
    """

    rows: np.ndarray  # int32 [num_reported], into LaneForward.read_rows, ascending, each once
    num_top: np.ndarray  # int32 [num_reported]: how many of the most probable tokens are wanted
    given_rows: np.ndarray  # int32 [num_given], into read_rows; all among `rows`
    given_tokens: np.ndarray  # int32 [num_given]


@dataclass(frozen=True, slots=True)
class LaneForward:
    """One lane's part of a step. Blocks go to the host's tier and come back first, then there are copies, then the
    rows' forward, then the read-out."""

    lane: str
    token_ids: np.ndarray  # int32 [num_rows]; of rows that a roll fills, anything; below 0: see `drawn_as`
    positions: np.ndarray  # int32 [num_rows]
    slots: np.ndarray  # int32 [num_rows]; -1: a root whose KV is valid only reads
    row_indptr: np.ndarray  # int32 [num_branches + 1]
    kv_len: np.ndarray  # int32 [num_branches]: slots a branch's last row may look at
    block_table: np.ndarray  # int32 [num_branches, width]
    parents: np.ndarray | None = None  # int32 [num_rows] within the branch's, -1 on the chain; None: there are no trees
    adapters: np.ndarray = _ints()  # int32 [num_rows]: the place of each row's adapter, -1: none; []: no row has one
    copy_src: np.ndarray = _ints()  # int32 [num_copies] slots, in order
    copy_dst: np.ndarray = _ints()
    offload_blocks: np.ndarray = _ints()  # int32 [num_moves], in order, before anything else: a block goes ...
    offload_places: np.ndarray = _ints()  # int32 [num_moves]: ... to place p of the host's tier, or comes from -1 - p
    load_places: np.ndarray = _ints()  # int32 [num_loads]: places that have other adapters from here on ...
    load_adapters: np.ndarray = _ints()  # int32 [num_loads]: ... the numbers of these
    fresh: np.ndarray = _ints()  # int32 [num_fresh] blocks taken since the last step: debug builds poison them first
    read_rows: np.ndarray = _ints()  # int32 [num_read]: the rows that are read out
    draws: np.ndarray = field(default_factory=lambda: NO_DRAWS)  # DRAW_DTYPE [num_draws]
    topk_rows: np.ndarray = _ints()  # int32 [num_topk], into read_rows
    topk_k: int = 0  # the largest k asked for
    logprob_rows: np.ndarray = _ints()  # int32 [num_logprobs], into read_rows
    logprob_tokens: np.ndarray = _ints()  # int32 [num_logprobs]
    best_rows: np.ndarray = field(default_factory=lambda: NO_BEST_ROWS)  # BEST_ROW_DTYPE [num_best], group by group
    best_groups: np.ndarray = field(default_factory=lambda: NO_BEST_GROUPS)  # BEST_GROUP_DTYPE [num_groups]
    banned_rows: np.ndarray = _ints()  # int32 [num_banned], into read_rows: at these rows ...
    banned_tokens: np.ndarray = _ints()  # int32 [num_banned]: ... these are neither drawn nor among the top k
    masked_rows: np.ndarray = _ints()  # int32 [num_masked], into read_rows, ascending: a mask follows for each
    rolls: np.ndarray = field(default_factory=lambda: NO_ROLLS)  # ROLL_DTYPE [num_rolls]
    roll_slots: np.ndarray = _ints()  # int32 [sum(count - 1)]: where the tokens of each roll but its last are cached
    roll_indptr: np.ndarray = _ints()  # int32 [sum(count) + 1]: where the tokens of each place begin among all rolled
    feature_slots: np.ndarray = _ints()  # int32 [num_rows], of the target's pool: what each row reads; []: nothing
    verified_draws: np.ndarray = _ints()  # int32 [num_verified]: draws that verify a rolled token by rejection ...
    verified_tokens: np.ndarray = _ints()  # int32 [num_verified]: ... at this place in LaneAnswers.rolled, kept
    processing: ProcessRows | None = None
    report: ReportRows | None = None


def drawn_as(draw: int) -> int:
    """The token id of a row that stands for what the target lane's step before draws as its `draw`-th: that step may
    still be on its way."""
    return -1 - draw


def asks_draws_alone(forwards: Mapping[str, LaneForward]) -> bool:
    """Whether a step's answers are draws from rows that may be processed, with reports, and nothing else; then nobody
    but the next step needs the draws at once, and nobody the reports. There must be room for these until then."""
    target = forwards.get("target")
    if target is None or len(forwards) > 1:
        return False
    if target.report is not None and int(target.report.num_top.sum()) > MOST_REPORTED:
        return False
    others = (target.topk_rows, target.logprob_rows, target.best_rows, target.masked_rows, target.verified_draws)
    return not any(map(len, others))


def freeze(forward: LaneForward) -> None:
    """Let nobody write into a forward's arrays."""
    for record in (forward, forward.processing, forward.report):
        for name in () if record is None else record.__slots__:
            value = getattr(record, name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


Forwards: TypeAlias = Mapping[str, LaneForward]
"""A step's forwards by lane, in the order in which they run."""
Rules: TypeAlias = Mapping[int, LogitsRules]
"""What is done to logits, by the number that rows name it by: of all requests that run."""
EVERYTHING, LISTED = -2, -1
"""Places of rows in `Masks` that have no bits of their own: any token may be drawn; those that are listed."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What may be drawn at each of `LaneForward.masked_rows`: all others are neither drawn nor among the top k.

    They may follow a forward that is on its way: they are due before the read-out.
    """

    places: np.ndarray  # int32 [num_masked]: a row of `words`; or LISTED, or EVERYTHING
    words: np.ndarray  # uint32 [num_words, ceil(vocab / 32)]: a bit for each token, the lowest first; 0: not this one
    indptr: np.ndarray  # int32 [num_masked + 1]: where each row's listed tokens begin
    tokens: np.ndarray  # int32 [indptr[-1]]


MakeMasks: TypeAlias = Callable[[np.ndarray], Masks]
"""Gives a step's masks for the tokens that its draft lane has rolled: int32, as in `LaneAnswers.rolled`."""


NO_MASKS = Masks(NO_INTS, np.empty((0, 0), np.uint32), NO_INTS, NO_INTS)


Problems: TypeAlias = Mapping[int, str]
"""Adapters that could not be read, by their numbers, and why."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to `ReportRows`. Entries of draws, top k and given tokens whose row is not reported mean nothing."""

    top_ids: np.ndarray  # int32 [sum(num_top)]: row by row
    top_logprobs: np.ndarray  # fp32 [sum(num_top)]
    given_logprobs: np.ndarray  # fp32 [num_given]
    given_ranks: np.ndarray  # int32 [num_given]
    draw_logprobs: np.ndarray  # fp32 [num_draws], of the tokens drawn
    draw_ranks: np.ndarray  # int32 [num_draws]
    topk_logprobs: np.ndarray  # fp32 [num_topk, topk_k], of the top k that the decoder is answered
    topk_ranks: np.ndarray  # int32 [num_topk, topk_k]
    logprob_ranks: np.ndarray  # int32 [num_logprobs], of LaneForward.logprob_tokens
    best_logprobs: np.ndarray  # fp32 [num_candidates], of the candidates that the decoder is answered
    best_ranks: np.ndarray  # int32 [num_candidates]


@dataclass(frozen=True, slots=True)
class LaneAnswers:
    """What one lane's forward gives back: small host arrays in the order of `LaneForward`."""

    draws: np.ndarray = _ints()  # int32 [num_draws]; those that verify a rolled token: it where it is accepted
    topk_tokens: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))  # int32 [num_topk, topk_k]
    topk_logprobs: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))  # fp32 [num_topk, topk_k]
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))  # fp32 [num_logprobs]
    best_counts: np.ndarray = _ints()  # int32 [num_groups]: how many candidates of each, at most its k
    best_parents: np.ndarray = _ints()  # int32 [num_candidates]: group by group, the best first; their rows' places
    best_tokens: np.ndarray = _ints()  # int32 [num_candidates]
    best_scores: np.ndarray = field(default_factory=lambda: NO_FLOATS)  # fp32 [num_candidates]
    best_logprobs: np.ndarray = field(default_factory=lambda: NO_FLOATS)  # fp32 [num_candidates]
    best_keys: np.ndarray = field(default_factory=lambda: NO_FLOATS)  # fp32 [num_candidates]: what they are ranked by
    rolled: np.ndarray = _ints()  # int32 [roll_indptr[-1]]: one roll behind the other, each place by place, by rank
    report: Reported | None = None  # where the forward has one
    not_loaded: Problems = field(default_factory=dict)  # of `load_adapters`: their places have none


Answers: TypeAlias = dict[str, LaneAnswers]


def num_rolled(forward: LaneForward) -> int:
    """How many tokens a forward's rolls are answered with."""
    return int(forward.roll_indptr[-1]) if len(forward.roll_indptr) else 0


def rolled_ends(forward: LaneForward) -> np.ndarray:
    """Where the tokens of each of a forward's rolls end among all rolled: int32 [num_rolls]."""
    ends: np.ndarray = forward.roll_indptr[forward.rolls["count"].cumsum()]
    return ends


def split_rolled(forward: LaneForward, rolled: np.ndarray) -> list[tuple[int, ...]]:
    """The tokens of each of a forward's rolls."""
    ends, tokens = rolled_ends(forward).tolist(), rolled.tolist()
    return [tuple(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
