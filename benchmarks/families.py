"""Steps of families whose models also run through transformers' modeling code: natively and so, the same weights in
bf16, by turns in one run.

    python benchmarks/families.py [--shapes olmo2-1b smollm3-3b granite-2b] [--layers 8] [--batch 1 8] [--rounds 9]
                                  [--forms bf16 int8]

Shapes are those of published models, with fewer layers and random weights. "step" gives each sequence a token; "gain"
is the step, or the prefill, of the modeling code over this one's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import heading, table, wait_for_huge_pages
from experts import Hosted, decode, prefill
from small_weights import Contestant

SHAPES: dict[str, dict[str, Any]] = {
    "olmo2-1b": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0, "max_position_embeddings": 4096, "eos_token_id": 100257,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0, "max_position_embeddings": 65536, "tie_word_embeddings": True,
        "eos_token_id": 128012,
    },
    "granite-2b": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": 49159, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True, "eos_token_id": 0,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
}  # fmt: skip


def compare(name: str, arguments: argparse.Namespace) -> None:
    config = SHAPES[name] | {"num_hidden_layers": arguments.layers, "torch_dtype": "bfloat16"}
    longest = max(arguments.prompt + arguments.rounds + 66, arguments.prefill + 2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(config))
        contestants: list[Any] = [Contestant(form, str(folder), True, longest) for form in arguments.forms]
        first = contestants[0]
        contestants.append(Hosted(config, folder / "hosted", longest))
        wait_for_huge_pages()
        heading(f"{name}, {arguments.layers} layers: {first.context.isa}, {first.context.num_threads} threads")
        nothing, lines = torch.zeros(0), []
        for batch in arguments.batch:
            for number, form, step, rate, *_, gain in decode(
                contestants, batch, arguments.prompt, arguments.rounds, nothing
            ):
                lines.append([number, form, step, rate, gain])
        table(["batch", "form", "step, ms", "tokens/s", "gain"], lines)
        table([f"prefill of {arguments.prefill}", "ms", "tokens/s", "gain"], prefill(contestants, arguments.prefill, 5))
        for each in contestants:
            each.llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--forms", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a sequence before it decodes")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is timed by itself")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for name in arguments.shapes:
        compare(name, arguments)


if __name__ == "__main__":
    main()
