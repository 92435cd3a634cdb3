"""From the body of an OpenAI request to prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagedec.batch.structured_fields import STRUCTURED, read_structured
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import check_names, field_names, rules
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams
from pagedec.text.chat_template import check_messages

TextOrIds: TypeAlias = str | list[int]

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
"""Fields that change nothing in an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "prompt_logprobs": (),
}
"""Fields of both endpoints that are known but not carried out, and the values that ask for nothing."""
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,), "best_of": (1,), "suffix": ("",)}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
INSTEAD = {"reasoning_effort": "; a template that reads it, as gpt-oss', is told by chat_template_kwargs"}
SAMPLING = tuple(name for name in rules(SamplingParams) if name not in ("logprobs", "prompt_logprobs"))
"""Parameters that a body gives by our own names, most of which are OpenAI's too."""
ORDER = ("priority", "cache_salt")
DRAWING = ("temperature", "top_p", "top_k", "min_p")
BEAMS = tuple(name for name in rules(BeamSearchParams) if name not in rules(SamplingParams))
"""Parameters of beam search by our own names, of which vLLM's server has `length_penalty`."""
USE_BEAMS = "use_beam_search"
"""vLLM's name of the switch, with which `n` is the width."""
OURS = (*SAMPLING, *STRUCTURED, USE_BEAMS, *BEAMS)
COMPLETION_FIELDS = ("model", "prompt", *OURS, "logprobs", *ORDER, *NEUTRAL_COMPLETION, *IGNORED)
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
CHAT_FIELDS = (
    *("model", "messages", *OURS, "max_completion_tokens", "logprobs", "top_logprobs", *CHAT_OPTIONS),
    *(*ORDER, *NEUTRAL_CHAT, *IGNORED),
)
MAX_TOP_LOGPROBS = 20
"""OpenAI's own limit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for: prompts, or messages of a chat with the options of their template."""

    model: str | None
    prompts: Sequence[TextOrIds]
    messages: Sequence[Mapping[str, Any]] | None
    chat_options: Mapping[str, Any]
    params: RequestParams
    priority: int = 0
    cache_salt: str = ""


def parse_body(
    chat: bool, body: Mapping[str, Any], defaults: Mapping[str, Any], beams: Mapping[str, Any] | None = None
) -> Ask:
    """Read a body over the defaults; null means not given, as in OpenAI's interface. `beams` come before the defaults
    where a beam search is asked for; a `beam_width` among them asks for one where the body does not say.

    Raises InvalidArgument naming field, value and limit; FeatureNotAvailable for what is known but cannot be done.
    """
    kind, fields, neutral = (
        ("a chat completion", CHAT_FIELDS, NEUTRAL_CHAT)
        if chat
        else ("a completion", COMPLETION_FIELDS, NEUTRAL_COMPLETION)
    )
    check_names(kind, body, fields, body)
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, allowed in neutral.items():
        if name == "best_of" and given.get("n", 1) != 1:  # all of them, as OpenAI has it where nothing is said
            allowed = (*allowed, given["n"])
        if name in given and (value := given.pop(name)) not in allowed:
            only = f", only {' or '.join(map(repr, allowed))}" if allowed else ""
            raise FeatureNotAvailable(name, value, f"not available in a batch{only}{INSTEAD.get(name, '')}")
    model = given.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidArgument("model", model, "must be a text")
    priority, salt = given.get("priority", 0), given.get("cache_salt", "")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgument("priority", priority, "must be a whole number; lower ones run earlier")
    if not isinstance(salt, str):
        raise InvalidArgument("cache_salt", salt, "must be a text")
    params = _params(given, defaults, beams or {}, chat)
    if not chat:
        return Ask(model, parse_prompts(given.get("prompt")), None, {}, params, priority, salt)
    options = {name: given[name] for name in CHAT_OPTIONS if name in given}
    for name, value in options.items():
        if name == "chat_template_kwargs":
            if not isinstance(value, dict):
                raise InvalidArgument(name, value, 'must be an object such as {"enable_thinking": false}')
        elif not isinstance(value, bool):
            raise InvalidArgument(name, value, "must be true or false")
    return Ask(model, (), check_messages(given.get("messages")), options, params, priority, salt)


def _params(
    given: Mapping[str, Any], defaults: Mapping[str, Any], table: Mapping[str, Any], chat: bool
) -> RequestParams:
    values = dict(defaults) | {name: given[name] for name in SAMPLING if name in given}
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            limit = "give either this or max_tokens, its old name"
            raise InvalidArgument("max_completion_tokens", given["max_completion_tokens"], limit)
        values["max_tokens"] = given["max_completion_tokens"]
    if isinstance(seed := values.get("seed"), int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        values["seed"] = seed % 2**64  # OpenAI's seeds are signed
    values |= _logprobs(given, chat)
    structured = read_structured(given)
    if structured is not None:
        values["structured_outputs"] = structured
    beams = _beams(given, table)
    if not beams:
        return SamplingParams.from_dict(values)
    known = set(field_names(BeamSearchParams))
    said = {*given, *(("max_tokens",) if "max_completion_tokens" in given else ())}
    beams = {name: value for name, value in table.items() if name not in said} | beams
    unused = () if beams.get("do_sample") else DRAWING  # defaults of drawing, where nothing is drawn
    kept = {name: value for name, value in values.items() if name in known and (name not in unused or name in given)}
    return BeamSearchParams.from_dict(kept | beams)


def _beams(given: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The body's own parameters of a beam search alone, and its width; none where sampling is asked for."""
    beams = {name: given[name] for name in BEAMS if name in given}
    switch = given.get(USE_BEAMS, "beam_width" in beams or "beam_width" in table)
    if not isinstance(switch, bool):
        raise InvalidArgument(USE_BEAMS, switch, "must be true or false")
    if not switch:
        known = rules(BeamSearchParams)
        if "beam_width" in beams:
            raise InvalidArgument(USE_BEAMS, False, "must be true where beam_width is given")
        for name, value in beams.items():
            if known[name][0].check(name, value) != known[name][1]:
                raise InvalidArgument(name, value, f"must be given with beam_width, or with {USE_BEAMS} true")
        return {}
    if "beam_width" not in beams:
        if "beam_width" not in table or (USE_BEAMS in given and "n" in given):
            return {"beam_width": given.get("n", 1)} | beams
        beams["beam_width"] = table["beam_width"]
    return ({"num_return_sequences": given["n"]} if "n" in given else {}) | beams


def _logprobs(given: Mapping[str, Any], chat: bool) -> dict[str, int | None]:
    """Completions give a number; chats a flag, and the number beside it."""
    asked = given.get("logprobs")
    if not chat:
        if asked is None:
            return {}
        _check_count("logprobs", asked)
        return {"logprobs": asked}
    if asked is not None and not isinstance(asked, bool):
        raise InvalidArgument("logprobs", asked, "must be true or false")
    top = given.get("top_logprobs")
    if top is not None:
        _check_count("top_logprobs", top)
        if not asked:
            raise InvalidArgument("top_logprobs", top, "logprobs must be true with it")
    return {} if asked is None else {"logprobs": (top or 0) if asked else None}


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidArgument(name, value, f"must be a whole number from 0 to {MAX_TOP_LOGPROBS}")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def parse_prompts(prompt: object) -> list[TextOrIds]:
    """OpenAI's four forms of a prompt: text, token ids, or a list of either."""
    limit = "must be text, token ids, or a list of texts or of lists of token ids, and not be empty"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidArgument("prompt", prompt, limit)
    if _is_ids(prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(map(_is_ids, prompt)):
        return prompt
    raise InvalidArgument("prompt", prompt, limit)
