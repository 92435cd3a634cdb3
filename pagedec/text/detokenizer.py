"""Text that grows token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagedec.text.byte_table import ByteTable


class Detokenizer:
    """Turn tokens into pieces of text whose sum is the text of all tokens.

    A character is emitted when its last byte has come, never in halves. Bytes that are no UTF-8 become U+FFFD.
    """

    __slots__ = ("_at_start", "_pending", "_special", "_table")

    def __init__(self, table: ByteTable, skip_special_tokens: bool = True, keep_leading_space: bool = False) -> None:
        self._table = table
        self._special = table.special_ids if skip_special_tokens else frozenset()
        self._pending = b""
        self._at_start = table.drops_leading_space and not keep_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        data = b"".join(self._table.token_bytes(token_id) for token_id in token_ids if token_id not in self._special)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self.decode(data, final=False)

    def finish(self) -> str:
        """Return what an unfinished last character leaves: U+FFFD, or nothing."""
        return self.decode(b"", final=True)

    def decode(self, data: bytes, final: bool) -> str:
        """Return the text that bytes of tokens complete. `final`: none follow."""
        data = self._pending + data
        text, num_used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[num_used:]
        return text
