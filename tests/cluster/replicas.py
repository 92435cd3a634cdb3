"""Two replicas of a tiny model behind Ray Serve's proxy, and how they stand."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

ENGINE: dict[str, Any] = {
    "dtype": "float32", "load_format": "dummy", "num_blocks": 512, "max_model_len": 480, "enable_lora": True,
}  # fmt: skip
SERVICES = [
    f"pagedec.v1.{name}_service_pb2_grpc.add_{name.capitalize()}ServiceServicer_to_server"
    for name in ("generation", "session", "model")
]
SERVICES.append("pagedec.v1.open_inference_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server")


def start_app(tiny: str) -> int:
    """Two replicas; returns where the proxy listens."""
    from ray import serve
    from ray.serve.config import gRPCOptions

    from pagedec.serve.ray_serve import app

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, http = one.getsockname()[1], other.getsockname()[1]
    serve.start(grpc_options=gRPCOptions(port=port, grpc_servicer_functions=SERVICES), http_options={"port": http})
    routing = {"chunk_bytes": 16, "chunk_ids": 16}
    arguments = {"model": tiny, "served_model_name": "tiny", "min_replicas": 2, "routing": routing}
    loras = {"lora": [f"tuned={tiny}/tuned"]}
    serve.run(app({**ENGINE, **arguments, **loras}), name="pagedec", route_prefix="/")
    return port


def started(tiny: str) -> int:
    """`start_app`, again where Ray has failed: its processes have some seconds to start, which a busy machine may not
    give them."""
    from ray import serve

    for _ in range(2):
        with contextlib.suppress(Exception):
            return start_app(tiny)
        serve.shutdown()
    return start_app(tiny)


def replicas() -> dict[str, int]:
    """Process ids by the tags of the replicas that run."""
    from ray.serve.context import _get_global_client

    told = _get_global_client().get_serve_details()["applications"]["pagedec"]["deployments"]["pagedec"]["replicas"]
    alive = [one for one in told if one["state"] == "RUNNING" and Path(f"/proc/{one['pid']}").exists()]
    return {one["replica_id"]: one["pid"] for one in alive}


def stats() -> list[dict[str, Any]]:
    """How the replicas stand."""
    import ray

    names = [one["name"] for one in ray.util.list_named_actors(True) if "SERVE_REPLICA" in one["name"]]
    actors = [ray.get_actor(name, namespace="serve") for name in names]
    return list(ray.get([actor.record_routing_stats.remote() for actor in actors], timeout=20))


def is_idle() -> bool:
    """Of two that run: one that takes a killed one's place can be asked for nothing yet."""
    if len(replicas()) != 2:
        return False
    return all(one["num_running"] + one["num_waiting"] == 0 and one["kv_usage"] == 0 for one in stats())
