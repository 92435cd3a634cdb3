"""What may be asked: prompts as text, as token ids, or as arrays of them. Names follow vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeAlias, TypedDict, TypeGuard

from pagedec.errors import FeatureNotAvailable, InvalidArgument, Shown, counted
from pagedec.fields import check_encodable
from pagedec.lora.request import LoRARequest

__all__ = ["Array", "Prompt", "PromptType", "TextPrompt", "TokensPrompt"]


KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MISSING_KEYS = {
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), "images, audio and video"),
    "prompt_embeds": "prompts as embeddings",
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "models with an encoder"),
}
"""Keys of vLLM's prompts that ask for what there is not, unless they are empty."""
NO_TOKEN_IDS = ("float", "bfloat", "complex", "bool")
"""How the types of numbers begin that are no token ids."""


@dataclass(frozen=True, slots=True)
class Only:
    """What an argument may be, because it is done here, or asks for nothing. Anything else asks for `missing`."""

    values: tuple[Any, ...]
    missing: str
    is_secret: bool = False

    def check(self, name: str, value: object) -> None:
        if not any(type(value) is type(one) and value == one for one in self.values):
            available = ", ".join(map(repr, self.values))
            limit = f"{self.missing} not available in this version; available: {available}"
            raise FeatureNotAvailable(name, Shown("a secret") if self.is_secret else value, limit)


_TOKENIZING = "tokenizing with options (truncate_prompt_tokens is one of SamplingParams) is"
CALL_ONLY: dict[str, Only] = {
    "chat_template_content_format": Only(
        ("auto", None), "contents in another form than the template reads (parts where it reads them, else text) are"
    ),
    "tokenization_kwargs": Only((None, {}), _TOKENIZING),
    "mm_processor_kwargs": Only((None, {}), "images, audio and video are"),
    "prompt_adapter_request": Only((None,), "prompt adapters are"),
    "guided_options_request": Only((None,), "another name of structured_outputs of SamplingParams is"),
    "prompt_text": Only((None,), "a text beside the prompt, but in a mapping with prompt_token_ids, is"),
    "trace_headers": Only((None, {}), "tracing is"),
    "data_parallel_rank": Only((None, 0), "a choice among engines is"),
    "reasoning_ended": Only((None,), "telling thoughts from answers is"),
    "reasoning_parser_kwargs": Only((None, {}), "telling thoughts from answers is"),
}
"""Arguments of vLLM's `generate` and `chat`, of all versions since 0.7, that there are not, and what they may be."""


PARAMS_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "guided_decoding", "thinking_token_budget", "repetition_detection"), (None,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "flat_logprobs"), (False,)),
    "length_penalty": (1.0,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "skip_clone": (False, True),
}
"""Fields of vLLM's `SamplingParams` that are none here, and what they may be, since it asks for nothing."""


class CallArgs(TypedDict, total=False):
    """The same by their types."""

    chat_template_content_format: str | None
    tokenization_kwargs: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None
    prompt_adapter_request: None
    guided_options_request: None
    prompt_text: None
    trace_headers: Mapping[str, str] | None
    data_parallel_rank: int | None
    reasoning_ended: None
    reasoning_parser_kwargs: dict[str, Any] | None


class Array(Protocol):
    """A numpy array, a torch tensor, or whatever else says what its numbers are and gives them as a list."""

    @property
    def dtype(self) -> Any: ...

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


class TextPrompt(TypedDict, total=False):
    """A prompt as text. Blocks of the prefix cache are shared only between prompts of the same `cache_salt`."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. `prompt` is then only what the output repeats."""

    prompt_token_ids: Sequence[int] | Array
    prompt: str
    cache_salt: str


Prompt: TypeAlias = str | Sequence[int] | Array | TextPrompt | TokensPrompt | Mapping[str, Any]
PromptType: TypeAlias = Prompt
"""vLLM's name of it."""


def are_ids(tokens: Iterable[object]) -> bool:
    """Whether all are whole numbers; of Python's own a million are told in some 20 ms."""
    return all(kind is int or (issubclass(kind, Integral) and kind is not bool) for kind in set(map(type, tokens)))


def is_listed(value: object, *others: type) -> TypeGuard[Iterable[Any]]:
    """Whether it is several things in a row: no text, none of `others`, and no array without a dimension."""
    return (
        isinstance(value, Iterable) and not isinstance(value, (str, bytes, *others)) and getattr(value, "ndim", 1) > 0
    )


