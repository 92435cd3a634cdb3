"""Checkpoints of bitsandbytes, as transformers writes them: linear layers in 4 bits (Dettmers et al. 2023, QLoRA) or in
8 (Dettmers et al. 2022, LLM.int8()).

A weight `NAME` [n, k] in 4 bits is

    NAME                   n * k codes, row behind row, two a byte, the first in the high bits; bytes, or as many of
                           them in another dtype
    NAME.absmax            fp32, what the codes of a block are multiplied with: `blocksize` values, also of two rows;
                           uint8 where these are codes themselves, of blocks of `nested_blocksize`, with
    NAME.nested_quant_map  fp32 [256], what one of them stands for,
    NAME.nested_absmax     fp32, what that is multiplied with, and `nested_offset`, which is added
    NAME.quant_map         fp32 [16], what a code stands for
    NAME.quant_state.bitsandbytes__nf4 or __fp4
                           uint8, a JSON object: shape, dtype of the values, sizes of blocks, offset

and in 8 bits `NAME` int8 beside `SCB` fp32 [n], the largest magnitude of each row, which is 127, and `weight_format`,
the order of values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pagedec.errors import InvalidArgument, ModelFileError, shown
from pagedec.formats.files import parse_json_object
from pagedec.formats.scaled import QuantisedSource, ScaledSource, ScaledWeight
from pagedec.formats.source import WeightSource
from pagedec.formats.values import MAX_INT32, is_int

METHOD = "bitsandbytes"
_E2M1 = [value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
CODES = {
    "nf4": torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ]
    ),
    "fp4": torch.tensor(_E2M1 + [0.0] + [-value for value in _E2M1[1:]]),
}
"""What a code stands for, of the largest magnitude in its block: quantiles of a normal distribution, or floats."""
LIKE = 1e-3
"""How far a stored table may be from these, which bitsandbytes goes by, whatever is stored."""
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STATE = f".quant_state.{METHOD}__"
MAX_STATE_BYTES = 4096  # some 170 are usual
NESTED = ("nested_absmax", "nested_quant_map")
PARTS = ("absmax", "quant_map", *NESTED)
PIECE = 1 << 18  # values at once: a megabyte of fp32
ROW_SCALE, FORMAT = "SCB", "weight_format"
UNIT = 1 / 127  # of the largest magnitude in a row


def read_bits(config: Mapping[str, Any]) -> int:
    """Return how many bits weights have by a config.json's quantization_config. Raises InvalidArgument for what cannot
    be read."""
    asked = {bits: config.get(f"load_in_{bits}bit") for bits in (4, 8)}
    for bits, value in asked.items():
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"quantization_config.load_in_{bits}bit", value, "must be true or false")
    if asked[4] and asked[8]:
        raise InvalidArgument("quantization_config.load_in_8bit", True, "must be false beside load_in_4bit")
    if not asked[4] and not asked[8]:
        raise InvalidArgument("quantization_config.load_in_4bit", asked[4], "must be true, or load_in_8bit")
    return 4 if asked[4] else 8


class BlockState(NamedTuple):
    """What the JSON object of a weight in 4 bits says. `nested`: the size of blocks of absmax and what is added; None:
    absmax has no codes."""

    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype
    size: int
    nested: tuple[int, float] | None

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_values // self.size)


class FourBitSource(QuantisedSource):
    """A safetensors source whose linear layers have 4 bits, under the names that they have as numbers."""

    def __init__(self, source: WeightSource) -> None:
        stored = source.names()
        states = _states(source, stored)
        quantised = {name.removesuffix(f".{part}") for part in PARTS for name in stored if name.endswith(f".{part}")}
        quantised |= {name for name in stored if name.endswith(".weight") and source.dtype(name) == torch.uint8}
        quantised |= states.keys()
        _check_some(source, quantised)
        used = {f"{name}.{part}" for name in quantised for part in PARTS}
        super().__init__(source, quantised, used.union(states.values()))
        self._state_names, self._states = states, dict[str, BlockState]()
        needed = [own for name in quantised for own in (name, f"{name}.absmax", f"{name}.quant_map")]
        needed += [f"{name}.{part}" for name in quantised if self._is_nested(name) for part in NESTED]
        lacking = [own for own in needed if own not in self.stored]
        _check_none(source, lacking + [f"{name}{STATE}nf4" for name in quantised - states.keys()])

    def _is_nested(self, name: str) -> bool:
        absmax = f"{name}.absmax"
        return f"{name}.{NESTED[0]}" in self.stored or (
            absmax in self.stored and self.source.dtype(absmax) == torch.uint8
        )

    def quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return [n, k] of a weight in 4 bits."""
        return self._state(name).shape

    def numbers_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a weight's values are rounded to."""
        return self._state(name).dtype

    def numbers(self, name: str) -> torch.Tensor:
        """Return a weight in 4 bits in its dtype, each value a product in fp32 that is rounded once. Raises
        ModelFileError where its parts do not fit each other."""
        state = self._state(name)
        raw, scale = self.source.load(name).reshape(-1).view(torch.uint8), self._scale(name, state)
        byte = torch.arange(256)
        table = CODES[state.kind]
        pairs = torch.stack([table[byte >> 4], table[byte & 15]], 1).view(torch.int64)[:, 0]  # two values a byte
        values = torch.empty(state.num_values, dtype=state.dtype)
        for begin in range(0, state.num_values, PIECE):
            codes = raw[begin // 2 : (begin + PIECE) // 2].int()
            piece = torch.index_select(pairs, 0, codes).view(torch.float32)
            own, whole = scale[begin // state.size : (begin + PIECE) // state.size], len(piece) // state.size
            piece[: whole * state.size].view(-1, state.size).mul_(own[:whole, None])
            piece[whole * state.size :] *= own[-1]  # of a last block that is not full
            values[begin : begin + PIECE] = piece[: state.num_values - begin]
        return values.view(state.shape)

    def _scale(self, name: str, state: BlockState) -> torch.Tensor:
        """fp32 [blocks]."""
        stored = f"{name}.absmax"
        scale = self._part(stored, state.num_blocks, state.nested is None)
        if state.nested is not None:
            size, offset = state.nested
            table = self._part(f"{name}.nested_quant_map", 256).float()
            largest = self._part(f"{name}.nested_absmax", -(-len(scale) // size)).float()
            each = largest.repeat_interleave(min(size, len(scale)))[: len(scale)]
            scale = table[scale.int()] * each + torch.tensor(offset)
        if not torch.isfinite(scale.to(state.dtype)).all():
            dtype = str(state.dtype).removeprefix("torch.")
            raise ModelFileError(self.path, f"tensor {stored} has a scale that is infinite or NaN, as {dtype} has it")
        return scale.float()

    def _part(self, stored: str, count: int, is_float: bool = True) -> torch.Tensor:
        """A tensor of one dimension."""
        tensor = self.source.load(stored).reshape(-1)
        if not (tensor.dtype.is_floating_point if is_float else tensor.dtype == torch.uint8):
            wanted = "floating point" if is_float else "uint8"
            raise ModelFileError(self.path, f"tensor {stored} is {tensor.dtype}, not {wanted}")
        if len(tensor) != count:
            raise ModelFileError(self.path, f"tensor {stored} has {len(tensor)} values, must have {count}")
        return tensor

    def _state(self, name: str) -> BlockState:
        if name not in self._states:
            self._states[name] = self._read_state(name)
        return self._states[name]

    def _read_state(self, name: str) -> BlockState:
        """Read what is said of a weight, and check that it fits the weight's bytes before anybody allocates by it."""
        stored = self._state_names[name]
        num_bytes = math.prod(self.source.shape(stored))
        if self.source.dtype(stored) != torch.uint8 or num_bytes > MAX_STATE_BYTES:
            told = f"tensor {stored} is {num_bytes} of {self.source.dtype(stored)}"
            raise ModelFileError(self.path, f"{told}, must be at most {MAX_STATE_BYTES} bytes")
        said = parse_json_object(self.path, bytes(self.source.load(stored).flatten().tolist()), f"tensor {stored}")
        state = self._checked_state(stored, said, self._is_nested(name))
        num_bytes = math.prod(self.source.shape(name)) * self.source.dtype(name).itemsize
        needed = (state.num_values + 1) // 2
        if num_bytes != needed:
            n, k = state.shape
            raise ModelFileError(self.path, f"tensor {name} has {num_bytes} bytes, [{n}, {k}] in 4 bits has {needed}")
        table = self._part(f"{name}.quant_map", 16).float()
        if not bool(((table - CODES[state.kind]).abs() <= LIKE).all()):
            raise ModelFileError(self.path, f"tensor {name}.quant_map is not the table of {state.kind}")
        return state

    def _checked_state(self, stored: str, said: Mapping[str, Any], is_nested: bool) -> BlockState:
        kind = stored.rpartition(STATE)[2]
        value: Callable[[str], Any] = said.get

        def check(field: str, is_right: bool, limit: str) -> None:
            if not is_right:
                raise ModelFileError(self.path, f"tensor {stored}: {field} is {shown(value(field))}, must be {limit}")

        shape, size, dtype = value("shape"), value("blocksize"), value("dtype")
        check("quant_type", value("quant_type") == kind, kind)
        check("dtype", isinstance(dtype, str) and dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        check("blocksize", is_int(size) and size in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}")
        is_pair = isinstance(shape, list) and len(shape) == 2
        check("shape", is_pair and all(is_int(side) and 0 < side <= MAX_INT32 for side in shape), "two sizes")
        nested = None
        if is_nested:
            each, offset = value("nested_blocksize"), value("nested_offset")
            check("nested_blocksize", is_int(each) and each > 0, "an integer of at least 1")
            check("nested_dtype", value("nested_dtype") == "float32", "float32")
            is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
            check("nested_offset", is_number and abs(offset) <= sys.float_info.max, "a finite number")
            nested = each, float(offset)
        return BlockState(kind, (shape[0], shape[1]), DTYPES[dtype], size, nested)


class EightBitSource(ScaledSource):
    """A safetensors source whose linear layers have 8 bits, under the names that they have as numbers."""

    def __init__(self, source: WeightSource) -> None:
        stored = source.names()
        quantised = {name.removesuffix(ROW_SCALE) + "weight" for name in stored if name.endswith(f".{ROW_SCALE}")}
        quantised |= {name for name in stored if name.endswith(".weight") and source.dtype(name) == torch.int8}
        _check_some(source, quantised)
        super().__init__(source, quantised, {_beside(name, own) for name in quantised for own in (ROW_SCALE, FORMAT)})
        needed = [own for name in quantised for own in (name, self.scale_name(name))]
        _check_none(source, [own for own in needed if own not in self.stored])

    def quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return [n, k] of a weight in 8 bits."""
        return self.source.shape(name)

    def scale_name(self, name: str) -> str:
        """Return the name of what a weight's rows are scaled by."""
        return _beside(name, ROW_SCALE)

    def numbers(self, name: str) -> torch.Tensor:
        """Return a weight in 8 bits, fp32: products in bitsandbytes' order. Raises ModelFileError where its parts do
        not fit each other."""
        q, largest = self._parts(name)
        return q.float() * largest * UNIT

    def scaled_weight(self, name: str) -> ScaledWeight:
        """Return a weight in 8 bits. Raises ModelFileError where its parts do not fit each other."""
        q, largest = self._parts(name)
        return ScaledWeight(q, 8, largest * UNIT, 1, q.shape[1])

    def _parts(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [n, k] and fp32 [n, 1], of which 127 is the value of a row."""
        q, largest, order = self.source.load(name), self.source.load(self.scale_name(name)), _beside(name, FORMAT)
        problem = ""
        if q.dtype != torch.int8 or q.ndim != 2:
            problem = f"{name} is {q.dtype} {list(q.shape)}, not int8 of two dimensions"
        elif not largest.dtype.is_floating_point or largest.numel() != len(q):
            told = f"{self.scale_name(name)} is {largest.dtype} {list(largest.shape)}"
            problem = f"{told}, not floating point for each of {len(q)} rows"
        elif not bool(torch.isfinite(largest.float()).all()):  # floats of 8 bits cannot be asked
            problem = f"{self.scale_name(name)} has a scale that is infinite or NaN"
        elif order in self.stored and bool((self.source.load(order) != 0).any()):
            problem = f"{order} is not 0: other orders of values than row by row are not supported"
        if problem:
            raise ModelFileError(self.path, f"tensor {problem}")
        return q, largest.reshape(-1, 1).float()


def _beside(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.{part}"


def _states(source: WeightSource, stored: Iterable[str]) -> dict[str, str]:
    """By the weights' names those of the tensors that describe them."""
    states = dict[str, str]()
    for own in stored:
        name, found, kind = own.rpartition(STATE)
        if found and kind not in CODES:
            raise ModelFileError(source.path, f"tensor {own} is of a kind that is not one of {', '.join(CODES)}")
        if found and name in states:
            raise ModelFileError(source.path, f"has both {' and '.join(sorted((states[name], own)))}")
        if found:
            states[name] = own
    return states


def _check_some(source: WeightSource, quantised: Collection[str]) -> None:
    if not quantised:
        raise ModelFileError(source.path, f"has no weight of {METHOD}, which its config.json says it has")


def _check_none(source: WeightSource, lacking: Sequence[str]) -> None:
    if lacking:
        raise ModelFileError(source.path, f"lacks tensor {min(lacking)} of a quantised weight")
