"""The meaning of the read-out kernels, in numpy: argmax, top-k with logsumexp, the noise, and Gumbel-max draws.

The noise has the kernels' integers; probabilities are float64. A NaN logit counts as -inf, in a draw +inf as the
largest float; of equal logits the lower token id comes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
FEW = 1024
"""Tokens that mostly have the mass of a nucleus."""


def _clean(logits: Floats) -> npt.NDArray[np.float64]:
    cleaned: npt.NDArray[np.float64] = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    return cleaned


def restrict(
    logits: Floats,
    places: Ints | None,
    words: npt.NDArray[np.uint32] | None,
    banned_rows: Ints,
    banned_tokens: Ints,
    num_drawn: int | None,
) -> None:
    """Make -inf, in place, of what words have no bit for, of single logits, and of tokens from `num_drawn` on."""
    if places is not None and words is not None:
        for row, place in zip(logits, places.tolist(), strict=True):
            if place >= 0:
                bits = np.unpackbits(words[place].view(np.uint8), bitorder="little", count=len(row))
                np.copyto(row, -np.inf, where=bits == 0)
    logits[banned_rows, banned_tokens] = -np.inf
    if num_drawn is not None:
        logits[:, num_drawn:] = -np.inf


def ranks(logits: Floats, rows: Ints, tokens: Ints) -> Ints:
    """Return 1 + how many logits of its row are greater, of each logits[rows, tokens]; NaN: 1."""
    chosen, found = logits[rows, tokens], np.empty(len(rows), np.int32)
    for row in np.unique(rows).tolist():  # one look at a row for all
        places = np.flatnonzero(rows == row)
        values, wanted = logits[row], chosen[places]
        above = np.sort(values[values > np.fmin.reduce(wanted)])
        found[places] = 1 + len(above) - np.searchsorted(above, wanted, side="right")
    return found


def argmax(logits: Floats) -> Ints:
    """Return the id of each row's largest logit."""
    ids: Ints = np.argmax(_clean(logits), -1).astype(np.int32)
    return ids


def largest(row: Floats, k: int) -> npt.NDArray[np.int64]:
    """Return the ids of the k largest logits by descending logit, then ascending id."""
    cleaned = _clean(row)
    if k == 0:
        return np.empty(0, np.int64)
    candidates = np.arange(len(cleaned))
    if k < len(cleaned):
        candidates = np.flatnonzero(cleaned >= np.partition(cleaned, len(cleaned) - k)[len(cleaned) - k])
    return candidates[np.argsort(-cleaned[candidates], kind="stable")][:k]


def topk_lse(logits: Floats, k: int, row_ids: Ints | None = None) -> tuple[Ints, Floats, Floats]:
    """Return the ids and logits of each row's k largest in order, and the row's logsumexp in float64."""
    rows = _clean(logits if row_ids is None else logits[row_ids])
    ids = np.array([largest(row, k) for row in rows], np.int32).reshape(len(rows), k)
    top = rows.max(-1, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        lse = np.log(np.exp(rows - shift).sum(-1)) + shift[:, 0]
    return ids, np.take_along_axis(rows, ids.astype(np.int64), -1).astype(np.float32), lse


def philox(seed: int, stream: int, position: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the four words [num_counters, 4] of Philox4x32-10 for each token quadruple."""
    c0 = np.full(counters.shape, stream & _WORD, np.uint64)
    c1 = np.full(counters.shape, stream >> 32, np.uint64)
    c2 = np.full(counters.shape, position & _WORD, np.uint64)
    c3 = counters.astype(np.uint64)
    low, shift = np.uint64(_WORD), np.uint64(32)
    for i in range(10):
        k0 = np.uint64(((seed & _WORD) + i * _WEYL[0]) & _WORD)
        k1 = np.uint64(((seed >> 32) + i * _WEYL[1]) & _WORD)
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
    return np.stack((c0, c1, c2, c3), -1)


def gumbel(seed: int, stream: int, position: int, first_token: int, num_tokens: int) -> npt.NDArray[np.float64]:
    """Return the noise of consecutive tokens."""
    first = first_token // 4
    counters = np.arange(first, (first_token + num_tokens + 3) // 4, dtype=np.uint64)
    words = philox(seed, stream, position, counters).reshape(-1)
    words = words[first_token - 4 * first :][:num_tokens]
    uniform = ((words >> np.uint64(8)).astype(np.float64) + 0.5) * 2.0**-24
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _nucleus(
    row: Floats, z: npt.NDArray[np.float64], kept: npt.NDArray[np.int64], top_p: float
) -> npt.NDArray[np.int64]:
    """Of the ids kept, in order unless they are all, the fewest of the largest whose mass reaches a share of all."""
    mass = top_p * np.exp(z[kept]).sum()
    for num in (min(FEW, len(row)), len(row)):  # the whole row is sorted only where the mass is spread so far
        ordered = kept if len(kept) < len(row) else largest(row, num)
        cumulative = np.cumsum(np.exp(z[ordered]))
        if cumulative[-1] >= mass:
            break
    return ordered[: int(np.searchsorted(cumulative, mass)) + 1]


def log_probabilities(row: Floats, draw: np.void) -> npt.NDArray[np.float64]:
    """Return the log of the distribution that a draw (DRAW_DTYPE) with a temperature above 0 is taken from."""
    finite = np.minimum(_clean(row), float(np.finfo(np.float32).max))
    with np.errstate(over="ignore"):
        z = (finite - finite.max()) / float(draw["temperature"])
    kept = np.arange(len(row))
    if 0 < draw["top_k"] < len(row):
        kept = largest(row, int(draw["top_k"]))
    if draw["top_p"] < 1.0:
        kept = _nucleus(row, z, kept, float(draw["top_p"]))
    kept = kept[np.exp(z[kept]) >= float(draw["min_p"])]
    result = np.full(len(row), -np.inf)
    result[kept] = z[kept] - np.log(np.exp(z[kept]).sum())
    return result


def sample(logits: Floats, draws: npt.NDArray[np.void]) -> Ints:
    """Return one token for each draw (DRAW_DTYPE); temperature 0 is the argmax. Of rank r: what comes r places behind
    it, or itself where no more are left."""
    tokens = np.empty(len(draws), np.int32)
    for i, draw in enumerate(draws):
        row = logits[int(draw["row"])]
        scores = _clean(row)
        if draw["temperature"] != 0.0 and np.any(scores > -np.inf):
            noise = gumbel(int(draw["seed"]), int(draw["stream"]), int(draw["position"]), 0, len(row))
            scores = log_probabilities(row, draw) + noise
        rank = int(draw["rank"])
        if rank and rank < np.count_nonzero(scores > -np.inf):
            tokens[i] = np.argsort(-scores, kind="stable")[rank]
        else:
            tokens[i] = argmax(scores)
    return tokens
