"""`AsyncClient`: what `AsyncLLM` does, done by a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from pagedec.client import questions
from pagedec.client.asking import ServedLora, as_metadata, as_model, as_order
from pagedec.client.async_remote_session import AsyncRemoteSession
from pagedec.client.async_route import AsyncRoute, learned
from pagedec.client.connection import RESUME_SECONDS, TARGET, Inquiry, Way
from pagedec.client.handle import Held, opening
from pagedec.client.questions import Question
from pagedec.client.token_pieces import TokenPieces
from pagedec.inputs import CallArgs, Prompt, check_call
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, RequestOutputKind, SamplingParams, as_beams
from pagedec.v1 import model_service_pb2, session_service_pb2

T = TypeVar("T")


class AsyncClient:
    """A server's model, by the names, arguments and outputs of `AsyncLLM`, for the coroutines of one event loop. Its
    arguments are those of `Client`."""

    def __init__(
        self,
        target: str = TARGET,
        *,
        token: str | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout: float | None = None,
        retries: int = 3,
        model: str = "",
        options: Sequence[tuple[str, Any]] = (),
        resume: float = RESUME_SECONDS,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        way = target, token, tls, tls_ca, tls_cert, tls_key, timeout, retries, tuple(options), resume
        self._way = Way(*way, as_metadata(metadata))
        self._line, self._model, self._pieces = AsyncRoute(self._way), model, TokenPieces()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self._way.target}>"

    # ---- text from prompts
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        request_id: str | None = None,
        lora_request: ServedLora | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **of_vllm: Unpack[CallArgs],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to one prompt as they grow; see `AsyncLLM.generate`. Leaving the iterator ends the request."""
        check_call("generate", of_vllm)
        question = Question.of("prompt", prompt, sampling_params, cache_salt, as_model(lora_request, self._model))
        async with contextlib.aclosing(self._outputs(question, request_id, priority, timeout)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Any = None,
        request_id: str | None = None,
        *,
        lora_request: ServedLora | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        **of_vllm: Unpack[CallArgs],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation as it grows; see `AsyncLLM.chat`. The template is the server's."""
        options = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        check_call("chat", of_vllm)
        model = as_model(lora_request, self._model)
        question = Question.of_chat(messages, sampling_params, options, model=model)
        async with contextlib.aclosing(self._outputs(question, request_id, priority, timeout)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        request_id: str | None,
        params: BeamSearchParams,
        lora_request: ServedLora | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """All answers to one prompt, once; see `AsyncLLM.beam_search`."""
        final = as_beams(params).clone(output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self.generate(prompt, final, request_id, lora_request=lora_request, timeout=timeout)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def _outputs(
        self, question: Question, request_id: str | None, priority: int, timeout: float | None
    ) -> AsyncGenerator[RequestOutput, None]:
        ask = question.growing(as_order(priority), request_id or "")
        async with contextlib.aclosing(self._line.read(ask, timeout)) as outputs:
            async for output in outputs:
                if output is not None:
                    yield await learned(self._line, self._pieces, output, question.params)

    # ---- branches
    def session(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttl: float | None = None,
        lora_request: ServedLora | None = None,
        chat_template: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Arriving:
        """Branches in your own hands, on the server: `session = await client.session(prompt)`, or `async with
        client.session(prompt) as session`; see `Client.session`."""
        template = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs}
        model = as_model(lora_request, self._model)
        ask = opening(prompt, messages, seed, priority, cache_salt, ttl, model, template)
        return Arriving(self._line, ask, self._pieces)

    async def sessions(self) -> list[session_service_pb2.Session]:
        """This client's sessions that are open, whoever has opened them, as messages of the contract."""
        told = await self._line.ask(questions.sessions())
        found = list(told.sessions)
        while told.next_page_token:
            told = await self._line.ask(questions.sessions(told.next_page_token))
            found += told.sessions
        return found

    # ---- what goes with a model
    async def models(self) -> list[model_service_pb2.Model]:
        """What is served, as messages of the contract; see `Client.models`."""
        return await self._line.ask(questions.models())

    async def get_default_sampling_params(self) -> SamplingParams:
        """What the model recommends, and what a call without parameters has."""
        return await self._line.ask(questions.default_params(self._model))

    async def tokenize(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The tokens of a text, or of a conversation."""
        return await self._line.ask(questions.tokenize(prompt, messages, add_special_tokens, self._model))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return await self._line.ask(questions.detokenize(token_ids, skip_special_tokens, self._model))

    # ---- the end
    async def close(self) -> None:
        """Give up the connection; see `Client.close`."""
        await self._line.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Arriving:
    """A session that is about to be opened: to be awaited, or entered with `async with`."""

    def __init__(
        self, line: AsyncRoute, ask: Inquiry[session_service_pb2.OpenSessionResponse], pieces: TokenPieces
    ) -> None:
        self._line, self._ask, self._pieces = line, ask, pieces
        self._session: AsyncRemoteSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncRemoteSession]:
        return self._open().__await__()

    async def _open(self) -> AsyncRemoteSession:
        opened = await self._line.ask(self._ask)
        return AsyncRemoteSession(Held(self._line, opened.session_id, self._pieces), opened.branch)

    async def __aenter__(self) -> AsyncRemoteSession:
        self._session = await self._open()
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
