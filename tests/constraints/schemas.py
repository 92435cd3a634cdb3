"""Random JSON schemas whose values are short, so that answers end."""

from __future__ import annotations

import random
import string
from typing import Any

WORDS = ("name", "age", "tags", "größe", "is_ok", "a b", "x-y", "日本", 'q"t', "kind")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One of the kinds that llguidance carries out: all keywords that `jsonschema` can judge."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "object", "array", "anyOf"])
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 9)}
    if kind == "integer":
        low = rng.randrange(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5000)}
    if kind == "number":
        low = rng.randrange(-9, 9)
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randrange(1, 50)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, 2.5, True, None], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["".join(rng.choices(string.printable[:94], k=9)), {"a": [1, "b"]}, 17])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(red|green|blue)$"])}
    if kind == "array":
        low = rng.randrange(3)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(1, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
    names = rng.sample(WORDS, rng.randrange(1, 5))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
