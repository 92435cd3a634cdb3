"""Weights in GGUF files: dequantised, under their Hugging Face names, with Hugging Face's order of rotary rows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from pagedec.errors import ModelFileError
from pagedec.formats.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from pagedec.formats.gguf_names import ROPE_FACTORS, hugging_face_name
from pagedec.formats.mapping import map_file, view_tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Architectures whose converter pairs neighbouring rows for rotation; the others keep Hugging Face's halves
PERMUTED_ARCHITECTURES = ("llama",)
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")


def unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rotary rows from pairs (2i, 2i+1) within each head back to halves (i, i + head_dim / 2).

    `rows` [num_heads * head_dim, ...]. The converter of llama.cpp writes HF row i of half h to row 2i + h.
    """
    head_dim = rows.shape[0] // num_heads
    paired = rows.view(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def dequantize(raw: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    """Return the tensor whose encoded bytes are `raw`: fp32, or its own dtype when it is not quantised."""
    name = tensor.encoding.name
    if name in PLAIN:
        return view_tensor(raw, 0, PLAIN[name], tensor.shape)
    from gguf import GGMLQuantizationType, quants  # 0.1 s, not needed once a file is converted

    num_row_bytes = tensor.shape[-1] // tensor.encoding.block_size * tensor.encoding.num_bytes
    encoded = raw.numpy().reshape(*tensor.shape[:-1], num_row_bytes)
    values = quants.dequantize(encoded, GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


class GgufSource:
    """The tensors of one GGUF file; each is dequantised when loaded."""

    def __init__(self, path: Path, header: GgufHeader | None = None) -> None:
        self.header = read_gguf_header(path) if header is None else header
        self._path = path
        self._mapped: torch.Tensor | None = None
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in self.header.tensors.items():
            if name == ROPE_FACTORS:
                continue
            hf_name = hugging_face_name(name)
            if hf_name in self._tensors:
                raise ModelFileError(path, f"tensors {name} and {self._tensors[hf_name].name} are both {hf_name}")
            self._tensors[hf_name] = tensor
        self._num_heads = self._rotated_heads()

    def _rotated_heads(self) -> dict[str, int]:
        """Return the head counts of the projections that need reordering, by "q" and "k"."""
        fields = self.header.fields
        architecture = fields.get("general.architecture")
        if architecture not in PERMUTED_ARCHITECTURES:
            return {}
        num_q = fields.get(f"{architecture}.attention.head_count")
        heads = {"q": num_q, "k": fields.get(f"{architecture}.attention.head_count_kv", num_q)}
        for name, tensor in self._tensors.items():
            match = _ROTATED.fullmatch(name)
            num_heads = heads[match[1]] if match else None
            if match and (
                not isinstance(num_heads, int) or num_heads < 1 or tensor.shape[0] % (2 * num_heads)
            ):  # an odd head size has no halves
                raise ModelFileError(
                    self._path, f"tensor {tensor.name} has {tensor.shape[0]} rows for {num_heads!r} {match[1]} heads"
                )
        return {key: value for key, value in heads.items() if isinstance(value, int)}

    @property
    def path(self) -> Path:
        """Return the file."""
        return self._path

    def names(self) -> list[str]:
        """Return all Hugging Face names, in the order of the file."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype, fp32 for quantised tensors."""
        return PLAIN.get(self._tensors[name].encoding.name, torch.float32)

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor, dequantised and in Hugging Face's order."""
        tensor = self._tensors[name]
        if self._mapped is None:
            self._mapped = map_file(self._path, self.header.num_file_bytes)
        values = dequantize(self._mapped[tensor.start : tensor.start + tensor.num_bytes], tensor)
        match = _ROTATED.fullmatch(name)
        return unpermute(values, self._num_heads[match[1]]) if match and self._num_heads else values
