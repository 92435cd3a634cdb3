"""The Open Inference protocol as Triton's clients speak it to its language models: text in, text out.

Parameters are JSON in `sampling_parameters`, by the names of `SamplingParams`, or of `BeamSearchParams` where it has a
`beam_width`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from pagedec import environment
from pagedec.errors import InvalidArgument, Shown
from pagedec.fields import Flag, Integer, Number, rules
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, RequestOutputKind, RequestParams, SamplingParams
from pagedec.serve.calls import RPC, failure
from pagedec.serve.gateway import Gateway
from pagedec.serve.lifecycle import State
from pagedec.serve.orders import Order, check_bounds
from pagedec.serve.side_by_side import side_by_side
from pagedec.serve.statuses import Refusal
from pagedec.serve.tensors import INPUTS, OUTPUTS, read_inputs, write_output
from pagedec.v1 import open_inference_service_pb2 as pb
from pagedec.v1 import open_inference_service_pb2_grpc

VERSION = "1"
PLATFORM = "pagedec"
FINAL, WANTS_FINAL = "triton_final_response", "triton_enable_empty_final_response"
PARAMETERS = "inputs.sampling_parameters"


class OpenInferenceService(open_inference_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Translates between tensors and the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        """The process lives, and its engine."""
        return pb.ServerLiveResponse(live=self._gateway.lifecycle.state is not State.FAILED)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        """Requests are let in."""
        return pb.ServerReadyResponse(ready=self._gateway.lifecycle.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        """The same, of a model that is served."""
        is_ready = self._gateway.lifecycle.is_ready
        return pb.ModelReadyResponse(ready=is_ready and request.name in self._gateway.models.names)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        """What it is."""
        return pb.ServerMetadataResponse(name=PLATFORM, version=environment.own_version())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        """The tensors of a model."""
        self._check(request.name, request.version)
        made = pb.ModelMetadataResponse(name=request.name or self._gateway.model, versions=[VERSION], platform=PLATFORM)
        for name, kind in INPUTS.items():
            made.inputs.add(name=name, datatype=kind, shape=[1])
        for name, kind in OUTPUTS.items():
            made.outputs.add(name=name, datatype=kind, shape=[-1])
        return made

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        """All answers of one prompt, once."""
        given = self._inputs(request)
        if given.get("stream"):
            raise InvalidArgument("inputs.stream", True, "must be false: answers that grow come by ModelStreamInfer")
        responses = self._answered(request, given)
        async with contextlib.aclosing(responses):
            return [response async for response in responses][-1]

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Many requests over one stream; what goes wrong with one is its `error_message`."""
        async with contextlib.aclosing(side_by_side(request_iterator, self._stream)) as responses:
            async for response in responses:
                yield response

    # ---- inside
    async def _stream(self, request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        try:
            given = self._inputs(request)
            async with contextlib.aclosing(self._answered(request, given)) as responses:
                async for response in responses:
                    yield pb.ModelStreamInferResponse(infer_response=response)
            if request.parameters[WANTS_FINAL].bool_param:
                yield pb.ModelStreamInferResponse(infer_response=self._response(request, True))
        except Exception as error:
            failed = self._response(request, True)
            message = failure(error, RPC.get()).message
            yield pb.ModelStreamInferResponse(error_message=message, infer_response=failed)

    async def _answered(
        self, request: pb.ModelInferRequest, given: Mapping[str, Any]
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        gateway, streams, lora = self._gateway, bool(given.get("stream")), self._gateway.chosen(request.model_name)
        repeats = not given.get("exclude_input_in_output", streams)
        if repeats and streams:
            limit = "must be true where stream is: the prompt cannot stand before each piece"
            raise InvalidArgument("inputs.exclude_input_in_output", False, limit)
        order = Order(self._params(given, streams), {}, lora=lora)
        prompt = await gateway.text_tokens(given["text_input"])
        is_first, before = True, given["text_input"] if repeats else ""
        num_tokens, totals = [0] * order.params.num_answers, [0.0] * order.params.num_answers
        async with contextlib.aclosing(gateway.outputs(prompt, order, name=request.id)) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    num_tokens[answer.index] += len(answer.token_ids)
                    if answer.cumulative_logprob is not None:
                        totals[answer.index] = answer.cumulative_logprob
                if streams and not is_first and not output.finished and not any(a.text for a in output.outputs):
                    continue  # its tokens count with the next text
                response = self._response(request, output.finished and not request.parameters[WANTS_FINAL].bool_param)
                _write(response, output, given, num_tokens, totals, before)
                is_first, num_tokens = False, [0] * len(num_tokens)
                yield response

    def _inputs(self, request: pb.ModelInferRequest) -> dict[str, Any]:
        self._check(request.model_name, request.model_version)
        return read_inputs(request)

    def _params(self, given: Mapping[str, Any], streams: bool) -> RequestParams:
        text, most = given.get("sampling_parameters") or "{}", self._gateway.config.max_constraint_size
        size, unit = len(text), "characters"  # bytes are no fewer: a huge text is not encoded
        if size <= most:
            size, unit = len(text.encode()), "bytes"
        if size > most:
            limit = f"must be at most {most} bytes, the server's max_constraint_size"
            raise InvalidArgument(PARAMETERS, Shown(f"{size} {unit}"), limit)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InvalidArgument(PARAMETERS, Shown("given"), "must be a JSON object")
        kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
        limits, own = self._gateway.limits, BeamSearchParams if "beam_width" in values else SamplingParams
        values = {**({} if own is BeamSearchParams else limits.defaults), **_numbers(own, values), "output_kind": kind}
        if given.get("return_cumulative_logprob") and values.get("logprobs") is None:
            values["logprobs"] = 0  # a sum is made of what is reported
        params: RequestParams = own.from_dict(values)
        check_bounds(params, limits)
        return params

    def _check(self, name: str, version: str) -> None:
        self._gateway.check_model(name)
        if version not in ("", VERSION):
            raise Refusal("NOT_FOUND", "VERSION_NOT_FOUND", f"the model has version {VERSION} alone")

    def _response(self, request: pb.ModelInferRequest, is_final: bool) -> pb.ModelInferResponse:
        made = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        made.parameters[FINAL].bool_param = is_final
        return made


def _numbers(kind: type[SamplingParams | BeamSearchParams], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, of which numbers and truth values may be texts, as Triton's own clients send them."""
    found, known = dict(values), rules(kind)
    for name, value in values.items():
        rule = known[name][0] if name in known else None
        if isinstance(value, str) and isinstance(rule, Integer | Number | Flag):
            with contextlib.suppress(ValueError):  # what means none is refused by name
                found[name] = rule.read(value)
    return found


def _write(
    response: pb.ModelInferResponse,
    output: RequestOutput,
    given: Mapping[str, Any],
    num_tokens: Sequence[int],
    totals: Sequence[float],
    before: str,
) -> None:
    """An output's tensors: an element for each answer, "" of one that has nothing new. `num_tokens`: of each answer,
    since the response before; `totals`: the log-probability of all its tokens so far."""
    answers = {answer.index: answer for answer in output.outputs}
    each = [answers.get(i) for i in range(len(num_tokens))]
    write_output(response, "text_output", [before + (answer.text if answer else "") for answer in each])
    if given.get("return_finish_reason"):
        reasons = [answer.finish_reason if answer else None for answer in each]
        write_output(response, "finish_reason", [reason or "None" for reason in reasons])
    if given.get("return_cumulative_logprob"):
        write_output(response, "cumulative_logprob", totals)
    if given.get("return_num_input_tokens"):
        write_output(response, "num_input_tokens", [len(output.prompt_token_ids)])
    if given.get("return_num_output_tokens"):
        write_output(response, "num_output_tokens", num_tokens)
