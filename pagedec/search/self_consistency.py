"""Self-consistency (Wang et al. 2022): draw several chains of thought, and believe what most of them end with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.search.scorers import Searchable, check_search


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer that most texts gave, None where none gave any; how many gave which; and the texts."""

    winner: Hashable
    counts: dict[Hashable, int]
    texts: list[str]


def self_consistency(
    branch: Searchable,
    answer_of: Callable[[str], Hashable],
    n: int = 8,
    sampling_params: Any = None,
    **fields: Any,
) -> Vote:
    """Draw `n` texts behind `branch` and count what `answer_of` finds in each; None is no vote. Of answers with as many
    votes the first to be given wins. Nothing is kept; asked again, others are drawn."""
    check_search(branch, "answer_of", answer_of)
    output = branch.generate(sampling_params, keep="none", n=n, **fields)
    texts = [answer.text for answer in output.outputs]
    counts = Counter(found for found in (_votes(answer_of(text)) for text in texts) if found is not None)
    winner = max(counts, key=lambda found: counts[found], default=None)
    return Vote(winner, dict(counts), texts)


def _votes(found: Any) -> Hashable:
    if not isinstance(found, Hashable):
        raise InvalidArgument(
            "answer_of", found, "must return what can be counted, as texts, numbers and tuples, or None"
        )
    return found
