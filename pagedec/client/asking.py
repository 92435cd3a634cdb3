"""From Python's objects to messages, field by field. What cannot travel is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.struct_pb2 import Struct

from pagedec.blame import warn_of_unused
from pagedec.errors import InvalidArgument, Shown
from pagedec.fields import Integer, Table, Text, check_encodable, field_names, option
from pagedec.inputs import are_ids, as_priority, is_array, is_listed, read_mapping, read_token_ids
from pagedec.messages import (
    BEAMS,
    CONSTRAINTS,
    EARLY,
    JSON_OPTIONS,
    REPORTS,
    RULES,
    SAMPLING,
    STOPPING,
    WHOLE,
)
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams
from pagedec.structured import AllowedSequences, StructuredOutputsParams
from pagedec.v1 import parameters_pb2, prompt_pb2, session_service_pb2

HEADER = re.compile(r"(?!grpc-)[a-z0-9_.-]+(?<!-bin)")
MOST_ID = 2**32 - 1
MOST_ORDER = 2**31
EARLY_NUMBERS = {value: number for number, value in EARLY.items() if number}
PARTS = {"stopping": STOPPING, "logits_rules": RULES, "reports": REPORTS, "sampling": SAMPLING, "beam_search": BEAMS}
FIELDS = {
    **{f"parameters.{field}": name for field, name in WHOLE.items()},
    **{f"parameters.{part}.{field}": name for part, table in PARTS.items() for field, name in table.items()},
    **{f"parameters.constraint.{kind}": f"structured_outputs.{name}" for kind, name in CONSTRAINTS.items()},
    **{f"parameters.constraint.{field}": f"structured_outputs.{name}" for field, name in JSON_OPTIONS.items()},
    "parameters.constraint.trie": "token_trie",
    "parameters.stopping.time_limit": "max_time",
    "parameters.beam_search.early_stopping": "early_stopping",
    "parameters.speculation.table": "speculative",
    "parameters.speculation.off": "speculative",
    "parameters.custom.parameters": "parameters",
    "parameters.custom.name": "decoder",
}
"""What an error's field, which names a message's, is called in Python."""


@dataclass(frozen=True, slots=True)
class ServedTrie(AllowedSequences):
    """A trie that the server has loaded, by its name: what `token_trie` is for a server."""

    name: str


@dataclass(frozen=True, slots=True)
class ServedLora:
    """An adapter that the server has loaded, by its name: what `lora_request` is for a server."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument("name", self.name, "must be a text that is not empty")
        check_encodable("name", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomParams(RequestParams):
    """Parameters of a decoder that the server has registered: its name, its own `parameters`, and how many `answers`
    it gives, which is all that this side has to know of them."""

    decoder: str = option("", Text("the decoder's name"))
    parameters: dict[str, Any] | None = option(None, Table("the decoder's own parameters", optional=True))
    answers: int = option(1, Integer("answers that the decoder gives", low=1))

    @property
    def num_answers(self) -> int:
        """How many answers a prompt gets."""
        return self.answers


def as_parameters(params: RequestParams, only: Collection[str] | None = None) -> parameters_pb2.Parameters:
    """Parameters as a message; `only` of these fields, where the others are to be as the model recommends. Raises
    `InvalidArgument` for what cannot travel, and warns of what changes nothing."""
    check_params(params)
    warn_of_unused(params)
    names = field_names(type(params)) if only is None else only
    given = {name: value for name in names if (value := getattr(params, name)) is not None}
    made = parameters_pb2.Parameters(no_recommendations=only is None)
    _put(made, WHOLE, given)
    for part, table in PARTS.items():
        if part not in ("sampling", "beam_search"):
            _put(getattr(made, part), table, given)
    if "max_time" in given:
        made.stopping.time_limit.FromNanoseconds(round(given["max_time"] * 1e9))
    made.reports.special_tokens = not params.skip_special_tokens
    made.reports.no_text = not params.detokenize
    _constrain(made.constraint, params)
    _speculate(made.speculation, getattr(params, "speculative", None))
    if isinstance(params, SamplingParams):
        _put(made.sampling, SAMPLING, given)
    elif isinstance(params, BeamSearchParams):
        _put(made.beam_search, BEAMS, given)
        made.beam_search.early_stopping = EARLY_NUMBERS[params.early_stopping]
    elif isinstance(params, CustomParams):
        made.custom.name = params.decoder
        made.custom.parameters.CopyFrom(as_struct("parameters", params.parameters or {}))
    return made


def check_params(params: Any, field: str = "sampling_params") -> RequestParams:
    """Parameters that can travel. Raises `InvalidArgument`."""
    if isinstance(params, (SamplingParams, BeamSearchParams, CustomParams)):
        return params
    limit = "must be a SamplingParams, a BeamSearchParams, or CustomParams of a decoder that the server has registered"
    if isinstance(params, Mapping):
        limit += "; SamplingParams(**...) makes one of a mapping"
    raise InvalidArgument(field, params, limit)


def with_fields(params: Any, fields: Mapping[str, Any]) -> tuple[RequestParams, parameters_pb2.Parameters]:
    """A session's parameters with `fields` changed, in an object and in a message; without `params`, those that the
    model recommends are changed. Raises `InvalidArgument`."""
    if params is None:
        chosen: RequestParams = SamplingParams.from_dict(fields)
        return chosen, as_parameters(chosen, fields)
    chosen = check_params(params).clone(**fields)
    return chosen, as_parameters(chosen)


def as_prompt(field: str, prompt: Any) -> tuple[prompt_pb2.Prompt, str | None, str]:
    """A prompt as a message, its text where there is one, and its cache salt. Raises `InvalidArgument`."""
    text, token_ids, salt = None, prompt, ""
    if isinstance(prompt, Mapping):
        text, token_ids, salt = read_mapping(prompt, field)
        token_ids = text if token_ids is None else read_token_ids(f"{field}.prompt_token_ids", token_ids)
    if isinstance(token_ids, str):
        check_encodable(field, token_ids)
        return prompt_pb2.Prompt(text=token_ids), token_ids, salt
    is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, (bytes, bytearray))
    if not is_array(token_ids) and not (is_list and are_ids(token_ids)):
        raise InvalidArgument(field, prompt, "must be text, a list of token ids, or a mapping with one of them")
    return prompt_pb2.Prompt(token_ids=as_ids(field, token_ids)), text, salt


