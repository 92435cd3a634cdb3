"""The records and signatures that Python calls the kernels with are those of pagedec.h, field by field."""

from __future__ import annotations

import ctypes
import re
import subprocess
from ctypes import POINTER, Structure, c_char_p, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagedec.core.forward import BEST_GROUP_DTYPE, BEST_ROW_DTYPE, DRAW_DTYPE
from pagedec.kernels import records, records_linear, records_ranks, records_readout
from pagedec.kernels.library import ABI_VERSION, CHAIN_DTYPE
from pagedec.kernels.prototypes import PROTOTYPES
from pagedec.kernels.reference_best import CANDIDATE_DTYPE
from tests.kernels.test_library import compiler

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "include" / "pagedec.h"
PARTS = (HEADER, *(HEADER.with_name(f"pagedec_{part}.h") for part in ("readout", "ranks", "experts", "lora")))
ENUMS: dict[str, tuple[str, type[IntEnum]]] = {  # of C: the prefix of its names, and ours
    "pd_dtype": ("PD_", records.Dtype),
    "pd_epilogue": ("PD_", records.Epilogue),
    "pd_quantization": ("PD_", records.Quantization),
    "pd_block_format": ("PD_", records.BlockFormat),
    "pd_kv_kind": ("PD_KV_", records.KvKind),
    "pd_expert_score": ("PD_", records.ExpertScore),
    "pd_op_kind": ("PD_OP_", records.OpKind),
}
HANDLES = {"pd_context", "pd_fetch", "pd_plan", "pd_recording"}
SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
RECORDS = {name: record for record, name in records.C_NAMES.items()}


class CType(NamedTuple):
    """`stars` pointers to a type."""

    base: str
    stars: int = 0

    def is_called(self, kind: Any) -> bool:
        """Whether a function's argument or result of this type may be declared as `kind`."""
        if self.stars == 0:
            return bool(kind is (None if self.base == "void" else SCALARS[self.base]))
        if self.base == "char":
            return kind is c_char_p
        if self.base in RECORDS:
            return self.stars == 1 and kind is POINTER(RECORDS[self.base])
        exact = SCALARS.get(self.base)
        for _ in range(self.stars if exact else 0):
            exact = POINTER(exact)
        return kind is c_void_p or (exact is not None and kind is exact)


class Header(NamedTuple):
    """What pagedec.h declares, in its order."""

    structs: dict[str, list[tuple[str, CType]]]
    enums: dict[str, dict[str, int]]
    handles: set[str]
    functions: dict[str, tuple[CType, list[CType]]]


def declared(text: str) -> tuple[str, CType]:
    """Name and type of one declaration; a parameter need not have a name."""
    match = re.fullmatch(r"(?:const )?(\w+)\s*([*\s]*)(\w*)", text.strip())
    assert match, f"not understood: {text!r}"
    return match[3], CType(match[1], match[2].count("*"))


def fields_of(body: str) -> list[tuple[str, CType]]:
    fields = []
    for line in filter(None, map(str.strip, body.split(";"))):
        first, *others = line.split(",")
        base = re.match(r"(?:const )?\w+", first.strip())
        assert base
        fields += [declared(text) for text in (first, *(f"{base[0]} {other}" for other in others))]
    return fields


