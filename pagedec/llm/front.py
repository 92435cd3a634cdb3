"""What `LLM` and `AsyncLLM` have in common: a loaded model, and the way in for prompts."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from pagedec.blame import of_params
from pagedec.build import load_engine
from pagedec.config import EngineConfig
from pagedec.core.adapter_places import Adapter
from pagedec.core.resuming import Resume
from pagedec.engine.engine import Engine
from pagedec.engine.loop import EngineLoop
from pagedec.engine.open_branches import OpenBranch
from pagedec.errors import AbsentFeature, InvalidArgument, NotFound
from pagedec.fields import Number
from pagedec.formats.gguf.header import headers_kept
from pagedec.formats.named import files_of
from pagedec.inputs import Prompt, as_conversations, as_lora, as_loras, as_params, as_priorities, as_priority, read_salt
from pagedec.llm.branches import Turns, check_turn
from pagedec.llm.compatibility import translated
from pagedec.llm.defaults import sampling_defaults
from pagedec.llm.fetching import fetched, named_files
from pagedec.llm.loras import Loras
from pagedec.llm.of_vllm import ABSENT
from pagedec.llm.prompts import Job, Prepared, read_prompt
from pagedec.llm.room import within_pool
from pagedec.llm.signature import EngineArgs, signed
from pagedec.llm.writer import Writer
from pagedec.lora.request import LoRARequest
from pagedec.params import RequestParams, SamplingParams
from pagedec.runtime.pool import KvPool
from pagedec.speculation import speculation_name
from pagedec.text.chat_template import Message, check_messages, render_chat
from pagedec.text.conversation import Conversation
from pagedec.text.tokenizer import Tokenizer


class AbsentOfClass:
    """One of vLLM's class methods that there is not. A metaclass would hide it from `dir`, and keep `LLM` from being
    combined with classes that have one: protocols, pydantic's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AbsentFeature(self._name, ABSENT[self._name])


