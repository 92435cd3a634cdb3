"""Chat templates come to an end: in time, in memory, and with an error that says what was too much."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from pagedec.errors import InvalidArgument
from pagedec.text.budget import MAX_CHARACTERS, MAX_STEPS, Budget, Exhausted, spending
from pagedec.text.chat_template import render_chat
from tests.text import templates
from tests.text.hostile_templates import SIZES, STEPS
from tests.text.test_chat_template import CALL, EVERY, HI, RESULT, SYSTEM, WEATHER, made, theirs

SECONDS = 10
"""Some five times what the slowest takes on an idle machine."""
STEPS_USED_UP = f"must be rendered in at most {MAX_STEPS} steps; its loops, calls and long values take more"


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> dict[str, tuple[float, str, str]]:
    """How each hostile template that is tested ended, in a process that may take two gigabytes for all of them."""
    tested = [item.callspec.params["name"] for item in request.session.items if _is_one(item)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.text.hostile_templates", *tested],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[float, str, str]] = json.loads(done.stdout)
    return found


def _is_one(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and item.function is test_a_template_that_explodes_is_stopped


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*STEPS, *SIZES])
def test_a_template_that_explodes_is_stopped(name: str, ends: dict[str, tuple[float, str, str]]) -> None:
    seconds, field, limit = ends[name]
    assert field in ("chat_template", "messages[0]"), limit
    assert "Memory" not in limit, "the bounds came too late"
    if field == "chat_template":
        assert re.search(
            r"^must (be rendered in at most \d+ steps|not (make|ask|write) .* \d+)|^is no template: ", limit
        )
    else:
        assert re.search("Range too big|RecursionError|'lipsum' is undefined", limit)
    assert seconds < SECONDS


def test_what_a_stopped_template_is_told(tmp_path: Path) -> None:
    ours = made(tmp_path, "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
    with pytest.raises(InvalidArgument) as caught:
        render_chat(ours, [HI])
    assert str(caught.value) == (
        "chat_template is '{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}': "
        "must be rendered in at most 1000000 steps; its loops, calls and long values take more"
    )
    with pytest.raises(InvalidArgument) as caught:
        render_chat(ours, [HI], chat_template="{{ 'a' * 20000000 }}")
    assert (
        caught.value.limit == "must not make texts or lists of more than 16777216 characters, with all that is in them"
    )


def test_a_template_that_fails_late_is_blamed_on_a_message_within_the_same_steps(tmp_path: Path) -> None:
    slow = "{% for i in range(99999) %}{% endfor %}"
    ours = made(tmp_path, slow + "{{ raise_exception('no') if messages|length > 2 }}")
    with pytest.raises(InvalidArgument, match="the chat template refuses it: no$") as caught:
        render_chat(ours, [HI] * 9)
    assert caught.value.field.startswith("messages[")


def test_a_template_of_a_hundred_thousand_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render_chat(made(tmp_path, "{{ 1 }}" * 20_000), [HI])
    assert str(caught.value) == "chat_template is 140000 characters: must be at most 65536"


def test_a_conversation_of_a_hundred_megabytes_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "word " * 2_000_000}] * 10
    with pytest.raises(InvalidArgument) as caught:
        render_chat(made(tmp_path, templates.CHATML), messages)
    assert re.fullmatch(
        r"messages is 1000\d+ characters: must be at most 16777216 characters in all", str(caught.value)
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EVERY)
def test_ten_thousand_messages_are_no_trouble(name: str, tmp_path: Path) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "hello " * 50} for i in range(9_999)]
    assert len(render_chat(made(tmp_path, getattr(templates, name)), messages)) > 2_900_000


def test_a_conversation_of_ten_megabytes_is_no_trouble(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(render_chat(made(tmp_path, templates.LLAMA3), messages)) > 9_999_000


def test_searching_the_conversation_for_each_message_is_no_trouble(tmp_path: Path) -> None:
    """What many templates do: lengths, slices and the last message, in a loop over all of them."""
    template = (
        "{% for m in messages %}{% if loop.index0 == messages|length - 1 %}L{% endif %}"
        "{% if m == messages[-1] %}l{% endif %}"
        "{% if messages[loop.index0 - 1].role != m.role %}{{ m.content|length }}{% endif %}"
        "{{ messages[:2]|length }}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": "hello " * 500} for i in range(2_000)]
    assert len(render_chat(made(tmp_path, template), messages)) > 9_000


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["none", "one"])
@pytest.mark.parametrize("messages", [[HI], [SYSTEM, HI, CALL, RESULT]], ids=["short", "calls"])
def test_macros_write_what_they_write_in_transformers(tmp_path: Path, messages: list[Any], tools: Any) -> None:
    ours, other = made(tmp_path, templates.MACROS), theirs(templates.MACROS)
    for options in ({}, {"add_generation_prompt": True}):
        expected = other.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        assert ours.apply_chat_template(messages, tools=tools, tokenize=False, **options) == expected
        assert "Köln" in expected or len(messages) == 1


def test_values_that_were_measured_once_are_not_walked_through_again() -> None:
    budget = Budget(1000)
    inner: list[Any] = [1] * 100
    value = [inner] * 100
    assert budget.size(value) == 100 + 100 * 100
    left = budget.left
    assert left > 1000 - 300 and budget.size([value]) == 1 + 100 + 100 * 100 and budget.left > left - 10
    with pytest.raises(Exhausted), spending(budget):
        budget.spend(10_000)
    assert MAX_CHARACTERS > 10**7
