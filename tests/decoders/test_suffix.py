"""Suffix decoding on histories that branch, and over past answers: drafts are what a search of whole texts says."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec.core.archive import Archive
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.history import History
from pagedec.core.protocol import DecoderContext, Hypothesis
from pagedec.core.request import Branch
from pagedec.decoders.suffix import FIRST, PAST_ROOM, PLACES, SIZES, PastAnswers, Ring, Suffix
from pagedec.params import SamplingParams
from pagedec.speculation import NGramSpeculation, SuffixSpeculation

Tokens = Sequence[int]
KEY = History(16).salted


# --------------------------------------------------------------------------------------------- the definition, searched
def searched(texts: Sequence[Tokens], end: Tokens, is_own: bool) -> tuple[int, list[tuple[int, ...]]]:
    """How many tokens of `end` stand before a place of these texts, and what follows the latest such places; a text of
    one's own goes on with itself. `texts`: the latest first."""
    for size in reversed(SIZES):
        found = []
        for text in texts:
            for place in range(len(text) - 1, size - 1, -1):
                if size <= len(end) and list(text[place - size : place]) == list(end[-size:]):
                    most = min(place, len(end))
                    alike = next((i for i in range(most) if text[place - i - 1] != end[-i - 1]), most)
                    found.append((alike, tuple(text[place:]) * (64 if is_own else 1)))
        if found:
            longest = max(alike for alike, _ in found[:PLACES])
            return longest, [followed for alike, followed in found[:PLACES] if alike == longest]
    return 0, []


def expected(
    texts: Sequence[Tokens], end: Tokens, is_own: bool, most: int, left: int, factor: float, least: float
) -> tuple[float, Draft]:
    """The tree of the most frequent continuations, a node at a time, and the sum of their shares."""
    size, behind = searched(texts, end, is_own)
    most, counts = min(most, int(factor * size + 1e-6)), list[int]()
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[tuple[int, ...]] = [()]
    waiting: list[tuple[int, tuple[int, ...]]] = []

    def wait(node: tuple[int, ...], number: int) -> None:
        behind_node = [text for text in behind if text[: len(node)] == node and len(text) > len(node)]
        for token in dict.fromkeys(text[len(node)] for text in behind_node):
            waiting.append((number, (*node, token)))

    def times(path: tuple[int, ...]) -> int:
        return sum(text[: len(path)] == path for text in behind)

    wait((), 0)
    while len(tokens) < most:
        likely = [
            one for one in waiting if times(one[1]) >= least * len(behind) - 1e-9 and len(one[1]) <= min(most, left)
        ]
        if not likely:
            break
        best = max(likely, key=lambda one: (times(one[1]), -len(one[1])))
        waiting.remove(best)
        tokens.append(best[1][-1])
        parents.append(best[0])
        counts.append(times(best[1]))
        nodes.append(best[1])
        wait(best[1], len(tokens))
    return sum(counts) / max(1, len(behind)), Draft(tuple(tokens), tuple(parents))


def better(
    text: Tokens, past: Sequence[Tokens], most: int, left: int, depth: int, factor: float, least: float
) -> Draft:
    """Of the own text's draft and that of past answers, the oldest first, the one that promises more."""
    own = expected([text], text[-depth:], True, most, left, factor, least)
    other = expected(past[::-1], text[-depth:], False, most, left, factor, least)
    return other[1] if other[0] > own[0] else own[1]


def decoder_of(
    history: History, prompt_length: int, archive: Archive | None = None, max_length: int = 1000, **numbers: float
) -> Suffix:
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    table = {f"suffix_decoding_{name}" if name in names else name: value for name, value in numbers.items()}
    params = SamplingParams(temperature=0, speculative={"method": "suffix", **table})
    return Suffix(params, DecoderContext(history, prompt_length, max_length, 50, archive=archive))


def branch_at(history: History, tip: int, stream: int = 0) -> Branch:
    return Branch(tip, {}, (stream,), 0, history.depth[tip])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(deadline=None, max_examples=200)
