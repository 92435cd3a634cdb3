"""A forward as closures over its buffers: programs of the reference kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.nn import functional

from pagedec.kernels import reference, reference_experts, reference_lora
from pagedec.kernels.backend import NO_NORMS, AttentionShape, Backend, CacheTensors, HeadNorms, Rope
from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.link import Link
from pagedec.kernels.lora import LoraWeights
from pagedec.kernels.records import Epilogue
from pagedec.kernels.reference_attention import paged_attention
from pagedec.kernels.reference_blocks import BlockLinear
from pagedec.kernels.reference_linear import Int8Linear, Int8WeightOnlyLinear, TorchPackedLinear, gated_product

Packed: TypeAlias = TorchPackedLinear | Int8Linear | Int8WeightOnlyLinear | BlockLinear


class ReferencePlan:
    """A step's rows, kept until every layer has seen them."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.batch: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None] | None = None

    def update(
        self, row_indptr: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
    ) -> None:
        self.batch = (row_indptr, kv_len, block_table, parents)

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.batch is not None, "no step is planned"
        row_indptr, kv_len, block_table, parents = self.batch
        return paged_attention(q, k_cache, v_cache, self.shape, row_indptr, kv_len, block_table, parents, sinks=sinks)


def _linear(x: torch.Tensor, weight: Packed, y: torch.Tensor, epilogue: Epilogue) -> None:
    product = weight(x)
    if epilogue.is_gated:
        y[:] = gated_product(product, epilogue)
    elif epilogue == Epilogue.ADD:
        y += product.float()
    elif epilogue == Epilogue.GELU:
        for i in range(len(x)):  # torch's vectors end elsewhere in a longer array
            y[i] = functional.gelu(product[i], approximate="tanh")
    else:
        y[:] = product


