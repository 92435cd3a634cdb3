"""Sessions of `pagedec.client` do what sessions of `LLM` do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from pagedec import (
    LLM,
    BeamSearchParams,
    BranchBusy,
    BranchClosed,
    InvalidArgument,
    RequestError,
    SamplingParams,
    SessionLimit,
    SessionTooSmall,
)
from pagedec.client import AsyncClient
from tests.serve.serving import Serving, client_of, close_sessions, plain

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]


def test_sessions_are_as_offline(text_server: Serving, text_llm: LLM) -> None:
    """Each call, one after the other, on both."""
    params = SamplingParams(temperature=0.9, max_tokens=8, logprobs=1)
    llm = text_llm
    with client_of(text_server) as client:
        with llm.session("Once upon a time", seed=7) as own, client.session("Once upon a time", seed=7) as far:
            for session in (own, far):
                assert session.name == "0" and session.text == "Once upon a time"
            assert plain(far.generate(params)) == plain(own.generate(params))
            assert [plain(output) for output in far.stream(params)][-1] == [plain(o) for o in own.stream(params)][-1]
            assert (far.text, far.token_ids, far.logprobs) == (own.text, own.token_ids, own.logprobs)
            assert far.mark() == own.mark() and far.num_tokens == own.num_tokens
            mark = far.mark()
            mine, theirs = far.fork(2), own.fork(2)
            for branch, other in zip(mine, theirs, strict=True):
                branch.append(" But then"), other.append(" But then")
                branch.rollback(1), other.rollback(1)
            pairs = (
                far.generate_all(mine, n=2, keep="all", max_tokens=6),
                own.generate_all(theirs, n=2, keep="all", max_tokens=6),
            )
            for output, want in zip(*pairs, strict=True):
                assert [b.name for b in output.branches] == [b.name for b in want.branches]
                assert [a.text for a in output.outputs] == [a.text for a in want.outputs]
                assert [b.token_ids for b in output.branches] == [b.token_ids for b in want.branches]
            lists = [[" The end.", [5, 9]], [" Suddenly"]]
            assert far.score_all(mine, lists, logprobs=2) == own.score_all(theirs, lists, logprobs=2)
            assert far.score([" a"]) == own.score([" a"])
            assert str(far.tree()) == str(own.tree()) and far.tree().svg() == own.tree().svg()
            far.generate(max_tokens=3), own.generate(max_tokens=3)
            far.rollback(mark), own.rollback(mark)
            beams = BeamSearchParams(beam_width=3, max_tokens=4)
            assert plain(far.generate(beams, keep=1)) == plain(own.generate(beams, keep=1))
            assert far.token_ids == own.token_ids and far.num_blocks >= far.num_shared_blocks > 0
            trie = SamplingParams(structured_outputs={"choice": [" red", " blue"]}, temperature=0)
            assert far.generate(trie, keep="none").text == own.generate(trie, keep="none").text
        chat = [{"role": "user", "content": "Hi."}]
        with llm.session(messages=chat, seed=1) as own, client.session(messages=chat, seed=1) as far:
            for session in (own, far):
                session.generate(max_tokens=6)
                session.append({"role": "user", "content": "And you?"})
                session.generate(max_tokens=6)
            assert far.text == own.text and far.token_ids == own.token_ids
        assert far.closed
        with pytest.raises(BranchClosed, match="^branch 0 was closed"):
            far.append("x")


def test_errors_are_as_offline(serve: Serve, llm: LLM) -> None:
    with client_of(serve(engine={"max_session_branches": 8})) as client:
        with llm.session(PROMPT) as own, client.session(PROMPT) as far:
            for wrong in (
                lambda s: s.generate(max_tokens=4, keep=3),
                lambda s: s.generate(max_tokens=4, truncate_prompt_tokens=3),
                lambda s: s.append([9999]),
                lambda s: s.rollback(40),
                lambda s: s.score([[5], [9999]]),
                lambda s: s.score([[5] * 300]),
                lambda s: s.generate(logit_bias={9999: 1.0}),
                lambda s: s.fork(0),
            ):
                errors = []
                for session in (own, far):
                    with pytest.raises(InvalidArgument) as caught:
                        wrong(session)
                    errors.append((type(caught.value), str(caught.value)))
                assert errors[0] == errors[1]
            with pytest.raises(SessionTooSmall, match="^max_session_branches is 1 branches, and 9 more"):
                far.fork(9)
            forks = far.fork(7)
            with pytest.raises(SessionLimit, match="^max_session_branches is 8 branches, and 1 more") as full:
                far.fork(1)
            assert type(full.value) is SessionLimit and not any(fork.closed for fork in forks)
        for params in (
            SamplingParams(allowed_token_ids=[999]),
            SamplingParams(n=4, max_tokens=300, logit_bias={999: 1}),
        ):
            messages = []
            for one in (llm, client):
                with pytest.raises(InvalidArgument) as told:
                    one.generate([PROMPT, PROMPT], params, use_tqdm=False)  # type: ignore[attr-defined]
                messages.append(str(told.value))
            assert messages[0] == messages[1]
        with pytest.raises(InvalidArgument, match="^prompts"):
            client.generate([PROMPT, [5] * 400], use_tqdm=False)


def test_what_a_client_s_sessions_can_never_hold_is_told_by_the_argument_s_name(serve: Serve) -> None:
    """A later try would end as this one does."""
    with client_of(serve(max_client_branches=4, max_client_session_tokens=100)) as client:
        session = client.session(PROMPT)
        for what, said in (
            (
                lambda: session.fork(4),
                "^k is 4: must be at most 3: a client's sessions may have 4 branches .*included$",
            ),
            (lambda: session.generate(n=4, keep="all", max_tokens=1), "^n is 4: must be at most 3: "),
            (lambda: session.generate(n=2, max_tokens=51), "^max_tokens is 102 tokens in all answers: must come "),
            (lambda: session.append([5] * 101), "^append is .*: must come to at most 100: a client's sessions may "),
            (lambda: client.session([5] * 101), "^prompt is .*: must come to at most 100: "),
        ):
            with pytest.raises(InvalidArgument, match=said) as never:
                what()
            assert not isinstance(never.value, SessionLimit)
        forks = session.fork(3)
        with pytest.raises(
            SessionLimit, match="^max_client_branches is 4: .* hold 4 branches, and 1 more is asked for$"
        ):
            session.fork()
        assert not any(fork.closed for fork in forks)


def test_what_is_appended_is_counted_in_tokens(text_server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many characters a text or a message has that fits a client's sessions."""
    close_sessions(text_server)
    config = text_server.server.leases._config
    monkeypatch.setattr(text_server.server.leases, "_config", replace(config, max_client_session_tokens=160))
    long = " a story of words," * 20  # five tokens each, and eighteen characters
    never = "^append is 250 tokens: must come to at most 160: a client's sessions may hold no more"
    with client_of(text_server) as client:
        with client.session("Tell me") as session:
            with pytest.raises(InvalidArgument, match=never):
                session.append(" a story of words," * 50)
            session.append(long)
            assert session.text == "Tell me" + long and len(long) > 160
            with pytest.raises(SessionLimit, match="^max_client_session_tokens is 160: .* and 100 more are asked for$"):
                session.append(long)
            assert session.text == "Tell me" + long
        with client.session(messages=[{"role": "user", "content": "Hello."}]) as chat:
            chat.generate(max_tokens=4, ignore_eos=True)
            chat.append({"role": "user", "content": long[:250]})
            with pytest.raises(InvalidArgument, match="^append is .* tokens: must come to at most 160: "):
                chat.append({"role": "user", "content": long * 2})


