"""Files of adapters that are gone, or others, when a worker reads them: their own requests fail, and nobody else loses
anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, LoRARequest
from pagedec.errors import ModelFileError, RequestError
from tests.engine.deaths import executor_of
from tests.engine.lora_models import GREEDY, PROMPTS, Adapted, tokens_of

Make = Callable[..., LLM]
WHERE: list[dict[str, Any]] = [
    {}, {"async_scheduling": True}, {"executor": "process"}, {"executor": "process", "tensor_parallel_size": 2},
]  # fmt: skip
LONG = GREEDY.clone(max_tokens=24)


@pytest.fixture
def lora(adapted: Adapted, tmp_path: Path) -> LoRARequest:
    """One of the adapters, in files of the test's own."""
    own = adapted.loras[1]
    shutil.copytree(own.lora_path, tmp_path / "mine")
    return LoRARequest("mine", 9, str(tmp_path / "mine"))


@pytest.mark.parametrize("settings", WHERE, ids=str)
def test_files_that_vanish_behind_the_look(
    with_loras: Make, adapted: Adapted, lora: LoRARequest, settings: dict[str, Any]
) -> None:
    """In the middle of others' answers; when they are there again, so is the adapter, and nothing is found that was
    computed without it."""
    llm, other, path = with_loras(max_loras=2, **settings), adapted.loras[0], Path(lora.lora_path)
    streams = [llm.stream(PROMPTS[2], LONG, lora_request=one) for one in (None, other)]
    for stream in streams:
        next(stream)
    assert llm.add_lora(lora)
    (path / "adapter_model.safetensors").rename(path / "elsewhere")
    failing = [llm.stream(PROMPTS[3], GREEDY, lora_request=lora) for _ in range(2)]
    for stream in failing:
        with pytest.raises(RequestError, match="its adapter cannot be loaded: lora_request is 'mine': ") as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, ModelFileError)
        assert str(caught.value).endswith("has no adapter_model.safetensors; remove the adapter and add it again")
    outputs = [list(stream)[-1] for stream in streams]
    assert tokens_of(outputs) == [adapted.want(one, PROMPTS[2], 24) for one in (None, other)]
    assert all(output.metrics is None or output.metrics.num_preemptions == 0 for output in outputs)
    executor, stats = llm.engine.executor, llm.engine.stats
    assert (stats.num_failed_steps, executor.num_restarts) == (0, 0)
    (path / "elsewhere").rename(path / "adapter_model.safetensors")
    [output] = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False, lora_request=lora)
    assert tokens_of([output]) == [adapted.want(adapted.loras[1], PROMPTS[3])] and output.num_cached_tokens == 0
    assert llm.engine.adapters.files == {}


def test_files_that_one_rank_alone_lacks(with_loras: Make, adapted: Adapted, lora: LoRARequest, tmp_path: Path) -> None:
    """As of a node without them: their path leads through what only one process has in its /proc."""
    llm, other = with_loras(tensor_parallel_size=2), adapted.loras[0]
    want = [adapted.want(one, PROMPTS[1]) for one in (None, other)]
    link = tmp_path / "link"
    for rank, pid in enumerate(executor_of(llm).pids):
        link.unlink(missing_ok=True)
        link.symlink_to(lora.lora_path)
        named = LoRARequest(f"link-{rank}", 10 + rank, str(link))
        assert llm.add_lora(named)
        link.unlink()
        link.symlink_to(f"/proc/self/task/{pid}/root{lora.lora_path}")  # where pid is a thread of one's own
        stream = llm.stream(PROMPTS[0], GREEDY, lora_request=named)
        outputs = llm.generate([PROMPTS[1]] * 2, GREEDY, use_tqdm=False, lora_request=[None, other])
        assert tokens_of(outputs) == want
        with pytest.raises(RequestError, match="/link: does not exist; remove") as caught:
            list(stream)
        assert ("at rank 1: " in str(caught.value)) is (rank == 0)
    assert (llm.engine.stats.num_failed_steps, llm.engine.executor.num_restarts) == (0, 0)