class Front:
    """A model with its engine, tokenizer and defaults. Everything here may be called from any thread."""

    if not TYPE_CHECKING:  # or these would be names to a checker
        from_engine_args, from_vllm_config = AbsentOfClass(), AbsentOfClass()

    @signed
    def __init__(self, model: str | Path | None = None, **engine_args: Unpack[EngineArgs]) -> None:
        given: dict[str, Any] = dict(engine_args)
        if model is not None:
            given["model"] = model
        self.config = EngineConfig.from_kwargs(**translated(given))
        self.engine: Engine
        with files_of(*named_files(self.config)), headers_kept():
            local = fetched(self.config)
            self._defaults = sampling_defaults(local.model)
            self.engine, self.tokenizer = load_engine(local)
        self.writer = Writer(self.tokenizer, self.engine.limits.eos_token_ids, self.engine.scheduler.limits.block_size)
        self.loop, self.loras = EngineLoop(self.engine), Loras(self.engine.adapters)
        self._num_requests = 0
        self._admitting = threading.Lock()
        self.call_numbers = itertools.count()
        """Numbers of sessions' calls."""
        self._opened()

    def _opened(self) -> None:
        """What a kind of front does when its model is loaded. Not a constructor of its own: warnings name who called
        this one."""

    def __repr__(self) -> str:
        name = f"{type(self).__name__} {self.config.model.model}"
        if self.loop.closed:
            return f"<{name}: closed>"
        numbers, context = self.engine.executor.geometry, self.engine.limits.max_model_len
        drafts = speculation_name(self.config.scheduler.speculative_config)
        about = f"{numbers}, context {context}, KV pool {self.kv_cache}"
        return f"<{name}: {about}{f', speculation {drafts}' if drafts else ''}>"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"an {kind} cannot be copied or pickled: it holds a device; make one in each process")

    if not TYPE_CHECKING:  # as above

        def __getattr__(self, name: str) -> NoReturn:
            """Say of vLLM's methods that there are none, and what there is instead."""
            if name in ABSENT:
                raise AbsentFeature(name, ABSENT[name])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    # ---- what goes with a model
    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where nothing is said: the model's generation_config.json over our defaults."""
        return SamplingParams.from_dict(self._defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, at once: it is not awaited. Raises `InvalidArgument` with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise InvalidArgument("skip_tokenizer_init", True, "must be false: this needs the tokenizer")
        return self.tokenizer

    @property
    def kv_cache(self) -> KvPool:
        """How large the KV pool is, and why: `num_blocks`, `block_size`, `num_tokens`, `num_bytes`, `reason`."""
        return self.engine.executor.geometry.kv_cache

    def _resetting(self) -> Future[bool]:
        """Have the prefix cache emptied between two steps."""
        return self.loop.call(lambda engine: engine.reset_prefix_cache())

    def conversation(self, messages: Sequence[Message] = (), **options: Any) -> Conversation:
        """A chat whose prompts grow by appending, so that the prefix cache holds all that was said. See
        `Conversation`."""
        longest = self.engine.limits.max_model_len - 1
        return Conversation(self.get_tokenizer(), messages, **{"max_tokens": longest, **options})

    # ---- the way in
    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Any = None,
        priorities: Sequence[int] | None = None,
        cache_salt: str = "",
        request_id: str | None = None,
        *,
        special_tokens: bool = True,
        resume: Resume | None = None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Prepared]:
        """Check prompts and parameters, and make the requests that the loop takes. Raises `InvalidArgument`; nothing
        has changed then.

        `sampling_params` is one object for all prompts or one for each; `priorities` one number for each; `cache_salt`
        of prompts that bring none; `request_id` is a name for the only one. A text far longer than the context is
        refused before it is tokenised; with `special_tokens`, texts are given those that the model wants around them.
        `resume`: what was told of the only one's answers, behind which they go on. `lora`: the adapter of all, or one
        or None for each; the files of one that is new are read here, and it stays where nothing is refused.
        """
        self.loop.require_open()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each, names = as_params(params, len(prompts), "prompt")
        each = [copy.copy(own) if isinstance(own, RequestParams) else own for own in each]  # whose fields can be set
        orders, loras = as_priorities(priorities, len(prompts)), as_loras(lora, len(prompts))
        name = None if request_id is None else read_salt("request_id", request_id)
        read = [
            self._read(f"prompts[{i}]", prompt, own, special_tokens)
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]  # before anybody has to wait: a long text takes long
        for called, own in zip(names, each, strict=True):
            if isinstance(own, RequestParams) and own.structured_outputs is not None:
                with _among(called, own):
                    self.prepare_grammar(own)  # while others may be admitted
        with self.loras.adding(loras) as adapters, self._numbered(len(prompts)) as first:
            return [
                self._admitted(
                    i, Job(name or self._named(first + i), text, token_ids, own, one), order, salt or cache_salt,
                    resume, called, adapter,
                )
                for i, ((text, token_ids, salt), own, order, called, one, adapter) in enumerate(
                    zip(read, each, orders, names, loras, adapters, strict=True)
                )
            ]  # fmt: skip

    def prepare_one(
        self, prompt: Prompt, sampling_params: Any, priority: int, cache_salt: str, request_id: str | None = None,
        resume: Resume | None = None, lora: LoRARequest | None = None,
    ) -> list[Prepared]:  # fmt: skip
        """The same for a call's only prompt: errors are about its `prompt` and its `sampling_params`."""
        orders, salt = [as_priority(priority)], read_salt("cache_salt", cache_salt)
        with renamed("prompts[0]", "prompt"), renamed("sampling_params[0]", "sampling_params"):
            return self.prepare([prompt], sampling_params, orders, salt, request_id, resume=resume, lora=as_lora(lora))

    def _named(self, number: int) -> str:
        """The id of a request that was given none."""
        return str(number)

    def prepare_chat(
        self,
        messages: Any,
        sampling_params: Any,
        priorities: Sequence[int] | None,
        template: Mapping[str, Any],
        request_id: str | None = None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Prepared]:
        """The same for one conversation or a list of them; `template` holds `render_chat`'s options."""
        tokenizer = self.get_tokenizer()
        conversations, several = as_conversations(messages)
        prompts: list[Prompt] = []
        for i, conversation in enumerate(conversations):
            with renamed("messages", f"messages[{i}]" if several else "messages"):
                text = render_chat(tokenizer, conversation, **template)
            prompts.append({"prompt": text})
        with renamed("prompts" if several else "prompts[0]", "messages"):
            return self.prepare(
                prompts, sampling_params, priorities, request_id=request_id, special_tokens=False, lora=lora
            )

    @contextlib.contextmanager
    def _numbered(self, count: int) -> Iterator[int]:
        """The first of `count` numbers for requests, while nobody else has any admitted. After an error all is as
        before: a call that was refused does not change what later ones draw."""
        with self._admitting:
            first, num_unseeded = self._num_requests, self.engine.num_unseeded
            try:
                yield first
                self._num_requests += count
            except BaseException:
                self.engine.num_unseeded = num_unseeded
                raise

    def _read(self, field: str, prompt: Prompt, params: Any, special_tokens: bool) -> tuple[str | None, list[int], str]:
        """A prompt's text, token ids and cache salt."""
        keep = params.truncate_prompt_tokens if isinstance(params, RequestParams) else None
        longest = self.engine.limits.max_model_len - 1 if keep is None else None
        with renamed("prompt", field):
            text, token_ids, salt = read_prompt(prompt, field, self.tokenizer, longest, special_tokens)
        return text, token_ids if keep is None else token_ids[-keep:], salt

    def _admitted(
        self, i: int, job: Job, priority: int, salt: str, resume: Resume | None, called: str, adapter: Adapter | None
    ) -> Prepared:
        """`called`: what the parameters are, of a list; "" of what all prompts share."""
        params, token_ids = job.params, job.token_ids
        room = within_pool(self.engine.scheduler.limits, params, len(token_ids))
        blamed = _blamed(f"prompts[{i}]", called or "sampling_params", params)
        with _among(called, params), blamed, room:
            request = self.engine.admit(
                job.request_id, token_ids, params, priority, salt, resume=resume, adapter=adapter
            )
            self.writer.check_told(resume, params)
        return Prepared(job, request)

    # ---- sessions
    def prepare_grammar(self, params: RequestParams) -> None:
        """Have a grammar compiled, so that whoever admits the request will find it: it may take seconds."""
        self.engine.compile_grammar(params, self.engine.options(params))

    def _opening(
        self, prompt: Prompt | None, messages: Sequence[Message] | None, seed: int | None, priority: int, salt: str,
        ttl: float | None, template: Mapping[str, Any],
    ) -> tuple[Callable[[Engine, Adapter | None], OpenBranch], Turns, int]:  # fmt: skip
        """What opens a session with an adapter, for the loop, and how many tokens it begins with."""
        self.loop.require_open()
        if (prompt is None) == (messages is None):
            raise InvalidArgument("prompt", prompt, "must be given, or messages, and not both")
        order = as_priority(priority)
        seconds = Number("seconds", above=0, optional=True).check("ttl", ttl)
        turns: Turns = ()
        if messages is not None:
            *earlier, last = check_messages(messages)
            check_turn(f"messages[{len(earlier)}]", last)
            conversation = self.conversation(earlier, **template)
            token_ids = conversation.ask(last)
            turns, own = ((len(token_ids), conversation),), ""
        else:
            longest = self.engine.limits.max_model_len - 1
            _, token_ids, own = read_prompt(prompt, "prompt", self.tokenizer, longest)
        own = own or read_salt("cache_salt", salt)
        given = SamplingParams(seed=seed).seed
        with self._admitting:
            name = self.engine.draw_seed() if given is None else given

        def opening(engine: Engine, adapter: Adapter | None) -> OpenBranch:
            return engine.sessions.open(engine, token_ids, name, own, order, seconds, adapter)

        return opening, turns, len(token_ids)

    def _added(self, lora_request: LoRARequest) -> bool:
        self.loop.require_open()
        if not isinstance(lora_request, LoRARequest):
            raise InvalidArgument("lora_request", lora_request, "must be a LoRARequest")
        self.loras.add(lora_request)
        return True

    # ---- the end
    def close(self) -> None:
        """Give up the device, the memory and the threads. What runs fails. May be called again."""
        self.loop.close()


def _among(called: str, params: object) -> contextlib.AbstractContextManager[None]:
    return of_params(called, params) if called else contextlib.nullcontext()


@contextlib.contextmanager
def _blamed(prompt: str, sampling_params: str, params: object) -> Iterator[None]:
    """Errors about one of several prompts, or about its parameters, say which one it was."""
    try:
        with renamed("prompt", prompt):
            yield
    except NotFound as error:
        made = "SamplingParams(**...) makes one of a mapping" if isinstance(params, Mapping) else error.known
        limit = f"must be a SamplingParams, a BeamSearchParams, or of another decoder that is registered; {made}"
        raise InvalidArgument(sampling_params, params, limit) from None


@contextlib.contextmanager
def renamed(field: str, name: str) -> Iterator[None]:
    """Errors about `field`, or about a part of it as in `field[2].role`, are about `name`."""
    try:
        yield
    except InvalidArgument as error:
        rest = error.field.removeprefix(field)
        if field == name or rest == error.field or (rest and rest[0] not in "[."):
            raise
        raise type(error)(name + rest, error.value, error.limit) from None
