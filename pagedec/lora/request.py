"""Which adapter a request goes through, by vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from pagedec.errors import FeatureNotAvailable, InvalidArgument

OF_VLLM = {
    "tensorizer_config_dict": (None, "adapters in tensorizer's files are"),
    "load_inplace": (False, "other weights under an adapter's name (remove it, and name it again) are"),
    "long_lora_max_len": (None, "adapters for longer contexts are"),
}
"""Fields of vLLM's that there are not, what they may be, and what others ask for."""
FILES = "a directory that PEFT has written, or a .gguf file"
"""What an adapter's path is of."""


def read_named(texts: Iterable[str]) -> dict[str, str]:
    """The paths of adapters by their names, of texts NAME=PATH. Raises InvalidArgument about `lora`."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise InvalidArgument("lora", text, f"must be NAME=PATH, the path that of {FILES}")
        if name in found:
            raise InvalidArgument("lora", text, f"must have a name of its own: {name} is {found[name]}")
        found[name] = path
    return found


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, and the directory that PEFT has written, or a .gguf file. Requests of one name share one;
    `lora_int_id` is another name of it, and must be one's own. A path may be an `os.PathLike`, whose text is kept.
    Raises InvalidArgument.

    The arguments behind these are vLLM's, and ask for nothing; `base_model_name` may be any text.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: InitVar[str | None] = field(default=None, kw_only=True)
    tensorizer_config_dict: InitVar[None] = field(default=None, kw_only=True)
    load_inplace: InitVar[bool] = field(default=False, kw_only=True)
    long_lora_max_len: InitVar[None] = field(default=None, kw_only=True)

    def __post_init__(
        self, base_model_name: str | None, tensorizer_config_dict: Any, load_inplace: Any, long_lora_max_len: Any
    ) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or "\0" in value:
                raise InvalidArgument(name, value, "must be a text that is not empty")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidArgument("lora_int_id", self.lora_int_id, "must be a whole number above 0")
        if base_model_name is not None and not isinstance(base_model_name, str):
            raise InvalidArgument("base_model_name", base_model_name, "must be a text or None")
        for (name, (nothing, missing)), given in zip(
            OF_VLLM.items(), (tensorizer_config_dict, load_inplace, long_lora_max_len), strict=True
        ):
            if given is not nothing:
                limit = f"{missing} not available in this version; available: {nothing!r}"
                raise FeatureNotAvailable(name, given, limit)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
