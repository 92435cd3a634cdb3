"""Triton's own client runs greedy, sampled and beam requests, unmodified."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from pagedec.params import RequestParams
from pagedec.v1 import open_inference_service_pb2 as pb
from pagedec.v1 import open_inference_service_pb2_grpc
from tests.serve.serving import Serving, offline, reason

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
CASES: dict[str, RequestParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=2, max_tokens=20),
    "beams": BeamSearchParams(beam_width=4, num_return_sequences=2, max_tokens=12),
}


@pytest.fixture(scope="module")
def told(text_server: Serving) -> Any:
    """What the client's program has printed."""
    command = [sys.executable, "-m", "tests.serve.triton_program", f"127.0.0.1:{text_server.server.port}", "smollm2"]
    command.append(PROMPT)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_questions_about_the_server(told: Any) -> None:
    assert (told["live"], told["ready"], told["model"], told["other"]) == (True, True, True, False)
    assert told["metadata"]["name"] == "smollm2" and told["server"]["name"] == "pagedec"
    assert [tensor["name"] for tensor in told["metadata"]["inputs"]][:2] == ["text_input", "stream"]


@pytest.mark.parametrize("name", CASES)
def test_its_answers_are_those_of_offline(told: Any, text_server: Serving, name: str) -> None:
    want = offline(text_server, PROMPT, CASES[name])
    assert told[name]["texts"] == [answer.text for answer in want.outputs]
    assert told[name]["tokens"] == [len(answer.token_ids) for answer in want.outputs]
    pieces = told[f"{name} streamed"]["pieces"]
    assert len(pieces) > 3 and told[f"{name} streamed"]["error"] is None
    assert ["".join(own) for own in zip(*pieces, strict=True)] == [answer.text for answer in want.outputs]
    assert [sum(own) for own in zip(*told[f"{name} streamed"]["tokens"], strict=True)] == told[name]["tokens"]


def test_the_prompt_stands_before_an_answer_unless_it_is_left_out(told: Any) -> None:
    assert told["with the prompt"] == [PROMPT + told["greedy"]["texts"][0]]


def test_an_error_of_a_stream_is_its_request_s(told: Any) -> None:
    assert "temperature is -1" in told["wrong"]["error"]


def infer(text_server: Serving, raw: list[bytes], **fields: Any) -> pb.ModelInferResponse:
    stub = open_inference_service_pb2_grpc.GRPCInferenceServiceStub(text_server.channel)
    request = pb.ModelInferRequest(**{"model_name": "smollm2", "raw_input_contents": raw, **fields})
    response: pb.ModelInferResponse = stub.ModelInfer(request)
    return response


def tensor(name: str, kind: str = "BYTES", shape: tuple[int, ...] = (1,)) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=shape)


TEXT = struct.pack("<I", 2) + b"Hi"


