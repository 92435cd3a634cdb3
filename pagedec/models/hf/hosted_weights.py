"""A hosted model's weights, by transformers' own loader, and what that does not notice in files.

The loader casts whatever it finds, and may make one parameter of many tensors, under names of its own: experts are
stored one by one, or in MXFP4 as codes and scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagedec.errors import ModelFileError
from pagedec.formats.quantised import MXFP4
from pagedec.formats.safetensors import open_directory
from pagedec.formats.source import WeightSource, is_buffer, listed
from pagedec.models.hf.attention import RUN
from pagedec.models.hf.hosted_architecture import MAKING, first_line, quantization_method

CODES = ("_blocks", "_scales")
"""How names of an MXFP4 weight's parts end: codes and scales, bytes both."""


def read_weights(model_class: Any, config: Any, directory: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a directory's weights. Raises ModelFileError where the files are damaged or do not
    hold exactly the model's weights."""
    stored = open_directory(directory)  # what is damaged is found by our reader, which names it
    quantization, is_mxfp4 = {}, quantization_method(config) == MXFP4
    if is_mxfp4:
        from transformers import Mxfp4Config

        quantization["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        with MAKING:
            model, info = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=RUN,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **quantization,
            )
    except Exception as error:  # the loader raises errors of three libraries
        problem = _not_converted(error) or first_line(error)
        raise ModelFileError(directory, f"transformers cannot load the weights: {problem}") from error
    check_loaded(model, stored, info, is_mxfp4)
    _take(model)
    return model


def _take(model: Any) -> None:
    """Copy tensors, one at a time, out of the mapped files in which the loader leaves those that it need not convert.
    Otherwise a file that is written anew would change a model at work, or end the process, and a pool would be sized as
    if weights took no memory: a file's pages count as available."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _not_converted(error: BaseException) -> str:
    """Which parameters could not be made of what is stored, and why; empty where it was something else. The loader's
    error tells of a report that it has printed, which is made of what its last function was given."""
    frame, conversions = error.__traceback__, dict[str, str]()
    while frame is not None:
        info = frame.tb_frame.f_locals.get("loading_info")
        conversions |= getattr(info, "conversion_errors", None) or {}
        frame = frame.tb_next
    reasons = {name: told.partition("\nError")[0].strip().splitlines() for name, told in conversions.items()}
    return listed([f"{name} cannot be made: {(lines or ['no reason'])[-1]}" for name, lines in sorted(reasons.items())])


def check_loaded(model: Any, stored: WeightSource, info: Mapping[str, Any], is_mxfp4: bool = False) -> None:
    """Raise ModelFileError unless the files held exactly the model's weights, once each and as floating point.

    `info` is what transformers' loader says; `is_mxfp4`: weights may be codes and scales.
    """
    names, wrong = set(stored.names()), info.get("mismatched_keys") or ()
    codes = [name for name in stored.names() if is_mxfp4 and name.endswith(CODES)]
    twice = [name for name in names if is_mxfp4 and {name + part for part in CODES} & names]
    problems = [
        (
            "of wrong shape",
            [f"{n} has shape {list(found)}, must have {list(needed)}" for n, found, needed in sorted(wrong, key=str)],
        ),
        ("no floating point", _integers(model, stored, info, is_mxfp4)),
        ("no bytes", [f"{n} is {stored.dtype(n)}" for n in codes if stored.dtype(n) != torch.uint8]),
        ("both as numbers and in MXFP4", sorted(twice)),
    ]
    for what in ("missing", "unexpected"):
        problems.append((what, sorted(name for name in info.get(f"{what}_keys") or () if not is_buffer(name))))
    if any(names for _, names in problems):
        told = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in problems if names)
        raise ModelFileError(stored.path, f"the weights do not fit the model configuration; {told}")


def _integers(model: Any, stored: WeightSource, info: Mapping[str, Any], is_mxfp4: bool) -> list[str]:
    """Tensors that the loader has taken for weights, though they are none: neither buffers, which may be integers, nor
    codes, nor what it leaves out."""
    prefix = f"{model.base_model_prefix}."  # files may hold a trunk alone, without what a head puts before its names
    left_out = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    others = {name for name, _ in model.named_buffers()} | set(info.get("unexpected_keys") or ())

    def is_weight(name: str) -> bool:
        if is_buffer(name) or {name, prefix + name, name.removeprefix(prefix)} & others:
            return False
        is_code = is_mxfp4 and name.endswith(CODES)
        return not is_code and not any(pattern.search(name) for pattern in left_out)

    integers = [name for name in stored.names() if not stored.dtype(name).is_floating_point and is_weight(name)]
    return [f"{name} is {stored.dtype(name)}" for name in integers]
