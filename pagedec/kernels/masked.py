"""Masks on logits that the host can read: what is not allowed becomes minus infinity."""

from __future__ import annotations

import numpy as np

from pagedec.core.forward import EVERYTHING, LISTED, Masks


def check_masks(masks: Masks | None, num_rows: int, vocab_size: int) -> Masks:
    """The masks of that many rows. Raises ValueError where there are others, or none."""
    due = f"masks of {num_rows} rows and {vocab_size} tokens are due"
    if masks is None:
        raise ValueError(f"{due}; there are none")
    width, places, indptr = -(-vocab_size // 32), masks.places, masks.indptr
    if len(places) != num_rows or len(indptr) != num_rows + 1 or (masks.words.size and masks.words.shape[1] != width):
        found = f"{len(places)} places, {len(indptr)} beginnings and words of {masks.words.shape}"
        raise ValueError(f"{due}; there are {found}")
    tokens, ends = masks.tokens, indptr[-1] if len(indptr) else 0
    inside = len(places) == 0 or (places.min() >= EVERYTHING and places.max() < len(masks.words))
    if not inside or ends != len(tokens) or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size):
        raise ValueError(f"{due}; some name tokens or words that there are not")
    return masks


def apply_mask(row: np.ndarray, masks: Masks, i: int) -> None:
    """Mask one row of logits, fp32 [vocab], in place, as the i-th of masks that were checked."""
    place = int(masks.places[i])
    if place == EVERYTHING:
        return
    if place == LISTED:
        _keep(row, masks.tokens[masks.indptr[i] : masks.indptr[i + 1]])
        return
    forbidden = np.unpackbits((~masks.words[place]).view(np.uint8), bitorder="little", count=len(row)).view(np.bool_)
    np.copyto(row, -np.inf, where=forbidden)


def _keep(row: np.ndarray, tokens: np.ndarray) -> None:
    kept = row[tokens]
    row.fill(-np.inf)
    row[tokens] = kept