def test_one_call_at_a_time(serve: Serve) -> None:
    with client_of(serve(engine={"num_blocks": 1024, "max_model_len": 16384})) as client:
        session = client.session(PROMPT)
        outputs = session.stream(ignore_eos=True)
        next(outputs)
        with pytest.raises(BranchBusy, match="^branch 0 has a call that still runs: fork must wait"):
            session.fork()
        outputs.close()
        deadline = time.monotonic() + 10
        while True:  # the server hears of it soon
            try:
                fork = session.fork()
                break
            except BranchBusy:
                assert time.monotonic() < deadline
        assert fork.token_ids == PROMPT == session.token_ids
        failed: list[BaseException] = []

        def run() -> None:
            try:
                session.generate(ignore_eos=True)
            except RequestError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.1)
        fork.close()
        session.close()
        thread.join(10)
        assert not thread.is_alive() and len(failed) == 1


def test_dropped_branches_are_closed(serve: Serve) -> None:
    serving = serve()
    with client_of(serving) as client:
        session = client.session(PROMPT)
        session.fork(5)
        gc.collect()
        session.append([5])
        assert len(serving.llm.engine.scheduler.parking) == 1
        session.close()
        session.close()


def test_coroutines(serve: Serve, llm: LLM) -> None:
    serving = serve()
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=3)
    [want] = llm.generate([PROMPT], params, use_tqdm=False)

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}") as client:
            outputs = [output async for output in client.generate(PROMPT, params, "mine")]
            assert plain(outputs[-1]) == plain(want) and outputs[-1].request_id == "mine"
            final = [o async for o in client.beam_search(PROMPT, None, BeamSearchParams(max_tokens=4))]
            assert len(final) == 1 and len(final[0].outputs) == 4
            with llm.session(PROMPT, seed=7) as own:
                async with client.session(PROMPT, seed=7) as far:
                    forks = await far.fork(3)
                    mine = await asyncio.gather(*(fork.generate(max_tokens=6) for fork in forks))
                    theirs = [fork.generate(max_tokens=6) for fork in own.fork(3)]
                    assert [o.outputs[0].token_ids for o in mine] == [o.outputs[0].token_ids for o in theirs]
                    assert await far.score([[5, 6]]) == own.score([[5, 6]])
                    mark = await far.mark()
                    await far.append([5, 6])
                    await far.rollback(mark)
                    assert (await far.state()).token_ids == PROMPT
                    assert [o async for o in far.stream(max_tokens=5)][-1].finished
                    assert str(await far.tree()).startswith("4 branches")
                    task = asyncio.ensure_future(far.generate(max_tokens=200, ignore_eos=True))
                    while not serving.server.gateway.running:
                        await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    with pytest.raises(InvalidArgument, match="^append is 9999: token ids must be from 0 to 130$"):
                        await forks[1].append([9999])
            assert (await client.models())[0].vocab_size == 131

    serving.loop.run(run())


