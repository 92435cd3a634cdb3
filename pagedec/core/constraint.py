"""Constraints: what an answer's next token may be. One mechanism for every decoder: a branch carries an immutable state
beside that of its stops, so it forks, rolls back, survives preemption and goes through drafts like the rest.

This is the protocol only. Tries, grammars and callables are in `pagedec.constraints`; `masking.py` collects a step's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from pagedec.core.stopping import COUNT, Cut, Stopping
from pagedec.errors import counted

Allowed: TypeAlias = np.ndarray | None
"""int32 ids, each once; or uint32 words, a bit for each token of the vocabulary, the lowest first; or None: any token.
Nobody writes into them."""


class Constraint(Protocol):
    """What a request's answers may be. States are immutable values: whoever continues one leaves it as it is. What is
    raised ends the request alone.

    End tokens are candidates like others: a state that may be an answer's end allows them. Where a request's other
    rules, or `min_tokens`, forbid all that is allowed, `min_tokens` gives way; the others are an error.
    """

    def start(self, given: Sequence[int]) -> Any:
        """The state behind a sequence that was given: the prompt, or all up to a client's last words."""

    def next(self, state: Any, token: int) -> Any:
        """The state after a token that `state` allows, and that is no end token."""

    def allowed(self, state: Any) -> Allowed:
        """What may follow. Asked again it says the same, at no cost."""

    def is_over(self, state: Any) -> bool:
        """Nothing follows, not even an end token: a branch ends with the token that led here."""

    def forced(self, state: Any, most: int) -> Sequence[int]:
        """Up to `most` tokens of which each is the only one allowed behind those before it, as far as can be told
        cheaply; no end tokens. They are evaluated in one forward, so what is said here changes no answer."""

    def item(self, tokens: Sequence[int]) -> int | None:
        """The number of what an answer of these tokens has chosen, where choices have numbers."""


MAX_FORCED = 32
"""Most tokens that are evaluated at once because there is no choice: each is a row."""


class Forbidden(Exception):
    """A token came that its branch's constraint does not allow; None: other rules forbid all that it allows."""

    def __init__(self, token: int | None, length: int) -> None:
        super().__init__(token, length)
        self.token, self.length = token, length

    def __str__(self) -> str:
        behind, rules = f"behind {counted(self.length, 'generated token')}", "(allowed_token_ids, bad_words, ...)"
        if self.token is None:
            return f"nothing may follow {behind}: other rules {rules} forbid all that its constraint allows there"
        return (
            f"token {self.token} is not allowed {behind}: either its constraint's tokens are all forbidden by other "
            f"rules {rules}, or its decoder chose it itself"
        )


def permits(allowed: Allowed, token: int) -> bool:
    """Whether a token is among those allowed."""
    if allowed is None:
        return True
    if allowed.dtype == np.uint32:
        return token >> 5 < len(allowed) and bool(int(allowed[token >> 5]) >> (token & 31) & 1)
    return bool((allowed == token).any())


def closes(constraint: Constraint, stops: Collection[int], state: Any, token: int) -> bool:
    """Whether a branch ends with a token that its constraint allows, whatever its stops say: with one of `stops`, where
    nothing else was left, or because nothing may follow."""
    return token in stops or constraint.is_over(constraint.next(state, token))


def cut_within(
    constraint: Constraint, stopping: Stopping, stop_state: int, state: Any, tokens: Sequence[int], room: int
) -> tuple[Cut, Any]:
    """Feed generated `tokens`, as `Stopping.cut` does, to the constraint too: what is left of them, and its state.
    Raises `Forbidden`, and what the constraint raises.

    A stop token that was drawn ends the branch even before `min_tokens`: it was banned, unless nothing else was left.
    """
    given = stop_state & COUNT
    for i, token in enumerate(tokens):
        if i >= room:
            return Cut(stop_state, tuple(tokens[:i]), "length"), state
        if not permits(constraint.allowed(state), token):
            raise Forbidden(token, given + i)
        cut = stopping.cut(stop_state, (token,))
        if cut.reason != "stop" and token in stopping.stops:
            cut = Cut(cut.state, (token,), "stop", token)
        elif cut.reason is None or cut.reason == "length":
            state = constraint.next(state, token)
            if constraint.is_over(state):
                cut = Cut(cut.state, (token,), "stop")
        stop_state = cut.state
        if cut.reason is not None:
            own = tuple(tokens[: i + 1])
            return Cut(cut.state, own, cut.reason, cut.stop_token, cut.stop_string, cut.excess_bytes), state
    return Cut(stop_state, tuple(tokens)), state
