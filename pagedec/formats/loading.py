"""From a model's files to its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pagedec.formats.cache import open_converted
from pagedec.formats.dummy import DummySource
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.safetensors import open_directory
from pagedec.formats.source import WeightSource, check_weights


def open_weights(
    files: ModelFiles,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    optional: Collection[str] = (),
    seed: int = 0,
) -> WeightSource:
    """Open a model's weights and check that they are exactly those of `shapes`; no weight is read for the check.

    `dtype` is what the caller computes in: dummy weights have it, and a GGUF file is converted to it once.
    """
    source: WeightSource
    if files.weights is None:
        source = DummySource(shapes, dtype, seed)
    elif files.load_format == "gguf":
        source = open_converted(files.weights, dtype)
    else:
        source = open_directory(files.weights)
    check_weights(source, shapes, optional)
    return source
