"""Tensors of the Open Inference protocol: what a language model takes and gives of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pagedec.errors import InvalidArgument, Shown
from pagedec.v1 import open_inference_service_pb2 as pb

LENGTH = struct.Struct("<I")
"""Before each element of a BYTES tensor in its raw form: how many bytes it has."""
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
PACKED = {"FP32": "f", "UINT32": "I"}
MOST_DIMENSIONS = 8
"""Of a tensor that is read: each is 1."""


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Any]:
    """The one element of each tensor of a request, as text or bool. Raises `InvalidArgument` naming the tensor."""
    if len(request.inputs) > len(INPUTS):  # before they are read: a message may have a million of them
        limit = f"must be at most {len(INPUTS)}: each is given once"
        raise InvalidArgument("inputs", Shown(f"{len(request.inputs)} of them"), limit)
    raw: Iterator[bytes] = iter(request.raw_input_contents)
    found: dict[str, Any] = {}
    for tensor in request.inputs:
        name = tensor.name
        if name not in INPUTS:
            raise InvalidArgument("inputs", name, f"must be of {', '.join(INPUTS)}")
        if tensor.datatype != INPUTS[name]:
            raise InvalidArgument(f"inputs.{name}.datatype", tensor.datatype, f"must be {INPUTS[name]}")
        if name in found:
            raise InvalidArgument("inputs", name, "must have each tensor once")
        if len(tensor.shape) > MOST_DIMENSIONS:
            limit = f"must have at most {MOST_DIMENSIONS} dimensions"
            raise InvalidArgument(f"inputs.{name}.shape", Shown(f"{len(tensor.shape)} of them"), limit)
        if any(length != 1 for length in tensor.shape):
            raise InvalidArgument(f"inputs.{name}.shape", list(tensor.shape), "must be of one element")
        if tensor.HasField("contents"):
            contents = tensor.contents
            values = list(contents.bytes_contents if INPUTS[name] == "BYTES" else contents.bool_contents)
            if len(values) != 1:
                raise InvalidArgument(
                    f"inputs.{name}.contents", Shown(f"{len(values)} elements"), "must be of one element"
                )
            value = values[0]
        else:
            value = _unpacked(name, next(raw, None))
        found[name] = _text(name, value) if isinstance(value, bytes) else value
    if "text_input" not in found:
        raise InvalidArgument("inputs.text_input", None, "must be given")
    return found


def write_output(response: pb.ModelInferResponse, name: str, values: Sequence[Any]) -> None:
    """Add a tensor of one dimension, in its raw form."""
    kind = OUTPUTS[name]
    response.outputs.add(name=name, datatype=kind, shape=[len(values)])
    if kind == "BYTES":
        encoded = [str(value).encode() for value in values]
        response.raw_output_contents.append(b"".join(LENGTH.pack(len(data)) + data for data in encoded))
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{PACKED[kind]}", *values))


def _unpacked(name: str, data: bytes | None) -> bytes | bool:
    if data is None:
        raise InvalidArgument(f"inputs.{name}", None, "must have contents, or raw_input_contents")
    if INPUTS[name] == "BOOL":
        if len(data) != 1:
            raise InvalidArgument(f"inputs.{name}", Shown(f"{len(data)} bytes"), "must be one byte")
        return data != b"\0"
    if len(data) < LENGTH.size or LENGTH.unpack_from(data)[0] != len(data) - LENGTH.size:
        limit = "must be one element: four bytes of its length, little endian, and as many bytes"
        raise InvalidArgument(f"inputs.{name}", Shown(f"{len(data)} bytes"), limit)
    return data[LENGTH.size :]


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        limit = f"must be text in UTF-8, has another byte at {error.start}"
        raise InvalidArgument(f"inputs.{name}", Shown(f"{len(data)} bytes"), limit) from None
