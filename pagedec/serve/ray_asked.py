"""What a router reads of a request before any replica has seen it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from pagedec.serve.leases import tag_of
from pagedec.serve.prompt_keys import Key, Prompt, prefix_keys
from pagedec.serve.routing_config import RoutingConfig
from pagedec.v1 import prompt_pb2, session_service_pb2

PROMPTED = ("Generate", "GenerateStream", "OpenSession")
"""Calls whose prompt's blocks a replica may have."""
IN_SESSIONS = frozenset(
    method.name
    for method in session_service_pb2.DESCRIPTOR.services_by_name["SessionService"].methods
    if "session_id" in method.input_type.fields_by_name
)
"""Calls about a session, which one replica has."""

MOST_JSON, MOST_TOOLS = 2**20, 4096
"""Bytes of a table, or of all tools, and how many tools there may be: of more nothing is read. A megabyte takes 0.1 s,
in which the proxy does nothing else; replicas take no more unless they are told."""


class Asked(NamedTuple):
    """What decides where a request goes: the keys of its prompt, or the tag of the replica that has its session."""

    keys: tuple[Key, ...] = ()
    home: str | None = None


def read_asked(method: str, args: Sequence[Any], metadata: Mapping[str, Any], config: RoutingConfig) -> Asked:
    """Of a call of `method` whose `args` are what Serve's proxy sends, a pickled record with the message in it, and
    whose client has sent `metadata`. Whatever is wrong with the message its replica will say."""
    if method in IN_SESSIONS:
        return Asked(home=tag_of(_message(args).session_id) or None)
    if method not in PROMPTED:
        return Asked()
    message = _message(args)
    salt = _salt(message.cache_salt, str(metadata.get("authorization", "")))
    try:
        given, context = read_told(message.prompt)
        if given is None:
            return Asked()
        return Asked(prefix_keys(given, salt=salt, model=message.model, context=context, config=config))
    except ValueError:  # NaN, say, which JSON has not
        return Asked()


def read_told(prompt: prompt_pb2.Prompt) -> tuple[Prompt | None, Any]:
    """A prompt as `prefix_keys` takes it, and what a template may write before it; None: there is none. Raises
    `ValueError` for tables that JSON cannot say, or that are too large to be read where all clients wait; messages
    raise it when they are read."""
    form = prompt.WhichOneof("form")
    if form == "text":
        return prompt.text, None
    if form == "token_ids":
        return prompt.token_ids.ids, None
    if form != "chat" or not prompt.chat.messages:
        return None, None
    chat = prompt.chat
    if len(chat.tools) > MOST_TOOLS or sum(tool.ByteSize() for tool in chat.tools) > MOST_JSON:
        raise ValueError("too many tools")
    context = {"tools": [_table(tool) for tool in chat.tools], "variables": _table(chat.template_variables)}
    return _Turns(chat.messages), context


class _Turns(Sequence[Mapping[str, Any]]):
    """A conversation's messages, each read where it is asked for: the keys need the first ones alone."""

    def __init__(self, messages: Sequence[prompt_pb2.ChatMessage]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, place: Any) -> Any:
        turn = self._messages[place]
        said = {"content": turn.content} if turn.HasField("content") else {}
        return {**_table(turn.fields), "role": turn.role, **said}


def _table(struct: Struct) -> dict[str, Any]:
    if struct.ByteSize() > MOST_JSON:
        raise ValueError("too large a table")
    found: dict[str, Any] = MessageToDict(struct)
    return found


def _message(args: Sequence[Any]) -> Any:
    """Made by the proxy in whose process this runs."""
    return pickle.loads(args[0]).user_request_proto


def _salt(given: str, token: str) -> str:
    """Prefixes are shared within a client only, and he is known by his token, of which only a digest is kept."""
    return f"{blake2b(token.encode(), digest_size=16).hexdigest()}\0{given}" if token else given