def numbers_of(body: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for entry in filter(None, map(str.strip, body.split(","))):
        name, _, value = entry.partition("=")
        numbers[name.strip()] = int(value) if value else max(numbers.values(), default=-1) + 1
    return numbers


def parse(text: str) -> Header:
    """Nothing but the kinds of declarations of pagedec.h is understood."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    functions = {}
    for match in re.finditer(r"PD_EXPORT ([^()]*?)(\w+)\(([^)]*)\);", text):
        parameters = [] if match[3].strip() == "void" else [declared(part)[1] for part in match[3].split(",")]
        functions[match[2]] = (declared(match[1])[1], parameters)
    return Header(
        {m[2]: fields_of(m[1]) for m in re.finditer(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL)},
        {m[2]: numbers_of(m[1]) for m in re.finditer(r"typedef enum \{(.*?)\} (\w+);", text, re.DOTALL)},
        {m[1] for m in re.finditer(r"typedef struct (\w+) \1;", text)},
        functions,
    )


@pytest.fixture(scope="module")
def header() -> Header:
    return parse("".join(part.read_text() for part in PARTS))


def test_every_declaration_of_the_header_is_understood(header: Header) -> None:
    text = "".join(part.read_text() for part in PARTS)
    assert len(header.functions) == text.count("PD_EXPORT ") - text.count("#define PD_EXPORT ") > 25
    assert len(header.structs) + len(header.enums) + len(header.handles) == text.count("typedef ")
    assert f"#define PD_ABI_VERSION {ABI_VERSION}\n" in text


def test_a_small_header_is_understood() -> None:
    small = """typedef enum { A = 1, B, /* c */ C } letters; typedef struct thing thing;
    typedef struct { const int32_t *a, *b; /* x; y */ float c, d; } pair;
    PD_EXPORT const char *name(void); PD_EXPORT int f(thing *, const pair *p, int64_t n, const int32_t **words);"""
    array, number = CType("int32_t", 1), CType("float")
    assert parse(small) == Header(
        {"pair": [("a", array), ("b", array), ("c", number), ("d", number)]},
        {"letters": {"A": 1, "B": 2, "C": 3}},
        {"thing"},
        {
            "name": (CType("char", 1), []),
            "f": (CType("int"), [CType("thing", 1), CType("pair", 1), CType("int64_t"), CType("int32_t", 2)]),
        },
    )


def test_every_record_has_the_fields_of_its_struct(header: Header) -> None:
    modules = (records, records_linear, records_ranks, records_readout)
    ours = [v for module in modules for v in vars(module).values() if isinstance(v, type)]
    assert {record for record in ours if issubclass(record, Structure) and record is not Structure} == set(
        records.C_NAMES
    )
    assert set(RECORDS) == set(header.structs) and header.handles == HANDLES
    known = {**SCALARS, **RECORDS}
    for name, record in RECORDS.items():
        expected = [(field, c_void_p if kind.stars else known[kind.base]) for field, kind in header.structs[name]]
        assert (name, list(record._fields_)) == (name, expected)


def test_every_record_has_the_layout_that_a_compiler_gives_its_struct(tmp_path: Path) -> None:
    expressions, ours = [], []
    for record, name in records.C_NAMES.items():
        expressions.append(f"sizeof({name})")
        ours.append(ctypes.sizeof(record))
        for field, kind in record._fields_:
            expressions += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
            ours += [getattr(record, field).offset, ctypes.sizeof(kind)]
    expected = dict(zip(expressions, c_numbers(expressions, tmp_path), strict=True))
    assert dict(zip(expressions, ours, strict=True)) == expected


def c_numbers(expressions: list[str], directory: Path) -> list[int]:
    """Values of constant expressions over pagedec.h, as a compiler of plain C sees them."""
    lines = "\n".join(f'  printf("%lld\\n", (long long)({expression}));' for expression in expressions)
    source, program = directory / "print.c", directory / "print"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{lines}\n}}\n')
    options = ["-x", "c", "-std=c11", "-Wall", "-Werror", "-pedantic"]
    subprocess.run([compiler(), *options, str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in output.split()]


def test_every_enumeration_has_the_numbers_of_the_header(header: Header) -> None:
    ours = {
        name: {f"{prefix}{member.name}": int(member) for member in numbers} for name, (prefix, numbers) in ENUMS.items()
    }
    assert ours == header.enums


def test_every_function_is_declared_as_in_the_header(header: Header) -> None:
    assert set(PROTOTYPES) == set(header.functions)
    for name, (result, parameters) in header.functions.items():
        kinds, answer = PROTOTYPES[name]
        assert len(kinds) == len(parameters), name
        fitting = [parameter.is_called(kind) for parameter, kind in zip(parameters, kinds, strict=True)]
        assert all(fitting), f"{name}: argument {fitting.index(False)} is {kinds[fitting.index(False)]}"
        assert result.is_called(answer), f"{name}: its result is {answer}"


def test_every_kernel_of_a_program_is_a_function_of_a_context_and_its_record(header: Header) -> None:
    assert set(records.OP_KINDS.values()) == set(records.OpKind)
    for record, kind in records.OP_KINDS.items():
        name = f"pd_{kind.name.lower()}"
        assert records.C_NAMES[record] == f"{name}_args"
        assert header.functions[name] == (CType("int"), [CType("pd_context", 1), CType(f"{name}_args", 1)])


@pytest.mark.parametrize(
    ("dtype", "record"),
    [
        (DRAW_DTYPE, records.Draw),
        (CHAIN_DTYPE, records.RollChain),
        (BEST_ROW_DTYPE, records.BestRow),
        (BEST_GROUP_DTYPE, records.BestGroup),
        (CANDIDATE_DTYPE, records.Candidate),
    ],
)
def test_a_record_is_the_same_for_numpy(dtype: np.dtype[Any], record: type[Structure]) -> None:
    assert dtype.itemsize == ctypes.sizeof(record) and dtype.fields is not None
    assert [(name, *dtype.fields[name][:2]) for name in dtype.names or ()] == [
        (name, np.dtype(kind), getattr(record, name).offset)  # type: ignore[call-overload]
        for name, kind, *_ in record._fields_
    ]
