"""What the scheduler may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if "target" not in self.num_blocks:
            raise InvalidArgument("num_blocks", dict(self.num_blocks), 'must name the lane "target"')
        for lane, num_blocks in self.num_blocks.items():
            if num_blocks < 1:
                raise InvalidArgument(f"num_blocks[{lane!r}]", num_blocks, "must be at least 1")
        for name in ("vocab_size", "block_size", "max_blocks_per_table", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "must be at least 1")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise InvalidArgument("max_chunk", self.max_chunk, "must be at least 1, or None")

    @property
    def chunk(self) -> int:
        """The most pending tokens of one branch in one step."""
        return self.max_num_batched_tokens if self.max_chunk is None else self.max_chunk
