"""`Client`: what `LLM` does, done by a server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from tqdm import tqdm

from pagedec.client import questions
from pagedec.client.asking import ServedLora, as_metadata, as_model, as_models, as_order
from pagedec.client.connection import RESUME_SECONDS, TARGET, Inquiry, Route, Way
from pagedec.client.failures import ServerError
from pagedec.client.handle import Held, opening
from pagedec.client.questions import Question
from pagedec.client.remote_session import RemoteSession
from pagedec.client.token_pieces import TokenPieces
from pagedec.errors import CallInterrupted, InvalidArgument, RequestError, RequestsFailed
from pagedec.fields import Integer
from pagedec.inputs import (
    Array,
    CallArgs,
    Prompt,
    as_conversations,
    as_list,
    as_params,
    as_priorities,
    check_call,
    with_token_ids,
)
from pagedec.outputs import BeamSearchOutput, RequestOutput
from pagedec.params import BeamSearchParams, SamplingParams, as_beams
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2, session_service_pb2

Loras = ServedLora | Sequence[ServedLora | None] | None
ON_ERROR = ("raise", "return")


class Client:
    """A server's model, by the names, arguments and outputs of `LLM`. Any thread may use it. Needs no torch.

    Args:
        target: the server's address, as gRPC has it: "127.0.0.1:50051", "dns:///pagedec.example:443".
        token: who asks, where the server wants to know ("authorization: Bearer TOKEN").
        tls: the server has TLS, with a certificate of an authority that everybody knows.
        tls_ca: the authority's certificates instead, a PEM file. Means `tls`.
        tls_cert: this client's own certificate chain, where the server wants one; `tls_key` is its key.
        timeout: seconds that a call may take, where it says nothing itself; None: any time.
        retries: how often a call that had no effect is tried again where the server is being loaded or drained.
        model: the model, or an adapter, by one of the server's names, where a call names no adapter; "": the base
            model.
        options: further ones of the gRPC channel, as pairs.
        resume: seconds for which a stream whose server is gone tries to go on, there or at another one, behind what had
            come, before it fails; 0: it fails at once.
        metadata: what each call has beside the token, for what is in front of a server: {"application": "small"} names
            one of several applications of Ray Serve.

    Errors are the exceptions that the same mistakes are with `LLM`; what only a server can say is a `ServerError`.
    """

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
        self._line, self._model, self._pieces = Route(self._way), model, TokenPieces()

    def __repr__(self) -> str:
        return f"<Client of {self._way.target}>"

    # ---- text from prompts
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Array | Sequence[Sequence[int] | Array] | None = None,
        on_error: str = "raise",
        timeout: float | None = None,
        **of_vllm: Unpack[CallArgs],
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in the prompts' order; see `LLM.generate`. Several go over one stream, and are
        one batch of the server's. `lora_request`: the adapter of all prompts, or one or None for each."""
        check_call("generate", of_vllm)
        many = with_token_ids(prompts, prompt_token_ids)
        each, _ = as_params(sampling_params, len(many), "prompt")
        models = as_models(lora_request, len(many), self._model)
        asked = [
            Question.of(f"prompts[{i}]", prompt, params, model=model)
            for i, (prompt, params, model) in enumerate(zip(many, each, models, strict=True))
        ]
        return self._run(asked, priority, use_tqdm, on_error, timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        on_error: str = "raise",
        timeout: float | None = None,
        **of_vllm: Unpack[CallArgs],
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them; see `LLM.chat`. The template is the server's."""
        options = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        check_call("chat", of_vllm)
        conversations, several = as_conversations(messages)
        each, _ = as_params(sampling_params, len(conversations), "prompt")
        models = as_models(lora_request, len(conversations), self._model)
        asked = [
            Question.of_chat(one, own, options, f"messages[{i}]" if several else "messages", model)
            for i, (one, own, model) in enumerate(zip(conversations, each, models, strict=True))
        ]
        return self._run(asked, priority, use_tqdm, on_error, timeout)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        timeout: float | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable answers to one prompt or many, in vLLM's form; see `LLM.beam_search`."""
        limit = Integer("most prompts at a time", low=1, optional=True).check("concurrency_limit", concurrency_limit)
        beams = as_beams(params)
        many = as_list(prompts)
        models = as_models(lora_request, len(many), self._model)
        asked = [
            Question.of(f"prompts[{i}]", prompt, beams, model=model)
            for i, (prompt, model) in enumerate(zip(many, models, strict=True))
        ]
        outputs: list[RequestOutput] = []
        for first in range(0, len(asked), limit or max(1, len(asked))):
            outputs += self._run(asked[first : first + (limit or len(asked))], None, use_tqdm, "raise", timeout)
        return [self._as_beams(output, beams) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        *,
        lora_request: ServedLora | None = None,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """The answers to one prompt as they grow; see `LLM.stream`. Closing the iterator ends the request."""
        order, model = as_order(priority), as_model(lora_request, self._model)
        question = Question.of("prompt", prompt, sampling_params, cache_salt, model)
        ask = question.growing(order, request_id)

        def read(told: pb.GenerateStreamResponse) -> RequestOutput | None:
            output = ask.read(told)
            return None if output is None else self._spelled(output, question)

        return self._line.begin(replace(ask, read=read), timeout)

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
    ) -> RemoteSession:
        """Branches in your own hands, on the server; see `LLM.session`. `ttl`: seconds after which the server closes
        the session if it is not used; by default, and at most, what the server allows. What is dropped the client's
        next call of any kind closes, before all else."""
        template = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs}
        model = as_model(lora_request, self._model)
        ask = opening(prompt, messages, seed, priority, cache_salt, ttl, model, template)
        opened = self._line.ask(ask)
        return RemoteSession(Held(self._line, opened.session_id, self._pieces), opened.branch)

    def sessions(self) -> list[session_service_pb2.Session]:
        """This client's sessions that are open, whoever has opened them, as messages of the contract."""
        told = self._line.ask(questions.sessions())
        found = list(told.sessions)
        while told.next_page_token:
            told = self._line.ask(questions.sessions(told.next_page_token))
            found += told.sessions
        return found

    # ---- what goes with a model
    def models(self) -> list[model_service_pb2.Model]:
        """What is served, adapters behind the model that is their `parent`: limits, defaults, and what requests may
        name, as messages of the contract."""
        return self._line.ask(questions.models())

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model recommends, and what a call without parameters has."""
        return self._line.ask(questions.default_params(self._model))

    def tokenize(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The tokens of a text, or of a conversation."""
        return self._line.ask(questions.tokenize(prompt, messages, add_special_tokens, self._model))

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return self._line.ask(questions.detokenize(token_ids, skip_special_tokens, self._model))

    # ---- the end
    def close(self) -> None:
        """Give up the connection. What runs fails with a `ServerError`, branches that were dropped are closed, and
        sessions that are still held live until their leases end."""
        self._line.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside
    def _run(
        self, asked: list[Question], priority: Any, use_tqdm: Any, on_error: str, timeout: float | None
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise InvalidArgument("use_tqdm", use_tqdm, "must be true, false, or what makes a bar as tqdm does")
        if on_error not in ON_ERROR:
            raise InvalidArgument("on_error", on_error, f"must be one of {', '.join(ON_ERROR)}")
        orders = [as_order(order) for order in as_priorities(priority, len(asked))]
        if len(asked) == 1:
            return [self._one(asked[0], orders[0], on_error, timeout)]
        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        hidden = {"disable": True} if use_tqdm is False else {}
        bar = make(total=len(asked), desc="prompts", dynamic_ncols=True, **hidden)
        outputs: dict[int, RequestOutput] = {}
        try:
            for i, output in self._batches(asked, orders, timeout):
                outputs[i] = output
                bar.update()
        except KeyboardInterrupt as interrupt:
            raise CallInterrupted([outputs.get(i) for i in range(len(asked))]) from interrupt
        finally:
            bar.close()
        return _checked([outputs[i] for i in range(len(asked))], on_error)

    def _one(self, question: Question, order: int, on_error: str, timeout: float | None) -> RequestOutput:
        try:
            return self._spelled(self._line.ask(question.at_once(order), timeout), question)
        except RequestError as error:
            if isinstance(error, ServerError) and on_error == "raise":
                raise
            [output] = _checked([question.failed(error.request_id, error)], on_error)
            return output

    def _batches(
        self, asked: list[Question], orders: list[int], timeout: float | None
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Each output with its prompt's place, as they come. What the server could not take, or a connection has lost,
        is asked again. Raises what one of them may not ask."""
        deadline, places = self._way.deadline(timeout), list(range(len(asked)))
        for pauses in itertools.count():
            again: dict[int, RequestOutput] = {}
            pause = 0.0
            for place, output in self._batch(asked, orders, places, deadline):
                own = None if output.error is None else self._way.pause(output.error, pauses, deadline, is_safe=True)
                if own is None:
                    yield place, self._spelled(output, asked[place])
                else:
                    again[place], pause = output, max(pause, own)
            if not again:
                return
            time.sleep(pause)
            places = list(again)

    def _batch(
        self, asked: list[Question], orders: list[int], places: list[int], timeout: float | None
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """The outputs of some of them. Where the stream ends too early, those that have not come have its error."""
        items = [pb.GenerateBatchRequest(item_id=str(i), request=asked[i].request(orders[i])) for i in places]
        ask: Inquiry[pb.GenerateBatchResponse] = Inquiry("GenerateBatch", items, lambda told: told)
        left = dict.fromkeys(places)
        failure: RequestError = ServerError("UNKNOWN", "", "the server has ended the call without an answer")
        try:
            with contextlib.closing(self._line.begin(ask, timeout)) as answers:
                for told in answers:
                    place = int(told.item_id)
                    del left[place]
                    yield place, asked[place].told(told)
        except RequestError as error:
            failure = error
        for place in left:
            yield place, asked[place].failed("", failure)

    def _spelled(self, output: RequestOutput, question: Question) -> RequestOutput:
        return self._pieces.spelled(output, question.params, self._line.ask)

    def _as_beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        prompt = output.prompt
        if prompt is None and params.detokenize and any(answer.text for answer in output.outputs):
            prompt = self.detokenize(output.prompt_token_ids)
        return BeamSearchOutput.of(output, prompt if params.detokenize else None, params.include_stop_str_in_output)


def _checked(outputs: list[RequestOutput], on_error: str) -> list[RequestOutput]:
    errors = [output.error for output in outputs if output.error is not None]
    if errors and on_error == "raise":
        if (
            all(error is errors[0] for error in errors)
            and len(errors) == len(outputs)
            and isinstance(errors[0], ServerError)
        ):
            raise errors[0]  # the call as a whole
        raise RequestsFailed(errors, outputs) from errors[0]
    return outputs
