"""LoRA adapters in GGUF files, as llama.cpp's converter writes them: pairs of tensors NAME.weight.lora_a and
NAME.weight.lora_b, and one number for all scales."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pagedec.errors import InvalidArgument, ModelFileError, shown
from pagedec.fields import Number
from pagedec.formats.gguf.dequantize import dequantize
from pagedec.formats.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from pagedec.formats.gguf.reader import unpermute
from pagedec.formats.gguf.tensor_names import Layout, layout_of
from pagedec.formats.mapping import MappedFile
from pagedec.formats.source import listed
from pagedec.kernels.experts import MAX_EXPERTS

Pair = tuple[torch.Tensor, torch.Tensor]
INVOCATION = "adapter.alora.invocation_tokens"
ALPHA = "adapter.lora.alpha"
_ALPHA = Number("scale times rank")
_HALF = re.compile(r"(.+)\.lora_([ab])")
_IN_BLOCK = re.compile(r"blk\.\d+\.(\w+)\.weight")
ROTARY = {"attn_q": 0, "attn_k": 1}
"""The stems whose rows may be reordered, and where the number of their heads stands."""


def read_gguf_adapter(path: Path, heads: tuple[int, int] | None) -> tuple[dict[str, Pair], float]:
    """Return A [r, k] and B [n, r] by what Hugging Face calls the modules, B's rows in Hugging Face's order, and
    adapter.lora.alpha, 0 where the file does not say it.

    `heads`: how many the base model has of q and of k; None is refused where rows are in an order that they decide.
    Raises ModelFileError for what is no LoRA of linear layers.
    """
    header = read_gguf_header(path)
    alpha = _check_fields(header)
    layout = layout_of(header.fields.get("general.architecture"))
    mapped = MappedFile(path, header.files[path].num_bytes)
    pairs: dict[str, Pair] = {}
    for name, halves in _halves(header).items():
        for half in halves:
            if len(half.shape) not in (2, 3) or 0 in half.shape:
                raise ModelFileError(path, f"tensor {half.name} is {list(half.shape)}, must be a matrix, or experts'")
        a, b = (dequantize(mapped.view(half.start, half.num_bytes), half).clone() for half in halves)
        for module, pair in _modules(path, layout, name, a, b, heads).items():
            if module in pairs:
                raise ModelFileError(path, f"has two pairs of {module}")
            pairs[module] = pair
    mapped.release()
    return pairs, alpha


def _check_fields(header: GgufHeader) -> float:
    fields = header.fields
    for field, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(field) != expected:
            raise ModelFileError(header.path, f"{field} is {shown(fields.get(field))}, must be {expected}")
    if fields.get(INVOCATION):
        problem = f"{INVOCATION} is {shown(fields[INVOCATION])}: activated LoRA is not supported; must be empty"
        raise ModelFileError(header.path, problem)
    try:
        return float(_ALPHA.check(ALPHA, fields.get(ALPHA, 0.0)))
    except InvalidArgument as error:
        raise ModelFileError(header.path, str(error)) from error


def _halves(header: GgufHeader) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    """Return the tensors of A and B by the name of the weight that they update."""
    found: dict[str, dict[str, GgufTensor]] = {}
    others = []
    for name, tensor in header.tensors.items():
        match = _HALF.fullmatch(name)
        if match is None or not match[1].endswith(".weight") or match[1] == "token_embd.weight":
            others.append(name)
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    if others:
        problem = f"{len(others)} of the tensors are no LoRA of a linear layer: {listed(others)}"
        raise ModelFileError(header.path, problem)
    if alone := [next(iter(parts.values())).name for parts in found.values() if len(parts) == 1]:
        raise ModelFileError(header.path, f"{len(alone)} of the tensors lack their other half: {listed(alone)}")
    return {name: (parts["a"], parts["b"]) for name, parts in found.items()}


def _modules(
    path: Path, layout: Layout, name: str, a: torch.Tensor, b: torch.Tensor, heads: tuple[int, int] | None
) -> dict[str, Pair]:
    """Return the pairs of Hugging Face's modules that one of the file is: several where experts, or q, k and v, are in
    one tensor."""
    if layout.is_of_experts(name):
        return _experts(path, layout, name, a, b)
    names, match = layout.names(name), _IN_BLOCK.fullmatch(name)
    stem = match[1] if match else ""
    if names == (name,):
        raise ModelFileError(path, f"updates {name}, which is no linear layer of a known name")
    if stem in layout.transposed:  # the converter turns A and B like the weight, llama.cpp takes them as they lie
        raise ModelFileError(path, f"updates {name}, whose A and B may lie either way round: not supported")
    modules = [found.removesuffix(".weight") for found in names]
    is_rotary = layout.paired and stem in ROTARY
    if not is_rotary and len(modules) == 1:
        return {modules[0]: (a, b)}
    if heads is None:
        raise ModelFileError(path, f"updates {name}, whose rows are ordered by heads: the base model's must be given")
    if is_rotary:
        num_heads = heads[ROTARY[stem]]
        _check_heads(path, name, b, 2 * num_heads, f"{num_heads} heads of an even size")
        return {modules[0]: (a, unpermute(b, num_heads))}
    counts = (heads[0], heads[1], heads[1])
    _check_heads(path, name, b, sum(counts), f"{sum(counts)} heads of q, k and v")
    rows = b.split([count * (b.shape[0] // sum(counts)) for count in counts])
    return {module: (a, own.contiguous()) for module, own in zip(modules, rows, strict=True)}


def _check_heads(path: Path, name: str, b: torch.Tensor, divisor: int, what: str) -> None:
    if b.shape[0] % divisor:
        raise ModelFileError(path, f"tensor {name}.lora_b has {b.shape[0]} rows, must be those of {what}")


def _experts(path: Path, layout: Layout, name: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, Pair]:
    """Return each expert's pair of a tensor that has all, [experts, r, k] and [experts, n, r], or is of one."""
    if a.ndim == b.ndim == 2:
        a, b = a[None], b[None]
    count = a.shape[0]
    names = layout.of_experts(name, count) if count <= MAX_EXPERTS else ()
    if a.ndim != 3 or b.ndim != 3 or b.shape[0] != count or len(names) != count:
        shapes = f"A {list(a.shape)} and B {list(b.shape)}"
        raise ModelFileError(path, f"{name} has {shapes}, must be matrices of 1 to {MAX_EXPERTS} experts")
    return {own.removesuffix(".weight"): (a[e], b[e]) for e, own in enumerate(names)}
