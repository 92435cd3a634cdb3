"""Random forwards whose rows have known histories, and what processing does to their logits in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneForward, ProcessRows
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.kernels.backend import Backend, CacheTensors

BLOCK_SIZE = 8
PROCESS_FIELDS = "rows", "branches", "prompt_lengths", "rule_ids", "of_logprobs"


@dataclass(slots=True)
class Case:
    """A forward, its token plane, logits of the read-out rows, and the history of each of them."""

    forward: LaneForward
    rules: dict[int, LogitsRules]
    plane: torch.Tensor
    logits: torch.Tensor
    histories: list[list[int]]

    def cache(self) -> CacheTensors:
        nothing = torch.empty(0)
        return CacheTensors(nothing, nothing, self.plane, 1, 16, BLOCK_SIZE)

    def process(self, backend: Backend, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The logits of rows `start` .. `stop - 1` after processing; a guard row behind them stays NaN."""
        chosen = self.logits[start:stop]
        guarded = torch.cat([chosen, torch.full((1, chosen.shape[1]), torch.nan)])
        backend.process_logits(guarded[:-1], start, self.forward, self.cache(), self.known(backend))
        assert guarded[-1].isnan().all()
        return guarded[:-1]

    def known(self, backend: Backend) -> dict[int, Any]:
        """The rules in the backend's own form."""
        return {rule_id: backend.rules(rules, self.logits.shape[1]) for rule_id, rules in self.rules.items()}

    def expected(self, lse: np.ndarray | None = None) -> torch.Tensor:
        """The rules' own words on every processed row, less its `lse` [rows] where it is marked so."""
        out, wanted = self.logits.numpy().copy(), self.forward.processing
        assert wanted is not None
        for i, row in enumerate(wanted.rows):
            rule, prompt = self.rules[wanted.rule_ids[i]], int(wanted.prompt_lengths[i])
            if wanted.of_logprobs[i]:
                assert lse is not None
                out[row] -= lse[row]
            out[row] = processed(out[row], self.histories[row], prompt, rule)
        return torch.from_numpy(out)

    def of_logprobs(self, flags: np.ndarray | None = None) -> Case:
        """The same with rules that change log-probabilities, of all processed rows or of those marked."""
        wanted = self.forward.processing
        assert wanted is not None
        marks = np.ones(len(wanted.rows), np.int32) if flags is None else flags.astype(np.int32)
        return replace(self, forward=replace(self.forward, processing=replace(wanted, of_logprobs=marks)))

    def only(self, rows: Sequence[int]) -> Case:
        """The same forward, of which only these read-out rows (by their place among the processed) are processed."""
        p = self.forward.processing
        assert p is not None
        part = ProcessRows(*(getattr(p, name)[list(rows)] for name in PROCESS_FIELDS))
        return replace(self, forward=replace(self.forward, processing=part))


def forward_of(
    read_rows: np.ndarray,
    row_indptr: np.ndarray,
    kv_len: np.ndarray,
    table: np.ndarray,
    parents: np.ndarray | None,
    processing: ProcessRows,
) -> LaneForward:
    """A forward of which processing alone is looked at."""
    return LaneForward(
        "target",
        NO_INTS,
        NO_INTS,
        NO_INTS,
        row_indptr,
        kv_len,
        table,
        parents,
        read_rows=read_rows,
        processing=processing,
    )


def processed(row: np.ndarray, history: list[int], prompt: int, rules: LogitsRules) -> np.ndarray:
    """The docstring of LogitsRules, word by word, token by token, in fp32."""
    out, f32, n = row.copy(), np.float32, rules.no_repeat_ngram_size
    biases, generated = dict(rules.logit_bias), history[prompt:]
    grams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
    for token in range(len(row)):
        z = row[token]
        if rules.allowed_token_ids is not None and token not in rules.allowed_token_ids:
            z = f32(-np.inf)
        for word in rules.bad_words:
            if word[-1] == token and (len(word) == 1 or tuple(history[-(len(word) - 1) :]) == word[:-1]):
                z = f32(-np.inf)
        if token in biases:
            z = f32(z + f32(biases[token]))
        if n > 0 and len(history) >= n - 1 and (*history[len(history) - n + 1 :], token) in grams:
            z = f32(-np.inf)
        if rules.repetition_penalty != 1.0 and token in history:
            r = f32(rules.repetition_penalty)
            z = f32(z / r) if z > 0 else f32(z * r)
        count = generated.count(token)
        if count:
            z = f32(f32(z - f32(f32(rules.frequency_penalty) * f32(count))) - f32(rules.presence_penalty))
        out[token] = z
    return out


