"""How good a branch is: a function of it, or the model's own opinion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Protocol, TypeAlias

from pagedec.errors import InvalidArgument
from pagedec.fields import Integer
from pagedec.outputs import BranchOutput, CompletionOutput, ContinuationScore


class Searchable(Protocol):
    """What a search needs of a branch: that of a session of `LLM`, or of a server's (`pagedec.client`)."""

    @property
    def text(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def room(self) -> int: ...

    def generate(self, sampling_params: Any = None, *, keep: str | int = "first", **fields: Any) -> BranchOutput[Any]:
        """Answers behind the branch."""

    def generate_all(
        self, branches: Sequence[Any], sampling_params: Any = None, *, keep: str | int = "first", **fields: Any
    ) -> list[BranchOutput[Any]]:
        """The same of several branches, together."""

    def append(self, what: Any) -> None:
        """Go on with a text."""

    def rollback(self, to: int) -> None:
        """Take back the last tokens."""

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
    """A branch that a search returns, its score, and whether nothing can follow: its answer is complete, or the
    context is full."""

    branch: Any
    score: float
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """A scorer that asks the model: how much more probable it takes `good` to be than `bad`, as a difference of
    log-probabilities, where `question` stands behind a branch's text. The branch stays as it is. Where the context may
    have no room for question and answer, they stand in place of the text's last tokens."""

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
                if (short := self._most_tokens() - fork.room) > 0:
                    fork.rollback(min(short, fork.num_tokens - 1))
                fork.append(self.question)
            scores = forks[0].score_all(forks, [[self.good, self.bad]] * len(forks)) if forks else []
        finally:
            for fork in forks:
                fork.close()
        return [good.logprob - bad.logprob for good, bad in scores]

    def _most_tokens(self) -> int:
        """Of question and answer: each token stands for a byte, at least, but for a space that is written first."""
        return 2 + len(self.question.encode()) + max(len(text.encode()) for text in (self.good, self.bad))


def check_search(branch: object, name: str, function: object, **numbers: object) -> None:
    """Raise `InvalidArgument` for what no search can begin with. `name` is that of `function`; `numbers` must be whole
    and at least 1."""
    if not hasattr(branch, "fork") or iscoroutinefunction(branch.fork):
        raise InvalidArgument("branch", branch, "must be a branch of a session of `LLM`")
    if not callable(function):
        of = "a text that returns what it says" if name == "answer_of" else "a branch that returns a number"
        raise InvalidArgument(name, function, f"must be a function of {of}")
    for field, number in numbers.items():
        Integer(field, low=1).check(field, number)


def step_fields(delimiter: str, samples: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What parameters say of a step: `samples` texts up to `delimiter`, and what the caller changes."""
    if not isinstance(delimiter, str) or not delimiter:
        raise InvalidArgument("delimiter", delimiter, "must be a text that is not empty")
    return {"stop": [delimiter], "include_stop_str_in_output": True, "n": samples, **fields}


def has_ended(branch: Searchable, answer: CompletionOutput, delimiter: str | None = None) -> bool:
    """Whether nothing can follow an answer that `branch` goes on from: it ended, and not at `delimiter`, or there is no
    room."""
    return (answer.finish_reason == "stop" and answer.stop_reason != delimiter) or not branch.room


def scored(scorer: Scorer, branches: Sequence[Searchable], most: float = math.inf) -> list[float]:
    """Each branch's score; of a `ModelJudge` in one batch. Raises `InvalidArgument` for a score that is no number, or
    beyond `most`, whatever its sign."""
    values = scorer.all(branches) if isinstance(scorer, ModelJudge) else map(scorer, branches)
    return [_number(branch, value, most) for branch, value in zip(branches, values, strict=True)]


def _number(branch: Searchable, value: Any, most: float) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= most:
        kind = "a number" if most == math.inf else "a finite number"
        raise InvalidArgument(f"scorer({branch!r})", value, f"must be {kind}; higher is better")
    return number


def best(candidates: Sequence[Found], count: int) -> list[Found]:
    """The `count` best, the earlier first where scores are equal, and answers that have ended each once. The others'
    branches are closed."""
    kept: list[Found] = []
    seen: set[tuple[int, ...]] = set()
    for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
        tokens = tuple(candidate.branch.token_ids) if candidate.ended else None
        if len(kept) == count or tokens in seen:
            candidate.branch.close()
            continue
        kept.append(candidate)
        if tokens is not None:
            seen.add(tokens)
    return kept
