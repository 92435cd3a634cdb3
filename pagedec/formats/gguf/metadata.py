"""What a GGUF header says of the model: its architecture's fields, each checked as it is asked for.

What they mean in a model of ours is said in models/gguf_fields.py and by the families.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.gguf.header import GgufHeader
from pagedec.formats.gguf.tensor_names import LONG_FACTORS, NO_WEIGHTS, ROPE_FACTORS, SHORT_FACTORS
from pagedec.formats.values import is_int, layer_count, positive_int, positive_number, required

MAX_FACTORS = 4096  # half a head's size, far above any in use


@dataclass(frozen=True, slots=True)
class GgufFields:
    """A GGUF header's fields with what else describes a model: the tensors' names, and divisors of the rotary
    frequencies.

    `rope_factors` are the values of rope_freqs.weight, `longrope_factors` those of rope_factors_short.weight and
    rope_factors_long.weight.
    """

    fields: Mapping[str, Any]
    tensor_names: Collection[str] = ()
    rope_factors: Sequence[float] | None = None
    longrope_factors: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def name(self) -> str:
        """Return the architecture's name, with which its own fields begin."""
        return str(self.fields.get("general.architecture"))

    def integer(self, field: str, default: int | None = None) -> int:
        """Return the architecture's own field, an integer of at least 1."""
        value = self.get(field, default)
        positive_int(f"{self.name}.{field}", value)
        return int(value)

    def layers(self) -> int:
        """Return the number of the model's blocks: of those of a file, the last ones may predict further tokens."""
        count, behind = self.integer("block_count"), self.get("nextn_predict_layers", 0)
        layer_count(f"{self.name}.block_count", count)
        if not is_int(behind) or not 0 <= behind < count:
            limit = f"must be from 0 to {count - 1}, less than the blocks there are"
            raise InvalidArgument(f"{self.name}.nextn_predict_layers", behind, limit)
        return count - behind

    def number(self, field: str, default: float | None = None) -> float:
        """Return the architecture's own field, a finite number greater than 0."""
        value = self.get(field, default)
        positive_number(f"{self.name}.{field}", value)
        return float(value)

    def get(self, field: str, default: Any = None) -> Any:
        """Return the architecture's own field; raise InvalidArgument where it is missing and has no default."""
        value = self.fields.get(f"{self.name}.{field}", default)
        return required({f"{self.name}.{field}": value}, f"{self.name}.{field}")

    def token_ids(self) -> dict[str, Any]:
        """Return the vocabulary's size and the tokens that begin and end a text."""
        fields, tokens = self.fields, self.fields.get("tokenizer.ggml.tokens", ())
        ids = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        num_tokens = len(tokens) if isinstance(tokens, list) else None
        return {
            "vocab_size": fields.get(f"{self.name}.vocab_size", num_tokens),
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_ids": tuple(token for i, token in enumerate(ids) if token is not None and token not in ids[:i]),
        }


def of_all_layers(value: Any) -> Any:
    """Return what a field says of all layers, where it does: Granite 4's dense files repeat it for each."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _read_factors(header: GgufHeader) -> dict[str, tuple[float, ...]]:
    """Return the tensors of a file that belong to its configuration: the divisors of rotary frequencies, by name."""
    found = {}
    for name in NO_WEIGHTS:
        tensor = header.tensors.get(name)
        if tensor is None:
            continue
        if tensor.encoding.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            problem = f"tensor {name} is {tensor.encoding.name} {list(tensor.shape)}, must be a list of F32"
            raise ModelFileError(tensor.path, problem)
        values = np.fromfile(tensor.path, "<f4", tensor.shape[0], offset=tensor.start)
        if len(values) != tensor.shape[0]:
            raise ModelFileError(tensor.path, f"tensor {name} ends past the file: truncated?")
        found[name] = tuple(values.astype(float).tolist())
    return found


def read_gguf_fields(header: GgufHeader) -> GgufFields:
    """Return what a file says of its model, divisors of rotary frequencies read from their tensors; raise
    ModelFileError where they are damaged."""
    found = _read_factors(header)
    short, long = found.get(SHORT_FACTORS), found.get(LONG_FACTORS)
    if (short is None) != (long is None):
        raise ModelFileError(header.path, f"has only one of the tensors {SHORT_FACTORS} and {LONG_FACTORS}")
    longrope = None if short is None or long is None else (short, long)
    return GgufFields(header.fields, header.tensors.keys(), found.get(ROPE_FACTORS), longrope)
