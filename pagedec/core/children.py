"""A gang's verdict as arrays: what can be wrong with it, and when it can be settled as it is."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from pagedec.core.checks import check_settled, check_verdict
from pagedec.core.draft import EMPTY
from pagedec.core.plan import Work
from pagedec.core.protocol import Child, Children, Query, Verdict
from pagedec.core.request import Branch, Request
from pagedec.core.stopping import COUNT, Cut
from pagedec.errors import InvalidArgument, shown


def check_children(verdict: Verdict, queries: Sequence[Query], request: Request, vocab_size: int) -> Children:
    """Return the arrays of a verdict that has them. Raises `InvalidArgument` for what is wrong in themselves."""
    children = verdict.children
    if not isinstance(children, Children):
        raise InvalidArgument("children", children, "must be Children")
    if not request.decoder.gang:
        raise InvalidArgument("children", len(children), "must be None: the decoder is no gang")
    for name in ("live", "drop"):
        if len(getattr(verdict, name)):
            raise InvalidArgument(name, len(getattr(verdict, name)), "must be empty where children come as arrays")
    for name, kinds, what in (("parents", "iu", "integer"), ("tokens", "iu", "integer"), ("scores", "f", "floating")):
        array = getattr(children, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            raise InvalidArgument(f"children.{name}", array, f"must be an array of one side, of {what}")
        if len(array) != len(children):
            raise InvalidArgument(f"children.{name}", len(array), f"must be one for each of {len(children)} parents")
    if children.states is not None and len(children.states) != len(children):
        limit = f"must be one for each of {len(children)} parents, or None"
        raise InvalidArgument("children.states", len(children.states), limit)
    _check_within("parents", children.parents, len(queries))
    _check_within("tokens", children.tokens, vocab_size)
    if any(map(isnan, children.scores.tolist())):
        raise InvalidArgument("children.scores", nan, "must be numbers")
    return children


def _check_within(name: str, array: np.ndarray, count: int) -> None:
    values = array.tolist()
    lowest, highest = min(values, default=0), max(values, default=0)
    if values and not 0 <= lowest <= highest < count:
        raise InvalidArgument(f"children.{name}", lowest if lowest < 0 else highest, f"must be from 0 to {count - 1}")


def is_plain(request: Request, works: Sequence[Work]) -> bool:
    """Whether arrays can be settled as they are: all branches were evaluated, on the target lane, without drafts, and
    have no state but the stopping's."""
    if request.constraint is not None or len(works) != len(request.branches) or len(request.branches[0].tables) != 1:
        return False
    return all(work.draft is EMPTY and work.query is not None for work in works)


class Descent(NamedTuple):
    """A plain generation that was checked: the children, whose parents they are, and their stopping states."""

    parents: list[Branch]
    children: Children
    stop_states: list[int]


def check_generation(
    request: Request, works: Sequence[Work], verdict: Verdict, children: Children, vocab_size: int
) -> Descent:
    """A generation that can be settled as it is. Raises `InvalidArgument` for children that have ended, and for what
    else the verdict says wrong."""
    history, decoder = request.history, request.decoder
    parents = [works[place].branch for place in children.parents.tolist()]
    if verdict.done:
        check_verdict(history, request.branches, {}, Verdict(done=verdict.done), vocab_size, limit=request.limit)
    if len(children) > decoder.width:
        limit = f"branches must be at most the gang's declared width, {decoder.width}"
        raise InvalidArgument("children", len(children), limit)
    tokens = children.tokens.tolist()
    if verdict.settled is not None:
        lengths = history.depth
        heads = {(parent.tip, token) for parent, token in zip(parents, tokens, strict=True)}
        ways = [(tip, lengths[tip], (token,)) for tip, token in heads]
        check_settled(history, verdict.settled, ways, decoder, request.settled_length)
    return Descent(parents, children, _stop_states(request, parents, tokens))


def _stop_states(request: Request, parents: Sequence[Branch], tokens: Sequence[int]) -> list[int]:
    """Those of the children. Raises `InvalidArgument` for one that has ended."""
    history, stopping = request.history, request.stopping
    states = [parent.stop_state for parent in parents]
    longest = max((history.depth[parent.tip] for parent in parents), default=0)
    most = max((state & COUNT for state in states), default=0)
    if stopping.strings is None and most + 1 < stopping.last and longest < request.limit:
        if stopping.stops.isdisjoint(tokens):
            return [state + 1 for state in states]
    out = []
    for parent, state, token in zip(parents, states, tokens, strict=True):
        cut = stopping.cut(state, (token,), request.limit - history.depth[parent.tip])
        if cut.reason is not None:
            raise InvalidArgument("children", *ended(cut))
        out.append(cut.state)
    return out


def ended(cut: Cut) -> tuple[str, str]:
    """What is wrong with a gang's child that has ended."""
    return f"one that goes on with {shown(cut.tokens)}", (
        f"must be in done: it has ended ({cut.reason}), and a gang ends its branches itself"
    )


def as_objects(verdict: Verdict, children: Children, queries: Sequence[Query]) -> Verdict:
    """The same verdict child by child."""
    live: tuple[Child, ...] = children.objects(queries)
    return Verdict(live, verdict.done, (), None, verdict.settled)