def as_model(lora_request: Any, model: str, field: str = "lora_request") -> str:
    """What a request names as its model: an adapter, or where there is none the client's `model`. Raises
    `InvalidArgument`."""
    if lora_request is None:
        return model
    if not isinstance(lora_request, ServedLora):
        limit = 'must be a ServedLora("NAME") of one that the server has loaded, or None: adapters do not travel'
        raise InvalidArgument(field, lora_request, limit)
    return lora_request.name


def as_models(lora_request: Any, num_prompts: int, model: str) -> list[str]:
    """The same for each of so many prompts, which have one adapter or a list of them. Raises `InvalidArgument`."""
    if not isinstance(lora_request, (list, tuple)):
        return [as_model(lora_request, model)] * num_prompts
    if len(lora_request) != num_prompts:
        limit = f"must be one for each of {num_prompts} prompts"
        raise InvalidArgument("lora_request", Shown(f"a list of {len(lora_request)}"), limit)
    return [as_model(one, model, f"lora_request[{i}]") for i, one in enumerate(lora_request)]


def as_order(priority: Any) -> int:
    """A priority, of as many bits as a message has for it. Raises `InvalidArgument`."""
    order = as_priority(priority)
    if not -MOST_ORDER <= order < MOST_ORDER:
        raise InvalidArgument("priority", priority, f"must be from {-MOST_ORDER} to {MOST_ORDER - 1}")
    return order


def as_ids(field: str, token_ids: Any) -> prompt_pb2.TokenIds:
    """Token ids as a message. Raises `InvalidArgument`."""
    read = read_token_ids(field, token_ids)
    wrong = next((token for token in read if not 0 <= token <= MOST_ID), None)
    if wrong is not None:
        raise InvalidArgument(field, wrong, f"token ids must be from 0 to {MOST_ID}")
    return prompt_pb2.TokenIds(ids=read)


