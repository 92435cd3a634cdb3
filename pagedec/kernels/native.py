"""The compiled kernels as a backend: programs of argument records, carried out in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneForward
from pagedec.kernels.arena import Arena, trim
from pagedec.kernels.backend import AttentionShape, CacheTensors, Drafted, checked_quantization
from pagedec.kernels.host import HostBackend
from pagedec.kernels.library import (
    EMULATED_DEVICE,
    ArgmaxArgs,
    BestArgs,
    CopyRowsArgs,
    KvCopyArgs,
    Library,
    PickLogitsArgs,
    ProcessLogitsArgs,
    Quantization,
    RestrictLogitsArgs,
    SampleArgs,
    TopkLseArgs,
    VerifyArgs,
)
from pagedec.kernels.link import Link
from pagedec.kernels.native_program import DTYPES, NativePlan, NativeProgram, NativeWeight, address, int32
from pagedec.kernels.native_roll import NativeRoller
from pagedec.kernels.processing import FlatRules, lse_of, named, rows_within
from pagedec.kernels.reference_best import CANDIDATE_DTYPE


class NativeBackend(HostBackend):
    """Compiled kernels of one instruction set, for one dtype, in a context of their own: one thread at a time.

    num_threads 0: OpenMP's own choice. Raises ValueError for a dtype or a quantisation that there is not.
    """

    def __init__(
        self, library: Library, dtype: torch.dtype, quantization: str | None = None, num_threads: int = 0
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; the compiled kernels take torch.float32 and torch.bfloat16")
        self.quantization = checked_quantization(quantization)
        self.library, self.dtype, self.code = library, dtype, DTYPES[dtype]
        self.name, self.context = library.isa, library.context(num_threads)
        self.arena = Arena()
        self.link: Link | None = None

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> NativeWeight:
        n, k = weight.shape
        if bias is not None:
            bias = bias.float().contiguous()
        if checked_quantization(quantization) is not None:
            weight = weight.contiguous() if weight.dtype in DTYPES else weight.float().contiguous()
            data = self.arena.allocate(self.library.packed_int8_bytes(n, k))
            self.context.pack_int8(weight.data_ptr(), n, k, DTYPES[weight.dtype], data.data_ptr())
            return NativeWeight(data, bias, n, k, Quantization.INT8)
        weight = weight.to(self.dtype).contiguous()
        data = self.arena.allocate(self.library.packed_bytes(n, k, self.code))
        self.context.pack(weight.data_ptr(), n, k, self.code, data.data_ptr())
        return NativeWeight(data, bias, n, k)

    def cache(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> CacheTensors:
        cache = super().cache(num_layers, num_blocks, num_kv_heads, head_dim, block_size)
        if self.name != EMULATED_DEVICE:
            return cache
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)  # as many values, in a device's order
        return replace(cache, k=cache.k.view(shape), v=cache.v.view(shape))

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
    ) -> NativeRoller | None:
        lists = [programs.whole, programs.body, programs.head]
        if not all(isinstance(program, NativeProgram) for program in lists):  # a hosted model's: torch carries it out
            return None
        return NativeRoller(self, lists, buffers, plans, cache, num_drawn, debug)

    def plan(self, shape: AttentionShape) -> NativePlan:
        return NativePlan(self.context, shape, self.code)

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        count = np.array([len(src)], np.int32)
        src, dst = np.ascontiguousarray(src, np.int32), np.ascontiguousarray(dst, np.int32)
        self.context.call(
            KvCopyArgs(
                count.ctypes.data,
                src.ctypes.data,
                dst.ctypes.data,
                cache.k.data_ptr(),
                cache.v.data_ptr(),
                cache.tokens.data_ptr(),
                cache.k.stride(0),
                cache.k.shape[0],
                cache.num_kv_heads,
                cache.head_dim,
                cache.block_size,
                int(self.code),
                0,
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
        count = np.array([picked.stop - picked.start], np.int32)
        rows = processing.rows[picked]
        table, parents = forward.block_table, forward.parents
        arrays = [
            int32(array)
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
        ]
        own, places, *rest = (array.ctypes.data for array in arrays)
        records = np.frombuffer(b"".join(own_rules.record for own_rules in flat), np.uint8)
        tree = None if parents is None else int32(parents)
        self.context.call(
            ProcessLogitsArgs(
                count.ctypes.data,
                address(logits, torch.float32, "logits"),
                own,
                places,
                records.ctypes.data,
                *rest,
                None if tree is None else tree.ctypes.data,
                address(cache.tokens, torch.int32, "tokens"),
                None if lse is None else lse.ctypes.data,
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
        count, vocab = np.array([len(logits)], np.int32), logits.shape[1]
        record = RestrictLogitsArgs(count.ctypes.data, address(logits, torch.float32, "logits"), vocab=vocab)
        record.num_drawn = vocab if num_drawn is None else num_drawn
        if places is not None and words is not None:
            places, words = int32(places), np.ascontiguousarray(words, np.uint32)
            record.places, record.words, record.num_words = places.ctypes.data, words.ctypes.data, len(words)
        if len(banned_rows):
            num_banned, rows, tokens = np.array([len(banned_rows)], np.int32), int32(banned_rows), int32(banned_tokens)
            record.num_banned, record.banned_rows = num_banned.ctypes.data, rows.ctypes.data
            record.banned_tokens = tokens.ctypes.data
        self.context.call(record)

    def copy_rows(self, src: torch.Tensor, src_rows: np.ndarray, dst: torch.Tensor, dst_rows: np.ndarray) -> None:
        count, src_rows, dst_rows = np.array([len(src_rows)], np.int32), int32(src_rows), int32(dst_rows)
        self.context.call(
            CopyRowsArgs(
                count.ctypes.data,
                address(src, torch.float32, "src"),
                address(dst, torch.float32, "dst"),
                src_rows.ctypes.data,
                dst_rows.ctypes.data,
                src.shape[1],
                0,
            )
        )

    def pick(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._pick(logits, rows, tokens, None)

    def pick_ranked(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.empty(len(rows), np.int32)
        return self._pick(logits, rows, tokens, ranks), ranks

    def _pick(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, ranks: np.ndarray | None) -> np.ndarray:
        values, count = np.empty(len(rows), np.float32), np.array([len(rows)], np.int32)
        rows, tokens = int32(rows), int32(tokens)
        self.context.call(
            PickLogitsArgs(
                count.ctypes.data,
                address(logits, torch.float32, "logits"),
                rows.ctypes.data,
                tokens.ctypes.data,
                values.ctypes.data,
                None if ranks is None else ranks.ctypes.data,
                logits.shape[1],
                0,
            )
        )
        return values

    def sample(self, logits: torch.Tensor, draws: np.ndarray) -> np.ndarray:
        out = np.empty(len(draws), np.int32)
        count = np.array([len(draws)], np.int32)
        vocab = logits.shape[1]
        if not draws["temperature"].any() and np.array_equal(draws["row"], np.arange(len(draws))):
            self.context.call(ArgmaxArgs(count.ctypes.data, logits.data_ptr(), out.ctypes.data, vocab, 0))
        else:
            self.context.call(
                SampleArgs(count.ctypes.data, draws.ctypes.data, logits.data_ptr(), out.ctypes.data, vocab, 0)
            )
        return out

    def verify(self, logits: torch.Tensor, draws: np.ndarray, drafted: Drafted) -> np.ndarray:
        out, count = np.empty(len(draws), np.int32), np.array([len(draws)], np.int32)
        own, tokens, draws = np.ascontiguousarray(drafted.draws), int32(drafted.tokens), np.ascontiguousarray(draws)
        self.context.call(
            VerifyArgs(
                count.ctypes.data,
                draws.ctypes.data,
                own.ctypes.data,
                tokens.ctypes.data,
                address(logits, torch.float32, "logits"),
                address(drafted.logits, torch.float32, "draft_logits"),
                out.ctypes.data,
                logits.shape[1],
                drafted.logits.shape[1],
            )
        )
        return out

    def topk(self, logits: torch.Tensor, row_ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(row_ids)
        row_ids, count = np.ascontiguousarray(row_ids, np.int32), np.array([n], np.int32)
        ids, values, lse = np.empty((n, k), np.int32), np.empty((n, k), np.float32), np.empty(n, np.float32)
        self.context.call(
            TopkLseArgs(
                count.ctypes.data,
                logits.data_ptr(),
                row_ids.ctypes.data,
                ids.ctypes.data,
                values.ctypes.data,
                lse.ctypes.data,
                logits.shape[1],
                k,
            )
        )
        return ids, values, lse

    def best(
        self, logits: torch.Tensor, lse: np.ndarray | None, rows: np.ndarray, groups: np.ndarray
    ) -> list[np.ndarray]:
        n, vocab = len(rows), logits.shape[1]
        most = groups["k"].tolist()
        if max(most, default=0) > vocab:  # there may be fewer
            groups = groups.copy()
            groups["k"] = np.minimum(groups["k"], (groups["stop"] - groups["first"]).astype(np.int64) * vocab)
            most = groups["k"].tolist()
        own_lse = np.empty(n, np.float32) if lse is None else np.ascontiguousarray(lse, np.float32)
        found = np.empty(sum(most), CANDIDATE_DTYPE)
        rows, counts, count = np.ascontiguousarray(rows), np.zeros(len(groups), np.int32), np.array([n], np.int32)
        self.context.call(
            BestArgs(
                count.ctypes.data,
                logits.data_ptr(),
                own_lse.ctypes.data,
                rows.ctypes.data,
                groups.ctypes.data,
                found.ctypes.data,
                counts.ctypes.data,
                len(groups),
                vocab,
                int(lse is not None),
                0,
            )
        )
        ends = accumulate(most)
        return [found[end - k : end - k + size] for end, k, size in zip(ends, most, counts.tolist(), strict=True)]
