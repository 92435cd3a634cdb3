"""Prompts far longer than the context are refused before they are tokenised, wherever they come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument

PARAMS = SamplingParams(temperature=0, max_tokens=2)
HUGE = "word " * 20_000_000
LIMIT = "must be at most 511 tokens long, which are at most 41391 bytes"


@pytest.fixture
def untouched(text_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine whose tokenizer must not be asked."""

    def fail(*_: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(type(text_llm.tokenizer), "encode", fail)
    return text_llm


@contextmanager
def at_once() -> Iterator[None]:
    began = time.thread_time()
    yield
    assert time.thread_time() - began < 2


def test_a_text_of_a_hundred_megabytes(untouched: LLM) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: untouched.generate(["a", HUGE][1:], PARAMS, use_tqdm=False), "prompts[0]"),
        (lambda: untouched.generate({"prompt": HUGE}, PARAMS, use_tqdm=False), "prompts[0]"),
        (lambda: untouched.stream(HUGE, PARAMS), "prompt"),
    ]
    for call, name in calls:
        with at_once(), pytest.raises(InvalidArgument) as caught:
            call()
        assert str(caught.value) == f"{name} is 100000000 bytes: {LIMIT}"


def test_token_ids_by_the_million(untouched: LLM) -> None:
    for prompts in ([[5] * 4_000_000], [5] * 4_000_000, {"prompt_token_ids": [5] * 4_000_000}):
        with at_once(), pytest.raises(InvalidArgument, match=r"^prompts\[0\] is 4000000 tokens: must be at most 511"):
            untouched.generate(prompts, PARAMS, use_tqdm=False)
    with at_once(), pytest.raises(InvalidArgument, match=r"must be text, a list of token ids"):
        untouched.generate([[5] * 4_000_000 + [True]], PARAMS, use_tqdm=False)


def test_a_message_of_a_megabyte(untouched: LLM) -> None:
    message = [{"role": "user", "content": "word " * 200_000}]
    with pytest.raises(InvalidArgument) as caught:
        untouched.chat(message, PARAMS, use_tqdm=False)
    assert str(caught.value).startswith("messages is 1000") and str(caught.value).endswith(f" bytes: {LIMIT}")
    with pytest.raises(InvalidArgument, match=r"^messages\[0\] is 1000\d\d\d bytes: "):
        untouched.chat([message, message], PARAMS, use_tqdm=False)


def test_a_conversation_goes_on_after_it(text_llm: LLM) -> None:
    conversation = text_llm.conversation()
    with pytest.raises(InvalidArgument, match=f"^messages is 1000... bytes: {LIMIT}"):
        conversation.ask("word " * 200_000)
    assert conversation.messages == []
    assert conversation.ask("Hi") and len(conversation.messages) == 1
    with pytest.raises(InvalidArgument, match=f"^messages is 1000... bytes: {LIMIT}"):
        conversation.fork().ask("word " * 200_000)


def test_what_will_be_cut_may_be_long(text_llm: LLM) -> None:
    text = "word " * 20_000
    [output] = text_llm.generate(text, PARAMS.clone(truncate_prompt_tokens=7), use_tqdm=False)
    assert len(output.prompt_token_ids) == 7
    with pytest.raises(InvalidArgument, match=f"100000 bytes: {LIMIT}"):
        text_llm.generate(text, PARAMS, use_tqdm=False)


def test_what_is_a_little_too_long_is_counted_exactly(text_llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"prompts\[0\] is 4001 tokens: must be at most 511 tokens long"):
        text_llm.generate("word " * 4000, PARAMS, use_tqdm=False)


def test_a_chats_prompt_has_no_more_special_tokens_than_its_template_writes(text_llm: LLM) -> None:
    [output] = text_llm.chat([{"role": "user", "content": "Hi"}], PARAMS, use_tqdm=False)
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\n")
    assert output.prompt_token_ids == text_llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


def test_a_prompt_without_tokens_says_so(text_llm: LLM) -> None:
    for prompts in ([[5], []], ["a", ""], ["a", {"prompt": ""}], ["a", {"prompt_token_ids": []}], ["a", "\x04"]):
        with pytest.raises(InvalidArgument) as caught:
            text_llm.generate(prompts, PARAMS, use_tqdm=False)
        assert str(caught.value) == "prompts[1] is empty: must have at least one token"
