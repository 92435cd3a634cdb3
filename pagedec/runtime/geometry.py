"""What an engine must know of the device that carries out its steps: numbers and names, no tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pagedec.runtime.pool import KvPool


@dataclass(frozen=True, slots=True)
class LaneGeometry:
    """One lane: the blocks of its pool, the token ids its model knows, the tokens of the longest sequence it reads, and
    the blocks that the host's memory keeps for it; how far its slots lag behind their tokens."""

    num_blocks: int
    vocab_size: int
    max_model_len: int
    num_offload_blocks: int = 0
    lag: int = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """A worker's sizes. `eos_token_ids`: the tokens that end an answer by the model's own files."""

    lanes: dict[str, LaneGeometry]
    kv_cache: KvPool
    eos_token_ids: tuple[int, ...]
    isa: str
    """Instruction set of the compiled kernels, or "reference"."""
    dtype: str
    quantization: str | None
    num_threads: int
    world: int = 1
    """Ranks that share the target."""
    model: str = ""
    """A digest of the target: its configuration, weights and vocabulary."""
    numerics: str = ""
    """A digest of all that a token's bits depend on beside the model: see `fingerprint.py`."""
    kv_cache_dtype: str = "auto"
    overlaps: bool = False
    """Its device carries out steps by itself: the next one can be begun before a step is answered."""

    def to_json(self) -> str:
        """All of it, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Geometry:
        """What `to_json` was called on."""
        values: dict[str, Any] = json.loads(text)
        lanes = {name: LaneGeometry(**lane) for name, lane in values.pop("lanes").items()}
        kv_cache, ends = KvPool(**values.pop("kv_cache")), tuple(values.pop("eos_token_ids"))
        return cls(lanes=lanes, kv_cache=kv_cache, eos_token_ids=ends, **values)

    def __str__(self) -> str:
        weights = f"{self.quantization} and " if self.quantization else ""
        ranks = f" of {self.world} ranks" if self.world > 1 else ""
        kv = f", KV in {self.kv_cache_dtype}," if self.kv_cache_dtype != "auto" else ""
        return f"{weights}{self.dtype}{kv} on {self.isa}{ranks}"
