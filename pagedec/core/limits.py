"""What the scheduler may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedec.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The size of everything the scheduler hands out. `num_blocks` names a lane's pool; "target" must be among them."""

    num_blocks: Mapping[str, int]
    vocab_size: int
    block_size: int = 16
    max_blocks_per_table: int = 512
    max_num_seqs: int = 256
    """Branches in one step."""
    max_num_batched_tokens: int = 512
    """Rows in one step, on each lane."""
    max_chunk: int | None = None
    """Pending tokens of one branch in one step; None: as many as there are rows."""
    enable_prefix_caching: bool = True
    array_settle: bool = True
    """Plan and settle plain sampling without queries and verdicts. The result is the same."""
    max_positions: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the longest sequence that a lane's model can read; of a lane that is not named, as many as a table holds."""
    vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    """Token ids that a lane's model knows; of a lane that is not named, `vocab_size`."""

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
