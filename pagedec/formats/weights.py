"""From a model's files to its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from pagedec.formats.dummy import DummySource
from pagedec.formats.gguf.converted import open_converted
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.quantised import quantised
from pagedec.formats.resolve import ModelFiles
from pagedec.formats.safetensors import open_directory
from pagedec.formats.source import RenamedSource, WeightSource, check_weights


def open_weights(
    files: ModelFiles,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    optional: Collection[str] = (),
    seed: int = 0,
    *,
    renamed: Sequence[tuple[str, str | None]] = (),
    norm_value: float = 1.0,
    form: str | None = None,
    adapt: Callable[[WeightSource], WeightSource] | None = None,
    methods: Sequence[str] = (),
) -> WeightSource:
    """Open a model's weights and check that they are exactly those of `shapes`; no weight is read for the check but
    biases that a quantised checkpoint may have without need.

    `dtype` is what the caller computes in, `form` what it packs linear layers with. Dummy weights have that dtype, and
    blocks as that form has them; a GGUF file is converted to it once, unless the form is "gguf": it is left as it is.
    `renamed` is how names in safetensors files become those of `shapes` (see RenamedSource), `adapt` what else becomes
    of them, `methods` those of a quantization_config that it reads; `norm_value` is the value of dummy norms.
    """
    source: WeightSource
    if files.weights is None:
        source = DummySource(shapes, dtype, seed, norm_value, form)
    elif files.load_format == "gguf" and form == "gguf":
        source = GgufSource(files.weights)
    elif files.load_format == "gguf":
        source = open_converted(files.weights, dtype, check=partial(check_weights, shapes=shapes, optional=optional))
    else:
        source = open_directory(files.weights)
        if (known := quantised(files, methods)) is not None:
            source = scaled = known.opened(source)
            optional = [*optional, *scaled.zero_biases()]
        if adapt is not None:
            source = adapt(source)
        if renamed:
            source = RenamedSource(source, renamed)
    check_weights(source, shapes, optional)
    return source
