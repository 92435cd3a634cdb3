"""From the encoded bytes of a GGUF tensor to its values."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.formats.gguf.header import GgufTensor
from pagedec.formats.mapping import view_tensor

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
    from gguf import GGMLQuantizationType, quants  # 0.1 s, not needed once a file is converted

    num_row_bytes = tensor.shape[-1] // tensor.encoding.block_size * tensor.encoding.num_bytes
    encoded = raw.numpy().reshape(-1, num_row_bytes)
    values = torch.empty(len(encoded), tensor.shape[-1], dtype=dtype)
    num_rows = max(1, PIECE // tensor.shape[-1])
    for start in range(0, len(encoded), num_rows):
        piece = quants.dequantize(encoded[start : start + num_rows], GGMLQuantizationType[name])
        values[start : start + num_rows] = torch.from_numpy(np.ascontiguousarray(piece, np.float32))
    return values.view(tensor.shape)
