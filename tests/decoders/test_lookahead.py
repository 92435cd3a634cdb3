"""Lookahead decoding on a scripted model, step by step against the published algorithm written down with lists: window,
pool, guesses, and what each position sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.history import History
from pagedec.core.protocol import Answer, Child, DecoderContext, Query, Sample
from pagedec.core.request import Branch
from pagedec.core.sampler import GREEDY
from pagedec.decoders.lookahead import GuessPool, Lookahead
from pagedec.params import SamplingParams

Model = Callable[[Sequence[int]], int]
PROMPT = [4, 9, 5, 9, 6, 2, 9, 5]
VOCABULARY, EOS = 23, 0


def looping(text: Sequence[int]) -> int:
    """Soon repeats itself: guesses are right."""
    return (text[-1] * 3 + text[-2] + 1) % 11 + 1


def chaotic(text: Sequence[int]) -> int:
    """Depends on every token and its place: what a position sees shows."""
    return sum(i * i * token for i, token in enumerate(text, 1)) % VOCABULARY


@dataclass
class Published:
    """The algorithm as published, greedy, one step after the other: `row0` is what the window begins with."""

    width: int
    size: int
    num_guesses: int
    from_prompt: bool
    text: list[int]
    rows: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.from_prompt:
            self.insert_grams(0)

    def insert(self, key: int, guess: tuple[int, ...]) -> None:
        known = self.pool.setdefault(key, [])
        if guess in known:
            known.remove(guess)
        known.append(guess)
        del known[: max(0, len(known) - self.num_guesses)]

    def insert_grams(self, length: int) -> None:
        """Those that end behind `length` tokens of the text."""
        for end in range(max(self.size, length + 1), len(self.text) + 1):
            key, *guess = self.text[end - self.size : end]
            self.insert(key, tuple(guess))

    def guesses(self) -> list[tuple[int, ...]]:
        return self.pool.get(self.text[-1], [])

    def new_row(self, model: Model) -> list[int]:
        """What is drawn under the last row: column i sees row 0 up to its own column, then its own column."""
        first = [self.text[-1], *self.rows[0]]
        return [
            model([*self.text[:-1], *first[: i + 1], *(row[i] for row in self.rows[1:])]) for i in range(len(first))
        ]

    def step(self, model: Model) -> list[int]:
        """The tokens of one step."""
        best: list[int] = []
        for guess in self.guesses():
            hits = 0
            while hits < len(guess) and guess[hits] == model([*self.text, *guess[:hits]]):
                hits += 1
            best = max(best, list(guess[:hits]), key=len)
        emitted = [*best, model([*self.text, *best])]
        if self.width:
            self.advance(self.new_row(model))
        length = len(self.text)
        self.text += emitted
        if self.from_prompt:
            self.insert_grams(length)
        return emitted

    def advance(self, new: list[int]) -> None:
        if len(self.rows) < self.size - 1:
            self.rows = [row[1:] for row in self.rows] + [new[1:]]
            return
        for i, key in enumerate([self.text[-1], *self.rows[0]]):
            self.insert(key, (*(row[i] for row in self.rows[1:]), new[i]))
        rows = [*self.rows[1:], new]
        self.rows = [rows[0][1:], *rows[1:]]


class Run:
    """A decoder and its one branch, answered by a model."""

    def __init__(self, model: Model, max_length: int = 1000, temperature: float = 0.0, **numbers: Any) -> None:
        self.model, self.history = model, History(16)
        params = SamplingParams(temperature=temperature, seed=1, speculative={"method": "lookahead", **numbers})
        self.decoder = Lookahead(params, DecoderContext(self.history, len(PROMPT), max_length, VOCABULARY, (EOS,)))
        self.branch = Branch(self.history.append(0, PROMPT), {}, self.decoder.initial_state, 0, len(PROMPT))

    def query(self, room: int = 1000) -> Query:
        [query] = self.decoder.propose([self.branch], room)
        assert [query] == self.decoder.propose([self.branch], room), "it may be asked twice"
        assert isinstance(query.draft, Draft) and query.draft.num_nodes <= room
        return query

    def answer(self, query: Query, draft: Draft) -> Child:
        texts = [self.history.tokens(self.branch.tip)]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            texts.append([*texts[parent], token])
        values = []
        for ask in query.asks:
            assert isinstance(ask, Sample) and ask.nodes is not None
            values.append(np.array([[self.model(texts[node])] for node in ask.nodes if node < len(texts)], np.int32))
        [child] = self.decoder.advance([query], [Answer(draft, tuple(values))]).live
        return child

    def step(self, room: int = 1000, strip: bool = False) -> list[int]:
        query = self.query(room)
        draft = EMPTY if strip else query.draft
        assert isinstance(draft, Draft)
        child = self.answer(query, draft)
        tokens = [*(draft.tokens[node - 1] for node in child.path), *child.tokens]
        self.branch = Branch(self.history.append(self.branch.tip, tokens), {}, child.state, 0, len(PROMPT))
        return tokens

    @property
    def pool(self) -> dict[int, list[tuple[int, ...]]]:
        return {key: [*known] for key, known in self.decoder.pool._known.items() if known}


@pytest.mark.parametrize("model", [looping, chaotic])
@pytest.mark.parametrize("from_prompt", [False, True])
@pytest.mark.parametrize(("width", "size", "guesses"), [
    (1, 2, 1), (4, 2, 3), (1, 3, 2), (3, 3, 2), (5, 4, 15), (15, 5, 15), (0, 3, 4), (4, 4, 0),
])  # fmt: skip
def test_the_published_algorithm(model: Model, from_prompt: bool, width: int, size: int, guesses: int) -> None:
    """Window, pool and tokens are the same after each of 40 steps, and each answer is plain greedy decoding's."""
    run = Run(model, window_size=width, ngram_size=size, num_guesses=guesses, pool_from_prompt=from_prompt)
    first = run.decoder._window(run.branch, width + size - 2)[0] if width else []
    want = Published(width, size, guesses, from_prompt, list(PROMPT), [first])
    most = 1
    for _ in range(40):
        rows = 1 + sum(len(guess) for guess in want.guesses()) + (sum(map(len, want.rows)) if width else 0)
        assert run.query().draft.num_nodes < rows, "one token, the window, and no more than all guesses"
        tokens = run.step()
        assert tokens == want.step(model)
        assert run.history.tokens(run.branch.tip) == want.text
        assert run.decoder.windows.get(0, [first]) == want.rows
        assert run.pool == {key: known for key, known in want.pool.items() if known}
        most = max(most, len(tokens))
    plain = list(PROMPT)
    while len(plain) < len(want.text):
        plain.append(model(plain))
    assert plain == want.text
    if model is looping and guesses and (width or from_prompt):
        assert most == size, "a guess that is right to its end keeps the token behind it"


