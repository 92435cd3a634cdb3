"""Prompts through a Ray Data pipeline, with an engine in each actor.

RAY_ADDRESS names the cluster; without it, one is started here. Needs `pip install 'pagedec[ray-data]'`.
"""

from __future__ import annotations

import sys

import ray

from pagedec import SamplingParams
from pagedec.batch.ray_stage import GenerateStage

PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at", "The opposite of up is"]


def main(model: str = "smollm2") -> None:
    dataset = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
    told = {"model": model, "params": SamplingParams(temperature=0, max_tokens=8), "num_blocks": 64}
    answered = dataset.map_batches(GenerateStage, fn_constructor_kwargs=told, concurrency=1, num_cpus=1, batch_size=2)
    for row in answered.take_all():
        print(repr(row["prompt"]), "->", repr(row["text"]), row["finish_reason"], row["error"] or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
