"""An engine on a device of compute capability 9.0, emulated: steps of 17 rows and more go by warpgroups, and give the
bits that they give on any other device."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from pagedec import BeamSearchParams, SamplingParams
from pagedec.kernels.library import EMULATED_DEVICE
from tests.engine.crowd import Tiny
from tests.kernels import cuda_library

LENGTHS = (5, 17, 33, 70, 130)


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [16, 40, 512])
def test_bits_do_not_depend_on_the_device(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Prompts that end inside tiles, whole and in pieces, with beams beside them."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 131) for _ in range(length)] for length in LENGTHS]
    params = [SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0) for _ in prompts]
    beams = BeamSearchParams(beam_width=3, max_tokens=3)

    def told(capability: int) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
            llm = tiny(dtype="bfloat16", max_num_batched_tokens=rows)
        context = llm.engine.executor.worker.lanes["target"].backend.context
        emulate = context.library.functions.pd_emulate_hopper
        emulate(ctypes.c_void_p(context.handle), ctypes.c_int32(capability))
        try:
            outputs = llm.generate([*prompts, prompts[2]], [*params, beams], use_tqdm=False)
            return [
                (output.prompt_logprobs, [(answer.token_ids, answer.logprobs) for answer in output.outputs])
                for output in outputs
            ]
        finally:
            llm.close()

    assert told(90) == told(80)