def test_a_steady_step_has_the_published_rows_and_positions() -> None:
    """(N - 1)(W + G) rows: row l, column i stands l + i tokens behind the last one."""
    width, size, guesses = 5, 4, 3
    run = Run(chaotic, window_size=width, ngram_size=size, num_guesses=guesses)
    for _ in range(size - 2):
        run.step()
    key = run.history.token[run.branch.tip]
    for guess in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
        run.decoder.pool.insert(key, guess)
    query = run.query()
    draft, (verified, window) = query.draft, query.asks
    assert isinstance(draft, Draft) and isinstance(verified, Sample) and isinstance(window, Sample)
    assert 1 + draft.num_nodes == (size - 1) * (width + guesses)
    assert verified.nodes == tuple(range(1 + guesses * (size - 1)))
    depths = draft.depths()
    assert [depths[node] for node in window.nodes or ()] == [size - 2 + i for i in range(width)]
    assert sorted(depths[1 + guesses * (size - 1) :]) == sorted(
        row + i for row in range(size - 1) for i in range(width) if row + i
    )
    assert window.sampler == GREEDY


def test_the_least_recently_inserted_guess_leaves() -> None:
    pool = GuessPool(2)
    for guess in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.insert(7, guess)
    assert pool.behind(7) == [(3, 3), (1, 1)], "(2, 2) is the oldest: (1, 1) came again"
    assert pool.behind(7) == [(3, 3), (1, 1)] and pool.behind(8) == []
    pool.insert(7, (4, 4))
    assert pool.behind(7) == [(4, 4), (3, 3)], "to be used keeps nothing"


def test_guesses_share_their_beginnings() -> None:
    run = Run(chaotic, window_size=0, ngram_size=4, num_guesses=5)
    for guess in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (5, 6, 7)):
        run.decoder.pool.insert(PROMPT[-1], guess)
    assert run.query().draft == Draft((5, 6, 7, 1, 2, 3, 4), (0, 1, 2, 0, 4, 5, 5))


def test_requests_share_nothing() -> None:
    """What one has learned is its own."""
    run = Run(looping, window_size=4, ngram_size=3, num_guesses=4)
    for _ in range(12):
        run.step()
    assert run.pool and not Run(looping, window_size=4, ngram_size=3, num_guesses=4).pool


def test_a_drawn_answer_s_window_has_no_end_tokens() -> None:
    """They lead nowhere; tokens of the prompt stand for them. A greedy one's window is as it was drawn."""

    def ending(text: Sequence[int]) -> int:
        return EOS if len(text) % 3 else chaotic(text)

    for temperature, has_ends in ((0.0, True), (0.7, False)):
        run = Run(ending, temperature=temperature, window_size=6, ngram_size=3, num_guesses=4)
        for _ in range(4):
            run.step()
        last = run.decoder.windows[0][-1]
        assert (EOS in last) is has_ends
        assert any(EOS in guess for known in run.pool.values() for guess in known), "guesses are as they were drawn"


@pytest.mark.parametrize("room", [0, 1, 2, 5, 9, 13, 30])
def test_it_fits_the_rows(room: int) -> None:
    """A window of fewer columns where there is no room for more; the text is the same, and it grows again."""
    run = Run(looping, window_size=6, ngram_size=4, num_guesses=4)
    for i in range(60):
        run.step(room if i % 10 < 7 else 1000, strip=i % 5 == 1)
    text, plain = run.history.tokens(run.branch.tip), list(PROMPT)
    while len(plain) < len(text):
        plain.append(looping(plain))
    assert text == plain
    assert len(run.decoder.windows[0][-1]) == 6


@pytest.mark.parametrize("from_prompt", [False, True])
def test_it_never_drafts_behind_the_answer_s_end(from_prompt: bool) -> None:
    limit = len(PROMPT) + 25
    run = Run(looping, limit, window_size=6, ngram_size=4, num_guesses=4, pool_from_prompt=from_prompt)
    while len(run.history.tokens(run.branch.tip)) < limit:
        draft = run.query().draft
        assert isinstance(draft, Draft)
        assert max(draft.depths()) < limit - len(run.history.tokens(run.branch.tip))
        run.step()
    assert len(run.history.tokens(run.branch.tip)) == limit
