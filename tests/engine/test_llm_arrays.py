"""Token ids as numpy arrays and torch tensors: alone, in lists, in mappings and by keyword; what they may not be is
said by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import LLM, RequestOutput, SamplingParams
from pagedec.errors import InvalidArgument

Tiny = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT, OTHER = [5, 6, 7], [9, 3, 11]
MAKERS = [
    np.array, torch.tensor, lambda ids: np.array(ids, np.uint8), lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: np.array(ids, ">i8"),
]  # fmt: skip
KINDS = ["numpy", "torch", "uint8", "torch int32", "big-endian"]


@pytest.fixture
def llm(tiny: Tiny) -> LLM:
    return tiny(max_model_len=40)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    for output in outputs:
        assert all(type(token) is int for token in output.prompt_token_ids)
    return [output.prompt_token_ids for output in outputs]


@pytest.mark.parametrize("make", MAKERS, ids=KINDS)
def test_arrays_are_prompts(llm: LLM, make: Callable[[Any], Any]) -> None:
    want = llm.generate([PROMPT, OTHER], GREEDY, use_tqdm=False)

    def check(prompts: Any, expected: list[list[int]]) -> None:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert ids_of(outputs) == expected
        answers = {tuple(output.prompt_token_ids): output.outputs for output in want}
        assert all(output.outputs == answers[tuple(output.prompt_token_ids)] for output in outputs)

    check(make(PROMPT), [PROMPT])
    check([make(PROMPT)], [PROMPT])
    check((make(PROMPT), OTHER, {"prompt_token_ids": make(PROMPT)}), [PROMPT, OTHER, PROMPT])
    check(make([PROMPT, OTHER]), [PROMPT, OTHER])
    check({"prompt_token_ids": make(PROMPT)}, [PROMPT])
    [*_, streamed] = llm.stream(make(PROMPT), GREEDY)
    assert streamed.outputs == want[0].outputs


def test_arrays_of_text_are_lists_of_prompts(text_llm: LLM) -> None:
    words = ["One two", "Three"]
    for array in (np.array(words), np.array(words, object)):
        outputs = text_llm.generate(array, GREEDY, use_tqdm=False)
        assert [output.prompt for output in outputs] == words


@pytest.mark.parametrize(
    ("prompts", "field", "value", "limit"),
    [
        (np.array([5.0, 6.0]), "prompts", "a float64 array of shape (2,)", "must be of whole numbers: token ids"),
        (torch.tensor([5.0]), "prompts", "a float32 array of shape (1,)", "must be of whole numbers: token ids"),
        (torch.tensor([[5.0]], dtype=torch.bfloat16), "prompts", "a bfloat16 array of shape (1, 1)",
        "must be of whole"),
        (np.array([True]), "prompts", "a bool array of shape (1,)", "must be of whole numbers: token ids"),
        ([PROMPT, torch.tensor([5.0])], "prompts[1]", "a float32 array of shape (1,)", "must be of whole numbers"),
        ([np.array([[5, 6]])], "prompts[0]", "an int64 array of shape (1, 2)", "must have one dimension"),
        (np.zeros((1, 2, 3), int), "prompts", "an int64 array of shape (1, 2, 3)", "must have one dimension, or two"),
        (torch.tensor(5), "prompts", "an int64 array of shape ()", "must have one dimension, or two"),
        ({"prompt_token_ids": np.array([5.0])}, "prompts[0].prompt_token_ids", "a float64 array of shape (1,)",
         "must be of whole numbers"),
        ({"prompt_token_ids": torch.tensor([PROMPT])}, "prompts[0].prompt_token_ids", "an int64 array of shape (1, 3)",
         "must have one dimension"),
        (np.array([], np.int64), "prompts[0]", "empty", "must have at least one token"),
        (torch.tensor([5, -1]), "prompts[0]", -1, "token ids must be from 0 to 130"),
        (np.array([5, 131], np.int16), "prompts[0]", 131, "token ids must be from 0 to 130"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_what_no_array_may_be(llm: LLM, prompts: Any, field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert limit in caught.value.limit


# ------------------------------------------------------------------------------------ the old keyword, prompt_token_ids
@pytest.mark.parametrize("make", [list, *MAKERS[:2]], ids=["list", *KINDS[:2]])
def test_token_ids_by_keyword(llm: LLM, make: Callable[[Any], Any]) -> None:
    def ids(**given: Any) -> list[list[int]]:
        return ids_of(llm.generate(sampling_params=GREEDY, use_tqdm=False, **given))

    assert ids(prompt_token_ids=make(PROMPT)) == [PROMPT]
    assert ids(prompt_token_ids=[make(PROMPT), OTHER]) == [PROMPT, OTHER]
    assert ids(prompt_token_ids=make([PROMPT, OTHER])) == [PROMPT, OTHER]
    assert ids(prompts=None, prompt_token_ids=make(PROMPT)) == [PROMPT]
    outputs = llm.generate(["a", "b"], GREEDY, prompt_token_ids=[make(PROMPT), OTHER], use_tqdm=False)
    assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [("a", PROMPT), ("b", OTHER)]
    [output] = llm.generate("a", GREEDY, prompt_token_ids=make(PROMPT), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("a", PROMPT)


@pytest.mark.parametrize(
    ("given", "field", "value", "limit"),
    [
        ({}, "prompts", None, "must be a prompt or a list of them"),
        ({"prompt_token_ids": 5}, "prompt_token_ids", 5, "must be token ids, or a list of such lists"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids", "ab", "must be token ids, or a list of such lists"),
        ({"prompt_token_ids": ["ab"]}, "prompt_token_ids[0]", "ab", "must be token ids"),
        ({"prompt_token_ids": [PROMPT, [5.0]]}, "prompt_token_ids[1]", [5.0], "must be token ids"),
        ({"prompt_token_ids": [{"prompt": "a"}]}, "prompt_token_ids[0]", {"prompt": "a"}, "must be token ids"),
        ({"prompt_token_ids": [PROMPT, [131]]}, "prompt_token_ids[1]", 131, "token ids must be from 0 to 130"),
        ({"prompt_token_ids": np.array([1.0])}, "prompt_token_ids", "a float64 array of shape (1,)", "whole numbers"),
        ({"prompts": ["a"], "prompt_token_ids": [PROMPT, OTHER]}, "prompt_token_ids", "a list of 2",
         "must hold the token ids of each of 1 prompts"),
        ({"prompts": [PROMPT], "prompt_token_ids": [PROMPT]}, "prompts[0]", PROMPT,
         "must be text where prompt_token_ids has its token ids"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_wrong_token_ids_by_keyword(llm: LLM, given: dict[str, Any], field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(sampling_params=GREEDY, use_tqdm=False, **given)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert limit in caught.value.limit
