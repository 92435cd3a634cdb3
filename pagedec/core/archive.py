"""What an engine keeps of requests that have ended, for the decoders of later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pagedec.speculation import Speculation

T = TypeVar("T")


class Archive:
    """An object of each kind that decoders ask for, made when it is first asked for. It is read and written between two
    steps; what is asked for may be by any thread.

    No token may depend on what is in it, since that follows from company; how many steps an answer takes may. That
    tells something of what others left, so kinds keep apart what has different keys, `History.salted`.
    """

    __slots__ = ("_by_kind", "_speculation")

    def __init__(self, speculation: Speculation | None = None) -> None:
        """`speculation`: how requests draft that say nothing of it. Kinds take their bounds from it: a request may
        neither widen nor narrow what all share."""
        self._speculation = speculation
        self._by_kind: dict[Any, Any] = {}

    def of(self, kind: Callable[[Speculation | None], T]) -> T:
        """The one object of a kind, which is made by `kind(speculation)`."""
        known: T | None = self._by_kind.get(kind)
        return self._by_kind.setdefault(kind, kind(self._speculation)) if known is None else known
