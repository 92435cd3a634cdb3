"""How good a branch is: a function of it, or the model's own opinion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pagedec.llm.session import SessionBranch

Scorer: TypeAlias = Callable[[SessionBranch], float]
"""Higher is better. It may read the branch (`text`, `token_ids`, `logprobs`), fork it and score continuations."""


@dataclass(frozen=True, slots=True)
class Found:
    """A branch that a search returns, its score, and whether its answer is complete."""

    branch: SessionBranch
    score: float
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """A scorer that asks the model: how much more probable it takes `good` to be than `bad`, as a difference of
    log-probabilities, where `question` stands behind a branch's text. The branch stays as it is."""

    question: str = "\nIs this a good answer? "
    good: str = "Yes"
    bad: str = "No"

    def __call__(self, branch: SessionBranch) -> float:
        return self.all([branch])[0]

    def all(self, branches: Sequence[SessionBranch]) -> list[float]:
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


def scored(scorer: Scorer, branches: Sequence[SessionBranch]) -> list[float]:
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
