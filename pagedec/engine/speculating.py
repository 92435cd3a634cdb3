"""How a request drafts: as it says, or as the engine does where it says nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pagedec.decoders.registry import decoder_for
from pagedec.errors import InvalidArgument
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams
from pagedec.speculation import DraftModelSpeculation, SpeculationTable, speculation_of

P = TypeVar("P", bound=RequestParams)
DRAFTING = (SamplingParams, BeamSearchParams)
"""Parameters that may say how to draft."""
TABLE = SpeculationTable("how a request drafts")
"""What a request may say."""


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


def table_of(params: RequestParams) -> dict[str, Any] | None:
    """What parameters say of how to draft, checked, since somebody may have written to it; None: nothing. Raises
    `InvalidArgument`."""
    said = params.speculative if isinstance(params, DRAFTING) else None
    return TABLE.check("speculative", said) if isinstance(said, dict) else None


def check_speculation(
    table: dict[str, Any], field: str, max_model_len: int, draft_context: int | None, own: dict[str, Any] | None
) -> None:
    """Raise `InvalidArgument` for drafts that no context holds, or whose model there is not. `field`: what `table` is;
    `draft_context`: the draft model's, None where there is none, which may be shorter than what nobody has said; `own`:
    the engine's table."""
    speculation = speculation_of(table)
    contexts = [(max_model_len, "the context", speculation.reach)]
    if isinstance(speculation, DraftModelSpeculation):
        if draft_context is None:
            limit = "needs a draft model: the engine's speculative_config must name one"
            raise InvalidArgument(f"{field}.method", speculation.method, limit)
        if own is not None and own["method"] != speculation.method:
            limit = f"must be {own['method']}: what the engine's speculative_config names is for that"
            raise InvalidArgument(f"{field}.method", speculation.method, limit)
        said = {name: reach for name, reach in speculation.reach.items() if table.get(name) is not None}
        contexts.append((draft_context, "the draft model's context", said))
    for longest, what, reaches in contexts:
        for name, reach in reaches.items():
            if reach >= longest:
                limit = f"must be less than {longest}, {what}: it drafts {reach} tokens ahead"
                raise InvalidArgument(f"{field}.{name}", getattr(speculation, name), limit)
