"""Penalties and bans on a step's logits: 64 rows with 1,000 tokens of history each, next to transformers' processors.

    PYTHONPATH=. python benchmarks/processing.py [--rows 64] [--history 1000] [--rounds 31]

Ours reads histories from the token plane of the cache through block tables, as in a step of the engine; its time
includes the call from Python. transformers' processors get the histories as one tensor. Reach: under 1 ms for every
rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import heading, interleave, ratio, table
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.library import load
from pagedec.kernels.native import NativeBackend
from tests.kernels.processing_cases import simple_case

VOCAB = 49152
RULES: dict[str, tuple[LogitsRules, Callable[..., object] | None]] = {
    "repetition": (LogitsRules(repetition_penalty=1.2), RepetitionPenaltyLogitsProcessor(1.2)),
    "frequency and presence": (LogitsRules(frequency_penalty=0.5, presence_penalty=0.5), None),
    "no_repeat_ngram_size 3": (LogitsRules(no_repeat_ngram_size=3), NoRepeatNGramLogitsProcessor(3)),
    "all of them": (
        LogitsRules(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5, no_repeat_ngram_size=3),
        None,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--history", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backend = NativeBackend(load(), torch.bfloat16)
    ids = torch.randint(0, VOCAB, (arguments.rows, arguments.history))
    logits = torch.randn(arguments.rows, VOCAB)
    heading(f"Logits processing: {arguments.rows} rows, {arguments.history} tokens of history, vocabulary {VOCAB}")
    rows = []
    for name, (rules, peer) in RULES.items():
        case = simple_case(ids.tolist(), logits.clone(), rules)
        cache, forward, known = case.cache(), case.forward, case.known(backend)
        contestants: dict[str, Callable[[], object]] = {
            "ours": lambda forward=forward, case=case, cache=cache, known=known: backend.process_logits(
                case.logits, 0, forward, cache, known
            )
        }
        if peer is not None:
            scores = logits.clone()
            contestants["peer"] = lambda peer=peer, scores=scores: peer(ids, scores)
        timings = interleave(contestants, arguments.rounds)
        ours = timings["ours"]
        theirs = ["-", "-"]
        if peer is not None:
            middle, spread = ratio(timings["peer"], ours)
            theirs = [f"{timings['peer'].median * 1e3:.2f}", f"{middle:.1f} ± {spread:.1f}"]
        rows.append([name, f"{ours.median * 1e3:.2f}", f"{ours.spread:.2f}", *theirs])
    table(["rule", "ms", "spread", "transformers, ms", "transformers / ours"], rows)


if __name__ == "__main__":
    main()
