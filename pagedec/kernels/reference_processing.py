"""The meaning of pd_process_logits, in numpy: a row's history, and the request's rules in fp32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedec.kernels.processing import FlatRules

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def history(
    row: int,
    branch: int,
    row_indptr: Ints,
    kv_len: Ints,
    block_table: Ints,
    parents: Ints | None,
    tokens: Ints,
    block_size: int,
) -> Ints:
    """Return the tokens that a row of a forward sees, itself last: int32. The batch is described as by
    pd_attn_batch."""
    first, last = int(row_indptr[branch]), int(row_indptr[branch + 1])
    before, node = int(kv_len[branch]) - (last - first), row - first
    path: list[int] = []
    while parents is not None and parents[first + node] >= 0:
        path.append(node)
        node = int(parents[first + node])
    places = np.array([*range(before + node + 1), *(before + n for n in reversed(path))], np.int64)
    seen: Ints = tokens[block_table[branch][places // block_size].astype(np.int64) * block_size + places % block_size]
    return seen


def process(row: Floats, seen: Ints, prompt_length: int, rules: FlatRules, lse: np.float32 | None = None) -> None:
    """Apply the rules in place to one row of logits, fp32 [vocab], with the history `seen`; where a finite `lse` is
    given, to the row less that."""
    if lse is not None and np.isfinite(lse):
        row -= lse
    numbers = rules.rules
    if rules.allowed is not None:
        kept = row[rules.allowed]
        row[:] = -np.inf
        row[rules.allowed] = kept
    for begin, end in zip(rules.word_indptr[:-1], rules.word_indptr[1:], strict=True):
        word = rules.word_tokens[begin:end]
        if len(word) - 1 <= len(seen) and np.array_equal(seen[len(seen) - len(word) + 1 :], word[:-1]):
            row[word[-1]] = -np.inf
    row[rules.bias_tokens] += rules.bias_values
    row[_known(_repeating(seen, numbers.no_repeat_ngram_size), row)] = -np.inf
    if numbers.repetition_penalty != 1.0:
        penalty = np.float32(numbers.repetition_penalty)
        ids = np.unique(_known(seen, row))
        z = row[ids]
        row[ids] = np.where(z > 0, z / penalty, z * penalty)
    if numbers.frequency_penalty != 0.0 or numbers.presence_penalty != 0.0:
        ids, counts = np.unique(_known(seen[prompt_length:], row), return_counts=True)
        frequency, presence = np.float32(numbers.frequency_penalty), np.float32(numbers.presence_penalty)
        row[ids] = (row[ids] - frequency * counts.astype(np.float32)) - presence


def _known(ids: Ints, row: Floats) -> Ints:
    known: Ints = ids[(ids >= 0) & (ids < len(row))]
    return known


def _repeating(seen: Ints, n: int) -> Ints:
    """The tokens that would make an n-gram of the history a second time."""
    if n == 0 or len(seen) < n:
        return seen[:0]
    if n == 1:
        return seen
    windows = np.lib.stride_tricks.sliding_window_view(seen[:-1], n - 1)
    ids: Ints = seen[n - 1 :][(windows == seen[len(seen) - n + 1 :]).all(-1)]
    return ids
