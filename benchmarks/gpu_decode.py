"""Whole steps of an engine on a device: Llama-3.1-8B with random weights, next to a copy of what a step must read.

    python benchmarks/gpu_decode.py [--smoke] [--isa NAME] [--dtype float16] [--attention-backend NAME]
                                    [--preset NAME] [--layers N] [--against FOLDER ...]

A step gives every sequence of the batch a token, planned while the one before runs or behind its answers (`ahead`).
`device`: its program alone, repeated, without the read-out; `host`: plan and settle; `waits`: the host for the device;
`floor`: weights and KV at the speed of a copy, of experts as many as the last step's last layer asked, in every layer.
Weights are parts of one random tensor: what they are costs no time, and making 16 GB of them would; so experts are
alike, and who asks for which is not. With another package's attention blocks are of 256 tokens; to compare,
--block-size 256 gives our own kernel the same. The kernels of other builds have an engine each, one behind the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import Timing, table
from gpu_common import Device, parser_of
from small_weights import packed_weights

from pagedec import LLM, SamplingParams
from pagedec.config import ATTENTION_BACKENDS, ATTENTION_PACKAGES
from pagedec.engine.engine import Engine
from pagedec.formats import dummy
from pagedec.kernels.native_weight import NativeExperts
from pagedec.models.architecture import Architecture
from pagedec.models.presets import PRESETS
from pagedec.runtime.runner import LaneRunner

MODEL = "llama-3.1-8b"
SMALL = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}
STEPS = 40
MOST = 64  # sequences


class OneTensor:
    """In place of dummy weights: the beginning of one random tensor for all of them."""

    def __init__(self) -> None:
        self._values = torch.empty(0)

    def __call__(self, seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if len(self._values) < size or self._values.dtype != dtype:
            some = (0.02 * torch.randn(min(size, 1 << 22), generator=torch.Generator().manual_seed(seed))).to(dtype)
            self._values = some.repeat(-(-size // len(some)))
        return self._values[:size].view(shape)


def weight_bytes(runner: LaneRunner) -> int:
    """That a step like the last one reads: all but the embedding, and of experts those that were asked."""
    weights = list(packed_weights(runner.model))
    sizes = [weight.stride if isinstance(weight, NativeExperts) else weight.data.nbytes for weight in weights]
    if not any(isinstance(weight, NativeExperts) for weight in weights):
        return sum(sizes)
    first = runner.buffers.mixture.routes.first
    found = np.empty(first.shape, np.int32)
    runner.backend.context.read_memory(found.ctypes.data, first.data_ptr(), found.nbytes)
    asked = int((np.diff(found) > 0).sum())
    return sum(
        size * asked if isinstance(weight, NativeExperts) else size for size, weight in zip(sizes, weights, strict=True)
    )


def kv_bytes(arch: Architecture, length: int) -> int:
    """That a step reads for a sequence, two bytes a number: of layers with a window, that alone."""
    seen = sum(arch.window(layer, length) or length for layer in range(arch.num_layers))
    return 4 * arch.num_kv_heads * arch.head_dim * seen


def load(
    isa: str,
    dtype: str,
    smoke: bool,
    num_tokens: int,
    backend: str = "auto",
    block_size: int = 16,
    most: int = 256,
    preset: str = MODEL,
    layers: int | None = None,
) -> LLM:
    """The model in an engine with room for so many tokens, each sequence's last block not counted; most: branches."""
    os.environ["PAGEDEC_ISA"] = isa
    dummy._random_normal = OneTensor()
    settings = {
        "load_format": "dummy",
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "num_blocks": -(-num_tokens // block_size) + (0 if block_size == 16 else MOST),
        "block_size": block_size,
        "max_num_seqs": most,
        "attention_backend": backend,
    }
    config = PRESETS[preset] | (SMALL if smoke else {}) | ({} if layers is None else {"num_hidden_layers": layers})
    lengths = {"max_model_len": 256} if smoke else {"max_model_len": 8192, "max_num_batched_tokens": 2048}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return LLM(folder, **lengths, **settings)


def begin(engine: Engine, batch: int, prompt: int) -> float:
    """Evaluate the prompts; seconds."""
    rng, vocab = random.Random(batch), engine.executor.worker.lanes["target"].model.arch.vocab_size
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=STEPS + 64)
    for i in range(batch):
        tokens = [rng.randrange(3, vocab) for _ in range(prompt)]
        engine.add(engine.admit(f"batch {batch}, {i}", tokens, params))
    began = time.perf_counter()
    while any(
        len(branch.tables) and branch.table.length < prompt for r in engine.scheduler.requests for branch in r.branches
    ):
        engine.step()
    return time.perf_counter() - began


