"""Sample and match: what is accepted is exactly the longest way down the tree along the target's own draws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedec.core.draft import EMPTY, Draft
from pagedec.decoders.verify import match


@st.composite
def trees(draw: st.DrawFn) -> tuple[Draft, list[int]]:
    """A tree over few tokens, often with equal siblings, and what the target draws at every node."""
    draft = Draft()
    for _ in range(draw(st.integers(0, 12))):
        draft = draft.add(draw(st.integers(0, 2)), draw(st.integers(0, len(draft.tokens))))
    size = len(draft.tokens) + 1
    return draft, draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))


@given(trees())
def test_match(given: tuple[Draft, list[int]]) -> None:
    """The path is a way down, every token on it was drawn at its parent, and it cannot go on."""
    draft, drawn = given
    path, token = match(draft, drawn)
    end = path[-1] if path else 0
    assert draft.path(end) == path and token == drawn[end]
    for node in path:
        assert draft.tokens[node - 1] == drawn[draft.parents[node - 1]]
    assert not any(p == end and t == token for t, p in zip(draft.tokens, draft.parents, strict=True))


def test_nothing_drafted() -> None:
    assert match(EMPTY, [7]) == ((), 7)


def test_the_first_of_equal_siblings_is_taken() -> None:
    assert match(Draft((5, 5, 6), (0, 0, 2)), [5, 1, 6, 0]) == ((1,), 1)


def test_nodes_that_were_not_drawn_at_are_not_accepted() -> None:
    """A window behind the guesses is evaluated, and not verified."""
    draft = Draft((7, 8, 5, 6), (0, 1, 0, 3))
    assert match(draft, [7, 8, 9]) == ((1, 2), 9)
    assert match(draft, [5, 8, 9]) == ((), 5)
    assert match(draft, [5, 8, 9, 6, 1]) == ((3, 4), 1)