def as_chat(messages: Any, field: str = "messages", **options: Any) -> prompt_pb2.Chat:
    """A conversation as a message. Raises `InvalidArgument`."""
    if not is_listed(messages, Mapping):
        raise InvalidArgument(field, messages, 'must be a list of messages such as {"role": "user", "content": "Hi"}')
    check_template(options.get("chat_template"))
    made = prompt_pb2.Chat(messages=[as_message(f"{field}[{i}]", one) for i, one in enumerate(messages)])
    for i, tool in enumerate(options.get("tools") or ()):
        if not isinstance(tool, Mapping):
            raise InvalidArgument(f"tools[{i}]", tool, "must be a JSON schema: functions do not travel")
        made.tools.append(as_struct(f"tools[{i}]", tool))
    variables = options.get("template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        limit = "must be a table of a template's variables by their names, or None"
        raise InvalidArgument("chat_template_kwargs", variables, limit)
    if variables:
        made.template_variables.CopyFrom(as_struct("chat_template_kwargs", variables))
    if not options.get("add_generation_prompt", True):
        made.add_generation_prompt = False
    if options.get("continue_final_message"):
        made.continue_final_message, made.add_generation_prompt = True, options.get("add_generation_prompt", True)
    return made


def as_metadata(given: Any) -> tuple[tuple[str, str], ...]:
    """What a caller has each call say beside its token, as gRPC takes it. Raises `InvalidArgument`, which repeats no
    value: some are secrets."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgument("metadata", Shown(f"a {type(given).__name__}"), "must be a table of texts, or None")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not HEADER.fullmatch(name) or name == "authorization":
            limit = (
                "names must be of a-z, 0-9, _, . and -, none of gRPC's own (grpc-..., ...-bin); a token is the token"
            )
            raise InvalidArgument("metadata", name, limit)
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise InvalidArgument(f"metadata[{name!r}]", Shown("what was given"), "must be text of one line, in ASCII")
    return tuple((given or {}).items())


def check_template(chat_template: object) -> None:
    """Raise `InvalidArgument` for anything but None."""
    if chat_template is not None:
        limit = "must be None: the server writes conversations by the template that it was started with"
        raise InvalidArgument("chat_template", chat_template, limit)


def as_message(field: str, message: Any) -> prompt_pb2.ChatMessage:
    """One message of a conversation. Raises `InvalidArgument`."""
    if not isinstance(message, Mapping):
        raise InvalidArgument(field, message, 'must be a message such as {"role": "user", "content": "Hi"}')
    if not isinstance(message.get("role"), str):
        raise InvalidArgument(f"{field}.role", message.get("role"), "must be a text such as user, assistant, system")
    content = message.get("content")
    made = prompt_pb2.ChatMessage(role=message["role"])
    if isinstance(content, str):
        check_encodable(f"{field}.content", content)
        made.content = content
    rest = {key: value for key, value in message.items() if key != "role" and not (key == "content" and made.content)}
    rest = {key: value for key, value in rest.items() if not (key == "content" and isinstance(value, str))}
    if rest:
        made.fields.CopyFrom(as_struct(field, rest))
    return made


def as_keep(keep: Any, num_answers: int) -> session_service_pb2.Keep:
    """Which of so many answers a branch goes on from. Raises `InvalidArgument`."""
    if keep == "first":
        return session_service_pb2.Keep()
    if keep in ("all", "none") and isinstance(keep, str):
        return session_service_pb2.Keep(all=True) if keep == "all" else session_service_pb2.Keep(none=True)
    if type(keep) is not int or not 0 <= keep < num_answers:
        limit = f"must be one of first, all, none, or an answer's number below {num_answers}"
        raise InvalidArgument("keep", keep, limit)
    return session_service_pb2.Keep(answer=keep)


def as_struct(field: str, table: Mapping[str, Any]) -> Struct:
    """A table of what JSON can say. Raises `InvalidArgument`."""
    made = Struct()
    try:
        made.update(json.loads(json.dumps(dict(table), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(field, table, f"must be what JSON can say: {error}") from None
    return made


# ---- inside
def _put(message: Any, table: Mapping[str, str], given: Mapping[str, Any]) -> None:
    for field, name in table.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, (list, tuple)):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)


def _constrain(message: parameters_pb2.Constraint, params: RequestParams) -> None:
    if params.allowed_tokens_fn is not None:
        limit = "must be None: a function does not travel"
        raise InvalidArgument("allowed_tokens_fn", Shown("a function"), limit)
    if params.token_trie is not None:
        if not isinstance(params.token_trie, ServedTrie):
            limit = 'must be a ServedTrie("NAME") of one that the server has loaded: tries do not travel'
            raise InvalidArgument("token_trie", params.token_trie, limit)
        message.trie = params.token_trie.name
    own = params.structured_outputs
    if own is None:
        return
    kinds: dict[str, Callable[[StructuredOutputsParams], None]] = {
        "json": lambda own: setattr(message, "json_schema", json.dumps(own.json)),
        "choice": lambda own: message.choice.texts.extend(own.choice or ()),
    }
    kinds.get(own.kind, lambda own: setattr(message, own.kind, getattr(own, own.kind)))(own)
    for field, name in JSON_OPTIONS.items():
        if getattr(own, name):
            setattr(message, field, getattr(own, name))


def _speculate(message: parameters_pb2.Speculation, value: Any) -> None:
    if value is False:
        message.off = True
    elif value is not None:
        message.table.CopyFrom(as_struct("speculative", value))
