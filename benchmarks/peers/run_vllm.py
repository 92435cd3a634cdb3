"""vLLM on a CPU: python run_vllm.py FOLDER THREADS (see compare.py)."""

from __future__ import annotations

import os
import sys

from talk import own_output, serve

answers = own_output()
folder, threads = sys.argv[1], int(sys.argv[2])
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # in this process, so that nobody waits awake while others are measured
    VLLM_CPU_KVCACHE_SPACE="3",
    VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=str(threads),
)
import vllm  # noqa: E402


def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    serve(answers, f"vLLM {vllm.__version__}", generate)
