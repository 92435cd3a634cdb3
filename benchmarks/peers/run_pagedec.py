"""pagedec itself: python run_pagedec.py MODEL QUANTIZATION (see compare.py); quantization: none, int8 or gguf."""

from __future__ import annotations

import sys
from typing import Any

from talk import own_output, serve

from pagedec import LLM, SamplingParams, __version__

answers = own_output()
quantization = None if sys.argv[2] == "none" else sys.argv[2]
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, quantization=quantization)


def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in new]
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]


def score(windows: list[list[int]]) -> list[list[float]]:
    from perplexity import score

    return [score(llm, [window]) for window in windows]


serve(answers, f"pagedec {__version__}", generate, score)
