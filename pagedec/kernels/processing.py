"""What the kernels need to process logits: which rows of a piece, and each request's rules as arrays, made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from pagedec.core.forward import ProcessRows
from pagedec.core.logits_rules import LogitsRules
from pagedec.errors import InvalidArgument
from pagedec.kernels.backend import Backend
from pagedec.kernels.records_readout import Rules


def rows_within(processing: ProcessRows | None, start: int, stop: int) -> slice:
    """The entries of `processing` that are read-out rows from `start` to below `stop`; None has none."""
    if processing is None:
        return slice(0, 0)
    first, last = np.searchsorted(processing.rows, (start, stop)).tolist()
    return slice(first, last)


@dataclass(frozen=True, slots=True)
class FlatRules:
    """A request's rules as arrays; `record` is the kernel's own, with their addresses."""

    rules: LogitsRules
    allowed: np.ndarray | None  # int32 [num_allowed]
    word_indptr: np.ndarray  # int32 [num_words + 1]
    word_tokens: np.ndarray  # int32
    bias_tokens: np.ndarray  # int32 [num_biases]
    bias_values: np.ndarray  # fp32 [num_biases]
    record: bytes
    keep: tuple[object, ...] = ()
    """What else the addresses are of."""


Placed: TypeAlias = Callable[[np.ndarray], tuple[int, object]]
"""Of an array, its address where kernels work, and what has to be kept for that."""


def _here(array: np.ndarray) -> tuple[int, object]:
    return array.ctypes.data, array


def flatten(rules: LogitsRules, vocab_size: int, place: Placed = _here) -> FlatRules:
    """Return the rules as arrays. Raises InvalidArgument where a field has no meaning for this vocabulary."""
    _check_numbers(rules)
    allowed = rules.allowed_token_ids
    flat = None if allowed is None else _token_ids("allowed_token_ids", allowed, vocab_size)
    if not all(rules.bad_words):
        raise InvalidArgument("bad_words", (), "each must have one token or more")
    lengths = [0, *(len(word) for word in rules.bad_words)]
    word_tokens = _token_ids("bad_words", [token for word in rules.bad_words for token in word], vocab_size)
    bias_tokens = _token_ids("logit_bias", [token for token, _ in rules.logit_bias], vocab_size)
    if len(np.unique(bias_tokens)) < len(bias_tokens):
        raise InvalidArgument("logit_bias", rules.logit_bias, "each token id must stand there once")
    word_indptr = np.cumsum(lengths, dtype=np.int32)
    bias_values = np.array([_finite("logit_bias", value) for _, value in rules.logit_bias], np.float32)
    own = () if flat is None else (flat,)
    placed = [place(array) for array in (*own, word_indptr, word_tokens, bias_tokens, bias_values)]
    addresses = [address for address, _ in placed]
    record = Rules(
        *(addresses if own else [None, *addresses]),
        -1 if flat is None else len(flat),
        len(rules.bad_words),
        len(bias_tokens),
        rules.no_repeat_ngram_size,
        rules.repetition_penalty,
        rules.frequency_penalty,
        rules.presence_penalty,
        0,
    )
    keep = tuple(kept for _, kept in placed)
    return FlatRules(rules, flat, word_indptr, word_tokens, bias_tokens, bias_values, bytes(record), keep)


def _check_numbers(rules: LogitsRules) -> None:
    if _finite("repetition_penalty", rules.repetition_penalty) <= 0:
        raise InvalidArgument("repetition_penalty", rules.repetition_penalty, "must be above 0 in fp32")
    _finite("frequency_penalty", rules.frequency_penalty)
    _finite("presence_penalty", rules.presence_penalty)
    if not 0 <= rules.no_repeat_ngram_size < 2**31:
        raise InvalidArgument("no_repeat_ngram_size", rules.no_repeat_ngram_size, "must be from 0 to 2^31 - 1")


def _finite(field: str, value: float) -> np.float32:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded):
        raise InvalidArgument(field, value, "must be finite in fp32")
    return rounded


def _token_ids(field: str, tokens: list[int] | tuple[int, ...], vocab_size: int) -> np.ndarray:
    wide = np.array(tokens, np.int64)
    wrong = wide[(wide < 0) | (wide >= vocab_size)]
    if len(wrong):
        raise InvalidArgument(field, int(wrong[0]), f"its token ids must be from 0 to {vocab_size - 1}")
    return wide.astype(np.int32)


def lse_of(
    backend: Backend, logits: torch.Tensor, start: int, processing: ProcessRows, picked: slice
) -> np.ndarray | None:
    """Of the rows whose rules change log-probabilities, the log-sum-exp, fp32; of the other picked ones 0. None: there
    are no such rows."""
    flags = processing.of_logprobs[picked]
    wanted = np.flatnonzero(flags)
    if not len(wanted):
        return None
    lse = np.zeros(len(flags), np.float32)
    lse[wanted] = backend.topk(logits, (processing.rows[picked][wanted] - start).astype(np.int32), 0)[2]
    return lse


def named(rule_ids: np.ndarray, known: Mapping[int, FlatRules]) -> tuple[list[FlatRules], np.ndarray]:
    """The rules that rows name, each once, and of each row its place among them, int32."""
    numbers, places = np.unique(rule_ids, return_inverse=True)
    return [known[number] for number in numbers.tolist()], places.astype(np.int32)
