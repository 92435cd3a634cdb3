"""Best of n: draw several answers, keep the one that scores best."""

from __future__ import annotations

from typing import Any

from pagedec.search.scorers import Found, Scorer, Searchable, best, check_search, has_ended, scored


def best_of_n(branch: Searchable, scorer: Scorer, n: int = 4, sampling_params: Any = None, **fields: Any) -> Found:
    """Draw `n` answers behind `branch` and return the one that `scorer` likes best, the first of equal ones, as a new
    branch. `sampling_params` and `fields` are those of its `generate`. `branch` stays as it is."""
    check_search(branch, "scorer", scorer)
    output = branch.generate(sampling_params, keep="all", n=n, **fields)
    values = scored(scorer, output.branches)
    ended = [has_ended(*made) for made in zip(output.branches, output.outputs, strict=True)]
    return best([Found(*found) for found in zip(output.branches, values, ended, strict=True)], 1)[0]
