"""How long steps take, learned while they are made: by rows, by branches that are asked, and by tokens that are
rolled."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from pagedec.core.costs import StepCosts, StepShape

GAIN, SCALE_GAIN = 0.06, 0.05
"""How much of a surprise the longest known place of the curve takes in, and all of the curve with it."""
MOST_SURPRISE = 0.3
"""Of a logarithm: a step that took far longer says that something else was in its way."""
DOUBTS = 2
"""Surprises in a row that are doubted; then something has changed."""
CERTAIN = 8
"""Steps after which a place is known well enough to doubt a surprise."""
OLD = 32
"""Steps after which a place says a quarter as much against its neighbours, and takes in more of a new one."""
BARE_EVERY, BARE_APART, BARE_STEPS = 256, 48, 3
"""Steps with drafts after which some without are made, so that it stays known what they are measured against; where
that seems to have changed, no fewer than so many, and twice as many each time that it has not."""
DRIFT_GAIN, MOST_DRIFT = 0.15, 0.1
"""How fast it is noticed that steps with rolls take longer, or less, than is believed; from which on it is looked at
what they take without."""
ROLL_SIZES = 10
"""Sizes of rolls that are told apart: 1, 2, 4, ... sequences."""
FIRST_ROLL = 0.2
"""What a token of a roll is taken to cost before it was measured, as a share of a step of one row."""


class Place:
    """One place of the curve: about how many rows, and the seconds relative to the scale, as logarithms."""

    __slots__ = ("last", "level", "num_doubts", "num_recent", "num_steps", "rows")

    def __init__(self, rows: float, level: float) -> None:
        self.rows, self.level, self.num_steps, self.last = rows, level, 0, 0
        self.num_recent = 0.0  # where steps were long ago they count for less than one
        self.num_doubts = 0  # surprises in a row that were not believed

    def weight(self, now: int) -> float:
        """What it says against its neighbours: the more, the better it is known, and the less, the longer ago."""
        return min(self.num_recent, 2 * CERTAIN) / (1 + (now - self.last) / OLD) ** 2


class BareSteps:
    """When steps without drafts are due: those with drafts do not say what they are measured against. Every now and
    then, and as soon as steps with rolls take longer, or less, than is believed: the machine has changed, or the roll,
    and only a step without one tells them apart."""

    __slots__ = ("_apart", "_drift", "_is_doubted", "_since")

    def __init__(self) -> None:
        self._since = 0  # steps with drafts since the last one without
        self._apart = BARE_APART
        self._drift = 0.0  # of a logarithm: how much longer steps with rolls take of late than is believed
        self._is_doubted = False  # it was too large since the last steps without

    @property
    def is_due(self) -> bool:
        """The next step is to be one."""
        return self._since >= BARE_EVERY

    def ask(self) -> None:
        """Something has changed."""
        self._since = BARE_EVERY

    def note(self, has_drafts: bool) -> None:
        """A step was made."""
        self._since = self._since + 1 if has_drafts or self.is_due else 0
        if self._since >= BARE_EVERY + BARE_STEPS:
            self._since = 0

    def note_bare(self, surprise: float) -> None:
        """A step without drafts took longer than was believed, by so much of a logarithm."""
        if self.is_due and abs(surprise) > 2 * MOST_DRIFT:
            self._apart = BARE_APART

    def note_roll(self, surprise: float) -> None:
        """A step with rolls did."""
        self._drift += DRIFT_GAIN * (min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE) - self._drift)
        self._is_doubted |= abs(self._drift) > MOST_DRIFT
        if self._is_doubted and self._since >= self._apart:
            self._drift, self._is_doubted = 0.0, False
            self._apart = min(2 * self._apart, BARE_EVERY)  # until they have found a change
            self.ask()


class StepPace:
    """A curve of seconds by rows that never falls; each step moves its own place, and a little the whole curve, so that
    a machine that got slower is known where it was not measured again. Old steps are forgotten."""

    def __init__(self, is_wary: bool = False) -> None:
        """`is_wary`: what few steps have said is not believed for long. Whoever avoids what is slow would never measure
        again what was so once, while weights came from a disk or a process stood still."""
        self._is_wary = is_wary
        self._places: dict[int, Place] = {}
        self._scale = 0.0
        self._num_steps = 0
        self._host = 0.0  # seconds for each branch that is stepped plainly
        self._asking = 0.0
        self._rolls: list[dict[int, float]] = [{}, {}]  # with masks, or without
        self._bare = BareSteps()
        self._costs: StepCosts | None = None

    def note(self, shape: StepShape, num_branches: int, num_granted: int, host: float, execute: float) -> None:
        """A step of this shape took so many seconds on the host, and on the device."""
        self._bare.note(num_granted > 0)
        if not shape.is_steady or not shape.num_rows:
            return
        self._num_steps += 1
        self._note_host(shape.num_asked, num_branches, host)
        seconds = max(1e-9, host + execute - self._asking * shape.num_asked)
        if shape.roll_depth:
            self._note_roll(shape, seconds)
        else:
            self._note_rows(shape.num_rows, seconds)
        self._costs = None

    @property
    def costs(self) -> StepCosts:
        """What is known. Before any step, a step takes a second and rows little."""
        if self._costs is None:
            self._costs = self._made()
        if self._bare.is_due != self._costs.is_bare:
            self._costs = replace(self._costs, is_bare=self._bare.is_due)
        return self._costs

    # ---- inside
    def _note_host(self, num_asked: int, num_branches: int, host: float) -> None:
        if not num_asked:
            own = host / max(1, num_branches)
            self._host = own if not self._host else self._host + GAIN * (min(own, 2 * self._host) - self._host)
        elif self._host:
            own = max(0.0, host - self._host * num_branches) / num_asked
            limit = 2 * self._asking if self._asking else own
            self._asking += (GAIN if self._asking else 1.0) * (min(own, limit) - self._asking)

    def _note_rows(self, num_rows: int, seconds: float) -> None:
        key, level = place_of(num_rows), math.log(seconds)
        if not self._places:
            self._scale = level
        place = self._places.get(key)
        if place is None:
            self._places[key] = place = Place(num_rows, level - self._scale)
        surprise = level - self._scale - place.level
        self._bare.note_bare(surprise)
        if place.num_steps > CERTAIN and abs(surprise) > MOST_SURPRISE and place.num_doubts < DOUBTS:
            place.num_doubts += 1
            surprise = math.copysign(MOST_SURPRISE, surprise)
        else:
            if place.num_doubts == DOUBTS:  # something has changed, and what else was known may have, too
                place.num_steps, place.num_recent = 1, 1.0
                self._bare.ask()
            place.num_doubts = 0
        known, is_old = place.weight(self._num_steps), self._num_steps - place.last > OLD
        gain = max(GAIN, 1 / (1 + known))
        place.num_recent = (known if is_old else place.num_recent) + 1
        place.last, place.num_steps = self._num_steps, place.num_steps + 1
        place.rows += gain * (num_rows - place.rows)
        if place.num_steps > CERTAIN:
            self._scale += SCALE_GAIN * surprise
            surprise *= 1 - SCALE_GAIN
        place.level += gain * surprise

    def _note_roll(self, shape: StepShape, seconds: float) -> None:
        """What the curve does not explain is the roll's."""
        if not self._places:
            return
        known = self._rolls[shape.is_masked]
        size = min(math.ceil(math.log2(shape.num_rolls)), ROLL_SIZES - 1) if shape.num_rolls > 1 else 0
        bare, before = float(self.costs.of(shape.num_rows)), known.get(size)
        own = max(0.0, seconds - bare) / shape.roll_depth
        if before is None:
            known[size] = own
            return
        self._bare.note_roll(math.log(seconds / (bare + before * shape.roll_depth)))
        known[size] = before + 2 * GAIN * (min(max(own, before / 2), 2 * before + 1e-6) - before)

    def _made(self) -> StepCosts:
        now = self._num_steps
        believed = (
            place for place in self._places.values()
            if not self._is_wary or now - place.last <= OLD * 4 ** min(place.num_steps, CERTAIN)
        )  # fmt: skip
        places = sorted(believed, key=lambda place: place.rows)
        if not places:
            return StepCosts((1.0,), (1.0,), 0.0, (FIRST_ROLL,) * ROLL_SIZES, (FIRST_ROLL,) * ROLL_SIZES)
        blocks = [[place.level, place.weight(now), 1] for place in places]
        merged: list[list[float]] = []
        for block in blocks:  # neighbours that fall are pooled
            merged.append(list(block))
            while len(merged) > 1 and merged[-2][0] > merged[-1][0]:
                level, weight, count = merged.pop()
                last = merged[-1]
                last[0] = (last[0] * last[1] + level * weight) / (last[1] + weight)
                last[1] += weight
                last[2] += count
        levels = [level for level, _, count in merged for _ in range(int(count))]
        seconds = tuple(math.exp(self._scale + level) for level in levels)
        rolls = [self._filled(known, seconds[0]) for known in self._rolls]
        return StepCosts(tuple(place.rows for place in places), seconds, self._asking, rolls[0], rolls[1])

    def _filled(self, known: dict[int, float], one_step: float) -> tuple[float, ...]:
        """Sizes that were not measured are taken to cost what the next smaller, or larger, one does."""
        if not known:
            other = self._rolls[0] or self._rolls[1]
            return self._filled(other, one_step) if other else (FIRST_ROLL * one_step,) * ROLL_SIZES
        sizes = sorted(known)
        return tuple(known[min(sizes, key=partial(_distance, wanted))] for wanted in range(ROLL_SIZES))


def _distance(wanted: int, size: int) -> int:
    return abs(size - wanted)


def place_of(num_rows: int) -> int:
    """Numbers of rows that are one place: each by itself up to 16, then ever more, none across a multiple of 16."""
    width, first = 1, 16
    while num_rows > first:
        if num_rows <= 2 * first:
            width = first // 8
            return 2 * first - (2 * first - num_rows) // width * width
        first *= 2
    return num_rows
