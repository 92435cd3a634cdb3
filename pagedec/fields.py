"""Checked fields: what a configuration value may be, said once, for Python, the command line and files alike."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from pagedec.errors import FeatureNotAvailable, InvalidArgument, nearest

T = TypeVar("T")
RULE = "rule"
MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1
HALF = "must be text, has half a surrogate pair at character {}"
SIZE_UNITS = {"": 1, "b": 1}
for _exponent, _letter in enumerate("kmgt", start=1):
    SIZE_UNITS |= {_letter: 1024**_exponent, f"{_letter}ib": 1024**_exponent, f"{_letter}b": 1000**_exponent}


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """What one field may hold. `check` returns the value in its one normal form, `parse` reads it from text."""

    help: str
    optional: bool = dataclasses.field(default=False, kw_only=True)
    """True: None is allowed too."""
    available: tuple[Any, ...] = dataclasses.field(default=(), kw_only=True)
    """What this version can do, where that is less than what it understands; () is all. The rest is refused by name."""
    metavar: ClassVar[str] = "VALUE"
    repeated: ClassVar[bool] = False
    """True: a flag may be given several times, and its values are put together."""

    @property
    @abstractmethod
    def limit(self) -> str:
        """What is allowed, as the end of "must be ..."."""

    @property
    def offered(self) -> tuple[Any, ...]:
        """The choices that this version has; () where the rule has none."""
        choices: tuple[Any, ...] = getattr(self, "choices", ())
        return tuple(choice for choice in choices if not self.available or choice in self.available)

    @abstractmethod
    def accept(self, value: object) -> Any:
        """The normal form, or ValueError or TypeError."""

    def read(self, text: str) -> object:
        """The value that this text means; ValueError if it means none."""
        return text

    def check(self, name: str, value: object) -> Any:
        if value is None and self.optional:
            return None
        try:
            accepted = self.accept(value)
        except UnicodeEncodeError as error:
            raise InvalidArgument(name, value, HALF.format(error.start)) from None
        except (ValueError, TypeError, OverflowError):
            raise InvalidArgument(name, value, f"must be {self.limit}{' or None' if self.optional else ''}") from None
        if self.available and accepted not in self.available:
            available = ", ".join(map(str, self.available))
            raise FeatureNotAvailable(name, value, f"not available in this version; available: {available}")
        return accepted

    def parse(self, name: str, text: str) -> Any:
        if self.optional and text.lower() == "none":
            return None
        try:
            value = self.read(text)
        except (ValueError, TypeError, RecursionError):
            raise InvalidArgument(name, text, f"must be {self.limit}") from None
        return self.check(name, value)


def _one_of(choices: Iterable[object]) -> str:
    names = list(map(str, choices))
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _within(value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError


def check_encodable(field: str, text: str) -> None:
    """Raise `InvalidArgument` for a text with half a surrogate pair, which has no bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, text, HALF.format(error.start)) from error


def float32(number: float) -> float:
    """The number as the kernels take it; infinite where it is too large for them."""
    return ctypes.c_float(number).value


@dataclass(frozen=True, slots=True)
class Integer(Rule):
    """A whole number from `low` to `high`; numpy's integers count, bools do not."""

    low: int = 0
    high: int = MAX_INT32
    choices: tuple[int, ...] = ()
    metavar = "INT"

    @property
    def limit(self) -> str:
        if self.choices:
            return _one_of(self.offered)
        return f"a whole number from {self.low} to {self.high}"

    def accept(self, value: object) -> int:
        number = _integer(value)
        _within(number, self.low, self.high)
        if self.choices and number not in self.choices:
            raise ValueError
        return number

    def read(self, text: str) -> object:
        return int(text)


