"""Transformers reads the same GGUF files: names, order and bits agree with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, get_tensor_name_map, quants
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.reader import GgufSource
from pagedec.formats.source import check_weights
from pagedec.models.registry import architecture_of_gguf

WriteGguf = Callable[..., Path]


@pytest.mark.long
def test_the_embedded_model_by_the_processor_of_transformers(smollm2: Path) -> None:
    """All 272 tensors, renamed by the gguf package and reordered by transformers' code, equal ours in every bit."""
    source = GgufSource(smollm2)
    arch = architecture_of_gguf(source.header)
    check_weights(source, arch.weight_shapes(), arch.optional_weights())
    names = {}
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, arch.num_layers)
    for name in source.names():
        stem, _, suffix = name.rpartition(".")
        names[f"{table.get_name(stem)}.{suffix}"] = name
    heads = {"num_attention_heads": arch.num_attention_heads, "num_key_value_heads": arch.num_kv_heads}
    processor = LlamaTensorProcessor(config=heads)
    reader = GGUFReader(smollm2)
    assert len(reader.tensors) == 272
    for tensor in reader.tensors:
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        expected = torch.from_numpy(processor.process(weights, tensor.name).weights.copy())
        assert torch.equal(source.load(names[tensor.name]).float(), expected.float()), tensor.name


@pytest.mark.long
def test_the_embedded_model_as_transformers_loads_it(smollm2: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32)
    state = model.state_dict()
    source = GgufSource(smollm2)
    assert set(state) - set(source.names()) == {"lm_head.weight"}
    assert all(torch.equal(state[name], source.load(name).float()) for name in source.names())


def test_a_tiny_model_as_transformers_loads_it(write_gguf: WriteGguf) -> None:
    """The same file through from_pretrained and through ours, and both equal to the model it was made from."""
    torch.manual_seed(5)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    original = LlamaForCausalLM(config).state_dict()
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    stored: dict[str, object] = {}
    for name, value in original.items():
        stem, _, suffix = name.rpartition(".")
        rows = value.numpy()
        for part, num_heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                rows = rows.reshape(num_heads, 2, 4, 32).swapaxes(1, 2).reshape(rows.shape)
        stored[f"{table.get_name(stem)}.{suffix}"] = rows
    path = write_gguf(stored | {"blk.1.ffn_down.weight": (stored["blk.1.ffn_down.weight"], GGMLQuantizationType.Q8_0)})
    theirs = LlamaForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).state_dict()
    source = GgufSource(path)
    arch = architecture_of_gguf(read_gguf_header(path))
    assert not arch.tie_word_embeddings
    check_weights(source, arch.weight_shapes())
    assert set(theirs) == set(source.names())
    for name in source.names():
        assert torch.equal(source.load(name), theirs[name]), name
        if name != "model.layers.1.mlp.down_proj.weight":
            assert torch.equal(source.load(name), original[name]), name
