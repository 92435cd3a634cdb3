"""Perplexity of one GGUF file in llama.cpp and in pagedec: the same text, the same windows, the same tokens.

    python benchmarks/peers/quality.py TEXT [--tokens 4096] [--window 1024]

Two ways to count. "all" is that of benchmarks/perplexity.py: every token of a window but its first. "second half" is
that of llama.cpp's own tool, llama-perplexity: tokens behind the first one of a window's second half. That tool lets
each window begin with the token that begins a text, where the file asks for one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import heading, table
from compare import CACHE, Contestant
from stock import commands

from pagedec.formats.resolve import resolve_model
from pagedec.text.tokenizer import Tokenizer

NAMES = ("pagedec bf16", "pagedec int8", "pagedec 4 bits", "llama.cpp bf16", "llama.cpp 4 bits")


def perplexity(scores: list[list[float]], skip: int) -> float:
    """Of the scores of each window behind its first `skip` ones."""
    known = [score for window in scores for score in window[skip:]]
    return math.exp(-sum(known) / len(known))


def main() -> None:
    summary, _, notes = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default: {CACHE}")
    arguments = parser.parse_args()
    file = resolve_model(arguments.model).weights
    assert file is not None and file.suffix == ".gguf", "--model is one whose weights are a GGUF file"
    tokens = Tokenizer.from_path(file).encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    if len(tokens) < arguments.tokens or arguments.tokens % arguments.window:
        parser.error(f"--tokens must be whole windows of the text's first {len(tokens)} tokens")
    windows = [tokens[i : i + arguments.window] for i in range(0, len(tokens), arguments.window)]
    heading(f"Perplexity: {len(tokens)} tokens of {arguments.text.name}, windows of {arguments.window}")
    rows: list[list[object]] = []
    base: list[float] = []
    for name in NAMES:
        contestant = Contestant(
            name, commands(arguments.cache, arguments.model, file, arguments.threads)[name], arguments.threads
        )
        began = time.perf_counter()
        answer = contestant.do({"score": windows})
        seconds = time.perf_counter() - began
        contestant.end()
        if answer is None:
            rows.append([name, contestant.why, "", "", "", ""])
            continue
        # a window's score i is that of its token i + 1
        values = [perplexity(answer["scores"], skip) for skip in (0, arguments.window // 2)]
        base = base or values
        shares = [f"{value / first:.4f}" for value, first in zip(values, base, strict=True)]
        rows.append([name, f"{values[0]:.4f}", shares[0], f"{values[1]:.4f}", shares[1], f"{seconds:.0f}"])
    table(["contestant", "all", "to pagedec bf16", "second half", "to pagedec bf16", "s"], rows)


if __name__ == "__main__":
    main()
