"""The loop of a CUDA kernel over the flat attention plan, in numpy: one thread block for each work item and virtual
head.

What csrc/plan/plan.h says is all that is used: the words of the plan, q, and K and V by slot. The words are copied to
an unrelated place first, as they would be to a device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE, CHUNK, MMA_ROWS = 64, 512, 16
MAGIC, VERSION = 0x6E6C7064, 2
HEADER = (
    "magic", "version", "num_words", "q_heads", "kv_heads", "head_dim", "block_size", "dtype", "kv_kind", "window",
    "scale_bits", "soft_cap_bits", "num_branches", "num_rows", "group", "head_parts", "num_workers", "num_partials",
    "num_split_partials",
)  # fmt: skip
SECTIONS = {
    "rows": ("row_id", "begin", "end", "branch_id", "partial", "split", "merge_chunk"),
    "pieces": ("row0", "num_rows", "unit0", "num_units", "item0", "num_items"),
    "units": ("tile", "row0", "row1", "path", "path_lane", *(f"block{i}" for i in range(8))),
    "items": ("piece", "chunk", "unit0", "num_units"),
    "spans": ("piece", "head", "item0", "num_items"),
    "worker_indptr": ("span",),
    "splits": ("row",),
    "paths": ("slot",),
}
Array = npt.NDArray[np.float64]
Record = dict[str, int]


@dataclass(slots=True)
class FlatPlan:
    """The plan's words, taken apart."""

    header: Record
    sections: dict[str, list[Record]]

    @classmethod
    def parse(cls, words: npt.NDArray[np.int32]) -> FlatPlan:
        """Read the header and every section; the sections must fill the words without a gap."""
        header = {name: int(words[i]) for i, name in enumerate(HEADER)}
        assert (header["magic"], header["version"], header["num_words"]) == (MAGIC, VERSION, len(words))
        sections: dict[str, list[Record]] = {}
        end = len(HEADER) + 2 * len(SECTIONS)
        for i, (name, fields) in enumerate(SECTIONS.items()):
            offset, count = (int(word) for word in words[len(HEADER) + 2 * i :][:2])
            assert offset == end, name
            end = offset + count * len(fields)
            table = words[offset:end].reshape(count, len(fields)).tolist()
            sections[name] = [dict(zip(fields, record, strict=True)) for record in table]
        assert end == len(words)
        return cls(header, sections)

    def heads(self, virtual_head: int) -> tuple[int, list[int]]:
        """Return a virtual head's kv head and its query heads."""
        group, parts = self.header["group"], self.header["head_parts"]
        kv_head, part = divmod(virtual_head, parts)
        return kv_head, [kv_head * group + g for g in range(group * part // parts, group * (part + 1) // parts)]


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


class _State:
    """A thread block's registers: (o, m, l) of packed rows, natural logarithms."""

    def __init__(self, num_packed: int, head_dim: int) -> None:
        self.o = np.zeros((num_packed, head_dim))
        self.m = np.full(num_packed, -np.inf)
        self.l = np.zeros(num_packed)

    def add(self, at: slice, logits: Array, v: Array) -> None:
        """Take in one tile for some packed rows. logits [packed, lanes], minus infinity where masked; v finite."""
        top = np.maximum(self.m[at], logits.max(axis=1))
        shift = np.where(np.isneginf(top), 0.0, top)
        old, p = np.exp(self.m[at] - shift), np.exp(logits - shift[:, None])
        self.o[at] = self.o[at] * old[:, None] + p @ v
        self.l[at] = self.l[at] * old + p.sum(axis=1)
        self.m[at] = top


class Emulation:
    """One run of the kernel. k, v: [num_slots, kv_heads, head_dim]; unused slots may hold NaN."""

    def __init__(self, words: npt.NDArray[np.int32], q: Array, k: Array, v: Array) -> None:
        self.plan = FlatPlan.parse(np.array(words, copy=True))
        header = self.plan.header
        self.q, self.k, self.v = q, k, v
        self.head_dim = header["head_dim"]
        self.scale, self.soft_cap = _float(header["scale_bits"]), _float(header["soft_cap_bits"])
        self.out = np.full(q.shape, np.nan)
        size = (header["num_partials"], header["q_heads"])
        self.partial_o, self.partial_m, self.partial_l = (
            np.full((*size, self.head_dim), np.nan), np.full(size, np.nan), np.full(size, np.nan)
        )  # fmt: skip
        self.tiles_fetched = 0

    def run(self) -> Array:
        """Run every thread block, in no order that matters, then the merge."""
        header = self.plan.header
        grid = [
            (item, head)
            for item in range(len(self.plan.sections["items"]))
            for head in range(header["kv_heads"] * header["head_parts"])
        ]
        for item, head in reversed(grid):
            self._block(self.plan.sections["items"][item], head)
        for row in self.plan.sections["rows"]:
            if row["partial"] >= 0:
                self._merge(row)
        return self.out

    def _slots(self, unit: Record, num_lanes: int) -> npt.NDArray[np.int64]:
        size = self.plan.header["block_size"]
        lanes = np.arange(num_lanes)
        blocks = np.array([unit[f"block{i}"] for i in range(-(-TILE // size))], dtype=np.int64)
        slots = blocks[lanes // size] * size + (unit["tile"] * TILE + lanes) % size
        if unit["path"] >= 0:
            for lane in range(unit["path_lane"], num_lanes):
                slots[lane] = self.plan.sections["paths"][unit["path"] + lane - unit["path_lane"]]["slot"]
        return slots

    def _block(self, item: Record, virtual_head: int) -> None:
        piece = self.plan.sections["pieces"][item["piece"]]
        rows = self.plan.sections["rows"][piece["row0"] : piece["row0"] + piece["num_rows"]]
        kv_head, heads = self.plan.heads(virtual_head)
        packed = [(row, head) for row in rows for head in heads]
        state = _State(len(packed), self.head_dim)
        for unit in self.plan.sections["units"][item["unit0"] : item["unit0"] + item["num_units"]]:
            assert unit["tile"] * TILE // CHUNK == item["chunk"]
            self._tile(unit, packed, len(heads), kv_head, state)
        for i, (row, head) in enumerate(packed):
            first, last = row["begin"] // CHUNK, (row["end"] - 1) // CHUNK
            if not first <= item["chunk"] <= last:
                continue
            if row["partial"] < 0:
                self.out[row["row_id"], head] = state.o[i] / state.l[i]
            else:
                at = (row["partial"] + item["chunk"] - first, head)
                assert np.isnan(self.partial_m[at]), "two thread blocks wrote one partial result"
                self.partial_o[at], self.partial_m[at], self.partial_l[at] = state.o[i], state.m[i], state.l[i]

    def _tile(
        self, unit: Record, packed: list[tuple[Record, int]], num_heads: int, kv_head: int, state: _State
    ) -> None:
        start, row0, row1 = unit["tile"] * TILE, unit["row0"] * num_heads, unit["row1"] * num_heads
        ends = [min(TILE, packed[i][0]["end"] - start) for i in range(row0, row1)]
        num_lanes = max(ends)
        if num_lanes <= 0:
            return
        slots = self._slots(unit, num_lanes)
        k, v = self.k[slots, kv_head], self.v[slots, kv_head]  # to shared memory, once for all rows of the unit
        self.tiles_fetched += 1
        lanes = np.arange(num_lanes)
        for first in range(row0 - row0 % MMA_ROWS, row1, MMA_ROWS):
            at = slice(max(first, row0), min(first + MMA_ROWS, row1))
            q = np.stack([self.q[row["row_id"], head] for row, head in packed[at]])
            begin = np.array([row["begin"] - start for row, _ in packed[at]])[:, None]
            end = np.array([row["end"] - start for row, _ in packed[at]])[:, None]
            seen = (lanes >= begin) & (lanes < end)
            logits = (q @ np.where(seen.any(axis=0)[:, None], k, 0.0).T) * self.scale
            if self.soft_cap > 0:
                logits = self.soft_cap * np.tanh(logits / self.soft_cap)
            state.add(at, np.where(seen, logits, -np.inf), np.where(seen.any(axis=0)[:, None], v, 0.0))

    def _merge(self, row: Record) -> None:
        num_chunks = (row["end"] - 1) // CHUNK - row["begin"] // CHUNK + 1
        at = slice(row["partial"], row["partial"] + num_chunks)
        m = self.partial_m[at].max(axis=0)
        weight = np.exp(self.partial_m[at] - m)
        o = (self.partial_o[at] * weight[:, :, None]).sum(axis=0)
        self.out[row["row_id"]] = o / (self.partial_l[at] * weight).sum(axis=0)[:, None]
