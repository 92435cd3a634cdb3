"""The trie of accepted tokens against plain lists."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pagedec.core.history import History

BLOCK = 4


def grown(choices: list[tuple[int, int, int]]) -> tuple[History, dict[int, list[int]]]:
    """A history in which every choice continues a known tip by a few equal tokens; and every tip as a list."""
    history, texts = History(BLOCK), {0: list[int]()}
    for which, token, count in choices:
        tip = sorted(texts)[which % len(texts)]
        text = [*texts[tip], *[token] * count]
        texts[history.append(tip, [token] * count)] = text
    return history, texts


CHOICES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2), st.integers(1, 12)), max_size=40)


@given(CHOICES)
def test_history_is_a_set_of_lists(choices: list[tuple[int, int, int]]) -> None:
    history, texts = grown(choices)
    tips = sorted(texts)
    for tip in tips:
        text = texts[tip]
        assert history.tokens(tip) == text and history.depth[tip] == len(text)
        for length in range(len(text) + 1):
            assert history.tokens(history.ancestor(tip, length)) == text[:length]
            assert history.suffix(tip, length) == text[len(text) - length :]
        assert history.slice(tip, len(text) // 3, len(text) // 2) == text[len(text) // 3 : len(text) // 2]
    for a in tips:
        for b in tips[::3]:
            pairs = zip(texts[a], texts[b], strict=False)
            common = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(texts[a]), len(texts[b])))
            assert history.common_length(a, b) == common


@given(CHOICES)
def test_equal_texts_are_one_node(choices: list[tuple[int, int, int]]) -> None:
    history, texts = grown(choices)
    size = len(history.token)
    for tip, text in texts.items():
        assert history.append(0, text) == tip
    assert len(history.token) == size


def test_block_keys_vouch_for_everything_before() -> None:
    """Equal keys mean equal tokens from the start, in one tenant."""
    rng = random.Random(0)
    known: dict[bytes, tuple[str, tuple[int, ...]]] = {}
    for _ in range(200):
        salt, text = rng.choice(["", "a"]), [rng.randrange(2) for _ in range(12)]
        history = History(BLOCK, salt)
        tip = history.append(0, text)
        for end in (4, 8, 12):
            key = history.block_key(tip, end)
            assert known.setdefault(key, (salt, tuple(text[:end]))) == (salt, tuple(text[:end]))
            assert len(key) == 16
    assert len(known) > 100


def test_a_long_prompt_needs_no_deep_recursion() -> None:
    history = History(BLOCK)
    tip = history.append(0, range(40_000))
    assert history.block_key(tip, 40_000) != history.block_key(tip, 39_996)


def test_one_stream_is_one_run() -> None:
    """Walks over the usual history cost one slice, however long it is."""
    history = History(BLOCK)
    tip = history.append(0, range(5000))
    for token in range(100):
        tip = history.append_one(tip, token)
    assert history._run[tip] == 0
    assert history.suffix(tip, 5000) == [*range(100, 5000), *range(100)]
