"""OpenVINO GenAI's continuous batching: python run_openvino.py FOLDER PRECISION THREADS (see compare.py)."""

from __future__ import annotations

import sys

import numpy as np
from talk import own_output, serve

answers = own_output()
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402

folder, precision, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
scheduling = genai.SchedulerConfig()
scheduling.cache_size, scheduling.max_num_seqs, scheduling.max_num_batched_tokens = 3, 64, 512
scheduling.dynamic_split_fuse, scheduling.enable_prefix_caching = True, False
# By itself it keeps KV in 8 bits; beside bf16 it gets bf16, in 4 bits what it takes by itself. Where bf16 are not
# multiplied it computes in fp32 whatever it is told, and takes no KV of another kind.
computes = "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": computes}
if precision == "bf16":
    properties["KV_CACHE_PRECISION"] = computes
pipeline = genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)


def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    configs = []
    for count in new:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        configs.append(config)
    results = pipeline.generate([openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts], configs)
    return [list(result.m_generation_ids[0]) for result in results]


serve(answers, f"OpenVINO GenAI {genai.get_version()}, OpenVINO {openvino.get_version()}, in {computes}", generate)
