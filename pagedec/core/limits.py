"""What the scheduler may use, and what is refused at the door: everything that could not run alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagedec.core.block import BlockPool
from pagedec.core.protocol import Decoder
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, Shown


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The size of everything the scheduler hands out. `num_blocks` names a lane's pool; "target" must be among them."""

    num_blocks: Mapping[str, int]
    vocab_size: int
    block_size: int = 16
    max_blocks_per_table: int = 512
    max_num_seqs: int = 256
    """Branches in one step; a gang counts as one."""
    max_num_batched_tokens: int = 512
    """Rows in one step, on each lane."""
    max_chunk: int | None = None
    """Pending tokens of one branch in one step; None: as many as there are rows."""
    enable_prefix_caching: bool = True
    num_adapter_places: int = 0
    """Low-rank adapters that one step may have rows of."""
    num_offload_blocks: int = 0
    """Blocks of the target's lane that the host's memory keeps when the pool evicts them."""
    array_settle: bool = True
    """Plan and settle plain sampling without queries and verdicts. The result is the same."""
    draft_forced: bool = True
    """Evaluate tokens that a constraint leaves no choice about in one step, where a decoder drafts nothing else. The
    result is the same."""
    max_positions: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the longest sequence that a lane's model can read; of a lane that is not named, as many as a table
    holds."""
    vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    """Token ids that a lane's model knows; of a lane that is not named, `vocab_size`."""

    lags: Mapping[str, int] = field(default_factory=dict)
    """How far a lane's slots lag behind the tokens that they are made of; of a lane that is not named, 0. Where they
    do, its rows read features of the target's."""

    def __post_init__(self) -> None:
        if "target" not in self.num_blocks:
            raise InvalidArgument("num_blocks", dict(self.num_blocks), 'must name the lane "target"')
        for lane, num_blocks in self.num_blocks.items():
            if num_blocks < 1:
                raise InvalidArgument(f"num_blocks[{lane!r}]", num_blocks, "must be at least 1")
        for name in ("vocab_size", "block_size", "max_blocks_per_table", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "must be at least 1")
        for name in ("max_positions", "vocab_sizes"):
            for lane, value in getattr(self, name).items():
                if value < 1:
                    raise InvalidArgument(f"{name}[{lane!r}]", value, "must be at least 1")
        for lane, lag in self.lags.items():
            if lane == "target" or not 0 <= lag <= 1:
                raise InvalidArgument(f"lags[{lane!r}]", lag, "must be 0 or 1, and of another lane than the target")
        if self.num_offload_blocks and not self.enable_prefix_caching:
            limit = "must be 0 without enable_prefix_caching: nothing would be found"
            raise InvalidArgument("num_offload_blocks", self.num_offload_blocks, limit)
        if self.max_chunk is not None and self.max_chunk < 1:
            raise InvalidArgument("max_chunk", self.max_chunk, "must be at least 1, or None")

    def longest(self, lane: str) -> int:
        """Tokens of the longest sequence on a lane."""
        table = self.max_blocks_per_table * self.block_size
        return min(table, self.max_positions.get(lane, table))

    def vocab_size_of(self, lane: str) -> int:
        """Token ids that a lane's model knows."""
        return self.vocab_sizes.get(lane, self.vocab_size)

    @property
    def chunk(self) -> int:
        """The most pending tokens of one branch in one step."""
        return self.max_num_batched_tokens if self.max_chunk is None else self.max_chunk


def make_pool(limits: SchedulerLimits, lane: str) -> BlockPool:
    """The blocks of a lane."""
    num_blocks, kept = limits.num_blocks[lane], limits.num_offload_blocks if lane == "target" else 0
    lag = limits.lags.get(lane, 0)
    return BlockPool(lane, num_blocks, limits.block_size, limits.max_blocks_per_table, kept, lag)


def check_prompt(limits: SchedulerLimits, prompt: Sequence[int], stopping: Stopping, limit: int | None) -> int:
    """The longest sequence the request may reach, or `InvalidArgument`."""
    if not len(prompt):
        raise InvalidArgument("prompt", Shown("empty"), "must have at least one token")
    check_token_ids("prompt", prompt, limits.vocab_size)
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


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidArgument` for a token that the model does not know."""
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidArgument(field, wrong, f"token ids must be from 0 to {vocab_size - 1}")


def check_width(limits: SchedulerLimits, decoder: Decoder, prompt_length: int, limit: int) -> None:
    """Raise unless one branch, or one gang, fits the step and the pool alone. Drafts and draft lanes are optional."""
    width = decoder.width if decoder.gang else 1
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
