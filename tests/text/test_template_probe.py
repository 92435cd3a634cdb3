"""A call's arguments come as text or as an object, and every template gets what it expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedec.errors import InvalidArgument
from pagedec.text.chat_template import check_messages, render_chat
from pagedec.text.conversation import Conversation
from pagedec.text.template_probe import CallForm, call_form
from tests.text import templates
from tests.text.test_chat_template import CALL, HI, RESULT, made, theirs

SPELT = '{"city":"Köln",  "days": 2}'
"""As a model may have written it, and json.dumps would not."""
OBJECT = CALL["tool_calls"][0]["function"]["arguments"]
PLAIN = '{"city": "Köln", "days": 2}'


def calling(arguments: Any, **others: Any) -> dict[str, Any]:
    return {
        "role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}],
        **others,
    }  # fmt: skip


def shown(tmp_path: Path, template: str, *messages: dict[str, Any]) -> str:
    return render_chat(made(tmp_path, template), [HI, *messages, RESULT], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("CALLS_AS_TEXT", "<call>weather<sep>{}</call></s><tool>"),
        ("CALLS_AS_TEXT_WITH_CONTENT", '<assistant>[{{"weather": {}}}]<tool>'),
        ("CALLS_WRITTEN_OUT", '<assistant>{{"name": "weather", "arguments": {}}}<tool>'),
    ],
)
def test_templates_for_text_get_text(tmp_path: Path, name: str, called: str) -> None:
    """As it came, so that the model reads again what it wrote."""
    template = getattr(templates, name)
    assert called.format(SPELT) in shown(tmp_path, template, calling(SPELT))
    assert called.format(PLAIN) in shown(tmp_path, template, calling(OBJECT))
    for nothing in ("", None, {}):
        assert called.format("{}") in shown(tmp_path, template, calling(nothing))


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("TOOLS", '"arguments": {"city": "Köln", "days": 2}}</tool_call>'),
        ("CALLS_OF_BOTH", "<assistant>weather" + PLAIN),
        ("CALLS_BY_ITEM", '<assistant>weather(city="Köln"days=2)'),
        ("MACROS", "{city:"),
    ],
)
def test_others_get_an_object(tmp_path: Path, name: str, called: str) -> None:
    template = getattr(templates, name)
    expected = theirs(template).apply_chat_template([HI, calling(OBJECT), RESULT], tokenize=False)
    assert called in expected
    for arguments in (OBJECT, SPELT, PLAIN):
        assert shown(tmp_path, template, calling(arguments)) == expected


def test_what_transformers_makes_of_text(tmp_path: Path) -> None:
    """Where it comes as the template expects it, nothing is another than there."""
    for name in ("CALLS_AS_TEXT", "CALLS_AS_TEXT_WITH_CONTENT", "CALLS_WRITTEN_OUT"):
        template = getattr(templates, name)
        messages = [HI, calling(SPELT, content="Wait."), RESULT]
        expected = theirs(template).apply_chat_template(messages, tokenize=False)
        assert SPELT in expected and "Wait." in expected
        assert render_chat(made(tmp_path, template), messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize("name", ["CALLS_AS_TEXT", "CALLS_AS_TEXT_WITH_CONTENT", "TOOLS"])
def test_text_goes_through_a_conversation_as_it_came(tmp_path: Path, name: str) -> None:
    tokenizer = made(tmp_path, getattr(templates, name))
    assert check_messages([calling(SPELT)])[0]["tool_calls"][0]["function"]["arguments"] == SPELT
    chat = Conversation(tokenizer, [HI, calling(SPELT)])
    prompt = tokenizer.decode(chat.ask(RESULT), skip_special_tokens=False)
    assert prompt == render_chat(tokenizer, [HI, calling(SPELT), RESULT])
    assert (SPELT in prompt) == (name != "TOOLS")


@pytest.mark.parametrize("name", ["CHATML", "GEMMA", "{{ nothing.at.all }}", "{{ messages[5].role.x }}", "a"])
def test_a_template_that_shows_no_calls_gets_objects(name: str) -> None:
    form = CallForm(without_content={"content": ""}) if name == "CHATML" else CallForm()
    assert call_form(getattr(templates, name, name), ()) == form


EACH = "{% for m in messages %}[CONTENT]{% endfor %}"


@pytest.mark.parametrize("with_calls", [True, False])
@pytest.mark.parametrize(
    ("content", "want"),
    [
        ("{{ 'x' + m['content'] }}", "x"),
        ("{{ m['content'] }}", ""),
        ("{{ m.get('content') }}", ""),
        ("{{ tools }}{{ m.get('content') }}", "None"),
        ("{{ 'none' if m['content'] is none else m['content'] }}", ""),
        ("{{ m['content'] if m.content is defined else 'missing' }}", "missing"),
        ("{{ 'none' if m['content'] is none else 'x' + m['content'] }}", "none"),
        ("{{ m['content'] | trim if m['content'] is not none else 'none' }}", ""),
        ("{{ m['content'].strip() if m['content'] else raise_exception('x') if m['content'] == '' else '' }}", ""),
    ],
)
def test_a_call_without_content(tmp_path: Path, content: str, want: str, with_calls: bool) -> None:
    """It is missing, null, or an empty text, whichever comes first with which a template neither fails nor writes
    None; of templates that show calls and of those that do not."""
    template = EACH.replace("CONTENT", content + "{{ m.tool_calls[0].function.arguments if m.tool_calls else '' }}")
    template = template if with_calls else EACH.replace("CONTENT", content)
    messages = [HI, calling({"a": 1}), {"role": "user", "content": "b"}]
    told = render_chat(made(tmp_path, template), messages, add_generation_prompt=False)
    before, said, behind = told.split("][")
    assert HI["content"] in before and said == want + with_calls * '{"a": 1}' and behind.endswith("b]")


def test_a_template_with_special_tokens_is_asked_with_them(tmp_path: Path) -> None:
    """Without, it fails where it puts them between texts, and its parts were joined."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    template = "{{ bos_token + '!' }}" + templates.PARTS
    assert "user\nab<" in render_chat(made(tmp_path, template), parts)


