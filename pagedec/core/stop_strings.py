"""Strings that end a text: an automaton over its bytes (Aho & Corasick 1975)."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.errors import InvalidArgument, Shown
from pagedec.fields import check_encodable

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1 << 16
"""Of all strings of a request: their automaton is made in some 0.1 s then."""


class StopStrings:
    """Finds the first place where one of `strings` ends, however the bytes are cut into pieces.

    A state is a number below 2^32. It names the longest end of what was fed that begins one of the strings; states are
    immutable values, so they fork and roll back for free. Of several strings that end at the same byte the longest is
    found. Raises `InvalidArgument` naming `stop` for more than `MAX_STOP_STRINGS` or `MAX_STOP_BYTES`, an empty one, or
    one that is no text.
    """

    __slots__ = ("_children", "_depth", "_fail", "_found", "_held", "strings")

    start = 0

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = _checked(strings)
        self._children: list[dict[int, int]] = [{}]
        self._depth = [0]
        self._found: list[int] = [-1]  # the longest string that ends in a state, or -1
        for index, string in enumerate(self.strings):
            state = 0
            for depth, byte in enumerate(string.encode(), start=1):
                state = self._children[state].setdefault(byte, len(self._depth))
                if state == len(self._depth):
                    self._children.append({})
                    self._depth.append(depth)
                    self._found.append(-1)
            if self._found[state] < 0:
                self._found[state] = index
        self._fail = [0] * len(self._depth)
        self._held = [0] * len(self._depth)
        self._link()

    def feed(self, state: int, data: bytes) -> tuple[int, tuple[int, int] | None]:
        """The state after all of `data`, and the match in it that ends first: (index of the string, bytes of `data` up
        to its end)."""
        match = None
        children, fail, found = self._children, self._fail, self._found
        for count, byte in enumerate(data, start=1):
            while state and byte not in children[state]:
                state = fail[state]
            state = children[state].get(byte, 0)
            if match is None and found[state] >= 0:
                match = found[state], count
        return state, match

    def held(self, state: int) -> int:
        """How many of the last bytes may be the beginning of a stop string."""
        return self._held[state]

    def _link(self) -> None:
        """Each state's longest proper end that is a state too, level by level; what ends there ends here as well."""
        level = [0]
        while level:
            below = []
            for state in level:
                fail = self._fail[state]
                if self._found[state] < 0:
                    self._found[state] = self._found[fail]
                self._held[state] = self._depth[state] if self._children[state] else self._held[fail]
                for byte, child in self._children[state].items():
                    link = fail
                    while link and byte not in self._children[link]:
                        link = self._fail[link]
                    self._fail[child] = self._children[link].get(byte, 0) if state else 0
                    below.append(child)
            level = below

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopStrings) and self.strings == other.strings

    def __hash__(self) -> int:
        return hash(self.strings)

    def __repr__(self) -> str:
        return f"StopStrings({self.strings!r})"


def _checked(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop", Shown(f"{len(strings)} strings"), f"must be at most {MAX_STOP_STRINGS}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidArgument("stop", string, "must hold strings that are not empty")
        check_encodable("stop", string)
    num_bytes = sum(len(string.encode()) for string in strings)
    if num_bytes > MAX_STOP_BYTES:
        raise InvalidArgument("stop", Shown(f"{num_bytes} bytes"), f"must be at most {MAX_STOP_BYTES} in all")
    return tuple(strings)
