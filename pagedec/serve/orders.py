"""From messages to what `AsyncLLM` takes: prompts and parameters, with errors that name the message's own fields."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from pagedec.decoders.registry import decoder_for, registered_names
from pagedec.errors import InvalidArgument, NotFound, RequestError, Shown, counted
from pagedec.fields import check_names, field_names
from pagedec.lora.request import LoRARequest
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
    seconds_of,
)
from pagedec.params import BeamSearchParams, RequestOutputKind, RequestParams, SamplingParams
from pagedec.serve.server_config import ServerConfig
from pagedec.structured import AllowedSequences, StructuredOutputsParams
from pagedec.v1 import parameters_pb2, prompt_pb2

ORDER = {
    name: place
    for place, name in enumerate(
        ("id", "type", "function", "name", "description", "parameters", "arguments", "properties", "required")
    )
}
"""Of a table's names, those that come first, as tools and their calls are usually written; others by the alphabet."""
TOLD = ("output_kind", "stream_interval")
"""Parameters that say how outputs come, which the RPC says."""
UNSAID = "num_answers"
"""How many answers there are, where no parameter says it alone: decoders of one's own compute it."""
EVERYWHERE = {
    **{name: f"parameters.{field}" for field, name in WHOLE.items()},
    **{name: f"parameters.stopping.{field}" for field, name in STOPPING.items()},
    **{name: f"parameters.logits_rules.{field}" for field, name in RULES.items()},
    **{name: f"parameters.reports.{field}" for field, name in REPORTS.items()},
    "max_time": "parameters.stopping.time_limit",
}
PATHS = {
    "sampling": EVERYWHERE | {name: f"parameters.sampling.{field}" for field, name in SAMPLING.items()},
    "beam_search": EVERYWHERE | {name: f"parameters.beam_search.{field}" for field, name in BEAMS.items()},
    "custom": EVERYWHERE,
}
"""Where in a message each parameter stands, by what decodes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a server's configuration bounds a request, and what it may name."""

    config: ServerConfig
    defaults: Mapping[str, Any]
    """Sampling as the model recommends it."""
    max_model_len: int
    vocab_size: int
    tries: Mapping[str, AllowedSequences]


@dataclass(frozen=True, slots=True)
class Order:
    """How a request is decoded. `paths`: where in the message each parameter stands; `is_chat`: it goes on with a
    conversation; `lora`: the adapter that it goes through."""

    params: RequestParams
    paths: Mapping[str, str]
    is_chat: bool = False
    lora: LoRARequest | None = None

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors about a parameter name the message's field."""
        with _named(self.paths):
            yield


def read_order(
    given: parameters_pb2.Parameters,
    limits: Limits,
    output_kind: RequestOutputKind,
    stream_interval: int | None = None,
    is_chat: bool = False,
) -> Order:
    """Parameters from a message. Raises `InvalidArgument` naming the message's field, and `NotFound`."""
    kind = given.WhichOneof("decoding") or "sampling"
    values: dict[str, Any] = {}
    paths = dict(PATHS[kind])
    _take(given, WHOLE, values)
    for name, fields in (("stopping", STOPPING), ("logits_rules", RULES), ("reports", REPORTS)):
        _check_counts(getattr(given, name), f"parameters.{name}", limits.vocab_size)
        _take(getattr(given, name), fields, values)
    if given.stopping.HasField("time_limit"):
        values["max_time"] = seconds_of(given.stopping.time_limit)
    if given.reports.special_tokens:
        values["skip_special_tokens"] = False
    if given.reports.no_text:
        values["detokenize"] = False
    _constrain(given.constraint, limits, values, paths)
    if (mode := given.speculation.WhichOneof("mode")) is not None:
        path = paths["speculative"] = f"parameters.speculation.{mode}"
        _check_size(given.speculation, path, limits.config)
        values["speculative"] = as_table(given.speculation.table, path) if mode == "table" else False
        if mode == "off" and not given.speculation.off:
            del values["speculative"]
    values["output_kind"] = output_kind
    if stream_interval is not None:
        values["stream_interval"] = stream_interval
    with _named(paths):
        params = _decoding(given, kind, limits, values, paths)
        check_bounds(params, limits)
    return Order(params, paths, is_chat)


def read_prompt(prompt: prompt_pb2.Prompt, limits: Limits) -> str | list[int] | prompt_pb2.Chat:
    """What is asked: text, token ids, or a conversation that is still to be written. Raises `InvalidArgument`, for what
    is so large that it need not be read, too."""
    form = prompt.WhichOneof("form")
    if form == "text":
        return prompt.text
    if form == "token_ids":
        return read_ids(prompt.token_ids.ids, "prompt", limits)
    if form == "chat":
        check_chat(prompt.chat, limits)
        return prompt.chat
    raise InvalidArgument("prompt", None, "must have text, token_ids or chat")


