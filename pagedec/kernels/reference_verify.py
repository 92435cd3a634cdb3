"""The meaning of verification by rejection, in numpy and float64 (Leviathan et al. 2023, Chen et al. 2023).

A drafted token x that was drawn from q is accepted with probability min(1, p(x) / q(x)), else replaced by a draw from
norm(max(0, p - q)): what is answered is distributed as p, whatever q is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedec.kernels.reference_readout import Floats, Ints, argmax, gumbel, log_probabilities, philox

ACCEPTANCE = 1 << 62
"""Changes a stream's name: acceptance is decided with noise of its own."""
Probabilities = npt.NDArray[np.float64]


def acceptance(p: Probabilities, q: Probabilities, token: int) -> float:
    """The probability that a drafted token is accepted. 0 of a token that p lacks, however unlikely a draft it was."""
    return float(min(1.0, p[token] / q[token])) if q[token] > 0 else float(p[token] > 0)


def residual(p: Probabilities, q: Probabilities) -> Probabilities | None:
    """What a rejected token's replacement is drawn from. None where nothing is left: p is q, and nothing is rejected
    but by rounding."""
    left = np.maximum(0.0, p - q)
    return left / left.sum() if left.any() else None


def distribution(row: Floats, draw: np.void, size: int) -> Probabilities:
    """What a draw (DRAW_DTYPE) is taken from: probabilities of `size` tokens, none of those that the row lacks."""
    p = np.zeros(max(size, len(row)))
    if draw["temperature"] == 0.0 or not np.any(row > -np.inf):
        p[int(argmax(row))] = 1.0
    else:
        p[: len(row)] = np.exp(log_probabilities(row, draw))
    return p


def uniform(draw: np.void) -> float:
    """The number in (0, 1) that a drafted token's acceptance is decided with."""
    key = int(draw["seed"]), int(draw["stream"]) ^ ACCEPTANCE, int(draw["position"])
    words = philox(*key, np.zeros(1, np.uint64))[0]
    return (float((int(words[0]) << 32 | int(words[1])) >> 11) + 0.5) * 2.0**-53


def verify(
    logits: Floats,
    draws: npt.NDArray[np.void],
    draft_logits: Floats,
    drafts: npt.NDArray[np.void],
    drafted: Ints,
) -> Ints:
    """Return each of `drafted`, or what replaces it. `draws` and `drafts` (DRAW_DTYPE) say what p and q are."""
    tokens, vocab = drafted.astype(np.int32), logits.shape[1]
    for i, (draw, draft) in enumerate(zip(draws, drafts, strict=True)):
        token = int(drafted[i])
        p = distribution(logits[int(draw["row"])], draw, draft_logits.shape[1])
        q = distribution(draft_logits[int(draft["row"])], draft, vocab)
        if uniform(draw) * q[token] < p[token]:
            continue
        left = residual(p, q)
        if left is not None:
            noise = gumbel(int(draw["seed"]), int(draw["stream"]), int(draw["position"]), 0, len(left))
            with np.errstate(divide="ignore"):
                tokens[i] = np.argmax(np.log(left) + noise)
    return tokens
