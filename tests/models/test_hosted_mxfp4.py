"""gpt-oss as it is published: experts in MXFP4, which become numbers when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument, ModelFileError
from tests.engine.neighbours import assert_neighbours_change_nothing
from tests.models.hosted_checkpoints import LENGTH, VOCAB, tiny_config, tiny_model
from tests.models.test_hosted import BACKEND, load_hosted, make_backend, relative_error
from tests.support import all_logits

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of e2m1's codes 0 to 7; the fourth bit is the sign. A code's scale is 2^(byte - 127)."""
BLOCK = 32
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    """A checkpoint, tokens, and their logits with the numbers that its codes stand for."""
    path = tmp_path_factory.mktemp("gpt_oss")
    model, generator = tiny_model(tiny_config("gpt_oss")), torch.Generator().manual_seed(0)
    model.save_pretrained(path)
    stored = load_file(path / WEIGHTS)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        sizes = (experts, outputs, inputs // BLOCK)
        blocks = torch.randint(0, 256, (*sizes, BLOCK // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, sizes, generator=generator, dtype=torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()  # the first of two lies below
        numbers = VALUES[codes & 7] * (1 - 2.0 * (codes >> 3)) * torch.exp2(scales - 127.0)[..., None]
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        model.get_parameter(name).data.copy_(numbers.flatten(-2).transpose(1, 2))
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
    with torch.no_grad():
        return path, tokens.tolist(), model(tokens[None], use_cache=False).logits[0]


def test_codes_become_their_numbers(checkpoint: tuple[Path, list[int], torch.Tensor]) -> None:
    path, tokens, want = checkpoint
    model = load_hosted(path, make_backend(BACKEND))
    assert relative_error(all_logits(model, tokens, chunk=23), want) < 1e-5


def test_no_weights_are_needed_to_try_it(checkpoint: tuple[Path, list[int], torch.Tensor]) -> None:
    llm = LLM(str(checkpoint[0]), load_format="dummy", dtype="float32", skip_tokenizer_init=True, num_blocks=32)
    [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.close()
    assert len(output.outputs[0].token_ids) == 4


def test_what_cannot_be_read_is_named(checkpoint: tuple[Path, list[int], torch.Tensor], tmp_path: Path) -> None:
    path, _, _ = checkpoint
    with pytest.raises(InvalidArgument, match="quantization is 'int8': is not available for models that run through"):
        LLM(str(path), dtype="float32", skip_tokenizer_init=True, quantization="int8")
    with pytest.raises(InvalidArgument, match="quantization is 'awq': must be the checkpoint's"):
        LLM(str(path), dtype="float32", skip_tokenizer_init=True, quantization="awq")
    stored = load_file(path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    name = "model.layers.1.mlp.experts.down_proj"
    for lacking in (f"{name}_scales", f"{name}_blocks"):
        save_file({own: value for own, value in stored.items() if own != lacking}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            load_hosted(tmp_path, make_backend(BACKEND))
    scales = stored[f"{name}_scales"]
    for changed, told in (
        ({f"{name}_scales": scales.to(torch.int8)}, f"1 no bytes: {name}_scales is torch.int8"),
        ({f"{name}_scales": scales[:, 1:].contiguous()}, f"{name} cannot be made: .* does not match scales"),
        ({name: torch.ones(4, 96, 64)}, f"1 both as numbers and in MXFP4: {name}"),
    ):
        save_file({**stored, **changed}, tmp_path / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=told):
            load_hosted(tmp_path, make_backend(BACKEND))


def test_a_family_of_our_own_has_none(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(
        InvalidArgument, match="quantization_config.quant_method is 'mxfp4': is not supported; supported are awq"
    ):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)


def test_neighbours_that_fail_flood_and_leave_change_no_answer(
    checkpoint: tuple[Path, list[int], torch.Tensor],
) -> None:
    assert_neighbours_change_nothing(checkpoint[0], checkpoint[1], dtype="float32")
