"""Forty clients of one process, each doing what clients do: `python -m tests.serve.chaos_client ADDRESS SEED SECONDS`.

Prints how often each was done, as JSON; what is answered must be what the server answers in peace.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter

import grpc
import grpc.aio

from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import prompt_pb2 as pr

NUM_CLIENTS = 40
PROMPTS = [
    [5 + (i * 7 + j * 11) % 120 for j in range(length)] for i, length in enumerate((3, 15, 16, 17, 40, 63, 65, 90))
]
OVERLOADED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


def request(kind: type, i: int, max_tokens: int = 40) -> pb.GenerateRequest | pb.GenerateStreamRequest:
    """The i-th of a few requests: greedy, sampled, beams, drafted."""
    own = pp.Parameters(stopping=pp.Stopping(max_tokens=max_tokens, ignore_eos=True), seed=i)
    if i % 4 == 1:
        own.sampling.temperature = 0.9
        own.sampling.n = 2
    elif i % 4 == 2:
        own.beam_search.beam_width = 4
    else:
        own.sampling.temperature = 0.0
    if i % 4 == 3:
        own.speculation.table.update({"method": "ngram", "num_speculative_tokens": 4})
    prompt = pr.Prompt(token_ids=pr.TokenIds(ids=PROMPTS[i % len(PROMPTS)]))
    made: pb.GenerateRequest | pb.GenerateStreamRequest = kind(prompt=prompt, parameters=own)
    return made


async def whole(
    stub: generation_service_pb2_grpc.GenerationServiceStub, i: int, timeout: float = 120
) -> list[list[int]]:
    answers = (await stub.Generate(request(pb.GenerateRequest, i), timeout=timeout)).answers
    return [list(answer.token_ids) for answer in answers]


class Clients:
    """All clients of this process."""

    def __init__(self, address: str, seed: int) -> None:
        self.rng, self.counts, self.address = random.Random(seed), Counter[str](), address
        self.expected: dict[int, list[list[int]]] = {}

    async def run(self, seconds: float) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            self.stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            for i in range(16):
                self.expected[i] = await self.patient(i)
            end = time.monotonic() + seconds
            await asyncio.gather(*(self.client(end) for _ in range(NUM_CLIENTS)))

    async def patient(self, i: int) -> list[list[int]]:
        while True:
            try:
                return await whole(self.stub, i)
            except grpc.aio.AioRpcError as error:
                if error.code() not in OVERLOADED:
                    raise
                await asyncio.sleep(0.1)

    async def client(self, end: float) -> None:
        actions = (self.ask, self.stream, self.cancel, self.hurry, self.crawl, self.flood, self.mistake)
        while time.monotonic() < end:
            action = self.rng.choice(actions)
            try:
                await action(self.rng.randrange(16))
                self.counts[action.__name__] += 1
            except grpc.aio.AioRpcError as error:
                if error.code() not in OVERLOADED:
                    raise
                self.counts["refused"] += 1
                await asyncio.sleep(0.05)

    async def ask(self, i: int) -> None:
        assert await whole(self.stub, i) == self.expected[i], f"request {i} is answered otherwise"

    async def stream(self, i: int, pause: float = 0.0) -> None:
        tokens: dict[int, list[int]] = {j: [] for j in range(len(self.expected[i]))}
        async for message in self.stub.GenerateStream(request(pb.GenerateStreamRequest, i), timeout=120):
            for delta in message.deltas:
                for j in tokens if delta.all_answers else (delta.index,):
                    tokens[j] += delta.token_ids
            if pause:
                await asyncio.sleep(pause)
        assert list(tokens.values()) == self.expected[i], f"stream {i} tells something else"

    async def cancel(self, i: int) -> None:
        call = self.stub.GenerateStream(request(pb.GenerateStreamRequest, i, 100), timeout=120)
        for _ in range(self.rng.randrange(4)):
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    async def hurry(self, i: int) -> None:
        try:
            await self.stub.Generate(request(pb.GenerateRequest, i, 150), timeout=self.rng.random() * 0.1)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise

    async def crawl(self, i: int) -> None:
        await self.stream(i, self.rng.random() * 0.1)

    async def flood(self, i: int) -> None:
        ids = pr.TokenIds(ids=[5] * self.rng.choice((300, 100_000)))
        await self.refused(pb.GenerateRequest(prompt=pr.Prompt(token_ids=ids)))

    async def mistake(self, i: int) -> None:
        wrong = request(pb.GenerateRequest, i)
        wrong.parameters.logits_rules.allowed_token_ids.append(10**6)
        await self.refused(wrong)  # type: ignore[arg-type]

    async def refused(self, wrong: pb.GenerateRequest) -> None:
        try:
            await self.stub.Generate(wrong, timeout=120)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT or error.code() in OVERLOADED:
                return
            raise
        raise AssertionError("it was answered")


def main(address: str, seed: str, seconds: str) -> None:
    clients = Clients(address, int(seed))
    asyncio.run(clients.run(float(seconds)))
    print(json.dumps(clients.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
