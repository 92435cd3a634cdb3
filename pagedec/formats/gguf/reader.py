"""Weights in GGUF files: dequantised, under their Hugging Face names, in Hugging Face's layout."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedec.errors import ModelFileError
from pagedec.formats.gguf.dequantize import PLAIN, dequantize
from pagedec.formats.gguf.header import GgufHeader, GgufTensor
from pagedec.formats.gguf.metadata import of_all_layers
from pagedec.formats.gguf.parts import read_gguf_model
from pagedec.formats.gguf.tensor_names import NO_WEIGHTS, SHARED_GATE, is_behind, layout_of
from pagedec.formats.mapping import MappedFile
from pagedec.formats.quantize import from_iq4_nl, from_q4_1, from_q5_0
from pagedec.kernels.blocks import Blocks, mxfp4_blocks
from pagedec.kernels.experts import MAX_EXPERTS

BLOCKS = {"Q4_0": "q4_0", "Q8_0": "q8_0", "Q4_K": "q4_k", "Q6_K": "q6_k", "MXFP4": "mxfp4"}
"""The encodings that kernels take as they are, MXFP4 all but."""
OTHERS = {"Q4_1": from_q4_1, "Q5_0": from_q5_0, "IQ4_NL": from_iq4_nl}
"""Those that become others, but for Q4_1's zero points without a rounding. With experts whose width 256 does not
divide, llama.cpp has Q5_0 and IQ4_NL in place of finer ones."""
_BLOCK_TENSOR = re.compile(r"blk\.\d+\.(\w+)\.(weight|bias)")


def unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rotary rows from pairs (2i, 2i+1) within each head back to halves (i, i + head_dim / 2).

    `rows` [num_heads * head_dim, ...]. The converter of llama.cpp writes HF row i of half h to row 2i + h.
    """
    head_dim = rows.shape[0] // num_heads
    paired = rows.view(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One of Hugging Face's tensors in the file: rows `first` to `last` of `tensor`, after what the converter did is
    undone.

    `num_heads`: 0, or the heads whose rotary rows are paired.
    """

    tensor: GgufTensor
    first: int
    last: int
    num_heads: int = 0
    offset: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.last - self.first, *self.tensor.shape[1:])
        return shape[::-1] if self.transposed else shape

    def bytes_of(self, mapped: MappedFile) -> tuple[torch.Tensor, GgufTensor]:
        """Return the rows' own bytes, and what describes them. Raises ModelFileError where they end inside a block, as
        parts of a vector in small integers may."""
        whole, num_rows, encoding = self.tensor, self.last - self.first, self.tensor.encoding
        if num_rows == whole.shape[0]:
            return mapped.view(whole.start, whole.num_bytes), whole
        row = math.prod(whole.shape[1:])
        if self.first * row % encoding.block_size or num_rows * row % encoding.block_size:
            where = f"at {self.first} or {self.last} of {whole.shape[0]}, inside a block of {encoding.name}"
            raise ModelFileError(whole.path, f"tensor {whole.name} has to be cut {where}")
        start = whole.start + self.first * row // encoding.block_size * encoding.num_bytes
        num_bytes = num_rows * row // encoding.block_size * encoding.num_bytes
        rows = replace(whole, shape=(num_rows, *whole.shape[1:]), start=start, num_bytes=num_bytes)
        return mapped.view(start, num_bytes), rows

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Undo the converter: rows of heads, norms, and which way round a matrix lies."""
        if self.num_heads:
            values = unpermute(values, self.num_heads)
        if self.offset:
            values = (values.float() - self.offset).to(values.dtype)
        return values.T.contiguous() if self.transposed else values


class GgufSource:
    """The tensors of a GGUF file, or of a model in several; each is dequantised when loaded, matrices to the dtype of
    `converted` if that was called."""

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        self._matrices: torch.dtype | None = None
        self.header = read_gguf_model(path) if header is None else header
        self._mapped: dict[Path, MappedFile] = {}
        self._architecture = self.header.fields.get("general.architecture")
        self._layout = layout_of(self._architecture)
        self._num_layers = self._layers()
        self._stored: dict[str, _Stored] = {}
        for name, tensor in self.header.tensors.items():
            if name in NO_WEIGHTS or (self._num_layers is not None and is_behind(name, self._num_layers)):
                continue
            for hf_name, stored in self._places(tensor).items():
                if hf_name in self._stored:
                    other = self._stored[hf_name].tensor.name
                    raise ModelFileError(tensor.path, f"tensors {name} and {other} are both {hf_name}")
                self._stored[hf_name] = stored

    def _places(self, tensor: GgufTensor) -> dict[str, _Stored]:
        """Return what a tensor of the file becomes, by Hugging Face name."""
        layout = self._layout
        if layout.is_of_experts(tensor.name):
            return self._experts(tensor)
        names = layout.names(tensor.name)
        if len(names) > 1:
            return self._split(tensor, names)
        match = _BLOCK_TENSOR.fullmatch(tensor.name)
        stem = match[1] if match else tensor.name.rpartition(".")[0]
        num_heads = self._num_heads(tensor, stem[-1]) if layout.paired and stem in ("attn_q", "attn_k") else 0
        if stem == SHARED_GATE and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        offset = layout.norm_offset if stem.endswith("norm") and tensor.name.endswith(".weight") else 0.0
        transposed = stem in layout.transposed and len(tensor.shape) == 2
        return {names[0]: _Stored(tensor, 0, tensor.shape[0], num_heads, offset, transposed)}

    def _layers(self) -> int | None:
        """Return how many blocks are the model's where more are behind them, None where a file does not say it."""
        count, behind = (
            self.header.fields.get(f"{self._architecture}.{field}") for field in ("block_count", "nextn_predict_layers")
        )
        return count - behind if isinstance(count, int) and isinstance(behind, int) and behind > 0 else None

    def _experts(self, tensor: GgufTensor) -> dict[str, _Stored]:
        """Return each expert's rows of a tensor that has them one behind the other, or is of one; or its bias."""
        if tensor.name.endswith(".bias"):
            return self._biases(tensor)
        count, num_rows, k = {2: (1, *tensor.shape), 3: tensor.shape}.get(len(tensor.shape), (0, 0, 0))
        names = self._layout.of_experts(tensor.name, count) if count <= MAX_EXPERTS else ()
        if not names or len(names) != count:
            problem = f"tensor {tensor.name} is {list(tensor.shape)}, must be matrices of 1 to {MAX_EXPERTS} experts"
            raise ModelFileError(tensor.path, problem)
        rows = replace(tensor, shape=(count * num_rows, k))
        return {name: _Stored(rows, e * num_rows, (e + 1) * num_rows) for e, name in enumerate(names)}

    def _biases(self, tensor: GgufTensor) -> dict[str, _Stored]:
        count, width = {1: (1, *tensor.shape), 2: tensor.shape}.get(len(tensor.shape), (0, 0))
        names = self._layout.of_experts(tensor.name, count) if count <= MAX_EXPERTS else ()
        if not names or len(names) != count:
            problem = f"tensor {tensor.name} is {list(tensor.shape)}, must be biases of 1 to {MAX_EXPERTS} experts"
            raise ModelFileError(tensor.path, problem)
        values = replace(tensor, shape=(count * width,))
        return {name: _Stored(values, e * width, (e + 1) * width) for e, name in enumerate(names)}

    def _head_count(self, kind: str) -> object:
        """Return the number of heads of "q", "k" or "v" as the file has it."""
        fields, architecture = self.header.fields, self._architecture
        num_q = fields.get(f"{architecture}.attention.head_count")
        return of_all_layers(num_q if kind == "q" else fields.get(f"{architecture}.attention.head_count_kv", num_q))

    def _num_heads(self, tensor: GgufTensor, kind: str) -> int:
        num_heads = self._head_count(kind)
        if not isinstance(num_heads, int) or num_heads < 1 or tensor.shape[0] % (2 * num_heads):
            # an odd head size has no halves
            raise ModelFileError(
                tensor.path, f"tensor {tensor.name} has {tensor.shape[0]} rows for {num_heads!r} {kind} heads"
            )
        return num_heads

    def _split(self, tensor: GgufTensor, names: tuple[str, ...]) -> dict[str, _Stored]:
        heads = [self._head_count(kind) for kind in "qkv"]
        counts = [count for count in heads if isinstance(count, int) and count > 0]
        if len(counts) != len(heads) or tensor.shape[0] % sum(counts):
            raise ModelFileError(tensor.path, f"tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        head_dim, first, places = tensor.shape[0] // sum(counts), 0, {}
        for name, count in zip(names, counts, strict=True):
            places[name] = _Stored(tensor, first, first + count * head_dim)
            first += count * head_dim
        return places

    @property
    def path(self) -> Path:
        """Return the file, the first one of several."""
        return self.header.path

    def names(self) -> list[str]:
        """Return all Hugging Face names, in the order of the files."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` gives: the stored one, fp32 for quantised tensors, unless it is converted."""
        if self._matrices is not None and len(self.shape(name)) > 1:
            return self._matrices
        return PLAIN.get(self._stored[name].tensor.encoding.name, torch.float32)

    def converted(self, dtype: torch.dtype) -> GgufSource:
        """Return a source of the same files whose matrices are in `dtype`; vectors (norms, biases) stay exact."""
        source = GgufSource(self.path, self.header)
        source._matrices = dtype
        return source

    def _bytes(self, stored: _Stored) -> tuple[torch.Tensor, GgufTensor]:
        path = stored.tensor.path
        if path not in self._mapped:
            self._mapped[path] = MappedFile(path, self.header.files[path].num_bytes)
        return stored.bytes_of(self._mapped[path])

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor, dequantised and in Hugging Face's order."""
        stored, dtype = self._stored[name], self.dtype(name)
        return stored.restore(dequantize(*self._bytes(stored), dtype)).to(dtype)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix as the file has it, its rows in Hugging Face's order; None where it is no such matrix, or
        lies the other way round, or is MXFP4 with a scale that fp16 does not hold. Raises ModelFileError where a scale
        of others is no finite number."""
        stored = self._stored[name]
        encoding = stored.tensor.encoding.name
        if encoding not in (*BLOCKS, *OTHERS) or len(stored.shape) != 2 or stored.offset or stored.transposed:
            return None
        num_rows, k = stored.shape
        raw = stored.restore(self._bytes(stored)[0].view(num_rows, -1))
        if encoding == "MXFP4":
            whole = raw.view(num_rows, -1, 17)
            return mxfp4_blocks(whole[:, :, 1:], whole[:, :, 0], in_pairs=False)
        blocks = OTHERS[encoding](raw, k) if encoding in OTHERS else Blocks(BLOCKS[encoding], raw, k)
        if not blocks.is_finite:
            raise ModelFileError(stored.tensor.path, f"tensor {stored.tensor.name} has a scale that is infinite or NaN")
        return blocks

    def release(self) -> None:
        """Give up the memory of what was read."""
        for mapped in self._mapped.values():
            mapped.release()
