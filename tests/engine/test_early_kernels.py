"""Steps whose kernels begin before those in front of them are through, on the emulated device: until they wait they
read what no kernel writes, and write nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from pagedec import LLM, SamplingParams
from pagedec.kernels.library import EMULATED_DEVICE, load
from tests.kernels import cuda_library

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
PROMPTS = [[*range(5, 45)], [60, 3, 8, 21]]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)


def test_steps_are_the_same(device: Callable[..., LLM]) -> None:
    """One of more rows than few, then some of few, in lists that are recorded."""
    found = []
    for begins in (False, True):
        llm = device(dtype="bfloat16", num_blocks=8, max_num_batched_tokens=48)
        with cuda_library.early(load(EMULATED_DEVICE)) if begins else nullcontext():
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([(one.token_ids, one.logprobs) for output in outputs for one in output.outputs])
    assert found[0] == found[1]