@pytest.mark.parametrize("name", ["CALLS_AS_TEXT", "HARMONY_CALLS"])
def test_an_empty_list_of_calls_is_none(tmp_path: Path, name: str) -> None:
    """Servers write it beside what they say."""
    template = getattr(templates, name)
    said = {"role": "assistant", "content": "Fine."}
    messages = [HI, {**said, "tool_calls": []}, HI]
    assert render_chat(made(tmp_path, template), messages) == render_chat(made(tmp_path, template), [HI, said, HI])
    with pytest.raises(InvalidArgument, match=r"^messages\[0\].content "):
        check_messages([{"role": "assistant", "content": None, "tool_calls": []}])


def test_thoughts_beside_what_is_said_and_a_call(tmp_path: Path) -> None:
    """gpt-oss' template takes one of them, and writes that as thoughts; others have a place for both."""
    message = calling(SPELT, content="Let me see.", reasoning="It rains?")
    prompt = shown(tmp_path, templates.HARMONY_CALLS, message)
    assert "analysis<|message|>It rains?\nLet me see.<|end|><|start|>assistant to=functions.weather" in prompt
    for alone in ({"content": "Let me see."}, {"reasoning": "Let me see."}):
        prompt = shown(tmp_path, templates.HARMONY_CALLS, calling(SPELT, **alone))
        assert "analysis<|message|>Let me see.<|end|><|start|>assistant to=functions.weather" in prompt
    both = "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}{{ m.tool_calls or [] }}{% endfor %}"
    assert "Let me see.|It rains?[" in shown(tmp_path, both, message)


def test_an_answer_that_is_nothing_but_thoughts(tmp_path: Path) -> None:
    """As servers give one that was cut: with null for content, of which templates make texts."""
    answer = {"role": "assistant", "content": None, "reasoning_content": "It rains?"}
    prompt = render_chat(made(tmp_path, templates.HARMONY_CALLS), [HI, answer, HI])
    assert "<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>user" in prompt
    own = "{% for m in messages %}{{ m.reasoning_content }}{{ 'content' in m }}{% endfor %}"
    assert render_chat(made(tmp_path, own), [answer, HI]) == "It rains?FalseTrue"
    assert render_chat(made(tmp_path, templates.MISTRAL), [HI, answer, HI]).count("</s>") == 1


def test_arguments_that_are_no_text_that_can_be_encoded() -> None:
    with pytest.raises(InvalidArgument, match=r"^messages\[0\].tool_calls\[0\].function.arguments .* half a surrogate"):
        check_messages([calling('{"a": "\ud800"}')])
    assert json.loads(check_messages([calling("[1]")])[0]["tool_calls"][0]["function"]["arguments"]) == [1]
