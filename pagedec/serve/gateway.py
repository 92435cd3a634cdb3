"""A request on its way: from what a message asks for to the engine, and back as outputs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from pagedec.constraints import TokenTrie
from pagedec.core.resuming import Resume
from pagedec.errors import EngineClosed, GivenUp, InvalidArgument, ModelFileError
from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.front import renamed
from pagedec.llm.loras import KnownLora
from pagedec.llm.prompts import read_prompt as prompt_of
from pagedec.llm.slow import LONG_PROMPT
from pagedec.outputs import CompletionOutput, RequestOutput
from pagedec.params import RequestParams
from pagedec.serve.access import Client
from pagedec.serve.admission import Admission
from pagedec.serve.calls import RPC, SHOWN_ID
from pagedec.serve.ending import CLOSE_SECONDS, ended_within
from pagedec.serve.lifecycle import FAILED, LOADING, Lifecycle
from pagedec.serve.orders import Limits, Order, check_chat, oversized, read_chat, read_prompt, width_of
from pagedec.serve.preparing import Preparing
from pagedec.serve.queueing import Queued, Queueing
from pagedec.serve.served_models import ServedModels, served_models
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import Refusal
from pagedec.text.chat_template import render_chat
from pagedec.v1 import prompt_pb2

LOG = logging.getLogger("pagedec.serve")
Out = TypeVar("Out", bound=RequestOutput)
TRIE_ENDING = ".trie"
"""Of files that `TokenTrie.save` has written, which are mapped; others are read as `TokenTrie.from_file` does."""


class Watcher(Protocol):
    """Is told what becomes of requests, in the server's event loop."""

    def begun(self, name: str, order: Order, num_prompt_tokens: int) -> None:
        """A request was let in."""

    def told(self, name: str, output: RequestOutput) -> None:
        """An output of it is given out."""

    def over(self, name: str, error: BaseException | None) -> None:
        """Nothing more comes of it. `error`: why, where it did not end by itself."""

    def waiting(self, count: int) -> None:
        """So many requests of streams wait to be let in."""


class _Open(NamedTuple):
    llm: AsyncLLM
    limits: Limits
    admission: Admission
    models: ServedModels


