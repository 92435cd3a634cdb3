"""How a request drafts: as it says, or as the engine does where it says nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pagedec.decoders.registry import decoder_for
from pagedec.errors import InvalidArgument
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams
from pagedec.speculation import DraftModelSpeculation, Speculation, speculation_of

P = TypeVar("P", bound=RequestParams)
DRAFTING = (SamplingParams, BeamSearchParams)
"""Parameters that may say how to draft."""


def with_speculation(params: P, default: dict[str, Any] | None) -> P:
    """The parameters with the engine's way to draft, where they leave it open and their decoder can draft so. Beams
    draft only where they say so: what drafts cost a search is not weighed."""
    if default is None or not isinstance(params, SamplingParams) or params.speculative is not None:
        return params
    kind = type(speculation_of(default))
    if decoder_for(type(params), kind).speculation is not kind:
        return params
    own = {name: value for name, value in default.items() if name in ("method", *kind.__dataclass_fields__)}
    return dataclasses.replace(params, speculative=own)


def check_speculation(speculation: Speculation, field: str, max_model_len: int, has_draft_model: bool) -> None:
    """Raise `InvalidArgument` for drafts that no context holds, or whose model there is not. `field`: what named it."""
    for name, reach in speculation.reach.items():
        if reach >= max_model_len:
            limit = f"must be less than {max_model_len}, the context: it drafts {reach} tokens ahead"
            raise InvalidArgument(f"{field}.{name}", getattr(speculation, name), limit)
    if isinstance(speculation, DraftModelSpeculation) and not has_draft_model:
        limit = "needs a draft model: the engine's speculative_config must name one"
        raise InvalidArgument(f"{field}.method", speculation.method, limit)
