"""`LLM` runs prompts and conversations through an engine, in the threads that call it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Unpack

from pagedec.errors import CallInterrupted, DeviceLost, InvalidArgument, RequestsFailed
from pagedec.fields import Integer
from pagedec.inputs import Array, CallArgs, Prompt, as_list, as_lora, check_call, with_token_ids
from pagedec.llm.beams import beam_output
from pagedec.llm.collecting import Collection
from pagedec.llm.front import Front, renamed
from pagedec.llm.prompts import Prepared
from pagedec.llm.session import Session
from pagedec.llm.signature import listed
from pagedec.llm.streams import Stream
from pagedec.lora.request import LoRARequest
from pagedec.outputs import BeamSearchOutput, RequestOutput
from pagedec.params import BeamSearchParams, as_beams
from pagedec.text.chat_template import Message, Tool

ON_ERROR = ("raise", "return")


@listed
class LLM(Front):
    """A model and everything it needs to write text.

    Raises `PagedecError`s for invalid arguments and for missing, damaged or unfitting files. Any thread may use it, and
    what several bring is one batch; nothing runs while nobody waits for it. Leave it with `close`, as a context
    manager, or by dropping it: all of these give its memory back.
    """

    # ---- text from prompts
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Array | Sequence[Sequence[int] | Array] | None = None,
        on_error: str = "raise",
        **of_vllm: Unpack[CallArgs],
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in the prompts' order.

        A prompt is text, token ids in a list or an array, or a mapping with "prompt" or "prompt_token_ids" and perhaps
        "cache_salt"; an array of two dimensions is several. `prompt_token_ids` gives token ids apart, as vLLM's older
        calls do. `sampling_params` is one object for all prompts or one for each, of any registered decoder's parameter
        type; without it, those of `get_default_sampling_params`. `priority`: one number for each prompt, lower runs
        earlier. `lora_request` is the adapter of all prompts, or one or None for each: as `add_lora` adds it, unless it
        is there already. `use_tqdm` shows a bar; a callable such as `functools.partial(tqdm, leave=False)` makes it.
        `of_vllm`: further arguments of vLLM's, which may ask for nothing. Everything is checked before anything starts:
        raises `InvalidArgument` naming field, value and limit.

        A request that fails while it runs costs no other its answer. When all are done, `on_error="raise"` raises
        `RequestsFailed`, which carries all outputs; `on_error="return"` returns them, and the failed ones have an
        `error`. Ctrl-C raises `CallInterrupted`, a `KeyboardInterrupt` with the outputs that are finished; so has
        `DeviceLost`, behind which nothing can run in this process.
        """
        check_call("generate", of_vllm)
        return_errors = _checked(use_tqdm, on_error)
        many = with_token_ids(prompts, prompt_token_ids)
        with renamed("prompts", "prompts" if prompt_token_ids is None or prompts is not None else "prompt_token_ids"):
            prepared = self.prepare(many, sampling_params, priority, lora=lora_request)
        return self._run(prepared, use_tqdm, return_errors)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        on_error: str = "raise",
        **of_vllm: Unpack[CallArgs],
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them. What the arguments mean: see `render_chat` and `generate`.

        The prompt is encoded without further special tokens: the template writes those that its model wants.
        """
        check_call("chat", of_vllm)
        return_errors = _checked(use_tqdm, on_error)
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        prepared = self.prepare_chat(messages, sampling_params, priority, template, lora=lora_request)
        return self._run(prepared, use_tqdm, return_errors)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable answers to one prompt or many, in the prompts' order and in vLLM's form: `generate` with
        the same `params` returns the same answers as `RequestOutput`s, and takes them mixed with others.

        `concurrency_limit`: most prompts at a time; it changes no answer. Raises `InvalidArgument` before anything
        starts, and `RequestsFailed` where a request fails.
        """
        return_errors = _checked(use_tqdm, "return")
        limit = Integer("most prompts at a time", low=1, optional=True).check("concurrency_limit", concurrency_limit)
        beams = as_beams(params)
        with renamed("sampling_params", "params"):
            prepared = self.prepare(as_list(prompts), beams, lora=lora_request)
        outputs: list[RequestOutput] = []
        while prepared:
            some = prepared[:limit]
            del prepared[:limit]
            outputs += self._run(some, use_tqdm, return_errors)
        if errors := [output.error for output in outputs if output.error is not None]:
            raise RequestsFailed(errors, outputs) from errors[0]
        return [beam_output(output, beams, self.tokenizer) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generator[RequestOutput, None, None]:
        """The answers to one prompt as they grow; what each output holds says `sampling_params.output_kind`, by default
        all of the text so far. The last one is `finished`.

        Text never ends within a character or with what may be the beginning of a stop string. Of beams all answers grow
        by what no step can change any more, which they have in common, and the rest comes at the end, of fewer answers
        where rules leave fewer. Closing the iterator aborts the request. Several streams may be open at once, in any
        threads, and `generate` may run between; all are carried on by whichever is asked. Invalid arguments are raised
        here, not by the iterator; `RequestError` where the request fails.
        """
        return self._stream(self.prepare_one(prompt, sampling_params, priority, cache_salt, lora=lora_request))

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
    ) -> Session:
        """Branches in your own hands, of which the first begins with `prompt`, or with a chat's `messages`, the last of
        which is the user's: generate, append, fork, roll back, score; see `Session`.

        `seed` names the randomness of all branches; without one it is drawn from the engine's own. `priority`: of its
        requests, and where blocks run out the highest number gives way first. `ttl`: seconds after which the session is
        closed if nobody uses it, by default the engine's `session_ttl`. `lora_request`: the adapter of all branches.
        `chat_template`, `tools` and
        `chat_template_kwargs` are of `messages`: see `render_chat`. Raises `InvalidArgument`, and `SessionLimit` where
        sessions hold all that they may.
        """
        template = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs}
        opening, turns, _ = self._opening(prompt, messages, seed, priority, cache_salt, ttl, template)
        with self.loras.adding([as_lora(lora_request)]) as [adapter]:
            return self.loop.at_once(lambda engine: Session(self, opening(engine, adapter), turns))

    # ---- what goes with a model
    def reset_prefix_cache(self) -> bool:
        """Forget all KV that no request holds: no later prompt finds what was computed before. What runs goes on with
        its own, which nobody else finds any more. True: the pool is empty; False: requests that run hold blocks of
        it."""
        done = self._resetting()
        self.loop.drive(done.done)
        return done.result()

    # ---- adapters
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter's files, and keep it until `remove_lora`: requests need not bring it, and those that do need
        not wait for its files. True, as of one that is there already, whose files are looked at again. Raises
        `InvalidArgument` without `enable_lora`, for a name or a number of another one, for files that are not what they
        were, and for a rank above `max_lora_rank`; `ModelFileError` for files that do not fit the model."""
        return self._added(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that run, and sessions, go on with it. One that is named again later is read
        anew. False: there is none of this number. Raises `InvalidArgument` for what is no number."""
        return self.loras.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers (`lora_int_id`) of all adapters that were added, by `add_lora` or by requests."""
        return self.loras.ids

    def pin_lora(self, lora_id: int) -> bool:
        """True: an adapter stays until it is removed, so there is nothing to pin. Raises `InvalidArgument` for one
        that is not there."""
        return self.loras.require(lora_id)

    # ---- inside
    def _stream(self, prepared: list[Prepared]) -> Generator[RequestOutput, None, None]:
        job, request = prepared.pop()
        stream = Stream(job, self.writer)
        self.loop.submit(request, stream)
        del request  # the loop's now
        try:
            while True:
                self.loop.drive(lambda: stream.has_news)
                for output in stream.read():
                    yield output
                    if output.finished:
                        return
        finally:
            if not stream.is_over:
                self.loop.abort(job.request_id)

    def _run(
        self, prepared: list[Prepared], use_tqdm: bool | Callable[..., Any], return_errors: bool
    ) -> list[RequestOutput]:
        jobs = [job for job, _ in prepared]
        # a thread of this call alone: one kept from call to call would not be there in a forked child
        with ThreadPoolExecutor(1, thread_name_prefix="pagedec-text") as texts:
            collection = Collection(jobs, self.writer, texts, use_tqdm)
            try:
                prepared.reverse()
                while prepared:
                    job, request = prepared.pop()
                    self.loop.submit(request, collection.sink(job))
                    del request  # the loop's now
                self.loop.drive(lambda: collection.done)
            except KeyboardInterrupt as interrupt:
                raise CallInterrupted(collection.finished()) from interrupt
            except DeviceLost as lost:
                lost.outputs = collection.finished()
                raise
            finally:
                if not collection.done:  # after an error or an interrupt nothing may stay behind
                    for job in jobs:
                        self.loop.abort(job.request_id)
                collection.close()
            return collection.results(return_errors)

    # ---- the end
    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(use_tqdm: object, on_error: object) -> bool:
    """Whether errors are to be returned; raises `InvalidArgument` for what a call for many prompts may not be told."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise InvalidArgument("use_tqdm", use_tqdm, "must be true, false, or what makes a bar as tqdm does")
    if not isinstance(on_error, str) or on_error not in ON_ERROR:
        raise InvalidArgument("on_error", on_error, f"must be one of {', '.join(ON_ERROR)}")
    return on_error == "return"
