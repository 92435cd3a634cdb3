"""Runs a gang's decoder on log-probabilities that a function gives: no engine, no kernel. `best` is what `Best`
means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedec.core.checks import check_verdict
from pagedec.core.draft import EMPTY
from pagedec.core.history import History
from pagedec.core.protocol import Answer, Best, Candidates, Decoder, DecoderContext, Hypothesis
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder

LogProbsOf = Callable[[Sequence[int]], np.ndarray]
Noise = Callable[[int, int, int, int], np.ndarray]
"""From seed, stream, position and the vocabulary's size to Gumbel noise."""


def best(
    rows: Sequence[tuple[int, float, np.ndarray]], ask: Best, noise: Sequence[np.ndarray] | None = None
) -> Candidates:
    """What `ask` is answered for a group: of each row its place, its score, and fp32 log-probabilities [vocab]."""
    logprobs = np.stack([_cut(row, ask) for _, _, row in rows])
    totals = np.array([total for _, total, _ in rows], np.float32)
    scores = totals[:, None] + logprobs
    ranked = scores if noise is None else scores + np.stack(noise)
    flat = np.lexsort((np.arange(ranked.size), -logprobs.ravel(), -ranked.ravel()))
    flat = flat[np.isfinite(ranked.ravel()[flat])][: ask.k]
    vocab_size = logprobs.shape[1]
    places = np.array([place for place, _, _ in rows], np.int32)
    return Candidates(
        places[flat // vocab_size], (flat % vocab_size).astype(np.int32), scores.ravel()[flat], logprobs.ravel()[flat]
    )


def _cut(row: np.ndarray, ask: Best) -> np.ndarray:
    """Tempered, and cut as transformers cuts: top_k, top_p, min_p."""
    sampler = ask.sampler
    if sampler is None:
        return row
    row = row / np.float32(sampler.temperature or 1.0)
    order = np.argsort(-row, kind="stable")
    keep = np.ones(len(row), bool)
    if sampler.top_k:
        keep[order[max(sampler.top_k, ask.min_tokens_to_keep) :]] = False
    row = np.where(keep, row, -np.inf).astype(np.float32)
    if sampler.top_p < 1:
        before = np.cumsum(_softmax(row)[order]) - _softmax(row)[order]
        dropped = before >= sampler.top_p
        dropped[: ask.min_tokens_to_keep] = False
        row[order[dropped]] = -np.inf
    if sampler.min_p:
        dropped = _softmax(row)[order] < sampler.min_p * _softmax(row).max()
        dropped[: ask.min_tokens_to_keep] = False
        row[order[dropped]] = -np.inf
    return row


def _softmax(row: np.ndarray) -> np.ndarray:
    odds = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(odds / odds.sum())


def gumbel(sampler: Sampler, stream: int, position: int, size: int) -> np.ndarray:
    """Noise of a row, a function of its name."""
    key = [sampler.seed & ((1 << 64) - 1), stream, position, 0]
    uniform = np.random.Generator(np.random.Philox(key=key[:2], counter=[0, 0, position, 0])).random(size)
    return np.asarray(-np.log(-np.log(uniform)), np.float32)


@dataclass
class Search:
    """A search, step by step."""

    params: Any
    prompt: Sequence[int]
    logprobs: LogProbsOf
    vocab_size: int
    eos: tuple[int, ...] = ()
    stopping: Stopping | None = None
    room: int | None = None
    """Most tokens of an answer, if not `max_tokens`: the context's end."""
    settled: list[int] = field(default_factory=list)
    done: list[Hypothesis] = field(default_factory=list)
    generations: list[list[list[int]]] = field(default_factory=list)
    """Of each generation the texts, by number."""

    def __post_init__(self) -> None:
        params = self.params
        self.history = History(16)
        tip = self.history.append(0, list(self.prompt))
        self.stopping = self.stopping or Stopping(
            self.eos, tuple(params.stop_token_ids), params.min_tokens, params.max_tokens, params.ignore_eos
        )
        longest = len(self.prompt) + (params.max_tokens if self.room is None else self.room)
        self.context = DecoderContext(self.history, len(self.prompt), longest, self.vocab_size, self.eos, self.stopping)
        self.decoder: Decoder = make_decoder(params, self.context)
        root = Branch(tip, {}, self.decoder.initial_state, self.stopping.start, len(self.prompt))
        self.branches = [root]

    def step(self) -> bool:
        """One step. Returns whether the search goes on."""
        queries = self.decoder.propose(self.branches, 0)
        assert {query.branch for query in queries} == set(self.branches)
        rows: dict[int, list[tuple[int, float, np.ndarray]]] = {}
        noise: dict[int, list[np.ndarray]] = {}
        asks: dict[int, Best] = {}
        for place, query in enumerate(queries):
            [ask] = query.asks
            assert isinstance(ask, Best)
            asks[ask.group] = ask
            text = self.history.tokens(query.branch.tip)
            rows.setdefault(ask.group, []).append((place, query.branch.score, self._row(text)))
            if ask.sampler is not None:
                own = gumbel(ask.sampler, ask.stream, len(text), self.vocab_size)
                noise.setdefault(ask.group, []).append(own)
        found = {group: best(rows[group], ask, noise.get(group)) for group, ask in asks.items()}
        answers = [Answer(EMPTY, (found[query.asks[0].group],)) for query in queries]
        verdict = self.decoder.advance(queries, answers)
        drafts = {query.branch: EMPTY for query in queries}
        check_verdict(self.history, self.branches, drafts, verdict, self.vocab_size, self.decoder)
        assert self.stopping is not None
        live = verdict.live if verdict.children is None else verdict.children.objects(queries)
        places = {branch: i for i, branch in enumerate(self.branches)}
        self.branches = [
            Branch(
                self.history.append(child.parent.tip, child.tokens),
                {},
                child.state,
                self.stopping.next(child.parent.stop_state, child.tokens[0]),
                len(self.prompt),
                child.score,
            )
            for child in sorted(live, key=lambda child: places[child.parent])
        ]
        self.generations.append(
            [self.history.tokens(b.tip)[len(self.prompt) :] for b in sorted(self.branches, key=lambda b: b.state)]
        )
        if verdict.settled is not None:
            self.settled.append(verdict.settled)
        self.done += verdict.done
        return bool(self.branches)

    def _row(self, text: Sequence[int]) -> np.ndarray:
        row = np.array(self.logprobs(text), np.float32)
        assert self.stopping is not None
        row[list(self.stopping.banned(len(text) - len(self.prompt)))] = -np.inf
        return row

    def run(self) -> Search:
        """To the end."""
        while self.step():
            pass
        return self

    def texts(self, answers: Sequence[Hypothesis] | None = None) -> list[list[int]]:
        """What was generated, of each answer."""
        found = self.done if answers is None else answers
        return [[*self.history.tokens(a.tip)[len(self.prompt) :], *a.tokens] for a in found]
