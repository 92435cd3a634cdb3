"""An answer's text as it grows, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagedec.core.stop_strings import StopStrings
from pagedec.text.byte_table import ByteTable
from pagedec.text.detokenizer import Detokenizer


class TextStream:
    """Turn an answer's tokens into pieces of text whose sum is the answer's text.

    A piece never ends within a character, nor with what may be the beginning of a stop string: such bytes are held back
    until it is known what they are. At the first place where a stop string ends the text ends: before the string, or
    with `include_stop_string` behind it. A stop string that ends within the first `min_tokens` tokens ends nothing, as
    in the engine. Of a token among `ends` nothing is said before another one follows it: it may be the answer's end.
    Bytes that are no UTF-8 become U+FFFD.
    """

    __slots__ = (
        "_end",
        "_ends",
        "_held",
        "_include",
        "_left",
        "_special",
        "_state",
        "_stop",
        "_table",
        "_text",
        "stop_string",
    )

    def __init__(
        self,
        table: ByteTable,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop_string: bool = False,
        skip_special_tokens: bool = True,
        ends: Collection[int] = (),
    ) -> None:
        self._table, self._include, self._left = table, include_stop_string, min_tokens
        self._special = table.special_ids if skip_special_tokens else frozenset()
        self._ends, self._end = ends, list[int]()  # and the last token, if it is one of them
        self._stop = StopStrings(tuple(stop)) if stop else None
        self._state = StopStrings.start
        self._held = b""
        """Bytes that may begin a stop string: those of `_state`."""
        self._text = Detokenizer(table, skip_special_tokens, keep_leading_space=True)
        self.stop_string: str | None = None
        """The stop string that has ended the text; what is pushed behind it is ignored."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens make certain."""
        if self._ends:
            known = [*self._end, *token_ids]
            self._end = known[-1:] if known and known[-1] in self._ends else []
            token_ids = known[: len(known) - len(self._end)]
        pieces = (b"" if token_id in self._special else self._table.token_bytes(token_id) for token_id in token_ids)
        if self._stop is None:
            return self._text.decode(b"".join(pieces), final=False)
        return "".join(self._stopped(piece, self._stop) for piece in pieces if self.stop_string is None)

    def finish(self, token_ids: Iterable[int] = ()) -> str:
        """Return what was held back, at the end of the answer. `token_ids`: a last token among `ends` that is part of
        the text; no stop string ends with it."""
        if self.stop_string is not None:
            return ""
        data = b"".join(self._table.token_bytes(token_id) for token_id in token_ids if token_id not in self._special)
        held, self._held = self._held, b""
        return self._text.decode(held + data, final=True)

    def _stopped(self, data: bytes, stop: StopStrings) -> str:
        """The text of one token, as far as no stop string may begin there."""
        counts, self._left = self._left <= 0, self._left - 1
        self._state, match = stop.feed(self._state, data)
        data = self._held + data
        if match is not None and counts:
            self.stop_string = stop.strings[match[0]]
            end = len(self._held) + match[1]
            return self._text.decode(data[: end if self._include else end - len(self.stop_string.encode())], final=True)
        sure = len(data) - stop.held(self._state)
        self._held = data[sure:]
        return self._text.decode(data[:sure], final=False)
