"""What all tests share: the same random numbers in every run, and no machine so slow that a test fails for it."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("pagedec", derandomize=True, deadline=None)
settings.load_profile("pagedec")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # not imported for its own sake: the tests of the core run without it
        sys.modules["torch"].manual_seed(0)
