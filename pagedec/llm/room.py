"""A request that no pool could hold, told in the words of its caller: which field is too much, and how much is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pagedec.core.limits import SchedulerLimits
from pagedec.errors import InvalidArgument, counted
from pagedec.params import BeamSearchParams


@contextlib.contextmanager
def within_pool(limits: SchedulerLimits, params: Any, prompt_length: int) -> Iterator[None]:
    """Errors about the width of a beam search, or about the room that its paths need, are about its `beam_width` or its
    `max_tokens`, and say the most that it may be. Of other gangs, whose fields nobody knows, they are about
    `max_tokens`."""
    try:
        yield
    except InvalidArgument as error:
        if error.field not in ("width", "limit"):
            raise
        if not isinstance(params, BeamSearchParams):
            if error.field == "width":
                raise
            raise InvalidArgument("max_tokens", params.max_tokens, error.limit) from None
        width = params.beam_width
        if error.field == "width":
            raise InvalidArgument("beam_width", width, error.limit) from None
        num_blocks, size = limits.num_blocks["target"], limits.block_size
        blocks = f"{counted(num_blocks, 'block')} of {counted(size, 'token')}"
        pool = f"the KV pool has {blocks}; kv_cache_memory and num_blocks size it"
        behind, shared = f"behind {counted(prompt_length, 'token')}", prompt_length // size
        most = ((num_blocks - shared) // width + shared - 1) * size - prompt_length
        if most >= 1:
            limit = f"must be at most {most} with beam_width {width} {behind}: {pool}"
            raise InvalidArgument("max_tokens", params.max_tokens, limit) from None
        widest = (num_blocks - shared) // ((prompt_length + size) // size - shared + 1)
        limit = f"must be at most {widest} {behind}: {pool}"
        raise InvalidArgument("beam_width", width, limit) from None
