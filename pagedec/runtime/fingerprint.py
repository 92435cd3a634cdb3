"""By what it can be told whether two workers give the same tokens: digests of the model, and of how it is computed."""

from __future__ import annotations

import functools
from hashlib import blake2b
from pathlib import Path

import torch

from pagedec import environment
from pagedec.config import ModelConfig
from pagedec.formats.gguf.parts import part_paths
from pagedec.formats.resolve import ModelFiles
from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.native import NativeBackend

DIGEST_BYTES = 8
PAGE = 4096
NUM_PAGES = 16
"""Of each file of weights, looked at beside its first ones: reading all of it would cost what loading it does."""
FIRST_BYTES = 1 << 16
ENDINGS = (".safetensors", ".gguf", ".json", ".model")


def model_digest(files: ModelFiles, config: ModelConfig) -> str:
    """Of a model's configuration, weights and vocabulary, wherever they lie; of large files a sample. Raises `OSError`
    for files that are gone."""
    found = blake2b(digest_size=DIGEST_BYTES)
    if files.weights is None:
        found.update(f"dummy {files.preset} {config.seed}".encode())
    places = [place for place in (files.config, files.weights, files.tokenizer) if place is not None]
    paths = {path for place in places for path in (place.iterdir() if place.is_dir() else part_paths(place))}
    for path in sorted(path for path in paths if path.suffix in ENDINGS and path.is_file()):
        found.update(f"{path.name} {path.stat().st_size} ".encode())
        _sample(path, found)
    return found.hexdigest()


def numerics_digest(backend: Backend, config: ModelConfig, world: int) -> str:
    """Of all that a token's bits depend on beside the model: build, instruction set, types, quantization, of KV
    too, in how many parts sums are made, and of a device its generation and whose attention there is."""
    parts = (
        environment.own_version(), _build_of(backend), backend.name, str(backend.dtype),
        str(backend.quantization), backend.kv_kind.name, config.model_impl, str(world), *_device_of(backend),
    )  # fmt: skip
    return blake2b("\0".join(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def _device_of(backend: Backend) -> tuple[str, ...]:
    if not isinstance(backend, DeviceBackend):
        return ()
    kernel = backend.attention
    return (backend.generation, *(() if kernel is None else (kernel.name, kernel.version)))


def _build_of(backend: Backend) -> str:
    return _file_digest(backend.library.path) if isinstance(backend, NativeBackend) else torch.__version__


@functools.cache
def _file_digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()


def _sample(path: Path, found: blake2b) -> None:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        found.update(file.read(FIRST_BYTES))
        for i in range(1, NUM_PAGES + 1):
            place = size * i // NUM_PAGES - PAGE
            if place >= FIRST_BYTES:
                file.seek(place)
                found.update(file.read(PAGE))
