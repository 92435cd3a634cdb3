"""`pagedec.client` has the names of `LLM` and of its sessions, and says of mistakes what they say."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, BeamSearchParams, BranchClosed, PagedecError, RequestOutputKind, SamplingParams
from pagedec.client import AsyncClient, AsyncRemoteBranch, Client, RemoteBranch
from pagedec.llm import AsyncSessionBranch, SessionBranch
from tests.serve.serving import Serving, client_of, plain

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
HERE = {"conversation", "get_tokenizer", "kv_cache", "prepare", "prepare_chat", "prepare_grammar", "prepare_one"}
"""What is of a model in this process."""
LORAS = {"add_lora", "remove_lora", "list_loras", "pin_lora"}
OPERATORS = {"reset_prefix_cache", "abort", "check_health", "shutdown"} | LORAS
"""What AdminService and the health service do."""
SERVERS = {"resumable"}
"""What a client does by itself where its server is gone."""
TOLD = {"is_chat"}
"""What a server's traces say of a branch."""
COUNTED = {"appending", "scoring"}
"""What a server counts before it happens."""
AWAITED = {"text", "token_ids", "logprobs"}
"""Properties that ask the server: for coroutines `state` brings them."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and hasattr(kind, name)}


def test_names() -> None:
    assert public(LLM) - public(Client) == HERE | {"reset_prefix_cache"} | LORAS
    assert public(AsyncLLM) - public(AsyncClient) == HERE | OPERATORS | SERVERS
    assert public(SessionBranch) - public(RemoteBranch) == TOLD
    assert public(AsyncSessionBranch) - public(AsyncRemoteBranch) == AWAITED | TOLD | COUNTED


@pytest.mark.parametrize("name", sorted(public(AsyncRemoteBranch) & public(AsyncSessionBranch)))
def test_branches_take_what_they_take_offline(name: str) -> None:
    """All of it; a server's calls may take more."""
    own, far = (getattr(kind, name) for kind in (AsyncSessionBranch, AsyncRemoteBranch))
    if callable(own):
        given = [inspect.signature(one).parameters for one in (own, far)]
        near, remote = ({own.name: (own.kind, own.default) for own in one.values()} for one in given)
        assert near.items() <= remote.items()


def test_what_sessions_hold(serve: Serve, llm: LLM) -> None:
    """Also where the pool is smaller than the context."""
    small = {"num_blocks": 8}
    with (
        LLM(llm.config.model.model, dtype="float32", skip_tokenizer_init=True, max_model_len=256, **small) as tight,
        client_of(serve(small)) as client,
        tight.session(PROMPT, seed=1, ttl=60.0) as own,
        client.session(PROMPT, seed=1, ttl=60.0) as far,
    ):
        assert far.room == own.room == 7 * 16 - 40
        far.generate(max_tokens=8), own.generate(max_tokens=8)
        mine, theirs = own.fork(2), far.fork(2)
        own.append([5]), far.append([5])
        assert far.room == own.room == 7 * 16 - 49
        assert (
            far.blocks() == own.blocks() and far.blocks(theirs) == own.blocks(mine) and far.blocks([]).num_blocks == 0
        )
        assert far.blocks(theirs).num_blocks_saved > 0
        state = far.session_state()
        assert (state.num_branches, state.num_tokens) == (3, 49) and state.seconds_left == 60.0
        assert str(far.tree(theirs)) == str(own.tree(mine)) and "0.1" in str(far.tree(theirs))
        [told] = client.sessions()
        assert (told.session_id, told.num_branches) == (far.session_id, 3)
        assert repr(far) == "<RemoteSession 0: 49 tokens>"
        with pytest.raises(TypeError, match="cannot be copied or pickled: fork it$"):
            copy.copy(far)
        theirs[0].close(), mine[0].close()
        assert repr(theirs[0]) == "<RemoteBranch 0.0: was closed>"
        for closed in (theirs[0], mine[0]):
            with pytest.raises(BranchClosed, match="^branch 0.0 was closed$"):
                closed.generate(max_tokens=2)
        assert client.get_default_sampling_params() == SamplingParams()
        left = client.session(PROMPT)
    left.close()
    assert left.closed
    with pytest.raises(PagedecError, match="^Client is closed: must be open: its connection was given up$"):
        client.generate(PROMPT)