@dataclass(frozen=True, slots=True)
class Number(Rule):
    """A finite number from `low` to `high`; `above` excludes its own value; `zero` is allowed besides.

    All of it holds in fp32, in which the kernels take it: one that they refuse would cost its whole step.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    zero: bool = False
    metavar = "NUMBER"

    @property
    def limit(self) -> str:
        parts = [f"at least {self.low:g}" if self.low is not None else ""]
        parts += [f"above {self.above:g}" if self.above is not None else ""]
        parts += [f"at most {self.high:g}" if self.high is not None else ""]
        bits = " in 32 bits" if self.high is None or self.above is not None else ""
        return ("0, or " if self.zero else "") + f"a finite number {' and '.join(filter(None, parts))}".rstrip() + bits

    def accept(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        number = float(value)
        rounded = float32(number)
        if not math.isfinite(rounded):
            raise ValueError
        if self.zero and number == 0:
            return 0.0
        _within(number, self.low, self.high)
        if self.above is not None and rounded <= self.above:
            raise ValueError
        return number

    def read(self, text: str) -> object:
        return float(text)


@dataclass(frozen=True, slots=True)
class Flag(Rule):
    """True or False, nothing that merely looks like it."""

    metavar = "BOOL"

    @property
    def limit(self) -> str:
        return "true or false"

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    def read(self, text: str) -> object:
        return {"true": True, "false": False}.get(text.lower(), text)


@dataclass(frozen=True, slots=True)
class Text(Rule):
    """A text that is not empty, or a path; with `choices`, one of them."""

    choices: tuple[str, ...] = ()
    metavar = "TEXT"

    @property
    def limit(self) -> str:
        return _one_of(self.offered) if self.choices else "a text that is not empty"

    def accept(self, value: object) -> str:
        if isinstance(value, PurePath):
            value = str(value)
        if not isinstance(value, str):
            raise TypeError
        if not value or (self.choices and value not in self.choices):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class TokenIds(Rule):
    """Token ids, kept as a tuple; None means none, or with `optional` no rule. As text: separated by commas."""

    metavar = "ID,ID"
    filled: bool = False
    """True: at least one."""

    @property
    def limit(self) -> str:
        return f"a sequence of {'at least one token id' if self.filled else 'token ids'} from 0 to {MAX_INT32}"

    def accept(self, value: object) -> tuple[int, ...]:
        if value is None:
            return ()
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise TypeError
        token_ids = tuple(_integer(token_id) for token_id in value)
        for token_id in token_ids:
            _within(token_id, 0, MAX_INT32)
        if self.filled and not token_ids:
            raise ValueError
        return token_ids

    def read(self, text: str) -> object:
        return [int(part) for part in text.split(",") if part.strip()]


@dataclass(frozen=True, slots=True)
class Texts(Rule):
    """One text or several, none of them empty, kept as a tuple; None means none. As text: itself, or a JSON list."""

    metavar = "TEXT"
    repeated = True

    @property
    def limit(self) -> str:
        return "a text that is not empty, or a list of them"

    def accept(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
            raise TypeError
        texts = (value,) if isinstance(value, str) else tuple(value)
        for text in texts:
            if not isinstance(text, str):
                raise TypeError
            if not text.encode("utf-8"):
                raise ValueError
        return texts

    def read(self, text: str) -> object:
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text) if text.startswith("[") else text
        return text


@dataclass(frozen=True, slots=True)
class TokenNumbers(Rule):
    """A finite number from `low` to `high` for each of some token ids, which may be texts. As text: a JSON object."""

    low: float
    high: float
    metavar = "JSON"

    @property
    def limit(self) -> str:
        return f'a table of token ids and numbers from {self.low:g} to {self.high:g}, as JSON such as {{"17": -2.5}}'

    def accept(self, value: object) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise TypeError
        numbers: dict[int, float] = {}
        for key, number in value.items():
            token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else _integer(key)
            _within(token_id, 0, MAX_INT32)
            if token_id in numbers:
                raise ValueError
            numbers[token_id] = Number("", low=self.low, high=self.high).accept(number)
        return numbers

    def read(self, text: str) -> object:
        return json.loads(text)


@dataclass(frozen=True, slots=True)
class Size(Rule):
    """A number of bytes, kept as int; also as text with a unit, such as "2GiB" or "512MB"."""

    low: int = 1
    high: int = 2**50
    metavar = "SIZE"

    @property
    def limit(self) -> str:
        return f'a number of bytes from {self.low} to {self.high}, or a text such as "2GiB" or "512MB"'

    def accept(self, value: object) -> int:
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
            if match is None or match[2].lower() not in SIZE_UNITS:
                raise ValueError
            value = int(Fraction(match[1]) * SIZE_UNITS[match[2].lower()])
        number = _integer(value)
        _within(number, self.low, self.high)
        return number


@dataclass(frozen=True, slots=True)
class Table(Rule):
    """A table of names and values. As text: a JSON object."""

    metavar = "JSON"

    @property
    def limit(self) -> str:
        return 'a table of names and values, on the command line a JSON object such as {"name": 1}'

    def accept(self, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError
        return dict(value)

    def read(self, text: str) -> object:
        return json.loads(text)


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with a default and a rule."""
    return dataclasses.field(default=default, metadata={RULE: rule})


def rules(cls: type[Any]) -> dict[str, tuple[Rule, Any]]:
    """Each checked field of a dataclass by name: its rule and its default. Inherited ones come last."""
    fields = {f.name: f for f in dataclasses.fields(cls) if RULE in f.metadata}
    return {name: (fields[name].metadata[RULE], fields[name].default) for name in field_names(cls) if name in fields}


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields, its own before those it inherits."""
    return tuple(sorted((f.name for f in dataclasses.fields(cls)), key=lambda name: name not in cls.__annotations__))


@functools.cache
def _checks(cls: Any) -> tuple[tuple[str, Rule], ...]:
    return tuple((name, rule) for name, (rule, _) in rules(cls).items())


def check_fields(record: Any) -> None:
    """Check every field of a frozen dataclass and put its value into normal form; for use in `__post_init__`."""
    for name, rule in _checks(record.__class__):
        object.__setattr__(record, name, rule.check(name, getattr(record, name)))


def check_names(kind: str, names: Iterable[str], known: Iterable[str], values: Mapping[str, Any], *others: Any) -> None:
    """Raise InvalidArgument for the first name that is not known, with those that are, or what one of `others` says."""
    known = tuple(known)
    for name in names:
        if name not in known:
            told = next((table[name] for table in others if name in table), None)
            meant = nearest(str(name), known)
            limit = f"not a field of {kind}; {told or 'known are ' + ', '.join(known)}"
            raise InvalidArgument(name, values[name], limit if told or not meant else f"{limit}; did you mean {meant}?")


def strict(cls: type[T]) -> type[T]:
    """Make an unknown keyword of a dataclass an InvalidArgument; its `READ` leaves out those that ask for nothing."""
    init: Callable[..., None] = cls.__init__
    known, read = field_names(cls), getattr(cls, "READ", dict)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = read(kwargs)
        check_names(cls.__name__, kwargs, known, kwargs, getattr(cls, "ELSEWHERE", {}))
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
