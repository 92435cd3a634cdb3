"""Attention of other packages on a CUDA device: what one declares that it can do, and what it is asked for.

Such a kernel computes branches that are plain chains, a row each or several. All others of a step (trees of drafts,
branches that read blocks in common) are our own kernel's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from pagedec import environment
from pagedec.errors import InvalidArgument, in_one_line
from pagedec.kernels.backend import AttentionShape
from pagedec.kernels.records import KvKind


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """What a kernel takes. Trees, blocks in common and sinks are nobody's here, so they have no field."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    block_sizes: tuple[int, ...]
    chain_block_sizes: tuple[int, ...]
    """Of those, with which a branch may have several rows: a part of a prompt, or a chain of drafts."""
    windows: bool
    soft_caps: bool
    kv_kinds: tuple[KvKind, ...] = (KvKind.PLAIN,)
    capability: tuple[int, int] = (8, 0)
    """Of the device, at least."""

    def lacks(self, shape: AttentionShape) -> str | None:
        """What a kind of layers needs and there is not; None: it is taken."""
        if shape.head_dim not in self.head_dims:
            return f"heads of {shape.head_dim} numbers"
        if shape.window and not self.windows:
            return f"windows, of {shape.window} tokens"
        if shape.soft_cap and not self.soft_caps:
            return f"soft caps, of {shape.soft_cap:g}"
        return "sinks" if shape.has_sinks else None


@dataclass(frozen=True, slots=True)
class Chains:
    """Branches of a step that are computed together; each one's rows are its last `counts` positions.

    counts, kv_len int32 [num_chains]; block_table int32 [num_chains, width], of which a branch reads the blocks of its
    kv_len tokens. Either all of them have one row (`is_single`) or any number.
    """

    counts: np.ndarray
    kv_len: np.ndarray
    block_table: np.ndarray
    is_single: bool


Given: TypeAlias = Callable[[np.ndarray], torch.Tensor]
"""Puts an array of a step where the kernel finds it."""
Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q [num_rows, num_heads, head_dim], and k and v [num_blocks, num_kv_heads, block_size, head_dim] of a layer, to
the result, like q."""


class AttentionKernel(Protocol):
    """A package's attention."""

    name: str
    """What `attention_backend` calls it."""
    version: str
    limits: AttentionLimits

    def prepare(self, chains: Chains, shape: AttentionShape, given: Given) -> Attend:
        """What each layer of a kind repeats in a step."""


def import_package(name: str, module: str, at_least: str, below: str | None = None) -> tuple[ModuleType, str]:
    """A package of this name and its version. Raises InvalidArgument where it is missing, does not import or is
    another version."""
    advice = f"pip install 'pagedec[{name}]'"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise _unfit(name, f"it does not import: {error}") from error
        raise _unfit(name, f"it is not installed: {advice}") from error
    except Exception as error:  # a wheel for another torch, triton or CUDA fails in any way
        raise _unfit(name, f"it does not import: {in_one_line(error)}") from error
    version = _version(name, module)
    numbers, least = _numbers(version), _numbers(at_least)
    if numbers < least or (below is not None and numbers >= _numbers(below)):
        wanted = at_least if below is None else f"{at_least} or newer, below {below}"
        raise _unfit(name, f"it must be version {wanted}, and is {version}: {advice}")
    return found, version


def part_of(name: str, module: ModuleType, path: str) -> Any:
    """What a module calls by names with dots between them. Raises InvalidArgument where the package has it not."""
    found: Any = module
    for own in path.split("."):
        found = getattr(found, own, None)
        if found is None:
            raise _unfit(name, f"what is installed has no {path}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_numbers(kernel: AttentionKernel, dtype: torch.dtype, kv_kind: KvKind, block_size: int) -> None:
    """Raise InvalidArgument for numbers of an engine with which the kernel could never be used."""
    limits, beside = kernel.limits, f"with attention_backend {kernel.name}"
    if dtype not in limits.dtypes:
        taken = " or ".join(_name(own) for own in limits.dtypes)
        raise InvalidArgument("dtype", _name(dtype), f"must be {taken} {beside}")
    if kv_kind not in limits.kv_kinds:
        raise InvalidArgument("kv_cache_dtype", kv_kind.name.lower(), f"must be auto {beside}")
    if block_size not in limits.block_sizes:
        *others, last = map(str, limits.block_sizes)
        raise InvalidArgument(
            "block_size", block_size, f"must be {', '.join(others)}{' or ' * bool(others)}{last} {beside}"
        )


def check_shapes(kernel: AttentionKernel, shapes: tuple[AttentionShape, ...]) -> None:
    """Raise InvalidArgument where the kernel takes none of a model's kinds of layers."""
    lacks = [kernel.limits.lacks(shape) for shape in shapes]
    if all(lack is not None for lack in lacks):
        raise InvalidArgument(
            "attention_backend", kernel.name, f"must take {lacks[0]}, as the model's layers have them"
        )


def check_device(kernel: AttentionKernel, capability: tuple[int, int]) -> None:
    """Raise InvalidArgument for a device that is too old."""
    if capability < kernel.limits.capability:
        own, least = (".".join(map(str, pair)) for pair in (capability, kernel.limits.capability))
        raise _unfit(kernel.name, f"it needs a device of compute capability {least} or newer, and this one has {own}")


def _unfit(name: str, reason: str) -> InvalidArgument:
    return InvalidArgument("attention_backend", name, f"cannot be used: {reason}")


def _version(name: str, module: str) -> str:
    package = importlib.import_module(module.partition(".")[0])
    return str(getattr(package, "__version__", None) or environment.package_version(name) or "unknown")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
