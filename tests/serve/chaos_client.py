"""Clients of one process, each doing what clients do: `python -m tests.serve.chaos_client ADDRESS SEED SECONDS COUNT`.

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
from pagedec.v1 import generation_service_pb2_grpc, session_service_pb2_grpc
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import prompt_pb2 as pr
from pagedec.v1 import session_service_pb2 as sp

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

    async def run(self, seconds: float, count: int) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            self.stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            self.sessions = session_service_pb2_grpc.SessionServiceStub(channel)
            for i in range(16):
                self.expected[i] = await self.patient(i)
            end = time.monotonic() + seconds
            await asyncio.gather(*(self.client(end) for _ in range(count)))

    async def patient(self, i: int) -> list[list[int]]:
        while True:
            try:
                return await whole(self.stub, i)
            except grpc.aio.AioRpcError as error:
                if error.code() not in OVERLOADED:
                    raise
                await asyncio.sleep(0.1)

    async def client(self, end: float) -> None:
        actions = (
            self.ask, self.stream, self.cancel, self.hurry, self.crawl, self.flood, self.mistake,
            self.hold, self.forget, self.interrupt, self.snatch,
        )  # fmt: skip
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

    # ---- sessions. Leases are of a second or two
    async def opened(self, i: int) -> str:
        ids = pr.TokenIds(ids=PROMPTS[i % len(PROMPTS)])
        asked = sp.OpenSessionRequest(prompt=pr.Prompt(token_ids=ids), seed=i)
        asked.ttl.FromMilliseconds(self.rng.choice((1000, 2000)))
        return (await self.sessions.OpenSession(asked, timeout=120)).session_id

    async def went_on(self, session: str, branch: str, max_tokens: int) -> list[int]:
        own = pp.Parameters(sampling=pp.Sampling(temperature=0.0))
        own.stopping.max_tokens, own.stopping.ignore_eos = max_tokens, True
        asked = sp.GenerateOnBranchRequest(session_id=session, branch=branch, parameters=own)
        tokens: list[int] = []
        async for message in self.sessions.GenerateOnBranch(asked, timeout=120):
            tokens += [token for delta in message.deltas for token in delta.token_ids]
        return tokens

    async def hold(self, i: int) -> None:
        """What is generated twice behind the same tokens is the same, also behind a fork and a rollback."""
        session = await self.opened(i)
        try:
            first = await self.went_on(session, "0", 12)
            extra = pr.TokenIds(ids=PROMPTS[(i + 1) % len(PROMPTS)])
            await self.sessions.Append(sp.AppendRequest(session_id=session, branch="0", token_ids=extra), timeout=120)
            back = sp.RollbackRequest(session_id=session, branch="0", num_tokens=len(extra.ids) + 6)
            await self.sessions.Rollback(back, timeout=120)
            made = await self.sessions.Fork(sp.ForkRequest(session_id=session, branch="0", count=3), timeout=120)
            names = ["0", *(branch.name for branch in made.branches)]
            answers = await asyncio.gather(*(self.went_on(session, name, 6) for name in names))
            assert answers == [first[6:]] * 4, f"a session goes on from request {i} otherwise"
        except grpc.aio.AioRpcError as error:  # a lease may end where the machine is slow
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return
        finally:
            await self.closed(session)

    async def closed(self, session: str) -> None:
        try:
            await self.sessions.CloseSession(sp.CloseSessionRequest(session_id=session), timeout=120)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    async def forget(self, i: int) -> None:
        """Branches that nobody closes."""
        session = await self.opened(i)
        await self.sessions.Fork(sp.ForkRequest(session_id=session, branch="0", count=20), timeout=120)

    async def interrupt(self, i: int) -> None:
        """A call that is cancelled leaves its branch as it was."""
        session = await self.opened(i)
        task = asyncio.ensure_future(self.went_on(session, "0", 100))
        await asyncio.sleep(self.rng.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self.rng.random() < 0.5:
            await self.closed(session)

    async def snatch(self, i: int) -> None:
        """A session that is closed while calls run on it."""
        session = await self.opened(i)
        task = asyncio.ensure_future(self.went_on(session, "0", 100))
        await asyncio.sleep(self.rng.random() * 0.2)
        await self.closed(session)
        try:
            await task
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND, *OVERLOADED):
                raise

    async def refused(self, wrong: pb.GenerateRequest) -> None:
        try:
            await self.stub.Generate(wrong, timeout=120)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT or error.code() in OVERLOADED:
                return
            raise
        raise AssertionError("it was answered")


def main(address: str, seed: str, seconds: str, count: str) -> None:
    clients = Clients(address, int(seed))
    asyncio.run(clients.run(float(seconds), int(count)))
    print(json.dumps(clients.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
