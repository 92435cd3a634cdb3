"""What `Client` and `AsyncClient` ask of a server: calls, and how their answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from pagedec.client.asking import FIELDS, as_chat, as_ids, as_parameters, as_prompt, check_params
from pagedec.client.connection import Inquiry
from pagedec.client.failures import code_name, exception_of, recalled
from pagedec.client.telling import Growing
from pagedec.errors import InvalidArgument, RequestError
from pagedec.inputs import is_listed, read_salt
from pagedec.outputs import RequestOutput
from pagedec.params import SamplingParams
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2, prompt_pb2, session_service_pb2

SESSIONS = 1000
"""Of a page."""
CHAT = {
    "prompt.chat.messages": "messages", "prompt.chat.tools": "tools",
    "prompt.chat.template_variables": "chat_template_kwargs", "prompt.chat": "messages", "prompt": "messages",
}  # fmt: skip


class Question:
    """One prompt with its parameters, on its way to `Generate`, `GenerateStream` or `GenerateBatch`."""

    def __init__(
        self,
        prompt: prompt_pb2.Prompt,
        text: str | None,
        params: Any,
        names: Mapping[str, str],
        given: Mapping[str, Any],
        salt: str = "",
        model: str = "",
    ) -> None:
        """`names`: what the message's fields are called in Python; `given`: what the caller gave, by these names;
        `model`: by one of the server's names. Raises `InvalidArgument`."""
        self.params = SamplingParams() if params is None else check_params(params)
        self.names = {"client_request_id": "request_id", **names}
        self.given = {"": self.params, "model": model, **given}
        self._text = text
        self._message: dict[str, Any] = {
            "prompt": prompt,
            "parameters": None if params is None else as_parameters(params),
            "cache_salt": salt,
            "model": model,
        }

    @classmethod
    def of(cls, field: str, prompt: Any, params: Any, salt: str = "", model: str = "") -> Question:
        """Of a prompt as text or as token ids."""
        message, text, own = as_prompt(field, prompt)
        names = {"prompt.text": field, "prompt.token_ids.ids": field, "prompt": field}
        return cls(message, text, params, names, {field: prompt}, own or read_salt("cache_salt", salt), model)

    @classmethod
    def of_chat(
        cls, messages: Any, params: Any, options: Mapping[str, Any], field: str = "messages", model: str = ""
    ) -> Question:
        """Of a conversation."""
        many = list(messages) if is_listed(messages, Mapping) else messages
        chat = as_chat(many, field, **options)
        names = {path: name.replace("messages", field) for path, name in CHAT.items()}
        given = {field: many, "tools": options.get("tools"), "chat_template_kwargs": options.get("template_kwargs")}
        return cls(prompt_pb2.Prompt(chat=chat), None, params, names, given, model=model)

    @property
    def all_names(self) -> dict[str, str]:
        """What the fields of its message, and of an item of a batch, are called in Python."""
        own = {**FIELDS, **self.names}
        return own | {f"request.{path}": name for path, name in own.items()}

    def request(self, priority: int = 0, request_id: str = "") -> pb.GenerateRequest:
        """What `Generate` is asked."""
        return pb.GenerateRequest(**self._message, priority=priority, client_request_id=request_id)

    def at_once(self, priority: int = 0) -> Inquiry[RequestOutput]:
        """All answers, once."""
        return Inquiry("Generate", self.request(priority), self.read, self.names, True, given=self.given)

    def growing(self, priority: int = 0, request_id: str = "") -> Inquiry[RequestOutput | None]:
        """The answers as they grow."""
        request = pb.GenerateStreamRequest(
            **self._message, priority=priority, client_request_id=request_id,
            stream_interval=self.params.stream_interval,
        )  # fmt: skip
        growing = Growing(self.params, self._text)
        return Inquiry("GenerateStream", request, growing.push, self.names, given=self.given, growing=growing)

    def read(self, response: pb.GenerateResponse) -> RequestOutput:
        """The output of a response."""
        return Growing(self.params, self._text).whole(response, response.answers)

    def told(self, item: pb.GenerateBatchResponse) -> RequestOutput:
        """The output of an item of a batch. Raises what it may not ask."""
        if item.WhichOneof("result") == "response":
            return self.read(item.response)
        found = exception_of(code_name(item.error.code), item.error, self.all_names, request_id=item.item_id)
        error = recalled(found, self.given)
        if not isinstance(error, RequestError):
            raise error
        return self.failed(item.item_id, error)

    def failed(self, request_id: str, error: Any) -> RequestOutput:
        """The output of one that could not be carried out."""
        tokens = list(self._message["prompt"].token_ids.ids)
        return RequestOutput(request_id, self._text, tokens, [], True, error=error)


def models() -> Inquiry[list[model_service_pb2.Model]]:
    """What is served."""
    return Inquiry("ListModels", model_service_pb2.ListModelsRequest(), lambda told: list(told.models), is_safe=True)


def sessions(page_token: str = "") -> Inquiry[session_service_pb2.ListSessionsResponse]:
    """A page of this client's sessions."""
    request = session_service_pb2.ListSessionsRequest(page_size=SESSIONS, page_token=page_token)
    return Inquiry("ListSessions", request, lambda told: told, is_safe=True)


def default_params(model: str) -> Inquiry[SamplingParams]:
    """What a model recommends."""

    def read(told: model_service_pb2.GetModelResponse) -> SamplingParams:
        given = json_format.MessageToDict(told.model.default_parameters)
        whole = {name: int(own) if isinstance(own, float) and own.is_integer() else own for name, own in given.items()}
        return SamplingParams.from_dict(whole)

    request = model_service_pb2.GetModelRequest(name=model)
    return Inquiry("GetModel", request, read, is_safe=True, given={"model": model})


def tokenize(prompt: Any, messages: Any, special_tokens: bool, model: str) -> Inquiry[list[int]]:
    """The tokens of a text or of a conversation."""
    if (prompt is None) == (messages is None):
        raise InvalidArgument("prompt", prompt, "must be given, or messages, and not both")
    message = as_prompt("prompt", prompt)[0] if messages is None else prompt_pb2.Prompt(chat=as_chat(messages))
    request = model_service_pb2.TokenizeRequest(prompt=message, no_special_tokens=not special_tokens, model=model)
    names = {"prompt.text": "prompt"} if messages is None else CHAT
    return Inquiry("Tokenize", request, lambda told: list(told.token_ids), names, True, given={"model": model})


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool, model: str) -> Inquiry[str]:
    """The text of tokens."""
    ids = as_ids("token_ids", token_ids).ids
    request = model_service_pb2.DetokenizeRequest(token_ids=ids, special_tokens=not skip_special_tokens, model=model)
    return Inquiry("Detokenize", request, lambda told: told.text, is_safe=True, given={"model": model})