@given(
    st.data(), TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 24), st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(1, 9),
)  # fmt: skip
def test_a_draft_is_what_a_search_says(
    data: st.DataObject, prompt: list[int], past: list[list[int]], depth: int, factor: float, least: float, most: int
) -> None:
    """Over streams that are read in any order, that go back and on in another way, into the prompt too."""
    history, archive = History(16), Archive()
    for answer in past:
        archive.of(PastAnswers).add(KEY, answer)
    root = history.append(0, prompt)
    numbers = {"max_tree_depth": depth, "max_spec_factor": factor, "min_token_prob": least}
    decoder = decoder_of(history, len(prompt), archive, num_speculative_tokens=most, **numbers)
    tips = [root, root, root]
    for _ in range(data.draw(st.integers(1, 8))):
        stream = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            tips[stream] = history.ancestor(tips[stream], data.draw(st.integers(1, history.depth[tips[stream]])))
        tips[stream] = history.append(tips[stream], data.draw(st.lists(st.integers(0, 2), max_size=9)))
        text, room = history.tokens(tips[stream]), data.draw(st.integers(0, 12))
        got = decoder.draft(branch_at(history, tips[stream], stream), room)
        assert got == decoder.draft(branch_at(history, tips[stream], stream), room), "it may be asked twice"
        left = 1000 - len(text) - 1
        assert got == better(text, past, min(most, room), left, depth, factor, least)


def test_in_long_texts_too() -> None:
    """Prompts and answers longer than a ring begins with, of many kinds of tokens and of few."""
    for kinds, num in ((3, 400), (40, 1200), (700, 3000)):
        rng = random.Random(kinds)
        words = [[rng.randrange(kinds) for _ in range(rng.randrange(1, 9))] for _ in range(40)]

        def text(length: int, rng: random.Random = rng, words: list[list[int]] = words) -> list[int]:
            found: list[int] = []
            while len(found) < length:
                found += rng.choice(words)
            return found[:length]

        history, archive, prompt = History(16), Archive(), text(num)
        past = [text(rng.randrange(1, 60)) for _ in range(30)]
        for answer in past:
            archive.of(PastAnswers).add(KEY, answer)
        tip = history.append(0, prompt)
        decoder = decoder_of(history, num, archive, 10_000, min_token_prob=0.2)
        for token in text(600):
            tip = history.append_one(tip, token)
            if rng.random() < 0.1:
                want = better(history.tokens(tip), past, 24, 10_000, 24, 1.0, 0.2)
                assert decoder.draft(branch_at(history, tip), 50) == want


# ------------------------------------------------------------------------------------------------------------- by hand
TEXT = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 1, 2, 3]
"""Behind 1, 2, 3: 4 8, then 5 9, then 4 9, the latest first."""


def draft_of(text: list[int], room: int = 50, max_length: int = 100, **numbers: float) -> Draft:
    history = History(16)
    tip = history.append(0, text)
    return decoder_of(history, len(text), max_length=max_length, **numbers).draft(branch_at(history, tip), room)


@pytest.mark.parametrize(("numbers", "want"), [
    ({}, Draft((4, 5, 8), (0, 0, 1))),
    ({"max_spec_factor": 4 / 3}, Draft((4, 5, 8, 9), (0, 0, 1, 1))),
    ({"max_spec_factor": 0.0}, EMPTY),
    ({"max_spec_factor": 0.34}, Draft((4,), (0,))),
    ({"num_speculative_tokens": 2}, Draft((4, 5), (0, 0))),
    ({"min_token_prob": 0.5}, Draft((4,), (0,))),
    ({"min_token_prob": 2 / 3}, Draft((4,), (0,))),
    ({"min_token_prob": 0.7}, EMPTY),
    ({"max_tree_depth": 2}, Draft((4, 5), (0, 0))),
])  # fmt: skip
def test_the_numbers(numbers: dict[str, float], want: Draft) -> None:
    assert draft_of(TEXT, **numbers) == want


def test_the_longest_end_wins_and_says_how_much_is_drafted() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 9, 3, 8, 8, 8, 7, 1, 2, 3]
    assert draft_of(text) == Draft.chain([4, 5, 6, 9])
    assert draft_of(text, max_tree_depth=1) == Draft((8,), (0,)), "of equal shares the latest place's"


def test_nothing_like_it_drafts_nothing() -> None:
    for text in ([1, 2, 3, 4], [3], [1, 2, 1, 3]):
        assert draft_of(text) == EMPTY


@pytest.mark.parametrize("room", range(6))
def test_it_fits_the_rows_and_the_answer(room: int) -> None:
    """max_tokens is never overshot: behind a draft there is place for the token that is drawn."""
    text = [*range(9), *range(8)]
    assert draft_of(text, room).num_nodes == min(room, 8)
    assert draft_of(text, max_length=len(text) + 1 + room).num_nodes == min(room, 8)


def test_a_draft_s_grade_is_how_much_was_alike_and_how_sure_it_is() -> None:
    grades = [draft_of([*range(20), *range(size)]).grade for size in (1, 2, 4, 8, 16)]
    assert grades == sorted(set(grades))
    assert draft_of(TEXT).grade == draft_of([1, 2, 3, 4, 0, 1, 2, 3]).grade - 1


