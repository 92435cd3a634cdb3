"""`AsyncLLM` runs prompts and conversations for coroutines; a thread of its own steps the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from pagedec.core.resuming import Resume
from pagedec.errors import InvalidArgument
from pagedec.inputs import CallArgs, Prompt, as_lora, as_priorities, check_call
from pagedec.llm.async_session import Opening
from pagedec.llm.front import Front
from pagedec.llm.prompts import Prepared
from pagedec.llm.readers import Mailbox, Reader
from pagedec.llm.signature import listed
from pagedec.llm.slow import is_heavy, is_long
from pagedec.llm.streams import Stream
from pagedec.lora.request import LoRARequest
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, RequestOutputKind, as_beams
from pagedec.text.chat_template import Message, Tool


@listed
class AsyncLLM(Front):
    """A model and everything it needs to write text for coroutines.

    Any number of coroutines, of any event loops, stream at the same time from one batch. Leave it with `close`, or as a
    context manager, asynchronous or not.
    """

    def _opened(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
        self._posting = (
            threading.Lock()
        )  # of the mailboxes: event loops come while the engine's thread goes through them
        self.loop.after_step.append(self._deliver)
        self.loop.start()

    def _named(self, number: int) -> str:
        """Nothing that somebody would call his own: a bare number is what many do."""
        return f"request-{number}"

    # ---- text from prompts
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **of_vllm: Unpack[CallArgs],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to one prompt as they grow; what each output holds says `sampling_params.output_kind`, by default
        all of the text so far. The last one is `finished`.

        A reader that is slower than the engine gets what has come meanwhile in one output. Leaving the iterator,
        closing it, or cancelling the task aborts the request before the next step. `request_id`: a name for `abort` and
        for the outputs, of no request that still runs. `of_vllm`: see `LLM.generate`. Raises `InvalidArgument` naming
        field, value and limit, and `RequestError` where the request fails.
        """
        check_call("generate", of_vllm)
        given = prompt, sampling_params, priority, cache_salt, request_id
        async with contextlib.aclosing(self.resumable(*given, lora_request=lora_request)) as outputs:
            async for output in outputs:
                yield output

    async def resumable(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str | None = None,
        *,
        resume: Resume | None = None,
        begun: Callable[[int], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for whoever may be interrupted and has the same request go on later, or elsewhere.

        `begun` is told the seed that names its randomness. `resume` is what was told of the answers until then, by
        requests with this seed: it is not given out again, but where outputs have all of an answer. Raises
        `InvalidArgument`, for a `resume` that is not what the request comes to as well: at once, or where answers have
        to come anew from their beginning (of beams), as soon as it is seen.
        """
        given = prompt, sampling_params, priority, cache_salt, request_id, resume, as_lora(lora_request)
        is_slow = is_long(prompt) or is_heavy(sampling_params) or self.loras.is_new(lora_request)
        if is_slow or self._admitting.locked():  # by a thread which prepares what is slow
            prepared = await asyncio.to_thread(self.prepare_one, *given)
        else:
            prepared = self.prepare_one(*given)
        if begun is not None:
            begun(prepared[0].request.seed)
        async with contextlib.aclosing(self._stream(prepared, resume)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        request_id: str | None,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """All answers to one prompt, once, as vLLM's engine gives them; `generate` with the same `params` shows what
        they have in common as it comes."""
        final = as_beams(params).clone(output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self.generate(prompt, final, request_id, lora_request=lora_request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Any = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        **of_vllm: Unpack[CallArgs],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation as it grows. What the arguments mean: see `generate` and `render_chat`."""
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        check_call("chat", of_vllm)
        orders = as_priorities([priority], 1)
        given = [messages], sampling_params, orders, template, request_id, as_lora(lora_request)
        prepared = await asyncio.to_thread(self.prepare_chat, *given)
        async with contextlib.aclosing(self._stream(prepared)) as outputs:
            async for output in outputs:
                yield output

    def session(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        seed: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttl: float | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Opening:
        """Branches in your own hands: `session = await llm.session(prompt)`, or `async with llm.session(prompt) as
        session`. See `AsyncSession`; what the arguments mean: see `LLM.session`."""
        template = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs}
        opening = self._opening(prompt, messages, seed, priority, cache_salt, ttl, template)
        return Opening(self, *opening, as_lora(lora_request))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their iterators give out what there is, with the reason "abort"; one that is over, or never
        was, is none."""
        for one in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            reader = self._readers.get(one)
            if reader is not None:
                reader.stream.aborted()  # first: one that is just being submitted sees it then, or is in the inbox
                if reader.stream.is_aborted:
                    self.loop.abort(one)
                reader.wake()

    async def reset_prefix_cache(self) -> bool:
        """Forget all KV that no request holds, behind the step that runs; see `LLM.reset_prefix_cache`."""
        return await asyncio.wrap_future(self._resetting())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter's files, in a thread, and keep it; see `LLM.add_lora`."""
        return await asyncio.to_thread(self._added, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; see `LLM.remove_lora`."""
        return self.loras.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """The numbers of all adapters that were added; see `LLM.list_loras`."""
        return self.loras.ids

    async def pin_lora(self, lora_id: int) -> bool:
        """True, or `InvalidArgument` for an adapter that is not there; see `LLM.pin_lora`."""
        return self.loras.require(lora_id)

    async def check_health(self) -> None:
        """Raise what has ended the engine's thread, if anything has; `close` is no failure."""
        if self.loop.broken is not None:
            raise self.loop.broken

    async def _stream(
        self, prepared: list[Prepared], resume: Resume | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        job, request = prepared.pop()
        with self._reading(Stream(job, self.writer, resume)) as reader:
            try:
                self.loop.submit(request, reader.stream)
                del request  # the loop's now
                if reader.stream.is_aborted:  # by another thread, which found nothing in the inbox
                    self.loop.abort(job.request_id)
                while True:
                    for output in await reader.read():
                        yield output
                        if output.finished:
                            return
            finally:
                if not reader.stream.is_over:
                    self.loop.abort(job.request_id)

    @contextlib.contextmanager
    def _reading(self, stream: Stream) -> Iterator[Reader]:
        """A coroutine's reader of a request's stream, which `abort` finds by the request's name until this is left.
        Whoever takes the name next comes behind what has ended the request."""
        name = stream.job.request_id
        reader = Reader(self._mailbox(), stream)
        if self._readers.setdefault(name, reader) is not reader:
            raise InvalidArgument("request_id", name, "must not be the id of a request that still runs")
        try:
            yield reader
        finally:
            self._readers.pop(name, None)

    # ---- news from the engine's thread
    def _mailbox(self) -> Mailbox:
        events = asyncio.get_running_loop()
        with self._posting:
            mailbox = self._mailboxes.get(events)
            if mailbox is None:
                mailbox = self._mailboxes[events] = Mailbox(events)
        return mailbox

    def _deliver(self) -> None:
        with self._posting:
            mailboxes = list(self._mailboxes.values())
        for mailbox in mailboxes:
            for abandoned in mailbox.deliver():
                self.loop.abort(abandoned)

    # ---- the end
    def shutdown(self) -> None:
        """The same as `close`."""
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
