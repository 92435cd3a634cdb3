"""What became of drafts, by their places."""

from __future__ import annotations

from pagedec.core.acceptance import Acceptance
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.history import History
from pagedec.core.protocol import Ask, Query, Sample, TopK
from pagedec.core.request import Branch


def asking(*asks: Ask) -> Query:
    return Query(Branch(History(16).append(0, [1]), {}, (0,), 0, 1), asks)


def test_a_chain() -> None:
    whole = Acceptance()
    one, other = Acceptance(whole=whole), Acceptance(whole=whole)
    one.note(asking(Sample()), Draft.chain([1, 2, 3]), [2])
    one.note(asking(TopK(3)), Draft.chain([1]), [0])
    other.note(asking(Sample()), Draft.chain([4, 5]), [2])
    assert (one.num_drafts, one.num_drafted, one.drafted, one.accepted) == (2, 4, [2, 1, 1], [1, 1, 0])
    assert (whole.num_drafts, whole.num_drafted, whole.drafted, whole.accepted) == (3, 6, [3, 2, 1], [2, 2, 0])
    assert (one.num_accepted, other.num_accepted, whole.num_accepted) == (2, 2, 4)
    assert [repr(counts) for counts in (whole, other)] == [
        "<Acceptance: 4 of 6 tokens in 3 drafts>", "<Acceptance: 2 of 2 tokens in 1 draft>",
    ]  # fmt: skip


def test_a_tree_that_several_go_on_from() -> None:
    """It counts for each; so no more is ever accepted than was drafted."""
    counts = Acceptance()
    counts.note(asking(Sample(streams=(0, 1))), Draft((1, 2, 3), (0, 0, 2)), [2, 1])
    assert (counts.num_drafts, counts.num_drafted, counts.drafted, counts.accepted) == (2, 6, [2, 2], [2, 1])


def test_what_nobody_verifies_does_not_count() -> None:
    counts = Acceptance()
    window = Draft((1, 2, 3, 4), (0, 1, 0, 3))
    counts.note(asking(Sample(nodes=(0, 1, 2)), Sample(nodes=(4,))), window, [1])
    counts.note(asking(Sample(nodes=(0,)), Sample(nodes=(4,))), window, [0])
    counts.note(asking(Sample()), EMPTY, [0])
    assert (counts.num_drafts, counts.num_drafted, counts.drafted, counts.accepted) == (1, 2, [1, 1], [1, 0])
