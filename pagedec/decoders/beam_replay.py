"""What a gang's step would be answered behind nodes that it drafted: rows that were ranked each by itself, ranked
together as `Best` ranks them, for scores that were not known when the rows ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedec.core.protocol import Candidates

MARGIN = 4
"""How many more candidates are asked of a drawn row: rounding may change their order."""
ULP = 2.0**-23
FAR = 128.0
"""More than any noise."""


def merged(
    places: Sequence[int], totals: np.ndarray, rows: Sequence[Candidates], num_asked: int, k: int, drawn: bool
) -> Candidates | None:
    """The best `k` of all rows, in the order of `Best` and with its bits. `rows[i]` are the first `num_asked` of the
    branch at `places[i]`, whose score is `totals[i]`, fp32.

    Within a row the order does not depend on the score, but for the rounding of drawn keys. None: of some that matter
    it is not beyond doubt who comes first: equal scores of several rows, or keys that rounding may have put in another
    order.
    """
    sizes = [len(row.tokens) for row in rows]
    owners = np.repeat(np.arange(len(rows)), sizes)
    logprobs = np.concatenate([row.logprobs for row in rows])
    scores = totals[owners] + logprobs
    if not (scores > -np.inf).all():
        return None
    if drawn:
        order = _drawn(totals.astype(np.float64), rows, owners, scores, num_asked, k)
        if order is None:
            return None
    else:
        order = np.argsort(-scores, kind="stable")[: k + 1]
        best, own = scores[order], owners[order]
        if ((best[1:] == best[:-1]) & (own[1:] != own[:-1])).any():
            return None
        order = order[:k]
    tokens = np.concatenate([row.tokens for row in rows])
    return Candidates(np.asarray(places, np.int32)[owners[order]], tokens[order], scores[order], logprobs[order])


def _drawn(
    totals: np.ndarray, rows: Sequence[Candidates], owners: np.ndarray, scores: np.ndarray, num_asked: int, k: int
) -> np.ndarray | None:
    """The order of the first `k` drawn candidates. A key is known up to what rounding did to it."""
    keys = np.concatenate([_keys(row) for row in rows]).astype(np.float64)
    sums = totals[owners] + keys
    errors = ULP * (np.abs(keys) + np.abs(scores) + np.abs(sums))
    order = np.argsort(-sums, kind="stable")
    lows, highs = (sums - errors)[order], (sums + errors)[order]
    count = min(k, len(order))
    after = np.append(np.maximum.accumulate(highs[::-1])[::-1], -np.inf)
    if (lows[:count] <= after[1 : count + 1]).any():
        return None
    for total, row in zip(totals, rows, strict=True):
        if len(row.tokens) == num_asked:  # there may be more of it, no better than its last
            last = float(_keys(row)[-1])
            bound = total + last + 4 * ULP * (abs(total) + abs(last) + FAR)
            if count < k or lows[count - 1] <= bound:
                return None
    return order[:count]


def _keys(row: Candidates) -> np.ndarray:
    assert row.keys is not None
    return row.keys
