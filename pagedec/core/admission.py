"""What is refused at the door: everything that could not run alone."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.limits import SchedulerLimits
from pagedec.core.protocol import Decoder
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, Shown


def check_prompt(limits: SchedulerLimits, prompt: Sequence[int], stopping: Stopping, limit: int | None) -> int:
    """The longest sequence the request may reach, or `InvalidArgument`."""
    if not len(prompt):
        raise InvalidArgument("prompt", Shown("empty"), "must have at least one token")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise InvalidArgument("prompt", wrong, f"token ids must be from 0 to {limits.vocab_size - 1}")
    if limit is None:
        if stopping.max_tokens is None:
            raise InvalidArgument("limit", None, "must be given where max_tokens is not")
        limit = len(prompt) + stopping.max_tokens
    capacity = limits.max_blocks_per_table * limits.block_size
    if limit > capacity:
        raise InvalidArgument(
            "limit", limit, f"must be at most {capacity}: {limits.max_blocks_per_table} blocks of a table"
        )
    room = limit if stopping.max_tokens is None else limit - 1  # a request that generates must have room for a token
    if len(prompt) > room:
        raise InvalidArgument(
            "prompt", len(prompt), f"must be at most {room} tokens long: its sequences end at {limit}"
        )
    return limit


def check_width(limits: SchedulerLimits, decoder: Decoder, prompt_length: int, limit: int) -> None:
    """Raise unless one branch, or one gang, fits the step and the pool alone. Drafts and draft lanes are optional."""
    width = decoder.width if decoder.gang else 1
    if width > limits.max_num_seqs:
        raise InvalidArgument("width", width, f"must be at most max_num_seqs, {limits.max_num_seqs}")
    if width > limits.max_num_batched_tokens:
        raise InvalidArgument(
            "width", width, f"must be at most max_num_batched_tokens, {limits.max_num_batched_tokens}"
        )
    size, num_blocks = limits.block_size, limits.num_blocks["target"]
    shared = prompt_length // size
    most = shared + width * (-(-limit // size) - shared + 1)  # one more each: the source of a pending copy
    if most > num_blocks:
        text = f"must need at most {num_blocks} blocks, the target lane's; {width} x {limit} tokens may need {most}"
        raise InvalidArgument("limit", limit, text)
