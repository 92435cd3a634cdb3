"""Single values that decoders say. Each raises `InvalidArgument` by the field's name."""

from __future__ import annotations

import math
from numbers import Real

from pagedec.core.sampler import Sampler
from pagedec.errors import InvalidArgument
from pagedec.fields import MAX_INT32


def check_streams(field: str, state: object) -> None:
    """Raise unless a state is what a decoder with a sampler has: the streams of its answers."""
    if not isinstance(state, tuple) or not state:
        raise InvalidArgument(field, state, "must be a tuple of streams: the decoder has a sampler to be stepped by")
    for stream in state:
        check_stream(field, stream)


def check_sampler(field: str, sampler: Sampler) -> None:
    """Raise unless it says how to draw."""
    if not isinstance(sampler, Sampler):
        raise InvalidArgument(field, sampler, "must be a Sampler")


def check_stream(field: str, stream: object) -> None:
    """Raise unless it names noise."""
    if not isinstance(stream, int):
        raise InvalidArgument(field, stream, "must be a whole number: a stream is 64 bits")


def check_whole(field: str, value: object, low: int, high: int) -> None:
    """Raise unless it is a whole number from `low` to `high`."""
    if not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(field, value, f"must be a whole number from {low} to {high}")


def check_tokens(field: str, tokens: object, vocab_size: int) -> None:
    """Raise unless they are token ids of the vocabulary."""
    if not isinstance(tokens, (tuple, list)):
        raise InvalidArgument(field, tokens, "must be a tuple of token ids")
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidArgument(field, token, f"must be token ids, whole numbers from 0 to {vocab_size - 1}")


def check_score(score: object) -> None:
    """Raise unless it is a number."""
    if not isinstance(score, Real) or math.isnan(score):
        raise InvalidArgument(".score", score, "must be a number")


def check_rank(field: str, rank: object) -> None:
    """Raise unless `rank` may order a request's answers."""
    check_whole(field, rank, 0, MAX_INT32)
