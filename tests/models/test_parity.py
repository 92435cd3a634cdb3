"""Tiny models of every supported shape agree with transformers: logits at every position, and greedy texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.config import EngineConfig
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas, load, loadable_isas
from pagedec.kernels.native import NativeBackend
from pagedec.models.model import Model
from pagedec.runtime.loading import load_model
from tests.models.checkpoints import GREEDY_PROMPTS, NUM_NEW_TOKENS, VARIANTS, Checkpoint, Variant, make_checkpoint
from tests.support import all_logits

BACKENDS = ("reference", *loadable_isas())
TEXT_BACKENDS = ("reference", *available_isas()[-1:])  # logits are compared on all of them
RELATIVE = 1e-5  # of the largest logit; measured: 2e-6 at most
RELATIVE_BF16 = 0.05  # in the mean square; measured: 0.03 at most, and a wrong layout or mask is off by about 1
SLOW_LENGTH = 200  # positions of the reference kernels, which go row by row in torch
Checkpoints = Callable[[Variant], Checkpoint]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Each variant is made once, when it is first asked for; the logits of none are nearly flat."""

    @cache
    def make(name: str) -> Checkpoint:
        checkpoint = make_checkpoint(next(own for own in VARIANTS if own.name == name), tmp_path_factory.mktemp(name))
        assert checkpoint.logits.std() > 0.3
        return checkpoint

    return lambda chosen: make(chosen.name)


def load_native(chosen: Variant, checkpoint: Checkpoint, backend: Backend, dtype: str = "float32") -> Model:
    config = EngineConfig.from_kwargs(
        model=str(checkpoint.path), dtype=dtype, max_model_len=chosen.max_model_len, skip_tokenizer_init=True
    )
    return load_model(config.model, backend).model


def make_backend(name: str, dtype: torch.dtype = torch.float32) -> Backend:
    return ReferenceBackend(dtype) if name == "reference" else NativeBackend(load(name), dtype)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and not ours.isnan().any()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chosen", VARIANTS, ids=lambda chosen: chosen.name)
def test_logits_at_every_position(chosen: Variant, backend: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints(chosen)
    model = load_native(chosen, checkpoint, make_backend(backend))
    count = min(len(checkpoint.tokens), SLOW_LENGTH) if backend == "reference" else len(checkpoint.tokens)
    assert relative_error(all_logits(model, checkpoint.tokens[:count]), checkpoint.logits[:count]) < RELATIVE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chosen", [v for v in VARIANTS if v.length < 100], ids=lambda chosen: chosen.name)
def test_logits_in_bfloat16(chosen: Variant, backend: str, checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints(chosen)
    model = load_native(chosen, checkpoint, make_backend(backend, torch.bfloat16), "bfloat16")
    error = all_logits(model, checkpoint.tokens) - checkpoint.logits
    assert float(error.norm() / checkpoint.logits.norm()) < RELATIVE_BF16


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_small_pieces(backend: str, checkpoints: Checkpoints) -> None:
    """A sequence in pieces of 7 rows, across block boundaries."""
    chosen = VARIANTS[1]
    checkpoint = checkpoints(chosen)
    model = load_native(chosen, checkpoint, make_backend(backend))
    assert relative_error(all_logits(model, checkpoint.tokens, chunk=7), checkpoint.logits) < RELATIVE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backend", TEXT_BACKENDS)
@pytest.mark.parametrize("chosen", VARIANTS, ids=lambda chosen: chosen.name)
def test_greedy_texts(chosen: Variant, backend: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints(chosen)
    arguments = {"attention_backend": "reference" if backend == "reference" else "native"}
    if backend != "reference":
        monkeypatch.setenv("PAGEDEC_ISA", backend)
    llm = LLM(
        str(checkpoint.path),
        dtype="float32",
        skip_tokenizer_init=True,
        num_blocks=24,
        max_model_len=chosen.max_model_len,
        **arguments,
    )
    assert llm.engine.executor.worker.lanes["target"].backend.name == backend
    outputs = llm.generate(GREEDY_PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS), use_tqdm=False)
    llm.close()
    assert [output.outputs[0].token_ids for output in outputs] == checkpoint.texts
    for output in outputs:
        [answer] = output.outputs
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 2 else "length")


def test_the_variants_cover_what_they_name(checkpoints: Checkpoints) -> None:
    """Some text ends at the end token, and the sharded model has shards."""
    by_name = {chosen.name: chosen for chosen in VARIANTS}
    sharded, plain = (checkpoints(by_name[name]) for name in ("sharded", "plain"))
    assert len(list(sharded.path.glob("*.safetensors"))) > 3
    assert any(len(text) < NUM_NEW_TOKENS for text in plain.texts)
    assert any(len(set(text)) > 5 for text in plain.texts)
