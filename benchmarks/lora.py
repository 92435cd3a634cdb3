"""What low-rank adapters cost in steps and prompts: engines without places for any and with them, by turns in one run.

    python benchmarks/lora.py [--batch 1 8 16 64] [--rank 16] [--prefill 512 1024] [--rounds 15]
    python benchmarks/lora.py --hidden 4096 --inner 14336 --layers 2 --batch 1 8 16 --prefill 512

"none" is an engine without places; "unused" has them, and no row has an adapter; in "one" all rows have the same one,
in "each" every row one of its own, of all linear layers. A step gives every sequence a token; a prompt has one adapter.
"cost" is the step over that of "none"; beside it what bytes allow: the weights and the adapters that are asked for,
over the weights. With sizes the model is Llama's, of so many layers and random weights.
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
from small_weights import packed_weights, prompts_of

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.core.adapter_places import Adapter
from pagedec.models.adapters import targets
from tests.formats.lora_files import write_lora

FORMS = ("none", "unused", "one", "each")


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
        "hidden_size": arguments.hidden, "intermediate_size": arguments.inner, "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 128, "num_key_value_heads": max(1, arguments.hidden // 512),
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip


class Engine:
    """One form: how many adapters it has, and whose rows are whose."""

    def __init__(self, form: str, model: dict[str, Any], places: int, rank: int, longest: int) -> None:
        own = {} if form == "none" else {"enable_lora": True, "max_loras": places, "max_lora_rank": rank}
        self.form, self.count = form, 0
        self.adapters: list[Adapter | None] = [None]
        self.llm = LLM(**model, dtype="bfloat16", max_model_len=longest, enable_prefix_caching=False, **own)
        self.engine = self.llm.engine
        self.runner = self.engine.executor.worker.lanes["target"]  # type: ignore[attr-defined]
        self.weight_bytes = sum(weight.data.nbytes for weight in packed_weights(self.runner.model))

    def take(self, folders: list[Path]) -> None:
        """Have these adapters, of which rows get one after the other."""
        named = [LoRARequest(folder.name, i, str(folder)) for i, folder in enumerate(folders, 1)]
        self.adapters = [self.engine.adapters.read(lora) for lora in named]

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        for i, prompt in enumerate(prompts):
            self.count += 1
            own = self.adapters[i % len(self.adapters)]
            self.engine.add(self.engine.admit(f"{self.form} {self.count}", prompt, params, adapter=own))

    def fill(self, length: int) -> None:
        """Step until all prompts are evaluated."""
        branches = [branch for request in self.engine.scheduler.requests for branch in request.branches]
        while any(len(branch.tables) and branch.table.length < length for branch in branches):
            self.engine.step()

    def clear(self) -> None:
        for request in list(self.engine.scheduler.requests):
            self.engine.abort(request.id)

    def prompt(self, length: int) -> Callable[[], None]:
        def run() -> None:
            self.add(prompts_of(self.runner.model.arch, 1, length), 1)
            while self.engine.scheduler.requests:
                self.engine.step()

        return run


def write_adapters(arch: Any, folder: Path, number: int, rank: int) -> tuple[list[Path], int]:
    """Adapters of all linear layers, and how many bytes each is of."""
    folders, size = [], 0
    for i in range(number):
        pairs, generator = {}, torch.Generator().manual_seed(i)
        for layer in range(arch.num_layers):
            for name, target in targets(arch, layer).items():
                k = arch.intermediate_size if name == "down" else target.k
                for module, outputs in zip(target.modules, target.outputs, strict=True):
                    halves = ((rank, k), (len(outputs), rank))
                    a, b = (torch.randn(shape, generator=generator, dtype=torch.float32) * 0.01 for shape in halves)
                    pairs[f"model.layers.{layer}.{module}"] = a.bfloat16(), b.bfloat16()
        folders.append(write_lora(folder / f"adapter {i}", pairs, alpha=rank))
        size = sum(half.nbytes for pair in pairs.values() for half in pair)
    return folders, size


def lines_of(
    name: object, num_tokens: int, timings: dict[str, Timing], bytes_of: dict[str, float]
) -> list[list[object]]:
    lines: list[list[object]] = []
    for form, timing in timings.items():
        cost, spread = ratio(timing, timings["none"])
        own = [f"{timing.median * 1e3:.2f}", f"{num_tokens / timing.median:.1f}", f"{cost:.3f} ± {spread:.3f}"]
        lines.append([name, form, *own, f"{bytes_of[form]:.3f}" if form in bytes_of else ""])
    return lines


def decode(engines: list[Engine], batch: int, length: int, rounds: int, adapter_bytes: int) -> list[list[object]]:
    for each in engines:
        each.add(prompts_of(each.runner.model.arch, batch, length), rounds + 64)
        each.fill(length)
    timings = interleave({each.form: each.engine.step for each in engines}, rounds, warmup=2)
    for each in engines:
        each.clear()
    share = adapter_bytes / engines[0].weight_bytes
    return lines_of(batch, batch, timings, {"none": 1.0, "unused": 1.0, "one": 1 + share, "each": 1 + batch * share})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("hidden", 0), ("inner", 0), ("layers", 2), ("rank", 16), ("prompt", 32), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    arguments = parser.parse_args()
    longest = max(arguments.prompt + arguments.rounds + 66, *arguments.prefill) + 2
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place), dict[str, Any]()
        if arguments.hidden:
            (folder / "config.json").write_text(json.dumps(config_of(arguments)))
            model = {"model": place, "load_format": "dummy", "skip_tokenizer_init": True}
        most = max(arguments.batch)
        engines = [
            Engine(form, model, most if form == "each" else 1, arguments.rank, longest)
            for form in ("none", *(form for form in arguments.forms if form != "none"))
        ]
        context = engines[0].runner.backend.context
        number = most if "each" in arguments.forms else 1
        folders, size = write_adapters(engines[0].runner.model.arch, folder, number, arguments.rank)
        for each in engines:
            if each.form in ("one", "each"):
                each.take(folders[: number if each.form == "each" else 1])
        wait_for_huge_pages()
        heading(f"Adapters of rank {arguments.rank}: {context.isa}, {context.num_threads} threads")
        print(f"Weights: {engines[0].weight_bytes / 1e6:.0f} MB, an adapter: {size / 1e6:.1f} MB\n")
        lines = (
            line
            for batch in arguments.batch
            for line in decode(engines, batch, arguments.prompt, arguments.rounds, size)
        )
        table(["batch", "rows' adapters", "step, ms", "tokens/s", "cost", "by bytes"], lines)
        prompts = [each for each in engines if each.form != "each"]
        lines = (
            line
            for length in arguments.prefill
            for line in lines_of(
                length, length, interleave({each.form: each.prompt(length) for each in prompts}, 5), {}
            )
        )
        table(["prompt", "rows' adapters", "ms", "tokens/s", "cost", "by bytes"], lines)


if __name__ == "__main__":
    main()
