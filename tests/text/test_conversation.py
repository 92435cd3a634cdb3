"""A conversation's prompts begin with all tokens so far, and mean what the template says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.errors import InvalidArgument
from pagedec.text.conversation import Conversation
from pagedec.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.test_harmony import harmony
from tests.text.test_tokenizer_directory import byte_level, save, sentencepiece


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_prompt_is_the_last_one_the_answer_and_the_rest(tokenizer: Tokenizer, ended: bool) -> None:
    chat = Conversation(tokenizer, [{"role": "system", "content": "Be kind."}])
    end = list(tokenizer.eos_token_ids) if ended else []
    prompt, generated = chat.ask("Hi"), tokenizer.encode(" Hello\nyou")
    for turn in range(4):
        assert prompt == tokenizer.encode(tokenizer.decode(prompt, skip_special_tokens=False), False) or turn
        assert chat.answer([*generated, *end]) == " Hello\nyou"
        following = chat.ask(f"Turn {turn}")
        assert following[: len(prompt) + len(generated) + len(end)] == [*prompt, *generated, *end]
        rendered = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(following, skip_special_tokens=False) == rendered
        prompt = following
    assert [message["role"] for message in chat.messages] == ["system", "user", *["assistant", "user"] * 4]


def test_tokens_are_kept_as_they_were_generated(tokenizer: Tokenizer) -> None:
    """Encoding an answer's text anew gives the fewest tokens; a model may have spelt it otherwise."""
    spelt = [token for letter in "Hello" for token in tokenizer.encode(letter)]
    assert len(spelt) == 5 > len(tokenizer.encode("Hello"))
    chat = Conversation(tokenizer)
    prompt = chat.ask("Hi")
    chat.answer([*spelt, *tokenizer.eos_token_ids])
    assert chat.ask("More")[len(prompt) : len(prompt) + 5] == spelt


def test_another_end_token_than_the_templates_is_replaced(tokenizer: Tokenizer) -> None:
    other, own = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    both = Tokenizer(tokenizer._inner, tokenizer.path, 1, [own, other], tokenizer.chat_template)
    chat, said = Conversation(both), both.encode("Yes")
    prompt = chat.ask("Hi")
    assert chat.answer([*said, other]) == "Yes"
    following = chat.ask("More")
    assert following[: len(prompt) + len(said) + 1] == [*prompt, *said, own]
    assert following == both.apply_chat_template(chat.messages, add_generation_prompt=True)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, iter], ids=["torch", "numpy", "iterator"])
def test_an_answer_of_any_kind_of_numbers(tokenizer: Tokenizer, kind: Any) -> None:
    """What comes of it are Python's own: a prompt of tensors was refused where it was generated from."""
    chat, said = Conversation(tokenizer), [*tokenizer.encode("Yes"), *tokenizer.eos_token_ids]
    chat.ask("Hi")
    assert chat.answer(kind(said)) == "Yes"
    assert set(map(type, chat.ask("More"))) <= {int, np.int64}
    with pytest.raises(InvalidArgument, match="^token_ids is 'Yes': must be token ids"):
        chat.answer("Yes")  # type: ignore[arg-type]
    assert len(chat.messages) == 3


def test_a_template_that_drops_thoughts_keeps_the_beginning(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, chat_template=templates.THINKING)
    prompt = chat.ask("Hi")
    chat.answer([*tokenizer.encode("<think>Well.</think>Yes"), *tokenizer.eos_token_ids])
    following = chat.ask("More")
    assert tokenizer.decode(following, False).count("Well.") == 0 and following[: len(prompt)] == prompt
    again = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True, chat_template=templates.THINKING)
    assert following == again