def test_the_prompt_goes_on_with_the_answer() -> None:
    history = History(16)
    root = history.append(0, [5, 1, 2])
    decoder = decoder_of(history, 3)
    tip = history.append(root, [3, 4, 5, 1])
    assert decoder.draft(branch_at(history, tip), 9) == Draft((2, 3), (0, 1))


# -------------------------------------------------------------------------------------------------------- past answers
def test_answers_that_ended_are_left_to_later_requests() -> None:
    archive, history = Archive(), History(16)
    tip = history.append(0, [9, 9, 1, 2, 3, 4])
    first, alone = decoder_of(history, 2, archive), decoder_of(history, 2)
    first.ended([Hypothesis(tip, (5, 6)), Hypothesis(history.ancestor(tip, 3), (7,))])
    alone.ended([Hypothesis(tip, (5, 6))])
    assert len(archive.of(PastAnswers)) == 2

    history = History(16)
    tip = history.append(0, [0, 2, 3])
    branch = branch_at(history, tip)
    assert decoder_of(history, 3, archive).draft(branch, 9) == Draft.chain([4, 5]), "the prompt is not among it"
    assert decoder_of(history, 3).draft(branch, 9) == EMPTY
    private = decoder_of(history, 3, archive, max_cached_requests=0)
    assert private.draft(branch, 9) == EMPTY
    private.ended([Hypothesis(tip, (8, 8))])
    assert len(archive.of(PastAnswers)) == 2, "who looks at none leaves none"


def test_what_was_written_wins_unless_past_answers_promise_more() -> None:
    archive, history = Archive(), History(16)
    archive.of(PastAnswers).add(KEY, [1, 2, 7])
    branch = branch_at(history, history.append(0, [1, 2, 3, 8, 1, 2]))
    assert decoder_of(history, 6, archive).draft(branch, 9) == Draft.chain([3, 8])
    for _ in range(2):
        archive.of(PastAnswers).add(KEY, [8, 1, 2, 7, 7, 7])
    assert decoder_of(history, 6, archive).draft(branch, 9) == Draft.chain([7, 7, 7])


def test_the_oldest_is_forgotten_first() -> None:
    past = PastAnswers(SuffixSpeculation(suffix_decoding_max_cached_requests=3))
    archive = Archive()
    archive._by_kind[PastAnswers] = past
    history = History(16)
    branches = [branch_at(history, history.append(0, [10 * i, 10 * i + 1])) for i in range(5)]

    def known(**numbers: float) -> list[int]:
        decoder = decoder_of(history, 2, archive, **numbers)
        return [i for i, branch in enumerate(branches) if decoder.draft(branch, 9).num_nodes]

    for i in range(5):
        past.add(KEY, [10 * i, 10 * i + 1, 10 * i + 2])
        assert known() == [*range(max(0, i - 2), i + 1)] and len(past) == min(i + 1, 3)
    assert known(max_cached_requests=2) == [3, 4], "a request's own number says how many it sees"
    assert known(max_cached_requests=10**6) == [2, 3, 4], "and never more than are kept"


def test_a_salt_finds_its_own_alone() -> None:
    """Of the same tokens, in one ring, and with others' answers between its own: what it finds is what a search of its
    own says."""
    rng, archive, histories = random.Random(5), Archive(), [History(16, salt) for salt in ("", "a", "b", "\0a\0")]
    past = archive._by_kind[PastAnswers] = PastAnswers(None, 2048)
    answers: list[tuple[int, list[int]]] = []
    for _ in range(300):
        whose = rng.randrange(4)
        answers.append((whose, [rng.randrange(12) for _ in range(rng.randrange(1, 60))]))
        past.add(histories[whose].salted, answers[-1][1])
        asking = rng.randrange(4)
        own = [answer for who, answer in answers[-len(past) :] if who == asking]
        end = rng.choice(answers)[1][:20]
        history = History(16, ("", "a", "b", "\0a\0")[asking])
        draft = decoder_of(history, len(end), archive).draft(branch_at(history, history.append(0, end)), 30)
        want = better(end, own, 24, 900, 24, 1.0, 0.1)
        one, other = (sorted(zip(one.parents, one.tokens, strict=True)) for one in (draft, want))
        assert one == other
    assert {*past._salts} == {history.salted for history in histories}
    for _ in range(200):
        past.add(histories[0].salted, [1] * 40)
    assert [*past._salts] == [histories[0].salted], "who has no answer any more is forgotten"
    for i in range(500):
        past.add(History(16, f"{i}").salted, [1] * 40)
        assert max(salted.number for salted in past._salts.values()) < 60, "and his number is another one's"


