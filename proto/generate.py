"""Make the stubs from the contract: `python proto/generate.py [DIRECTORY]`, by default the package's own.

They are committed, so that installing needs no compiler of protocols. `grpcio-tools` is pinned to the oldest version
whose stubs a supported runtime loads: a runtime refuses stubs that are newer than itself.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
PLUGINS = ("mypy", "mypy_grpc")
FOREIGN = "open_inference_service"
"""Not our contract: another's protocol, which we may not change."""


def generate(into: Path) -> None:
    """Write the stubs of all files under `proto/` below `into`. Raises `RuntimeError` where the compiler fails."""
    names = _names()
    (into / "pagedec" / "v1").mkdir(parents=True, exist_ok=True)
    _run([f"--python_out={into}", f"--mypy_out={into}", *names])
    services = [name for name in names if "_service" in name]
    _run([f"--grpc_python_out={into}", f"--mypy_grpc_out=async_only:{into}", *services])


def describe(path: Path) -> None:
    """Write the descriptors of the contract, comments included, to `path`."""
    kept = ["--include_imports", "--include_source_info", f"-o{path}"]
    _run([*kept, *(name for name in _names() if FOREIGN not in name)])


def _names() -> list[str]:
    return sorted(str(path.relative_to(HERE)) for path in HERE.glob("pagedec/v1/*.proto"))


def _run(arguments: list[str]) -> None:
    google = importlib.resources.files("grpc_tools") / "_proto"
    common = Path(importlib.import_module("google.rpc.status_pb2").__file__ or "").parents[2]
    beside = Path(sys.executable).parent  # of an environment that nobody has activated, too
    plugins = [f"--plugin=protoc-gen-{name}={beside / f'protoc-gen-{name}'}" for name in PLUGINS]
    if protoc.main(["protoc", *plugins, f"-I{HERE}", f"-I{google}", f"-I{common}", *arguments]):
        raise RuntimeError("protoc has failed; what it said is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent)
