"""What stands of the tokens that were drawn behind a branch: what follows its end was never accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedec.core.constraint import Forbidden, closes, cut_within
from pagedec.core.stopping import COUNT, NO_STOPPING, Cut
from pagedec.errors import RequestError, told

if TYPE_CHECKING:
    from pagedec.core.protocol import DecoderContext
    from pagedec.core.request import Branch, Request


def cut_drawn(
    own: Request | DecoderContext, tip: int, stop_state: int, state: Any, tokens: Sequence[int], room: int
) -> tuple[Cut, Any]:
    """What is left of tokens drawn behind `tip`, by a request's stops, its room and its rules, and its constraint's
    state behind them, None where it has none. Raises `Forbidden` for what the constraint does not allow or rules leave
    nothing of, and what the constraint raises."""
    constraint, num = own.constraint, _num_meant(own, tip, stop_state, tokens)
    if constraint is None:
        cut, after = own.stopping.cut(stop_state, tokens[:num], room), None
    else:
        cut, after = cut_within(constraint, own.stopping, stop_state, state, tokens[:num], room)
    if num == len(tokens) or cut.reason is not None:
        return cut, after
    if constraint is not None:
        raise Forbidden(None, (stop_state & COUNT) + num)
    return replace(cut, reason="length", is_stranded=True), after


def feed(request: Request, tip: int, stop_state: int, state: Any, tokens: Sequence[int], room: int) -> tuple[Cut, Any]:
    """As `cut_drawn`. Raises `RequestError` for tokens that the constraint does not allow."""
    try:
        return cut_drawn(request, tip, stop_state, state, tokens, room)
    except Exception as error:
        if request.constraint is None:
            raise
        problem = str(error) if isinstance(error, Forbidden) else told(error)
        raise RequestError(request.id, problem) from cause_of(error)


def cause_of(error: Exception) -> Exception | None:
    """What somebody has to look for: not that a request forbids what it asks for."""
    return None if isinstance(error, Forbidden) else error


def closing(own: DecoderContext, branches: Sequence[Branch], places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Which of a gang's continuations, `tokens[i]` behind `branches[places[i]]`, end because the constraint lets
    nothing follow, or are stop tokens that it left no choice about, even before `min_tokens`: bool [len(tokens)].
    Without a constraint none. The tokens must be ones that it allows."""
    found = np.zeros(len(tokens), np.bool_)
    constraint, stops = own.constraint, own.stopping.stops
    if constraint is None:
        return found
    for i, (place, token) in enumerate(zip(places.tolist(), tokens.tolist(), strict=True)):
        found[i] = closes(constraint, stops, branches[place].constraint_state, token)
    return found


def _num_meant(own: Request | DecoderContext, tip: int, stop_state: int, tokens: Sequence[int]) -> int:
    """How many tokens come before a token 0 that says that nothing was left to draw."""
    if not own.rules.can_ban_all or 0 not in tokens:
        return len(tokens)
    stopping = own.stopping if own.constraint is None else NO_STOPPING  # beside a constraint `min_tokens` gives way
    text = own.history.tokens(tip)
    for i, token in enumerate(tokens):
        if token == 0 and (0 in stopping.banned(stop_state, i) or own.rules.bans([*text, *tokens[:i]], 0)):
            return i
    return len(tokens)
