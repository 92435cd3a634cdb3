"""The compiled kernels as a backend: programs of argument records, carried out in one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneForward
from pagedec.kernels import native_weight
from pagedec.kernels.addresses import DTYPES, address, int32
from pagedec.kernels.arena import Arena, trim
from pagedec.kernels.backend import INT8_QUANTIZATIONS, AttentionShape, CacheTensors, Drafted, checked_quantization
from pagedec.kernels.blocks import Blocks, segments_of
from pagedec.kernels.device_memory import HostCall, KernelCall
from pagedec.kernels.experts import Matrices
from pagedec.kernels.fp8 import Fp8
from pagedec.kernels.host import HostBackend
from pagedec.kernels.library import (
    ArgmaxArgs,
    BestArgs,
    KvCopyArgs,
    KvKind,
    Library,
    PickLogitsArgs,
    ProcessLogitsArgs,
    Quantization,
    RestrictLogitsArgs,
    SampleArgs,
    Segment,
    TopkLseArgs,
    VerifyArgs,
)
from pagedec.kernels.link import Link
from pagedec.kernels.native_plan import NativePlan
from pagedec.kernels.native_program import NativeProgram
from pagedec.kernels.native_roll import NativeRoller
from pagedec.kernels.native_rows import copy_rows_args
from pagedec.kernels.native_weight import NativeExperts, NativeWeight, kind_of, shape_of, what_is
from pagedec.kernels.processing import FlatRules, lse_of, named, rows_within
from pagedec.kernels.reference_best import CANDIDATE_DTYPE


class NativeBackend(HostBackend):
    """Compiled kernels of one instruction set, for one dtype, in a context of their own: one thread at a time.

    num_threads 0: OpenMP's own choice. Raises ValueError for a dtype or a quantisation that there is not.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """What its kernels compute in, and read weights in."""

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        quantization: str | None = None,
        num_threads: int = 0,
        device: int = 0,
        kv_kind: KvKind = KvKind.PLAIN,
    ) -> None:
        if dtype not in self.dtypes:
            raise ValueError(f"dtype is {dtype}; these kernels take {', '.join(map(str, self.dtypes))}")
        self.quantization = checked_quantization(quantization)
        self.library, self.dtype, self.code, self.kv_kind = library, dtype, DTYPES[dtype], kv_kind
        self.name, self.context, self.device = library.isa, library.context(num_threads, device), device
        self.arena = Arena()
        self.link: Link | None = None

    def call(self) -> KernelCall:
        """What carries out one kernel on the host's arrays."""
        return HostCall(self.context)

    def storage(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 storage for a packed weight."""
        return self.arena.allocate(num_bytes)

    def take_back(self, storage: torch.Tensor) -> None:
        """Have the storage that was asked for last, which nobody is to keep, for others."""
        self.arena.take_back(storage)

    def count(self, rows: torch.Tensor) -> int:
        """How many rows a counter says there are."""
        return int(rows)

    def map(self, tensor: torch.Tensor) -> None:
        """Let kernels reach a host tensor for as long as there is the backend."""

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> NativeWeight:
        return self._packed(weight, bias, kind_of(checked_quantization(quantization, INT8_QUANTIZATIONS)))

    def _packed(self, matrix: native_weight.Matrix, bias: torch.Tensor | None, kind: Quantization) -> NativeWeight:
        data = self.storage(native_weight.packed_bytes(self.library, matrix, kind, self.code))
        self._pack(matrix, kind, data.data_ptr())
        return NativeWeight(data, self._bias(bias), *shape_of(matrix), kind)

    def _pack(self, matrix: native_weight.Matrix, kind: Quantization, to: int) -> None:
        context = self.context
        if isinstance(matrix, Blocks):
            blocks = self.place(matrix.data.contiguous())
            if isinstance(matrix, Fp8):
                context.pack_fp8(blocks.data_ptr(), matrix.n, matrix.k, to)
            else:
                context.pack_blocks(blocks.data_ptr(), matrix.n, matrix.k, matrix.layout.code, to)
            return
        n, k = matrix.shape
        if kind == Quantization.PLAIN:
            own = self.place(matrix.to(self.dtype).contiguous())
            context.pack(own.data_ptr(), n, k, self.code, to)
            return
        own = self.place(matrix.contiguous() if matrix.dtype in self.dtypes else matrix.float().contiguous())
        pack = context.pack_int8 if kind == Quantization.INT8 else context.pack_int8_weight_only
        pack(own.data_ptr(), n, k, DTYPES[own.dtype], to)

    def _bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else self.place(bias.float().contiguous())

    def pack_blocks(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None) -> NativeWeight:
        if isinstance(parts[0], Fp8):
            whole = native_weight.held(Blocks.concat(parts), self.name)
            return self._packed(whole, bias, native_weight.kind_of_matrix(whole, Quantization.PLAIN))
        joined = segments_of([native_weight.held_blocks(part, self.name) for part in parts])
        sizes = [native_weight.packed_bytes(self.library, part, Quantization.BLOCKS, self.code) for part in joined]
        data, at, first = self.storage(sum(sizes)), 0, 0
        segments = (Segment * len(joined))()
        for segment, part, size in zip(segments, joined, sizes, strict=True):
            segment.format, segment.first_output = int(part.layout.code), first
            self._pack(part, Quantization.BLOCKS, data.data_ptr() + at)
            at, first = at + size, first + part.n
        return NativeWeight(data, self._bias(bias), first, joined[0].k, Quantization.BLOCKS, segments)

    def pack_experts(
        self, count: int, matrices: Matrices, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> NativeExperts:
        own = (native_weight.held(one, self.name) for one in matrices)
        first = next(own)
        kind = native_weight.kind_of_matrix(first, kind_of(checked_quantization(quantization, INT8_QUANTIZATIONS)))
        stride = -(-native_weight.packed_bytes(self.library, first, kind, self.code) // 64) * 64
        data = self.storage(count * stride)
        try:
            for i, matrix in enumerate(itertools.chain([first], own)):
                if what_is(matrix) != what_is(first):
                    raise ValueError(f"expert {i} has {what_is(matrix)}; it must have {what_is(first)}, as the first")
                self._pack(matrix, kind, data.data_ptr() + i * stride)
        except BaseException:
            self.take_back(data)
            raise
        each = NativeWeight(data, self._bias(bias), *shape_of(first), kind, native_weight.segments_of_one(first))
        return NativeExperts(each, count, stride)

    def settle(self) -> None:
        self.arena.settle()
        trim()

    def program(self) -> NativeProgram:
        return NativeProgram(self)

    def roller(
        self,
        programs: Any,
        buffers: Any,
        plans: Sequence[NativePlan],
        cache: CacheTensors,
        num_drawn: int,
        debug: bool = False,
        lag: int = 0,
    ) -> NativeRoller | None:
        lists = [programs.whole, programs.body, programs.head]
        if not all(isinstance(program, NativeProgram) for program in lists):  # a hosted model's: torch carries it out
            return None
        if any(program.is_cut for program in lists):
            return None
        return NativeRoller(self, lists, buffers, plans, cache, num_drawn, debug, lag)

    def plan(self, shape: AttentionShape) -> NativePlan:
        return NativePlan(self.context, shape, self.code, self.kv_kind)

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        call, features = self.call(), cache.features
        call.run(
            KvCopyArgs(
                call.given(np.array([len(src)], np.int32)),
                call.given(int32(src)),
                call.given(int32(dst)),
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                cache.tokens.data_ptr(),
                None if features is None else features.data_ptr(),
                cache.k.stride(0),
                cache.k.shape[0],
                cache.num_kv_heads,
                cache.head_dim,
                cache.block_size,
                int(self.code),
                int(cache.kind),
                0 if features is None else features.shape[1] * features.itemsize,
            )
        )

    def process_logits(
        self,
        logits: torch.Tensor,
        start: int,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, FlatRules],
    ) -> None:
        processing, vocab = forward.processing, logits.shape[1]
        picked = rows_within(processing, start, start + len(logits))
        if processing is None or picked.start == picked.stop:
            return
        flat, rule_ids = named(processing.rule_ids[picked], rules)
        lse = lse_of(self, logits, start, processing, picked)
        rows = processing.rows[picked]
        table, parents, call = forward.block_table, forward.parents, self.call()
        own, places, *rest = (
            call.given(int32(array))
            for array in (
                rows - start,
                rule_ids,
                processing.prompt_lengths[picked],
                processing.branches[picked],
                forward.read_rows[rows],
                forward.row_indptr,
                forward.kv_len,
                table,
            )
        )
        call.run(
            ProcessLogitsArgs(
                call.given(np.array([picked.stop - picked.start], np.int32)),
                address(logits, torch.float32, "logits"),
                own,
                places,
                call.given(np.frombuffer(b"".join(own_rules.record for own_rules in flat), np.uint8)),
                *rest,
                None if parents is None else call.given(int32(parents)),
                address(cache.tokens, torch.int32, "tokens"),
                None if lse is None else call.given(lse),
                len(flat),
                len(forward.kv_len),
                table.shape[1],
                cache.block_size,
                vocab,
                0,
            )
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
        call, vocab = self.call(), logits.shape[1]
        record = RestrictLogitsArgs(
            call.given(np.array([len(logits)], np.int32)), address(logits, torch.float32, "logits"), vocab=vocab
        )
        record.num_drawn = vocab if num_drawn is None else num_drawn
        if places is not None and words is not None:
            record.places, record.num_words = call.given(int32(places)), len(words)
            record.words = call.given(np.ascontiguousarray(words, np.uint32))
        if len(banned_rows):
            record.num_banned = call.given(np.array([len(banned_rows)], np.int32))
            record.banned_rows, record.banned_tokens = call.given(int32(banned_rows)), call.given(int32(banned_tokens))
        call.run(record)

    def copy_rows(self, src: torch.Tensor, src_rows: np.ndarray, dst: torch.Tensor, dst_rows: np.ndarray) -> None:
        call = self.call()
        call.run(
            copy_rows_args(
                call.given(np.array([len(src_rows)], np.int32)),
                src,
                dst,
                call.given(int32(src_rows)),
                call.given(int32(dst_rows)),
            )
        )

    def pick(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._pick(logits, rows, tokens, None)

    def pick_ranked(
        self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray | torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.empty(len(rows), np.int32)
        return self._pick(logits, rows, tokens, ranks), ranks

    def _pick(
        self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray | torch.Tensor, ranks: np.ndarray | None
    ) -> np.ndarray:
        values, call = np.empty(len(rows), np.float32), self.call()
        if isinstance(tokens, torch.Tensor):
            own = address(tokens, torch.int32, "tokens")
        else:
            own = call.given(int32(tokens))
        call.run(
            PickLogitsArgs(
                call.given(np.array([len(rows)], np.int32)),
                address(logits, torch.float32, "logits"),
                call.given(int32(rows)),
                own,
                call.wanted(values),
                None if ranks is None else call.wanted(ranks),
                logits.shape[1],
                0,
            )
        )
        return values

    def sample(self, logits: torch.Tensor, draws: np.ndarray) -> np.ndarray:
        out, call = np.empty(len(draws), np.int32), self.call()
        self._sample(call, logits, draws, call.wanted(out))
        return out

    def sample_into(self, logits: torch.Tensor, draws: np.ndarray, tokens: torch.Tensor) -> None:
        """The same into int32 [num_draws] where kernels work; the call may return before that is done."""
        self._sample(self.call(), logits, draws, address(tokens, torch.int32, "tokens"))

    def _sample(self, call: KernelCall, logits: torch.Tensor, draws: np.ndarray, out: int | None) -> None:
        count, vocab = call.given(np.array([len(draws)], np.int32)), logits.shape[1]
        plain = not any(draws["temperature"].tolist()) and draws["row"].tolist() == [*range(len(draws))]
        if plain and not any(draws["rank"].tolist()):
            call.run(ArgmaxArgs(count, logits.data_ptr(), out, vocab, 0))
        else:
            given = call.given(np.ascontiguousarray(draws))
            call.run(SampleArgs(count, given, logits.data_ptr(), out, vocab, 0))

    def verify(self, logits: torch.Tensor, draws: np.ndarray, drafted: Drafted) -> np.ndarray:
        out, call = np.empty(len(draws), np.int32), self.call()
        call.run(
            VerifyArgs(
                call.given(np.array([len(draws)], np.int32)),
                call.given(np.ascontiguousarray(draws)),
                call.given(np.ascontiguousarray(drafted.draws)),
                call.given(int32(drafted.tokens)),
                address(logits, torch.float32, "logits"),
                address(drafted.logits, torch.float32, "draft_logits"),
                call.wanted(out),
                logits.shape[1],
                drafted.logits.shape[1],
            )
        )
        return out

    def topk(self, logits: torch.Tensor, row_ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, call = len(row_ids), self.call()
        ids, values, lse = np.empty((n, k), np.int32), np.empty((n, k), np.float32), np.empty(n, np.float32)
        call.run(
            TopkLseArgs(
                call.given(np.array([n], np.int32)),
                logits.data_ptr(),
                call.given(int32(row_ids)),
                call.wanted(ids),
                call.wanted(values),
                call.wanted(lse),
                logits.shape[1],
                k,
            )
        )
        return ids, values, lse

    def best(
        self, logits: torch.Tensor, lse: np.ndarray | None, rows: np.ndarray, groups: np.ndarray
    ) -> list[np.ndarray]:
        n, vocab, call = len(rows), logits.shape[1], self.call()
        most = groups["k"].tolist()
        if max(most, default=0) > vocab:  # there may be fewer
            groups = groups.copy()
            groups["k"] = np.minimum(groups["k"], (groups["stop"] - groups["first"]).astype(np.int64) * vocab)
            most = groups["k"].tolist()
        found, counts = np.empty(sum(most), CANDIDATE_DTYPE), np.zeros(len(groups), np.int32)
        own_lse = call.wanted(np.empty(n, np.float32)) if lse is None else call.given(np.ascontiguousarray(lse))
        call.run(
            BestArgs(
                call.given(np.array([n], np.int32)),
                logits.data_ptr(),
                own_lse,
                call.given(np.ascontiguousarray(rows)),
                call.given(np.ascontiguousarray(groups)),
                call.wanted(found),
                call.wanted(counts),
                len(groups),
                vocab,
                int(lse is not None),
                0,
            )
        )
        ends = accumulate(most)
        return [found[end - k : end - k + size] for end, k, size in zip(ends, most, counts.tolist(), strict=True)]
