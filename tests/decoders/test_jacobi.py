"""Jacobi decoding on a scripted model: m tokens in at most m steps, whatever the guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.history import History
from pagedec.core.protocol import Answer, DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders.jacobi import Jacobi
from pagedec.params import SamplingParams

Model = Callable[[Sequence[int], int], int]


def copying(text: Sequence[int], stream: int) -> int:
    """Depends on what stood three tokens before only: guesses soon come true."""
    return (text[-3] * 5 + stream) % 40 if len(text) > 2 else 3


def chaotic(text: Sequence[int], stream: int) -> int:
    """Depends on all tokens."""
    return (sum(i * token for i, token in enumerate(text, 1)) + stream) % 40


def plain(model: Model, prompt: list[int], stream: int, count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(model(text, stream))
    return text[len(prompt) :]


def decoded(model: Model, size: int, count: int, n: int = 1, strip: int = 0) -> tuple[list[list[int]], int]:
    """The answers of `n` streams and the steps; every `strip`-th step runs no draft."""
    history, prompt = History(16), [4, 5, 6]
    params = SamplingParams(n=n, seed=1, speculative={"method": "jacobi", "num_speculative_tokens": size})
    decoder = Jacobi(params, DecoderContext(history, 3, 3 + count, 40))
    branches = [Branch(history.append(0, prompt), {}, decoder.initial_state, 0, 3)]
    answers: dict[int, list[int]] = {}
    num_steps = 0
    while branches:
        num_steps += 1
        queries = decoder.propose(branches, 1000)
        given = []
        for query in queries:
            assert not isinstance(query.draft, Roll)
            draft = EMPTY if strip and num_steps % strip == 0 else query.draft
            given.append(Answer(draft, (np.array(drawn(model, history, query.branch, draft)),)))
        live = []
        for child in decoder.advance(queries, given).live:
            draft = given[[query.branch for query in queries].index(child.parent)].draft
            tokens = [*(draft.tokens[node - 1] for node in child.path), *child.tokens]
            text = history.tokens(child.parent.tip)[3:] + tokens
            assert len(text) <= count, "max_tokens is overshot"
            answers[child.state[0]] = text
            if len(text) < count:
                live.append(Branch(history.append(child.parent.tip, tokens), {}, child.state, 0, 3))
        branches = live
    return [answers[stream] for stream in range(n)], num_steps


def drawn(model: Model, history: History, branch: Branch, draft: Draft) -> list[list[int]]:
    texts = [history.tokens(branch.tip)]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        texts.append([*texts[parent], token])
    return [[model(text, stream) for stream in branch.state] for text in texts]


@pytest.mark.parametrize("model", [copying, chaotic])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("strip", [0, 3])
@pytest.mark.parametrize("size", [1, 2, 8, 40])
def test_m_tokens_in_at_most_m_steps(model: Model, size: int, n: int, strip: int) -> None:
    answers, num_steps = decoded(model, size, 30, n, strip)
    assert answers == [plain(model, [4, 5, 6], stream, 30) for stream in range(n)]
    assert num_steps <= 30


def test_guesses_come_true() -> None:
    """A row that covers the answer settles three tokens a step where each token depends on the third before."""
    assert decoded(copying, 29, 30)[1] <= 11
    assert decoded(chaotic, 29, 30)[1] > 20
