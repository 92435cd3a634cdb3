"""What sessions may hold, and how room comes back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.errors import SessionLimit
from tests.engine.crowd import Tiny
from tests.engine.test_session_programs import assert_nothing_left
from tests.engine.test_sessions import DRAWN, PROMPT


@pytest.mark.parametrize("how", ["close", "rollback"])
def test_who_closes_or_takes_back_makes_room_for_others(tiny: Tiny, how: str) -> None:
    """Memory follows what lives, though nothing has grown since."""
    llm = tiny(max_parked_tokens=4200)
    with llm.session(PROMPT, seed=3) as session:
        forks = session.fork(40)
        for i, fork in enumerate(forks):
            fork.append([50 + i] * 100)
        with pytest.raises(SessionLimit, match="max_parked_tokens"):
            llm.session([7] * 200)
        for fork in forks[:39]:
            fork.close() if how == "close" else fork.rollback(100)
        assert llm.engine.sessions.num_tokens == len(session._branch.place[0]) < 2 * 1024
        llm.session([7] * 200).close()
        assert forks[39].token_ids == PROMPT + [89] * 100
        forks[39].generate(DRAWN)
    assert_nothing_left(llm)


def test_calls_of_one_batch_are_counted_together(tiny: Tiny) -> None:
    """Each alone would have room, and all together have not: some are refused, and none of them when others ended."""
    llm = tiny(max_session_tokens=100)
    long = SamplingParams(max_tokens=80, ignore_eos=True, temperature=1.0)
    with llm.session([5, 6, 7, 8]) as session:
        branches = [session, *session.fork(3)]
        with pytest.raises(SessionLimit, match="max_session_tokens is 84 tokens, and 80 more"):
            session.generate_all(branches, long)
        assert [branch.num_tokens for branch in branches] == [4] * 4
        session.generate(long)
        assert llm.engine.sessions.num_tokens <= 100
        with pytest.raises(SessionLimit):
            branches[1].generate(long)
        session.rollback(80)
        branches[1].generate(long)
    assert_nothing_left(llm)


def test_dead_history_is_pruned(tiny: Tiny) -> None:
    llm = tiny(num_blocks=64)
    with llm.session(PROMPT, seed=3) as session:
        other = session.fork()
        stream = other.stream(DRAWN, max_tokens=90)  # it keeps the history that it began on
        next(stream)
        for _ in range(30):
            session.generate(DRAWN, n=4, max_tokens=60, logprobs=0)
            session.rollback(session.num_tokens - len(PROMPT))
        *_, output = stream
        sizes = len(session._branch.place[0]), llm.engine.sessions.num_tokens
        assert sizes[0] == sizes[1] < 4096 + 1000
        assert other.token_ids == PROMPT + output.outputs[0].token_ids
        assert other.generate(DRAWN, max_tokens=5).finished
    assert_nothing_left(llm)


def test_limits_have_names(tiny: Tiny) -> None:
    llm = tiny(max_session_branches=3, max_session_tokens=100, max_parked_branches=4, max_parked_tokens=140)
    session = llm.session(PROMPT, seed=3)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: session.fork(3), "max_session_branches is 1 branches, and 3 more: a session may have 3"),
        (lambda: session.append([5] * 64), "max_session_tokens is 37 tokens, and 64 more: a session may hold 100"),
        (lambda: session.generate(DRAWN, n=3, keep="all"), "max_session_branches is 1 branches, and 3 more"),
        (lambda: llm.session([5] * 104), "max_session_tokens is 0 tokens, and 104 more"),
    ]
    for act, message in cases:
        with pytest.raises(SessionLimit, match=re.escape(message)):
            act()
    forks, other = session.fork(2), llm.session([5] * 90)
    with pytest.raises(SessionLimit, match="max_parked_branches is 4 branches, and 1 more"):
        llm.session([5])
    with pytest.raises(SessionLimit, match="max_parked_tokens is 127 tokens, and 14 more: all sessions together"):
        session.append([5] * 14)
    assert len(forks) == 2 and other.num_tokens == 90 and session.token_ids == PROMPT


def test_a_chat_turn_without_room_takes_nothing_back(tiny: Tiny) -> None:
    """A template that writes what was said in another way has the branch cut; not before there is room for the turn."""

    class Rewriting:
        def fork(self) -> Rewriting:
            return self

        def answer(self, token_ids: Any) -> None: ...

        def ask(self, message: Any) -> list[int]:
            return [*PROMPT[:10], *[5] * 80]

    session = tiny(max_session_tokens=100).session(PROMPT, seed=3)
    session._turns = ((len(PROMPT), Rewriting()),)  # type: ignore[assignment]
    with pytest.raises(SessionLimit, match="max_session_tokens"):
        session.append({"role": "user", "content": "and now?"})
    assert session.token_ids == PROMPT and session._branch.epoch == 0
