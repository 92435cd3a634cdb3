"""Messages to a prompt: a model's own chat template, rendered by the rules of Hugging Face transformers."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from pagedec.errors import FeatureNotAvailable, InvalidArgument, Shown
from pagedec.fields import check_encodable
from pagedec.inputs import is_listed
from pagedec.text.budget import MAX_CHARACTERS, Budget, Exhausted, spending
from pagedec.text.compiled_template import TemplateRefusal, compiled
from pagedec.text.template_probe import call_form, reads_parts, without_content
from pagedec.text.unused import warn_of_unused

if TYPE_CHECKING:
    from pagedec.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tool = Mapping[str, Any] | Callable[..., Any]
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What a message's thoughts are called, by whom they come from. Templates read the first, gpt-oss' the second."""
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind the message that is to be continued, so that what the template writes behind it can be cut off. It ends
with a space to show whether the template strips what it writes."""
MAX_DEPTH = 100
"""Levels of lists and tables in a message, a tool or a template's variable."""
MEDIA = ("image", "audio", "video", "file")
"""What the kind of a part is called after that is no text, as in "image_url" and "input_audio"."""


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy made of JSON's types: a template may come with a file from anywhere, and must not reach objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth > MAX_DEPTH:
        raise InvalidArgument(field, Shown("a value"), f"must be nested at most {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {_plain(key, field, depth + 1): _plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


def _parts(field: str, parts: Sequence[Any]) -> list[dict[str, Any]]:
    for j, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            limit = 'must be {"type": "text", "text": ...}: these models read nothing but text'
            is_medium = isinstance(kind, str) and any(medium in kind for medium in MEDIA)
            raise (FeatureNotAvailable if is_medium else InvalidArgument)(f"{field}.content[{j}]", part, limit)
        check_encodable(f"{field}.content[{j}].text", part["text"])
    return [dict(part) for part in parts]


def _tool_calls(field: str, calls: Any) -> list[Any]:
    """Calls whose arguments are JSON, as text or as values, as they came; where there are none, an object without
    any."""
    if not isinstance(calls, (list, tuple)):
        raise InvalidArgument(f"{field}.tool_calls", calls, "must be a list")
    plain = _plain(calls, f"{field}.tool_calls")
    for j, call in enumerate(plain):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            continue
        if function["arguments"] in (None, ""):
            function["arguments"] = {}
        elif isinstance(function["arguments"], str):
            check_json(f"{field}.tool_calls[{j}].function.arguments", function["arguments"])
    return list(plain)


def check_json(name: str, text: str) -> None:
    """Raise `InvalidArgument` for a text that is no JSON, or is nested too deep."""
    check_encodable(name, text)
    try:
        _plain(json.loads(text), name)
    except json.JSONDecodeError as error:
        raise InvalidArgument(name, text, f"must be JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidArgument(name, text, f"must be nested at most {MAX_DEPTH} levels deep") from None
    except InvalidArgument:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InvalidArgument(name, text, f"must be JSON: {error}") from None


def check_messages(messages: object, field: str = "messages") -> list[dict[str, Any]]:
    """The messages as plain values. Raises `InvalidArgument` naming `field[i]` for what is no message."""
    if not is_listed(messages, Mapping):
        raise InvalidArgument(field, messages, 'must be a list of messages such as {"role": "user", "content": "Hi"}')
    checked = []
    for i, message in enumerate(messages):
        name = f"{field}[{i}]"
        if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
            raise InvalidArgument(name, message, 'must be a message such as {"role": "user", "content": "Hi"}')
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidArgument(f"{name}.role", message.get("role"), "must be a text such as user, assistant, system")
        content = message.get("content")
        # Many templates write "None", or fail, where a key is null, as OpenAI's "content" beside "tool_calls" is
        own = {key: value for key, value in _plain(message, name).items() if value is not None}
        if isinstance(content, (list, tuple)):
            own["content"] = _parts(name, content)
        elif content is None and not own.get("tool_calls") and set(own) <= {"role", "name", "tool_calls"}:
            raise InvalidArgument(f"{name}.content", content, "must be text, or a list of parts of text")
        elif content is not None and not isinstance(content, str):
            raise InvalidArgument(f"{name}.content", content, "must be text, or a list of parts of text")
        elif content is not None:
            check_encodable(f"{name}.content", content)
        if message.get("tool_calls") is not None:
            own["tool_calls"] = _tool_calls(name, message["tool_calls"])
            if not own["tool_calls"]:  # as servers say that nothing is called; templates that look for the key fail
                del own["tool_calls"]
        checked.append(own)
    if not checked:
        raise InvalidArgument(field, [], "must have at least one message")
    return checked


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under the names that templates read."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _in_form(messages: list[dict[str, Any]], text: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The messages as this template expects them."""
    names = tuple(tokenizer.special_tokens.items())
    messages = [_with_thoughts(message) for message in messages]
    if any(isinstance(message.get("content"), list) for message in messages) and not reads_parts(text, names):
        for message in messages:
            if isinstance(message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
    formed = []
    for message in messages:
        if message.get("tool_calls"):
            message = call_form(text, names).put(message)
        elif message["role"] == "assistant" and "content" not in message:
            message = {**message, **without_content(text, names)}
        formed.append(message)
    return formed


def _check_variables(template_kwargs: Mapping[str, Any] | None) -> None:
    field = "chat_template_kwargs"
    if template_kwargs is None:
        return
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise InvalidArgument(
            field, template_kwargs, "must be a table of a template's variables by their names, or None"
        )
    for name in template_kwargs:
        if name in OWN_VARIABLES:
            raise InvalidArgument(field, name, f"must not be one of {', '.join(OWN_VARIABLES)}")


def _schemas(tools: Sequence[Tool] | None) -> list[Any] | None:
    """Tools as JSON schemas; a function's own is read from its types and its docstring."""
    if tools is None:
        return None
    if not is_listed(tools, Mapping):
        raise InvalidArgument("tools", tools, "must be a list of JSON schemas or functions, or None")
    schemas = []
    for i, tool in enumerate(tools):
        if isinstance(tool, Mapping):
            schemas.append(_plain(tool, f"tools[{i}]"))
        elif callable(tool):
            from transformers.utils import get_json_schema

            try:
                schemas.append(_plain(get_json_schema(tool), f"tools[{i}]"))
            except Exception as error:  # the library's own kinds, which are plain Exceptions
                raise InvalidArgument(f"tools[{i}]", tool, f"has no schema: {error}") from error
        else:
            raise InvalidArgument(
                f"tools[{i}]", tool, "must be a JSON schema, or a function with types and a docstring"
            )
    return schemas


def choose_template(tokenizer: Tokenizer, chat_template: str | None, with_tools: bool) -> str:
    """The text of the template to use: the one given, the one of that name, or the model's own."""
    named = tokenizer.chat_templates
    if chat_template is not None:
        if not isinstance(chat_template, str) or not chat_template:
            raise InvalidArgument(
                "chat_template", chat_template, "must be the text of a template, or a template's name"
            )
        if chat_template not in named and "{" not in chat_template:  # it would be every conversation's prompt
            known = ", ".join(sorted(named)) or "none"
            limit = f"must be a template's text, with jinja's braces, or the name of one of the tokenizer's: {known}"
            raise InvalidArgument("chat_template", chat_template, limit)
        return named.get(chat_template, chat_template)
    if with_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" not in named:
        known = f"; {tokenizer.path} has those named {', '.join(sorted(named))}" if named else ""
        problem = f"must be given: the tokenizer {tokenizer.path} has none{known}"
        raise InvalidArgument("chat_template", None, problem)
    return named["default"]


def _render(template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    return template.render({**variables, "messages": messages})


def _failure(template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str | None:
    try:
        _render(template, messages, variables)
    except Exhausted:
        raise
    except TemplateRefusal as refusal:
        return f"the chat template refuses it: {refusal}"
    except Exception as error:  # the template's own code failed, in any of Python's ways
        return f"the chat template fails with it: {type(error).__name__}: {error}"
    return None


def _blame(template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> InvalidArgument:
    """The error of a conversation that cannot be rendered, naming the message with which it begins."""
    problem, good, bad = None, 0, len(messages)  # messages[:bad] fails with the problem, messages[:good] does not
    with contextlib.suppress(Exhausted):
        problem = _failure(template, messages, variables)
        while good + 1 < bad:
            middle = (good + bad) // 2
            if _failure(template, messages[:middle], variables) == problem:
                bad = middle
            else:
                good = middle
    return InvalidArgument(f"messages[{bad - 1}]", messages[bad - 1], problem or "the chat template fails with it")


def _mark_last(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; return that text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + CUT
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + CUT
        return text
    raise InvalidArgument(f"messages[{len(messages) - 1}].content", content, "must be a text, to be continued")


def _cut_at_mark(rendered: str, text: str, last: int) -> str:
    at = rendered.rfind(CUT.strip())
    if at < 0 or text.strip() not in rendered:
        raise InvalidArgument(f"messages[{last}].content", text, "cannot be continued: the chat template rewrites it")
    kept = rendered[:at]
    return kept if rendered.startswith(CUT, at) else kept.rstrip()


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Tool] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt of a conversation, special tokens written out: encode it without adding any.

    `add_generation_prompt` opens the assistant's turn; `continue_final_message` instead leaves the last message open,
    so that the answer goes on with it. `chat_template` is a template's text or the name of one of the model's. `tools`
    are JSON schemas, or functions with types and a docstring. `template_kwargs` are further variables of the template.
    A message's content is text or a list of text parts; where a template knows no parts they are joined by line ends.
    What is None in a message is not there for it; content beside calls or thoughts is null or empty where a template
    cannot do without. The `arguments` of a call are JSON, as text or as an object, and
    become what the template expects (see `CallForm`). Tools and documents of which the template shows nothing give an
    `UnusedWarning`, once in a process.

    The template runs in jinja's sandbox with the names that transformers gives it (raise_exception, strftime_now,
    tojson). Raises `InvalidArgument`: for a missing or broken template, naming the message that the template refuses,
    and for a template that takes more than a million steps or makes a text of more than 16 Mi characters (see
    `budget`).
    """
    for field, flag in (
        ("add_generation_prompt", add_generation_prompt), ("continue_final_message", continue_final_message),
    ):  # fmt: skip
        if not isinstance(flag, bool):
            raise InvalidArgument(field, flag, "must be true or false")
    if add_generation_prompt and continue_final_message:
        limit = (
            "must be false where add_generation_prompt is true: the answer is a new message, or goes on with the last"
        )
        raise InvalidArgument("continue_final_message", True, limit)
    _check_variables(template_kwargs)
    own, text = check_messages(messages), choose_template(tokenizer, chat_template, tools is not None)
    own, template = _in_form(own, text, tokenizer), compiled(text)
    variables = {
        **tokenizer.special_tokens, **_plain(template_kwargs or {}, "chat_template_kwargs"), "tools": _schemas(tools),
        "documents": _plain(documents, "documents"), "add_generation_prompt": add_generation_prompt,
    }  # fmt: skip
    final = _mark_last(own) if continue_final_message else ""
    budget = Budget()
    with spending(budget):
        if budget.size(own) > MAX_CHARACTERS:
            size, limit = f"{budget.size(own)} characters", f"must be at most {MAX_CHARACTERS} characters in all"
            raise InvalidArgument("messages", Shown(size), limit)
        try:
            rendered = _render(template, own, variables)
        except Exhausted as error:
            raise InvalidArgument("chat_template", text, str(error)) from None
        except Exception:  # whatever it was, it is said by name and message
            raise _blame(template, own, variables) from None
    warn_of_unused(text, rendered, variables, functools.partial(_render, template, own))
    return _cut_at_mark(rendered, final, len(own) - 1) if continue_final_message else rendered
