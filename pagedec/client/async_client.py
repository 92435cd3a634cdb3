"""`AsyncClient`: what `AsyncLLM` does, done by a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc.aio

from pagedec.client import questions
from pagedec.client.async_remote_session import AsyncRemoteSession
from pagedec.client.connection import SERVICES, TARGET, Inquiry, Way, find, pause_before, remaining
from pagedec.client.handle import Held, opening
from pagedec.client.questions import Question
from pagedec.inputs import Prompt, as_priorities
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, RequestOutputKind, as_beams
from pagedec.v1 import model_service_pb2, session_service_pb2

T = TypeVar("T")


class AsyncRoute:
    """A channel to a server, for the coroutines of one event loop."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self._credentials = way.credentials()
        self._channel: grpc.aio.Channel | None = None  # made in the event loop that uses it
        self._stubs: list[Any] = []

    async def ask(self, ask: Inquiry[T], timeout: float | None = None) -> T:
        """The answer of a unary call; see `Route.ask`."""
        deadline = self.way.deadline(timeout)
        for left in range(self.way.retries if ask.is_safe else 0, -1, -1):
            call = self._find(ask.rpc)(ask.message, timeout=remaining(deadline), metadata=self.way.metadata)
            try:
                return ask.read(await call)
            except grpc.aio.AioRpcError as error:
                pause = pause_before(error, left, deadline)
                if pause is None:
                    raise ask.failure(error) from None
                await asyncio.sleep(pause)
        raise AssertionError

    async def read(self, ask: Inquiry[T], timeout: float | None = None) -> AsyncGenerator[T, None]:
        """The answers of a call, one by one. Leaving them ends the call."""
        deadline = self.way.deadline(timeout)
        call = self._find(ask.rpc)(ask.message, timeout=remaining(deadline), metadata=self.way.metadata)
        try:
            async for answer in call:
                yield ask.read(answer)
        except grpc.aio.AioRpcError as error:
            raise ask.failure(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Give up the channel; what runs is cancelled."""
        if self._channel is not None:
            await self._channel.close()

    def _find(self, rpc: str) -> Any:
        if self._channel is None:
            way = self.way
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(way.target, way.all_options)
            else:
                self._channel = grpc.aio.secure_channel(way.target, self._credentials, way.all_options)
            self._stubs = [service(self._channel) for service in SERVICES]
        return find(self._stubs, rpc)


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
    ) -> None:
        self._way = Way(target, token, tls, tls_ca, tls_cert, tls_key, timeout, retries, tuple(options))
        self._line, self._model = AsyncRoute(self._way), model

    def __repr__(self) -> str:
        return f"<AsyncClient of {self._way.target}>"

    # ---- text from prompts
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to one prompt as they grow; see `AsyncLLM.generate`. Leaving the iterator ends the request."""
        question = Question.of("prompt", prompt, sampling_params, cache_salt)
        async with contextlib.aclosing(self._outputs(question, request_id, priority, timeout)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Any = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation as it grows; see `AsyncLLM.chat`. The template is the server's."""
        options = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        question = Question.of_chat(messages, sampling_params, options)
        async with contextlib.aclosing(self._outputs(question, request_id, priority, timeout)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self, prompt: Prompt, request_id: str | None, params: BeamSearchParams, timeout: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """All answers to one prompt, once; see `AsyncLLM.beam_search`."""
        final = as_beams(params).clone(output_kind=RequestOutputKind.FINAL_ONLY)
        async with contextlib.aclosing(self.generate(prompt, final, request_id, timeout=timeout)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(
        self, question: Question, request_id: str | None, priority: int, timeout: float | None
    ) -> AsyncGenerator[RequestOutput, None]:
        [order] = as_priorities([priority], 1)
        ask = question.growing(self._model, order, request_id or "")
        async with contextlib.aclosing(self._line.read(ask, timeout)) as outputs:
            async for output in outputs:
                if output is not None:
                    yield output

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Arriving:
        """Branches in your own hands, on the server: `session = await client.session(prompt)`, or `async with
        client.session(prompt) as session`; see `Client.session`."""
        template = {"tools": tools, "template_kwargs": chat_template_kwargs}
        ask = opening(prompt, messages, seed, priority, cache_salt, ttl, self._model, template)
        return Arriving(self._line, ask)

    # ---- what goes with a model
    async def models(self) -> list[model_service_pb2.Model]:
        """What is served, as messages of the contract."""
        return await self._line.ask(questions.models())

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
        """Give up the connection; what runs is cancelled."""
        await self._line.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Arriving:
    """A session that is about to be opened: to be awaited, or entered with `async with`."""

    def __init__(self, line: AsyncRoute, ask: Inquiry[session_service_pb2.OpenSessionResponse]) -> None:
        self._line, self._ask = line, ask
        self._session: AsyncRemoteSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncRemoteSession]:
        return self._open().__await__()

    async def _open(self) -> AsyncRemoteSession:
        opened = await self._line.ask(self._ask)
        return AsyncRemoteSession(Held(self._line, opened.session_id), opened.branch)

    async def __aenter__(self) -> AsyncRemoteSession:
        self._session = await self._open()
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
