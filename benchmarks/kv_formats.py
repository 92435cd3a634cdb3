"""What other forms of KV in a byte would cost in quality, simulated in torch: numbers are rounded where attention reads
them.

    python benchmarks/kv_formats.py TEXT [--tokens 1024] [--window 1024] [--only "e4m3 K" ...]

The default model in float32, windows without overlap. "KL" is the mean Kullback-Leibler divergence of the next token
from that of plain numbers, which tells forms apart on a thousand tokens; perplexity needs many times as many. A form's
name says what is rounded, and a scale's group where it is not a head of 64. "least error": of so many scales in an
octave, the one with the least sum of squared errors. "rotated": q and K times a Hadamard matrix.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import heading, table
from decode import load_transformers
from torch import Tensor

from pagedec import LLM

Round = Callable[[Tensor], Tensor]


def plain(x: Tensor) -> Tensor:
    return x


def scaled(x: Tensor, limit: float, to: Round, group: int = 64, powers: bool = False) -> Tensor:
    """A scale in bf16 (or a power of two) for each group of values; `to` rounds what has been divided by it."""
    parts = x.unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / limit).clamp_min(2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if powers else scale.bfloat16().float()
    return (to(parts / scale) * scale).flatten(-2)


def to_e4m3(y: Tensor) -> Tensor:
    return y.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def to_e3m4(y: Tensor) -> Tensor:
    step = torch.exp2(torch.floor(torch.log2(y.abs().clamp_min(2.0**-60))).clamp_min(-2) - 4)
    return (y / step).round() * step


int8 = partial(scaled, limit=127.0, to=torch.round)
e4m3 = partial(scaled, limit=448.0, to=to_e4m3)
e3m4 = partial(scaled, limit=15.5, to=to_e3m4)


def least_error(x: Tensor, tries: int, group: int = 64) -> Tensor:
    parts = x.unflatten(-1, (-1, group))
    top = (parts.abs().amax(-1, keepdim=True) / 448).clamp_min(2.0**-100)
    best, least = parts, torch.full_like(top, torch.inf)
    for i in range(tries):
        scale = (top * 2 ** (i / tries)).bfloat16().float()
        rounded = to_e4m3(parts / scale) * scale
        error = (rounded - parts).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, rounded, best), torch.minimum(error, least)
    return best.flatten(-2)


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


FORMS: dict[str, tuple[Round, Round]] = {
    "plain": (plain, plain),
    "int8": (int8, int8),
    "e4m3": (e4m3, e4m3),
    "int8 K": (int8, plain),
    "int8 V": (plain, int8),
    "e4m3 K": (e4m3, plain),
    "e4m3 V": (plain, e4m3),
    "e4m3 K, groups of 32": (partial(e4m3, group=32), plain),
    "e4m3 K, groups of 16": (partial(e4m3, group=16), plain),
    "e4m3 K, powers of two": (partial(e4m3, powers=True), plain),
    "e4m3 K, least error of 16": (partial(least_error, tries=16), plain),
    "e4m3 K, least error of 64": (partial(least_error, tries=64), plain),
    "e4m3 K, groups of 32, least error of 32": (partial(least_error, tries=32, group=32), plain),
    "e4m3 K, groups of 16, least error of 16": (partial(least_error, tries=16, group=16), plain),
    "e4m3 K, rotated": (e4m3, plain),
    "e3m4 K": (e3m4, plain),
    "int8 K, e4m3 V": (int8, e4m3),
}


class Attention:
    """Causal attention over rounded K (behind its rotation) and V, in place of transformers' own."""

    def __init__(self, head_dim: int) -> None:
        self.form, self.turn = "plain", hadamard(head_dim)

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        of_k, of_v = FORMS[self.form]
        if self.form.endswith("rotated"):
            q, k = q @ self.turn, k @ self.turn
        group = q.shape[1] // k.shape[1]
        k, v = of_k(k).repeat_interleave(group, 1), of_v(v).repeat_interleave(group, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None


@torch.inference_mode()
def logprobs(model: Any, window: Tensor) -> Tensor:
    """Log-probabilities [tokens - 1, vocab_size] of what follows each token but the last."""
    return torch.log_softmax(model.lm_head(model.model(window[None]).last_hidden_state[0, :-1]), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--only", nargs="+", choices=list(FORMS), default=list(FORMS))
    arguments = parser.parse_args()
    llm = LLM("smollm2", dtype="float32", max_model_len=64, num_blocks=8)
    assert llm.tokenizer is not None
    tokens = torch.tensor(llm.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens])
    model: Any = load_transformers(llm, torch.float32)
    from transformers.models.llama import modeling_llama

    attention = Attention(model.config.head_dim)
    modeling_llama.ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    model.set_attn_implementation("rounded")
    sums = {form: [0.0, 0.0] for form in ["plain", *arguments.only]}
    count = 0
    for window in tokens.split(arguments.window):
        attention.form = "plain"
        base = logprobs(model, window)
        count += len(base)
        for form, totals in sums.items():
            attention.form = form
            own = logprobs(model, window)
            totals[0] += float((base.exp() * (base - own)).sum(dtype=torch.float64))
            totals[1] -= float(own.gather(-1, window[1:, None]).sum(dtype=torch.float64))
    heading(f"KV in other forms: {len(tokens)} tokens of {arguments.text.name}")
    first = sums["plain"][1] / count
    rows: list[list[object]] = [
        [form, f"{1000 * kl / count:.2f}", f"{math.exp(loss / count - first):.4f}"] for form, (kl, loss) in sums.items()
    ]
    table(["form", "KL, thousandths of a nat", "perplexity to plain"], rows)


if __name__ == "__main__":
    main()
