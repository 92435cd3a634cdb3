"""Rolls in one call of the compiled kernels: the tokens, the KV and the kept logits of a call for each token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.core.forward import LaneForward
from pagedec.kernels.backend import Backend
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, KernelError, Library, available_isas, load
from pagedec.kernels.native_roll import NativeRoller
from pagedec.models.buffers import READ_ROWS
from pagedec.runtime.runner import LaneRunner
from tests.engine.crowd import Tiny
from tests.engine.test_speculation import drafted_by
from tests.kernels import cuda_library
from tests.models.checkpoints import make_checkpoint, variant

pytestmark = pytest.mark.skipif(not available_isas(), reason="there are no compiled kernels")
Compare = Callable[[LLM], list[int]]


def host(backend: Backend, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that stays."""
    return backend.memory.get(tensor) if isinstance(backend, DeviceBackend) else tensor.clone()


def compare(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have an engine's rolls carried out both ways and compared: how many chains each had."""
    runner: LaneRunner = llm.engine.executor.worker.lanes["draft"]
    roller, roll, seen = runner._roller, runner.roll, list[int]()
    assert isinstance(roller, NativeRoller)

    def both(forward: LaneForward) -> np.ndarray:
        num_kept = int(forward.rolls["count"][forward.rolls["is_kept"] != 0].sum())
        found = []
        for way in (None, roller):
            runner._roller = way
            tokens, cache = roll(forward), runner.cache
            tensors = (runner._kept.rows[:num_kept], cache.k, cache.tokens)
            found.append((tokens, *(host(runner.backend, tensor) for tensor in tensors)))
        (tokens, kept, k, plane), (others, other_kept, other_k, other_plane) = found
        assert tokens.tolist() == others.tolist() and kept.equal(other_kept)
        assert k.nan_to_num(7).equal(other_k.nan_to_num(7)) and plane.equal(other_plane)
        seen.append(len(forward.rolls))
        return others

    monkeypatch.setattr(runner, "roll", both)
    return seen


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compare:
    return lambda llm: compare(llm, monkeypatch)


def asked(i: int, **own: Any) -> SamplingParams:
    rules: dict[str, Any] = [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}][i % 3]
    way = {"method": "draft_model", "num_speculative_tokens": 1 + i % 6, "num_candidates": 1 + i % 4}
    way["verify"] = ("coupling", "rejection")[i % 2]
    kind = {"temperature": 0.9, "top_k": 20 * (i % 3), "seed": i} if i % 5 else {"temperature": 0}
    return SamplingParams(max_tokens=12 + i % 9, ignore_eos=True, speculative=way, **kind, **rules, **own)


@pytest.mark.parametrize("own", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_chains_of_all_lengths_with_rules(tiny: Tiny, tiny_path: Path, compared: Compare, own: dict[str, Any]) -> None:
    llm = tiny(num_blocks=200, speculative_config=drafted_by(tiny_path, **own))
    seen = compared(llm)
    prompts = [[(i * 7 + j * j) % 131 for j in range(5 + i)] for i in range(14)]
    llm.generate(prompts, [asked(i) for i in range(14)], use_tqdm=False)
    assert max(seen) == 14 and llm.engine.stats.num_failed_steps == 0


def test_more_chains_than_are_read_out_at_once(tiny: Tiny, tiny_path: Path, compared: Compare) -> None:
    llm = tiny(num_blocks=600, max_num_seqs=256, max_num_batched_tokens=2048, speculative_config=drafted_by(tiny_path))
    seen = compared(llm)
    num = READ_ROWS + 9
    llm.generate([[5 + i % 100, 9, i % 131] for i in range(num)], [asked(i) for i in range(num)], use_tqdm=False)
    assert max(seen) == num and llm.engine.stats.num_failed_steps == 0


def test_several_kinds_of_layers(tiny: Tiny, tiny_path: Path, tmp_path: Path, compared: Compare) -> None:
    """Each kind has a plan of its own, made anew for each token: layers with a window, and layers without."""
    make_checkpoint(variant("gemma3", "gemma3", length=8, sliding_window=8, num_hidden_layers=3, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]), tmp_path)  # fmt: skip
    llm = tiny(num_blocks=200, speculative_config=drafted_by(tmp_path))
    assert len(llm.engine.executor.worker.lanes["draft"].plans) == 2
    seen = compared(llm)
    llm.generate([[5, 9, 40, 7, 12, 30, 8, 9, 1, 4, 5]] * 3, [asked(i + 2) for i in range(3)], use_tqdm=False)
    assert seen


