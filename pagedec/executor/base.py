"""What the engine needs of whoever carries out its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from pagedec.core.adapter_places import AdapterFile, AdapterFiles
from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.core.logits_rules import LogitsRules
from pagedec.core.wire import Step
from pagedec.runtime.geometry import Geometry

NO_ADAPTERS: AdapterFiles = {}
T = TypeVar("T")


class Pending(Protocol):
    """What becomes of a step: its answers, which may not be there yet."""

    def result(self) -> Answers:
        """Wait for them. Raises what went wrong; KV is then as good as lost. Called once."""


class Over:
    """A step that is over already: its answers, or what went wrong."""

    __slots__ = ("_answers", "error")

    def __init__(self, answers: Answers | None = None, error: Exception | None = None) -> None:
        self._answers, self.error = answers, error

    def result(self) -> Answers:
        if self._answers is None:
            assert self.error is not None
            raise self.error
        return self._answers


class Executor(Protocol):
    """Carries out steps in the order they are given. Workers own weights, KV and kernels, and no decoding state."""

    geometry: Geometry
    overlaps: bool
    """A device carries out what `asks_draws_alone` by itself, so that the next step, whose rows may be of tokens that
    this one draws (`drawn_as`), is best given meanwhile. All take it so. What fails of two such steps may be told of
    the first."""
    num_restarts: int
    """Times that what was lost was brought back."""
    restart_seconds: float
    """What that took, in all."""

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Pending:
        """Carry out one step's forwards, by lane, or begin to. Raises nothing: what went wrong is the answers' to tell.

        `rules` are those of all running requests, `adapters` the files of all that they may name. `masks` gives those
        of the target's `masked_rows`; it is called when the forwards are on their way, so that what it does costs
        nothing as long as the device is busy, with the tokens that the draft lane has rolled for the target.
        """

    @property
    def problem(self) -> str | None:
        """Why no step can be carried out for now, as far as is known; None: nothing is wrong. Any thread may ask."""

    def mend(self) -> None:
        """Bring back what is lost, between two steps; its KV is lost, too. Raises what keeps that from coming back."""

    def give_up(self) -> None:
        """Nothing that is lost need come back any more: whoever waits for that is told. Any thread may call."""

    def stop(self) -> None:
        """Give up the device. No step may follow."""


class News:
    """Which rules and adapters a worker has been told: each once, and once that nobody has them any more."""

    def __init__(self) -> None:
        self._rules: _Known[LogitsRules] = _Known()
        self._adapters: _Known[AdapterFile] = _Known()

    def step(self, number: int, forwards: Forwards, rules: Rules, adapters: AdapterFiles = NO_ADAPTERS) -> Step:
        """A step with what a worker is told now: what it does not know, and numbers to forget."""
        return Step(number, forwards, *self._rules.news(rules), *self._adapters.news(adapters))


class _Known(Generic[T]):
    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def news(self, now: Mapping[int, T]) -> tuple[dict[int, T], Sequence[int]]:
        if now.keys() == self._numbers:
            return {}, ()
        new = {number: own for number, own in now.items() if number not in self._numbers}
        old = tuple(self._numbers - now.keys())
        self._numbers = set(now)
        return new, old
