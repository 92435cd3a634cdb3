"""What fewer bits of weights and KV cost in quality: perplexity of the same text, and the ratio to bfloat16.

    python benchmarks/perplexity.py TEXT [--tokens 16384] [--window 1024] [--model smollm2] [--kinds bfloat16 int4 ...]

The text is cut into windows of the context, one behind the other without overlap; in each, every token but the first is
scored given those before it. Scored through the engine: a small decoder drafts what the text says, and reads the
log-probability of each drafted token at the node before it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import heading, table

from pagedec import LLM
from pagedec.core.draft import Draft
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Hypothesis, LogProbs, Query, Verdict
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.params import RequestParams

CHUNK = 255  # drafted tokens a step
KINDS: dict[str, dict[str, str | None]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8_weight_only": {"dtype": "bfloat16", "quantization": "int8_weight_only"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    **{
        form: {"dtype": "bfloat16", "quantization": form}
        for form in ("int4", "int4_128", "int4_zero", "int4_zero_128", "gguf")
    },
    "KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True, slots=True)
class WindowParams(RequestParams):
    """A window after its first token; `scores` receives one value for each."""

    tokens: tuple[int, ...] = ()
    scores: list[float] = field(default_factory=list)


@decoder("perplexity", params=WindowParams)
class Windows(Decoder):
    """Drafts the text itself, a chunk at a time, and accepts all of it."""

    width = 1
    initial_state = 0  # tokens scored

    def __init__(self, params: WindowParams, context: DecoderContext) -> None:
        self.params = params

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        (branch,) = branches
        tokens = self.params.tokens[branch.state : branch.state + min(CHUNK, room - 1)]
        return [Query(branch, (LogProbs(tuple(range(len(tokens))), tokens),), Draft.chain(tokens))]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        (query,), (answer,) = queries, answers
        count = len(answer.draft.tokens)
        assert count, "the window does not fit the engine"
        self.params.scores.extend(float(value) for value in answer.values[0])
        scored = query.branch.state + count
        if scored == len(self.params.tokens):
            return Verdict(done=(Hypothesis(query.branch.tip),), drop=(query.branch,))
        # the last token is left pending: the next chunk begins at its node
        path, last = tuple(range(1, count)), answer.draft.tokens[-1:]
        return Verdict(live=(Child(query.branch, tokens=last, path=path, state=scored),))

    def rank(self, state: int) -> int:
        return 0


def score(llm: LLM, windows: Sequence[Sequence[int]]) -> list[float]:
    """Log-probabilities of all tokens of all windows but each one's first."""
    logprobs: list[float] = []
    for i, window in enumerate(windows):
        params = WindowParams(tuple(window[1:]), ignore_eos=True)
        llm.engine.add(llm.engine.admit(f"window {i}", window[:1], params))
        while llm.engine.scheduler.requests:
            llm.engine.step()
        assert len(params.scores) == len(window) - 1
        logprobs += params.scores
    return logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["float32", "bfloat16", "int8"])
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    results: dict[str, tuple[float, float]] = {}
    for kind in arguments.kinds:
        llm = LLM(arguments.model, max_model_len=arguments.window + 1, enable_prefix_caching=False, **KINDS[kind])
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode(text)[: arguments.tokens]
        if len(tokens) < max(2, arguments.tokens):
            parser.error(f"the text has {len(tokens)} tokens; --tokens is {arguments.tokens}")
        windows = [tokens[i : i + arguments.window] for i in range(0, len(tokens), arguments.window)]
        began = time.perf_counter()
        logprobs = score(llm, [window for window in windows if len(window) > 1])
        results[kind] = math.exp(-sum(logprobs) / len(logprobs)), time.perf_counter() - began
    heading(
        f"Perplexity: {arguments.model}, {len(tokens)} tokens of {arguments.text.name}, windows of {arguments.window}"
    )
    base = results.get("bfloat16", next(iter(results.values())))[0]
    rows: list[list[object]] = [
        [kind, f"{value:.4f}", f"{value / base:.4f}", f"{seconds:.0f}"] for kind, (value, seconds) in results.items()
    ]
    table(["numbers", "perplexity", "to bfloat16" if "bfloat16" in results else "to the first", "s"], rows)


if __name__ == "__main__":
    main()
