"""A session's stream that is closed gives its branch back, whatever was read of it."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.engine.recovery import Recovery
from pagedec.llm.branches import Handle
from tests.engine.crowd import Tiny
from tests.engine.test_session_programs import assert_nothing_left

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that branches have begun, so that none ends because nobody holds it."""
    made: list[Any] = []
    generating = Handle._generating

    def kept(self: Handle, *given: Any, **named: Any) -> Any:
        made.append(generating(self, *given, **named))
        return made[-1]

    monkeypatch.setattr(Handle, "_generating", kept)
    return made


@pytest.mark.parametrize("num_read", [0, 1, 6])
def test_a_stream_that_is_closed(tiny: Tiny, begun: list[Any], num_read: int) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=7) as session:
        stream = session.stream(PARAMS)
        for _ in range(num_read):
            last = next(stream)
            assert last.finished == (num_read == 6 and len(last.outputs[0].token_ids) == 6)
        stream.close()
        stream.close()
        assert session.num_tokens == (9 if num_read == 6 else 3)
        assert list(stream) == []
        session.rollback(session.num_tokens - 3)
        assert session.generate(PARAMS).finished and session.num_tokens == 9
    del stream
    begun.clear()
    assert_nothing_left(llm)


def test_an_error_that_is_thrown_into_a_stream_ends_it(tiny: Tiny, begun: list[Any]) -> None:
    session = tiny().session(PROMPT)
    for num_read in (0, 1):
        stream = session.stream(PARAMS)
        for _ in range(num_read):
            next(stream)
        with pytest.raises(ZeroDivisionError, match="mine"):
            stream.throw(ZeroDivisionError("mine"))
        assert session.fork().num_tokens == 3


@pytest.mark.parametrize("is_dropped", [False, True])
def test_an_interrupt_in_the_step_that_ends_a_call(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    """Whoever steps next is not told of that call as of one that does not exist, and its branch is free."""
    llm, passed, num_left = tiny(), Recovery.passed, 6

    def interrupted(self: Recovery, *given: Any) -> None:
        nonlocal num_left
        passed(self, *given)
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recovery, "passed", interrupted)
    session = llm.session(PROMPT, seed=7)
    with pytest.raises(KeyboardInterrupt):
        list(session.stream(PARAMS))
    if is_dropped:
        del session
    assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].finished
    if not is_dropped:
        assert session.num_tokens == 3 and session.generate(PARAMS).finished
        session.close()
    assert_nothing_left(llm)
