"""Pieces of text: their sum is the answer's text, and none of them says more than is certain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.engine.completion import Completion
from pagedec.llm.writer import Writer
from pagedec.params import SamplingParams
from pagedec.text.byte_table import ByteTable
from pagedec.text.streaming import TextStream
from pagedec.text.tokenizer import Tokenizer

SPECIAL = 3
TEXTS = ["a", "b", "<sp>", "aab", "ab", "é", "\N{PARTY POPPER}", "ba", " ", "stop", ""]
PIECES = [text.encode() for text in TEXTS]
PIECES += [
    "é".encode()[:1],
    "é".encode()[1:],
    "\N{PARTY POPPER}".encode()[:2],
    "\N{PARTY POPPER}".encode()[2:],
    b"\xff",
    b"a\xc3",
]
TABLE = ByteTable(PIECES, frozenset({2}))
STOPS = [
    "aab",
    "aaab",
    "ab",
    "b",
    "é",
    "a\N{PARTY POPPER}b",
    "aé",
    "stop",
    "sto",
    "op",
    "<sp>",
    "<sp>a",
    "  ",
    "\ufffd",
]


def stopped(token_ids: list[int], params: SamplingParams, table: ByteTable) -> Completion:
    """What the engine answers with these tokens drawn."""
    silent = table.special_ids if params.skip_special_tokens else frozenset()
    strings = StopStrings(tuple(params.stop)) if params.stop else None
    stopping = Stopping(
        (), tuple(params.stop_token_ids), params.min_tokens, strings=strings, pieces=table.pieces, silent=silent
    )
    cut = stopping.cut(stopping.start, token_ids)
    return Completion(list(cut.tokens), cut.reason or "length", cut.stop_token, 0.0, cut.stop_string, cut.excess_bytes)


class Table:
    """As much of a tokenizer as texts need."""

    def __init__(self, table: ByteTable) -> None:
        self.byte_table = table


def check(token_ids: list[int], params: SamplingParams, table: ByteTable, cuts: list[int]) -> None:
    answer = stopped(token_ids, params, table)
    answers = Writer(Table(table), ())  # type: ignore[arg-type]
    final = answers.text(answer, params)
    stream = answers.stream(params)
    assert stream is not None
    shown, ends = answer.token_ids, params.stop_token_ids
    text, at = "", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(shown)), len(shown)]:
        text, at = text + stream.push(shown[at:cut]), cut
        assert final.startswith(text), "what was shown must stay"
        known = shown[: cut - 1] if cut and shown[cut - 1] in ends else shown[:cut]
        data = table.join(known, params.skip_special_tokens)
        if stream.stop_string is None:
            held = max((n for n in range(len(data) + 1) if begins(data[len(data) - n :], params.stop or ())), default=0)
            sure = data[: len(data) - held].decode("utf-8", "replace").rstrip("\ufffd")
            assert len(text) >= len(sure), "nothing is held back for longer than it must be"
    belongs = answer.stop_token is None or params.include_stop_str_in_output
    text += stream.finish(shown[-1:] if belongs and shown[-1:] and shown[-1] in ends else ())
    assert text == final
    assert stream.stop_string == answer.stop_string
    assert stream.push([0]) == stream.finish() == "" or answer.stop_string is None


def begins(data: bytes, stops: tuple[str, ...]) -> bool:
    return any(stop.encode().startswith(data) and len(data) < len(stop.encode()) for stop in stops)


@settings(max_examples=300)
@given(
    token_ids=st.lists(st.integers(0, len(PIECES) + 1), max_size=14),
    stop=st.lists(st.sampled_from(STOPS), max_size=3),
    stop_token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=1),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
    skip=st.booleans(),
    cuts=st.lists(st.integers(0, 14), max_size=14),
)
def test_pieces_of_any_vocabulary(
    token_ids: list[int],
    stop: list[str],
    stop_token_ids: list[int],
    min_tokens: int,
    include: bool,
    skip: bool,
    cuts: list[int],
) -> None:
    params = SamplingParams(
        stop=stop,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    check(token_ids, params, TABLE, cuts)


def test_pieces_of_the_embedded_vocabulary(tokenizer: Tokenizer) -> None:
    """Random tokens of it; stop strings are taken out of their own text, so that they come within and across tokens."""
    rng, num_stopped = random.Random(0), 0
    table = tokenizer.byte_table
    for _ in range(200):
        token_ids = [rng.choice([rng.randrange(len(table)), rng.randrange(260), 2]) for _ in range(rng.randint(1, 30))]
        text = table.join(token_ids, True).decode("utf-8", "ignore")
        stops = []
        for _ in range(rng.randint(0, 3)):
            begin = rng.randrange(max(1, len(text)))
            stops += [text[begin : begin + rng.randint(1, 12)]] if text[begin:] else []
        params = SamplingParams(
            stop=stops, min_tokens=rng.choice([0, 0, 3]), include_stop_str_in_output=rng.random() < 0.3
        )
        check(token_ids, params, table, rng.sample(range(30), rng.randint(0, 30)))
        num_stopped += stopped(token_ids, params, table).stop_string is not None
    assert num_stopped > 60


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces"),
    [
        (["a", "a", "a", "b", "b"], ["aaab"], ["", "", "", "", ""]),
        (["a", "a", "b", "b"], ["aaab"], ["", "", "aab", "b"]),
        (["a", "a", "a", "b", "b"], ["aab"], ["", "", "a", "", ""]),
        (["b", "stop", "b"], ["to"], ["b", "s", ""]),
        (["b", "stop", "b"], ["stop", "top"], ["b", "", ""]),
        (["é", "a"], ["é!"], ["", "éa"]),
    ],
)
def test_what_is_held_back(tokens: list[str], stop: list[str], pieces: list[str]) -> None:
    stream = TextStream(TABLE, stop)
    assert [stream.push([TEXTS.index(token)]) for token in tokens] == pieces
    assert stream.finish() == ""


def test_halves_of_characters_wait() -> None:
    first, second = len(TEXTS), len(TEXTS) + 1
    stream = TextStream(TABLE)
    assert [stream.push([first]), stream.push([second]), stream.push([first]), stream.finish()] == [
        "",
        "é",
        "",
        "\ufffd",
    ]
    stream = TextStream(TABLE, ["é"])
    assert (stream.push([0, first]), stream.push([second]), stream.stop_string) == ("a", "", "é")


def test_the_first_words_space() -> None:
    """It stays, other than in a text of its own: an answer goes on with what stands before it."""
    table = ByteTable([b" the", b" cat"], frozenset(), drops_leading_space=True)
    assert TextStream(table).push([0, 1]) == " the cat"
    stopped = TextStream(table, [" c"])
    assert [stopped.push([0]), stopped.push([1])] == [" the", ""]
