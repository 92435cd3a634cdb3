"""What a server may be told. Not engine arguments: nothing but a server reads them."""

from __future__ import annotations

import ipaddress
import itertools
from dataclasses import dataclass
from urllib.parse import urlsplit

from pagedec.errors import InvalidArgument
from pagedec.fields import Flag, Integer, Number, Size, Text, Texts, check_fields, option, strict

LOOPBACK, LOOPBACK_NAMES = "127.0.0.1", ("localhost",)
EVERYWHERE = ("0.0.0.0", "::")
LEVELS = ("debug", "info", "warning", "error")
FILES, HOSTS = ("tls_cert", "tls_key", "tls_client_ca", "api_keys", "lora_dir"), ("host", "metrics_host")
"""Fields that are paths, and addresses."""
GRPC_NAMES = ("dns:", "unix:", "ipv4:", "ipv6:")
"""What targets begin with that are no HOST:PORT."""


@strict
@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where a server listens, whom it answers, and how much anybody may ask of it. Raises `InvalidArgument`."""

    host: str = option("127.0.0.1", Text("address to listen on; one that others reach needs TLS, or insecure"))
    port: int = option(50051, Integer("port to listen on; 0: any free one", high=65535))
    admin_port: int | None = option(
        None,
        Integer(
            "port of AdminService, on this machine's own address; none: no such service", high=65535, optional=True
        ),
    )
    probe_port: int | None = option(
        None,
        Integer(
            "a further port for health checks alone, without TLS and tokens, as Kubernetes' probes need it",
            high=65535,
            optional=True,
        ),
    )
    metrics_port: int | None = option(
        None, Integer("port for Prometheus, over HTTP at /metrics; none: no metrics", high=65535, optional=True)
    )
    metrics_host: str = option("127.0.0.1", Text("address of metrics_port"))
    served_model_name: str | None = option(
        None, Text("the model's name for clients; none: what model says", optional=True)
    )
    tls_cert: str | None = option(
        None, Text("file of the certificate chain, PEM; read anew when it changes", optional=True)
    )
    tls_key: str | None = option(None, Text("file of its private key, PEM", optional=True))
    tls_client_ca: str | None = option(
        None, Text("file of the authorities whose clients are let in, PEM: others are not", optional=True)
    )
    insecure: bool = option(False, Flag("listen on an address that others reach without TLS"))
    api_keys: str | None = option(
        None, Text("TOML file of clients and their tokens; read anew when it changes; none: anybody", optional=True)
    )
    max_requests: int = option(1024, Integer("requests that may run and wait; more are refused", low=1))
    max_client_requests: int | None = option(
        None, Integer("the same of one client; none: as max_requests", low=1, optional=True)
    )
    max_client_branches: int | None = option(
        None, Integer("open branches of one client's sessions; none: half of max_parked_branches", low=1, optional=True)
    )
    max_client_tokens: int | None = option(
        None,
        Integer(
            "tokens that one client's running requests may come to, prompts included; none: any", low=1, optional=True
        ),
    )
    max_client_session_tokens: int | None = option(
        None,
        Integer("tokens that one client's sessions may hold; none: half of max_parked_tokens", low=1, optional=True),
    )
    max_answers: int = option(128, Integer("answers, or beams, of one request", low=1))
    max_request_tokens: int = option(
        2**20, Integer("tokens that one request's answers, or beams, may come to together", low=1)
    )
    max_message_size: int = option(16 * 2**20, Size("largest message that is taken", low=1024, high=2**31 - 1))
    max_constraint_size: int = option(2**16, Size("longest schema, expression, grammar or list of choices"))
    max_json_size: int = option(
        2**20, Size("what one conversation may have as JSON: fields of its messages, tools, template variables")
    )
    max_concurrent_streams: int = option(1024, Integer("calls at the same time on one connection", low=1))
    max_connection_age: float | None = option(
        None,
        Number(
            "seconds after which a connection takes no more calls, and another one is made, so that balancers spread "
            "them; what runs goes on; none: never",
            above=0,
            high=1e6,
            optional=True,
        ),
    )
    stream_interval: int = option(
        1, Integer("tokens of an answer that make a message, where a request says nothing", low=1)
    )
    send_timeout: float = option(
        60.0, Number("seconds in which a client must take a message, before its call is ended", above=0, high=1e6)
    )
    lease: float = option(
        600.0, Number("seconds that a session lives unused, where its client says nothing", above=0, high=1e9)
    )
    max_lease: float = option(3600.0, Number("most seconds that a client may ask for", above=0, high=1e9))
    drain_grace: float = option(
        0.0,
        Number(
            "seconds in which requests are still let in after a termination signal, while balancers look away",
            low=0,
            high=1e6,
        ),
    )
    drain_timeout: float = option(
        30.0,
        Number(
            "seconds that running requests have to end after a termination signal; then they are aborted",
            low=0,
            high=1e6,
        ),
    )
    stall_timeout: float = option(
        120.0, Number("seconds without the end of a step, while requests run, after which it is not serving", above=0)
    )
    reflection: bool = option(True, Flag("tell clients of the contract, as grpcurl needs it"))
    channelz: bool = option(False, Flag("tell of connections, as grpcdebug needs it, on the admin port"))
    trie: tuple[str, ...] = option(
        (),
        Texts(
            "NAME=FILE of a trie that constraints may name: what TokenTrie.save has written as FILE.trie, or sequences"
        ),
    )
    decoder: tuple[str, ...] = option(
        (), Texts("file NAME.py, or module, that registers decoders of your own, which requests may name then")
    )
    lora: tuple[str, ...] = option(
        (),
        Texts(
            "NAME=PATH of a LoRA adapter that requests may name as their model: a directory that PEFT has written, or "
            "a .gguf file; it implies --enable-lora"
        ),
    )
    lora_dir: str | None = option(
        None,
        Text(
            "folder of the adapters that AdminService may load while the server runs; none: it loads none; it implies "
            "--enable-lora",
            optional=True,
        ),
    )
    log_level: str = option("info", Text("how much is logged", choices=LEVELS))
    log_format: str = option("text", Text("how it is logged", choices=("text", "json")))
    otlp_endpoint: str | None = option(
        None, Text("where traces go, such as http://127.0.0.1:4317; none: nowhere", optional=True)
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in FILES:
            if "\0" in (getattr(self, name) or ""):
                raise InvalidArgument(name, getattr(self, name), "must be a path, which has no NUL character")
        for name in HOSTS:
            if not _is_name(getattr(self, name)):
                limit = "must be an address, or a name that can be looked up: its parts have 1 to 63 characters"
                raise InvalidArgument(name, getattr(self, name), limit)
        if self.otlp_endpoint is not None and not _is_endpoint(self.otlp_endpoint):
            limit = "must be http://HOST:PORT, https://HOST:PORT, or a target as gRPC names them: HOST:PORT, unix:PATH"
            raise InvalidArgument("otlp_endpoint", self.otlp_endpoint, limit)
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise InvalidArgument(other, None, f"must be given, since {one} is")
        if not is_loopback(self.host) and self.tls_cert is None and not self.insecure:
            limit = (
                "must be this machine's own, such as 127.0.0.1, or have TLS (tls_cert, tls_key), or insecure be true"
            )
            raise InvalidArgument("host", self.host, limit)
        for name in ("channelz", "lora_dir"):
            if getattr(self, name) and self.admin_port is None:
                raise InvalidArgument("admin_port", None, f"must be given, since {name} is")
        self._check_ports()
        if self.lease > self.max_lease:
            raise InvalidArgument("lease", self.lease, f"must be at most max_lease, which is {self.max_lease:g}")

    @property
    def wants_loras(self) -> bool:
        """The engine must take adapters."""
        return bool(self.lora) or self.lora_dir is not None

    def _check_ports(self) -> None:
        """Raise `InvalidArgument` where two are the same one."""
        places = (
            ("port", self.host, self.port),
            ("admin_port", LOOPBACK, self.admin_port),
            ("probe_port", self.host, self.probe_port),
            ("metrics_port", self.metrics_host, self.metrics_port),
        )
        for (one, here, port), (other, there, own) in itertools.combinations(places, 2):
            hosts = {LOOPBACK if host in LOOPBACK_NAMES else host.strip("[]") for host in (here, there)}
            if port and port == own and (len(hosts) == 1 or hosts & set(EVERYWHERE)):
                raise InvalidArgument(other, own, f"must be another one than {one}, which is {port}, too")


def _is_name(host: str) -> bool:
    """What `socket` takes: of other names its error is none of the system's."""
    try:
        return b"\0" not in host.encode("idna")
    except UnicodeError:
        return False


def _is_endpoint(text: str) -> bool:
    """Whether traces can go there: the exporter takes any text for a host's name, and tells nobody at the start."""
    if text.startswith(GRPC_NAMES):
        return True
    scheme, separator, place = text.rpartition("://")
    try:
        parts = urlsplit(f"//{place}")
        has_port = parts.port is not None or scheme.lower() == "https"  # whose port everybody knows
    except ValueError:
        return False
    known = scheme.lower() in ("http", "https") if separator else True
    return known and has_port and bool(parts.hostname) and not any(c.isspace() or c == "\0" for c in text)


def is_loopback(host: str) -> bool:
    """An address is this machine's own. Names other than localhost are taken for others' addresses."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
