"""Sampling with scripted answers: every stream goes its own way, and a draft never changes a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.history import History
from pagedec.core.protocol import Answer, DecoderContext, Query, Sample
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders import Sampling
from pagedec.params import SamplingParams


def context_of() -> DecoderContext:
    return DecoderContext(History(16), 3, 100, 50, (2,))


def root_of(decoder: Sampling) -> Branch:
    return Branch(decoder.context.history.append(0, [5, 6, 7]), {}, decoder.initial_state, 0, 3)


def answer(draft: Draft, drawn: list[list[int]]) -> Answer:
    """`drawn[node][stream]`"""
    return Answer(draft, (np.array(drawn, np.int32),))


def test_one_row_draws_all_streams_of_the_root() -> None:
    decoder = Sampling(SamplingParams(n=3, temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, seed=11), context_of())
    root = root_of(decoder)
    [query] = decoder.propose([root], 10)
    assert query == Query(root, (Sample(Sampler(0.7, 4, 0.9, 0.1, 11), (0, 1, 2)),), EMPTY)
    verdict = decoder.advance([query], [answer(EMPTY, [[8, 9, 8]])])
    assert [(child.parent, child.tokens, child.path, child.state) for child in verdict.live] == [
        (root, (8,), (), (0,)), (root, (9,), (), (1,)), (root, (8,), (), (2,)),
    ]  # fmt: skip
    assert [decoder.rank(child.state) for child in verdict.live] == [0, 1, 2]
    assert verdict.done == verdict.drop == () and decoder.width == 3


def test_greedy_ignores_the_rest() -> None:
    """So that equal greedy requests have equal samplers, whatever their seed."""
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.3, seed=9)
    assert Sampling(params, context_of()).sampler == Sampler()


def test_propose_is_pure() -> None:
    decoder = Sampling(SamplingParams(n=2), context_of())
    root = root_of(decoder)
    assert decoder.propose([root], 10) == decoder.propose([root], 1)


class Drafting(Sampling):
    """Always proposes the same tree."""

    tree = Draft((10, 20, 11, 21, 12), (0, 0, 1, 2, 3))  # 10-11-12 and 20-21

    def draft(self, branch: Branch, room: int) -> Draft:
        return self.tree


@pytest.mark.parametrize(
    ("drawn", "path", "token"),
    [
        ([10, 11, 0, 12, 0, 13], (1, 3, 5), 13),  # all of a path, and the bonus token
        ([10, 11, 0, 99, 0, 13], (1, 3), 99),
        ([20, 11, 21, 12, 40, 13], (2, 4), 40),
        ([30, 11, 21, 12, 40, 13], (), 30),  # nothing matches
        ([10, 99, 21, 12, 40, 13], (1,), 99),
    ],
)
def test_a_draft_is_accepted_while_it_matches(drawn: list[int], path: tuple[int, ...], token: int) -> None:
    decoder = Drafting(SamplingParams(temperature=0.0), context_of())
    [query] = decoder.propose([root_of(decoder)], 10)
    [child] = decoder.advance([query], [answer(Drafting.tree, [[t] for t in drawn])]).live
    assert (child.path, child.tokens) == (path, (token,))


def test_streams_accept_different_paths_of_one_tree() -> None:
    decoder = Drafting(SamplingParams(n=2, seed=1), context_of())
    [query] = decoder.propose([root_of(decoder)], 10)
    drawn = [[10, 20], [11, 0], [0, 21], [12, 0], [0, 7], [6, 0]]
    children = decoder.advance([query], [answer(Drafting.tree, drawn)]).live
    assert [(child.path, child.tokens, child.state) for child in children] == [
        ((1, 3, 5), (6,), (0,)), ((2, 4), (7,), (1,)),
    ]  # fmt: skip


def test_a_stripped_draft_is_one_token() -> None:
    """The answer says what was run."""
    decoder = Drafting(SamplingParams(temperature=0.0), context_of())
    [query] = decoder.propose([root_of(decoder)], 10)
    [child] = decoder.advance([query], [answer(EMPTY, [[10]])]).live
    assert (child.path, child.tokens) == ((), (10,))


def test_only_plain_sampling_is_plain() -> None:
    """Whoever overrides what is asked, drafted, learned or answered is asked every time."""

    def methods(name: str) -> type[Sampling]:
        def method(self: Any, *args: Any) -> Any:
            return getattr(Sampling, name)(self, *args)

        return type("Own", (Sampling,), {name: method})

    assert Sampling(SamplingParams(seed=4), context_of()).plain_sampler == Sampler(1.0, seed=4)
    for name in ("propose", "advance", "draft", "learn"):
        assert methods(name)(SamplingParams(seed=4), context_of()).plain_sampler is None
