"""What a chat template may take: steps, and the size of everything that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000
"""Of a microsecond at most. Ten thousand messages take some 500,000 in the templates of known families."""
MAX_CHARACTERS = 1 << 24
"""Of what is written, and of every value on the way; containers count with all that is in them."""
MAX_COUNT = 1 << 20
"""Of what a template asks to be repeated or filled up."""
MAX_BITS = 1 << 14
"""Of a whole number."""
PER_STEP = 64
"""Characters that are copied in a step."""


ITEMS_PER_STEP = 8
"""Items of a list that are compared in a step."""
CONTAINERS = (list, tuple, range)


class Exhausted(Exception):
    """A template has gone beyond a bound; the text says which, as the end of "must be ..."."""


class Budget:
    """The steps that a rendering may still take, and the sizes that are known. Templates change no container but
    namespaces, so one that was measured once keeps its size."""

    __slots__ = ("left", "num_namespaces", "sizes")

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps
        self.num_namespaces = 0
        self.sizes: dict[int, tuple[object, int]] = {}  # by identity, which the object kept here makes sure of

    def spend(self, steps: int) -> None:
        """Take steps. Raises `Exhausted` when they are used up."""
        self.left -= max(steps, 0)
        if self.left < 0:
            raise Exhausted(
                f"must be rendered in at most {MAX_STEPS} steps; its loops, calls and long values take more"
            )

    def size(self, value: Any) -> int:
        """About how many characters a value takes when it is written out. What is new to it is walked through, at a
        step an item."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        if isinstance(value, range):
            return len(value)
        if isinstance(value, Namespace):
            self.num_namespaces += 1
            attributes: dict[str, Any] = object.__getattribute__(value, "_Namespace__attrs")
            self.spend(2 + len(attributes))
            return sum(map(self.size, attributes.values()))
        if not isinstance(value, (list, tuple, dict)):
            return 0
        known = self.sizes.get(id(value))
        if known is not None:
            return known[1]
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        self.spend(2 + len(parts))
        before = self.num_namespaces
        size = len(parts) + sum(map(self.size, parts))
        if self.num_namespaces == before:
            self.sizes[id(value)] = value, size
        return size


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """What is compiled and rendered inside is charged to this budget."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def spend(steps: int) -> None:
    """Take steps of the budget in use."""
    _budget.get().spend(steps)


def size_of(value: Any) -> int:
    """The size of a value, by the budget in use."""
    return _budget.get().size(value)


def bound(size: int) -> None:
    """Raise `Exhausted` for a size that nothing may have."""
    if size > MAX_CHARACTERS:
        raise Exhausted(
            f"must not make texts or lists of more than {MAX_CHARACTERS} characters, with all that is in them"
        )


def check_counts(*counts: object) -> None:
    """Raise `Exhausted` if one of them is the number of something that nobody needs."""
    for count in counts:
        if isinstance(count, int) and abs(count) > MAX_COUNT:
            raise Exhausted(f"must not ask for more than {MAX_COUNT} of anything, asks for {count}")


def check_bits(bits: int) -> None:
    """Raise `Exhausted` for the bits of a whole number with which counting takes long."""
    if bits > MAX_BITS:
        raise Exhausted(f"must not make whole numbers of more than {MAX_BITS} bits")


def made(value: Any) -> Any:
    """A new value: bounded, and charged for its characters. What gives items one by one is charged as it does."""
    if isinstance(value, (str, bytes)):
        bound(len(value))
        spend(1 + len(value) // PER_STEP)
        return value
    if isinstance(value, int):
        check_bits(value.bit_length())
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return counting(value)
    bound(size_of(value))
    spend(1)
    return value


def read(value: Any) -> Any:
    """A value of which all is looked at, as for writing or comparing it: charged for its size and its items."""
    spend(1)
    look(value)
    return value


def look(value: Any) -> None:
    """Take the steps of looking at all of a value, of which a small one has none."""
    steps = size_of(value) // PER_STEP
    spend(steps + len(value) // ITEMS_PER_STEP if isinstance(value, CONTAINERS) else steps)


def counting(items: Iterable[Any]) -> Iterator[Any]:
    """The items, each charged when it is asked for."""
    for item in items:
        spend(4)
        bound(size_of(item))
        yield item


class Turns:
    """What a loop goes through, of known length; each turn is charged."""

    __slots__ = ("_items", "_steps")

    def __init__(self, items: Any, steps: int) -> None:
        self._items, self._steps = items, steps

    def __iter__(self) -> Iterator[Any]:
        return _charged(self._items, self._steps)

    def __len__(self) -> int:
        return len(self._items)


def turns(items: Any, steps: int) -> Iterable[Any]:
    """What a loop goes through; a turn takes so many steps."""
    steps = max(steps, 1)  # a template can name this filter too
    return Turns(items, steps) if hasattr(items, "__len__") else _charged(items, steps)


def _charged(items: Iterable[Any], steps: int) -> Iterator[Any]:
    for item in items:
        spend(steps)
        yield item


def joined(parts: Iterable[Any]) -> str:
    """What is written by a template, a macro or a block."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        bound(size)
        kept.append(part)
    spend(1 + size // PER_STEP)
    return "".join(kept)
