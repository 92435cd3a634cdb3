"""A function of the user's own that says which tokens may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagedec.core.constraint import Allowed, Constraint
from pagedec.errors import OthersCode, shown

AllowedTokensFn = Callable[[list[int]], Iterable[int] | None]
"""Given all tokens of a sequence, the prompt's too: the ids that may follow; None: any."""
_FUNCTIONS_CODE = OthersCode("allowed_tokens_fn")


class WholeText:
    """A state: a text, told of it when the function is first asked. Of those that are never asked, as most of a beam
    search's candidates, nothing is copied. What the function says of a text is asked once."""

    __slots__ = ("_allowed", "_error", "_is_known", "_parent", "_token", "_tokens")

    def __init__(self, tokens: list[int] | None, parent: WholeText | None = None, token: int = -1) -> None:
        self._tokens, self._parent, self._token = tokens, parent, token
        self._is_known, self._allowed, self._error = False, None, None  # type: tuple[bool, Allowed, Exception | None]

    def followed_by(self, token: int) -> WholeText:
        """The state after one more token."""
        return WholeText(None, self, token)

    def tokens(self) -> list[int]:
        """The whole text. Nobody writes into it."""
        if self._tokens is None:
            behind: list[int] = []
            state = self
            while state._tokens is None:
                behind.append(state._token)
                assert state._parent is not None
                state = state._parent
            self._tokens, self._parent = [*state._tokens, *reversed(behind)], None
        return self._tokens

    def allowed(self, function: AllowedTokensFn, vocab_size: int) -> Allowed:
        """What the function says, or the error that it raised."""
        if not self._is_known:
            try:
                with _FUNCTIONS_CODE:
                    self._allowed = _checked(function([*self.tokens()]), vocab_size)
            except Exception as error:
                self._error = error
            self._is_known = True
        if self._error is not None:
            raise self._error
        return self._allowed


class FunctionConstraint(Constraint):
    """Asks `function` once for each state, in the thread that steps the engine."""

    def __init__(self, function: AllowedTokensFn, vocab_size: int) -> None:
        self._function, self._vocab_size = function, vocab_size

    def start(self, given: Sequence[int]) -> WholeText:
        return WholeText(list(given))

    def next(self, state: WholeText, token: int) -> WholeText:
        return state.followed_by(token)

    def allowed(self, state: WholeText) -> Allowed:
        return state.allowed(self._function, self._vocab_size)

    def is_over(self, state: WholeText) -> bool:
        return False

    def forced(self, state: WholeText, most: int) -> Sequence[int]:
        return ()  # to look ahead would be to wait for the function before the device has anything to do

    def item(self, tokens: Sequence[int]) -> int | None:
        return None


def _checked(ids: Iterable[int] | None, vocab_size: int) -> Allowed:
    if ids is None:
        return None
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"allowed_tokens_fn must return token ids, has returned {shown(ids)}")
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = int(array[(array < 0) | (array >= vocab_size)][0])
        raise ValueError(f"allowed_tokens_fn has returned token {wrong}; ids must be from 0 to {vocab_size - 1}")
    return np.unique(array).astype(np.int32)
