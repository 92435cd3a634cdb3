"""Sampling on a plain list: what every lossless method must return. It knows neither caches nor branches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

Draw: TypeAlias = Callable[[Sequence[int], int], int]
"""The token drawn after these tokens by this stream."""


def sample(
    draw: Draw, prompt: Sequence[int], stream: int, max_tokens: int, stops: Collection[int] = (), min_tokens: int = 0
) -> list[int]:
    """The prompt and its answer, the stop token included."""
    tokens = list(prompt)
    for count in range(1, max_tokens + 1):
        tokens.append(draw(tokens, stream))
        if tokens[-1] in stops and count > min_tokens:
            break
    return tokens
