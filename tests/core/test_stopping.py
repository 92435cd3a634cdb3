"""The automaton that ends branches."""

from __future__ import annotations

import pytest

from pagedec.core.stopping import Cut, Stopping


def test_what_follows_a_stop_was_never_accepted() -> None:
    stopping = Stopping((0,), (5,), max_tokens=10)
    assert stopping.cut(0, (1, 5, 2)) == Cut(2, (1, 5), "stop", 5)
    assert stopping.cut(3, (0, 5)) == Cut(4, (0,), "stop", 0)
    assert stopping.cut(3, (1, 2)) == Cut(5, (1, 2))
    assert stopping.cut(3, ()) == Cut(3, ())


def test_length_ends_a_branch_with_its_last_token() -> None:
    stopping = Stopping((0,), max_tokens=3)
    assert stopping.cut(0, (1, 2, 3, 4)) == Cut(3, (1, 2, 3), "length")
    assert stopping.cut(2, (0,)) == Cut(3, (0,), "stop", 0), "a stop token at the last place is a stop"


def test_room_cuts_before_the_token_that_has_none() -> None:
    assert Stopping().cut(0, (1, 2, 3), room=2) == Cut(2, (1, 2), "length")
    assert Stopping().cut(0, (1, 2), room=2) == Cut(2, (1, 2))
    assert Stopping((1,)).cut(0, (1,), room=0) == Cut(0, (), "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens(ignore_eos: bool) -> None:
    """Banned until then; if such a token comes all the same, it ends nothing."""
    stopping = Stopping((0,), (5, 3), min_tokens=2, max_tokens=9, ignore_eos=ignore_eos)
    ends = (3, 5) if ignore_eos else (0, 3, 5)
    assert stopping.banned(0) == stopping.banned(1) == stopping.banned(0, 1) == ends
    assert stopping.banned(2) == stopping.banned(1, 1) == ()
    assert stopping.cut(0, (5, 5, 5)) == Cut(3, (5, 5, 5), "stop", 5)
    assert stopping.cut(0, (0, 0, 0)).reason == (None if ignore_eos else "stop")


def test_replay_gives_the_state_back() -> None:
    stopping = Stopping((0,), max_tokens=9)
    state = stopping.cut(stopping.start, (1, 2, 3)).state
    assert stopping.replay((1, 2, 3)) == state and stopping.replay(()) == stopping.start