def line(device: Device, llm: LLM, build: str, batch: int, prompt: int, is_ahead: bool, copy: float) -> list[object]:
    engine = llm.engine
    engine.drain()
    engine.steps.is_ahead = is_ahead
    runner = engine.executor.worker.lanes["target"]
    context, arch = runner.backend.context, runner.model.arch
    filled, steps = begin(engine, batch, prompt), 3 if device.smoke else STEPS
    engine.step()
    stats, seconds = engine.stats, []
    host, waits = stats.plan_seconds + stats.settle_seconds, stats.execute_seconds
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    host = (stats.plan_seconds + stats.settle_seconds - host) / steps
    waits, alone = (stats.execute_seconds - waits) / steps, []
    engine.drain()
    read = weight_bytes(runner)
    for _ in range(3 if device.smoke else 15):
        context.wait()
        began = time.perf_counter()
        runner.programs.whole.run()
        context.wait()
        alone.append(time.perf_counter() - began)
    for request in list(engine.scheduler.requests):
        engine.abort(request.id)
    kv = batch * kv_bytes(arch, prompt + steps // 2)
    step, floor = Timing(tuple(seconds)), (read + kv) / copy * 1e-9
    return [
        build, batch, prompt, "yes" if is_ahead else "no", f"{batch * prompt / filled:.0f}", f"{step.median * 1e3:.3f}",
        f"{batch / step.median:.0f}", f"{Timing(tuple(alone)).median * 1e3:.3f}", f"{host * 1e3:.3f}",
        f"{waits * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{step.median / floor:.2f}", f"{step.spread:.3f}",
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, has_dtype=True, has_builds=True)
    parser.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    parser.add_argument("--block-size", type=int, help="tokens in a block (16; with another package's attention, 256)")
    parser.add_argument("--preset", choices=tuple(PRESETS), default=MODEL, help="whose shape (%(default)s)")
    parser.add_argument("--layers", type=int, help="as many of them (all)")
    arguments = parser.parse_args()
    device = Device(arguments)
    shape = arguments.preset if arguments.layers is None else f"{arguments.preset}, {arguments.layers} layers"
    copy = device.head(f"Decoding: {shape}, random weights, {device.kind}")
    cases = [(1, 1024), (16, 1024), (64, 1024)] if not device.smoke else [(1, 20), (3, 20)]
    columns = ["build", "batch", "prompt", "ahead", "prefill tokens/s", "step ms", "tokens/s"]
    columns += ["device ms", "host ms", "waits ms", "floor ms", "step / floor", "spread"]
    table(columns, lines(device, arguments, cases, copy))


def lines(
    device: Device, arguments: argparse.Namespace, cases: list[tuple[int, int]], copy: float
) -> Iterator[list[object]]:
    # with what all may still need in view, a scheduler holds the last ones back where there is just enough
    num_tokens = max(batch * (prompt + STEPS + 256) for batch, prompt in cases)
    backend = arguments.attention_backend
    block_size = arguments.block_size or (256 if backend in ATTENTION_PACKAGES else 16)
    for folder in (None, *arguments.against):
        if folder is not None:
            os.environ["PAGEDEC_LIB_DIR"] = str(folder.resolve())
        model = {"preset": arguments.preset, "layers": arguments.layers}
        llm = load(device.backend.name, arguments.dtype, device.smoke, num_tokens, backend, block_size, **model)
        build = "this" if folder is None else folder.resolve().name
        for case in cases:
            for is_ahead in (False, True):
                yield line(device, llm, build, *case, is_ahead, copy)
        llm.close()


if __name__ == "__main__":
    main()
