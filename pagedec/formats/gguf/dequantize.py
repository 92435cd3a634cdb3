"""From the encoded bytes of a GGUF tensor to its values."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.formats.gguf.header import GgufTensor
from pagedec.formats.mapping import view_tensor
from pagedec.kernels.blocks import E2M1

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The encodings that are no quantisation."""
PIECE = 1 << 21  # values that are dequantised at once


def dequantize(raw: torch.Tensor, tensor: GgufTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor whose encoded bytes are `raw`, in `dtype`, or in its own when it is not quantised.

    Values are fp32 first, a few megabytes at a time: those of a large vocabulary at once would take gigabytes.
    """
    name = tensor.encoding.name
    if name in PLAIN:
        return view_tensor(raw, PLAIN[name], tensor.shape)
    num_row_bytes = tensor.shape[-1] // tensor.encoding.block_size * tensor.encoding.num_bytes
    encoded = raw.numpy().reshape(-1, num_row_bytes)
    values = torch.empty(len(encoded), tensor.shape[-1], dtype=dtype)
    num_rows = max(1, PIECE // tensor.shape[-1])
    for start in range(0, len(encoded), num_rows):
        piece = _decode(encoded[start : start + num_rows], name)
        values[start : start + num_rows] = torch.from_numpy(np.ascontiguousarray(piece, np.float32))
    return values.view(tensor.shape)


def _decode(rows: np.ndarray, name: str) -> np.ndarray:
    if name == "MXFP4":  # which the package knows since 0.18 only
        return _decode_mxfp4(rows.reshape(len(rows), -1, 17))
    from gguf import GGMLQuantizationType, quants  # 0.1 s, not needed once a file is converted

    decoded: np.ndarray = quants.dequantize(rows, GGMLQuantizationType[name])
    return decoded


def _decode_mxfp4(blocks: np.ndarray) -> np.ndarray:
    half_scales = np.ldexp(np.float32(1), blocks[:, :, :1].astype(np.int32) - 128)
    codes = np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], 2)
    with np.errstate(over="ignore"):  # of the largest scales, as ggml has it
        return (E2M1.numpy()[codes] * half_scales).reshape(len(blocks), -1)