def test_fewer_beams_than_were_asked_for(serve: Serve, llm: LLM) -> None:
    """Streamed until then is what all of them would have begun with."""
    params = BeamSearchParams(beam_width=4, max_tokens=5, allowed_token_ids=[5], ignore_eos=True)
    [want] = llm.generate([PROMPT], params, use_tqdm=False)
    assert len(want.outputs) == 1
    with client_of(serve()) as client, client.session(PROMPT) as far:
        for kind in RequestOutputKind:
            near, remote = (list(one.stream(PROMPT, params.clone(output_kind=kind))) for one in (llm, client))
            assert remote[-1].finished and len(remote[-1].outputs) == 1
            if kind == RequestOutputKind.DELTA:  # how much is in the last piece depends on when it is read
                for pieces in near, remote:
                    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == [5] * 5
            else:
                assert plain(remote[-1]) == plain(near[-1])
        *_, last = far.stream(params)
        assert last.outputs == want.outputs


def said(what: Callable[[Any], Any], asked: Any) -> tuple[str, str]:
    with pytest.raises(PagedecError) as caught:
        what(asked)
    return type(caught.value).__name__, str(caught.value).replace("same client", "same LLM").replace("Remote", "")


def filled(branch: Any) -> Any:
    """A fork whose context is full."""
    fork = branch.fork()
    fork.append([5] * fork.room)
    return fork


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "an answer's number": lambda s: s.generate(max_tokens=2, n=2, keep=-1),
    "a word": lambda s: s.generate(max_tokens=2, keep="x"),
    "rollback": lambda s: s.rollback("x"),
    "append": lambda s: s.append(5),
    "a message": lambda s: s.append({"role": "user", "content": "Hi"}),
    "continuations": lambda s: s.score([[5], 6]),
    "a continuation of many": lambda s: s.score_all([s, s.fork()], [[[5]], [[5], [9999]]]),
    "no list for each": lambda s: s.score_all([s], []),
    "no parameters for each": lambda s: s.generate_all([s], [None, None]),
    "of the second one's parameters": lambda s: s.generate_all(
        [s.fork(), s], [SamplingParams(max_tokens=2), SamplingParams(stop_token_ids=[999])]
    ),
    "parameters for all": lambda s: s.generate_all([s, s.fork()], [SamplingParams()] * 2, stop_token_ids=[999]),
    "parameters that go ill with one's own": lambda s: s.generate_all(
        [s], [SamplingParams(min_tokens=3)], max_tokens=2
    ),
    "no branches": lambda s: s.generate_all(5),
    "no branch": lambda s: s.generate_all([1]),
    "twice": lambda s: s.generate_all([s, s], max_tokens=2),
    "a full branch": lambda s: filled(s).generate(max_tokens=2),
    "a full branch's scores": lambda s: filled(s).score([[5]]),
    "a token": lambda s: s.generate(allowed_token_ids=[9999], max_tokens=2),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_branches(serve: Serve, llm: LLM, name: str) -> None:
    with client_of(serve()) as client, llm.session(PROMPT) as own, client.session(PROMPT) as far:
        assert said(MISTAKES[name], far) == said(MISTAKES[name], own)
        assert far.token_ids == PROMPT


