"""Prompts that are read: as text and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedec.core.request import Request
from pagedec.errors import InvalidArgument
from pagedec.inputs import are_ids, is_array, read_mapping, read_token_ids
from pagedec.lora.request import LoRARequest
from pagedec.params import RequestParams
from pagedec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """One checked prompt, under the id that the engine knows it by."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: RequestParams
    lora: LoRARequest | None = None


class Prepared(NamedTuple):
    """A job, and the request that the engine's loop takes for it: the loop's then, so that it goes when it is over."""

    job: Job
    request: Request


def read_prompt(
    prompt: Any, field: str, tokenizer: Tokenizer | None, max_tokens: int | None = None, special_tokens: bool = True
) -> tuple[str | None, list[int], str]:
    """A prompt's text if there is one, its token ids, and its cache salt. Raises `InvalidArgument` naming `field`.

    A text that certainly has more than `max_tokens` tokens is refused before it is tokenised; None: however long it is,
    it will be cut. `special_tokens`: the text is given those that its model wants around it.
    """
    text, token_ids, salt = None, prompt, ""
    if isinstance(prompt, Mapping):
        text, token_ids, salt = read_mapping(prompt, field)
        if token_ids is not None:
            return text, read_token_ids(f"{field}.prompt_token_ids", token_ids), salt
        token_ids = text
    if isinstance(token_ids, str):
        if tokenizer is None:
            raise InvalidArgument(field, token_ids, "must be token ids: the engine runs with skip_tokenizer_init")
        if max_tokens is not None:
            tokenizer.check_length(token_ids, max_tokens, field)
        return token_ids, tokenizer.encode(token_ids, special_tokens), salt
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, Mapping))
    if is_array(prompt) or (is_list and are_ids(prompt)):
        return None, read_token_ids(field, prompt), salt
    raise InvalidArgument(field, prompt, "must be text, a list of token ids, or a mapping with one of them")
