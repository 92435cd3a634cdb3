"""What a call on a session may add, and where a rollback counts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.errors import InvalidArgument, RequestError, RequestsFailed, SessionLimit, SessionTooSmall
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


def test_tokens_that_had_died_count_when_they_are_answered_again(tiny: Tiny) -> None:
    """Greedy, a call says the same once more: the history has it, and does not grow."""
    llm = tiny()
    session = llm.session([5] * 20)
    sessions, owner = llm.engine.sessions, session._owner
    first = session.generate(max_tokens=8, ignore_eos=True, temperature=0)
    session.rollback(8)
    llm.loop.at_once(lambda engine: engine.sessions.bury([owner]))
    assert (sessions.num_tokens, owner.num_dead) == (20, 8)
    again = session.generate(max_tokens=8, ignore_eos=True, temperature=0)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and len(owner.history) == 28
    assert sessions.num_tokens == 28


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


@pytest.mark.parametrize(("limit", "who"), [("max_session_branches", "a session"), ("max_parked_branches", "all")])
def test_branches_that_calls_may_add_count_while_they_run(tiny: Tiny, limit: str, who: str) -> None:
    llm = tiny(**{limit: 5})
    session = llm.session([5, 6, 7])
    other, params = session.fork(), SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    with pytest.raises(SessionLimit, match=f"^{limit} is 4 branches, and 2 more: {who}"):
        session.generate_all([session, other], params, keep="all")
    stream = session.stream(params, keep="all")
    next(stream)
    with pytest.raises(SessionLimit, match=f"^{limit} is 4 branches, and 2 more"):
        other.fork(2)
    [fork] = other.fork(1)
    [*_, last] = stream
    assert len(last.branches) == 2 and session.session_state().num_branches == 5
    for branch in (fork, *last.branches):
        branch.close()
    stream = session.stream(params, keep="all")
    del stream  # what is given up adds nothing
    assert other.generate(max_tokens=1, keep="all").branches[0].num_tokens == 4
    assert llm.engine.sessions._num_coming == session._owner.num_coming == 0


def test_of_several_calls_of_which_one_fails_the_others_are_told(tiny: Tiny) -> None:
    llm = tiny()
    session = llm.session([5, 6, 7])
    other, third = session.fork(2)

    def fails(tokens: list[int]) -> list[int]:
        raise ValueError("no")

    good = SamplingParams(max_tokens=4, ignore_eos=True)
    with pytest.raises(RequestsFailed, match=r"^outputs\[1\], request .*: its constraint .*'no'") as caught:
        session.generate_all([session, other, third], [good, good.clone(allowed_tokens_fn=fails), good], keep="all")
    first, failed, last = caught.value.outputs
    assert isinstance(failed.error, RequestError) and failed.outputs == [] and other.num_tokens == 3
    for output in (first, last):
        assert [branch.num_tokens for branch in output.branches] == [7] and output.error is None
    with pytest.raises(RequestError, match="its constraint") as alone:
        other.generate(good.clone(allowed_tokens_fn=fails))
    assert not isinstance(alone.value, RequestsFailed)
    with pytest.raises(RequestsFailed, match=r"^outputs\[0\], request .*: its constraint") as only:
        session.generate_all([other], good.clone(allowed_tokens_fn=fails))
    assert [output.error for output in only.value.outputs] == only.value.errors
    assert [output.error for output in session.generate_all([session, other], good)] == [None, None]


def test_of_several_scores_of_which_one_fails_the_others_are_told(tiny: Tiny) -> None:
    llm = tiny(max_num_batched_tokens=16)
    session = llm.session([5] * 40)
    other, third = session.fork(2)
    lists = [[[5, 6], [7]], [[8] * 9], [[9]]]
    wanted = [session.score(lists[0]), third.score(lists[2])]
    ending = [lambda: llm.engine.sessions.close(llm.engine, other._branch)]
    llm.loop.after_step.append(lambda: ending.pop()() if ending else None)
    with pytest.raises(RequestsFailed, match=r"^outputs\[1\], request .*: branch 0.0, from which it ") as caught:
        session.score_all([session, other, third], lists)
    first, failed, last = caught.value.outputs
    assert [first, last] == wanted and [failed] == caught.value.errors and isinstance(failed, RequestError)
    assert not isinstance(failed, RequestsFailed) and session.num_tokens == 40


@pytest.mark.parametrize("kind", ["session", "parked"])
def test_what_one_call_can_never_have_is_told_from_what_others_hold(tiny: Tiny, kind: str) -> None:
    """Of a session with a branch of 3 tokens: 7 branches of 8 and 20 tokens of 24 may come when others have gone."""
    llm = tiny(**{f"max_{kind}_branches": 8, f"max_{kind}_tokens": 24})
    session = llm.session([5, 6, 7])
    forks = session.fork(6)
    session.append([5] * 2)
    cases: list[tuple[Callable[[], Any], type[SessionLimit]]] = [
        (lambda: session.fork(8), SessionTooSmall),
        (lambda: session.fork(7), SessionLimit),
        (lambda: session.append([5] * 24), SessionTooSmall),
        (lambda: session.append([5] * 23), SessionLimit),
        (lambda: session.generate(max_tokens=6, n=4), SessionTooSmall),
        (lambda: session.generate(max_tokens=5, n=4), SessionLimit),
        (lambda: session.generate(max_tokens=1, n=8, keep="all"), SessionTooSmall),
        (lambda: llm.session([5] * 25), SessionTooSmall),
    ]
    for act, error in cases:
        with pytest.raises(SessionLimit) as caught:
            act()
        assert type(caught.value) is error and caught.value.code == error.code
    for fork in forks:
        fork.close()
    assert len(session.fork(7)) == 7


def test_a_score_for_which_a_session_is_written_anew_is_read_where_it_stands(tiny: Tiny) -> None:
    """What is known to be dead makes room for it, and the branch stands elsewhere then."""
    session = tiny(max_session_tokens=96).session([5, 6, 7])
    session.append(list(range(10, 60)))
    session.rollback(50)
    session.append(list(range(60, 100)))
    size, rows = len(session._branch.place[0]), [[4, 5, 6, 7, 8], [4, 9]]
    scores = session.score(rows)
    assert size == 93 and len(session._branch.place[0]) < size
    assert scores == tiny().session(session.token_ids).score(rows)