USER = {"role": "user", "content": "Hi"}
FEW = SamplingParams(max_tokens=2)
WRONG: dict[str, Callable[[Any], Any]] = {
    "a regex": lambda x: x.generate("a", SamplingParams(structured_outputs={"regex": "("})),
    "a regex of many": lambda x: x.chat([[USER]] * 2, SamplingParams(structured_outputs={"regex": "("}), False),
    "a schema": lambda x: x.generate("a", SamplingParams(structured_outputs={"json": {"type": "nope"}})),
    "no draft model": lambda x: x.generate("a", SamplingParams(speculative={"method": "draft_model"})),
    "a priority": lambda x: x.stream("a", FEW, priority="x").close(),
    "no role": lambda x: x.chat([{"content": "Hi"}], FEW),
    "no messages": lambda x: x.chat([], FEW),
    "no messages of several": lambda x: x.chat([[USER], []], FEW, use_tqdm=False),
    "an image": lambda x: x.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], FEW),
    "variables": lambda x: x.chat([USER], FEW, chat_template_kwargs=3),
    "an answer that is given": lambda x: x.session(messages=[{"role": "assistant", "content": "Hi"}]),
    "a chat's next answer": lambda x: x.session(messages=[USER]).append({"role": "assistant", "content": "x"}),
    "no role of the next": lambda x: x.session(messages=[USER]).append({"content": "x"}),
}  # fmt: skip


def test_mistakes(text_server: Serving, text_llm: LLM) -> None:
    """The server repeats nothing; the client knows what it has sent."""
    with client_of(text_server) as client:
        for name, wrong in WRONG.items():
            assert said(wrong, client) == said(wrong, text_llm), name
        with pytest.raises(PagedecError, match=r"^priority is 1099511627776: must be from -2147483648 to 2147483647$"):
            client.generate("a", FEW, priority=[2**40])


def test_trees_show_texts(text_server: Serving, text_llm: LLM) -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    [want] = text_llm.generate("Once upon a time", beams, use_tqdm=False)
    with client_of(text_server) as client:
        [got] = client.generate("Once upon a time", beams)
        assert plain(got) == plain(want) and got.tree().svg() == want.tree().svg()
        *_, last = client.stream("Once upon a time", beams)
        both = client.generate(["Once upon a time", "Two"], beams, use_tqdm=False)
        with client.session("Once upon a time") as session:
            kept = session.generate(beams, keep="none")
        assert str(last.tree()) == str(both[0].tree()) == str(kept.tree()) == str(want.tree())
        assert '" work"' in str(got.tree())

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{text_server.server.port}") as far:
            *_, last = [output async for output in far.generate("Once upon a time", beams)]
            assert str(last.tree()) == str(want.tree())
            async with far.session("Once upon a time") as session:
                assert str((await session.generate(beams, keep="none")).tree()) == str(want.tree())

    text_server.loop.run(run())


def test_coroutines_do_several_at_once(serve: Serve, llm: LLM) -> None:
    serving = serve()

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}") as client, client.session(PROMPT, seed=7) as far:
            with llm.session(PROMPT, seed=7) as own:
                theirs, mine = await far.fork(2), own.fork(2)
                outputs = await far.generate_all(theirs, max_tokens=5)
                assert [plain(o).outputs for o in outputs] == [
                    plain(o).outputs for o in own.generate_all(mine, max_tokens=5)
                ]
                lists = [[[5, 6]], [[7], [8]]]
                assert await far.score_all(theirs, lists) == own.score_all(mine, lists)
                assert await far.blocks(theirs) == own.blocks(mine) and far.room == own.room
                assert str(await far.tree(theirs)) == str(own.tree(mine))
                assert (await far.session_state()).num_branches == 3
                serving.llm.loop.pause()  # so that none of them can end before it is given up
                calls = asyncio.gather(far.generate_all([*theirs, far], ignore_eos=True, max_tokens=150))
                while len(serving.server.gateway.running) < 3:
                    await asyncio.sleep(0.005)
                calls.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await calls
                serving.llm.loop.pause(False)
                with pytest.raises(PagedecError, match="must be in the list once"):
                    await far.generate_all([far, far])
            assert [s.session_id for s in await client.sessions()] == [far.session_id]
            assert await client.get_default_sampling_params() == SamplingParams()

    serving.loop.run(run())