def test_bounds_are_the_engine_s() -> None:
    numbers = {"suffix_decoding_max_cached_requests": 5}
    assert Archive(SuffixSpeculation(**numbers)).of(PastAnswers).most == 5
    assert Archive(NGramSpeculation()).of(PastAnswers).most == 10_000 == Archive().of(PastAnswers).most
    nothing = Archive(SuffixSpeculation(suffix_decoding_max_cached_requests=0)).of(PastAnswers)
    nothing.add(KEY, [1, 2, 3])
    assert len(nothing) == 0 and nothing.whose(KEY) is None
    archive = Archive()
    assert archive.of(PastAnswers) is archive.of(PastAnswers)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([2, 5, 300]), st.integers(1, 40))
def test_a_ring_that_is_written_over_holds_the_latest(seed: int, kinds: int, most: int) -> None:
    """Of any lengths, the ring's quarter and more: what is found is what a search of the answers that are kept finds,
    and those are the latest without a gap."""
    rng, room = random.Random(seed), 256
    past = PastAnswers(SuffixSpeculation(suffix_decoding_max_cached_requests=most), room)
    answers: list[list[int]] = []
    history = History(16)
    archive = Archive()
    archive._by_kind[PastAnswers] = past
    for _ in range(80):
        answers.append([rng.randrange(kinds) for _ in range(rng.choice([1, 3, 9, 30, 63, 64, 200]))])
        past.add(KEY, answers[-1])
        kept = [answer[-room // 4 :] for answer in answers[-len(past) :]]
        assert 1 <= len(past) <= most
        assert len(past) == min(most, len(answers)) or sum(map(len, kept)) + len(kept) > room - FIRST - 2 * (room // 4)
        end = rng.choice(kept)[:20]
        tip = history.append(0, end)
        got = decoder_of(history, len(end), archive, min_token_prob=0.3).draft(branch_at(history, tip), 30)
        want = better(end, kept, 24, 900, 24, 1.0, 0.3)
        own, other = (sorted(zip(draft.parents, draft.tokens, strict=True)) for draft in (got, want))
        assert own == other


def test_past_answers_have_a_bounded_memory() -> None:
    """48 bytes a token, of as many as there is room for, however many come."""
    tracemalloc.start()
    past = PastAnswers(None, 1 << 12)
    for i in range(60):
        past.add(KEY, [i * j % 977 for j in range(300)])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 < used / (48 << 12) < 1.1, used
    assert (1 << 12) // 301 - 2 <= len(past) <= (1 << 12) // 301
    assert 48 * PAST_ROOM < 51e6


# ---------------------------------------------------------------------------------------------------------------- costs
def test_a_token_costs_the_same_however_long_the_text() -> None:
    """Three streams whose tokens interleave in the history, as those of n = 3 do."""
    history, seconds = History(16), []
    root = history.append(0, [7])
    decoder, tips = decoder_of(history, 1, max_length=10**6), [root] * 3
    for _ in range(4):
        began = time.thread_time()
        for i in range(2000):
            for stream in range(3):
                tips[stream] = history.append(tips[stream], [(i * i + stream) % 50 if i else 100 + stream])
                decoder.draft(branch_at(history, tips[stream], stream), 5)
        seconds.append(time.thread_time() - began)
    assert min(seconds[2:]) < 3 * min(seconds[:2]), seconds


def test_one_token_again_and_again() -> None:
    """The worst text for a suffix tree; it goes on for ever."""
    history, tip = History(16), 0
    tip = history.append(0, [5] * 4000)
    decoder = decoder_of(history, 4000, max_length=10**6)
    began = time.thread_time()
    for _ in range(500):
        tip = history.append_one(tip, 5)
        assert decoder.draft(branch_at(history, tip), 50).tokens == (5,) * 24
    assert time.thread_time() - began < 1


def test_a_prompt_is_read_once_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    history, read, append = History(16), [], Ring.append

    def reading(self: Ring, tokens: Tokens, is_found: bool = True) -> None:
        read.append(len(tokens))
        append(self, tokens, is_found)

    monkeypatch.setattr(Ring, "append", reading)
    root = history.append(0, [i % 100 for i in range(5000)])
    decoder = decoder_of(history, 5000, max_length=10**6)
    for stream in range(8):
        decoder.draft(branch_at(history, history.append(root, [stream]), stream), 9)
    assert sum(read) < 5000 + 8 * 30
