"""What `Client` and `AsyncClient` ask of a server: calls, and how their answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedec.client.asking import FIELDS, as_chat, as_ids, as_parameters, as_prompt
from pagedec.client.connection import Inquiry
from pagedec.client.telling import Growing
from pagedec.errors import InvalidArgument
from pagedec.inputs import read_salt
from pagedec.outputs import RequestOutput
from pagedec.params import RequestParams, SamplingParams
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2, prompt_pb2

CHAT = {
    "prompt.chat.messages": "messages", "prompt.chat.tools": "tools",
    "prompt.chat.template_variables": "chat_template_kwargs", "prompt.chat": "messages", "prompt": "messages",
}  # fmt: skip


class Question:
    """One prompt with its parameters, on its way to `Generate`, `GenerateStream` or `GenerateBatch`."""

    def __init__(
        self, prompt: prompt_pb2.Prompt, text: str | None, params: Any, names: Mapping[str, str], salt: str = ""
    ) -> None:
        """`names`: what the message's fields are called in Python. Raises `InvalidArgument`."""
        if params is not None and not isinstance(params, RequestParams):
            raise InvalidArgument("sampling_params", params, "must be a SamplingParams, or a BeamSearchParams")
        self.params: RequestParams = params if params is not None else SamplingParams()
        self.names = {"client_request_id": "request_id", **names}
        self._text = text
        self._given: dict[str, Any] = {
            "prompt": prompt,
            "parameters": None if params is None else as_parameters(params),
            "cache_salt": salt,
        }

    @classmethod
    def of(cls, field: str, prompt: Any, params: Any, salt: str = "") -> Question:
        """Of a prompt as text or as token ids."""
        message, text, own = as_prompt(field, prompt)
        names = {"prompt.text": field, "prompt.token_ids.ids": field, "prompt": field}
        return cls(message, text, params, names, own or read_salt("cache_salt", salt))

    @classmethod
    def of_chat(cls, messages: Any, params: Any, options: Mapping[str, Any], field: str = "messages") -> Question:
        """Of a conversation."""
        chat = as_chat(messages, field, **options)
        names = {path: name.replace("messages", field) for path, name in CHAT.items()}
        return cls(prompt_pb2.Prompt(chat=chat), None, params, names)

    @property
    def all_names(self) -> dict[str, str]:
        """What the fields of its message, and of an item of a batch, are called in Python."""
        own = {**FIELDS, **self.names}
        return own | {f"request.{path}": name for path, name in own.items()}

    def request(self, model: str, priority: int = 0, request_id: str = "") -> pb.GenerateRequest:
        """What `Generate` is asked."""
        return pb.GenerateRequest(**self._given, model=model, priority=priority, client_request_id=request_id)

    def at_once(self, model: str, priority: int = 0) -> Inquiry[RequestOutput]:
        """All answers, once."""
        return Inquiry("Generate", self.request(model, priority), self.read, self.names, is_safe=True)

    def growing(self, model: str, priority: int = 0, request_id: str = "") -> Inquiry[RequestOutput | None]:
        """The answers as they grow."""
        request = pb.GenerateStreamRequest(
            **self._given, model=model, priority=priority, client_request_id=request_id,
            stream_interval=self.params.stream_interval,
        )  # fmt: skip
        return Inquiry("GenerateStream", request, Growing(self.params, self._text).push, self.names)

    def read(self, response: pb.GenerateResponse) -> RequestOutput:
        """The output of a response."""
        return Growing(self.params, self._text).whole(response, response.answers)

    def failed(self, request_id: str, error: Any) -> RequestOutput:
        """The output of one that could not be carried out."""
        tokens = list(self._given["prompt"].token_ids.ids)
        return RequestOutput(request_id, self._text, tokens, [], True, error=error)


def models() -> Inquiry[list[model_service_pb2.Model]]:
    """What is served."""
    return Inquiry("ListModels", model_service_pb2.ListModelsRequest(), lambda told: list(told.models), is_safe=True)


def tokenize(prompt: Any, messages: Any, special_tokens: bool, model: str) -> Inquiry[list[int]]:
    """The tokens of a text or of a conversation."""
    if (prompt is None) == (messages is None):
        raise InvalidArgument("prompt", prompt, "must be given, or messages, and not both")
    message = as_prompt("prompt", prompt)[0] if messages is None else prompt_pb2.Prompt(chat=as_chat(messages))
    request = model_service_pb2.TokenizeRequest(prompt=message, no_special_tokens=not special_tokens, model=model)
    names = {"prompt.text": "prompt"} if messages is None else CHAT
    return Inquiry("Tokenize", request, lambda told: list(told.token_ids), names, is_safe=True)


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool, model: str) -> Inquiry[str]:
    """The text of tokens."""
    ids = as_ids("token_ids", token_ids).ids
    request = model_service_pb2.DetokenizeRequest(token_ids=ids, special_tokens=not skip_special_tokens, model=model)
    return Inquiry("Detokenize", request, lambda told: told.text, is_safe=True)