class ReferenceProgram:
    """Kernels as closures over their buffers, called in order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kernels: list[Callable[[], None]] = []

    def embed(
        self,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        table: torch.Tensor | BlockLinear,
        out: torch.Tensor,
        slots: torch.Tensor,
        token_plane: torch.Tensor,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
        position_table: torch.Tensor | None = None,
        ids: tuple[int, int] | None = None,
    ) -> None:
        if isinstance(table, BlockLinear):
            table = table.dequantize().to(self._backend.dtype)

        def run() -> None:
            n = int(rows)
            out[:n] = reference.embed(
                token_ids[:n],
                table,
                scale,
                slots=slots[:n],
                token_plane=token_plane,
                positions=None if positions is None else positions[:n],
                position_table=position_table,
                ids=ids,
            )

        self._kernels.append(run)

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
        def run() -> None:
            n = int(rows)
            chosen = x[:n] if row_ids is None else x[row_ids[:n].long()]
            if weight is None:
                out[:n] = chosen
                return
            for i in range(n):  # one row at a time: torch may split a sum by how many there are
                normed = reference.rms_norm(chosen[i : i + 1], weight, eps, out_dtype=out.dtype)
                out[i : i + 1] = out[i : i + 1] + normed if add else normed

        self._kernels.append(run)

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
        def run() -> None:
            n = int(rows)
            chosen = x[:n] if row_ids is None else x[row_ids[:n].long()]
            for i in range(n):
                out[i : i + 1] = reference.layer_norm(chosen[i : i + 1], weight, bias, eps, out_dtype=out.dtype)

        self._kernels.append(run)

    def soft_cap(self, rows: torch.Tensor, x: torch.Tensor, cap: float) -> None:
        def run() -> None:
            for i in range(int(rows)):  # torch's vectors end elsewhere in a longer array
                x[i] = reference.soft_cap(x[i], cap)

        self._kernels.append(run)

    def copy_rows(
        self,
        rows: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        src_rows: torch.Tensor | None = None,
        dst_rows: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        def run() -> None:
            n = int(rows)
            own, to = (None if ids is None else ids[:n] for ids in (src_rows, dst_rows))
            reference.copy_rows(src[:n] if own is None else src, dst, own, to, scale)

        self._kernels.append(run)

    def spread_logits(self, rows: torch.Tensor, src: torch.Tensor, places: torch.Tensor, dst: torch.Tensor) -> None:
        def run() -> None:
            n = int(rows)
            dst[:n] = reference.spread_logits(src[:n], places)

        self._kernels.append(run)

    def linear(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: Packed,
        y: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        def run() -> None:
            n = int(rows)
            _linear(x[:n], weight, y[:n], epilogue)

        self._kernels.append(run)

    def lora(
        self,
        rows: torch.Tensor,
        adapters: torch.Tensor,
        x: torch.Tensor,
        weights: LoraWeights,
        low: torch.Tensor,
        y: torch.Tensor,
        epilogue: Epilogue = Epilogue.ADD,
        z: torch.Tensor | None = None,
    ) -> None:
        def run() -> None:
            n = int(rows)
            updated = reference_lora.lora(adapters[:n], x[:n], weights, (y if z is None else z)[:n])
            y[:n] = updated if z is None else gated_product(updated, epilogue)

        self._kernels.append(run)

    def route(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        x: torch.Tensor,
        choice: ExpertChoice,
        routes: Routes,
        bias: torch.Tensor | None = None,
    ) -> None:
        def run() -> None:
            n = int(rows)
            reference_experts.route(logits[:n], x[:n], choice, routes, bias)

        self._kernels.append(run)

    def experts(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: Sequence[Packed],
        routes: Routes,
        y: torch.Tensor,
        epilogue: Epilogue,
    ) -> None:
        def run() -> None:
            first = routes.first.tolist()
            for expert, begin, end in zip(weight, first, first[1:], strict=False):
                if begin < end:
                    _linear(x[begin:end], expert, y[begin:end], epilogue)

        self._kernels.append(run)

    def combine(
        self,
        rows: torch.Tensor,
        y: torch.Tensor,
        routes: Routes,
        out: torch.Tensor,
        add: bool,
        shared: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> None:
        def run() -> None:
            n = int(rows)
            beside = (None, None) if shared is None or gates is None else (shared[:n], gates[:n])
            total = reference_experts.combine(y, routes, n, *beside)
            out[:n] = out[:n] + total if add else total

        self._kernels.append(run)

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
        shape = reference.RopeShape(
            q.shape[1] // cache.head_dim, cache.num_kv_heads, cache.head_dim, rope.interleaved, norms[2]
        )

        def run() -> None:
            n = int(rows)
            q[:n] = reference.rope_kv_write(
                qkv[:n],
                cache.k[layer],
                cache.v[layer],
                positions[:n],
                slots[:n],
                shape,
                cos_sin=rope.cos_sin,
                q_norm=norms[0],
                k_norm=norms[1],
            )

        self._kernels.append(run)

    def attention(
        self,
        rows: torch.Tensor,
        plan: ReferencePlan,
        q: torch.Tensor,
        cache: CacheTensors,
        layer: int,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        def run() -> None:
            n = int(rows)
            out[:n] = plan.attend(q[:n], cache.k[layer], cache.v[layer], sinks).flatten(1).to(out.dtype)

        self._kernels.append(run)

    def sum_parts(self, rows: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        def run() -> None:
            n = int(rows)
            self._link().gather(parts, n * parts.shape[2])
            total = reference.add_parts(parts[:, :n])
            out[:n] = out[:n] + total if add else total

        self._kernels.append(run)

    def join_parts(self, rows: torch.Tensor, parts: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
        def run() -> None:
            n, link = int(rows), self._link()
            link.gather_first(parts, n * max(widths))
            if link.rank == 0:
                out[:n] = reference.join_parts(parts, widths, n)

        self._kernels.append(run)

    def _link(self) -> Link:
        assert self._backend.link is not None, "the backend has no ranks beside it"
        return self._backend.link

    def finish(self) -> None:
        """Nothing is left to prepare."""

    def run(self) -> None:
        for kernel in self._kernels:
            kernel()
