"""The manifests: kinds and fields are there, and what they name exists; their commands are read by our own parser."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagedec.cli.main import parser
from pagedec.serve.ending import CLOSE_SECONDS
from pagedec.serve.replica_config import read_arguments
from pagedec.serve.server import LAST_SECONDS
from pagedec.serve.server_config import ServerConfig

GENERATION = "pagedec.v1.GenerationService"
DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
RAY = {"raycluster.yaml": "RayCluster", "rayservice.yaml": "RayService", "rayjob.yaml": "RayJob"}
CLUSTER_AT = {"RayCluster": None, "RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def cluster_of(name: str) -> dict[str, Any]:
    [found] = documents(name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", RAY[name])
    at = CLUSTER_AT[found["kind"]]
    spec: dict[str, Any] = found["spec"] if at is None else found["spec"][at]
    return spec


def pods(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield spec["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in spec["workerGroupSpecs"])


def check_pod(pod: dict[str, Any]) -> None:
    """Not root; whatever is mounted is a volume, and the other way round."""
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 10001
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys() and container["resources"]["requests"]["memory"]
    # Ray's object store needs it, and nothing of ours does: what ranks exchange lies in memory without a place
    assert mounts.get("shm") == ("/dev/shm" if container["image"] == "pagedec-ray" else None)
    if "shm" in volumes:
        room, memory = volumes["shm"]["emptyDir"], container["resources"]["limits"]["memory"]
        assert room["medium"] == "Memory"
        assert num_bytes(room["sizeLimit"]) >= 0.3 * num_bytes(memory), "Ray would lay its objects on the disk"


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 2**20, "Gi": 2**30}[quantity[-2:]]


def test_every_file_is_looked_at() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*RAY, "server.yaml"}


def test_the_server() -> None:
    deployment, service, budget = documents("server.yaml")
    kinds = [(each["apiVersion"], each["kind"]) for each in (deployment, service, budget)]
    assert kinds == [("apps/v1", "Deployment"), ("v1", "Service"), ("policy/v1", "PodDisruptionBudget")]
    pod = deployment["spec"]["template"]["spec"]
    check_pod(pod)
    [container] = pod["containers"]
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    begun = re.findall(r'^ENTRYPOINT \["pagedec", (.*)\]$', dockerfile, re.MULTILINE)
    words = [*re.findall(r'"([^"]+)"', begun[-1]), *container["args"]]
    flags = {key.rpartition(".")[2]: value for key, value in vars(parser().parse_args(words)).items()}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    told = {"grpc": flags["port"], "probe": flags["probe_port"], "metrics": flags["metrics_port"]}
    assert ports == {name: int(value) for name, value in told.items()}
    assert flags["num_threads"] == container["resources"]["requests"]["cpu"], "or it takes all that the node has"
    wait = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(flags["drain_grace"]) + float(flags["drain_timeout"])
    assert pod["terminationGracePeriodSeconds"] >= wait + drain + 2 * LAST_SECONDS + 2 * CLOSE_SECONDS + 1
    for kind, name in (("startupProbe", GENERATION), ("readinessProbe", GENERATION), ("livenessProbe", "")):
        probe = container[kind]["grpc"]
        assert (probe["port"], probe.get("service", "")) == (ports["probe"], name)
    assert all(container[kind]["timeoutSeconds"] >= 5 for kind in ("readinessProbe", "livenessProbe"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] in ports
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", RAY)
def test_ray(name: str) -> None:
    """The image is a target of ours; workers have as many processors as Ray is told."""
    spec = cluster_of(name)
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in pods(spec):
        check_pod(pod)
        assert pod["containers"][0]["image"] == "pagedec-ray"
    assert re.search(r"^FROM \S+ AS ray$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        grows = group["minReplicas"] < group["maxReplicas"]
        assert grows == spec.get("enableInTreeAutoscaling", False), "KubeRay heeds the bounds only where it scales"
        requests = group["template"]["spec"]["containers"][0]["resources"]["requests"]
        assert group["rayStartParams"]["num-cpus"] == requests["cpu"]


def test_the_service_serves_what_is_there() -> None:
    [found] = documents("rayservice.yaml")
    config = yaml.safe_load(found["spec"]["serveConfigV2"])
    [application] = config["applications"]
    given = read_arguments(application["args"])
    spec = cluster_of("rayservice.yaml")
    [group] = spec["workerGroupSpecs"]
    assert group["rayStartParams"]["num-cpus"] == str(given.engine.parallel.num_threads), "a replica a pod"
    assert (given.replicas.max_replicas or 1) <= group["maxReplicas"]
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > given.server.drain_timeout
    module, _, attribute = application["import_path"].partition(":")
    assert (module, attribute) == ("pagedec.serve.ray_serve", "app")
    if importlib.util.find_spec("ray") is not None and importlib.util.find_spec("starlette") is not None:
        assert callable(getattr(importlib.import_module(module), attribute))
    [head] = spec["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    served = {name: port for name, port in ports.items() if name == "serve" or name.startswith("serve-")}
    assert served == {"serve": 8000, "serve-grpc": config["grpc_options"]["port"]}, "what KubeRay makes a Service of"
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        place, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(place), function)), path


def test_strangers_cannot_send_what_a_node_has_no_memory_for() -> None:
    """Ray Serve's proxies take messages of 2 GB where nothing is said, several times over, before any token is looked
    at: three of 300 MB took 4.5 GB of one."""
    image = (DEPLOY / "Dockerfile").read_text("utf-8").partition(" AS ray\n")[2].partition("\nFROM ")[0]
    [most] = re.findall(r"\bRAY_SERVE_GRPC_MAX_MESSAGE_SIZE=(\d+)", image)
    assert ServerConfig().max_message_size <= int(most) <= 64 * 2**20
    if importlib.util.find_spec("ray") is not None and importlib.util.find_spec("starlette") is not None:
        constants = importlib.import_module("ray.serve._private.constants")
        assert hasattr(constants, "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"), "or it has another name by now"


def test_the_job_runs_our_command() -> None:
    [found] = documents("rayjob.yaml")
    program, *words = shlex.split(found["spec"]["entrypoint"])
    given = parser().parse_args(words)
    assert program == "pagedec" and words[0] == "batch" and "--ray" in words
    head = cluster_of("rayjob.yaml")["headGroupSpec"]["template"]["spec"]
    claims = [volume for volume in head["volumes"] if "persistentVolumeClaim" in volume]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    [claim] = claims
    for file in (given.input, given.output):
        assert str(Path(file).parent) == mounts[claim["name"]], "the journal must outlive the cluster"
    workers = cluster_of("rayjob.yaml")["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"]
    assert words[words.index("--num-threads") + 1] == workers