def test_tokens_that_are_never_drawn(tiny: Tiny, tiny_path: Path, compared: Compare) -> None:
    """Ids that only the draft model knows: their logits are minus infinity, also where they are kept."""
    llm = tiny(num_blocks=200, speculative_config=drafted_by(tiny_path))
    runner: LaneRunner = llm.engine.executor.worker.lanes["draft"]
    runner.num_drawn = runner._roller._record.num_drawn = 101  # type: ignore[union-attr]
    seen = compared(llm)
    llm.generate([[5 + i, 9, 40] for i in range(8)], [asked(i) for i in range(8)], use_tqdm=False)
    kept = runner._kept.rows[runner._kept.rows.count_nonzero(dim=1) > 0]
    assert max(seen) == 8 and llm.engine.stats.num_failed_steps == 0
    assert len(kept) and kept[:, 101:].eq(-np.inf).all() and kept[:, :101].isfinite().any(1).all()


def test_transformers_code_rolls_token_by_token(tiny: Tiny, tiny_path: Path) -> None:
    """A model that torch carries out has no list of kernels; what it gives is the same."""
    params = [asked(i) for i in range(6)]
    prompts = [[5 + i, 9, 40] for i in range(6)]
    texts = []
    for own in ({}, {"model_impl": "transformers"}):
        llm = tiny(num_blocks=200, speculative_config=drafted_by(tiny_path, **own))
        assert (llm.engine.executor.worker.lanes["draft"]._roller is None) == bool(own)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
        assert llm.engine.stats.drafts["draft_model"].num_accepted > 10
    assert texts[0][::2] == texts[1][::2], "those that are coupled"


def test_what_cannot_be_is_refused(tiny: Tiny, tiny_path: Path) -> None:
    llm = tiny(speculative_config=drafted_by(tiny_path))
    runner: LaneRunner = llm.engine.executor.worker.lanes["draft"]
    record = runner._roller._record  # type: ignore[union-attr]
    llm.generate([[5, 9, 40]], asked(1), use_tqdm=False)
    record.chains = None
    with pytest.raises(KernelError, match="pd_roll: chains is NULL"):
        runner.backend.context.roll(record)  # type: ignore[attr-defined]


@pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")
def test_what_a_roll_is_given_is_on_its_device(device: Tiny, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the thread's: another rank of this process has one beside it."""
    library = load(EMULATED_DEVICE)
    library.functions.pd_emulate_device(0)
    other, begin = library.context(0, 0), DeviceBackend.__init__
    assert other.num_threads == 3 and library.functions.pd_emulate_in_use(0) == 1

    def on_second(own: DeviceBackend, library: Library, dtype: torch.dtype, *rest: Any) -> None:
        begin(own, library, dtype, rest[0], rest[1], 1, *rest[3:])

    monkeypatch.setattr(DeviceBackend, "__init__", on_second)
    llm = device(speculative_config=drafted_by(tiny_path))
    llm.generate([[5, 9]], SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.4), use_tqdm=False)
    assert llm.engine.stats.drafts["draft_model"].num_drafts > 0 and llm.engine.stats.num_failed_steps == 0


def test_a_slot_that_nobody_wrote_is_seen(tiny: Tiny, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debug builds, of which these tests are, look at the logits of each round."""
    llm = tiny(speculative_config=drafted_by(tiny_path))
    runner: LaneRunner = llm.engine.executor.worker.lanes["draft"]
    roller = runner._roller
    assert isinstance(roller, NativeRoller)
    carry_on, problems = roller.carry_on, list[str]()

    def poisoned(forward: LaneForward, *rest: Any) -> None:
        runner.cache.k.fill_(float("nan"))
        try:
            carry_on(forward, *rest)
        except KernelError as error:
            problems.append(str(error))
        runner.cache.k.fill_(0.0)

    monkeypatch.setattr(roller, "carry_on", poisoned)
    llm.generate([[5, 9, 40]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert problems[0] == "pd_roll: logits are NaN: a row read a slot that no row had written"
