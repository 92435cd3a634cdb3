"""Tries of token sequences: what is built is what was given, in whatever form, and on disk."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import TokenTrie
from pagedec.constraints.trie import TrieConstraint
from pagedec.errors import InvalidArgument, ModelFileError


def sequences_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    top = rng.choice([3, 50, 2**20, 2**31 - 2])
    some = {tuple(rng.randrange(top) for _ in range(rng.randrange(1, 9))) for _ in range(rng.randrange(1, 200))}
    return rng.sample([list(sequence) for sequence in sorted(some)], len(some))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(30))
def test_a_trie_is_the_sequences_that_it_was_given(seed: int, tmp_path: Path) -> None:
    sequences = sequences_of(seed)
    item_ids = random.Random(seed).sample(range(10**12), len(sequences))
    built = TokenTrie(sequences, item_ids)
    built.save(tmp_path / "items.trie")
    width = max(map(len, sequences))
    table = np.array([[*sequence, *[-1] * (width - len(sequence))] for sequence in sequences])
    (tmp_path / "lines.txt").write_text("".join(f"{', '.join(map(str, sequence))}\n\n" for sequence in sequences))
    np.save(tmp_path / "items.npy", table)
    mapped = TokenTrie.open(tmp_path / "items.trie")
    others = [
        TokenTrie(table),
        TokenTrie.from_file(tmp_path / "lines.txt"),
        TokenTrie.from_file(tmp_path / "items.npy"),
    ]
    for trie in (built, mapped):
        assert [trie.item(sequence) for sequence in sequences] == item_ids and len(trie) == len(sequences)
    for trie in others:
        assert [trie.item(sequence) for sequence in sequences] == list(range(len(sequences)))
        assert all(np.array_equal(getattr(trie, name), getattr(built, name)) for name in ("tokens", "first_child"))
    lengths = [*map(len, sequences)]
    for trie in (built, mapped, *others):
        assert (trie.depth, trie.shortest) == (max(lengths), min(lengths))
    assert not mapped.tokens.flags.writeable and mapped.max_token == max(map(max, sequences)) == built.max_token
    begun = {tuple(sequence[:i]) for sequence in sequences for i in range(len(sequence))}
    assert mapped.splits == built.splits == any(tuple(sequence) in begun for sequence in sequences)
    assert len(built.tokens) == 1 + len(begun | {tuple(sequence) for sequence in sequences} - {()}) - (() in begun)
    for prefix in begun:
        node = 0
        for token in prefix:
            node = built.child(node, token)
        after = sorted(
            {s[len(prefix)] for s in sequences if len(s) > len(prefix) and tuple(s[: len(prefix)]) == prefix}
        )
        assert TrieConstraint(mapped, ()).allowed(node).tolist() == after
        assert built.child(node, max(after) + 1) == -1


def test_how_it_shows_itself() -> None:
    assert repr(TokenTrie([[7]])) == "<TokenTrie: 1 sequence of up to 1 token>"
    assert repr(TokenTrie([[7], [8, 9]])) == "<TokenTrie: 2 sequences of up to 2 tokens>"


def test_ends_and_forced_tokens() -> None:
    trie = TokenTrie([[1, 2], [1, 2, 3, 4, 5], [7], [8, 9, 0]])
    constraint = TrieConstraint(trie, (0, 6))
    start = constraint.start([5, 5])
    inner = constraint.next(constraint.next(start, 1), 2)
    assert constraint.allowed(start).tolist() == [1, 7, 8] and constraint.allowed(inner).tolist() == [0, 3, 6]
    assert constraint.forced(start, 9) == [] and constraint.forced(constraint.next(start, 1), 9) == [2]
    assert constraint.forced(constraint.next(inner, 3), 9) == [4], "the row behind the last token would answer nothing"
    assert constraint.forced(constraint.next(start, 8), 9) == [9], "an end token is none of them"
    assert constraint.is_over(constraint.next(start, 7)) and not constraint.is_over(inner)
    items = [constraint.item(tokens) for tokens in ([1, 2], [1, 2, 6], [1, 2, 3, 4, 5], [8, 9, 0], [1], [1, 6], [])]
    assert items == [0, 0, 1, 3, None, None, None]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "sequences is nothing: must be at least one: an empty trie allows nothing"),
        (np.empty((0, 3), np.int32), "must be at least one"),
        ([[1], []], r"sequences\[1\] is \[\]: must have at least one token"),
        (np.array([[1, 2], [-1, -1]]), r"sequences\[1\] is \[\]: must have at least one token"),
        ([[1, 2], [3], [1, 2]], r"sequences\[2\] is \[1, 2\]: must not be equal to another: sequences\[0\] is"),
        ([[1, 2], [3, -4]], r"sequences\[1\] is -4: token ids must be from 0 to 2147483647"),
        ([[2**31]], "token ids must be from 0"),
        ([["a"]], r"sequences\[0\] is \[.a.\]: must be a list of token ids"),
        ([3], r"sequences\[0\] is 3: must be a list of token ids"),
        (np.array([[1.5]]), "must be of whole numbers"),
        (np.array([[1, -1, 2]]), r"sequences\[0\] is \[1, -1, 2\]: must be padded behind its ids alone"),
        (np.array([[2**40]]), "must be ids from 0 to"),
        (np.array([[1, 2**63]], np.uint64), "sequences is 9223372036854775808: must be ids from 0 to"),
        (5, "sequences is 5: must be lists of token ids, or an array of them"),
        ([[1], [2, 1.5]], r"sequences\[1\] is \[2, 1.5\]: must be a list of token ids"),
        ([[1], "23"], r"sequences\[1\] is '23': must be a list of token ids"),
        ([[2**70]], r"sequences\[0\] is \[1180591620717411303424\]: must be a list of token ids"),
    ],
)
def test_what_makes_no_trie(sequences: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TokenTrie(sequences)


def test_item_ids_and_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="one for each of 2 sequences"):
        TokenTrie([[1], [2]], [5])
    for wrong in ([[1], [2, 3]], np.array([1, 2**63], np.uint64)):
        with pytest.raises(InvalidArgument, match="must be whole numbers of 64 bits, one for each of 2 sequences"):
            TokenTrie([[1], [2]], wrong)
    path = tmp_path / "some.trie"
    path.write_bytes(b"no trie at all")
    with pytest.raises(ModelFileError, match="is no trie"):
        TokenTrie.open(path)
    TokenTrie([[1, 2], [3]]).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"PDTRIE\0\2", b"PDTRIE\0\1"))
    with pytest.raises(ModelFileError, match="was written by another version of pagedec: build the trie again"):
        TokenTrie.open(path)
    path.write_bytes(whole[:-4])
    with pytest.raises(ModelFileError, match="bytes; a trie like its own has"):
        TokenTrie.open(path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        TokenTrie.open(tmp_path / "absent")
    with pytest.raises(ModelFileError, match="cannot be read: embedded null byte"):
        TokenTrie.open(str(path) + "\0")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "flat.npy", np.array([1, 2]))
    for name, problem in (("empty.npy", "No data left in file"), ("flat.npy", "its array must have two dimensions")):
        with pytest.raises(ModelFileError, match=f"is no file of token sequences: {problem}"):
            TokenTrie.from_file(tmp_path / name)
    (tmp_path / "words.txt").write_text("one two\n")
    with pytest.raises(ModelFileError, match="is no file of token sequences"):
        TokenTrie.from_file(tmp_path / "words.txt")


@pytest.mark.filterwarnings("error")
def test_the_highest_token_of_all() -> None:
    assert TokenTrie([[2**31 - 1, 3], [5]]).item([2**31 - 1, 3]) == 0


@pytest.mark.parametrize("word", [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x07\0\0\0"])
def test_a_damaged_file_is_refused_or_names_no_item(tmp_path: Path, word: bytes) -> None:
    path, constraints = tmp_path / "some.trie", 0
    TokenTrie([[1, 2], [1, 3], [4]]).save(path)
    whole = path.read_bytes()
    for place in range(8, len(whole), 4):
        path.write_bytes(whole[:place] + word + whole[place + 4 :])
        try:
            trie = TokenTrie.open(path)
        except ModelFileError:
            continue
        constraints += 1
        for tokens in ([1, 2], [1, 3], [4], [1], [9]):
            assert TrieConstraint(trie, (0,)).item(tokens) in (None, *trie.item_ids.tolist())
    assert constraints > 5


@pytest.mark.long
def test_ten_million_sequences_in_a_minute() -> None:
    codes = np.array(list(itertools.islice(itertools.product(range(256), repeat=3), 10_000_000 // 16)), np.int32)
    table = np.concatenate([np.c_[codes, np.full(len(codes), 300 + i, np.int32)] for i in range(16)])
    np.random.default_rng(0).shuffle(table)
    began = time.perf_counter()
    trie = TokenTrie(table)
    assert time.perf_counter() - began < 60 and len(trie) == 10_000_000
    assert [trie.item(table[i].tolist()) for i in (0, 77, 9_999_999)] == [0, 77, 9_999_999]
