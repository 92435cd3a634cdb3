"""gpt-oss' answers: what the user is told, thoughts and calls, read when they are whole and while they grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from pagedec.text.conversation import Conversation
from pagedec.text.harmony import CALL, MARKS, AnswerStream, read_answer
from pagedec.text.streaming import TextStream
from pagedec.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.test_tokenizer_directory import byte_level, save

ENDS = ("<|return|>", CALL)
HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER = " to=functions.weather"
ARGUMENTS = '{"city":"Ulm",  "days": 2}'
CALLING = f"<|channel|>commentary{WEATHER} <|constrain|>json<|message|>{ARGUMENTS}"
"""As gpt-oss writes it most often."""
AS_TEMPLATE = f'{WEATHER}<|channel|>commentary json<|message|>{{"city": "Ulm", "days": 2}}'
RESULT = {"role": "tool", "content": '{"sun": true}'}


def harmony(place: Path, template: str = templates.HARMONY_CALLS) -> Tokenizer:
    inner = byte_level()
    inner.add_special_tokens([*MARKS, "<|constrain|>", *ENDS])
    config = {"eos_token": ENDS[0], "chat_template": template}
    made = Tokenizer.from_path(save(place, inner, tokenizer_config=config))
    ids = [made.token_to_id(name) for name in ENDS]
    return Tokenizer(made._inner, made.path, None, [one for one in ids if one is not None], made.chat_templates)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return harmony(tmp_path_factory.mktemp("harmony"))


def calls(*named: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in named]


def rendered(tokenizer: Tokenizer, chat: Conversation) -> Any:
    return tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("answer", "content", "thoughts", "called"),
    [
        (HM + CALLING, "", "Hm.", [("weather", ARGUMENTS)]),
        (HM + AS_TEMPLATE, "", "Hm.", [("weather", '{"city": "Ulm", "days": 2}')]),
        (WEATHER + FINAL.replace("final", "commentary"), "", None, [("weather", "{}")]),
        (HM + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALLING, "I look.", "Hm.",
         [("weather", ARGUMENTS)]),
        ("<|channel|>analysis to=python code<|message|>print('ü')", "", None, [("python", json.dumps("print('ü')",
         ensure_ascii=False))]),
        ("<|channel|>commentary to=browser.search<|message|>[" + "[" * 200, "", None,
         [("browser.search", json.dumps("[" * 201))]),
        (CALLING + "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>Rain<|end|>"
         f"<|start|>assistant{FINAL}Rain", "Rain", None, [("weather", ARGUMENTS)]),
        (f"Yes{FINAL}No", "Yes\nNo", None, None),
        (f"He to=me{FINAL}No", "He to=me\nNo", None, None),
    ],
)  # fmt: skip
def test_what_an_answer_says(
    tokenizer: Tokenizer, answer: str, content: str, thoughts: str | None, called: list[tuple[str, str]] | None
) -> None:
    found = read_answer(tokenizer, tokenizer.encode(answer), ended=True)
    expected = {"content": content, "reasoning_content": thoughts, "tool_calls": called and calls(*called)}
    assert found == {name: value for name, value in expected.items() if value is not None}


def test_a_call_that_is_cut_is_none(tokenizer: Tokenizer) -> None:
    whole = read_answer(tokenizer, tokenizer.encode(CALLING + "<|call|>"), ended=False)
    assert whole is not None and "tool_calls" in whole
    for answer in (HM + CALLING, HM + CALLING[:-1], HM + "<|channel|>commentary" + WEATHER):
        said = {"content": "", "reasoning_content": "Hm."}
        assert read_answer(tokenizer, tokenizer.encode(answer), ended=False) == said


@pytest.mark.parametrize("answer", [HM + CALLING, HM + AS_TEMPLATE, CALLING, HM + CALLING.replace("weather", "w")])
def test_a_conversation_goes_on_behind_a_call(tokenizer: Tokenizer, answer: str) -> None:
    """The prompt is the template's, and begins with the tokens as they were generated as far as it says the same."""
    chat = Conversation(tokenizer)
    prompt = chat.ask("Hi")
    generated = [token for piece in spelt(answer) for token in tokenizer.encode(piece, False)]
    chat.answer([*generated, tokenizer.token_to_id(CALL)])
    following = chat.ask(RESULT)
    written = tokenizer.decode(following, skip_special_tokens=False)
    assert written == rendered(tokenizer, chat)
    if answer == HM + AS_TEMPLATE:
        same = [*prompt, *generated, tokenizer.token_to_id(CALL)]
    else:
        end = tokenizer.token_to_id("<|start|>")
        same = [*prompt, *(generated[: generated.index(end) + 1] if end in generated else [])]
    assert following[: len(same)] == same
    assert '"Ulm", "days": 2}<|call|><|start|>functions.w' in written


