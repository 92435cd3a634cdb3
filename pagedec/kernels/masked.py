"""Masks as words of bits, in which kernels take them."""

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


def mask_words(masks: Masks, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place among words, int32, -1: everything is allowed; and the words, uint32 [*, ceil(vocab / 32)]. Of
    masks that were checked; what is listed has words of its own, behind the given ones."""
    listed = np.flatnonzero(masks.places == LISTED)
    places, words = np.where(masks.places >= 0, masks.places, -1).astype(np.int32), masks.words
    if len(listed):
        places[listed] = len(words) + np.arange(len(listed))
        own = np.zeros((len(listed), -(-vocab_size // 32)), np.uint32)
        firsts = np.repeat(np.arange(len(listed)) * own.shape[1], np.diff(masks.indptr)[listed])
        bits = np.uint32(1) << (masks.tokens & 31).astype(np.uint32)
        np.bitwise_or.at(own.reshape(-1), firsts + (masks.tokens >> 5), bits)
        words = np.concatenate([words, own]) if len(words) else own
    return places, words
