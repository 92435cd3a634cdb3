"""What an application of replicas may be told: engine arguments, a server's options, and how many replicas of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedec.config import EngineConfig, engine_rules
from pagedec.errors import InvalidArgument, within
from pagedec.fields import Integer, Number, Table, check_fields, check_names, option, rules, strict
from pagedec.serve.routing_config import RoutingConfig
from pagedec.serve.server_config import ServerConfig

_PROXY = "Ray Serve's proxy listens: grpc_options of its configuration say where"
_TLS = "Ray Serve's gRPC proxies have no TLS, whatever Ray's own settings say: what stands in front of them has"
_BOUNDS = "Ray Serve's proxy has the connections, and its own bounds for them"
ELSEWHERE = {
    "host": _PROXY,
    "port": _PROXY,
    "reflection": "say enable_reflection in grpc_options of Ray Serve's configuration",
    "tls_cert": _TLS,
    "tls_key": _TLS,
    "tls_client_ca": _TLS,
    "insecure": _TLS,
    "max_message_size": "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE bounds it (2 GB), where Ray's nodes are started",
    "max_concurrent_streams": _BOUNDS,
    "max_connection_age": _BOUNDS,
    "send_timeout": _BOUNDS,
    "admin_port": "replicas have no AdminService",
    "channelz": "replicas have no AdminService",
    "lora_dir": "replicas have no AdminService",
    "probe_port": "Ray Serve looks after its replicas, and has RayServeAPIService/Healthz for probes",
    "metrics_port": "Ray has metrics of replicas at its own port",
    "metrics_host": "Ray has metrics of replicas at its own port",
    "drain_grace": "a replica that is to leave gets nothing more from Ray Serve's proxies",
}
"""Options of `pagedec serve` that a replica has not, and what there is instead."""
THREADS = 1
"""Of a replica's kernels where nothing is said: Ray counts processors, and must be told how many."""


@strict
@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """How many replicas there are, and when. Raises `InvalidArgument`."""

    min_replicas: int = option(1, Integer("replicas that are always there", low=1, high=10_000))
    max_replicas: int | None = option(
        None, Integer("most replicas; none: as min_replicas, always", low=1, high=10_000, optional=True)
    )
    target_ongoing_requests: float | None = option(
        None, Number("requests that a replica should have; none: half of max_num_seqs", above=0, optional=True)
    )
    target_kv_usage: float = option(0.8, Number("share of its blocks that a replica should use", above=0, high=1))
    max_ongoing_requests: int | None = option(
        None,
        Integer(
            "requests that a replica takes, more wait at the proxy; none: twice max_num_seqs", low=1, optional=True
        ),
    )
    upscale_delay: float = option(10.0, Number("seconds that replicas must be too few", low=0, high=1e6))
    downscale_delay: float = option(300.0, Number("seconds that replicas must be too many", low=0, high=1e6))
    routing: Mapping[str, Any] | None = option(
        None, Table("fields of RoutingConfig: how requests find the replica that has their blocks", optional=True)
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            limit = f"must be at least min_replicas, which is {self.min_replicas}"
            raise InvalidArgument("max_replicas", self.max_replicas, limit)
        with within("routing."):
            RoutingConfig(**(self.routing or {}))


class Given(NamedTuple):
    """An application's arguments, checked."""

    engine: EngineConfig
    server: ServerConfig
    replicas: ReplicaConfig


def read_arguments(given: Mapping[str, Any]) -> Given:
    """An application's arguments by their names; values may be texts, as a command line has them. Raises
    `InvalidArgument` for names that are not known, or mean nothing here, and for values."""
    engine, replicas = engine_rules(), rules(ReplicaConfig)
    server = {name: rule for name, rule in rules(ServerConfig).items() if name not in ELSEWHERE}
    known = {**engine, **server, **replicas}
    check_names("the application", given, known, given, ELSEWHERE)
    values = {name: _read(known[name][0], name, value) for name, value in given.items()}
    options = ServerConfig(**{name: value for name, value in values.items() if name in server})
    if options.wants_loras and not values.setdefault("enable_lora", True):
        raise InvalidArgument("lora", [*options.lora], "must not be given where enable_lora is false")
    config = EngineConfig.from_kwargs(**{name: value for name, value in values.items() if name in engine})
    return Given(
        _placed(config),
        options,
        ReplicaConfig(**{name: value for name, value in values.items() if name in replicas}),
    )


def _read(rule: Any, name: str, value: Any) -> Any:
    return rule.parse(name, value) if isinstance(value, str) else rule.check(name, value)


def _placed(config: EngineConfig) -> EngineConfig:
    """With a number of threads, and with the ranks of a model that is shared where the replica is placed."""
    parallel = config.parallel
    is_shared = parallel.executor == "auto" and parallel.tensor_parallel_size > 1
    parallel = dataclasses.replace(
        parallel,
        executor="ray" if is_shared else parallel.executor,
        num_threads=parallel.num_threads or THREADS,
    )
    return dataclasses.replace(config, parallel=parallel)
