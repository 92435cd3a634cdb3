"""Conversations become the same prompts as in transformers, and what a template refuses is said of the right
message."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from pagedec.errors import InvalidArgument, UnusedWarning
from pagedec.text.chat_template import render_chat
from pagedec.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.test_tokenizer_directory import byte_level, save

HI = {"role": "user", "content": "Hi <there> & 'you'"}
HELLO = {"role": "assistant", "content": 'Hello,\n it\'s "me" '}
SYSTEM = {"role": "system", "content": "Be kind."}
MORE = {"role": "user", "content": "\N{PARTY POPPER}?"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Größe <b>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}],
}  # fmt: skip
RESULT = {"role": "tool", "content": '{"sun": true}'}
EVERY = ["CHATML", "LLAMA3", "GEMMA", "MISTRAL", "TOOLS", "PARTS", "THINKING"]


def made(tmp_path: Path, template: Any, **others: Any) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **others}
    return Tokenizer.from_path(save(tmp_path, byte_level(), tokenizer_config=config))


def theirs(template: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "messages", [[HI], [HI, HELLO, MORE], [SYSTEM, HI], [SYSTEM, HI, HELLO, MORE], [HI, HELLO], [HI, MORE]],
    ids=lambda messages: "-".join(message["role"] for message in messages),
)  # fmt: skip
def test_prompts_are_those_of_transformers(tmp_path: Path, name: str, messages: list[dict[str, Any]]) -> None:
    template = getattr(templates, name)
    ours, other = made(tmp_path, template), theirs(template)
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        try:
            expected = other.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            with pytest.raises(InvalidArgument):
                ours.apply_chat_template(messages, tokenize=False, **options)
            continue
        assert ours.apply_chat_template(messages, tokenize=False, **options) == expected
        ids = other.apply_chat_template(messages, return_dict=False, **options)
        assert ours.apply_chat_template(messages, **options) == ids


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        {**CALL, "refusal": None, "reasoning": "It rains?", "audio": None},
        {"role": "assistant", "content": "Fine.", "tool_calls": None, "thinking": "Is it?"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "a", "thinking": "b", "reasoning": "c"},
    ],
)
def test_what_a_server_has_answered_goes_back_as_it_came(tmp_path: Path, answer: dict[str, Any]) -> None:
    """With null for what is not there, and with thoughts by any name; a template may write all that it finds."""
    for own in ("thinking", "reasoning_content", "reasoning"):
        template = (
            "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{% if 'tool_calls' in m %}{{ m.tool_calls }}"
            f"{{% endif %}}|{{{{ m.{own} }}}}|{{% for key in m %}}{{{{ key }}}},{{% endfor %}}]{{% endfor %}}"
        )
        messages = [HI, answer, RESULT]
        prompt = made(tmp_path, template).apply_chat_template(messages, tokenize=False)
        assert prompt == theirs(template).apply_chat_template(messages, tokenize=False) and "None" not in prompt


def weather(city: str, days: int = 1) -> str:
    """
    Tell the weather.

    Args:
        city: The city's name.
        days: How many days ahead.
    """
    return f"{city} {days}"


@pytest.mark.parametrize("tools", [None, [], [WEATHER], [WEATHER, weather]], ids=["none", "empty", "one", "two"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=repr)
def test_tools_and_variables(tmp_path: Path, tools: Any, variables: dict[str, Any]) -> None:
    ours, other = made(tmp_path, templates.TOOLS), theirs(templates.TOOLS)
    messages = [SYSTEM, HI, CALL, RESULT]
    expected = other.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables)
    assert "Köln" in expected and expected.endswith("</think>\n\n") == (variables == {"enable_thinking": False})
    given = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **variables}
    assert ours.apply_chat_template(messages, **given) == expected
    as_text = json.loads(json.dumps(messages))
    as_text[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["tool_calls"][0]["function"]["arguments"])
    assert ours.apply_chat_template(as_text, **given) == expected


def test_the_embedded_model_has_its_template(tokenizer: Tokenizer) -> None:
    other = theirs(tokenizer.chat_template)
    for messages in ([HI], [SYSTEM, HI, HELLO, MORE]):
        expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render_chat(tokenizer, messages) == expected and expected.endswith("<|im_start|>assistant\n")
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == tokenizer.encode(expected, False)


def test_special_tokens_are_encoded_once(tmp_path: Path) -> None:
    ours = made(tmp_path, templates.LLAMA3)
    ids = ours.apply_chat_template([HI])
    assert ids[0] == ours.bos_token_id and ids.count(ours.bos_token_id) == 1


def test_content_in_parts(tmp_path: Path) -> None:
    """Where a template walks through parts it gets them, as in transformers; where it takes text, their lines."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = theirs(templates.PARTS).apply_chat_template(parts, tokenize=False)
    assert render_chat(made(tmp_path, templates.PARTS), parts, add_generation_prompt=False) == expected
    assert "\nab" in expected
    text = render_chat(made(tmp_path, templates.CHATML), parts, add_generation_prompt=False)
    assert text == "<|im_start|>user\na\nb<|im_end|>\n"
    left_open = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(made(tmp_path, templates.CHATML), parts, **left_open).endswith("a\nb")
    assert render_chat(made(tmp_path, templates.PARTS), parts, **left_open).endswith("ab")


