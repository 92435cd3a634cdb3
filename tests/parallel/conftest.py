"""Ranks that share a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import make_checkpoint, variant


@pytest.fixture(autouse=True)
def _threads_and_debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each rank takes its share of torch's threads, which are this process's; pools are checked, blocks poisoned."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_three_heads(directory: Path) -> Path:
    """A model with three KV heads, so that two ranks have two and one."""
    shape = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
    make_checkpoint(variant("three", length=8, **shape), directory)
    return directory


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_three_heads(tmp_path_factory.mktemp("three"))