def check_chat(chat: prompt_pb2.Chat, limits: Limits) -> None:
    """Raise `InvalidArgument` for a conversation that can fit no context, or has too much as JSON."""
    most = limits.max_model_len
    for name, count in (("messages", len(chat.messages)), ("tools", len(chat.tools))):
        if count > most:
            limit = f"must be at most {most}: each has a token at least, and the context holds no more"
            raise InvalidArgument(f"prompt.chat.{name}", Shown(f"{count} of them"), limit)
    messages = {f"messages[{i}].fields": own.fields for i, own in enumerate(chat.messages) if own.HasField("fields")}
    tools = {f"tools[{i}]": tool for i, tool in enumerate(chat.tools)}
    tables = {**messages, **tools, "template_variables": chat.template_variables}
    check_json({f"prompt.chat.{name}": table for name, table in tables.items()}, limits.config)


def check_json(tables: Mapping[str, Struct], config: ServerConfig) -> None:
    """Raise `InvalidArgument` where what a conversation has as JSON, by its fields, is too large: a megabyte takes some
    0.1 s to be read."""
    left = config.max_json_size
    for field, table in tables.items():
        size = table.ByteSize()
        if size > left:
            limit = f"must be at most {left} bytes: a conversation's fields, tools and variables may together have "
            raise InvalidArgument(
                field, Shown(f"{size} bytes"), f"{limit}{config.max_json_size}, the server's max_json_size"
            )
        left -= size


def read_ids(ids: Sequence[int], field: str, limits: Limits) -> list[int]:
    """Token ids of a message. Raises `InvalidArgument` for more than any request may have; whoever takes them says what
    else is wrong with them."""
    most = max(limits.max_model_len, limits.config.max_request_tokens)
    if len(ids) > most:
        raise InvalidArgument(field, Shown(f"{len(ids)} tokens"), f"must be at most {most} tokens long")
    return list(ids)


def read_message(message: prompt_pb2.ChatMessage, field: str) -> dict[str, Any]:
    """One message of a conversation. Raises `InvalidArgument`."""
    content = {"content": message.content} if message.HasField("content") else {}
    own = {"role": message.role, **content}
    return {**own, **as_table(message.fields, f"{field}.fields"), **own}


