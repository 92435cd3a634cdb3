"""`LLM` owns an engine and runs prompts and conversations through it."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from tqdm import tqdm

from pagedec.config import EngineConfig
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.engine.interrupts import held_interrupts
from pagedec.engine.loader import load_engine
from pagedec.errors import InvalidArgument, NotFound, RequestError
from pagedec.llm.answers import Answers
from pagedec.llm.compatibility import drop_neutral
from pagedec.llm.defaults import sampling_defaults
from pagedec.llm.prompts import Job, Prompt, as_conversations, as_list, as_priorities, read_prompt, read_salt
from pagedec.llm.streaming import Streams
from pagedec.outputs import RequestOutput
from pagedec.params import SamplingParams
from pagedec.text.chat import Conversation
from pagedec.text.chat_template import Message, Tool, render_chat
from pagedec.text.tokenizer import Tokenizer


class LLM:
    """A model and everything it needs to write text. Arguments are those of `EngineConfig.from_kwargs`.

    `model` is a local directory, a .gguf file, a hub id, or "smollm2", the embedded default. Raises `PagedecError`s for invalid
    arguments and for missing, damaged or unfitting files. Use it from one thread; leave it with `close`, as a context
    manager, or by dropping it: all of these give its memory back.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        if model is not None:
            engine_args["model"] = model
        self.config = EngineConfig.from_kwargs(**drop_neutral(engine_args))
        self._defaults = sampling_defaults(self.config.model)
        self.engine: Engine
        self.engine, self.tokenizer = load_engine(self.config)
        self.answers = Answers(self.tokenizer, self.engine.limits.eos_token_ids)
        self._streams = Streams(self.engine, self.answers)
        self._num_requests = 0
        self._closed = False

    # ---- text from prompts
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in the prompts' order.

        A prompt is text, a list of token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt".
        `sampling_params` is one object for all prompts or one for each, of any registered decoder's parameter type; without
        it, those of `get_default_sampling_params`. `priority`: one number for each prompt, lower runs earlier. Everything is
        checked before anything starts: raises `InvalidArgument` naming field, value and limit.
        """
        many = as_list(prompts)
        priorities = as_priorities(priority, len(many))
        return self._run(self.prepare(many, sampling_params), priorities, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them. What the arguments mean: see `render_chat`.

        The prompt is encoded without further special tokens: the template writes those that its model wants.
        """
        tokenizer = self.get_tokenizer()
        conversations, several = as_conversations(messages)
        prompts = []
        for i, conversation in enumerate(conversations):
            with _renamed("messages", f"messages[{i}]" if several else "messages"):
                text = render_chat(
                    tokenizer, conversation, add_generation_prompt=add_generation_prompt, tools=tools,
                    continue_final_message=continue_final_message, chat_template=chat_template,
                    template_kwargs=chat_template_kwargs,
                )  # fmt: skip
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        priorities = as_priorities(priority, len(prompts))
        return self._run(self.prepare(prompts, sampling_params), priorities, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: Any = None, *, priority: int = 0, cache_salt: str = ""
    ) -> Generator[RequestOutput, None, None]:
        """The answers to one prompt as they grow: each output has all of the text so far, the last one is `finished`.

        Text never ends within a character or with what may be the beginning of a stop string; log-probabilities come with an
        answer's end. Methods that reorder their branches, such as beams, give nothing before the end. Closing the iterator aborts the
        request. Several streams may be open at once, and `generate` may run between; all are carried on by whichever is asked.
        Invalid arguments are raised here, not by the iterator.
        """
        [job] = self.prepare([prompt], sampling_params)
        [order] = as_priorities([priority], 1)
        return self._streams.run(job, order, read_salt("cache_salt", cache_salt) or job.cache_salt)

    # ---- what goes with it
    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where nothing is said: the model's generation_config.json over our defaults."""
        return SamplingParams.from_dict(self._defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `InvalidArgument` with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise InvalidArgument("skip_tokenizer_init", True, "must be false: this needs the tokenizer")
        return self.tokenizer

    def conversation(self, messages: Sequence[Message] = (), **options: Any) -> Conversation:
        """A chat whose prompts grow by appending, so that the prefix cache holds all that was said. See `Conversation`."""
        return Conversation(self.get_tokenizer(), messages, **options)

    def prepare(self, prompts: Sequence[Prompt], sampling_params: Any = None) -> list[Job]:
        """Check prompts and parameters; changes nothing but the count of requests. Raises `InvalidArgument`."""
        if self._closed:
            raise InvalidArgument("LLM", "closed", "must be open: its device and its memory were given up")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidArgument(
                "sampling_params", len(each), f"must be one, or one for each of {len(prompts)} prompts"
            )
        jobs = []
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            field = f"prompts[{i}]"
            with _named(field, f"sampling_params[{i}]", own):
                text, token_ids, salt = read_prompt(prompt, field, self.tokenizer)
                keep = getattr(own, "truncate_prompt_tokens", None)
                token_ids = token_ids[-keep:] if isinstance(keep, int) else token_ids
                self.engine.check(token_ids, own)
            kept = copy.copy(own) if isinstance(own, SamplingParams) else own  # whose fields can be set
            jobs.append(Job(str(self._num_requests + i), text, token_ids, kept, salt))
        self._num_requests += len(jobs)
        return jobs

    def _run(self, jobs: list[Job], priorities: list[int], use_tqdm: bool) -> list[RequestOutput]:
        by_id = {job.request_id: job for job in jobs}
        outputs: dict[str, Future[RequestOutput]] = {}
        bar = tqdm(total=len(jobs), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        # a thread of this call alone: one kept from call to call would not be there in a forked child
        texts = ThreadPoolExecutor(1, thread_name_prefix="pagedec-text")
        with held_interrupts() as raise_if_interrupted, texts:
            try:
                for job, priority in zip(jobs, priorities, strict=True):
                    self.engine.add(job.request_id, job.token_ids, job.params, priority, job.cache_salt)
                num_tokens, began = 0, time.perf_counter()
                while len(outputs) < len(jobs):
                    raise_if_interrupted()
                    for finished in self._step(by_id):
                        job = by_id[finished.request_id]
                        outputs[job.request_id] = texts.submit(self.answers.request, job, finished)
                        num_tokens += finished.metrics.num_output_tokens
                        bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):.1f} tokens/s", refresh=False)
                        bar.update()
                    if self.engine.idle and len(outputs) < len(jobs):
                        waiting = next(job.request_id for job in jobs if job.request_id not in outputs)
                        raise RequestError(waiting, "its decoder waits for a client; only a session can go on with it")
            finally:
                bar.close()
                for job in jobs:  # after an error or an interrupt nothing may stay behind
                    if job.request_id not in outputs:
                        with contextlib.suppress(NotFound):  # a failed step has aborted its own requests
                            self.engine.abort(job.request_id)
        return [outputs[job.request_id].result() for job in jobs]

    def _step(self, by_id: Mapping[str, Job]) -> list[FinishedRequest]:
        """One step; what it ends of open streams is theirs."""
        finished = self._streams.step()
        return [request for request in finished if request.request_id in by_id]

    # ---- the end
    def close(self) -> None:
        """Give up the device, the memory and the threads. May be called again."""
        self._closed = True
        self._streams.close()
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _named(prompt: str, sampling_params: str, params: object) -> Iterator[None]:
    """Errors about one of several prompts, or about its parameters, say which one it was."""
    try:
        with _renamed("prompt", prompt):
            yield
    except NotFound as error:
        limit = f"must be parameters of a decoder that is registered; {error.known}"
        raise InvalidArgument(sampling_params, params, limit) from None


@contextlib.contextmanager
def _renamed(field: str, name: str) -> Iterator[None]:
    """Errors about `field`, or about a part of it as in `field[2].role`, are about `name`."""
    try:
        yield
    except InvalidArgument as error:
        rest = error.field.removeprefix(field)
        if field == name or rest == error.field or (rest and rest[0] not in "[."):
            raise
        raise type(error)(name + rest, error.value, error.limit) from None
