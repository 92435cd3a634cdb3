"""jinja's sandbox with an end: a template that would run for hours or fill the memory is stopped, wherever it came
from.

What takes time or makes something large is charged to a budget: a turn of a loop, a call, a filter, a long value. Where
a few characters could make gigabytes, the size is worked out before it is made.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagedec.text.budget import (
    Exhausted,
    bound,
    check_bits,
    check_counts,
    joined,
    look,
    made,
    read,
    size_of,
    spend,
    turns,
)

NODES_PER_STEP = 4
"""Parts of a loop's or macro's body that are run in a step."""
COUNTED = {"batch", "center", "indent", "round", "slice", "tojson", "truncate", "urlize", "wordwrap"}
"""Filters that are told how much of something to make."""
BY_ITEM = {"batch", "groupby", "list", "max", "min", "random", "reverse", "slice", "sort", "sum", "unique", "wordcount"}
"""Filters that go through a text's characters, or a list's items, one by one."""
WHOLE = {"join", "sum"}
"""Filters of which only the whole list tells what they will make."""
SLOW = {"pprint", "striptags", "title", "urlize", "wordwrap", "xmlattr"}
"""Filters that take microseconds for a few characters."""
QUICK = {
    *(
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "map",
        "random",
        "reject",
    ),
    *(
        "rejectattr",
        "round",
        "select",
        "selectattr",
        "boolean",
        "callable",
        "defined",
        "escaped",
        "even",
    ),
    *(
        "false",
        "filter",
        "integer",
        "iterable",
        "mapping",
        "none",
        "number",
        "odd",
        "sameas",
        "sequence",
        "string",
        "test",
    ),
    *("true", "undefined"),
}
"""Filters and tests that look at no more than an item at once; `string` is here as a test."""
TEXTS = (str, bytes)
FROM_THE_RIGHT = {"rfind", "rindex", "rpartition", "rsplit", "lstrip", "rstrip", "strip"}
"""Methods that may compare every character of a text with every one of another: Python searches fast from the left
alone."""
COMPARED_PER_STEP = 1000
BITS_PER_STEP = 1 << 20
"""Pairs of bits, of two whole numbers that are multiplied or divided."""
RUNS = {"urlize": 20, "wordwrap": 10_000}
"""Filters that look at all of a word, or of the space between two, for each of its characters, or copy it; so many
characters in a step."""
_NUMBER, _RUN = re.compile(r"\d+"), re.compile(r"\s+|\S+")


def _check_format(form: Any, arguments: Sequence[Any]) -> None:
    """A format writes its arguments as often as it says, as wide as it says."""
    if not isinstance(form, TEXTS):
        return
    text = form if isinstance(form, str) else form.decode("latin-1")
    widths = _NUMBER.findall(text)
    if any(len(width) > 5 for width in widths):
        raise Exhausted("must not write anything in a width of more than 99999")
    given, stars = [abs(width) for width in arguments if isinstance(width, int)], text.count("*")
    if stars:
        check_counts(*given)
    if re.search(r"\{[^{}]*\{", text.replace("{{", "")):
        raise Exhausted("must not write anything in a width that an argument says, but in one of at most 99999")
    bound(len(text) + sum(map(int, widths)) + stars * max(given, default=0))
    bound((text.count("%") + text.count("{")) * size_of(list(arguments)))


def _compare(text: Any, other: Any) -> None:
    """Take the steps of comparing all of two texts with each other."""
    if isinstance(text, TEXTS) and isinstance(other, TEXTS):
        spend(len(text) * len(other) // COMPARED_PER_STEP)


def _check_method(name: str, own: Any, arguments: Sequence[Any]) -> None:
    """Bound what a method of a text or number makes, before it makes it."""
    first = arguments[0] if arguments else None
    if name in FROM_THE_RIGHT:
        _compare(own, first)
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
        check_counts(*arguments)
    if name == "expandtabs":
        bound(len(own) * (first if isinstance(first, int) else 8))
    elif name == "replace" and len(arguments) > 1 and all(isinstance(text, TEXTS) for text in arguments[:2]):
        bound(len(own) + (own.count(first) if isinstance(first, type(own)) else 0) * len(arguments[1]))
    elif name == "join" and isinstance(first, (list, tuple, dict, str)):
        bound(size_of(first) + len(own) * len(first))
    elif name == "translate" and isinstance(first, dict):
        bound(len(own) * max(map(size_of, first.values()), default=1))
    elif name in ("split", "rsplit", "splitlines"):  # without a separator every other character may become an item
        spend(own.count(first) if isinstance(first, type(own)) and first else len(own) // 8)
    elif name in ("format", "format_map"):
        _check_format(own, arguments)


def _check_filter(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Bound what a filter makes, before it makes it; take the steps of what it looks at."""
    value: Any
    value, *others = arguments or (None,)
    others += named.values()
    longest = max((size_of(other) for other in others if not isinstance(other, int)), default=0)
    longest = max([longest, *(other for other in others if isinstance(other, int))])
    if name in COUNTED:
        check_counts(*others)
        spend(sum(abs(other) // COMPARED_PER_STEP for other in others if isinstance(other, int)))
    if name in BY_ITEM and hasattr(value, "__len__"):
        spend(4 * len(value))
    if name == "sum" and any(isinstance(other, (list, tuple)) for other in others):
        spend(len(value) ** 2 // 16)  # each sum is a new list
    if name in SLOW:
        spend(size_of(value) * (_depth(value, {}) if name == "pprint" else 1))
    if name in RUNS:
        spend(sum(len(run) ** 2 // RUNS[name] for run in _RUN.findall(str(value))))
    if name == "trim" and others:
        _compare(str(value), others[0])
    if name == "replace" and others:
        bound(size_of(value) + str(value).count(str(others[0])) * longest)
    elif name == "join" and hasattr(value, "__len__"):
        bound(size_of(value) + len(value) * longest)
    elif name in ("wordwrap", "urlize", "tojson"):
        bound(size_of(value) * (1 + (longest if name == "tojson" else size_of(others))))
    elif name == "indent":
        bound(size_of(value) + (1 + str(value).count("\n")) * max(longest, 4))
    elif name == "format":
        _check_format(value, others)
    if name not in QUICK:
        for argument in arguments:
            read(argument)


def _depth(value: Any, known: dict[int, int]) -> int:
    """How deep a value is nested: what pprint writes it reads once for each level."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + max((_depth(part, known) for part in parts), default=0)
    return known[id(value)]


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that is charged for what it looks at and makes."""
    first = int(hasattr(function, "jinja_pass_arg"))  # jinja's context or environment comes before the value

    @functools.wraps(function)  # with jinja's own marks
    def run(*arguments: Any, **named: Any) -> Any:
        spend(2)
        if name in WHOLE and isinstance(arguments[first], Iterator):
            arguments = (*arguments[:first], list(arguments[first]), *arguments[first + 1 :])
        _check_filter(name, arguments[first:], named)
        return made(function(*arguments, **named))

    return run


def _check_product(left: Any, right: Any) -> None:
    for times, other in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(other, int):
            check_bits(left.bit_length() + right.bit_length())
        elif isinstance(times, int) and isinstance(other, (*TEXTS, list, tuple)):
            bound((size_of(other) + len(other)) * max(times, 0))


class _Charging(NodeTransformer):
    """Puts a filter of ours around everything else in a template that takes time or makes values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        steps = _steps(node)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns", steps)
        if node.recursive:  # turns of its inner loops are given to jinja by the template
            node.body.insert(0, _charge(node, steps))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        steps = _steps(node)
        self.generic_visit(node)
        node.body.insert(0, _charge(node, steps))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        parts: list[Any] = [node, *node.ops]
        for part in parts:
            if not isinstance(part.expr, nodes.Const):
                part.expr = _filtered(part.expr, "_read")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_sliced")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _filtered(pair.key, "_read")
        return _filtered(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        kept = node.ctx == "store" or any(isinstance(item, nodes.Slice) for item in node.items)
        return node if kept else _filtered(node, "_made")


def _steps(node: nodes.Node) -> int:
    """What one run of a body costs."""
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES_PER_STEP


def _filtered(node: Any, name: str, *arguments: int) -> nodes.Filter:
    given = [nodes.Const(argument, lineno=node.lineno) for argument in arguments]
    return nodes.Filter(node, name, given, [], None, None, lineno=node.lineno)


def _charge(node: nodes.Node, steps: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(steps, lineno=node.lineno), "_body"), lineno=node.lineno)


@pass_context
def _body(context: Context, steps: int) -> None:
    """One run of a macro or block. It is given the context so that jinja does not work it out when it compiles."""
    spend(steps)


def _sliced(value: Any) -> Any:
    if isinstance(value, (*TEXTS, list, tuple)):
        spend(1 + len(value) // 16)
    return value


def _concat(parts: list[Any]) -> str:
    """jinja's `~`."""
    for part in parts:
        read(part)
    bound(size_of(parts))
    return "".join(map(str, parts))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which templates come to an end: compile and render inside `spending`, which may raise
    `Exhausted`."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%", "//"})
    concat = staticmethod(joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        del self.globals["lipsum"]
        for table in (self.filters, self.tests):
            for name, function in list(table.items()):
                table[name] = _bounded("" if name == "string" and table is self.filters else name, function)
        self.filters |= {
            "_turns": turns,
            "_body": _body,
            "_concat": _concat,
            "_read": read,
            "_made": made,
            "_sliced": _sliced,
        }

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A further filter, charged like the others."""
        self.filters[name] = _bounded(name, function)

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        charged: nodes.Template = _Charging().visit(source)
        charged.set_environment(self)
        return super()._generate(charged, *arguments, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if operator == "**":
                check_bits(bits[0] * abs(right))
                bits = (bits[0] * abs(right),) * 2
            spend(bits[0] * bits[1] // BITS_PER_STEP)
        if operator == "*":
            _check_product(left, right)
        elif operator == "%":
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, (*TEXTS, list, tuple)):
            bound(size_of(left) + size_of(right))
        return made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # all of it is hashed
            read(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902  as jinja has it
        spend(2 + (len(args) + len(kwargs)) // 8)
        if not isinstance(__obj, Macro) or __obj.catch_varargs or __obj.catch_kwargs:
            given = (*args, *(value for name, value in kwargs.items() if not name.startswith("_")))
            bound(sum(map(size_of, given)))
            for value in given:
                look(value)
            if len(args) == 1 and isinstance(args[0], Iterator):  # as ",".join does
                args = given = (list(args[0]),)
            method = getattr(__obj, "__wrapped__", __obj)  # of str.format jinja makes a function of its own
            own = getattr(method, "__self__", None)
            if isinstance(own, (*TEXTS, int)):
                _check_method(method.__name__, own, given)
            if isinstance(own, (*TEXTS, list, tuple)):
                spend(len(own) // 16)
        return made(super().call(__context, __obj, *args, **kwargs))


def _written(value: Any) -> Any:
    """What a template writes out."""
    bound(size_of(value))
    return read(value)
