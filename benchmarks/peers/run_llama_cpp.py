"""llama.cpp by its C interface: python run_llama_cpp.py FILE THREADS (see compare.py).

Steps are made as its server makes them: a token of every answer, then as much of the prompts as n_batch leaves; one
KV cache for all. Greedy is numpy's argmax over the logits of the step.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from talk import own_output, serve

answers = own_output()
import llama_cpp as llama  # noqa: E402

BATCH, SEQUENCES, CELLS = 512, 64, 64 * 1280
llama.llama_backend_init()
model_params, params = llama.llama_model_default_params(), llama.llama_context_default_params()
model = llama.llama_model_load_from_file(sys.argv[1].encode(), model_params)
assert model, f"llama.cpp does not load {sys.argv[1]}"
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CELLS, BATCH, BATCH, SEQUENCES
params.n_threads = params.n_threads_batch = int(sys.argv[2])
params.kv_unified = True
params.n_outputs_max = BATCH
context = llama.llama_init_from_model(model, params)
assert context, "llama.cpp makes no context"
memory = llama.llama_get_memory(context)
vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
batch = llama.llama_batch_init(BATCH, 0, 1)


def decode(rows: list[tuple[int, int, int, bool]]) -> None:
    """Evaluate (token, position, sequence, whether logits are wanted)."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = sequence
    status = llama.llama_decode(context, batch)
    assert status == 0, f"llama_decode: {status}"


def logits(count: int) -> np.ndarray:
    """Logits [count, vocab_size] of the rows that wanted them."""
    rows = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(rows, shape=(count, vocab_size))


def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    llama.llama_memory_clear(memory, False)
    written: list[list[int]] = [[] for _ in prompts]
    read = [0] * len(prompts)
    while True:
        rows: list[tuple[int, int, int, bool]] = []
        wanted: list[int] = []
        for i, prompt in enumerate(prompts):
            if written[i] and len(written[i]) < new[i]:
                rows.append((written[i][-1], len(prompt) + len(written[i]) - 1, i, True))
                wanted.append(i)
        for i, prompt in enumerate(prompts):
            first, read[i] = read[i], min(len(prompt), read[i] + BATCH - len(rows))
            rows += [(prompt[at], at, i, at == len(prompt) - 1) for at in range(first, read[i])]
            if first < read[i] == len(prompt):
                wanted.append(i)
        if not rows:
            return written
        decode(rows)
        for i, token in zip(wanted, logits(len(wanted)).argmax(-1).tolist(), strict=True):
            written[i].append(token)
            if len(written[i]) == new[i]:
                llama.llama_memory_seq_rm(memory, i, -1, -1)


def score(windows: list[list[int]]) -> list[list[float]]:
    results = []
    for window in windows:
        llama.llama_memory_clear(memory, False)
        scores: list[float] = []
        for first in range(0, len(window), BATCH):
            part = window[first : first + BATCH]
            decode([(token, first + i, 0, True) for i, token in enumerate(part)])
            x = logits(len(part)).astype(np.float64)
            top = x.max(-1, keepdims=True)
            known = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
            after = window[first + 1 : first + len(part) + 1]
            scores += known[np.arange(len(after)), after].tolist()
        results.append(scores)
    return results


serve(answers, f"llama-cpp-python {llama.__version__}", generate, score)
