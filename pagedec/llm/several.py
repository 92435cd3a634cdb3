"""Calls on several branches of sessions, begun together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pagedec.blame import of_params
from pagedec.engine.engine import Engine
from pagedec.errors import InvalidArgument
from pagedec.inputs import as_continuations_of_each, as_params
from pagedec.llm.branches import branches_of
from pagedec.llm.going import B, Going, Scored


def generating(
    handle: B,
    branches: Sequence[B],
    sampling_params: Any,
    keep: str | int,
    fields: Mapping[str, Any],
    waits: bool = False,
) -> list[Going[B]]:
    """`generate` on each of `branches`, which must be of `handle`'s LLM; `sampling_params` is one object for all or one
    for each. `waits`: see `Going`."""
    many = _branches(handle, branches)
    calls = []
    for branch, own, name in zip(many, *as_params(sampling_params, len(many), "branch"), strict=True):
        blamed = partial(of_params, name, own, fields) if name else contextlib.nullcontext
        with blamed():
            calls.append(branch._generating(own, keep, fields, False, waits=waits))
        calls[-1].blamed = blamed
    return calls


def scoring(handle: B, branches: Sequence[B], continuations: Any, logprobs: int) -> list[Scored]:
    """`score` on each of `branches`: a list of continuations for each."""
    many = _branches(handle, branches)
    named = zip(many, as_continuations_of_each(continuations, len(many)), strict=True)
    return [branch._scoring(own, logprobs, field) for branch, (own, field) in named]


def all_at_once(going: Sequence[Going[B] | Scored]) -> Callable[[Engine], None]:
    """Send out calls together, all or none."""

    def begin(engine: Engine) -> None:
        begun: list[Going[B] | Scored] = []
        try:
            for one in going:
                one.begin(engine)
                begun.append(one)
        except BaseException:
            for one in begun:
                one.withdraw()
            raise

    return begin


def _branches(handle: B, branches: Any) -> list[B]:
    many: list[B] = branches_of(handle._front, branches)
    for i, branch in enumerate(many):
        if any(branch._branch is other._branch for other in many[:i]):
            raise InvalidArgument(f"branches[{i}]", branch, "must be in the list once: one call at a time runs on it")
    return many
