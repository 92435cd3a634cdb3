"""When a branch ends: end tokens, stop tokens, and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_UNBOUNDED = 1 << 60


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of fed tokens. `reason` None: no stop among them."""

    state: int
    tokens: tuple[int, ...]
    reason: str | None = None
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """An automaton over accepted tokens, fed one by one. Its state is one immutable value: the number of tokens generated.

    A stop token ends a branch and belongs to its answer; while fewer than `min_tokens` are generated it is banned, and if
    it comes all the same (a client may append anything) it does not end anything.
    """

    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    stops: frozenset[int] = field(init=False, repr=False)
    ends: tuple[int, ...] = field(init=False, repr=False)
    last: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        eos = () if self.ignore_eos else self.eos_token_ids
        object.__setattr__(self, "stops", frozenset((*eos, *self.stop_token_ids)))
        object.__setattr__(self, "ends", tuple(sorted(self.stops)))
        object.__setattr__(self, "last", _UNBOUNDED if self.max_tokens is None else self.max_tokens)

    @property
    def start(self) -> int:
        """The state before the first generated token."""
        return 0

    def reason(self, state: int, token: int) -> str | None:
        """Why a branch in `state` ends with `token`, if it does."""
        if token in self.stops and state >= self.min_tokens:
            return "stop"
        return "length" if state + 1 >= self.last else None

    def next(self, state: int, token: int) -> int:
        """The state after `token`."""
        return state + 1

    def cut(self, state: int, tokens: Sequence[int], room: int = _UNBOUNDED) -> Cut:
        """Feed `tokens`: what follows a stop, or the first `room` tokens, was never accepted."""
        for i, token in enumerate(tokens):
            if i >= room:
                return Cut(state, tuple(tokens[:i]), "length")
            reason = self.reason(state, token)
            state = self.next(state, token)
            if reason is not None:
                return Cut(state, tuple(tokens[: i + 1]), reason, token if reason == "stop" else None)
        return Cut(state, tuple(tokens))

    def replay(self, tokens: Sequence[int]) -> int:
        """The state after `tokens`, none of which ended the branch."""
        state = self.start
        for token in tokens:
            state = self.next(state, token)
        return state

    def banned(self, state: int, ahead: int = 0) -> tuple[int, ...]:
        """Ids that may not be drawn `ahead` tokens after `state`, in ascending order."""
        return self.ends if state + ahead < self.min_tokens else ()
