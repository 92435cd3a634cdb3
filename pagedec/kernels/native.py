"""The compiled kernels as a backend: programs of argument records, carried out in one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pagedec.core.forward import LaneForward
from pagedec.kernels.arena import Arena, trim
from pagedec.kernels.backend import NO_NORMS, AttentionShape, CacheTensors, HeadNorms, Rope, checked_quantization
from pagedec.kernels.host import HostBackend
from pagedec.kernels.library import (
    ArgmaxArgs,
    AttentionArgs,
    AttentionPlan,
    AttnBatch,
    AttnShape,
    BestArgs,
    Context,
    Dtype,
    EmbedArgs,
    Epilogue,
    GemmArgs,
    KvCopyArgs,
    LayerNormArgs,
    Library,
    OpList,
    ProcessLogitsArgs,
    Quantization,
    RmsNormArgs,
    RopeKvWriteArgs,
    SampleArgs,
    SoftCapArgs,
    TopkLseArgs,
)
from pagedec.kernels.processing import FlatRules, lse_of, named, rows_within
from pagedec.kernels.reference_best import CANDIDATE_DTYPE

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}


def address(tensor: torch.Tensor | None, dtype: torch.dtype, what: str) -> int | None:
    """The address of a contiguous tensor of the expected dtype; None stays None."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{what} is {tensor.dtype}, strides {tensor.stride()}; it must be contiguous {dtype}")
    return tensor.data_ptr()


def _int32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int32)


@dataclass(slots=True)
class NativeWeight:
    """A packed weight [n, k] and its fp32 bias."""

    data: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int
    quantization: Quantization = Quantization.PLAIN


class NativePlan:
    """The attention kernel's work list, made once a step for all layers of one kind."""

    def __init__(self, context: Context, shape: AttentionShape, dtype: Dtype) -> None:
        self.plan: AttentionPlan = context.library.plan()
        self._context = context
        self.shape = AttnShape(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, int(dtype), shape.window,
            shape.scale, shape.soft_cap,
        )  # fmt: skip

    def update(
        self, row_indptr: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
    ) -> None:
        assert block_table.flags.c_contiguous
        batch = AttnBatch(
            len(kv_len), int(row_indptr[-1]), row_indptr.ctypes.data, kv_len.ctypes.data, block_table.ctypes.data,
            None if parents is None else parents.ctypes.data, block_table.shape[1], 1,
        )  # fmt: skip
        self._context.plan(self.plan, self.shape, batch)


