"""A trie of allowed token sequences: what generative retrieval and recommendation choose from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from pagedec.core.constraint import Allowed, Constraint
from pagedec.errors import InvalidArgument, ModelFileError, Shown
from pagedec.fields import MAX_INT32

MAGIC = b"PDTRIE\x00\x01"
_HEAD = 64  # bytes before a file's arrays


class TokenTrie:
    """Sequences of token ids, each with the id of the item that it names: its place, unless `item_ids` says otherwise.

    `sequences`: a list of lists of ids, or an int array [num_sequences, width] padded with -1. An answer under a trie
    ends with the last token of a sequence; where other sequences begin with that one, an end token decides. Sequences
    may end with an end token themselves, as they do elsewhere. Raises `InvalidArgument` for no sequences, an empty one,
    ids below 0, and two that are equal: which item they name could not be told.
    """

    def __init__(self, sequences: Any, item_ids: Any = None) -> None:
        table = _table_of(sequences)
        ids = _ids_of(item_ids, len(table))
        tokens, first_child, ends = _build(table)
        splits = bool(((ends[1:] >= 0) & (np.diff(first_child)[1:] > 0)).any())
        self._hold(tokens, first_child, ends, ids, int(tokens.max()), splits)

    def _hold(
        self,
        tokens: np.ndarray,
        first_child: np.ndarray,
        ends: np.ndarray,
        item_ids: np.ndarray,
        max_token: int,
        splits: bool,
    ) -> None:
        self.tokens, self.first_child, self.ends, self.item_ids = tokens, first_child, ends, item_ids
        """int32 [num_nodes]: the token that leads to each node, level by level, the root (-1) first. Children of node i
        are nodes first_child[i] .. first_child[i + 1] - 1, by ascending token. int32 [num_nodes]: the sequence that
        ends there, -1: none. int64 [num_sequences]."""
        self.max_token, self.splits = max_token, splits
        """Some sequence begins another one."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TokenTrie:
        """Build one of a .npy file with an array as in the constructor, or of a text file with the token ids of one
        sequence a line, separated by spaces or commas. Raises `ModelFileError` for what is neither."""
        place = Path(path)
        try:
            if place.suffix == ".npy":
                array = np.load(place, mmap_mode="r")
                if not isinstance(array, np.ndarray) or array.ndim != 2:
                    raise ValueError("its array must have two dimensions, [num_sequences, width]")
                return cls(array)
            with place.open(encoding="utf-8") as lines:
                return cls([[int(part) for part in line.replace(",", " ").split()] for line in lines if line.strip()])
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise ModelFileError(place, f"is no file of token sequences: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the built trie; `open` maps it in no time."""
        place = Path(path)
        partial = place.with_name(place.name + ".part")
        with partial.open("wb") as file:
            numbers = [len(self.tokens), len(self.item_ids), self.max_token, self.splits]
            head = np.array(numbers, np.int64).tobytes()
            file.write((MAGIC + head).ljust(_HEAD, b"\0"))
            for array in (self.item_ids, self.tokens, self.first_child, self.ends):
                np.ascontiguousarray(array).tofile(file)
        partial.replace(place)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenTrie:
        """Map a file that `save` has written: its pages are read as they are needed, once for all processes. Raises
        `ModelFileError`. What is wrong further inside fails the requests that meet it."""
        place = Path(path)
        try:
            head = np.fromfile(place, np.uint8, _HEAD).tobytes()
            if len(head) < _HEAD or not head.startswith(MAGIC):
                raise ModelFileError(place, "is no trie that TokenTrie.save has written")
            num_nodes, num_sequences, max_token, splits = np.frombuffer(head, np.int64, 4, len(MAGIC)).tolist()
            size = _HEAD + 8 * num_sequences + 4 * (3 * num_nodes + 1)
            if num_nodes < 2 or num_sequences < 1 or place.stat().st_size != size:
                raise ModelFileError(place, f"has {place.stat().st_size} bytes; a trie like its own has {size}")
            data: np.ndarray = np.memmap(place, np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            if isinstance(error, ModelFileError):
                raise
            problem = error.strerror if isinstance(error, OSError) else None
            raise ModelFileError(place, f"cannot be read: {problem or error}") from None
        cuts = [_HEAD, _HEAD + 8 * num_sequences]
        cuts += [cuts[-1] + 4 * num_nodes, cuts[-1] + 4 * (2 * num_nodes + 1), size]
        ids, tokens, first_child, ends = (data[a:b] for a, b in itertools.pairwise(cuts))
        trie = cls.__new__(cls)
        tokens, first_child, ends = tokens.view(np.int32), first_child.view(np.int32), ends.view(np.int32)
        if tokens[0] != -1 or first_child[0] != 1 or first_child[-1] != num_nodes or not 0 <= max_token <= MAX_INT32:
            raise ModelFileError(place, "is damaged: its nodes do not begin and end as a trie's do")
        trie._hold(tokens, first_child, ends, ids.view(np.int64), max_token, bool(splits))
        return trie

    def __len__(self) -> int:
        return len(self.item_ids)

    def __repr__(self) -> str:
        return f"<TokenTrie: {len(self)} sequences, {len(self.tokens)} nodes>"

    def child(self, node: int, token: int) -> int:
        """The node behind one of a node's tokens; -1: it has no such token."""
        first, stop = int(self.first_child[node]), int(self.first_child[node + 1])
        if not node < first <= stop <= len(self.tokens):
            return -1  # in a damaged file
        place = first + int(self.tokens[first:stop].searchsorted(token))
        return place if place < stop and self.tokens[place] == token else -1

    def item(self, tokens: Iterable[int]) -> int | None:
        """The id of the item that a whole sequence names."""
        node = 0
        for token in tokens:
            node = self.child(node, token)
            if node < 0:
                return None
        end = int(self.ends[node])
        return int(self.item_ids[end]) if 0 <= end < len(self.item_ids) else None


class TrieConstraint(Constraint):
    """A state is a node. `stops` are the tokens that end an answer."""

    def __init__(self, trie: TokenTrie, stops: Sequence[int]) -> None:
        self._trie, self._first, self._stops = trie, trie.first_child, frozenset(stops)
        self._ends = np.array(sorted(stops), np.int32)

    def start(self, given: Sequence[int]) -> int:
        return 0

    def next(self, state: int, token: int) -> int:
        return self._trie.child(state, token)

    def allowed(self, state: int) -> Allowed:
        trie = self._trie
        ids: np.ndarray = trie.tokens[self._first[state] : self._first[state + 1]]
        if trie.splits and state and trie.ends[state] >= 0:
            return np.union1d(ids, self._ends)
        return ids

    def is_over(self, state: int) -> bool:
        return bool(self._first[state] == self._first[state + 1])

    def forced(self, state: int, most: int) -> Sequence[int]:
        """No token that leads to a leaf: the row behind it would answer nothing."""
        trie, first, out = self._trie, self._first, list[int]()
        while len(out) < most and first[state + 1] - first[state] == 1:
            child = int(first[state])
            token = int(trie.tokens[child])
            if (state and trie.ends[state] >= 0) or token in self._stops or first[child] == first[child + 1]:
                break
            out.append(token)
            state = child
        return out

    def item(self, tokens: Sequence[int]) -> int | None:
        """With or without the end token behind it."""
        found = self._trie.item(tokens)
        if found is None and tokens and tokens[-1] in self._stops:
            found = self._trie.item(tokens[:-1])
        return found


# ------------------------------------------------------------------------------------------------------------- building
def _table_of(sequences: Any) -> np.ndarray:
    """The sequences as int32 [num_sequences, width], padded with -1."""
    if isinstance(sequences, np.ndarray) and sequences.ndim == 2:
        table = sequences
        if table.dtype.kind not in "iu":
            raise InvalidArgument("sequences", Shown(f"an array of {table.dtype}"), "must be of whole numbers")
        if table.size and (table.max() > MAX_INT32 or table.min() < -1):
            wrong = int(table.max() if table.max() > MAX_INT32 else table.min())
            raise InvalidArgument("sequences", wrong, f"must be ids from 0 to {MAX_INT32}, padded with -1")
        gaps = (table[:, :-1] < 0) & (table[:, 1:] >= 0)
        if gaps.any():
            row = int(np.nonzero(gaps.any(axis=1))[0][0])
            raise InvalidArgument(f"sequences[{row}]", table[row].tolist(), "must be padded behind its ids alone")
        table = table.astype(np.int32, copy=False)
    else:
        table = _padded(sequences)
    if not len(table):
        raise InvalidArgument("sequences", Shown("nothing"), "must be at least one: an empty trie allows nothing")
    empty = np.nonzero(table[:, 0] < 0)[0] if table.shape[1] else np.zeros(1, int)
    if len(empty):
        raise InvalidArgument(f"sequences[{int(empty[0])}]", [], "must have at least one token")
    return table


def _padded(sequences: Iterable[Sequence[int]]) -> np.ndarray:
    """Rows of lists: one pass over their tokens."""
    try:
        rows = list(sequences)
    except TypeError:
        raise InvalidArgument("sequences", sequences, "must be lists of token ids, or an array of them") from None
    try:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(map(index, itertools.chain.from_iterable(rows)), np.int64, int(lengths.sum()))
    except (TypeError, ValueError, OverflowError) as error:
        raise _no_ids(rows) from error
    if len(flat) and not 0 <= flat.min() <= flat.max() <= MAX_INT32:
        wrong = int(np.nonzero((flat < 0) | (flat > MAX_INT32))[0][0])
        row = int(np.searchsorted(lengths.cumsum(), wrong, side="right"))
        raise InvalidArgument(f"sequences[{row}]", int(flat[wrong]), f"token ids must be from 0 to {MAX_INT32}")
    table = np.full((len(rows), int(lengths.max(initial=0))), -1, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table


def _no_ids(rows: Sequence[Any]) -> InvalidArgument:
    """The error of the first row that is no list of ids."""
    limit = "must be a list of token ids"
    for i, row in enumerate(rows):
        try:
            np.fromiter(map(index, row), np.int64, len(row))
        except (TypeError, ValueError, OverflowError):
            return InvalidArgument(f"sequences[{i}]", row, limit)
    return InvalidArgument("sequences", Shown(type(rows[0]).__name__), limit)


def _ids_of(item_ids: Any, count: int) -> np.ndarray:
    """int64 [count]: what each sequence names."""
    if item_ids is None:
        return np.arange(count, dtype=np.int64)
    limit = f"must be whole numbers of 64 bits, one for each of {count} sequences"
    try:
        ids = np.asarray(item_ids)
    except ValueError:
        raise InvalidArgument("item_ids", Shown("lists of several lengths"), limit) from None
    if ids.shape != (count,) or ids.dtype.kind not in "iu":
        raise InvalidArgument("item_ids", Shown(f"an array of {ids.shape} {ids.dtype}"), limit)
    if ids.max() > np.iinfo(np.int64).max:
        raise InvalidArgument("item_ids", int(ids.max()), limit)
    return ids.astype(np.int64)


def _order(table: np.ndarray) -> np.ndarray:
    """The rows' lexicographic order: as many columns as fit are compared as one number."""
    bits = (int(table.max()) + 1).bit_length()
    each = max(1, 63 // bits)
    keys = []
    for first in range(0, table.shape[1], each):
        key = np.zeros(len(table), np.int64)
        for column in range(first, min(first + each, table.shape[1])):
            key = (key << bits) | (table[:, column].astype(np.int64) + 1)
        keys.append(key)
    return np.argsort(keys[0]) if len(keys) == 1 else np.lexsort(keys[::-1])


def _build(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level by level over the sorted rows: a node begins where a row's first tokens differ from the row's before."""
    order = _order(table)
    rows = table[order]
    differs = np.ones(len(rows), np.bool_)
    differs[1:] = False
    tokens, children = [np.array([-1], np.int32)], list[np.ndarray]()
    nodes = np.zeros(len(rows), np.int64)  # of each row, on the level above
    first, num_parents, places = 1, 1, np.zeros(len(rows), np.int64)
    for column in rows.T:
        differs[1:] |= column[1:] != column[:-1]
        begins = differs & (column >= 0)
        parents = nodes[begins] - (first - num_parents)
        children.append(np.bincount(parents, minlength=num_parents))
        tokens.append(column[begins])
        number = first + np.cumsum(begins) - 1
        nodes = np.where(column >= 0, number, nodes)
        places = np.where(column >= 0, number, places)
        num_parents = int(begins.sum())
        first += num_parents
    if not differs.all():
        same = int(np.nonzero(~differs)[0][0])
        one, other = sorted((int(order[same - 1]), int(order[same])))
        shown = [token for token in rows[same].tolist() if token >= 0]
        raise InvalidArgument(f"sequences[{other}]", shown, f"must not be equal to another: sequences[{one}] is")
    if first > MAX_INT32:
        raise InvalidArgument("sequences", Shown(f"{first} nodes"), f"must have at most {MAX_INT32} nodes")
    children.append(np.zeros(num_parents, np.int64))
    first_child = np.ones(first + 1, np.int32)
    first_child[1:] = 1 + np.cumsum(np.concatenate(children))
    ends = np.full(first, -1, np.int32)
    ends[places] = order
    return np.concatenate(tokens), first_child, ends