@pytest.mark.parametrize("what", ["generate", "stream", "score"])
def test_a_call_has_its_client_s_name(serve: Serve, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the server, in its outputs, and in what is wrong about it; those of coroutines, too."""
    serving, begun = serve(), list[str]()
    gateway = serving.server.gateway
    watcher = Mock(begun=lambda name, *_: begun.append(name))
    monkeypatch.setattr(gateway, "watchers", (watcher,))
    asked: tuple[object, ...] = ([[5, 6]],) if what == "score" else (SamplingParams(max_tokens=3),)
    with client_of(serving) as client, client.session(PROMPT) as far:
        told = getattr(far, what)(*asked, request_id="mine")
        if what != "score":
            assert {output.request_id for output in (told if what == "stream" else [told])} == {"mine"}
        with pytest.raises(InvalidArgument, match="^request_id is 201: must have at most 200 characters$"):
            list(getattr(far, what)(*asked, request_id="x" * 201))
        with pytest.raises(InvalidArgument, match="^request_id is 5: must be text$"):
            getattr(far, what)(*asked, request_id=5)

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}") as client, client.session(PROMPT) as far:
            called = getattr(far, what)(*asked, request_id="ours")
            told = [output async for output in called] if what == "stream" else [await called]
            assert what == "score" or {output.request_id for output in told} == {"ours"}

    serving.loop.run(run())
    assert begun == ["ipv4:127.0.0.1/mine", "ipv4:127.0.0.1/ours"]
