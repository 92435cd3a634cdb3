"""How large the KV pool is made, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagedec.config import CacheConfig
from pagedec.errors import InvalidArgument, counted
from pagedec.runtime.memory import GIB, Memory, available_memory

SHARE = 4  # the pool takes a quarter of the available memory where nothing is said ...
LIMIT = 4 * GIB  # ... and at most this many bytes: pages are touched only as blocks are used, but all of them in time
CONTEXT_SHARE = 2  # one whole context may take half of the available memory
MIN_BLOCKS = 2  # one for tokens, and one for the copy of a shared block


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV blocks of the target model: `num_blocks` of `block_size` tokens, `num_bytes` in all, and why so many.

    Memory is taken as blocks are used. One block is kept for copies, so a single sequence ends at `max_sequence`
    tokens.
    """

    num_blocks: int
    block_size: int
    num_bytes: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.num_blocks * self.block_size

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence that the pool can hold."""
        return (self.num_blocks - 1) * self.block_size

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks, {self.num_tokens} tokens, {self.num_bytes / 2**20:.1f} MiB"

    def complaint(self, max_model_len: int) -> str | None:
        """What is to be said of a pool that cuts answers short; None: it holds a whole context."""
        if self.max_sequence >= max_model_len:
            return None
        return (
            f"the KV pool holds less than one context: sequences end at {self.max_sequence} tokens, max_model_len is "
            f"{max_model_len}; the pool has {self} ({self.reason}): give it more with num_blocks, kv_cache_memory or "
            f"memory_utilization, or lower max_model_len"
        )


def default_bytes(memory: Memory) -> tuple[int, str]:
    """The most that a pool takes where nothing is said, and why."""
    quarter = (memory.num_bytes // SHARE, f"a quarter of the {memory}")
    return min(quarter, (LIMIT, f"{LIMIT // GIB} GiB are the most where nothing is said"))


def whole_bytes(memory: Memory, part: float = 1.0) -> tuple[int, str]:
    """The same where nobody else needs the memory, and all of it is taken at once: a device's own. `part`: what another
    lane leaves of it."""
    if part == 1.0:
        return memory.num_bytes, f"all of the {memory}"
    return int(memory.num_bytes * part), f"what a draft model's KV leaves of the {memory}"


def choose_pool(
    config: CacheConfig,
    block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    available: Callable[[], Memory] = available_memory,
    taken: int = 0,
    default: Callable[[Memory], tuple[int, str]] = default_bytes,
) -> KvPool:
    """The pool that is asked for; where nothing is said, what the available memory allows and the requests can use.

    `taken`: bytes of the memory available that another pool will use; `default`: how much of it is taken where nothing
    is said, and why. Raises `InvalidArgument` for a size below two blocks.
    """

    def pool(num_blocks: int, reason: str) -> KvPool:
        return KvPool(num_blocks, config.block_size, num_blocks * block_bytes, reason)

    def checked(field: str, num_blocks: int, reason: str) -> KvPool:
        if num_blocks < MIN_BLOCKS:
            share = f"; it is {reason}" if field == "memory_utilization" else ""
            limit = f"must be at least {MIN_BLOCKS} blocks of {block_bytes} bytes{share}"
            raise InvalidArgument(field, getattr(config, field), limit)
        return pool(num_blocks, reason)

    if config.num_blocks is not None:
        return checked("num_blocks", config.num_blocks, "as num_blocks says")
    if config.kv_cache_memory is not None:
        return checked("kv_cache_memory", config.kv_cache_memory // block_bytes, "as kv_cache_memory says")
    memory = available()
    memory = replace(memory, num_bytes=max(0, memory.num_bytes - taken))
    if config.memory_utilization is not None:
        share = config.memory_utilization
        return checked("memory_utilization", int(memory.num_bytes * share) // block_bytes, f"{share:g} of the {memory}")
    context = -(-max_model_len // config.block_size)
    num_bytes, reason = default(memory)
    most = (
        max_num_seqs * context + 1,
        f"all that {counted(max_num_seqs, 'sequence')} of {counted(max_model_len, 'token')} can use",
    )
    num_blocks, reason = min((num_bytes // block_bytes, reason), most)
    whole = min(
        (memory.num_bytes // CONTEXT_SHARE // block_bytes, f"half of the {memory}"), (context + 1, "one whole context")
    )
    if whole[0] > num_blocks:
        num_blocks, reason = whole
    return pool(max(MIN_BLOCKS, num_blocks), reason)
