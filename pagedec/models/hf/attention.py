"""The attention function that transformers' modeling code calls in place of its own.

It is registered under two names. A model built with RUN attends over the paged cache; no mask is made for it. A model
built with PROBE is only looked at (probe.py): its masks are `ProbeMask`s, which tell what they would have let through.
Whoever runs a forward says who answers the calls by `answering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from pagedec.errors import InvariantError

RUN = "pagedec"
PROBE = "pagedec_probe"


class Refused(Exception):
    """Why a model cannot run on the paged cache; told to the caller as an InvalidArgument with the model's name."""


class ProbeMask:
    """What stands in for a mask while a model is looked at. `mask_function` is transformers': (batch, head, query
    position, key position) to whether the key is seen."""

    def __init__(self, mask_function: Callable[..., torch.Tensor]) -> None:
        self.mask_function = mask_function

    def seen(self, query: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of the keys, positions [n], a query at this position sees: bool [n]."""
        zero = torch.zeros((), dtype=torch.long)
        return self.mask_function(zero, zero, torch.tensor(query), keys).expand(len(keys))

    def _computed_with(self, *_: object) -> Any:
        raise Refused("its modeling code computes with the attention mask itself")

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __and__ = __rand__ = __invert__ = _computed_with

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks of any object
            raise AttributeError(name)
        return self._computed_with()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call. query, key, value [1, heads, rows, head_dim]; the rest as the modeling code gives it."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: object
    scaling: object
    window: object
    soft_cap: object
    sinks: object
    others: Mapping[str, object]

    @property
    def given(self) -> tuple[object, object, object]:
        """The numbers that belong to the layer's kind."""
        return self.scaling, self.window, self.soft_cap


class Answering(Protocol):
    """Who answers the calls of a forward."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """What the rows gather: [1, rows, heads, head_dim]."""


_answering: ContextVar[Answering] = ContextVar("pagedec_hosted_attention")


@contextmanager
def answering(answering: Answering) -> Iterator[None]:
    """Calls from within this context go to `answering`."""
    token = _answering.set(answering)
    try:
        yield
    finally:
        _answering.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    scaling: object = None,
    sliding_window: object = None,
    softcap: object = None,
    s_aux: object = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    answers = _answering.get(None)
    if answers is None:
        raise InvariantError("a hosted model ran outside of a step")
    call = AttentionCall(module, query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux, others)
    return answers.attend(call), None


def _mask(*_: object, mask_function: Callable[..., torch.Tensor], **__: object) -> ProbeMask:
    return ProbeMask(mask_function)


@cache
def register() -> None:
    """Make the two names known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RUN, _attention)
    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, _mask)
