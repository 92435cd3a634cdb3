"""Sessions: branches in a client's own hands."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.errors import BranchBusy, BranchClosed, InvalidArgument, RequestError
from tests.engine.crowd import Tiny
from tests.engine.test_session_programs import assert_nothing_left

DRAWN = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
PROMPT = list(range(3, 40))


def plain(llm: LLM, tokens: list[int], params: Any = DRAWN, **changes: Any) -> list[list[int]]:
    [output] = llm.generate([tokens], params.clone(**changes), use_tqdm=False)
    return [answer.token_ids for answer in output.outputs]


def test_a_session_without_forks_is_one_request(tiny: Tiny) -> None:
    llm = tiny()
    [whole] = plain(llm, PROMPT, seed=7, max_tokens=30)
    with llm.session(PROMPT, seed=7) as session:
        for _ in range(3):
            session.generate(DRAWN)
        assert session.token_ids == PROMPT + whole
    assert_nothing_left(llm)


def test_a_calls_prompt_is_reported_whole(tiny: Tiny) -> None:
    """All of its tokens but the last are cached, and are read again for that."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    llm = tiny()
    with llm.session([5, 9, 33, 70]) as session:
        session.generate(SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        ids = session.token_ids
        found = session.generate(params)
    [want] = llm.generate([ids], params, use_tqdm=False)
    assert len(want.prompt_logprobs) == len(ids) and found.prompt_logprobs == want.prompt_logprobs


def test_forks_draw_in_their_own_names(tiny: Tiny) -> None:
    """The same program twice, the second time in a crowd and in a small pool."""

    def program(llm: LLM) -> list[list[int]]:
        with llm.session(PROMPT, seed=7) as session:
            one, two = session.fork(2)
            session.generate_all([session, one, two], DRAWN)
            kept = one.generate(DRAWN, n=2, keep="all").branches
            two.rollback(10)
            two.generate(DRAWN)
            session.generate_all([two, *kept], DRAWN)
            assert [kept[0].name, kept[1].name, session.fork().name] == ["0.0.0", "0.0.1", "0.2"]
            return [branch.token_ids for branch in (session, one, two, *kept)]

    first = program(tiny())
    llm = tiny(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=24)
    streams = [llm.stream({"prompt_token_ids": [5, number]}, DRAWN.clone(max_tokens=80)) for number in range(3)]
    for stream in streams:
        next(stream)
    assert program(llm) == first
    assert len({tuple(tokens) for tokens in first}) == 5
    for stream in streams:
        stream.close()
    assert_nothing_left(llm)


def test_what_is_taken_back_is_drawn_anew(tiny: Tiny) -> None:
    with tiny().session(PROMPT, seed=3) as session:
        texts = []
        for _ in range(3):
            mark = session.mark()
            texts.append(session.generate(DRAWN).outputs[0].token_ids)
            session.rollback(mark)
        texts += [session.generate(DRAWN, keep="none").outputs[0].token_ids for _ in range(2)]
        assert len({tuple(text) for text in texts}) == 5 and session.token_ids == PROMPT


def test_which_answers_are_kept(tiny: Tiny) -> None:
    with tiny().session(PROMPT, seed=3) as session:
        one, two, three = session.fork(3)
        first = one.generate(DRAWN, n=3)
        assert one.token_ids == PROMPT + first.outputs[0].token_ids and not first.branches
        second = two.generate(DRAWN, n=3, keep=2)
        assert two.token_ids == PROMPT + second.outputs[2].token_ids
        beams = three.generate(BeamSearchParams(beam_width=3, max_tokens=5), keep="all")
        assert three.token_ids == PROMPT
        assert [branch.token_ids for branch in beams.branches] == [PROMPT + own.token_ids for own in beams.outputs]
        with pytest.raises(InvalidArgument, match="keep is 3: must be one of first, all, none, or an answer's number"):
            two.generate(DRAWN, n=3, keep=3)


def test_a_fork_costs_no_forward_and_no_copy(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        session.generate(DRAWN)
        stats, pool = llm.engine.stats, llm.engine.scheduler.pools["target"]
        before = stats.num_steps, pool.num_copied, pool.num_available
        session.fork(50)
        assert (stats.num_steps, pool.num_copied, pool.num_available) == before
        rows = stats.num_rows
        session.generate(DRAWN)
        assert stats.num_rows == rows + 10  # nothing is computed twice


def test_logprobs_are_kept_with_the_branch(tiny: Tiny) -> None:
    with tiny().session(PROMPT, seed=3) as session:
        output = session.generate(DRAWN, logprobs=1)
        fork = session.fork()
        fork.append([5])
        fork.generate(DRAWN)
        assert fork.logprobs == [None] * len(PROMPT) + (output.outputs[0].logprobs or []) + [None] * 11


def test_appended_tokens_end_nothing(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        session.append([2, 2, 2])  # the model's end token
        assert (
            len(session.generate(DRAWN, ignore_eos=False, stop_token_ids=[2], min_tokens=3).outputs[0].token_ids) >= 3
        )


def test_two_calls_on_one_branch(tiny: Tiny) -> None:
    with tiny().session(PROMPT, seed=3) as session:
        fork = session.fork()
        stream = fork.stream(DRAWN)
        next(stream)
        for what, act in {
            "another call": lambda: fork.generate(DRAWN), "fork": fork.fork, "append": lambda: fork.append([1]),
            "rollback": lambda: fork.rollback(1),
        }.items():  # fmt: skip
            message = f"branch 0.0 has a call that still runs: {what} must wait until it has ended"
            with pytest.raises(BranchBusy, match=re.escape(message)):
                act()
        with pytest.raises(BranchBusy):  # all or none
            session.generate_all([session, fork], DRAWN)
        assert session.token_ids == PROMPT and session.generate(DRAWN).finished
        stream.close()
        assert fork.token_ids == PROMPT
        fork.generate(DRAWN)


def test_closing(tiny: Tiny) -> None:
    llm = tiny()
    session = llm.session(PROMPT, seed=3)
    fork = session.fork()
    stream = fork.stream(DRAWN)
    next(stream)
    fork.close()
    with pytest.raises(RequestError, match="branch 0.0, from which it went out, was closed"):
        list(stream)
    with pytest.raises(BranchClosed, match="branch 0.0 was closed"):
        fork.generate(DRAWN)
    other = session.fork()
    del session
    gc.collect()
    assert other.generate(DRAWN).finished  # the others live on
    unread = other.stream(DRAWN, n=2, keep="all")
    del unread, other
    gc.collect()
    llm.generate([PROMPT], DRAWN, use_tqdm=False)
    assert_nothing_left(llm)


def test_parked_branches_give_way_and_come_back(tiny: Tiny) -> None:
    llm = tiny(num_blocks=14)
    sessions = [llm.session([number] * 50, seed=number, priority=number) for number in range(3)]
    for session in sessions:
        session.generate(DRAWN)
    held = [session._branch.tables["target"].num_blocks for session in sessions]
    assert held[1] and held[2] and sum(held) < 14  # the last one came when the one before had been used later
    texts = [plain(llm, session.token_ids, seed=number) for number, session in enumerate(sessions)]
    for session, [text] in zip(sessions, texts, strict=True):
        assert session.generate(DRAWN).outputs[0].token_ids == text
        llm.engine.scheduler.check()
    assert llm.engine.stats.num_failed == 0
    for session in sessions:
        session.close()
    assert_nothing_left(llm)


def test_low_priority_gives_way_first(tiny: Tiny) -> None:
    llm = tiny(num_blocks=12)
    low = llm.session([4] * 40, priority=5)
    high = llm.session([5] * 40, priority=1)
    for session in (high, low):  # low was used last
        session.generate(DRAWN, max_tokens=1)
    plain(llm, [6] * 120)
    assert not low._branch.tables["target"].num_blocks and high._branch.tables["target"].num_blocks


def test_what_a_branch_refuses(tiny: Tiny) -> None:
    llm = tiny()
    session = llm.session(PROMPT, seed=3)
    mark = session.mark()
    session.append([5])
    later = session.mark()
    session.rollback(mark)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.session(), "prompt is None: must be given, or messages, and not both"),
        (lambda: llm.session([]), "prompt is empty: must have at least one token"),
        (lambda: llm.session(PROMPT, ttl=0), "ttl is 0: must be"),
        (lambda: session.fork(0), "k is 0: must be a whole number from 1"),
        (lambda: session.rollback(37), "rollback is 37: must be from 0 to 36: branch 0 has 37 tokens"),
        (lambda: session.rollback(-1), "rollback is -1"),
        (lambda: session.rollback(later), "rollback is a mark at 38 tokens: must be one of what branch 0 holds"),
        (lambda: session.append([9999]), "append is 9999: token ids must be from 0 to"),
        (lambda: session.append("text"), "append is 'text': must be token ids: the engine runs with skip_tokenizer"),
        (lambda: session.append({"role": "user", "content": "Hi"}), "must be text or tokens: the session did not"),
        (lambda: session.append([5] * 100000), "append is 100000 tokens: must be at most 219"),
        (lambda: session.generate_all([llm.session(PROMPT), tiny().session(PROMPT)]), "branches[1] is <Session 0: 37"),
        (lambda: session.score("yes"), "continuations is 'yes': must be a list of texts, or of lists of token ids"),
        (lambda: session.score([[1], [-1]]), "continuations[1] is -1: token ids must be"),
        (lambda: session.generate(7), "sampling_params is 7: must be a SamplingParams"),
        (lambda: session.generate(DRAWN, truncate_prompt_tokens=4), "truncate_prompt_tokens is 4: must be None"),
    ]
    for act, message in cases:
        with pytest.raises((InvalidArgument, TypeError), match=re.escape(message)):
            act()
    assert session.token_ids == PROMPT


def test_sessions_that_nobody_uses_end(tiny: Tiny) -> None:
    llm = tiny()
    now = [0.0]
    llm.engine.clock = lambda: now[0]
    idle, used = llm.session(PROMPT, ttl=10), llm.session(PROMPT, ttl=10)
    forever = llm.session(PROMPT)
    now[0] = 6
    used.append([5])
    now[0] = 11
    assert forever.generate(DRAWN).finished and used.generate(DRAWN).finished
    with pytest.raises(BranchClosed, match="branch 0 was given up: its session was not used for 10 seconds"):
        idle.append([1])
    assert (idle.closed, used.closed, forever.closed) == (True, False, False)


def test_a_device_that_fails_costs_a_pause(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        [whole] = plain(llm, PROMPT, seed=3, max_tokens=20)
        session.generate(DRAWN)
        execute, fails = llm.engine.executor.execute, iter([True, False])

        def failing(*arguments: Any) -> Any:
            if next(fails, False):
                raise RuntimeError("the device is away")
            return execute(*arguments)

        monkeypatch.setattr(llm.engine.executor, "execute", failing)
        session.generate(DRAWN)
        assert session.token_ids == PROMPT + whole
    assert_nothing_left(llm)


def test_a_time_that_is_over(tiny: Tiny) -> None:
    llm = tiny()
    with llm.session(PROMPT, seed=3) as session:
        output = session.generate(DRAWN, max_tokens=400, max_time=1e-9)
        assert output.outputs[0].limited_by == "max_time"
        assert session.token_ids == PROMPT + output.outputs[0].token_ids
        session.generate(DRAWN)
    assert_nothing_left(llm)


def test_text_chat_and_tree(text_llm: LLM) -> None:
    with text_llm.session("Once upon a time", seed=3) as session:
        session.append(", there")
        assert session.text == "Once upon a time, there"
        assert session.token_ids == text_llm.get_tokenizer().encode("Once upon a time, there")
        greedy = session.generate(temperature=0, max_tokens=4)
        assert session.text == "Once upon a time, there" + greedy.text
        one, two = session.fork(2)
        one.append(" and")
        two.append(" but")
        drawn = str(session.tree())
        assert (
            drawn.startswith("3 branches behind 4 tokens; 1 fork; ") and '" and"' in drawn and "unfinished" not in drawn
        )
        assert repr(session.tree()) == f"<AnswerTree: {drawn.splitlines()[0]}>"
        [line] = [line for line in drawn.splitlines() if '" but"' in line]
        assert line.endswith("  branch 0.1, 7 tokens")
        for page in (session.tree().svg(), session.tree().html()):
            assert "branch 0.1, 7 tokens" in page
        assert "<td>0.1</td>" in session.tree().html()
        del one
        gc.collect()
        assert session.tree().names == ("0", "0.1")
        yes, no = session.score([" was a", " were an"])
        assert yes.text == " was a" and yes.logprob > no.logprob
    with text_llm.session(messages=[{"role": "user", "content": "Say hello."}]) as chat:
        mark = chat.mark()
        chat.generate(temperature=0, max_tokens=8)
        chat.append({"role": "user", "content": "Again."})
        tokenizer = text_llm.get_tokenizer()
        assert tokenizer.decode(chat.token_ids, skip_special_tokens=False).count("<|im_start|>user") == 2
        fork = chat.fork()
        fork.append(" Well")
        fork.generate(temperature=0, max_tokens=3)
        fork.append({"role": "user", "content": "Thanks."})
        assert fork.text.count("user\n") == 3
        chat.rollback(mark)
        chat.append("Hi")
        chat.append({"role": "user", "content": "Bye."})
        assert "assistant\nHi" in chat.text and "Again" not in chat.text


@pytest.mark.parametrize("num_blocks", [40, 7])
def test_a_draft_model_s_cache_is_parked_too(tiny: Tiny, tiny_path: Path, num_blocks: int) -> None:
    drafted = {"model": str(tiny_path), "num_speculative_tokens": 3, "num_blocks": num_blocks}
    llm, other = tiny(speculative_config=drafted), tiny()
    texts = []
    for own in (llm, other):
        with own.session(PROMPT, seed=3) as session:
            one, two = session.fork(2)
            session.generate_all([session, one], DRAWN)
            one.rollback(7)
            two.append([5, 6, 7])
            session.generate_all([session, one, two], DRAWN, n=2)
            kept = two.generate(DRAWN, n=2, keep="all").branches
            session.generate_all([one, *kept], DRAWN)
            texts.append([branch.token_ids for branch in (session, one, two, *kept)])
            if own is llm and num_blocks == 40:
                assert session._branch.tables["draft"].length > len(PROMPT)
    assert texts[0] == texts[1]
    assert llm.engine.stats.drafts["draft_model"].num_accepted > 0
    assert_nothing_left(llm)