def spelt(text: str) -> list[str]:
    """Letter by letter, but for special tokens: encoded anew it gives others."""
    pieces, rest = [], text
    while rest:
        mark = next((mark for mark in (*MARKS, "<|constrain|>", *ENDS) if rest.startswith(mark)), rest[0])
        pieces.append(mark)
        rest = rest[len(mark) :]
    return pieces


def test_calls_thoughts_and_answers_in_turns(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer)
    ends = {name: tokenizer.token_to_id(name) for name in ENDS}
    asked: Any = "Hi"
    for answer, told in (
        (HM + CALLING, ""),
        (HM + "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + CALLING, "Wait."),
        (HM + FINAL + "Sun.", "Sun."),
        (HM + FINAL + "Still.", "Still."),
    ):
        chat.ask(asked)
        assert chat.answer([*tokenizer.encode(answer), ends[ENDS[answer.endswith("}")]]]) == told
        asked = RESULT if "tool_calls" in chat.messages[-1] else "And now?"
        written = tokenizer.decode(chat.fork().ask(asked), skip_special_tokens=False)
        other = chat.fork()
        other.ask(asked)
        assert written == rendered(tokenizer, other)


def pieces_of(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], stop: tuple[str, ...] = (), skip: bool = True
) -> tuple[AnswerStream, list[tuple[bool, str]], str]:
    """An answer in steps of so many tokens, with what the engine's stream makes of it."""
    stream = AnswerStream(tokenizer, skip)
    ends = tokenizer.eos_token_ids
    texts = TextStream(tokenizer.byte_table, stop, skip_special_tokens=skip, ends=ends)
    pieces, text, at = [], "", 0
    while at < len(token_ids):
        size = sizes.pop() if sizes else 1
        text += texts.push(token_ids[at : at + size])
        at += size
        pieces += stream.push(token_ids[:at], text)
    text += texts.finish()
    pieces += stream.push(token_ids, text, finished=True)
    return stream, pieces, text


def joined(pieces: list[tuple[bool, str]], is_told: bool) -> str:
    return "".join(text for told, text in pieces if told == is_told)


SAID = st.lists(
    st.sampled_from([*MARKS, *ENDS, "<|constrain|>", "analysis", "final", "commentary", "assistant", WEATHER, "to", "t",
                     " to=", "Hm", "größe", "ü", "\N{SNOWMAN}", "{}", " a b", "\n"]),
    max_size=25,
)  # fmt: skip


@hypothesis.settings(deadline=None)
@hypothesis.given(SAID, st.lists(st.integers(1, 9), max_size=20), st.booleans(), st.integers(0, 2))
def test_an_answer_that_grows_says_what_the_whole_one_says(
    tokenizer: Tokenizer, said: list[str], sizes: list[int], skip: bool, cut: int
) -> None:
    """Cut, it may end in the middle of a character."""
    token_ids = tokenizer.encode("".join(said))
    token_ids = token_ids[: len(token_ids) - cut]
    stream, pieces, text = pieces_of(tokenizer, token_ids, sizes, skip=skip)
    whole = read_answer(tokenizer, token_ids, ended=False)
    if whole is not None:
        assert joined(pieces, True) == stream.told == whole["content"]
        assert joined(pieces, False) == whole.get("reasoning_content", "") or "to=" in text
    elif not set(said) & {*MARKS, CALL} and skip:
        assert joined(pieces, True) == text


def test_pieces_come_as_soon_as_their_part_is_known(tokenizer: Tokenizer) -> None:
    answer = HM + FINAL + "Yes, it is."
    token_ids = [token for piece in spelt(answer) for token in tokenizer.encode(piece, False)]
    _, pieces, _ = pieces_of(tokenizer, token_ids, [])
    assert [text for told, text in pieces if told and text] == list("Yes, it is.")
    assert [text for told, text in pieces if not told and text] == list("Hm.")
    _, pieces, _ = pieces_of(tokenizer, tokenizer.encode(HM + CALLING), [])
    assert joined(pieces, False) == f"Hm.\nfunctions.weather {ARGUMENTS}" and joined(pieces, True) == ""


def test_a_stop_string_ends_what_is_told(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(HM + FINAL + "one, two, three")
    for stop, told in ((", t", "one"), ("Hm", ""), ("x", "one, two, three"), ("finalone", "")):
        stream, pieces, text = pieces_of(tokenizer, token_ids, [], (stop,))
        assert joined(pieces, True) == stream.told == told and text.endswith(told)


def test_other_models_answers_are_told(tmp_path: Path) -> None:
    other = Tokenizer.from_path(save(tmp_path, byte_level()))
    stream, pieces, text = pieces_of(other, other.encode("<|channel|>analysis<|message|>Hm"), [3, 1])
    assert joined(pieces, True) == stream.told == text == "<|channel|>analysis<|message|>Hm"
