"""Weights as bitsandbytes keeps them, made by a writer of our own: tensors beside what each value is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from pagedec.formats.bitsandbytes import CODES

Parts = dict[str, torch.Tensor]
NESTED_SIZE = 256
TABLE = torch.cat([torch.linspace(-1, 0, 128), torch.linspace(0, 1, 129)[1:]])
"""What codes of absmax stand for: any 256 numbers."""


def json_bytes(said: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def four_bits(
    weight: torch.Tensor,
    kind: str = "nf4",
    size: int = 64,
    dtype: str = "bfloat16",
    nested: bool = True,
    storage: torch.dtype = torch.uint8,
) -> tuple[Parts, torch.Tensor]:
    """A weight [n, k] rounded to the nearest code in blocks of `size`: its tensors, by what follows its name, and its
    values, fp32 products of numpy's rounded to the dtype."""
    table = CODES[kind].numpy()
    flat = weight.float().flatten().numpy()
    blocks = np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    absmax = np.abs(blocks).max(1).astype(np.float32)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": dtype, "shape": list(weight.shape)}
    parts = {"": torch.empty(0), ".absmax": torch.from_numpy(absmax), ".quant_map": CODES[kind].clone()}
    if nested:
        offset = float(absmax.mean(dtype=np.float32))
        around = np.pad(absmax - np.float32(offset), (0, -len(absmax) % NESTED_SIZE)).reshape(-1, NESTED_SIZE)
        largest = np.maximum(np.abs(around).max(1), np.float32(1e-6))
        codes = np.abs(around[..., None] / largest[:, None, None] - TABLE.numpy()).argmin(-1)
        exact = (TABLE.numpy()[codes] * largest[:, None] + np.float32(offset)).reshape(-1)
        absmax = np.ascontiguousarray(exact[: len(absmax)])
        parts[".absmax"] = torch.from_numpy(codes.reshape(-1)[: len(absmax)].astype(np.uint8))
        parts |= {".nested_absmax": torch.from_numpy(largest), ".nested_quant_map": TABLE.clone()}
        said |= {"nested_blocksize": NESTED_SIZE, "nested_dtype": "float32", "nested_offset": offset}
    scaled = blocks / np.maximum(absmax, np.float32(1e-30))[:, None]
    q = np.concatenate([np.abs(row[:, None] - table).argmin(-1) for row in scaled]).astype(np.uint8)[: len(flat)]
    values = table[q] * absmax.repeat(size)[: len(flat)]
    even = np.pad(q, (0, len(q) % 2))
    parts[""] = torch.from_numpy(even[::2] << 4 | even[1::2]).view(storage)[:, None]
    parts[f".quant_state.bitsandbytes__{kind}"] = json_bytes(said)
    return parts, torch.from_numpy(values).view(weight.shape).to(getattr(torch, dtype))


def eight_bits(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """The same in 8 bits: by what follows the name of the module, values in fp32."""
    largest = weight.float().abs().amax(1)
    q = (weight.float() * (127 / largest[:, None])).round().to(torch.int8)
    values = (q.numpy().astype(np.float32) * largest.numpy()[:, None]) * np.float32(1 / 127)
    parts = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, torch.from_numpy(values)


def said(bits: int, **changes: Any) -> dict[str, Any]:
    """A quantization_config as transformers writes it."""
    own = {f"{begin}load_in_{each}bit": each == bits for each in (4, 8) for begin in ("", "_")}
    own |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4"}
    own |= {"llm_int8_skip_modules": None, "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
    return {"quant_method": "bitsandbytes", **own, **changes}
