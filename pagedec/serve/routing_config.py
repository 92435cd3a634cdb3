"""What a router may be told."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.fields import MAX_UINT64, Integer, Number, check_fields, option, strict


@strict
@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How prompts are cut into chunks, what is remembered of each replica, and what outweighs a prefix. Raises
    `InvalidArgument`."""

    chunk_bytes: int = option(256, Integer("bytes of text, or of a chat's messages, in a chunk", low=1, high=2**20))
    chunk_ids: int = option(64, Integer("token ids in a chunk; as many tokens as chunk_bytes hold", low=1, high=2**20))
    max_chunks: int = option(256, Integer("leading chunks of a prompt that are looked at", low=1, high=2**16))
    replica_chunks: int = option(
        8192, Integer("chunks that a replica is taken to hold, where it does not say how many tokens", low=1)
    )
    num_seats: int = option(64, Integer("requests that a replica is taken to run at once, until it says", low=1))
    min_match: float = option(
        0.1, Number("share of a prompt's chunks that must match, or load decides alone", low=0, high=1)
    )
    balance_abs: int = option(
        8, Integer("requests that a replica may have beyond its part of the least loaded one's, and keep its prefixes")
    )
    balance_rel: float = option(
        1.5, Number("times the least loaded one's requests that it may have, and keep its prefixes", low=1, high=1e6)
    )
    max_kv_usage: float = option(
        0.95, Number("share of its blocks in use from which a replica has no room for its prefixes", above=0, high=1)
    )
    seed: int = option(0, Integer("of the draws between two replicas", high=MAX_UINT64))

    def __post_init__(self) -> None:
        check_fields(self)
