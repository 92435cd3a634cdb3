"""What deploy/ holds goes with the server as it is: every query names a live metric, every flag is one, times fit."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagedec.cli.console import USER_ERROR
from pagedec.cli.main import COMMANDS, parser
from pagedec.serve.ending import CLOSE_SECONDS
from pagedec.serve.lifecycle import READY
from pagedec.serve.server import LAST_SECONDS
from pagedec.serve.server_config import ServerConfig
from tests.serve.serving import Serving

DEPLOY = Path(__file__).parents[2] / "deploy"
ENDING = 2 * LAST_SECONDS + 2 * CLOSE_SECONDS + 1
"""Seconds that a server may take to end behind grace and drain, whatever hangs."""
METRIC = re.compile(r"\bpagedec_[a-z0-9_]+")
LABEL = re.compile(r"\b(by|on|without) \(([a-z_, ]+)\)")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pagedec.json").read_text("utf-8"))
    return found


def queries() -> Iterator[str]:
    board = dashboard()
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        yield from (target["expr"] for target in panel["targets"])
    yield from (own["query"] for own in board["templating"]["list"] if own["type"] == "query")
    for group in read("pagedec-alerts.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_every_query_names_a_live_metric(serve: Callable[..., Serving]) -> None:
    """With labels that it has."""
    serving = serve(metrics_port=0)
    with urllib.request.urlopen(f"http://127.0.0.1:{serving.server.metrics_port}/metrics", timeout=10) as answer:
        samples = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    labels: dict[str, set[str]] = {}
    for line in samples:
        name = re.split(r"[{ ]", line)[0]
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', line))
    asked = list(queries())
    assert len(asked) > 30
    for query in asked:
        named = METRIC.findall(query)
        assert named and set(named) <= labels.keys(), query
        known = set[str]().union(*(labels[name] for name in named)) | {"instance", "le"}
        grouped = {label.strip() for _, inside in LABEL.findall(query) for label in inside.split(",")}
        matched = set(re.findall(r"([a-z_]+)=~?\"", query))
        assert grouped | matched <= known, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_the_dashboard_shows_what_is_measured() -> None:
    """All that a server measures is on it, but for what only counts along."""
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and len(set(places)) == len(places)
    shown = set(METRIC.findall(" ".join(queries())))
    for name in (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "num_requests_running",
        "num_requests_waiting", "num_batch_requests_waiting", "kv_cache_usage_perc",
        "kv_blocks", "prefix_cache_hits_total", "num_preemptions_total", "forks_total", "copied_blocks_total",
        "kv_blocks_shared", "kv_blocks_saved", "rollback_tokens_total", "leaked_blocks",
        "spec_decode_num_accepted_tokens_per_pos_total", "requests_finished_total", "calls_total", "sessions",
        "parked_branches",
    ):  # fmt: skip
        assert f"pagedec_{name}" in shown, name


def flags_of(words: list[str]) -> Any:
    """Flags as the command line reads them. Raises where one is none."""
    return parser().parse_args(["serve", *words])


def given(words: list[str]) -> dict[str, str]:
    return {key.removeprefix("options."): value for key, value in vars(flags_of(words)).items() if "options." in key}


def test_servers_that_answer_nobody_are_alerts() -> None:
    """None at all, and in whichever state. One whose engine has failed ends at once: it is gone, or loads again."""
    [group] = read("pagedec-alerts.yml")["groups"]
    asked = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert asked["PagedecGone"] == "absent(pagedec_server_state)"
    ready = "|".join(state.value for state in READY)
    assert asked["PagedecNotReady"] == f'sum by (instance) (pagedec_server_state{{state=~"{ready}"}}) == 0'


def test_compose() -> None:
    services = read("compose.yaml")["services"]
    assert set(services) == {"pagedec", "prometheus", "grafana"}
    own = services["pagedec"]
    flags = given(own["command"])
    seconds = int(own["stop_grace_period"].removesuffix("s"))
    assert seconds >= float(flags["drain_grace"]) + float(flags["drain_timeout"]) + ENDING
    assert "tls_cert" in flags and "insecure" not in flags and own["read_only"] is True
    target = read("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == [f"pagedec:{flags['metrics_port']}"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists() or source == "./secrets", volume
            else:
                assert source in read("compose.yaml")["volumes"]
    networks = set(read("compose.yaml")["networks"])
    assert all(set(service["networks"]) <= networks for service in services.values())
    assert read("grafana/datasources.yaml")["datasources"][0]["url"] == "http://prometheus:9090"
    assert read("grafana/dashboards.yaml")["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"


def test_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith(("#", " "))]
    found = dict(lines)
    assert found["STOPSIGNAL"] == "SIGTERM" and found["USER"] not in ("0", "root")
    begun, own = json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])
    assert begun[:2] == ["pagedec", "serve"]
    assert "probe_port" in given(begun[2:]), "whatever is given in place of CMD"
    flags = given([*begun[2:], *own])
    program, command, address = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert (program, command) == ("pagedec", "health") and command in COMMANDS
    assert address == f"127.0.0.1:{flags['probe_port']}"
    assert {str(ServerConfig().port), flags["probe_port"], flags["metrics_port"]} == set(found["EXPOSE"].split())


def test_systemd_unit() -> None:
    text = (DEPLOY / "pagedec.service").read_text("utf-8").replace("\\\n", " ")
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/pagedec") and command == "serve"
    flags = given(words)
    assert float(service["TimeoutStopSec"]) >= float(flags["drain_grace"]) + float(flags["drain_timeout"]) + ENDING
    assert service["KillSignal"] == "SIGTERM" and service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict" and "LimitMEMLOCK" in service
    assert f"PAGEDEC_CACHE=%C/{service['CacheDirectory']}" in service["Environment"]
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == str(USER_ERROR)


def test_what_images_are_not_built_from() -> None:
    """Nothing that this machine has made, and no secrets."""
    ignored = (DEPLOY.parent / ".dockerignore").read_text("utf-8").split("\n")
    assert {".git", ".venv", "build", "pagedec/lib", "deploy/secrets"} <= set(ignored)
    assert "/deploy/secrets/" in (DEPLOY.parent / ".gitignore").read_text("utf-8").split("\n"), "which are committed"
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    cache = read("compose.yaml")["services"]["pagedec"]["volumes"][1].partition(":")[2]
    assert f"PAGEDEC_CACHE={cache}" in text and f"install -d -o 10001 {cache}" in text


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_files_are_read(path: Path) -> None:
    assert all(yaml.safe_load_all(path.read_text("utf-8")))
