"""Prompt lookup on histories that branch: the index says what a search of the whole text says."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.history import History
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders.ngram import NGram, NGramIndex
from pagedec.params import SamplingParams


def searched(text: list[int], low: int, high: int, count: int) -> list[list[int]]:
    """What `NGramIndex.continuations` promises, read off the text."""
    found = []
    for size in range(min(high, len(text) - 1), low - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                longer = list(text)
                while len(longer) < place + count:
                    longer.append(longer[place + len(longer) - len(text)])
                found.append((size, longer[place : place + count]))
    return found


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_the_index_is_a_search(data: st.DataObject, low: int, more: int, count: int) -> None:
    """Over sequences that fork anywhere, from tips in any order, inner nodes too."""
    history = History(16)
    index = NGramIndex(history, low, low + more)
    tips = [history.append(0, data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)))]
    for _ in range(data.draw(st.integers(1, 12))):
        tip = data.draw(st.sampled_from(tips))
        length = data.draw(st.integers(1, history.depth[tip]))
        tips.append(history.append(history.ancestor(tip, length), data.draw(st.lists(st.integers(0, 2), max_size=5))))
        asked = data.draw(st.sampled_from(tips))
        text = history.tokens(asked)
        assert list(index.continuations(asked, count)) == searched(text, low, low + more, count)


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """Three streams whose tokens interleave in the history, as those of n = 3 do."""
    history, seconds = History(16), []
    index = NGramIndex(history, 1, 4)
    tips = [history.append(0, [7])] * 3
    for _ in range(4):
        began = time.thread_time()
        for i in range(2000):
            for stream in range(3):
                tips[stream] = history.append(tips[stream], [(i * i + stream) % 50 if i else 100 + stream])
                next(index.continuations(tips[stream], 5), None)
        seconds.append(time.thread_time() - began)
    assert min(seconds[2:]) < 3 * min(seconds[:2]), seconds


def test_a_token_costs_the_same_however_long_the_ends() -> None:
    """A client may ask for ends of 1,024 tokens; an index of all of them would be gigabytes."""
    history, text = History(16), [(i * i) % 97 + i % 7 for i in range(1500)]
    index = NGramIndex(history, 1, 1024)
    tracemalloc.start()
    next(index.continuations(history.append(0, text), 5), None)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 8 << 20, used


@pytest.mark.parametrize(("low", "high"), [(1, 40), (3, 12), (10, 30), (20, 20)])
def test_ends_longer_than_what_is_indexed(low: int, high: int) -> None:
    """The longest first, the latest of these first; each place once."""
    end = list(range(30))
    text = [*end, 90, 50, *end[5:], 91, *end[18:], 92, *end[5:], 93, *end[25:], 94, *end]
    history, seen = History(16), set()
    found = list(NGramIndex(history, low, high).continuations(history.append(0, text), 1))
    longest: list[tuple[int, list[int]]] = []
    for size, tokens in searched(text, low, high, 1):
        if tokens[0] not in seen:
            seen.add(tokens[0])
            longest.append((size, tokens))
    assert [entry for i, entry in enumerate(found) if entry[1] not in [e[1] for e in found[:i]]] == longest


def decoder_of(text: list[int], max_length: int = 100, **numbers: int) -> tuple[NGram, Branch]:
    history = History(16)
    params = SamplingParams(temperature=0, speculative={"method": "ngram", "num_candidates": 1, **numbers})
    decoder = NGram(params, DecoderContext(history, len(text), max_length, 50))
    return decoder, Branch(history.append(0, text), {}, decoder.initial_state, 0, len(text))


TEXT = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 9, 2, 3, 4, 5, 8, 2, 3]
"""Behind 2, 3: 4 5 8, then 4 6 9, then 4 5 9, the latest first."""


@pytest.mark.parametrize(("candidates", "want"), [
    (1, Draft((4, 5, 8), (0, 1, 2))),
    (2, Draft((4, 5, 8, 6, 9), (0, 1, 2, 1, 4))),
    (3, Draft((4, 5, 8, 6, 9, 9), (0, 1, 2, 1, 4, 2))),
    (9, Draft((4, 5, 8, 6, 9, 9), (0, 1, 2, 1, 4, 2))),
])  # fmt: skip
def test_candidates_are_a_tree_with_merged_prefixes(candidates: int, want: Draft) -> None:
    decoder, branch = decoder_of(TEXT, num_candidates=candidates, num_speculative_tokens=3)
    assert decoder.draft(branch, 50) == want
    assert decoder.draft(branch, 50) == want, "it may be asked twice"


def test_a_longer_end_wins_over_a_later_one() -> None:
    text = [1, 2, 7, 9, 2, 8, 9, 1, 2]
    assert decoder_of(text, num_speculative_tokens=1)[0].draft(decoder_of(text)[1], 9).tokens == (7,)
    decoder, branch = decoder_of(text, num_speculative_tokens=1, prompt_lookup_max=1)
    assert decoder.draft(branch, 9).tokens == (8,)


def test_a_draft_s_grade_is_how_much_was_alike() -> None:
    for text, grade in [([1, 2, 9, 7, 2], 1), ([1, 2, 9, 1, 2], 2), ([*range(9), *range(8)], 4)]:
        decoder, branch = decoder_of(text, prompt_lookup_max=6)
        assert decoder.draft(branch, 9).grade == grade


def test_nothing_like_it_drafts_nothing() -> None:
    decoder, branch = decoder_of([1, 2, 3, 4])
    assert decoder.draft(branch, 9) == EMPTY
    decoder, branch = decoder_of([3, 1, 3], prompt_lookup_min=2)
    assert decoder.draft(branch, 9) == EMPTY
    decoder, branch = decoder_of([3])
    assert decoder.draft(branch, 9) == EMPTY


def test_a_text_that_repeats_goes_on_for_ever() -> None:
    decoder, branch = decoder_of([5, 1, 2, 1, 2], num_speculative_tokens=6)
    assert decoder.draft(branch, 9).tokens == (1, 2, 1, 2, 1, 2)


@pytest.mark.parametrize("room", range(7))
def test_it_fits_the_rows_and_the_answer(room: int) -> None:
    """max_tokens is never overshot: behind a draft there is place for the token that is drawn."""
    decoder, branch = decoder_of(TEXT, num_candidates=3, num_speculative_tokens=3)
    assert decoder.draft(branch, room).num_nodes == min(room, 6)
    decoder, branch = decoder_of(TEXT, len(TEXT) + 1 + room, num_speculative_tokens=6)
    assert decoder.draft(branch, 50).num_nodes == min(room, 6)
