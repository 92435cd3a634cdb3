"""Which adapter a request goes through, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from pagedec.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, and the directory that PEFT has written, or a .gguf file. Requests of one name share one;
    `lora_int_id` is another name of it, and must be one's own. Raises InvalidArgument."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or "\0" in value:
                raise InvalidArgument(field, value, "must be a text that is not empty")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidArgument("lora_int_id", self.lora_int_id, "must be a whole number above 0")