def random_rules(rng: np.random.Generator, vocab: int) -> LogitsRules:
    """Each rule with its own chance, so that all of them meet now and then."""

    def chance() -> bool:
        return bool(rng.random() < 0.4)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, vocab, n))

    return LogitsRules(
        allowed_token_ids=ids(int(rng.integers(0, 2 * vocab))) if chance() else None,
        bad_words=tuple(ids(int(n)) for n in rng.integers(1, 4, int(rng.integers(0, 12)))) if chance() else (),
        logit_bias=tuple((t, float(rng.normal() * 5)) for t in sorted(set(ids(4)))) if chance() else (),
        no_repeat_ngram_size=int(rng.integers(1, 6)) if chance() else 0,
        repetition_penalty=float(rng.uniform(0.5, 2)) if chance() else 1.0,
        frequency_penalty=float(rng.normal()) if chance() else 0.0,
        presence_penalty=float(rng.normal()) if chance() else 0.0,
    )


def random_case(seed: int, vocab: int = 7, num_branches: int = 9, max_length: int = 60, trees: bool = True) -> Case:
    """Branches of one to `max_length` tokens that share blocks, end in chains and trees, and are read out here and
    there.

    The vocabulary is small, so that histories repeat themselves.
    """
    rng = np.random.default_rng(seed)
    width = -(-max_length // BLOCK_SIZE)
    ids = list(rng.permutation(num_branches * width))
    plane = rng.integers(0, vocab, len(ids) * BLOCK_SIZE).astype(np.int32)
    table = np.full((num_branches, width), -1, np.int32)
    rows: list[tuple[int, int, list[int]]] = []  # branch, length of the longest prompt there can be, history
    parents: list[int] = []
    indptr, kv_len = [0], []
    for branch in range(num_branches):
        length = int(rng.integers(1, max_length + 1))
        shared = int(rng.integers(0, kv_len[-1] // BLOCK_SIZE + 1)) if branch and rng.random() < 0.5 else 0
        table[branch, :shared] = table[branch - 1, :shared]
        for i in range(shared, -(-length // BLOCK_SIZE)):
            table[branch, i] = ids.pop()
        tokens = [int(t) for block in table[branch] if block >= 0 for t in plane.reshape(-1, BLOCK_SIZE)[block]]
        num_rows = int(rng.integers(1, min(length, 9) + 1))
        chain = int(rng.integers(1, num_rows + 1)) if trees else num_rows
        before, seen = length - num_rows, []
        for i in range(num_rows):
            parent = -1 if i < chain else int(rng.integers(chain - 1, i))
            seen.append(tokens[: before + i + 1] if i < chain else [*seen[parent], tokens[before + i]])
            parents.append(parent)
            rows.append((branch, before + chain, seen[-1]))
        indptr.append(len(rows))
        kv_len.append(length)
    read = np.sort(rng.choice(len(rows), int(rng.integers(1, len(rows) + 1)), replace=False)).astype(np.int32)
    picked = np.sort(rng.choice(len(read), int(rng.integers(1, len(read) + 1)), replace=False)).astype(np.int32)
    rules = {7 + 2**33 * i: random_rules(rng, vocab) if i else NO_RULES for i in range(7)}
    of_row = [rows[r] for r in read]
    wanted = ProcessRows(
        picked,
        np.array([of_row[i][0] for i in picked], np.int32),
        np.array([rng.integers(0, of_row[i][1] + 1) for i in picked], np.int32),
        rng.choice(list(rules), len(picked)),
        np.zeros(len(picked), np.int32),
    )
    tree = np.array(parents, np.int32) if trees else None
    forward = forward_of(read, np.array(indptr, np.int32), np.array(kv_len, np.int32), table, tree, wanted)
    logits = torch.from_numpy((rng.normal(size=(len(read), vocab)) * 3).astype(np.float32))
    logits[rng.random(logits.shape) < 0.05] = 0.0
    return Case(forward, rules, torch.from_numpy(plane), logits, [row[2] for row in of_row])


def simple_case(histories: Sequence[Sequence[int]], logits: torch.Tensor, rules: LogitsRules, prompt: int = 0) -> Case:
    """One branch and one row for each history, blocks in order."""
    n, width = len(histories), max(1, -(-max(map(len, histories)) // BLOCK_SIZE))
    plane = np.full((n, width * BLOCK_SIZE), -1, np.int32)
    for i, history in enumerate(histories):
        plane[i, : len(history)] = history
    at = np.arange(n, dtype=np.int32)
    wanted = ProcessRows(at, at, np.full(n, prompt, np.int32), np.full(n, 5), np.zeros(n, np.int32))
    table = np.arange(n * width, dtype=np.int32).reshape(n, width)
    lengths = np.array([len(history) for history in histories], np.int32)
    forward = forward_of(at, np.arange(n + 1, dtype=np.int32), lengths, table, None, wanted)
    return Case(
        forward, {5: rules}, torch.from_numpy(plane.reshape(-1)), logits, [list(history) for history in histories]
    )
