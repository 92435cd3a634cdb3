"""Steps of a mixture of experts, in each form of its weights, next to a read of what they must read and to the same
weights in transformers' modeling code over our attention, all taking turns in one run.

    python benchmarks/experts.py [--layers 4] [--experts 128] [--chosen 8] [--width 768] [--forms bf16 int8 gguf]
                                 [--batch 1 4 16 64] [--rounds 15] [--prefill 512] [--hosted]
    python benchmarks/experts.py --preset gpt-oss-20b --layers 24 --forms mxfp4 --batch 1 8

The model has the shape of Qwen3-30B-A3B with fewer layers and a small vocabulary, or a preset's, and random weights. A
form is a value of `quantization`, or bf16; mxfp4 is that of a preset that has it. "step" gives each sequence a token;
"read" is a plain read of the weights that all rows take and of the experts that the batch chose in its last step's last
layer, counted for every layer, and of KV. "hosted" runs with `model_impl="transformers"`, from a file of the same
weights, in bf16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Timing, heading, interleave, ratio, table, wait_for_huge_pages
from safetensors.torch import save_file
from small_weights import MOST_READ, Contestant, packed_weights, prompts_of

from pagedec import LLM
from pagedec.formats.dummy import DummySource
from pagedec.kernels.arena import Arena
from pagedec.kernels.native_weight import NativeExperts
from pagedec.models.presets import PRESETS
from pagedec.models.registry import from_hf_config

VOCAB = 32000


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.preset is not None:
        return {**PRESETS[arguments.preset], "num_hidden_layers": arguments.layers}
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": arguments.layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "num_experts": arguments.experts, "num_experts_per_tok": arguments.chosen,
        "moe_intermediate_size": arguments.width, "norm_topk_prob": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


class Mixture(Contestant):
    """An engine of one form, and what of its weights a step reads."""

    def __init__(self, form: str, model: str, max_model_len: int) -> None:
        super().__init__(form, model, True, max_model_len)
        self.runner = self.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        weights = list(packed_weights(self.runner.model))
        self.expert_bytes = sum(weight.stride for weight in weights if isinstance(weight, NativeExperts))
        everything = sum(weight.each.data.nbytes for weight in weights if isinstance(weight, NativeExperts))
        self.dense_bytes = self.weight_bytes - everything

    def num_active(self) -> int:
        """Experts that the last step's last layer asked."""
        first = self.runner.buffers.mixture.routes.first
        return int((first.diff() > 0).sum())


class Hosted:
    """The same weights in transformers' modeling code."""

    form = "hosted"

    def __init__(self, config: dict[str, Any], folder: Path, max_model_len: int) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        source = DummySource(from_hf_config(config).weight_shapes(), torch.bfloat16)
        save_file({name: source.load(name) for name in source.names()}, folder / "model.safetensors")
        self.llm = LLM(
            str(folder), model_impl="transformers", dtype="bfloat16", max_model_len=max_model_len,
            enable_prefix_caching=False, skip_tokenizer_init=True,
        )  # fmt: skip
        self.engine, self.count = self.llm.engine, 0
        self.arch = self.engine.executor.worker.lanes["target"].model.arch  # type: ignore[attr-defined]

    add, fill, clear, run = Contestant.add, Contestant.fill, Contestant.clear, Contestant.run


def decode(contestants: list[Any], batch: int, length: int, rounds: int, memory: torch.Tensor) -> list[list[object]]:
    runs: dict[str, Callable[[], object]] = {}
    reads: dict[str, tuple[float, int]] = {}
    for each in contestants:
        each.add(prompts_of(each.arch, batch, length), rounds + 64)
        each.fill(length)
        each.engine.step()
        runs[each.form] = each.engine.step
        if not isinstance(each, Mixture):
            continue
        active = each.num_active()
        kv = each.kv_token_bytes * batch * (length + rounds // 2)
        num_bytes = each.dense_bytes + active * each.expert_bytes + kv
        part = min(len(memory), int(num_bytes)) & -64
        reads[each.form] = num_bytes / part, active
        runs[f"read {each.form}"] = lambda own=each, part=part: own.context.read_rate(memory.data_ptr(), part)
    timings = interleave(runs, rounds, warmup=2)
    for each in contestants:
        each.clear()
    lines: list[list[object]] = []
    for each in contestants:
        step = timings[each.form]
        gain, spread = ratio(timings[contestants[-1].form], step)
        line: list[object] = [batch, each.form, f"{step.median * 1e3:.2f}", f"{batch / step.median:.1f}"]
        if each.form in reads:
            times, active = reads[each.form]
            floor = Timing(tuple(seconds * times for seconds in timings[f"read {each.form}"].seconds))
            line += [active, f"{floor.median * 1e3:.2f}", f"{ratio(step, floor)[0]:.2f}"]
        else:
            line += ["", "", ""]
        lines.append([*line, f"{gain:.2f} ± {spread:.2f}"])
    return lines


def prefill(contestants: list[Any], length: int, rounds: int) -> list[list[object]]:
    def of(each: Any) -> Callable[[], None]:
        def run() -> None:
            each.add(prompts_of(each.arch, 1, length), 1)
            each.run()

        return run

    timings = interleave({each.form: of(each) for each in contestants}, rounds)
    last = timings[contestants[-1].form]
    lines: list[list[object]] = []
    for each in contestants:
        seconds, (gain, spread) = timings[each.form].median, ratio(last, timings[each.form])
        lines.append([each.form, f"{seconds * 1e3:.0f}", f"{length / seconds:.0f}", f"{gain:.2f} ± {spread:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 4), ("experts", 128), ("chosen", 8), ("width", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--preset", choices=[name for name, values in PRESETS.items() if "num_experts_per_tok" in values]
    )
    parser.add_argument("--forms", nargs="+", default=["bf16", "int8", "gguf"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a sequence before it decodes")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is timed by itself")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hosted", action="store_true", help="transformers' modeling code beside ours")
    arguments = parser.parse_args()
    config = config_of(arguments)
    longest = max(arguments.prompt + arguments.rounds + 66, arguments.prefill + 2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(config))
        contestants: list[Any] = [Mixture(form, str(folder), longest) for form in arguments.forms]
        first = contestants[0]
        if arguments.hosted:
            contestants.append(Hosted(config, folder / "hosted", longest))
        arena = Arena()
        memory = arena.allocate(MOST_READ).fill_(1)
        arena.settle()
        wait_for_huge_pages()
        heading(f"Experts: {first.context.isa}, {first.context.num_threads} threads")
        own = [each for each in contestants if isinstance(each, Mixture)]
        table(
            ["form", "weights that all rows take, MB", "an expert of every layer, MB"],
            [[each.form, f"{each.dense_bytes / 1e6:.0f}", f"{each.expert_bytes / 1e6:.1f}"] for each in own],
        )
        columns = ["batch", "form", "step, ms", "tokens/s", "experts", "read, ms", "step / read", "gain over the last"]
        table(
            columns,
            (
                line
                for batch in arguments.batch
                for line in decode(contestants, batch, arguments.prompt, arguments.rounds, memory)
            ),
        )
        table(
            [f"prefill of {arguments.prefill}", "ms", "tokens/s", "gain over the last"],
            prefill(contestants, arguments.prefill, 5),
        )


if __name__ == "__main__":
    main()
