"""Two replicas behind Ray Serve: requests that find their prefix's blocks against requests that are sent anywhere.

    python -m benchmarks.replicas

200 requests to each, over 8 long shared prefixes of which one replica's pool holds five; the two applications take
turns.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.common import machine
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import generation_service_pb2_grpc, parameters_pb2, prompt_pb2

PORT, HTTP = 19350, 19351
NUM_REQUESTS, NUM_PREFIXES, ROUNDS, AT_ONCE = 200, 8, 4, 2
PREFIX_TOKENS, OWN_TOKENS, NEW_TOKENS = 384, 16, 8
BLOCKS = 5 * PREFIX_TOKENS // 16 + 2 * AT_ONCE * 4
SERVICE = "pagedec.v1.generation_service_pb2_grpc.add_GenerationServiceServicer_to_server"
ENGINE = {"model": "smollm2", "num_threads": 1, "num_blocks": BLOCKS, "max_model_len": 512, "min_replicas": 2}


@dataclass
class Told:
    """What the requests of one application have found."""

    first: list[float] = field(default_factory=list)
    cached: int = 0
    prompts: int = 0


def start(names: dict[str, str]) -> None:
    """An application for each router."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig, gRPCOptions

    from pagedec.environment import prepare_ray
    from pagedec.serve.ray_serve import deployment
    from pagedec.serve.replica_config import read_arguments

    prepare_ray()
    ray.init("local", num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    serve.start(grpc_options=gRPCOptions(port=PORT, grpc_servicer_functions=[SERVICE]), http_options={"port": HTTP})
    given = read_arguments(ENGINE)
    for name, router in names.items():
        made = deployment(given)
        if router:
            config = RequestRouterConfig(request_router_class=router)
            made = made.options(request_router_config=config)
        serve.run(made.bind(given.engine, given.server), name=name, route_prefix=f"/{name}")


def requests(numbers: random.Random) -> list[pb.GenerateStreamRequest]:
    """Prefixes in random order, each request with an end of its own."""
    prefixes = [[numbers.randrange(1000, 40_000) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    sampling = parameters_pb2.Parameters(sampling=parameters_pb2.Sampling(temperature=0.0))
    sampling.stopping.max_tokens = NEW_TOKENS
    sampling.stopping.ignore_eos = True
    made = []
    for _ in range(NUM_REQUESTS):
        ids = numbers.choice(prefixes) + [numbers.randrange(1000, 40_000) for _ in range(OWN_TOKENS)]
        prompt = prompt_pb2.Prompt(token_ids=prompt_pb2.TokenIds(ids=ids))
        made.append(pb.GenerateStreamRequest(prompt=prompt, parameters=sampling))
    return made


def ask(stub: Any, name: str, request: pb.GenerateStreamRequest, told: Told) -> None:
    """Note when the first token came, and how much of the prompt was there."""
    began, first = time.perf_counter(), None
    for message in stub.GenerateStream(request, metadata=(("application", name),)):
        if first is None and message.deltas:
            first = time.perf_counter() - began
        if message.HasField("usage"):
            told.cached += message.usage.cached_tokens
            told.prompts += message.usage.prompt_tokens
    assert first is not None
    told.first.append(first)


def main() -> None:
    """Print hit rates and times to the first token."""
    import ray

    names = {"prefix": "", "random": "benchmarks.random_routing.RandomRouter"}
    start(names)
    print(machine())
    print(f"{NUM_REQUESTS} requests, {NUM_PREFIXES} prefixes of {PREFIX_TOKENS} tokens, {AT_ONCE} at once, {ENGINE}")
    told, asked = {name: Told() for name in names}, requests(random.Random(1))
    with grpc.insecure_channel(f"127.0.0.1:{PORT}") as channel, ThreadPoolExecutor(AT_ONCE) as threads:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        part = NUM_REQUESTS // ROUNDS
        for turn in range(ROUNDS):
            for name in names:
                some = asked[turn * part : (turn + 1) * part]
                list(threads.map(lambda one, name=name: ask(stub, name, one, told[name]), some))
    for name, found in told.items():
        first = sorted(1000 * seconds for seconds in found.first)
        p90 = first[int(0.9 * len(first))]
        print(
            f"{name:8} hit rate {found.cached / found.prompts:6.1%}, "
            f"first token: median {statistics.median(first):6.1f} ms, "
            f"mean {statistics.mean(first):6.1f} ms, p90 {p90:6.1f} ms"
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
