"""Engines on CUDA's kernels whose weights are in blocks, or alone in int8: the processor's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.kernels.library import CUDA
from pagedec.kernels.native_weight import NativeWeight
from tests.kernels import cuda_library
from tests.models.checkpoints import Checkpoint, make_checkpoint, variant

MIXED = variant("mixed", hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=8,
                head_dim=64, vocab_size=160, num_hidden_layers=1, length=8)  # fmt: skip
"""Of a Q4_K_M file's formats: blocks of 256 values, and of v others than of q and k."""
PROMPTS = [[5, 9, 77, 31], list(range(3, 45))]
PARAMS: list[Any] = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=3),
]


@pytest.fixture(params=cuda_library.cases())
def isa(request: pytest.FixtureRequest) -> str:
    if request.param == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(MIXED, tmp_path_factory.mktemp("mixed"))


def said(path: Path, isa: str | None, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, set[str]]:
    """Tokens, and what weights are packed as: their kinds, and how many formats."""
    with monkeypatch.context() as patch:
        if isa is not None:
            patch.setenv("PAGEDEC_ISA", isa)
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 40, **arguments}
        llm = LLM(str(path), **settings)
    with llm:
        assert isa is None or llm.engine.executor.geometry.isa == isa
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        kinds = set()
        if "tensor_parallel_size" not in arguments:
            model = llm.engine.executor.worker.lanes["target"].model  # type: ignore[attr-defined]
            weights = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
            assert all(isinstance(weight, NativeWeight) for weight in weights)
            kinds = {weight.quantization.name + str(len(weight.segments or ())) for weight in weights}
    return [[answer.token_ids for answer in output.outputs] for output in outputs], kinds


def test_a_file_in_blocks(isa: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = pytest.importorskip("gguf").GGMLQuantizationType.Q4_0  # not there where gpu_check.sh runs
    from tests.models.gguf_files import write_model

    path = write_model(tiny_path, tmp_path / "tiny.gguf", form)
    got = said(path, isa, monkeypatch, quantization="gguf")
    assert got == said(path, None, monkeypatch, quantization="gguf") and got[1] == {"BLOCKS1"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2])
def test_formats_that_differ_within_a_weight(
    isa: str, world: int, mixed: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also cut by ranks."""
    monkeypatch.setenv("PAGEDEC_LINK", "memory")
    own = {"quantization": "gguf", "load_format": "dummy"}
    ranks = {"tensor_parallel_size": world} if world > 1 else {}
    tokens, kinds = said(mixed.path, isa, monkeypatch, **own, **ranks)
    assert tokens == said(mixed.path, None, monkeypatch, **own)[0] and (world > 1 or kinds == {"BLOCKS1", "BLOCKS2"})


@pytest.mark.parametrize(("form", "kind"), [("int4_zero", "BLOCKS1"), ("int8_weight_only", "INT8_WEIGHT_ONLY0")])
def test_integers_made_of_numbers(
    isa: str, form: str, kind: str, mixed: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = said(mixed.path, isa, monkeypatch, quantization=form)
    assert got == said(mixed.path, None, monkeypatch, quantization=form) and got[1] == {kind}


def test_floats_of_8_bits_are_numbers_there(
    isa: str, mixed: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models.test_fp8_weights import fp8_checkpoint

    path = fp8_checkpoint(mixed.path, tmp_path / "fp8", "rectangles")
    tokens, kinds = said(path, isa, monkeypatch, quantization="fp8")
    assert kinds == {"PLAIN0"} and said(path, None, monkeypatch, quantization="fp8") == (tokens, {"FP80"})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["int4", "int8_weight_only"])
def test_a_row_has_its_bits_whatever_stands_beside_it(
    isa: str, form: str, mixed: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16: together, and in parts of a prompt beside one another."""
    own = {"quantization": form, "dtype": "float16"}
    whole = said(mixed.path, isa, monkeypatch, **own)
    assert said(mixed.path, isa, monkeypatch, **own, max_num_batched_tokens=17) == whole
