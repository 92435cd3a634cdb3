"""What sessions may hold, and how room comes back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.history import History
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
        assert llm.engine.sessions.num_tokens <= len(session._branch.place[0]) < 2 * 1024
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
        for _ in range(12):
            session.generate(DRAWN, n=8, max_tokens=60, logprobs=0)
            session.rollback(session.num_tokens - len(PROMPT))
        *_, output = stream
        sizes = len(session._branch.place[0]), llm.engine.sessions.num_tokens
        assert sizes[1] <= sizes[0] < 4096 + 1000
        assert other.token_ids == PROMPT + output.outputs[0].token_ids
        assert other.generate(DRAWN, max_tokens=5).finished
    assert_nothing_left(llm)


def alive_of(session: Any) -> int:
    """Tokens of a session, each counted once, found by looking at all of them."""
    branches = session._owner.branches.values()
    return len({tuple(tokens[:i]) for tokens in (b.tokens() for b in branches) for i in range(1, len(tokens) + 1)})


def test_who_is_refused_is_not_looked_at_again_before_something_dies(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is full of what lives is not gone through once more for each token that it asks for."""
    llm, looks, look = tiny(max_session_tokens=500), list[int](), History.alive
    full = "max_session_tokens is 500 tokens, and 1 more"
    monkeypatch.setattr(History, "alive", lambda self, tips: looks.append(1) or look(self, tips))
    with llm.session(PROMPT, seed=3) as session:
        other, last = session.fork(2)
        for branch, token, count in ((session, 7, 200), (other, 8, 200), (last, 9, 100 - len(PROMPT))):
            branch.append([token] * count)
        looks.clear()
        for _ in range(3):
            with pytest.raises(SessionLimit, match=full):
                last.append([5])
        assert not looks
        last.rollback(60)
        last.append([10] * 60)  # 60 that are dead make room: they are few, and still in the history
        assert len(looks) == 1 and session.session_state().num_tokens == 500 < len(session._owner.history)
        with pytest.raises(SessionLimit, match=full):
            last.append([5])
        assert len(looks) == 1
        last.rollback(60)
        last.append([9] * 60)  # the dead come back
        assert session.session_state().num_tokens >= alive_of(session) == 500
        with pytest.raises(SessionLimit, match=full):
            last.append([5])
    assert_nothing_left(llm)


def test_what_only_a_fork_still_held_dies_with_it(tiny: Tiny) -> None:
    """The fork had no token of its own, and when its parent let go of them the session was already looked at."""
    llm = tiny(max_session_tokens=260)
    with llm.session([5] * 200) as session:
        fork = session.fork()
        session.rollback(199)
        with pytest.raises(SessionLimit, match="max_session_tokens is 200 tokens, and 100 more"):
            session.append([7] * 100)
        fork.close()
        session.append([7] * 100)
        assert session.session_state().num_tokens == llm.engine.sessions.num_tokens == 101
    assert_nothing_left(llm)


@pytest.mark.parametrize("seed", range(4))
def test_what_lives_is_counted(tiny: Tiny, seed: int) -> None:
    """Never less than lives; just that, when it is looked at. Tokens are few, so that what is dead comes back."""
    llm, rng = tiny(), random.Random(seed)
    with llm.session(PROMPT, seed=seed) as session:
        branches, sessions = [session], llm.engine.sessions
        for _ in range(60):
            branch = rng.choice(branches)
            if branch.room < 80:
                branch.rollback(100)
            match rng.choice(["append", "append", "rollback", "fork", "close", "score", "generate", "none"]):
                case "append":
                    branch.append([rng.choice([5, 6])] * rng.choice([1, 9, 70]))
                case "rollback":
                    branch.rollback(rng.randrange(branch.num_tokens))
                case "fork":
                    branches += branch.fork(2)
                case "close" if branch is not session:
                    branches.remove(branch)
                    branch.close()
                case "score":
                    branch.score([[5] * rng.randrange(1, 30), [6] * 40])
                case "generate":
                    branches += branch.generate(DRAWN, n=2, max_tokens=9, keep="all").branches
                case "none":
                    branch.generate(DRAWN, n=2, max_tokens=9, keep="none")
            counted = session.session_state().num_tokens
            assert alive_of(session) <= counted <= len(session._owner.history)
            if rng.random() < 0.3:
                sessions.bury([session._owner])
                if not session._owner.num_dead:  # nothing that died is still in it, so nobody can have missed it
                    assert len(session._owner.history) == alive_of(session)
                assert session.session_state().num_tokens == sessions.num_tokens == alive_of(session)
    assert_nothing_left(llm)


def test_what_has_grown_side_by_side_is_quick_to_count(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run for each branch, not for each token."""
    monkeypatch.setattr("pagedec.engine.sessions.FEW_TOKENS", 8)
    llm = tiny()
    with llm.session(PROMPT) as session:
        other, owner = session.fork(), session._owner
        for _ in range(60):
            session.append([5])
            other.append([6])
        history, tokens = owner.history, (session.token_ids, other.token_ids)
        assert history.alive(owner.tips) == (len(PROMPT) + 120, 120)
        other.rollback(1)  # perhaps something has died
        llm.engine.sessions.bury([owner])
        assert owner.history is not history and owner.history.alive(owner.tips)[1] <= 3
        assert (session.token_ids, other.token_ids) == (tokens[0], tokens[1][:-1])
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