def is_array(value: object) -> bool:
    """Whether it is a numpy array, a torch tensor or the like, of numbers: one of texts or of objects is but a list of
    them."""
    if not (hasattr(value, "tolist") and hasattr(value, "ndim") and hasattr(value, "dtype")):
        return False
    kind = _number_type(value).lower()
    return "int" in kind or kind.startswith(NO_TOKEN_IDS)


def _number_type(array: Any) -> str:
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")


def unpacked(field: str, array: Any, dimensions: tuple[int, ...] = (1,)) -> list[Any]:
    """An array's numbers, which must be whole. Raises `InvalidArgument` naming its type and shape."""
    kind = _number_type(array)
    value = Shown(f"{'an' if kind.startswith('i') else 'a'} {kind} array of shape {tuple(array.shape)}")
    if kind.startswith(NO_TOKEN_IDS):
        raise InvalidArgument(field, value, "must be of whole numbers: token ids")
    if array.ndim not in dimensions:
        several = ", or two: several prompts of one length" if 2 in dimensions else ""
        raise InvalidArgument(field, value, f"must have one dimension{several}")
    return list(array.tolist())


def as_list(prompts: object, field: str = "prompts") -> list[Any]:
    """One prompt is a list of one: text, a mapping, or a non-empty list of token ids. An array of two dimensions is
    several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if is_array(prompts):
        rows = unpacked(field, prompts, (1, 2))
        return [rows] if getattr(prompts, "ndim", 1) == 1 else rows
    if not is_listed(prompts, bytearray):
        raise InvalidArgument(field, prompts, "must be a prompt or a list of them: text, token ids, or mappings")
    many: list[Any] = list(prompts)
    return [many] if many and are_ids(many) else many


def with_token_ids(prompts: object, prompt_token_ids: object) -> list[Any]:
    """The prompts of a call that may bring their token ids apart, as vLLM's older calls do; their texts are then only
    what outputs repeat."""
    field = "prompt_token_ids"
    if prompt_token_ids is None:
        return as_list(prompts)
    if not is_listed(prompt_token_ids, Mapping) and not is_array(prompt_token_ids):
        raise InvalidArgument(field, prompt_token_ids, "must be token ids, or a list of such lists")
    rows = as_list(prompt_token_ids, field)
    each = [read_token_ids(f"{field}[{i}]", row) for i, row in enumerate(rows)]
    if prompts is None:
        return each
    texts = as_list(prompts)
    if len(each) != len(texts):
        raise InvalidArgument(
            field, Shown(f"a list of {len(each)}"), f"must hold the token ids of each of {len(texts)} prompts"
        )
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidArgument(f"prompts[{i}]", text, f"must be text where {field} has its token ids")
    return [{"prompt": text, field: row} for text, row in zip(texts, each, strict=True)]


def read_token_ids(field: str, token_ids: Any) -> list[int]:
    """Token ids as a list of Python's own numbers."""
    if is_array(token_ids):
        return unpacked(field, token_ids)
    is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray))
    if not is_list or not are_ids(token_ids):
        raise InvalidArgument(field, token_ids, "must be token ids: whole numbers in a list or an array")
    return list(map(int, token_ids))


def as_params(sampling_params: Any, count: int, what: str) -> tuple[list[Any], list[str]]:
    """Parameters of each of `count` prompts or branches (`what`), of one object for all or of a list of one for each;
    and what errors call them: "" where all have the same."""
    is_list = isinstance(sampling_params, (list, tuple))
    each = list(sampling_params) if is_list else [sampling_params] * count
    if len(each) != count:
        limit = f"must be one, or one for each of {counted(count, what)}"
        raise InvalidArgument("sampling_params", Shown(f"a list of {len(each)}"), limit)
    return each, [f"sampling_params[{i}]" if is_list else "" for i in range(count)]


def as_priorities(priority: object, num_prompts: int) -> list[int]:
    """One number for each prompt."""
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)) or not are_ids(priority):
        raise InvalidArgument("priority", priority, "must be a list of whole numbers, one for each prompt")
    if len(priority) != num_prompts:
        raise InvalidArgument(
            "priority", Shown(f"a list of {len(priority)}"), f"must hold one number for each of {num_prompts} prompts"
        )
    return [int(number) for number in priority]


