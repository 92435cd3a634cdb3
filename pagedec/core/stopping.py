"""When a branch ends: end tokens, stop tokens, stop strings, and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedec.core.stop_strings import StopStrings

_UNBOUNDED = 1 << 60
_SHIFT = 32
COUNT = (1 << _SHIFT) - 1
"""The part of a state that counts the tokens generated."""

_Match = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of fed tokens. `reason` None: no stop among them.

    A stop string ends inside the last token or with it: `excess_bytes` of the tokens' text are behind its end.
    `is_stranded`: rules left no token to follow.
    """

    state: int
    tokens: tuple[int, ...]
    reason: str | None = None
    stop_token: int | None = None
    stop_string: str | None = None
    excess_bytes: int = 0
    is_stranded: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """An automaton over accepted tokens, fed one by one. Its state is one immutable value: the number of tokens
    generated, and above it, if there are stop strings, their automaton's state.

    A stop token ends a branch and belongs to its answer; while fewer than `min_tokens` are generated it is banned, and
    if it comes all the same (a client may append anything) it does not end anything. Nor does a stop string whose last
    byte comes with one of the first `min_tokens` tokens. A stop token that completes a stop string is a stop token.
    """

    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    strings: StopStrings | None = None
    pieces: Sequence[bytes] = field(default=(), repr=False, compare=False)
    """The bytes of every token id; an id past the end has none. Needed by `strings` only."""
    silent: frozenset[int] = field(default=frozenset(), repr=False)
    """Ids whose bytes do not belong to the text: special tokens that are skipped."""
    stops: frozenset[int] = field(init=False, repr=False)
    ends: tuple[int, ...] = field(init=False, repr=False)
    last: int = field(init=False, repr=False)
    _known: dict[int, tuple[int, _Match | None]] = field(init=False, repr=False, compare=False, default_factory=dict)

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
        """Why a branch in `state` ends with `token`, if it does; without regard to stop strings."""
        count = state & COUNT
        if token in self.stops and count >= self.min_tokens:
            return "stop"
        return "length" if count + 1 >= self.last else None

    def next(self, state: int, token: int) -> int:
        """The state after `token`."""
        return state + 1 if self.strings is None else self._feed(state, token)[0]

    def cut(self, state: int, tokens: Sequence[int], room: int = _UNBOUNDED) -> Cut:
        """Feed `tokens`: what follows a stop, or the first `room` tokens, was never accepted."""
        for i, token in enumerate(tokens):
            if i >= room:
                return Cut(state, tuple(tokens[:i]), "length")
            reason, match = self.reason(state, token), None
            if self.strings is None:
                state += 1
            else:
                counts = state & COUNT >= self.min_tokens
                state, match = self._feed(state, token)
                match = match if counts and reason != "stop" else None
            if match is not None:
                return Cut(state, tuple(tokens[: i + 1]), "stop", None, *match)
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
        return self.ends if (state & COUNT) + ahead < self.min_tokens else ()

    def _feed(self, state: int, token: int) -> tuple[int, _Match | None]:
        """The state after `token`, and the stop string that it completes with the number of its bytes behind it.

        What a token does to a state of the strings' automaton is worked out once.
        """
        assert self.strings is not None
        at = state >> _SHIFT
        known = self._known.get(at << _SHIFT | token)
        if known is None:
            data = self.pieces[token] if token < len(self.pieces) and token not in self.silent else b""
            after, match = self.strings.feed(at, data)
            found = None if match is None else (self.strings.strings[match[0]], len(data) - match[1])
            known = self._known[at << _SHIFT | token] = (after << _SHIFT, found)
        return known[0] | (state & COUNT) + 1, known[1]


NO_STOPPING = Stopping()