@pytest.mark.parametrize(
    ("answer", "content", "thoughts"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes", "Yes", "Hm."),
        ("<|channel|>final<|message|>Yes", "Yes", None),
        ("<|channel|>commentary<|message|>First<|end|><|start|>assistant<|channel|>final<|message|>Yes",
         "First\nYes", None),
        ("<|channel|>analysis<|message|>Hm", "", "Hm"),
        ("Yes", "Yes", None),
    ],
)  # fmt: skip
def test_an_answer_in_parts(tmp_path: Path, answer: str, content: str, thoughts: str | None) -> None:
    """The next prompt has what the user was told, as the model's own template writes it, and none of the thoughts."""
    tokenizer = harmony(tmp_path, templates.HARMONY)
    chat = Conversation(tokenizer)
    prompt = chat.ask("Hi")
    assert chat.answer(tokenizer.encode(answer + "<|return|>")) == content
    assert chat.messages[-1].get("reasoning_content") == thoughts
    following = chat.ask("More")
    said = tokenizer.decode(following, skip_special_tokens=False)
    assert following[: len(prompt)] == prompt
    assert said == tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
    assert f"assistant<|channel|>final<|message|>{content}<|end|>" in said and (thoughts or "<|x|>") not in said


def test_a_cut_answer_and_one_that_is_called_otherwise(tokenizer: Tokenizer) -> None:
    """Half a character at an answer's end stays what was generated; a text of the caller's own replaces it."""
    half = tokenizer.encode("Snow \N{SNOWMAN}")[:-1]
    assert tokenizer.decode(half).endswith("\ufffd")
    chat = Conversation(tokenizer)
    prompt = chat.ask("Hi")
    assert chat.answer(half) == "Snow \ufffd"
    assert chat.ask("More")[: len(prompt) + len(half)] == [*prompt, *half]
    chat = Conversation(tokenizer)
    assert chat.answer(chat.ask("Hi") and half, "Snow") == "Snow" == chat.messages[-1]["content"]
    assert "Snow<|im_end|>" in tokenizer.decode(chat.ask("More"), False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "GEMMA", "MISTRAL", "TOOLS", "THINKING"])
def test_every_prompt_says_what_the_template_says(tmp_path: Path, make: Any, name: str) -> None:
    """Random answers, ended or not, over vocabularies and templates: the prompt's text is the rendering's."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": getattr(templates, name)}
    tokenizer = Tokenizer.from_path(save(tmp_path, make(), tokenizer_config=config))
    rng = random.Random(0)
    for _ in range(20):
        chat = Conversation(tokenizer)
        for turn in range(4):
            prompt = chat.ask(rng.choice(["the cat", "a\nb", " c "]))
            rendered = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
            fresh = tokenizer.encode(rendered, False)
            if turn == 0:
                assert prompt == fresh
            said = tokenizer.decode(prompt, False)
            assert said.replace(" ", "") == tokenizer.decode(fresh, False).replace(" ", "")
            assert make is sentencepiece or said == rendered
            answer = tokenizer.encode(rng.choice(["the cat", "dog", "a b", "x "]), False)
            chat.answer([*answer, *(tokenizer.eos_token_ids if rng.random() < 0.5 else ())])


def test_sentencepiece_continues_behind_a_special_token(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": templates.MISTRAL}
    tokenizer = Tokenizer.from_path(save(tmp_path, sentencepiece(), tokenizer_config=config))
    chat = Conversation(tokenizer)
    prompt = chat.ask("the cat")
    generated = [*tokenizer.encode("cat", False), tokenizer.token_to_id("</s>")]
    chat.answer(generated)
    following = chat.ask("the")
    assert following[: len(prompt) + len(generated)] == [*prompt, *generated]
    assert following == tokenizer.apply_chat_template(chat.messages)


def test_refusals_change_nothing(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, chat_template=templates.GEMMA)
    with pytest.raises(InvalidArgument, match="must follow a prompt"):
        chat.answer([5])
    first = chat.ask("Hi")
    with pytest.raises(InvalidArgument, match=r"^messages\[1\] "):
        chat.ask("More")
    assert len(chat.messages) == 1
    chat.retract()
    chat.retract()
    assert chat.messages == [] and chat.ask("Hi") == first
    chat.answer([5])
    assert chat.ask({"role": "user", "content": [{"type": "text", "text": "More"}]})[: len(first)] == first
