"""What may be a prompt, a list of prompts, or a list of conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, TypedDict

from pagedec.core.request import Request
from pagedec.errors import InvalidArgument
from pagedec.fields import check_encodable
from pagedec.params import RequestParams
from pagedec.text.chat_template import Message
from pagedec.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text. Blocks of the prefix cache are shared only between prompts of the same `cache_salt`."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. `prompt` is then only what the output repeats."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class Job:
    """One checked prompt, under the id that the engine knows it by."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: RequestParams


class Prepared(NamedTuple):
    """A job, and the request that the engine's loop takes for it: the loop's then, so that it goes when it is over."""

    job: Job
    request: Request


def is_id(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def as_list(prompts: object) -> list[Any]:
    """One prompt is a list of one: text, a mapping, or a non-empty list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts", prompts, "must be a prompt or a list of them: text, token ids, or mappings")
    many: list[Any] = list(prompts)
    return [many] if many and all(map(is_id, many)) else many


def as_priorities(priority: object, num_prompts: int) -> list[int]:
    """One number for each prompt."""
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)) or not all(map(is_id, priority)):
        raise InvalidArgument("priority", priority, "must be a list of whole numbers, one for each prompt")
    if len(priority) != num_prompts:
        raise InvalidArgument("priority", len(priority), f"must hold one number for each of {num_prompts} prompts")
    return [int(number) for number in priority]


def as_conversations(messages: object) -> tuple[list[Sequence[Message]], bool]:
    """The conversations, and whether they were several: a list of messages is one, a list of such lists is several."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
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


def read_prompt(
    prompt: Any, field: str, tokenizer: Tokenizer | None, max_tokens: int | None = None, special_tokens: bool = True
) -> tuple[str | None, list[int], str]:
    """A prompt's text if there is one, its token ids, and its cache salt. Raises `InvalidArgument` naming `field`.

    A text that certainly has more than `max_tokens` tokens is refused before it is tokenised; None: however long it is, it
    will be cut. `special_tokens`: the text is given those that its model wants around it.
    """
    text, token_ids, salt = None, prompt, ""
    if isinstance(prompt, Mapping):
        given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
        if not given or any(key not in KEYS for key in prompt):
            limit = "must have prompt or prompt_token_ids, may have cache_salt, and nothing else"
            raise InvalidArgument(field, list(prompt), limit)
        text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
        if text is not None and not isinstance(text, str):
            raise InvalidArgument(f"{field}.prompt", text, "must be text")
        if isinstance(token_ids, str):
            raise InvalidArgument(f"{field}.prompt_token_ids", token_ids, "must be token ids")
        salt = read_salt(f"{field}.cache_salt", salt)
        token_ids = text if token_ids is None else token_ids
    if isinstance(token_ids, str):
        if tokenizer is None:
            raise InvalidArgument(field, token_ids, "must be token ids: the engine runs with skip_tokenizer_init")
        if max_tokens is not None:
            tokenizer.check_length(token_ids, max_tokens, field)
        return token_ids, tokenizer.encode(token_ids, special_tokens), salt
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, (bytes, bytearray)) and all(map(is_id, token_ids)):
        return text, [int(token) for token in token_ids], salt
    raise InvalidArgument(field, prompt, "must be text, a list of token ids, or a mapping with one of them")