class NativeProgram:
    """Argument records in order; `run` is one call into the library, in one parallel region."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend, self._context = backend, backend.context
        self._records: list[object] = []
        self._keep: list[object] = []
        self._linears: list[tuple[GemmArgs, NativeWeight]] = []
        self._program: OpList | None = None

    def _add(self, record: object, *keep: object) -> None:
        self._records.append(record)
        self._keep += keep

    def embed(
        self, rows: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor,
        slots: torch.Tensor, token_plane: torch.Tensor, scale: float = 1.0,
        positions: torch.Tensor | None = None, position_table: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        backend, int32 = self._backend, torch.int32
        self._add(
            EmbedArgs(
                address(rows, int32, "rows"), address(token_ids, int32, "token_ids"),
                address(table, backend.dtype, "table"), address(out, torch.float32, "out"),
                address(slots, int32, "slots"), address(token_plane, int32, "token_plane"),
                table.shape[1], table.shape[0], int(backend.code), scale,
                address(positions, int32, "positions"), address(position_table, backend.dtype, "position_table"),
                0 if position_table is None else position_table.shape[0], 0,
            ),
            rows, token_ids, table, out, slots, token_plane, positions, position_table,
        )  # fmt: skip

    def rms_norm(
        self, rows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float,
        row_ids: torch.Tensor | None = None, add: bool = False,
    ) -> None:  # fmt: skip
        f32 = torch.float32
        out_dtype = f32 if add else self._backend.dtype
        self._add(
            RmsNormArgs(
                address(rows, torch.int32, "rows"), address(x, f32, "x"), address(weight, f32, "weight"),
                address(out, out_dtype, "out"), address(row_ids, torch.int32, "row_ids"),
                x.shape[1], int(DTYPES[out_dtype]), eps, int(add),
            ),
            rows, x, weight, out, row_ids,
        )  # fmt: skip

    def layer_norm(
        self, rows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
        eps: float, row_ids: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        backend, f32 = self._backend, torch.float32
        self._add(
            LayerNormArgs(
                address(rows, torch.int32, "rows"), address(x, f32, "x"), address(weight, f32, "weight"),
                address(bias, f32, "bias"), address(out, backend.dtype, "out"),
                address(row_ids, torch.int32, "row_ids"), x.shape[1], int(backend.code), eps, 0,
            ),
            rows, x, weight, bias, out, row_ids,
        )  # fmt: skip

    def soft_cap(self, rows: torch.Tensor, x: torch.Tensor, cap: float) -> None:
        record = SoftCapArgs(address(rows, torch.int32, "rows"), address(x, torch.float32, "x"), x.shape[1], cap)
        self._add(record, rows, x)

    def linear(
        self, rows: torch.Tensor, x: torch.Tensor, weight: NativeWeight, y: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:  # fmt: skip
        backend = self._backend
        record = GemmArgs(
            address(rows, torch.int32, "rows"), address(x, backend.dtype, "x"), weight.data.data_ptr(),
            address(weight.bias, torch.float32, "bias"), y.data_ptr(), weight.n, weight.k, int(backend.code),
            int(DTYPES[y.dtype]), int(epilogue), int(weight.quantization), None, 0,
        )  # fmt: skip
        self._linears.append((record, weight))
        self._add(record, rows, x, weight, y)

    def rope_kv_write(
        self, rows: torch.Tensor, qkv: torch.Tensor, q: torch.Tensor, cache: CacheTensors, layer: int,
        positions: torch.Tensor, slots: torch.Tensor, rope: Rope, norms: HeadNorms = NO_NORMS,
    ) -> None:  # fmt: skip
        backend, int32 = self._backend, torch.int32
        self._add(
            RopeKvWriteArgs(
                address(rows, int32, "rows"), address(qkv, backend.dtype, "qkv"), address(q, backend.dtype, "q"),
                cache.k[layer].data_ptr(), cache.v[layer].data_ptr(), address(positions, int32, "positions"),
                address(slots, int32, "slots"), address(rope.cos_sin, torch.float32, "cos_sin"),
                address(norms[0], torch.float32, "q_norm"), address(norms[1], torch.float32, "k_norm"),
                q.shape[1] // cache.head_dim, cache.num_kv_heads, cache.head_dim, rope.rotary_dim, cache.block_size,
                int(backend.code), int(rope.interleaved), norms[2],
            ),
            rows, qkv, q, cache, positions, slots, rope, norms,
        )  # fmt: skip

    def attention(
        self, rows: torch.Tensor, plan: NativePlan, q: torch.Tensor, cache: CacheTensors, layer: int, out: torch.Tensor
    ) -> None:
        backend = self._backend
        self._add(
            AttentionArgs(
                address(rows, torch.int32, "rows"), plan.plan.handle, address(q, backend.dtype, "q"),
                cache.k[layer].data_ptr(), cache.v[layer].data_ptr(), address(out, backend.dtype, "out"),
            ),
            rows, plan, q, cache, out,
        )  # fmt: skip

    def finish(self) -> None:
        """Tell each linear layer which weight follows, so that its first panels are on their way, and fix the list."""
        for (record, _), (_, following) in itertools.pairwise(self._linears):
            record.next_packed, record.next_bytes = following.data.data_ptr(), len(following.data)
        self._program = OpList(self._records)  # type: ignore[arg-type]

    def run(self) -> None:
        assert self._program is not None, "the program is not finished"
        self._context.run(self._program)


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

    def settle(self) -> None:
        self.arena.settle()
        trim()

    def program(self) -> NativeProgram:
        return NativeProgram(self)

    def plan(self, shape: AttentionShape) -> NativePlan:
        return NativePlan(self.context, shape, self.code)

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        count = np.array([len(src)], np.int32)
        src, dst = np.ascontiguousarray(src, np.int32), np.ascontiguousarray(dst, np.int32)
        self.context.call(
            KvCopyArgs(
                count.ctypes.data, src.ctypes.data, dst.ctypes.data, cache.k.data_ptr(), cache.v.data_ptr(),
                cache.tokens.data_ptr(), cache.k.stride(0), cache.k.shape[0], cache.num_kv_heads, cache.head_dim,
                cache.block_size, int(self.code), 0,
            )
        )  # fmt: skip

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
            _int32(array)
            for array in (
                rows - start, rule_ids, processing.prompt_lengths[picked],
                processing.branches[picked], forward.read_rows[rows], forward.row_indptr, forward.kv_len, table,
            )
        ]  # fmt: skip
        own, places, *rest = (array.ctypes.data for array in arrays)
        records = np.frombuffer(b"".join(own_rules.record for own_rules in flat), np.uint8)
        tree = None if parents is None else _int32(parents)
        self.context.call(
            ProcessLogitsArgs(
                count.ctypes.data, address(logits, torch.float32, "logits"), own, places, records.ctypes.data,
                *rest, None if tree is None else tree.ctypes.data, address(cache.tokens, torch.int32, "tokens"),
                None if lse is None else lse.ctypes.data, len(flat), len(forward.kv_len), table.shape[1],
                cache.block_size, vocab, 0,
            )
        )  # fmt: skip

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

    def topk(self, logits: torch.Tensor, row_ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(row_ids)
        row_ids, count = np.ascontiguousarray(row_ids, np.int32), np.array([n], np.int32)
        ids, values, lse = np.empty((n, k), np.int32), np.empty((n, k), np.float32), np.empty(n, np.float32)
        self.context.call(
            TopkLseArgs(
                count.ctypes.data, logits.data_ptr(), row_ids.ctypes.data, ids.ctypes.data, values.ctypes.data,
                lse.ctypes.data, logits.shape[1], k,
            )
        )  # fmt: skip
        return ids, values, lse

    def best(
        self, logits: torch.Tensor, lse: np.ndarray | None, rows: np.ndarray, groups: np.ndarray
    ) -> list[np.ndarray]:
        n, vocab, groups = len(rows), logits.shape[1], groups.copy()
        groups["k"] = np.minimum(groups["k"], (groups["stop"] - groups["first"]).astype(np.int64) * vocab)
        own_lse = np.empty(n, np.float32) if lse is None else np.ascontiguousarray(lse, np.float32)
        room = np.cumsum(groups["k"], dtype=np.int64)
        found = np.empty(int(room[-1]) if len(room) else 0, CANDIDATE_DTYPE)
        rows, counts, count = np.ascontiguousarray(rows), np.zeros(len(groups), np.int32), np.array([n], np.int32)
        self.context.call(
            BestArgs(
                count.ctypes.data, logits.data_ptr(), own_lse.ctypes.data, rows.ctypes.data, groups.ctypes.data,
                found.ctypes.data, counts.ctypes.data, len(groups), vocab, int(lse is not None), 0,
            )
        )  # fmt: skip
        firsts = (room - groups["k"]).tolist()
        return [found[first : first + size] for first, size in zip(firsts, counts.tolist(), strict=True)]