def test_tokens_of_pieces_without_text_are_counted_with_the_next(
    text_server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the first half of a character."""
    grown = [
        [("a", [1]), ("b", [7])], [("", [2]), ("", [8, 9])], [("é", [3])], [("", [4])], [("", []), ("c", [5])],
        [("", [6]), ("", [])],
    ]  # fmt: skip

    async def outputs(*_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        for i, answers in enumerate(grown):
            parts = [CompletionOutput(rank, text, tokens) for rank, (text, tokens) in enumerate(answers)]
            yield RequestOutput("", "Hi", [5], parts, i == len(grown) - 1)

    monkeypatch.setattr(text_server.server.gateway, "outputs", outputs)
    parameters = b'{"n": 2}'
    names = [tensor("text_input"), tensor("stream", "BOOL"), tensor("sampling_parameters")]
    request = pb.ModelInferRequest(
        model_name="smollm2",
        inputs=[*names, tensor("return_num_output_tokens", "BOOL")],
        raw_input_contents=[TEXT, b"\1", struct.pack("<I", len(parameters)) + parameters, b"\1"],
    )
    stub = open_inference_service_pb2_grpc.GRPCInferenceServiceStub(text_server.channel)
    responses = [answer.infer_response for answer in stub.ModelStreamInfer(iter([request]))]
    assert [response.outputs[1].name for response in responses] == ["num_output_tokens"] * 4
    counts = [struct.unpack("<2I", response.raw_output_contents[1]) for response in responses]
    assert counts == [(1, 1), (2, 2), (1, 1), (1, 0)]


@pytest.mark.parametrize(
    ("raw", "inputs", "said"),
    [
        ([], [], "inputs.text_input is None: must be given"),
        ([TEXT], [tensor("text")], "inputs: must be of text_input"),
        ([], [tensor("text_input")], "inputs.text_input is None: must have contents"),
        ([b"Hi"], [tensor("text_input")], "inputs.text_input is 2 bytes: must be one element"),
        ([struct.pack("<I", 2**32 - 1) + b"Hi"], [tensor("text_input")], "inputs.text_input is 6 bytes"),
        ([struct.pack("<I", 1) + b"\xff"], [tensor("text_input")], "must be text in UTF-8"),
        ([TEXT], [tensor("text_input", "INT32")], "inputs.text_input.datatype: must be BYTES"),
        ([TEXT], [tensor("text_input", shape=(2,))], "inputs.text_input.shape: must be of one element"),
        ([TEXT], [tensor("text_input", shape=(-1, -1, 2**40))], "must be of one element"),
        ([TEXT], [tensor("text_input", shape=(-1, -1))], "must be of one element"),
        ([TEXT], [tensor("text_input", shape=(2,) * 4_000_000)], "is 4000000 of them: must have at most 8 dimensions"),
        ([TEXT, TEXT], [tensor("text_input")] * 2, "inputs: must have each tensor once"),
        ([], [tensor("text_input")] * 9, "inputs is 9 of them: must be at most 8: each is given once"),
        ([TEXT, b"12"], [tensor("text_input"), tensor("stream", "BOOL")], "inputs.stream is 2 bytes"),
        ([TEXT, b"\1"], [tensor("text_input"), tensor("stream", "BOOL")], "inputs.stream is True: must be false"),
        (
            [TEXT, struct.pack("<I", 3) + b"[1]"],
            [tensor("text_input"), tensor("sampling_parameters")],
            "inputs.sampling_parameters is given: must be a JSON object",
        ),
        (
            [TEXT, struct.pack("<I", 10) + b'{"tok": 1}'],
            [tensor("text_input"), tensor("sampling_parameters")],
            "tok is 1: not a field of SamplingParams",
        ),
        (
            [TEXT, struct.pack("<I", 100_000) + b"[" * 100_000],
            [tensor("text_input"), tensor("sampling_parameters")],
            "inputs.sampling_parameters is 100000 characters: must be at most 65536 bytes",
        ),
        (
            [TEXT, struct.pack("<I", 80_000) + "é".encode() * 40_000],
            [tensor("text_input"), tensor("sampling_parameters")],
            "inputs.sampling_parameters is 80000 bytes: must be at most 65536 bytes",
        ),
    ],
)
def test_wrong_tensors(text_server: Serving, raw: list[bytes], inputs: list[Any], said: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        infer(text_server, raw, inputs=inputs)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and said in str(caught.value.details())


@pytest.mark.parametrize("parameters", [
    {"temperature": 0}, {"temperature": 1, "n": 3, "seed": 1}, {"beam_width": 2, "num_return_sequences": 2},
    {"temperature": "0.7", "seed": "3", "max_tokens": "9", "ignore_eos": "true", "top_p": "0.95"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_the_log_probability_of_answers(text_server: Serving, parameters: dict[str, Any], streams: bool) -> None:
    """The flag is enough; where others have nothing new, theirs stays. Numbers may be texts."""
    own = json.dumps({"max_tokens": 6, **parameters}).encode()
    names = [tensor("text_input"), tensor("stream", "BOOL"), tensor("sampling_parameters")]
    request = pb.ModelInferRequest(
        model_name="smollm2",
        inputs=[*names, tensor("return_cumulative_logprob", "BOOL")],
        raw_input_contents=[TEXT, bytes([streams]), struct.pack("<I", len(own)) + own, b"\1"],
    )
    stub = open_inference_service_pb2_grpc.GRPCInferenceServiceStub(text_server.channel)
    if streams:
        *_, last = (answer.infer_response for answer in stub.ModelStreamInfer(iter([request])))
    else:
        last = stub.ModelInfer(request)
    assert last.outputs[1].name == "cumulative_logprob"
    kind = BeamSearchParams if "beam_width" in parameters else SamplingParams
    numbers = {name: json.loads(value) if isinstance(value, str) else value for name, value in parameters.items()}
    params = kind(**{"max_tokens": 6, **numbers, "logprobs": 0})
    want = [answer.cumulative_logprob for answer in offline(text_server, "Hi", params).outputs]
    found = struct.unpack(f"<{len(want)}f", last.raw_output_contents[1])
    assert all(total < -0.1 for total in found) and [*found] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("text", ["warm", "", "nan"])
def test_a_text_that_is_no_number(text_server: Serving, text: str) -> None:
    own = json.dumps({"temperature": text}).encode()
    with pytest.raises(grpc.RpcError) as caught:
        raw = [TEXT, struct.pack("<I", len(own)) + own]
        infer(text_server, raw, inputs=[tensor("text_input"), tensor("sampling_parameters")])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature" in str(caught.value.details())


def test_another_model_or_version(text_server: Serving) -> None:
    for fields, why in (({"model_name": "other"}, "MODEL_NOT_FOUND"), ({"model_version": "2"}, "VERSION_NOT_FOUND")):
        with pytest.raises(grpc.RpcError) as caught:
            infer(text_server, [TEXT], inputs=[tensor("text_input")], **fields)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason(caught.value) == why