class Gateway:
    """All requests of a server. Belongs to its event loop."""

    def __init__(self, config: ServerConfig, lifecycle: Lifecycle, watchers: tuple[Watcher, ...] = ()) -> None:
        """Raises `InvalidArgument` and `ModelFileError` for a trie that cannot be loaded."""
        self.config, self.lifecycle, self.watchers = config, lifecycle, watchers
        self._tries = load_tries(config.trie)
        self.preparing = Preparing()
        self._open: _Open | None = None
        self.running: dict[str, Client] = {}
        """What runs or waits, by the engine's name for it."""
        self._waiting: dict[str, Queued] = {}
        """Of these, what waits for its turn in a stream's line."""
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, llm: AsyncLLM) -> None:
        """The model is there."""
        own = llm.get_default_sampling_params()
        fields = dataclasses.fields(own)
        defaults = {field.name: value for field in fields if (value := getattr(own, field.name)) != field.default}
        engine = llm.engine.limits
        limits = Limits(self.config, defaults, engine.max_model_len, engine.vocab_size, self._tries)
        admission = Admission(self.config, llm.engine.scheduler.limits.max_num_seqs)
        self._open = _Open(llm, limits, admission, served_models(llm, self.config))

    async def idle(self) -> None:
        """Return when nothing runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """Give up the model. A step that does not end, as on a device that hangs, is left after `CLOSE_SECONDS`."""
        if self._open is not None and not await ended_within(CLOSE_SECONDS, self._open.llm.close):
            LOG.error("a step has not ended within %g s: the engine is left as it is", CLOSE_SECONDS)

    def named(self, names: Iterable[str] | None) -> list[str]:
        """The engine's names of requests that run, of clients' names or its own; None: all of them."""
        if names is None:
            return list(self.running)
        wanted = set(names)
        return [own for own, client in self.running.items() if {own, own.removeprefix(f"{client.name}/")} & wanted]

    @property
    def inside(self) -> list[str]:
        """What was let in, by the engine's names."""
        return [name for name in self.running if name not in self._waiting]

    @property
    def num_waiting(self) -> int:
        """Requests of streams that wait to be let in."""
        return len(self._waiting)

    async def abort(self, names: Iterable[str]) -> None:
        """End requests, by the engine's names. Those that wait for their turn as well: they are let in no more."""
        names = list(names)
        for name in names:
            if name in self._waiting:
                self._waiting[name].abort()
        await self.llm.abort(names)

    # ---- what there is. Raises `Refusal` while the model is loaded
    @property
    def llm(self) -> AsyncLLM:
        """The model."""
        return self._opened().llm

    @property
    def limits(self) -> Limits:
        """What bounds a request."""
        return self._opened().limits

    @property
    def admission(self) -> Admission:
        """Who is let in."""
        return self._opened().admission

    @property
    def models(self) -> ServedModels:
        """What requests may name."""
        return self._opened().models

    @property
    def model(self) -> str:
        """The model's name for clients."""
        return self.models.base

    # ---- what is asked
    def check_model(self, name: str) -> None:
        """Raise `NotFound` for what is not served."""
        self.models.check(name)

    def chosen(self, name: str) -> KnownLora | None:
        """The adapter that a request's model is; None: it is the base model. See `ServedModels.chosen`."""
        return self.models.chosen(name)

    def interval(self, request: Any) -> int:
        """Tokens that make a message of a stream that is asked for."""
        given: int = request.stream_interval
        return given if request.HasField("stream_interval") else self.config.stream_interval

    async def tokens(self, prompt: prompt_pb2.Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text and its token ids. Raises `InvalidArgument` naming the message's field."""
        given = read_prompt(prompt, self.limits)
        if isinstance(given, list):
            return None, given
        if isinstance(given, prompt_pb2.Chat):
            return await self.chat_tokens(given)
        return await self.text_tokens(given)

    async def text_tokens(self, text: str) -> tuple[str, list[int]]:
        """A text and its token ids. Raises `InvalidArgument`."""
        if len(text) > LONG_PROMPT:
            return await self.preparing.in_thread(lambda: self._text_tokens(text))
        return self._text_tokens(text)

    async def chat_tokens(self, chat: prompt_pb2.Chat) -> tuple[str, list[int]]:
        """The text that a conversation becomes, and its tokens. Raises `InvalidArgument`."""
        check_chat(chat, self.limits)
        return await self.preparing.in_thread(lambda: self._chat_tokens(chat))

    # ---- on its way
    async def outputs(
        self,
        prompt: tuple[str | None, list[int]],
        order: Order,
        priority: int = 0,
        salt: str = "",
        name: str = "",
        *,
        queueing: Queueing | None = None,
        resume: Resume | None = None,
        begun: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request of the call that runs; of the kind that the order's parameters say. Closing the
        generator aborts the request before the next step. Raises `PagedecError` of every kind. `queueing`: the line in
        which it waits for its turn; None: one too many is refused. `resume`, `begun`: see `AsyncLLM.resumable`."""
        text, token_ids = prompt
        given = {"prompt": text, "prompt_token_ids": token_ids}
        whose = RPC.get().client.salted(salt)
        queued = None if queueing is None else Queued(queueing)

        def begin(engine_name: str) -> AsyncGenerator[RequestOutput, None]:
            if queued is not None and queued.is_aborted:
                return self._aborted(engine_name, text, token_ids, order.params.num_answers)
            told = given, order.params, priority, whose, engine_name
            return self.llm.resumable(*told, resume=resume, begun=begun, lora_request=order.lora)

        with renamed("prompt.prompt_token_ids", "prompt"):
            async with contextlib.aclosing(self.followed(begin, order, len(token_ids), name, queued)) as outputs:
                async for output in outputs:
                    yield output

    async def followed(
        self,
        begin: Callable[[str], AsyncGenerator[Out, None]],
        order: Order,
        num_prompt_tokens: int,
        name: str = "",
        queued: Queued | None = None,
    ) -> AsyncGenerator[Out, None]:
        """The outputs of a request that `begin` begins under the name that it is given: let in, when its turn in a
        line has come (`queued`) or at once, watched, and with the client's own name."""
        async with contextlib.AsyncExitStack() as held:
            if queued is None:
                engine_name = held.enter_context(self.begun(order, num_prompt_tokens, name))
            else:
                begun = self._begun_in_turn(queued, order, num_prompt_tokens, name)
                engine_name = await held.enter_async_context(begun)
            held.enter_context(order.named())
            await self._compile(order.params)
            async with contextlib.aclosing(begin(engine_name)) as outputs:
                async for output in outputs:
                    for watcher in self.watchers:
                        watcher.told(engine_name, output)
                    yield dataclasses.replace(output, request_id=name) if name else output

    @contextlib.contextmanager
    def begun(self, order: Order, num_prompt_tokens: int, name: str = "") -> Iterator[str]:
        """Let in one request of the call that runs, until this is left. Gives the engine's name for it; `name` is the
        client's. Raises `Refusal`, and `InvalidArgument` for one that is never let in."""
        self.require_serving()
        call = RPC.get()
        with self._known(name) as engine_name:
            most = self._most_tokens(order, num_prompt_tokens)
            with (
                self.admission.seat(call.client, most, call.seconds_left),
                self._watched(engine_name, order, num_prompt_tokens),
            ):
                yield engine_name

    def require_serving(self) -> None:
        """Raise `Refusal` where nothing more is let in."""
        if self.lifecycle.refusal is not None:
            raise self.lifecycle.refusal
        self.require_engine()

    def require_engine(self) -> None:
        """Raise `Refusal` where there is no engine yet, or no more: also before anybody has looked."""
        if self.llm.loop.closed:
            raise self.lifecycle.refusal or FAILED

    def meant(self, error: Exception) -> Exception:
        """An error of a call as whoever asked is to have it: of an engine that has ended behind `require_engine`, that
        one's refusal. Any other is itself."""
        return self.lifecycle.refusal or FAILED if isinstance(error, (EngineClosed, GivenUp)) else error

    # ---- inside
    def _opened(self) -> _Open:
        if self._open is None:
            raise self.lifecycle.refusal or LOADING
        return self._open

    @contextlib.asynccontextmanager
    async def _begun_in_turn(
        self, queued: Queued, order: Order, num_prompt_tokens: int, name: str
    ) -> AsyncIterator[str]:
        """As `begun`, when it is its turn; without a seat where that was aborted."""
        self.require_serving()
        call = RPC.get()
        with self._known(name) as engine_name, contextlib.ExitStack() as held:
            most = self._most_tokens(order, num_prompt_tokens)

            def seat(num_of_stream: int) -> contextlib.AbstractContextManager[None]:
                self.require_serving()
                return self.admission.seat(call.client, most, call.seconds_left, num_of_stream)

            self._waiting[engine_name] = queued
            self._tell_waiting()
            try:
                await queued.queueing.enter(queued, held, self.admission, seat)
            finally:
                del self._waiting[engine_name]
                self._tell_waiting()
            with self._watched(engine_name, order, num_prompt_tokens):
                yield engine_name

    async def _compile(self, params: RequestParams) -> None:
        """Have a request's grammar compiled before its engine asks for it. Raises `InvalidArgument`."""
        engine, asked = self.llm.engine, params.structured_outputs
        if asked is not None and engine.grammars is not None and not engine.grammars.has(asked):
            await self.preparing.compile(lambda: engine.compile_grammar(params, engine.options(params)))

    def _tell_waiting(self) -> None:
        for watcher in self.watchers:
            watcher.waiting(self.num_waiting)

    @contextlib.contextmanager
    def _known(self, name: str) -> Iterator[str]:
        """What the engine calls a request of the call that runs, until this is left: clients may give theirs the same
        names."""
        if len(name) > SHOWN_ID:
            raise InvalidArgument("client_request_id", len(name), f"must have at most {SHOWN_ID} characters")
        call = RPC.get()
        engine_name = f"{call.client.name}/{name}" if name else f"request-{next(self._numbers)}"
        if engine_name in self.running:
            raise Refusal("ALREADY_EXISTS", "REQUEST_EXISTS", "client_request_id is that of a request that still runs")
        call.note(engine_name)
        self.running[engine_name] = call.client
        self._idle.clear()
        try:
            yield engine_name
        finally:
            del self.running[engine_name]
            if not self.running:
                self._idle.set()

    @contextlib.contextmanager
    def _watched(self, engine_name: str, order: Order, num_prompt_tokens: int) -> Iterator[None]:
        for watcher in self.watchers:
            watcher.begun(engine_name, order, num_prompt_tokens)
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            for watcher in self.watchers:
                watcher.over(engine_name, error)

    async def _aborted(
        self, name: str, text: str | None, token_ids: list[int], num_answers: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """What there is of a request that the engine was never told of."""
        answers = [CompletionOutput(i, "", [], finish_reason="abort") for i in range(num_answers)]
        yield RequestOutput(name, text, token_ids, answers, True, block_size=self.llm.kv_cache.block_size)

    def _most_tokens(self, order: Order, num_prompt_tokens: int) -> int:
        """Tokens that a request of the call that runs may come to. Raises `InvalidArgument` where it never may."""
        params, room = order.params, max(0, self.limits.max_model_len - num_prompt_tokens)
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        most = num_prompt_tokens + width_of(params) * longest
        allowed = self.admission.most_tokens(RPC.get().client)
        if allowed.most is not None and most > allowed.most:
            with order.named():
                raise oversized(params, num_prompt_tokens, allowed.most, allowed.name)
        return most

    def _chat_tokens(self, chat: prompt_pb2.Chat) -> tuple[str, list[int]]:
        messages, options = read_chat(chat)
        tokenizer = self.llm.get_tokenizer()
        with renamed("messages", "prompt.chat.messages"):
            text = render_chat(tokenizer, messages, **options)
        tokenizer.check_length(text, self.limits.max_model_len - 1, "prompt.chat")
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _text_tokens(self, text: str) -> tuple[str, list[int]]:
        _, token_ids, _ = prompt_of(text, "prompt.text", self.llm.tokenizer, self.limits.max_model_len - 1)
        return text, token_ids


def load_tries(named: tuple[str, ...]) -> Mapping[str, TokenTrie]:
    """Tries by their names, from texts NAME=FILE. Raises `InvalidArgument` and `ModelFileError`, which say which text
    of the option it is."""
    found: dict[str, Any] = {}
    for text in named:
        name, equals, path = text.partition("=")
        if not name or not equals or not path or name in found:
            raise InvalidArgument("trie", text, "must be NAME=FILE, each name once")
        try:
            found[name] = TokenTrie.open(path) if path.endswith(TRIE_ENDING) else TokenTrie.from_file(path)
        except ModelFileError as error:
            raise ModelFileError(error.path, error.problem, "trie", text) from error
        except InvalidArgument as error:
            raise InvalidArgument("trie", text, str(error)) from error
    return found
