"""What a call on a session may add, and where a rollback counts from."""

from __future__ import annotations

import pytest

from pagedec import SamplingParams
from pagedec.errors import InvalidArgument, SessionLimit
from tests.engine.crowd import Tiny


def test_a_call_counts_what_it_may_add(tiny: Tiny) -> None:
    """An answer is bounded by the context where `max_tokens` is not below it, continuations by their own lengths."""
    llm = tiny(max_session_tokens=100)
    session = llm.session([5, 6, 7, 8])
    with pytest.raises(SessionLimit, match="max_session_tokens is 4 tokens, and 252 more: a session may hold 100"):
        session.generate(max_tokens=None, ignore_eos=True)
    assert len(session.score([[i] for i in range(40)] + [[5] * 40])) == 41
    roomy = tiny().session([5, 6, 7, 8])
    assert len(roomy.generate(max_tokens=10**9, ignore_eos=True).outputs[0].token_ids) == 252


def test_a_rollback_counts_from_where_the_branch_is(tiny: Tiny) -> None:
    """Not from where it was when another thread had not appended yet."""
    llm = tiny()
    session = llm.session([5] * 20)
    cut = session._cutting(5)
    session.append([9] * 10)
    llm.loop.at_once(cut)
    assert session.token_ids == [5] * 20 + [9] * 5


def test_scores_is_no_way_to_keep(tiny: Tiny) -> None:
    with pytest.raises(InvalidArgument, match="keep is 'scores': must be one of first, all, none"):
        tiny().session([5]).generate(max_tokens=1, keep="scores")


def test_what_is_refused_takes_nothing_back(tiny: Tiny) -> None:
    """A chat's message that is written in another way, and finds no room behind the place where they part."""
    llm = tiny(max_session_tokens=60)
    session = llm.session([5] * 30)
    sessions = llm.engine.sessions
    with pytest.raises(SessionLimit, match="max_session_tokens is 30 tokens, and 40 more"):
        llm.loop.at_once(lambda engine: sessions.append(engine, session._branch, [9] * 40, 10))
    assert session.token_ids == [5] * 30
    llm.loop.at_once(lambda engine: sessions.append(engine, session._branch, [9] * 20, 10))
    assert session.token_ids == [5] * 10 + [9] * 20


@pytest.mark.parametrize("keeps_another", [False, True])
def test_a_call_that_is_dropped_with_its_branch_counts_no_more(tiny: Tiny, keeps_another: bool) -> None:
    """Both are found in the same look: the call has failed, and its branch is gone when that is told."""
    llm = tiny()
    session = llm.session([5, 6, 7], ttl=1000.0)
    other = session.fork() if keeps_another else None
    stream = session.stream(max_tokens=200, ignore_eos=True)
    owner, sessions = session._owner, llm.engine.sessions
    assert owner.num_calls == 1 and sessions._num_promised == 200
    del stream, session
    llm.generate([[3]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert (owner.num_calls, owner.num_promised, sessions._num_promised) == (0, 0, 0)
    assert list(owner.branches) == (["0.0"] if keeps_another else [])
    if other is not None:
        other.close()
    assert sessions.num_tokens == 0
