"""gpt-oss as it is published, in kernels of our own: experts in MXFP4, all of a layer's in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, SamplingParams
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats.dummy import DummySource
from pagedec.formats.stacked_experts import StackedExperts, dequantized
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import BlockFormat, Quantization, available_isas, load, loadable_isas
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.native_weight import NativeExperts
from pagedec.models.model import Model
from pagedec.runtime.loading import load_model
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.coded_checkpoints import WEIGHTS, Coded, make_coded
from tests.models.test_hosted import BACKEND, relative_error
from tests.models.weights import packed_weights
from tests.support import all_logits

pytestmark = pytest.mark.skipif(not available_isas(), reason="compiled kernels have weights that are looked at")
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Coded:
    return make_coded(tmp_path_factory.mktemp("gpt_oss"))


def loaded(path: Path, isa: str = BACKEND, quantization: str | None = None) -> Model:
    """With experts as numbers, or as the backend has them."""
    config = EngineConfig.from_kwargs(model=str(path), dtype="float32", skip_tokenizer_init=True)
    if isa == "reference":
        return load_model(config.model, ReferenceBackend(torch.float32, quantization)).model
    return load_model(config.model, NativeBackend(load(isa), torch.float32, quantization)).model


def test_codes_become_their_numbers(checkpoint: Coded) -> None:
    path, tokens, want = checkpoint
    assert relative_error(all_logits(loaded(path), tokens, chunk=23), want) < 1e-5


@pytest.mark.parametrize("isa", loadable_isas())
def test_codes_stay_codes(checkpoint: Coded, isa: str) -> None:
    """In a quarter of the memory of bf16, and a step of logits that lie as near as inputs of 8 bits allow."""
    path, tokens, want = checkpoint
    model = loaded(path, isa, "mxfp4")
    logits = all_logits(model, tokens, chunk=23)
    assert float((logits - want).norm() / want.norm()) < 0.05
    torches = all_logits(loaded(path, "reference", "mxfp4"), tokens[:40])
    assert relative_error(logits[:40], torches) < 1e-5
    kept = [weight for weight in packed_weights(model) if isinstance(weight, NativeExperts)]
    assert len(kept) == 4 and all(weight.each.quantization == Quantization.BLOCKS for weight in kept)


def test_a_published_checkpoint_stays_as_it_is(checkpoint: Coded) -> None:
    """Unless it is told otherwise."""
    for asked, has in ((None, "mxfp4"), ("mxfp4", "mxfp4"), ("off", None), ("int8", "int8")):
        with LLM(str(checkpoint[0]), quantization=asked, skip_tokenizer_init=True, num_blocks=16) as llm:
            runner = llm.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
            assert runner.backend.quantization == has
            [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 4


def test_dummy_experts_are_in_it_and_nothing_else(checkpoint: Coded, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_blocks=16) as llm:
        model = llm.engine.executor.worker.lanes["target"].model  # type: ignore[attr-defined]
        for weight in packed_weights(model):
            if isinstance(weight, NativeExperts):
                assert weight.each.segments is not None and weight.each.segments[0].format == BlockFormat.MXFP4
            else:
                assert weight.quantization == Quantization.PLAIN


def test_what_is_no_expert_s_is_passed_on_as_it_is() -> None:
    query, stack = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
    source = DummySource({query: (64, 256), stack: (2, 256, 64)}, torch.float32)
    adapted, blocks = StackedExperts(source), source.blocks(query)
    assert adapted.names() == [query, *(f"{stack[:-9]}{e}.down_proj.weight" for e in range(2))]
    own = adapted.blocks(query)
    assert own is not None and blocks is not None and torch.equal(own.data, blocks.data)
    assert adapted.blocks(adapted.names()[1]) is None and adapted.shape(adapted.names()[1]) == (64, 256)


def test_scales_that_blocks_do_not_hold_make_numbers(checkpoint: Coded, tmp_path: Path) -> None:
    path, tokens, _ = checkpoint
    stored = load_file(path / WEIGHTS)
    stored[f"{EXPERTS}.down_proj_scales"][0, 0, 0] = 90
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(stored, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = loaded(tmp_path, quantization="mxfp4")
    kinds = [weight.each.quantization for weight in packed_weights(model) if isinstance(weight, NativeExperts)]
    assert kinds == [Quantization.BLOCKS] * 3 + [Quantization.PLAIN]
    assert not all_logits(model, tokens[:20]).isnan().any()


def test_every_code_and_scale_is_what_transformers_has() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(1, 16, 254, 16).contiguous()
    scales = torch.arange(254, dtype=torch.uint8).expand(1, 16, 254).contiguous()
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)[0].T
    assert torch.equal(dequantized(codes[0], scales[0]), theirs.contiguous())
    assert dequantized(codes[0, :, :1], torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("arguments", [{}, {"quantization": "off"}, {"executor": "process", "tensor_parallel_size": 2}])
def test_neighbours_change_no_answer(checkpoint: Coded, arguments: dict[str, Any]) -> None:
    assert_neighbours_change_nothing(checkpoint[0], checkpoint[1], dtype="float32", **arguments)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {f"{EXPERTS}.down_proj_scales": None},
            f"lacks tensor {EXPERTS}.down_proj_scales of {EXPERTS}.down_proj_blocks",
        ),
        ({f"{EXPERTS}.down_proj_blocks": None}, "missing: .*down_proj.weight"),
        ({f"{EXPERTS}.down_proj_scales": torch.int8}, "down_proj_scales is torch.int8; it must be bytes"),
        ({f"{EXPERTS}.down_proj_scales": "less"}, "there must be 16 bytes for each scale"),
        ({f"{EXPERTS}.down_proj": "more"}, f"has {EXPERTS}.down_proj both as numbers and in MXFP4"),
    ],
    ids=["no scales", "no codes", "other scales", "fewer scales", "twice"],
)
def test_what_cannot_be_read_is_named(checkpoint: Coded, tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    path = checkpoint[0]
    stored = load_file(path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    for name, how in changed.items():
        match how:
            case None:
                del stored[name]
            case "less":
                stored[name] = stored[name][:, 1:].contiguous()
            case "more":
                experts, outputs, groups, _ = stored[f"{name}_blocks"].shape
                stored[name] = torch.ones(experts, 32 * groups, outputs)
            case dtype:
                stored[name] = stored[name].to(dtype)
    save_file(stored, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=told):
        loaded(tmp_path)


def test_another_activation_is_named(checkpoint: Coded) -> None:
    from pagedec.formats.files import read_json_object
    from pagedec.models.registry import from_hf_config

    config = read_json_object(checkpoint[0] / "config.json", "the model configuration")
    with pytest.raises(InvalidArgument, match=r"swiglu_limit is 5.0: must be 7.0"):
        from_hf_config({**config, "swiglu_limit": 5.0})
    with pytest.raises(InvalidArgument, match=r"quantization is 'awq': must be the checkpoint's"):
        LLM(str(checkpoint[0]), quantization="awq", dtype="float32", skip_tokenizer_init=True)
