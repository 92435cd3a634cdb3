"""Masks of a step's rows."""

import numpy as np

from pagedec.core.forward import NO_INTS, Masks


def of_words(words: np.ndarray) -> Masks:
    """Masks that all are rows of bits: uint32 [rows, words]."""
    num_rows = len(words)
    return Masks(np.arange(num_rows, dtype=np.int32), words, np.zeros(num_rows + 1, np.int32), NO_INTS)
