"""The kernels' meaning as a backend: what runs where nothing could be compiled, and what the compiled kernels are
compared with.

Slow, and exact in the same sense: a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneForward
from pagedec.kernels import reference, reference_best, reference_processing, reference_readout, reference_verify
from pagedec.kernels.arena import trim
from pagedec.kernels.backend import (
    INT8_QUANTIZATIONS,
    AttentionShape,
    CacheTensors,
    Drafted,
    checked_quantization,
)
from pagedec.kernels.blocks import Blocks, segments_of
from pagedec.kernels.experts import Matrices
from pagedec.kernels.fallback_program import Packed, ReferencePlan, ReferenceProgram
from pagedec.kernels.fp8 import Fp8
from pagedec.kernels.host import HostBackend
from pagedec.kernels.link import Link
from pagedec.kernels.processing import FlatRules, lse_of, named, rows_within
from pagedec.kernels.records import KvKind
from pagedec.kernels.reference_blocks import BlockLinear
from pagedec.kernels.reference_linear import Int8Linear, Int8WeightOnlyLinear, TorchPackedLinear

_log = logging.getLogger(__name__)


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

    def pack_blocks(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None) -> Packed:
        if isinstance(parts[0], Fp8):
            return self.pack(Blocks.concat(parts).dequantize(), bias)
        return BlockLinear(segments_of(parts), bias)

    def pack_experts(
        self, count: int, matrices: Matrices, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> list[Packed]:
        biases = [None] * count if bias is None else list(bias)
        return [
            self.pack_blocks([matrix], own) if isinstance(matrix, Blocks) else self.pack(matrix, own, quantization)
            for matrix, own in zip(matrices, biases, strict=True)
        ]

    def settle(self) -> None:
        trim()

    def program(self) -> ReferenceProgram:
        return ReferenceProgram(self)

    def plan(self, shape: AttentionShape) -> ReferencePlan:
        return ReferencePlan(shape)

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        reference.kv_copy(cache.k, cache.v, torch.tensor(src), torch.tensor(dst), cache.tokens, cache.features)

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