def read_chat(chat: prompt_pb2.Chat) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation's messages, and `render_chat`'s options. Raises `InvalidArgument`."""
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    options = {
        "add_generation_prompt": begins,
        "continue_final_message": chat.continue_final_message,
        "tools": [as_table(tool, f"prompt.chat.tools[{i}]") for i, tool in enumerate(chat.tools)] or None,
        "template_kwargs": as_table(chat.template_variables, "prompt.chat.template_variables") or None,
    }
    return [read_message(own, f"prompt.chat.messages[{i}]") for i, own in enumerate(chat.messages)], options


def as_table(struct: Struct, field: str) -> dict[str, Any]:
    """A Struct as a table; its numbers are whole where they have no fraction, since JSON tells no difference, and its
    names in the one order of `ORDER`: a Struct has none, and what it is read in is another one in each process, so that
    templates would write another prompt. Raises `InvalidArgument` for numbers that JSON does not have."""
    try:
        found: dict[str, Any] = _whole(json_format.MessageToDict(struct))
    except ValueError:  # the one thing that a Struct may hold and JSON may not
        raise InvalidArgument(field, Shown("NaN or infinite somewhere"), "must be what JSON can say") from None
    return found


def width_of(params: RequestParams) -> int:
    """How many answers, or beams, run at the same time."""
    return max(params.num_answers, getattr(params, "beam_width", 1))


# ---- inside
def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _whole(value[name]) for name in sorted(value, key=lambda name: (ORDER.get(name, len(ORDER)), name))
        }
    if isinstance(value, list):
        return [_whole(own) for own in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _take(message: Message, fields: Mapping[str, str], values: dict[str, Any]) -> None:
    """The fields that are set, by the names that parameters have for them."""
    for descriptor, value in message.ListFields():
        name = fields.get(descriptor.name)
        if name is not None:
            values[name] = _plain(value)


def _check_counts(message: Message, path: str, most: int) -> None:
    for descriptor, value in message.ListFields():
        if descriptor.is_repeated and len(value) > most:
            limit = f"must be at most {most}, the size of the vocabulary"
            raise InvalidArgument(f"{path}.{descriptor.name}", Shown(f"{len(value)} entries"), limit)


def _check_size(message: Message, path: str, config: ServerConfig) -> None:
    size, most = message.ByteSize(), config.max_constraint_size
    if size > most:
        limit = f"must be at most {most} bytes, the server's max_constraint_size"
        raise InvalidArgument(path, Shown(f"{size} bytes"), limit)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value


def _constrain(given: parameters_pb2.Constraint, limits: Limits, values: dict[str, Any], paths: dict[str, str]) -> None:
    kind = given.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not given.json_object):
        return
    path = f"parameters.constraint.{kind}"
    _check_size(given, path, limits.config)
    if kind == "trie":
        if given.trie not in limits.tries:
            raise NotFound("trie", given.trie, f"known are {', '.join(limits.tries) or 'none'}")
        values["token_trie"] = limits.tries[given.trie]
        return
    value = list(given.choice.texts) if kind == "choice" else getattr(given, kind)
    table: dict[str, Any] = {CONSTRAINTS[kind]: value}
    paths["structured_outputs"] = paths[f"structured_outputs.{CONSTRAINTS[kind]}"] = path
    for name, field in JSON_OPTIONS.items():
        if option := getattr(given, name):
            table[field], paths[f"structured_outputs.{field}"] = option, f"parameters.constraint.{name}"
    with _named(paths):
        values["structured_outputs"] = StructuredOutputsParams.of(table)


def _decoding(
    given: parameters_pb2.Parameters, kind: str, limits: Limits, values: dict[str, Any], paths: dict[str, str]
) -> RequestParams:
    if kind == "custom":
        _check_size(given.custom, "parameters.custom", limits.config)
        return _custom(given.custom, values, paths)
    if kind == "beam_search":
        _take(given.beam_search, BEAMS, values)
        if given.beam_search.early_stopping not in EARLY:
            known = ", ".join(parameters_pb2.EarlyStopping.keys())
            field = "parameters.beam_search.early_stopping"
            raise InvalidArgument(field, int(given.beam_search.early_stopping), f"must be one of {known}")
        values["early_stopping"] = EARLY[given.beam_search.early_stopping]
        return BeamSearchParams.from_dict(values)
    _take(given.sampling, SAMPLING, values)
    return SamplingParams.from_dict({**({} if given.no_recommendations else limits.defaults), **values})


def _custom(given: parameters_pb2.CustomDecoder, values: dict[str, Any], paths: dict[str, str]) -> RequestParams:
    if given.name not in registered_names():
        raise NotFound("decoder", given.name, f"known are {', '.join(registered_names())}")
    made = decoder_for(given.name).params
    own = as_table(given.parameters, "parameters.custom.parameters")
    known = [name for name in field_names(made) if name not in TOLD]
    for name in (*own, *(name for name in known if name not in paths)):
        paths[name] = f"parameters.custom.parameters.{name}"
    paths[UNSAID] = "parameters.custom.parameters"
    check_names(f"the decoder {given.name}", own, known, own)
    return made.from_dict({**values, **own})


def check_bounds(params: RequestParams, limits: Limits) -> None:
    """Raise `InvalidArgument` for what takes more than anybody may."""
    config = limits.config
    width = width_of(params)
    if width > config.max_answers:
        limit = f"must be at most {config.max_answers}, the server's max_answers"
        raise _too_wide(params, width, limit)
    tokens = width * (params.max_tokens or limits.max_model_len)
    if tokens > config.max_request_tokens:
        limit = f"must be at most {config.max_request_tokens // width}: {width} answers, or beams, may together have "
        raise InvalidArgument("max_tokens", params.max_tokens, f"{limit}{config.max_request_tokens} tokens")


def oversized(params: RequestParams, num_prompt_tokens: int, most: int, quota: str) -> InvalidArgument:
    """Of a request that comes to more tokens than all of a client's may, `most`, as `quota` says: what it has too much
    of."""
    width, room = width_of(params), most - num_prompt_tokens
    why = f"a client's requests, prompts included, may together come to {counted(most, 'token')} ({quota})"
    if room < 1:
        limit = f"must be at most {counted(most - 1, 'token')} long: {why}"
        return InvalidArgument("prompt", Shown(counted(num_prompt_tokens, "token")), limit)
    why = f"{why}, of which this one's prompt has {num_prompt_tokens}"
    if room < width:
        return _too_wide(params, width, f"must be at most {room}: {why}")
    return InvalidArgument("max_tokens", params.max_tokens, f"must be at most {room // width}: {why}")


def answers_field(params: RequestParams) -> str:
    """The parameter that says how many answers there are; `UNSAID` of a decoder of which it is not known."""
    return _first(params, "num_return_sequences", "n")


def _too_wide(params: RequestParams, width: int, limit: str) -> InvalidArgument:
    field = _first(params, "beam_width", "n")
    return InvalidArgument(field, Shown(counted(width, "answer")) if field == UNSAID else width, limit)


def _first(params: RequestParams, *names: str) -> str:
    return next((name for name in names if hasattr(params, name)), UNSAID)


@contextlib.contextmanager
def _named(paths: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        found = _at_its_path(error, paths)
        if found is error:
            raise
        raise found from error.__cause__
    except RequestError as error:  # of a grammar that runs: what it may not be is the cause, which clients are told of
        if isinstance(error.__cause__, InvalidArgument):
            raise error from _at_its_path(error.__cause__, paths)
        raise


def _at_its_path(error: InvalidArgument, paths: Mapping[str, str]) -> InvalidArgument:
    """The same error about the message's field, where a parameter stands in one."""
    name, dot, rest = error.field.partition(".")
    path = paths.get(error.field) or (f"{paths[name]}{dot}{rest}" if name in paths else None)
    return error if path is None else type(error)(path, error.value, error.limit)
