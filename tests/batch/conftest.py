"""One tiny model for all tests of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedec import LLM
from tests.batch.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(tiny: Path) -> Iterator[LLM]:
    made = LLM(model=str(tiny), load_format="dummy", num_blocks=256, max_num_seqs=8)
    yield made
    made.close()
