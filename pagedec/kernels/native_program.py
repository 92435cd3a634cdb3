"""What the compiled kernels carry out in one call: argument records over buffers, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from ctypes import Structure
from typing import TYPE_CHECKING

import torch

from pagedec.kernels import native_experts, native_lora, native_rows
from pagedec.kernels.addresses import DTYPES, address
from pagedec.kernels.backend import NO_NORMS, CacheTensors, HeadNorms, Rope, are_of_all_heads
from pagedec.kernels.library import (
    AddPartsArgs,
    AllGatherArgs,
    AttentionArgs,
    EmbedArgs,
    Epilogue,
    GatherArgs,
    GemmArgs,
    JoinPartsArgs,
    LayerNormArgs,
    MeetArgs,
    OpList,
    RmsNormArgs,
    RopeKvWriteArgs,
    SoftCapArgs,
)
from pagedec.kernels.link import Link
from pagedec.kernels.native_plan import NativePlan
from pagedec.kernels.native_weight import NativeExperts, NativeWeight, blocks_of_table
from pagedec.kernels.sized_lists import SizedLists, SizedRecords

if TYPE_CHECKING:
    from pagedec.kernels.native import NativeBackend


class NativeProgram:
    """Argument records in order; `run` is one call into the library, in one parallel region."""

    def __init__(self, backend: NativeBackend) -> None:
        self.backend, self._context = backend, backend.context
        self._records: list[object] = []
        self._keep: list[object] = []
        self.linears: list[tuple[GemmArgs, NativeWeight | NativeExperts]] = []
        """Linear layers and their weights, in the order in which they are read."""
        self._cuts: list[tuple[list[object], Callable[[], None]]] = []
        self._parts: list[tuple[OpList | SizedLists, Callable[[], None]]] = []
        self._last: OpList | SizedLists | None = None

    def add(self, record: object, *keep: object) -> None:
        """Record a kernel; what is kept lives as long as the program."""
        self._records.append(record)
        self._keep += keep

    def embed(
        self,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        table: torch.Tensor | NativeWeight,
        out: torch.Tensor,
        slots: torch.Tensor,
        token_plane: torch.Tensor,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
        position_table: torch.Tensor | None = None,
        ids: tuple[int, int] | None = None,
    ) -> None:
        backend, int32 = self.backend, torch.int32
        if isinstance(table, torch.Tensor):
            place, vocab, dim = address(table, backend.dtype, "table"), *table.shape
            first_segment, num_segments = None, 0
        else:
            place, vocab, dim = table.data.data_ptr(), table.n, table.k
            first_segment, num_segments = blocks_of_table(table)
        self.add(
            EmbedArgs(
                address(rows, int32, "rows"),
                address(token_ids, int32, "token_ids"),
                place,
                address(out, torch.float32, "out"),
                address(slots, int32, "slots"),
                address(token_plane, int32, "token_plane"),
                dim,
                vocab,
                int(backend.code),
                scale,
                address(positions, int32, "positions"),
                address(position_table, backend.dtype, "position_table"),
                0 if position_table is None else position_table.shape[0],
                *((0, 0) if ids is None else ids),
                num_segments,
                first_segment,
            ),
            rows,
            token_ids,
            table,
            out,
            slots,
            token_plane,
            positions,
            position_table,
        )

    def rms_norm(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        eps: float,
        row_ids: torch.Tensor | None = None,
        add: bool = False,
    ) -> None:
        f32 = torch.float32
        out_dtype = f32 if add else self.backend.dtype
        self.add(
            RmsNormArgs(
                address(rows, torch.int32, "rows"),
                address(x, f32, "x"),
                address(weight, f32, "weight"),
                address(out, out_dtype, "out"),
                address(row_ids, torch.int32, "row_ids"),
                x.shape[1],
                int(DTYPES[out_dtype]),
                eps,
                int(add),
            ),
            rows,
            x,
            weight,
            out,
            row_ids,
        )

    def layer_norm(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        eps: float,
        row_ids: torch.Tensor | None = None,
    ) -> None:
        backend, f32 = self.backend, torch.float32
        self.add(
            LayerNormArgs(
                address(rows, torch.int32, "rows"),
                address(x, f32, "x"),
                address(weight, f32, "weight"),
                address(bias, f32, "bias"),
                address(out, backend.dtype, "out"),
                address(row_ids, torch.int32, "row_ids"),
                x.shape[1],
                int(backend.code),
                eps,
                0,
            ),
            rows,
            x,
            weight,
            bias,
            out,
            row_ids,
        )

    def soft_cap(self, rows: torch.Tensor, x: torch.Tensor, cap: float) -> None:
        record = SoftCapArgs(address(rows, torch.int32, "rows"), address(x, torch.float32, "x"), x.shape[1], cap)
        self.add(record, rows, x)

    def gemm(
        self, rows: torch.Tensor, x: torch.Tensor, weight: NativeWeight, y: torch.Tensor, epilogue: Epilogue
    ) -> GemmArgs:
        """The record of a linear layer."""
        backend = self.backend
        return GemmArgs(
            address(rows, torch.int32, "rows"),
            address(x, backend.dtype, "x"),
            weight.data.data_ptr(),
            address(weight.bias, torch.float32, "bias"),
            y.data_ptr(),
            weight.n,
            weight.k,
            int(backend.code),
            int(DTYPES[y.dtype]),
            int(epilogue),
            int(weight.quantization),
            None,
            0,
            *weight.named_segments(),
            len(x),
        )

    def linear(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: NativeWeight,
        y: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        record = self.gemm(rows, x, weight, y, epilogue)
        self.linears.append((record, weight))
        self.add(record, rows, x, weight, y)

    route, experts, combine = native_experts.route, native_experts.experts, native_experts.combine
    lora = native_lora.lora
    copy_rows, spread_logits = native_rows.copy_rows, native_rows.spread_logits

    def rope_kv_write(
        self,
        rows: torch.Tensor,
        qkv: torch.Tensor,
        q: torch.Tensor,
        cache: CacheTensors,
        layer: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: Rope,
        norms: HeadNorms = NO_NORMS,
    ) -> None:
        backend, int32 = self.backend, torch.int32
        self.add(
            RopeKvWriteArgs(
                address(rows, int32, "rows"),
                address(qkv, backend.dtype, "qkv"),
                address(q, backend.dtype, "q"),
                cache.k[layer].data_ptr(),
                cache.v[layer].data_ptr(),
                address(positions, int32, "positions"),
                address(slots, int32, "slots"),
                address(rope.cos_sin, torch.float32, "cos_sin"),
                address(norms[0], torch.float32, "q_norm"),
                address(norms[1], torch.float32, "k_norm"),
                q.shape[1] // cache.head_dim,
                cache.num_kv_heads,
                cache.head_dim,
                rope.rotary_dim,
                cache.block_size,
                int(backend.code),
                int(rope.interleaved),
                norms[2],
                int(cache.kind),
                int(are_of_all_heads(norms, cache.head_dim)),
            ),
            rows,
            qkv,
            q,
            cache,
            positions,
            slots,
            rope,
            norms,
        )

    def attention(
        self,
        rows: torch.Tensor,
        plan: NativePlan,
        q: torch.Tensor,
        cache: CacheTensors,
        layer: int,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        backend = self.backend
        self.add(
            AttentionArgs(
                address(rows, torch.int32, "rows"),
                plan.plan.handle,
                address(q, backend.dtype, "q"),
                cache.k[layer].data_ptr(),
                cache.v[layer].data_ptr(),
                address(out, backend.dtype, "out"),
                None if sinks is None else address(sinks, torch.float32, "sinks"),
            ),
            rows,
            plan,
            q,
            cache,
            out,
            sinks,
        )
        beside = plan.beside(q, cache, layer, out)
        if beside is not None:
            self._send(beside)

    def sum_parts(self, rows: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        link, (world, most, dim) = self._meet(parts), parts.shape

        def added(given: torch.Tensor, stride: int) -> AddPartsArgs:
            own, places = address(rows, torch.int32, "rows"), address(out, torch.float32, "out")
            return AddPartsArgs(own, address(given, torch.float32, "parts"), places, stride, dim, world, int(add), 0)

        received, own = link.received, parts[link.rank].data_ptr()
        if received is None:
            if link.arrivals is None:
                self._send(lambda: link.gather(parts, int(rows) * dim))
            self.add(added(parts, parts.stride(0)), rows, parts, out)
            return

        def exchanged(n: int) -> list[Structure]:
            return [AllGatherArgs(own, received.data_ptr(), n * dim), added(received, n * dim)]

        self.add(SizedRecords(rows, most, 2, exchanged), rows, parts, received, out)

    def join_parts(self, rows: torch.Tensor, parts: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
        link, each = self._meet(parts), self.backend.place(torch.tensor(widths, dtype=torch.int32))
        num, widest = len(widths), max(widths)

        def joined(given: torch.Tensor, stride: int) -> list[Structure]:
            own, places = address(rows, torch.int32, "rows"), address(out, torch.float32, "out")
            columns = address(each, torch.int32, "widths")
            given_at = address(given, torch.float32, "parts")
            return [JoinPartsArgs(own, given_at, columns, places, stride, sum(widths), num)] * (link.rank == 0)

        received, own = link.received, parts[link.rank].data_ptr()
        if received is not None:

            def exchanged(n: int) -> list[Structure]:
                to = received.data_ptr() if link.rank == 0 else None
                return [GatherArgs(own, to, n * widest), *joined(received, n * widest)]

            self.add(SizedRecords(rows, parts.shape[1] // widest, 4, exchanged), rows, parts, received, each, out)
            return
        if link.arrivals is None:
            self._send(lambda: link.gather_first(parts, int(rows) * widest))
        for record in joined(parts, parts.stride(0)):
            self.add(record, rows, parts, each, out)
        self._meet(parts)  # nobody writes the next rows before these are read

    def _meet(self, parts: torch.Tensor) -> Link:
        """Where parts lie in memory that all ranks have mapped, let all have written theirs."""
        link = self.backend.link
        assert link is not None, "the backend has no ranks beside it"
        if link.arrivals is not None:
            place = address(link.arrivals, torch.int32, "arrivals")
            self.add(MeetArgs(place, link.seconds, link.rank, link.world), link.arrivals, parts)
        return link

    def _send(self, between: Callable[[], None]) -> None:
        """Go out of the library in the middle of the list: what follows is carried out when `between` has returned."""
        self._cuts.append((self._records, between))
        self._records = []

    def finish(self) -> None:
        """Tell each linear layer which weight follows, so that its first panels are on their way, and fix the lists."""
        for (record, _), (_, following) in itertools.pairwise(self.linears):
            if isinstance(following, NativeExperts):
                continue  # which of them nobody knows
            record.next_packed, record.next_bytes = following.data.data_ptr(), len(following.data)
        self._parts = [(self._list_of(records), between) for records, between in self._cuts]
        self._last = self._list_of(self._records)

    def _list_of(self, records: Sequence[object]) -> OpList | SizedLists:
        if any(isinstance(record, SizedRecords) for record in records):
            return SizedLists(records, self.backend.count)
        return OpList(records)  # type: ignore[arg-type]

    @property
    def is_cut(self) -> bool:
        """Whether it is several lists, between which the host has work."""
        return bool(self._cuts)

    @property
    def ops(self) -> OpList:
        """The list as the library takes it, of a model that is in one piece."""
        assert isinstance(self._last, OpList) and not self._parts, "the program is not finished, or is several lists"
        return self._last

    def run(self) -> None:
        assert self._last is not None, "the program is not finished"
        for ops, between in self._parts:
            self._context.run(ops if isinstance(ops, OpList) else ops.now())
            between()
        self._context.run(self._last if isinstance(self._last, OpList) else self._last.now())
