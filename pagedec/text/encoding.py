"""What a tokenizer returns when it is called, as transformers' do, and what such a call may say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import Flag, Integer
from pagedec.inputs import are_ids

_MAX_LENGTH = Integer("most tokens of a text")
_NOT_HERE = "not available in this version"
_OF_CALL = ("truncation", "max_length", "padding", "return_tensors")


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, by name and as attributes: a list of numbers for one text, a list of lists for
    several."""

    @classmethod
    def of(cls, token_ids: list[int]) -> Encoding:
        """The encoding of one text."""
        return cls(input_ids=token_ids, attention_mask=[1] * len(token_ids))

    @classmethod
    def of_many(cls, rows: list[list[int]]) -> Encoding:
        """The encoding of several texts, each as long as it is."""
        return cls(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


def check_call(truncation: object, max_length: object, padding: object, return_tensors: object) -> None:
    """Raise `FeatureNotAvailable` for what transformers' tokenizers do and ours do not, `InvalidArgument` for a wrong
    length."""
    if padding not in (False, "do_not_pad"):
        raise FeatureNotAvailable("padding", padding, f"{_NOT_HERE}: prompts of different lengths need none")
    if return_tensors is not None:
        raise FeatureNotAvailable(
            "return_tensors", return_tensors, f"{_NOT_HERE}: torch.tensor(ids) makes one of lists"
        )
    if truncation is not None and not isinstance(truncation, bool):
        raise FeatureNotAvailable("truncation", truncation, f"{_NOT_HERE}; available: True, False")
    if truncation or max_length is not None:
        _MAX_LENGTH.check("max_length", max_length)


def numbers(given: Any) -> Any:
    """Python's own numbers where an array is given; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def taken_out(template_kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """What `apply_chat_template` is told of the tokenizing, as transformers' is, taken out of the variables of a
    template; and whether it is to return an `Encoding`. Raises `FeatureNotAvailable` for what there is not."""
    for name in ("return_assistant_tokens_mask", "tokenizer_kwargs"):
        if value := template_kwargs.pop(name, None):
            raise FeatureNotAvailable(name, value, _NOT_HERE)
    is_table = Flag("").check("return_dict", template_kwargs.pop("return_dict", False))
    told = {name: template_kwargs.pop(name) for name in _OF_CALL if name in template_kwargs}
    return {"truncation": False, **told}, is_table  # where nothing is said of it, a length cuts nothing


def ids_of(given: Any) -> list[int]:
    """Token ids of a text, or the only one. Raises `InvalidArgument` for what is none."""
    plain = numbers(given)
    if isinstance(plain, int):
        return [plain]
    if isinstance(plain, Iterable) and not isinstance(plain, (str, bytes, Mapping)):
        found = list(plain)
        if are_ids(found) or are_ids(found := list(map(numbers, found))):
            return found
    raise InvalidArgument("token_ids", given, "must be token ids, or one; batch_decode takes several rows of them")


def check_clean_up(asked: bool | None) -> None:
    """Raise `FeatureNotAvailable` where spaces are to be cleaned up: text is the tokens' own bytes."""
    if asked:
        raise FeatureNotAvailable("clean_up_tokenization_spaces", asked, f"{_NOT_HERE}; available: None, False")
