"""How good a branch is: a function of it, or the model's own opinion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pagedec.outputs import BranchOutput, ContinuationScore


class Searchable(Protocol):
    """What a search needs of a branch: that of a session of `LLM`, or of a server's (`pagedec.client`)."""

    @property
    def text(self) -> str: ...

    def generate(self, sampling_params: Any = None, *, keep: str | int = "first", **fields: Any) -> BranchOutput[Any]:
        """Answers behind the branch."""

    def generate_all(
        self, branches: Sequence[Any], sampling_params: Any = None, *, keep: str | int = "first", **fields: Any
    ) -> list[BranchOutput[Any]]:
        """The same of several branches, together."""

    def append(self, what: Any) -> None:
        """Go on with a text."""

    def fork(self) -> Any:
        """A new branch that is where this one is."""

    def score_all(
        self, branches: Sequence[Any], continuations: Sequence[Any], *, logprobs: int = 0
    ) -> list[list[ContinuationScore]]:
        """How probable continuations of several branches are."""

    def close(self) -> None:
        """Let the branch go."""


Scorer: TypeAlias = Callable[[Any], float]
"""Higher is better. It may read the branch (`text`, `token_ids`, `logprobs`), fork it and score continuations."""


@dataclass(frozen=True, slots=True)
class Found:
    """A branch that a search returns, its score, and whether its answer is complete."""

    branch: Any
    score: float
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """A scorer that asks the model: how much more probable it takes `good` to be than `bad`, as a difference of
    log-probabilities, where `question` stands behind a branch's text. The branch stays as it is."""

    question: str = "\nIs this a good answer? "
    good: str = "Yes"
    bad: str = "No"

    def __call__(self, branch: Searchable) -> float:
        return self.all([branch])[0]

    def all(self, branches: Sequence[Searchable]) -> list[float]:
        """The scores of several branches, which are asked in one batch."""
        forks = [branch.fork() for branch in branches]
        try:
            for fork in forks:
                fork.append(self.question)
            scores = forks[0].score_all(forks, [[self.good, self.bad]] * len(forks)) if forks else []
        finally:
            for fork in forks:
                fork.close()
        return [good.logprob - bad.logprob for good, bad in scores]


def scored(scorer: Scorer, branches: Sequence[Searchable]) -> list[float]:
    """Each branch's score; of a `ModelJudge` in one batch."""
    if isinstance(scorer, ModelJudge):
        return scorer.all(branches)
    return [float(scorer(branch)) for branch in branches]


def best(candidates: Sequence[Found], count: int) -> list[Found]:
    """The `count` best, the earlier first where scores are equal. The others' branches are closed."""
    order = sorted(candidates, key=lambda candidate: -candidate.score)
    for candidate in order[count:]:
        candidate.branch.close()
    return order[:count]
