"""The read-out on a device at a vocabulary of 128,256: what draws, ranks and rules take, next to a copy of the logits.

    python benchmarks/gpu_readout.py [--smoke] [--isa NAME]

All arrays lie on the device, so that kernels alone are timed: a few calls over logits of their own, one behind the
other in one recording; times are of one. At one row they all lie in the second cache, as those do that a step has just
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import Structure

import numpy as np
import torch
from common import Timing, table
from gpu_common import Device, arguments_of, micro, percent

from pagedec.core.forward import BEST_GROUP_DTYPE, BEST_ROW_DTYPE, DRAW_DTYPE
from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.library import ArgmaxArgs, BestArgs, ProcessLogitsArgs, SampleArgs, TopkLseArgs, VerifyArgs
from pagedec.kernels.reference_best import CANDIDATE_DTYPE

VOCAB, ROWS, HISTORY, BLOCK = 128256, (1, 16, 64), 1024, 16


class Calls:
    """Records of every kernel over one array of logits [rows, vocab]."""

    def __init__(self, device: Device, rows: int, vocab: int) -> None:
        self.device, self.rows, self.vocab = device, rows, vocab
        self._keep: list[object] = []
        self.logits = device.random((rows, vocab), torch.float32, scale=3.0)
        self.count = self.put(np.array([rows], np.int32))

    def put(self, array: np.ndarray) -> int:
        self._keep.append(self.device.put(array))
        return self._keep[-1].data_ptr()

    def draws(self, **cuts: float) -> int:
        draws = np.zeros(self.rows, DRAW_DTYPE)
        draws["row"] = draws["stream"] = np.arange(self.rows)
        draws["temperature"], draws["top_p"] = 0.8, 1.0
        for name, value in cuts.items():
            draws[name] = value
        return self.put(draws)

    def argmax(self) -> Structure:
        return ArgmaxArgs(self.count, self.logits.data_ptr(), self.put(np.zeros(self.rows, np.int32)), self.vocab, 0)

    def top(self, k: int) -> Structure:
        ids, values, lse = (self.put(np.zeros(n, np.int32)) for n in (self.rows * k, self.rows * k, self.rows))
        return TopkLseArgs(self.count, self.logits.data_ptr(), None, ids, values, lse, self.vocab, k)

    def sample(self, **cuts: float) -> Structure:
        out = self.put(np.zeros(self.rows, np.int32))
        return SampleArgs(self.count, self.draws(**cuts), self.logits.data_ptr(), out, self.vocab, 0)

    def verify(self) -> Structure:
        drafted, out = (self.put(np.ones(self.rows, np.int32)) for _ in range(2))
        draws, logits = self.draws(top_p=0.95), self.logits.data_ptr()
        return VerifyArgs(self.count, draws, draws, drafted, logits, logits, out, self.vocab, self.vocab)

    def best(self) -> Structure:
        """All rows ranked together: twice as many continuations as there are."""
        k = 2 * self.rows
        rows, groups = np.zeros(self.rows, BEST_ROW_DTYPE), np.zeros(1, BEST_GROUP_DTYPE)
        rows["row"] = rows["place"] = np.arange(self.rows)
        groups["stop"], groups["k"], groups["temperature"], groups["top_p"] = self.rows, k, 1.0, 1.0
        groups["min_tokens_to_keep"] = 1
        arrays = np.zeros(self.rows, np.float32), rows, groups, np.zeros(k, CANDIDATE_DTYPE), np.zeros(1, np.int32)
        return BestArgs(self.count, self.logits.data_ptr(), *map(self.put, arrays), 1, self.vocab, 0, 0)

    def rules(self, rules: LogitsRules) -> Structure:
        """Rows of their own branches with a history each."""
        length = HISTORY if self.rows * HISTORY < 1 << 20 and not self.device.smoke else 40
        width = -(-length // BLOCK)
        tokens = np.random.default_rng(1).integers(0, self.vocab, self.rows * width * BLOCK).astype(np.int32)
        at, flat = np.arange(self.rows, dtype=np.int32), self.device.backend.rules(rules, self.vocab)
        self._keep.append(flat)
        put, zeros = self.put, np.zeros(self.rows, np.int32)
        return ProcessLogitsArgs(
            self.count, self.logits.data_ptr(), put(at), put(zeros), put(np.frombuffer(flat.record, np.uint8)),
            put(np.full(self.rows, length // 2, np.int32)), put(at), put(at),
            put(np.arange(self.rows + 1, dtype=np.int32)), put(np.full(self.rows, length, np.int32)),
            put(np.arange(self.rows * width, dtype=np.int32)), None, put(tokens), None, 1, self.rows, width, BLOCK,
            self.vocab, 0,
        )  # fmt: skip


KERNELS: dict[str, Callable[[Calls], Structure]] = {
    "argmax": Calls.argmax,
    "top 5, logsumexp": lambda calls: calls.top(5),
    "top 50, logsumexp": lambda calls: calls.top(50),
    "top 1,000, logsumexp": lambda calls: calls.top(min(1000, calls.vocab)),
    "draw": lambda calls: calls.sample(),
    "draw, top_k 50": lambda calls: calls.sample(top_k=50),
    "draw, top_p 0.95": lambda calls: calls.sample(top_p=0.95),
    "draw, top_k 50, top_p 0.95, min_p 0.05": lambda calls: calls.sample(top_k=50, top_p=0.95, min_p=0.05),
    "verify, top_p 0.95": Calls.verify,
    "best of all rows": Calls.best,
    "repetition penalty": lambda calls: calls.rules(LogitsRules(repetition_penalty=1.2)),
    "penalties, no_repeat_ngram_size 3": lambda calls: calls.rules(
        LogitsRules(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5, no_repeat_ngram_size=3)
    ),
}


def lines(device: Device, rows: int, vocab: int, copy: float) -> Iterator[list[object]]:
    size = 4 * rows * vocab
    sets = [Calls(device, rows, vocab) for _ in range(device.copies(size, 16))]
    for name, kernel in KERNELS.items():
        whole = device.timed(device.program([kernel(calls) for calls in sets]))
        one = Timing(tuple(seconds / len(sets) for seconds in whole.seconds))
        rate = 1e-9 * size / one.median
        yield [name, rows, micro(one.median), f"{rate:.4g}", percent(rate / copy), f"{one.spread:.3f}"]


def main() -> None:
    device = Device(arguments_of(__doc__))
    vocab, counts = (VOCAB, ROWS) if not device.smoke else (300, (1, 2))
    copy = device.head(f"Read-out, vocabulary {vocab}")
    columns = ["kernel", "rows", "us", "GB/s of logits, read once", "of the copy", "spread"]
    table(columns, (line for rows in counts for line in lines(device, rows, vocab, copy)))


if __name__ == "__main__":
    main()