def test_templates_with_names(tmp_path: Path) -> None:
    pair = [{"name": "default", "template": templates.CHATML}, {"name": "tool_use", "template": templates.TOOLS}]
    ours = made(tmp_path, pair)
    assert ours.chat_template == templates.CHATML
    assert render_chat(ours, [HI], tools=[WEATHER]).startswith("<|im_start|>system\n# Tools")
    assert render_chat(ours, [HI], tools=[WEATHER], chat_template="default").startswith("<|im_start|>user")
    assert render_chat(ours, [HI], chat_template="{{ messages[0].role }}!") == "user!"
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "short.jinja").write_text("short")
    (tmp_path / "chat_template.jinja").write_text("file")
    again = Tokenizer.from_path(tmp_path)
    assert (render_chat(again, [HI]), render_chat(again, [HI], chat_template="short")) == ("file", "short")


def refused(make: Callable[[], str]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        make()
    return caught.value


@pytest.mark.parametrize(
    ("name", "messages", "culprit", "words"),
    [
        ("GEMMA", [SYSTEM, HI], 0, "refuses it: System role not supported"),
        ("GEMMA", [HI, HELLO, MORE, MORE, HELLO, HELLO], 3, "refuses it: Conversation roles must alternate"),
        ("GEMMA", [HELLO], 0, "refuses it: Conversation roles must alternate"),
        ("MISTRAL", [SYSTEM, HI, HELLO, HELLO], 3, "refuses it: After the optional system message"),
        ("MISTRAL", [HI, {"role": "tool", "content": "x"}], 1, "refuses it: Only user and assistant roles"),
        ("{{ messages[2]['content'] + messages[2]['nothing'] }}", [HI, HELLO, CALL, HI], 2, "fails with it: Undef"),
        ("{{ messages[2].role + nothing }}", [HI, HELLO], 0, "fails with it: UndefinedError"),
    ],
)
def test_a_refusal_names_the_message(
    tmp_path: Path, name: str, messages: list[dict[str, Any]], culprit: int, words: str
) -> None:
    ours = made(tmp_path, getattr(templates, name, name))
    error = refused(lambda: render_chat(ours, messages))
    assert error.field == f"messages[{culprit}]" and error.value["role"] == messages[culprit]["role"]
    assert error.limit.startswith("the chat template ") and words in error.limit


@pytest.mark.parametrize(
    ("messages", "field", "limit"),
    [
        ("Hi", "messages", "must be a list of messages"),
        (HI, "messages", "must be a list of messages"),
        (5, "messages", "must be a list of messages"),
        ([], "messages", "must have at least one message"),
        ([HI, "Hi"], "messages[1]", "must be a message such as"),
        ([{1: 2}], "messages[0]", "must be a message such as"),
        ([{"content": "a"}], "messages[0].role", "must be a text such as user"),
        ([HI, {"role": 3, "content": "a"}], "messages[1].role", "must be a text such as user"),
        ([{"role": "user"}], "messages[0].content", "must be text, or a list"),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be text, or a list"),
        ([{"role": "assistant", "content": None, "refusal": None}], "messages[0].content", "must be text, or a list"),
        ([HI, {"role": "user", "content": "a\ud800"}], "messages[1].content", "half a surrogate pair at character 1"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "messages[0].content[0].text",
        "half a surr"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", 'must be {"type": "text"'),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]}],
         "messages[0].content[1]", "these models read nothing but text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", 'must be {"type": "text"'),
        ([{**CALL, "tool_calls": "x"}], "messages[0].tool_calls", "must be a list"),
        ([{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
         "messages[0].tool_calls[0].function.arguments", "must be JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_wrong_messages(tmp_path: Path, messages: Any, field: str, limit: str) -> None:
    error = refused(lambda: render_chat(made(tmp_path, templates.TOOLS), messages))
    assert error.field == field and limit in error.limit


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_the_template_does_not_look_at_is_told_of(tmp_path: Path, name: str) -> None:
    """Once for each template, and so once in a process by Python's own count of warnings."""
    given: dict[str, Any] = {name: [WEATHER]}
    deaf, hearing = (f"{{# {name} #}}{text}" for text in (templates.CHATML, "{{ messages[0].content }}{{ NAME }}"))
    ours = made(tmp_path, deaf)
    with pytest.warns(UnusedWarning, match=f"^{name} change nothing: the chat template shows nothing of them$"):
        told = render_chat(ours, [HI], **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert render_chat(ours, [HI], **given) == told == render_chat(ours, [HI])
        assert "Größe" in render_chat(ours, [HI], chat_template=hearing.replace("NAME", name), **given)
        required = hearing.replace("NAME", f"{name} | length")
        assert render_chat(ours, [HI], chat_template=required, **given).endswith("1")
        for nothing in (None, []):
            render_chat(ours, [HI], chat_template=f"{deaf}.", **{name: nothing})


def test_what_is_no_template_no_list_of_tools_and_no_table(tmp_path: Path) -> None:
    """A misspelled name of a template would otherwise be the prompt of every conversation."""
    ours = made(tmp_path, templates.CHATML)
    error = refused(lambda: render_chat(ours, [HI], chat_template="chatml"))
    assert error.field == "chat_template" and error.limit.endswith("the name of one of the tokenizer's: default")
    for tools in ("f", {"type": "function"}, 5):
        assert refused(lambda tools=tools: render_chat(ours, [HI], tools=tools)).field == "tools"
    for variables in ([("a", 1)], {1: 2}, "a"):
        error = refused(lambda variables=variables: render_chat(ours, [HI], template_kwargs=variables))
        assert (error.field, error.value) == ("chat_template_kwargs", variables)


def test_wrong_templates_and_options(tmp_path: Path) -> None:
    without = Tokenizer.from_path(save(tmp_path, byte_level()))
    assert "has none" in refused(lambda: render_chat(without, [HI])).limit
    for broken, words in (
        ("a\n{% if", "line 2"),
        ("{{ 1 + }}", "line 1"),
        ("", "must be the text"),
        (5, "must be the text"),
    ):
        error = refused(lambda broken=broken: render_chat(without, [HI], chat_template=broken))
        assert error.field == "chat_template" and words in error.limit
    given = {"chat_template": templates.CHATML}
    assert (
        refused(lambda: render_chat(without, [HI], continue_final_message=True, **given)).field
        == "continue_final_message"
    )
    error = refused(lambda: render_chat(without, [HI], template_kwargs={"tools": 1}, **given))
    assert (error.field, error.value) == ("chat_template_kwargs", "tools")
    for tool, field in ((5, "tools[0]"), (lambda city: 0, "tools[0]")):
        assert refused(lambda tool=tool: render_chat(without, [HI], tools=[tool], **given)).field == field
    rewriting = "{% for m in messages %}{{ m.role }}{% endfor %}"
    left_open = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": rewriting}
    assert "the chat template rewrites it" in refused(lambda: render_chat(without, [HI], **left_open)).limit


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}", "{{ dict.mro() }}", "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}", "{% set n = namespace() %}{% set n.__class__ = 1 %}", "{{ cycler.__init__ }}",
        "{{ raise_exception.__globals__ }}", "{{ messages[0].thing.secret() }}", "{% include 'x' %}",
    ],
)  # fmt: skip
def test_templates_cannot_reach_python(tmp_path: Path, attack: str) -> None:
    class Thing:
        def secret(self) -> str:
            return "reached"

    ours = made(tmp_path, "{{ 1 }}")
    message = {**HI, "thing": Thing()}
    try:
        shown = render_chat(ours, [message], chat_template=attack)
    except InvalidArgument as error:
        assert error.field == "messages[0]"
    else:
        assert shown == "", f"an attribute that is not there renders as nothing, not as {shown!r}"
