"""Random messages of any type: values at and beyond every limit, and bytes that are hardly a message."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (0, 1, 2, 3, 7, 16, 130, 131, 2**15, 2**31 - 1)
NUMBERS = (0.0, 1.0, 0.5, -1.0, 2.0, 1e-9, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "a", "Once upon a time", "\0", "\n" * 300, "ä" * 100, "[" * 300, '{"type": "object"}', "(a|b)+", "start: /a/",
    "ngram", "beam", "sampling", "greedy", "0", "0.0", "5", "4", "🙂" * 50, "x" * 2000, "(((((", '{"$ref": "#"}',
)  # fmt: skip
DEEPEST = 5
SIGNED = {FieldDescriptor.CPPTYPE_INT32: 2**31, FieldDescriptor.CPPTYPE_INT64: 2**63}
UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 2**32, FieldDescriptor.CPPTYPE_UINT64: 2**64}


def fill(message: Message, rng: random.Random, share: float = 0.5, depth: int = 0) -> Message:
    """Give a share of a message's fields random values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > share or depth > DEEPEST:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            table = getattr(message, field.name)
            for _ in range(rng.randrange(3)):
                key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
                if value.message_type is None:
                    table[scalar(key, rng)] = scalar(value, rng)
                else:
                    fill(table[scalar(key, rng)], rng, share, depth + 1)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(rng.choice((0, 1, 2, 5, 40))):
                if field.message_type is None:
                    values.append(scalar(field, rng))
                else:
                    fill(values.add(), rng, share, depth + 1)
        elif field.message_type is None:
            setattr(message, field.name, scalar(field, rng))
        else:
            own = getattr(message, field.name)
            own.SetInParent()
            fill(own, rng, share, depth + 1)
    return message


def scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in SIGNED:
        most = SIGNED[kind]
        return rng.choice((*INTEGERS, -1, -most, most - 1, rng.randrange(-most, most)))
    if kind in UNSIGNED:
        most = UNSIGNED[kind]
        return rng.choice((*INTEGERS, most - 1, rng.randrange(most)))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((*NUMBERS, rng.uniform(-3, 3)))
    text = rng.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut off, or doubled."""
    changed = bytearray(data or b"\x0a\x02hi")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        if rng.random() < 0.5:
            changed[at] = rng.randrange(256)
        elif rng.random() < 0.5:
            del changed[at : at + rng.randrange(1, 9)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 9)]
        if not changed:
            changed = bytearray(b"\x0a")
    return bytes(changed)
