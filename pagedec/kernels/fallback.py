"""The kernels' meaning as a backend: what runs where nothing could be compiled, and what the compiled kernels are
compared with.

Slow, and exact in the same sense: a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional

from pagedec.core.forward import NO_INTS, LaneForward
from pagedec.kernels import reference, reference_best, reference_processing, reference_readout, reference_verify
from pagedec.kernels.arena import trim
from pagedec.kernels.backend import (
    INT8_QUANTIZATIONS,
    NO_NORMS,
    AttentionShape,
    CacheTensors,
    Drafted,
    HeadNorms,
    Rope,
    checked_quantization,
)
from pagedec.kernels.blocks import Blocks, segments_of
from pagedec.kernels.host import HostBackend
from pagedec.kernels.link import Link
from pagedec.kernels.processing import FlatRules, lse_of, named, rows_within
from pagedec.kernels.records import Epilogue, KvKind
from pagedec.kernels.reference_attention import paged_attention
from pagedec.kernels.reference_blocks import BlockLinear
from pagedec.kernels.reference_linear import Int8Linear, Int8WeightOnlyLinear, TorchPackedLinear, gated_product

_log = logging.getLogger(__name__)


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


class ReferenceProgram:
    """Kernels as closures over their buffers, called in order."""

    def __init__(self, backend: ReferenceBackend) -> None:
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
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        row_ids: torch.Tensor | None = None,
        add: bool = False,
    ) -> None:
        def run() -> None:
            n = int(rows)
            chosen = x[:n] if row_ids is None else x[row_ids[:n].long()]
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

    def linear(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: TorchPackedLinear | Int8Linear | Int8WeightOnlyLinear | BlockLinear,
        y: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        def run() -> None:
            n = int(rows)
            product = weight(x[:n])
            if epilogue == Epilogue.ADD:
                y[:n] += product.float()
            elif epilogue == Epilogue.STORE:
                y[:n] = product
            elif epilogue == Epilogue.GELU:
                for i in range(n):  # torch's vectors end elsewhere in a longer array
                    y[i] = functional.gelu(product[i], approximate="tanh")
            else:
                y[:n] = gated_product(product, gelu=epilogue == Epilogue.GELU_MUL)

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


class ReferenceBackend(HostBackend):
    """Everything in torch and numpy. `varying` holds the linear shapes (n, k) of which torch does not keep a row's
    bits."""

    def __init__(self, dtype: torch.dtype, quantization: str | None = None, kv_kind: KvKind = KvKind.PLAIN) -> None:
        self.device, self.kv_kind = 0, kv_kind
        self.name, self.dtype, self.quantization = "reference", dtype, checked_quantization(quantization)
        self.link: Link | None = None
        self.varying: set[tuple[int, int]] = set()
        self._probed: set[tuple[int, int]] = set()

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> TorchPackedLinear | Int8Linear | Int8WeightOnlyLinear:
        """Pack, and probe each shape of torch's once: whether results are exact depends on the machine's library."""
        if checked_quantization(quantization, INT8_QUANTIZATIONS) == "int8":
            return Int8Linear(weight, bias)
        if quantization is not None:
            linear = Int8WeightOnlyLinear(weight, bias)
            self._probe(linear.product)
            return linear
        plain = TorchPackedLinear(weight.to(self.dtype), bias)
        self._probe(plain)
        return plain

    def _probe(self, linear: TorchPackedLinear) -> None:
        shape, dtype = (linear.n, linear.k), linear.weight.dtype
        if shape in self._probed:
            return
        self._probed.add(shape)
        if not linear.probe_invariance():
            self.varying.add(shape)
            _log.warning("torch's linear layer of shape %s x %s is not batch-invariant in %s", *shape, dtype)

    def pack_blocks(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None) -> BlockLinear:
        return BlockLinear(segments_of(parts), bias)

    def settle(self) -> None:
        trim()

    def program(self) -> ReferenceProgram:
        return ReferenceProgram(self)

    def plan(self, shape: AttentionShape) -> ReferencePlan:
        return ReferencePlan(shape)

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        reference.kv_copy(cache.k, cache.v, torch.tensor(src), torch.tensor(dst), cache.tokens)

    def process_logits(
        self,
        logits: torch.Tensor,
        start: int,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, FlatRules],
    ) -> None:
        processing = forward.processing
        if processing is None:
            return
        picked = rows_within(processing, start, start + len(logits))
        flat, rule_ids = named(processing.rule_ids[picked], rules)
        lse = lse_of(self, logits, start, processing, picked)
        for i in range(picked.start, picked.stop):
            row, branch = int(processing.rows[i]), int(processing.branches[i])
            history = reference_processing.history(
                int(forward.read_rows[row]),
                branch,
                forward.row_indptr,
                forward.kv_len,
                forward.block_table,
                forward.parents,
                cache.tokens.numpy(),
                cache.block_size,
            )
            reference_processing.process(
                logits.numpy()[row - start],
                history,
                int(processing.prompt_lengths[i]),
                flat[rule_ids[i - picked.start]],
                None if lse is None else lse[i - picked.start],
            )

    def restrict(
        self,
        logits: torch.Tensor,
        places: np.ndarray | None = None,
        words: np.ndarray | None = None,
        banned_rows: np.ndarray = NO_INTS,
        banned_tokens: np.ndarray = NO_INTS,
        num_drawn: int | None = None,
    ) -> None:
        reference_readout.restrict(logits.numpy(), places, words, banned_rows, banned_tokens, num_drawn)

    def copy_rows(self, src: torch.Tensor, src_rows: np.ndarray, dst: torch.Tensor, dst_rows: np.ndarray) -> None:
        dst.numpy()[dst_rows] = src.numpy()[src_rows]

    def pick(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return logits.numpy()[rows, tokens]

    def pick_ranked(
        self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray | torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        own = np.asarray(tokens)
        return self.pick(logits, rows, own), reference_readout.ranks(logits.numpy(), rows, own)

    def sample(self, logits: torch.Tensor, draws: np.ndarray) -> np.ndarray:
        return reference_readout.sample(logits.numpy(), draws)

    def verify(self, logits: torch.Tensor, draws: np.ndarray, drafted: Drafted) -> np.ndarray:
        return reference_verify.verify(logits.numpy(), draws, drafted.logits.numpy(), drafted.draws, drafted.tokens)

    def topk(self, logits: torch.Tensor, row_ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return reference_readout.topk_lse(logits.numpy(), k, row_ids)

    def best(
        self, logits: torch.Tensor, lse: np.ndarray | None, rows: np.ndarray, groups: np.ndarray
    ) -> list[np.ndarray]:
        if lse is None:
            lse = self.topk(logits, rows["row"], 0)[2]
        return reference_best.best(logits.numpy(), lse.astype(np.float32), rows, groups)
