"""The meaning of pd_best, in numpy: the best continuations of rows that are ranked together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedec.kernels.reference_readout import gumbel, largest

Floats = npt.NDArray[np.float32]

CANDIDATE_DTYPE = np.dtype(
    [
        ("place", np.int32), ("token", np.int32), ("key", np.float32), ("value", np.float32), ("score", np.float32),
        ("logprob", np.float32),
    ]
)  # fmt: skip
"""A continuation: `key` is what it is ranked by, its score or that with noise; `value` its processed logit."""


def best(
    logits: Floats, lse: Floats, rows: npt.NDArray[np.void], groups: npt.NDArray[np.void]
) -> list[npt.NDArray[np.void]]:
    """Return each group's candidates (CANDIDATE_DTYPE), the best first, from logits fp32 [*, vocab] and the lse [rows]
    that is to be subtracted from each row's."""
    found = []
    for group in groups:
        first, stop = int(group["first"]), int(group["stop"])
        own = [_candidates(logits[rows["row"][i]], lse[i], rows[i], group) for i in range(first, stop)]
        found.append(ranked(np.concatenate([np.empty(0, CANDIDATE_DTYPE), *own]), int(group["k"])))
    return found


def ranked(candidates: npt.NDArray[np.void], k: int) -> npt.NDArray[np.void]:
    """Return the first `k` in order: by key, then by value, the higher first, then by place and token."""
    return candidates[order(candidates)[:k]]


def order(candidates: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """Return the places of candidates, the best first."""
    c = candidates
    return np.lexsort((c["token"], c["place"], -c["value"], -c["key"]))


def _candidates(x: Floats, lse: np.float32, row: np.void, group: np.void) -> npt.NDArray[np.void]:
    x = np.where(np.isnan(x), np.float32(-np.inf), x) + np.float32(0)
    tokens = np.arange(len(x)) if not group["is_drawn"] else _kept(x, group)
    out = np.zeros(len(tokens), CANDIDATE_DTYPE)
    out["place"], out["token"], out["value"] = row["place"], tokens, x[tokens]
    with np.errstate(invalid="ignore", over="ignore"):
        out["logprob"] = x[tokens] - lse
        if group["is_drawn"]:
            out["logprob"] /= group["temperature"]
        out["score"] = row["score"] + out["logprob"]
        out["key"] = out["score"]
        if group["is_drawn"]:
            seed, stream, position = int(group["seed"]), int(row["stream"]), int(row["position"])
            out["key"] += gumbel(seed, stream, position, 0, len(x))[tokens].astype(np.float32)
    return out[out["score"] > -np.inf]


def _kept(x: Floats, group: np.void) -> npt.NDArray[np.int64]:
    """The tokens that top_k, top_p and min_p leave, at least as many at each cut as must be kept."""
    least, finite = int(group["min_tokens_to_keep"]), np.minimum(x.astype(np.float64), float(np.finfo(np.float32).max))
    if not np.any(finite > -np.inf):
        return np.empty(0, np.int64)
    with np.errstate(over="ignore"):
        z = (finite - finite.max()) / float(group["temperature"])
    top_k = max(int(group["top_k"]), least) if group["top_k"] else len(x)
    kept = largest(x, min(top_k, len(x)))
    if group["top_p"] < 1.0:
        cumulative = np.cumsum(np.exp(z[kept]))
        reached = int(np.searchsorted(cumulative, float(group["top_p"]) * cumulative[-1])) + 1
        kept = kept[: max(reached, least)]
    above = int((np.exp(z[kept]) >= float(group["min_p"])).sum())
    return kept[: max(above, least)]
