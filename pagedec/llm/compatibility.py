"""What scripts for vLLM give that has no use here, or that there is not: taken where it changes nothing, refused by
name where it asks for something."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from pagedec.config import engine_rules
from pagedec.errors import DtypeWarning, InvalidArgument
from pagedec.llm.of_vllm import ALIASES, FLOAT16, NEUTRAL, ON_DEVICE, ONLY, SPELLINGS, UNSET
from pagedec.runtime.numbers import is_on_device


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that vLLM's mean.

    Raises `InvalidArgument` for one that changes nothing but has a value that is none, and `FeatureNotAvailable` for
    one that asks for what there is not. Warns where float16 is asked of a CPU; the warning is of whoever called the
    caller.
    """
    known, kept = engine_rules(), dict[str, Any]()
    for name, value in arguments.items():
        if name in NEUTRAL:
            NEUTRAL[name].check(name, value)
        elif name in ONLY:
            is_ours = name == "device" and is_on_device(arguments.get("attention_backend"))
            (ON_DEVICE if is_ours else ONLY[name]).check(name, value)
        elif name not in ALIASES and (value is not None or name not in UNSET):
            kept[name] = value
    for name, ours in ALIASES.items():
        value = arguments.get(name)
        if value is None and ours in UNSET:
            continue
        if isinstance(value, str):
            value = SPELLINGS.get(ours, {}).get(value, value)
        if (value := known[ours][0].check(name, value)) is not None:
            if arguments.get(ours) is not None:
                raise InvalidArgument(name, arguments[name], f"is vLLM's name of {ours}; give one of them")
            kept[ours] = value
    if "dtype" in kept:
        kept["dtype"] = _dtype(kept["dtype"], is_on_device(kept.get("attention_backend")))
    for name, spellings in SPELLINGS.items():
        if isinstance(value := kept.get(name), str):
            kept[name] = spellings.get(value, value)
    return kept


def _dtype(dtype: Any, has_float16: bool) -> Any:
    """A dtype as a name, also where it is torch's own."""
    name = dtype if isinstance(dtype, str) else str(dtype)
    if not isinstance(dtype, str) and not name.startswith("torch."):
        return dtype
    name = name.removeprefix("torch.")
    if name not in FLOAT16:
        return name
    if has_float16:
        return "float16"
    warnings.warn(
        f"dtype is {name!r}: a CPU does not compute in float16; taken is bfloat16, which has its size and 3 bits less "
        f"of precision; dtype='float32' loses nothing of a float16 checkpoint",
        DtypeWarning,
        stacklevel=4,
    )
    return "bfloat16"
