"""What tests of adapters over gRPC ask, and what they are told."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagedec import SamplingParams
from pagedec.client import ServedLora
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from tests.engine.lora_models import PROMPTS, Adapted
from tests.formats.lora_files import write_lora
from tests.serve.serving import greedy, plain, prompt

Admin = admin_service_pb2_grpc.AdminServiceStub
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
NAMES = ("", "a1", "a2", "a3")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MIXED = list(itertools.product(range(len(NAMES)), range(len(PROMPTS))))
"""Every adapter, and none, with every prompt."""


def lora_flags(adapted: Adapted) -> tuple[str, ...]:
    """What --lora says."""
    return tuple(f"{lora.lora_name}={lora.lora_path}" for lora in adapted.loras)


def asked(name: str, what: list[int], own: Any = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt(what), parameters=own or exact(10), model=name)


def exact(num_tokens: int) -> Any:
    own = greedy(num_tokens)
    own.stopping.ignore_eos = True
    return own


def served(name: str) -> ServedLora | None:
    return ServedLora(name) if name else None


def without_loras(output: Any) -> Any:
    """As the server's client tells it."""
    bare = [dataclasses.replace(answer, lora_request=None) for answer in output.outputs]
    return dataclasses.replace(plain(output), outputs=bare, lora_request=None)


def byte_lora(directory: Path, seed: int) -> str:
    """An adapter of the model of bytes that changes every answer."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        f"model.layers.{i}.{module}": (torch.randn(8, k, generator=generator), torch.randn(64, 8, generator=generator))
        for i in range(2)
        for module, k in (("self_attn.q_proj", 64), ("mlp.down_proj", 128))
    }
    return str(write_lora(directory, pairs))


def refused(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value
