"""flash-attn and xformers themselves, where one of them and a CUDA device are: engines say what our own kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedec import LLM
from pagedec.config import ATTENTION_PACKAGES
from pagedec.errors import InvalidArgument
from pagedec.kernels.library import CUDA
from pagedec.outputs import RequestOutput
from pagedec.runtime.loading import KERNELS
from tests.engine.test_attention_packages import LONGER, requests
from tests.kernels import cuda_library
from tests.models.checkpoints import make_checkpoint

FIRST = 3
"""Of the requests: their branches are plain chains, with reports."""


def said(path: Path, dtype: str, backend: str) -> list[RequestOutput]:
    """In parts of prompts, and then a token at a time."""
    settings = {"num_blocks": 24, "block_size": 256, "max_num_batched_tokens": 200, "attention_backend": backend}
    prompts, params = map(list, zip(*requests(), strict=True))
    with LLM(str(path), dtype=dtype, skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.stats.num_failed_steps == 0
        llm.engine.scheduler.check()
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ATTENTION_PACKAGES)
def test_the_package_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """To the rounding of 16 bits, as long as both have said the same: behind that they answer different questions."""
    if not cuda_library.has_device():
        pytest.skip("no CUDA device")
    try:
        KERNELS[name]()
    except InvalidArgument as error:
        pytest.skip(str(error))
    make_checkpoint(LONGER, tmp_path / "model")
    monkeypatch.setenv("PAGEDEC_ISA", CUDA)
    ours, theirs = (said(tmp_path / "model", dtype, backend) for backend in ("native", name))
    for one, other in zip(ours[:FIRST], theirs[:FIRST], strict=True):
        a, b = one.outputs[0], other.outputs[0]
        same = next((i for i in range(len(a.token_ids)) if a.token_ids[i] != b.token_ids[i]), len(a.token_ids))
        for left, right in zip(a.logprobs[: same + 1], b.logprobs[: same + 1], strict=True):
            for token in left.keys() & right.keys():
                assert right[token].logprob == pytest.approx(left[token].logprob, abs=0.05)
