"""Beam search on a device: Llama-3.1-8B with random weights, requests of four beams each, all in one batch.

    python benchmarks/gpu_beam.py [--smoke] [--isa NAME] [--dtype float16] [--requests 100] [--width 4]

As a batch job: prompts of 256 random tokens and answers of 256, wall clock of one `LLM.generate`, prompts included, and
beside it as many greedy requests as there are beams. Tokens are those of the best answer of each request, so a search
of four beams computes four times as many. The field's figure: 552 tokens a second for such a job on an H100, with beams
outside of the engine and a prefix cache (vLLM's issue 8726).
"""

from __future__ import annotations

import random
import time

from common import table
from gpu_common import Device, parser_of
from gpu_decode import load

from pagedec import LLM, BeamSearchParams, SamplingParams

PROMPT, ANSWER = 256, 256
PUBLISHED = 552  # tokens a second


def prompts(llm: LLM, count: int, length: int) -> list[dict[str, list[int]]]:
    vocab, rng = llm.engine.executor.worker.lanes["target"].model.arch.vocab_size, random.Random(count)
    return [{"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(length)]} for _ in range(count)]


def line(llm: LLM, name: str, count: int, params: BeamSearchParams | SamplingParams, length: int) -> list[object]:
    work, stats = prompts(llm, count, length), llm.engine.stats
    host, steps = stats.plan_seconds + stats.settle_seconds, stats.num_steps
    began = time.perf_counter()
    outputs = llm.generate(work, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    host, steps = stats.plan_seconds + stats.settle_seconds - host, stats.num_steps - steps
    rate = tokens / seconds
    numbers = [f"{seconds:.3f}", steps, f"{seconds / steps * 1e3:.2f}", f"{host / steps * 1e3:.2f}", f"{rate:.0f}"]
    return [name, count, *numbers, f"{rate / PUBLISHED:.2f}" if isinstance(params, BeamSearchParams) else "-"]


def main() -> None:
    parser = parser_of(__doc__, has_dtype=True)
    parser.add_argument("--requests", type=int, help="of beams (100)")
    parser.add_argument("--width", type=int, default=4, help="beams of each")
    arguments = parser.parse_args()
    device = Device(arguments)
    prompt, answer = (PROMPT, ANSWER) if not device.smoke else (20, 6)
    count, width = arguments.requests or (100 if not device.smoke else 3), arguments.width
    device.head(f"Beam search: Llama-3.1-8B's shape, random weights, {device.kind}")
    llm = load(device.backend.name, arguments.dtype, device.smoke, count * width * (prompt + answer + 32), most=1024)
    beams = BeamSearchParams(beam_width=width, max_tokens=answer, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    cases = [(f"{width} beams", count, beams), ("greedy", count * width, plain)]
    for case in cases:  # kernels are loaded, and lists recorded, when they are first used
        llm.generate(prompts(llm, 2, 8), case[2].clone(max_tokens=4), use_tqdm=False)
    columns = ["requests", "how many", "seconds", "steps", "step ms", "host ms", "tokens/s", f"of {PUBLISHED}"]
    table(columns, (line(llm, *case, prompt) for case in cases))
    llm.close()


if __name__ == "__main__":
    main()
