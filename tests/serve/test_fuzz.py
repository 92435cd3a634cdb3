"""Whatever a stranger sends, it is answered or refused with a proper status; the server and its pool stay whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory, symbol_database
from google.protobuf.message import Message

from pagedec.serve.interrupted import fingerprint_of
from pagedec.serve.server import SERVICES
from pagedec.v1 import generation_service_pb2 as pb
from tests.serve.fuzzing import fill, mutated
from tests.serve.serving import Serving, details, greedy, prompt

Serve = Callable[..., Serving]
SECONDS = 2.0
"""Deadline of each call."""
PROPER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
METHODS = [
    (f"/{service}/{method.name}", method.input_type, method.client_streaming, method.server_streaming)
    for service in SERVICES
    for method in symbol_database.Default().pool.FindServiceByName(service).methods
]


def random_message(kind: Any, rng: random.Random, server: pb.Fingerprint) -> bytes:
    """Of a method's type, with something in it that can work, more often than not. `server`: its fingerprint."""
    made: Message = message_factory.GetMessageClass(kind)()
    fill(made, rng, rng.choice((0.1, 0.3, 0.6)))
    for name in ("prompt", "parameters"):
        if hasattr(made, "cache_salt") and hasattr(made, name) and rng.random() < 0.6:
            own = prompt([5, 9, 33]) if name == "prompt" else greedy(rng.randrange(1, 20))
            getattr(made, name).MergeFrom(own)
    if "model" in made.DESCRIPTOR.fields_by_name and rng.random() < 0.9:
        made.ClearField("model")
    if isinstance(made, pb.GenerateStreamRequest) and made.HasField("resume") and rng.random() < 0.8:
        made.resume.fingerprint.CopyFrom(server)
        del made.resume.answers[rng.randrange(3) :]
    data = made.SerializeToString()
    return mutated(data, rng) if rng.random() < 0.2 else data


def call(serving: Serving, method: tuple[str, Any, bool, bool], messages: list[bytes]) -> int:
    """The number of answers. Raises what the call ends with."""
    path, _, streams_in, streams_out = method
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    stub = getattr(serving.channel, kind)(path)
    given: bytes | Iterable[bytes] = iter(messages) if streams_in else messages[0]
    answers = stub(given, timeout=SECONDS)
    return len(list(answers)) if streams_out else 1


def fuzz(serving: Serving, count: int, seed: int) -> dict[str, int]:
    """`count` calls; how they ended."""
    rng, ends = random.Random(seed), dict[str, int]()
    server = fingerprint_of(serving.llm)
    want = serving.generation.Generate(pb.GenerateRequest(prompt=prompt([5, 9, 33]), parameters=greedy(12))).answers
    for i in range(count):
        method = rng.choice(METHODS)
        messages = [random_message(method[1], rng, server) for _ in range(rng.randrange(1, 4))]
        try:
            call(serving, method, messages)
            end = "OK"
        except grpc.RpcError as error:
            end = error.code().name
            where = f"{method[0]} of seed {seed}, call {i}: {error.details()}"
            assert error.code() in PROPER, where
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or details(error)["ErrorInfo"].reason, where
        ends[end] = ends.get(end, 0) + 1
        if i % 50 == 49:
            serving.whole()
            again = pb.GenerateRequest(prompt=prompt([5, 9, 33]), parameters=greedy(12))
            assert serving.generation.Generate(again).answers == want
    return ends


def test_random_messages(serve: Serve) -> None:
    ends = fuzz(serve(max_answers=16, max_request_tokens=128), 300, 1)
    assert ends["OK"] > 30 and ends["INVALID_ARGUMENT"] > 30, ends


@pytest.mark.long
def test_random_messages_where_there_is_text(text_server: Serving) -> None:
    """With a tokenizer, a chat template and grammars."""
    ends = fuzz(text_server, 2000, 7)
    assert ends["OK"] > 60 and ends["INVALID_ARGUMENT"] > 60, ends


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_messages(serve: Serve, seed: int) -> None:
    fuzz(serve(max_answers=16, max_request_tokens=128), 2500, 100 + seed)
