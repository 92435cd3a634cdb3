"""What may be asked: prompts as text, as token ids, or as arrays of them. Names follow vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict

__all__ = ["Array", "Prompt", "PromptType", "TextPrompt", "TokensPrompt"]


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
