"""What a tokenizer returns when it is called, as transformers' do, and what such a call may say."""

from __future__ import annotations

from typing import Any

from pagedec.errors import FeatureNotAvailable
from pagedec.fields import Integer

_MAX_LENGTH = Integer("most tokens of a text")


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
    not_here = "not available in this version"
    if padding not in (False, "do_not_pad"):
        raise FeatureNotAvailable("padding", padding, f"{not_here}: prompts of different lengths need none")
    if return_tensors is not None:
        raise FeatureNotAvailable("return_tensors", return_tensors, f"{not_here}: torch.tensor(ids) makes one of lists")
    if truncation is not None and not isinstance(truncation, bool):
        raise FeatureNotAvailable("truncation", truncation, f"{not_here}; available: True, False")
    if truncation or max_length is not None:
        _MAX_LENGTH.check("max_length", max_length)


def numbers(given: Any) -> Any:
    """Python's own numbers where an array is given; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given
