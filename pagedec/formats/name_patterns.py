"""Regular expressions of modules' names, which whoever wrote a file may have chosen to be slow: what trying one takes
is known before."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

MAX_NAME = 128
"""Characters of a module's name that patterns are tried on."""
MAX_LENGTH = 512
"""Characters of a pattern."""
MAX_STEPS = 2**28
"""Of a match, at most: three repeats of anything that stand behind each other, and some 80 characters besides."""
_CHARACTERS = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_BOUNDARIES = {"AT_BOUNDARY", "AT_NON_BOUNDARY"}
_ITEM, _BOUNDARY, _ROUND = 4, 128, 256
"""Steps of an item that is no character, of one that looks at both sides, and of a round of a repeated group."""
_DOT = ord(".")

try:
    _parser: Any = importlib.import_module("re._parser")
except ImportError:
    _parser = importlib.import_module("sre_parse")


def compile_pattern(pattern: str) -> tuple[re.Pattern[str], int]:
    """Return a regular expression of a whole name, or of its end from a dot on, for `match`, and how many steps that
    takes at most on a name of `MAX_NAME` characters, `MAX_STEPS` + 1 for all that are more.

    A search that goes back tries each way through the expression at most once: steps are ways times those of one.
    Raises re.error, RecursionError and OverflowError for what is no regular expression.
    """
    own = _parser.parse(pattern)
    anywhere = "" if _needs_no_beginning(own) else r"(.*\.)?"
    whole = f"{anywhere}({pattern})$"
    ways, steps = _measure(_parser.parse(whole))
    return re.compile(whole), min(ways * steps, MAX_STEPS + 1)


def _needs_no_beginning(tree: Any) -> bool:
    """Whether an expression fits no more names if anything may stand before it: it says ^ or .* itself."""
    if not len(tree):
        return False
    name, value = str(tree[0][0]), tree[0][1]
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, repeated = value
        return low == 0 and high >= MAX_NAME and len(repeated) == 1 and str(repeated[0][0]) == "ANY"
    return name == "AT" and str(value) == "AT_BEGINNING"


def _measure(tree: Any) -> tuple[int, int]:
    """Return the ways through a sequence, at most `MAX_STEPS` + 1, and the steps of one at most."""
    ways, steps = 1, 0
    for i, (kind, value) in enumerate(tree):
        following = tree[i + 1] if i + 1 < len(tree) else None
        own, more = _measure_item(str(kind), value, following)
        ways, steps = min(ways * own, MAX_STEPS + 1), steps + more
    return ways, steps


def _measure_item(name: str, value: Any, following: Any) -> tuple[int, int]:
    if name in _CHARACTERS or name in ("AT", "FAILURE"):
        return 1, 1 if name == "LITERAL" else _BOUNDARY if str(value) in _BOUNDARIES else _ITEM
    if name in _REPEATS:
        low, high, repeated = value
        return _measure_repeat(low, high, repeated, following)
    if name == "BRANCH":
        parts = [_measure(part) for part in value[1]]
        of_all = max if _excludes(value[1]) else sum
        return of_all(ways for ways, _ in parts), _ITEM + of_all(steps for _, steps in parts)
    if name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
        ways, steps = _measure(value if name == "ATOMIC_GROUP" else value[-1])
        return ways, _ITEM + steps
    return MAX_STEPS + 1, 1  # what a group has matched before may be of any length


def _measure_repeat(low: int, high: int, repeated: Any, following: Any) -> tuple[int, int]:
    ways, steps = _measure(repeated)
    if len(repeated) == 1 and str(repeated[0][0]) in _CHARACTERS:
        before_dot = following is not None and str(following[0]) == "LITERAL" and following[1] == _DOT
        if before_dot and not _takes_dot(*repeated[0]):
            return 1, _ITEM + steps  # it ends where the next dot is
        return max(min(high, MAX_NAME) - low + 1, 1), _ITEM + steps
    total, power = 1, 1
    for _ in range(min(high, max(low, MAX_NAME))):
        power *= ways
        total += power
        if total > MAX_STEPS:
            break
    return min(total, MAX_STEPS + 1), (_ROUND if high > 1 else _ITEM) + steps


def _excludes(branches: Iterable[Any]) -> bool:
    """Whether at most one branch fits any text: each begins with a character of its own."""
    first = [chr(branch[0][1]).casefold() for branch in branches if len(branch) and str(branch[0][0]) == "LITERAL"]
    return len(set(first)) == len(list(branches))


def _takes_dot(kind: Any, value: Any) -> bool:
    name = str(kind)
    if name == "LITERAL":
        return bool(value == _DOT)
    if name == "NOT_LITERAL":
        return bool(value != _DOT)
    if name == "RANGE":
        return bool(value[0] <= _DOT <= value[1])
    if name == "CATEGORY":
        return "_NOT_" in str(value)
    if name == "IN":
        negated = str(value[0][0]) == "NEGATE"
        return any(_takes_dot(*item) for item in value[negated:]) != negated
    return True