def as_priority(priority: object) -> int:
    """One number."""
    if not are_ids([priority]):
        raise InvalidArgument("priority", priority, "must be a whole number; lower ones run earlier")
    return int(priority)  # type: ignore[call-overload]


def as_lora(lora_request: object, field: str = "lora_request") -> LoRARequest | None:
    """An adapter, or None."""
    if lora_request is not None and not isinstance(lora_request, LoRARequest):
        raise InvalidArgument(field, lora_request, "must be a LoRARequest or None")
    return lora_request


def as_loras(lora_request: object, num_prompts: int) -> list[LoRARequest | None]:
    """The adapter of each prompt: one for all, or one or None for each."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * num_prompts
    if not isinstance(lora_request, (list, tuple)):
        raise InvalidArgument("lora_request", lora_request, "must be a LoRARequest, None, or a list of them")
    if len(lora_request) != num_prompts:
        limit = f"must be one, or one or None for each of {counted(num_prompts, 'prompt')}"
        raise InvalidArgument("lora_request", Shown(f"a list of {len(lora_request)}"), limit)
    return [as_lora(one, f"lora_request[{i}]") for i, one in enumerate(lora_request)]


def as_conversations(messages: object) -> tuple[list[Any], bool]:
    """The conversations, and whether they were several: a list of messages is one, a list of such lists is several."""
    if not is_listed(messages, Mapping):
        limit = 'must be a list of messages such as {"role": "user", "content": "Hi"}, or a list of such lists'
        raise InvalidArgument("messages", messages, limit)
    many = list(messages)
    several = bool(many) and all(isinstance(item, (list, tuple)) for item in many)
    return (many, True) if several else ([many], False)


def read_salt(field: str, salt: object) -> str:
    """A cache salt, whose bytes can be hashed."""
    if not isinstance(salt, str):
        raise InvalidArgument(field, salt, "must be text")
    check_encodable(field, salt)
    return salt


def read_mapping(prompt: Mapping[str, Any], field: str) -> tuple[str | None, Any, str]:
    """Text, token ids and cache salt of a prompt that is a mapping, at least one of the first two not None."""
    for key, feature in MISSING_KEYS.items():
        if (value := prompt.get(key)) is not None and not (isinstance(value, Mapping) and not value):
            raise FeatureNotAvailable(f"{field}.{key}", value, f"{feature} are not available in this version")
    given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if not given or any(key not in KEYS and key not in MISSING_KEYS for key in prompt):
        limit = "must have prompt or prompt_token_ids, may have cache_salt, and nothing else"
        if "role" in prompt:
            limit += "; messages of a chat go to `chat`"
        raise InvalidArgument(field, list(prompt), limit)
    text, salt = prompt.get("prompt"), prompt.get("cache_salt") or ""
    if text is not None and not isinstance(text, str):
        raise InvalidArgument(f"{field}.prompt", text, "must be text")
    return text, prompt.get("prompt_token_ids"), read_salt(f"{field}.cache_salt", salt)


def as_continuations(continuations: Any, field: str = "continuations") -> list[Any]:
    """What `score` is given, as a list."""
    if not is_listed(continuations, Mapping):
        raise InvalidArgument(field, continuations, "must be a list of texts, or of lists of token ids")
    return list(continuations)


def as_continuations_of_each(continuations: Any, count: int) -> list[tuple[Any, str]]:
    """What `score_all` is given for each of `count` branches, not looked at yet, and what errors call it."""
    is_list = isinstance(continuations, Sequence) and not isinstance(continuations, (str, bytes))
    if not is_list or len(continuations) != count:
        value = Shown(f"a list of {len(continuations)}") if is_list else continuations
        raise InvalidArgument("continuations", value, f"must hold a list for each of {counted(count, 'branch')}")
    return [(own, f"continuations[{i}]") for i, own in enumerate(continuations)]


def check_call(call: str, of_vllm: Mapping[str, Any]) -> None:
    """Raise `FeatureNotAvailable` for arguments of vLLM's that ask for what there is not, and, as Python does, a
    `TypeError` for one that neither has."""
    for name, value in of_vllm.items():
        if name not in CALL_ONLY:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        CALL_ONLY[name].check(name, value)


def without_nothing(of_vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `SamplingParams` but for those of vLLM's that ask for nothing."""
    return {
        name: value
        for name, value in of_vllm.items()
        if not any(type(value) is type(one) and value == one for one in PARAMS_ONLY.get(name, ()))
    }
