"""Tokens that a grammar leaves no choice about."""

from __future__ import annotations

from tests.constraints.test_grammar import constraint_of


def test_a_state_is_asked_once_what_must_follow() -> None:
    """In a step a planner asks it, a decoder does, and so does what weighs its drafts."""

    class Counted:
        num_asked = 0

        def compute_ff_tokens(self) -> list[int]:
            self.num_asked += 1
            return matcher.compute_ff_tokens()  # type: ignore[no-any-return]

    constraint = constraint_of({"regex": "the same text, always"})
    state = constraint.start([])
    matcher, counted = state.matcher(), Counted()
    state._matcher, state._forced = counted, None
    found = [constraint.forced(state, most) for most in (2, 9, 9)]
    assert len(found[0]) == 2 and found[1] == found[2] and found[1][:2] == found[0] and counted.num_asked == 1
