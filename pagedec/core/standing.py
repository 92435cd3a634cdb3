"""How drafting stands: of a request, whether it is worth being asked; of a method, what is known of its drafts and how
many more may be tried for the sake of knowing."""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.costs import StepCosts
from pagedec.core.draft import Draft
from pagedec.core.odds import Odds

FIRST_REST, LONGEST_REST = 8, 128
"""Steps in which a request is not asked: doubled each time that asking it was of no use."""
TRIES = 3
"""Drafts that are tried after a rest though they seem not to pay; of those that cannot be cut, `LONG_TRIES`."""
LONG_TRIES = 12
TRIED_ROWS, MOST_LOST = (4, 2, 1), 0.5
"""Rows of such a draft: as many as lose no more than that share of a step, or one."""
SHARE, MOST_ALLOWED = 0.01, 2.0
"""What trying may cost: a share of all steps, and how many steps can be saved up for it."""
WORTH_MEMORY = 8
"""Asked steps that count in a request's worth."""
PROMISE = 0.2
"""Its worth after a rest, in costs of asking: two steps of no gain at all use it up, since what a step of drafts is
expected to gain is known before it runs."""
PAYS = 1.0
"""From which worth on its next rest is short again. A lucky match now and then is not enough."""
LEAST_ASKING = 1e-3
"""Of a step's seconds: what asking is taken to cost at least."""
FILLING = 4
"""Steps before a draft that cannot be cut gives what it is worth."""
HOPES = (0.5, 0.7, 0.9)
"""Tokens that drafts which cannot be cut may add to a step, by their size, where nobody knows."""
YIELD_MEMORY, YIELD_WEIGHT = 48, 6.0


class Method:
    """What all requests of a decoder have in common."""

    __slots__ = ("_earned_in", "allowed", "odds", "rest", "yields")

    def __init__(self) -> None:
        self.odds = Odds(memory=256)
        self.rest = 0
        """How long others rest: a new request rests first, too, but not as long."""
        self.allowed = MOST_ALLOWED
        """Steps that may be lost by trying."""
        self.yields: dict[int, tuple[float, float]] = {}
        """Of drafts that cannot be cut: how many were run of a size, and the tokens that they gave."""
        self._earned_in = -1

    def earn(self, step: int) -> None:
        """A step is planned. Once a step: a plan of it may have come to nothing."""
        if step != self._earned_in:
            self._earned_in = step
            self.allowed = min(self.allowed + SHARE, MOST_ALLOWED)

    def yield_of(self, sizes: Sequence[int], place: int) -> float:
        """Tokens that a draft of size `sizes[place]` is expected to give."""
        hope = HOPES[min(place, len(HOPES) - 1)]
        count, tokens = self.yields.get(sizes[place], (0.0, 0.0))
        return (tokens + YIELD_WEIGHT * hope) / (count + YIELD_WEIGHT)

    def note_yield(self, size: int, num_tokens: float) -> None:
        """A draft of a size gave so many tokens."""
        count, tokens = self.yields.get(size, (0.0, 0.0))
        memory = 1 - 1 / YIELD_MEMORY
        self.yields[size] = count * memory + 1, tokens * memory + num_tokens


class Standing:
    """A request that drafts as widely as pays. It is asked while that is worth what asking costs; else it rests for a
    number of steps, in which it is stepped plainly, and is then tried again. When half of those are gone that ran
    beside it, or twice as many run, it is asked at once."""

    __slots__ = (
        "_load", "_place", "_rest", "_rested_in", "_rests", "_run", "_since", "_tries", "_worth", "method", "odds",
        "rest_left", "sizes",
    )  # fmt: skip

    def __init__(self, method: Method, sizes: Sequence[int] = ()) -> None:
        """`sizes`: rows of its drafts, where they cannot be cut."""
        self.method, self.sizes, self.odds = method, tuple(sizes), Odds(memory=32, whole=method.odds)
        self.rest_left = self._rest = min(method.rest, 2 * FIRST_REST)
        self._rests, self._rested_in = False, -1
        self._since = 0  # how many ran when it began to rest; 0: not known
        self._tries = 0 if self._rest else LONG_TRIES if sizes else TRIES
        self._worth = PROMISE if self._rest else 1.0  # in costs of asking
        self._place = self._run = 0
        self._load = (1, 1)

    # ---- before a step
    def rests(self, step: int, num_running: int) -> bool:
        """Whether it is stepped plainly. The same answer within a step."""
        if step != self._rested_in:
            self._rested_in = step
            self._since = self._since or num_running
            if self.rest_left and not self._since < 2 * num_running < 4 * self._since:
                self.rest_left, self._rest = 0, 0
                self._wake()
            elif self.rest_left:
                self.rest_left -= 1
                if not self.rest_left:
                    self._wake()
                    self._rests = True
                    return True
            self._rests = self.rest_left > 0
        return self._rests

    def room(self, spare: int, num_branches: int, costs: StepCosts) -> int:
        """The rows that it may draft within."""
        if not self.sizes:
            return spare
        if self._run % LONG_TRIES == 0:
            self._place = self._best_place(costs)
        return min(spare, self.sizes[self._place] * num_branches)

    def gain(self) -> float:
        """What a draft that cannot be cut is expected to add."""
        return self.method.yield_of(self.sizes, self._place)

    # ---- while a step is planned
    @property
    def is_resting(self) -> bool:
        """What `rests` said last."""
        return self._rests

    @property
    def may_try(self) -> bool:
        """A draft that seems not to pay may be run, to learn of it."""
        return self._tries > 0 and self.method.allowed > 0

    def tried(self, num_steps_lost: float) -> None:
        """A draft was run though it seemed not to pay."""
        self._tries -= 1
        self.method.allowed -= num_steps_lost

    def asked(self, gained: float, asking: float, load: tuple[int, int], num_running: int) -> None:
        """It was asked, which took `asking` seconds, in a step of `load` rows and tokens without drafts, and gains so
        many seconds by its drafts."""
        self._load = load
        self._worth += (gained / asking - 1 - self._worth) / WORTH_MEMORY
        if self._worth > PAYS:
            self._rest = self.method.rest = 0
        if self._worth < 0 and not (self.sizes and self.may_try):
            self._rest = min(max(2 * self._rest, FIRST_REST), LONGEST_REST)
            self.rest_left = self.method.rest = self._rest
            self._since, self._tries, self._run = num_running, 0, 0

    # ---- when its answers are there
    def note(self, draft: Draft, path: Sequence[int]) -> None:
        """What became of a draft: the nodes of `path` were accepted."""
        if not self.sizes:
            self.odds.note(draft, path)
            return
        self._run += 1
        if self._run > FILLING:
            self.method.note_yield(self.sizes[self._place], len(path))

    # ---- inside
    def _wake(self) -> None:
        self._tries, self._worth, self._since = LONG_TRIES if self.sizes else TRIES, PROMISE, 0

    def _best_place(self, costs: StepCosts) -> int:
        num_rows, num_tokens = self._load
        rates = [
            (num_tokens + self.method.yield_of(self.sizes, place)) / float(costs.of(num_rows + size))
            for place, size in enumerate(self.sizes)
        ]
        return rates.index(max(rates))
