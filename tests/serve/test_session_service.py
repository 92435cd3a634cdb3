"""SessionService: branches of a session are in the hands of the client that opened it, and of nobody else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import LLM
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import prompt_pb2
from pagedec.v1 import session_service_pb2 as pb
from tests.serve.serving import Serving, details, greedy, parameters, prompt, reason

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
KEYS = """
[ada]
tokens = ["ada-0123456789abcdef"]
max_branches = 4
[bob]
tokens = ["bob-0123456789abcdef"]
max_session_tokens = 100
"""
ADA = (("authorization", "Bearer ada-0123456789abcdef"),)
BOB = (("authorization", "Bearer bob-0123456789abcdef"),)


def ids(*tokens: int) -> prompt_pb2.TokenIds:
    return prompt_pb2.TokenIds(ids=tokens)


class Held:
    """One session over its stub."""

    def __init__(self, serving: Serving, seed: int = 7, **given: Any) -> None:
        self.stub, self.metadata = serving.sessions, given.pop("metadata", ())
        request = pb.OpenSessionRequest(prompt=prompt(PROMPT), seed=seed, **given)
        self.opened = self.stub.OpenSession(request, metadata=self.metadata)
        self.id = self.opened.session_id

    def call(self, rpc: str, kind: Any, branch: str = "0", **given: Any) -> Any:
        named = {} if kind in (pb.GetTreeRequest, pb.CloseSessionRequest) else {"branch": branch}
        return getattr(self.stub, rpc)(kind(session_id=self.id, **named, **given), metadata=self.metadata)

    def generate(self, own: pp.Parameters, branch: str = "0", **given: Any) -> list[pb.GenerateOnBranchResponse]:
        return list(self.call("GenerateOnBranch", pb.GenerateOnBranchRequest, branch, parameters=own, **given))

    def tokens(self, branch: str = "0") -> list[int]:
        return list(self.call("GetBranch", pb.GetBranchRequest, branch).token_ids)

    def close(self, *branches: str) -> int:
        return int(self.call("CloseSession", pb.CloseSessionRequest, branches=branches).num_branches)


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, reason(caught.value)


def test_every_call_is_as_offline(serve: Serve, llm: LLM) -> None:
    held = Held(serve())
    with llm.session(PROMPT, seed=7) as session:
        own = parameters(12, temperature=0.9)
        [*_, last] = held.generate(own)
        session.generate(temperature=0.9, max_tokens=12)
        assert held.tokens() == session.token_ids and last.branch.num_tokens == session.num_tokens
        fork = session.fork()
        [made] = held.call("Fork", pb.ForkRequest).branches
        assert made.name == fork.name == "0.0" and made.num_shared_blocks == made.num_blocks == fork.blocks().num_blocks
        held.call("Rollback", pb.RollbackRequest, num_tokens=3)
        session.rollback(3)
        held.call("Append", pb.AppendRequest, token_ids=ids(9, 8, 7))
        session.append([9, 8, 7])
        held.generate(own)
        session.generate(temperature=0.9, max_tokens=12)
        assert held.tokens() == session.token_ids and held.tokens("0.0") == fork.token_ids
        rows = [[5, 9], [5, 11, 12], []]
        given = [pb.Continuation(token_ids=ids(*row)) for row in rows]
        mine = held.call("Score", pb.ScoreRequest, continuations=given, logprobs=2).scores
        wanted = session.score(rows, logprobs=2)
        assert [score.logprob for score in mine] == [score.logprob for score in wanted]
        assert [[c.token_id for c in r.candidates] for r in mine[1].logprobs] == [
            sorted(table, key=lambda token: table[token].rank or 0) for table in wanted[1].logprobs
        ]
        [*_, last] = held.generate(parameters(8, temperature=0.9, n=3), keep=pb.Keep(all=True), branch="0.0")
        output = fork.generate(temperature=0.9, max_tokens=8, n=3, keep="all")
        assert [b.name for b in last.branches] == [b.name for b in output.branches] == ["0.0.0", "0.0.1", "0.0.2"]
        assert [held.tokens(b.name) for b in last.branches] == [b.token_ids for b in output.branches]
        tree = held.call("GetTree", pb.GetTreeRequest, columns=80)
        assert tree.drawing == session.tree().draw(80)
        assert (tree.num_blocks, [b.num_blocks for b in tree.branches]) == (
            session.blocks([session, fork, *output.branches]).num_blocks,
            [b.num_blocks for b in session.blocks([session, fork, *output.branches]).branches],
        )
        assert tree.num_blocks_saved > 0 and tree.nodes[0].token_ids == PROMPT[: len(tree.nodes[0].token_ids)]
    assert held.close("0.0.1", "0.0") == 3 and held.close() == 0


def test_a_full_branch_is_refused_by_its_field(serve: Serve) -> None:
    held = Held(serve())
    held.call("Append", pb.AppendRequest, token_ids=ids(*[5] * held.opened.branch.room))
    with pytest.raises(grpc.RpcError) as caught:
        held.generate(parameters(2))
    [violation] = details(caught.value)["BadRequest"].field_violations
    assert violation.field == "branch" and violation.description.startswith("branch is 256 tokens: must be at most")


def test_marks_and_what_is_kept(serve: Serve, llm: LLM) -> None:
    held = Held(serve())
    mark = held.call("GetBranch", pb.GetBranchRequest).mark
    beams = pp.Parameters(beam_search=pp.BeamSearch(beam_width=3), stopping=pp.Stopping(max_tokens=6))
    [*_, whole] = held.generate(beams, keep=pb.Keep(answer=2), final_only=True)
    assert held.tokens() == [*PROMPT, *whole.finished[2].token_ids] and len(whole.finished) == 3
    held.call("Rollback", pb.RollbackRequest, mark=mark)
    assert held.tokens() == PROMPT
    held.generate(beams, keep=pb.Keep(none=True))
    assert held.tokens() == PROMPT
    wrong = pb.Mark(num_tokens=30, digest=mark.digest)
    assert refused(lambda: held.call("Rollback", pb.RollbackRequest, mark=wrong)) == (
        "INVALID_ARGUMENT", "INVALID_FIELD",
    )  # fmt: skip
    code = refused(lambda: held.generate(beams, keep=pb.Keep(answer=3)))
    assert code == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_another_s_session_is_none(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve(api_keys=str(tmp_path / "keys.toml"))
    held = Held(serving, metadata=ADA)
    other = Held(serving, metadata=BOB)
    assert held.id != other.id and len(held.id) >= 32
    own = held.id
    held.metadata = BOB
    for rpc, kind in (
        ("GetBranch", pb.GetBranchRequest), ("Append", pb.AppendRequest), ("Fork", pb.ForkRequest),
        ("Rollback", pb.RollbackRequest), ("Score", pb.ScoreRequest), ("GetTree", pb.GetTreeRequest),
        ("CloseSession", pb.CloseSessionRequest),
    ):  # fmt: skip
        assert refused(lambda rpc=rpc, kind=kind: held.call(rpc, kind)) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert refused(lambda: held.generate(greedy(2))) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    listed = serving.sessions.ListSessions(pb.ListSessionsRequest(), metadata=ADA).sessions
    assert [session.session_id for session in listed] == [own]
    held.metadata = ADA
    assert held.tokens() == PROMPT
    assert held.close() == 0 and other.close() == 0


def test_what_a_cancelled_close_has_closed_is_found(serve: Serve) -> None:
    """The client's quota counts it no more, and the tree is drawn without it."""
    serving = serve()
    held = Held(serving)
    [made] = held.call("Fork", pb.ForkRequest, count=1).branches
    [lease] = serving.server.leases._leases.values()
    serving.loop.run(lease.session.close_all([lease.branches[made.name]]))  # and the call is gone before it says so
    end = time.monotonic() + 10
    while made.name in lease.branches and time.monotonic() < end:
        time.sleep(0.05)
    assert list(lease.branches) == ["0"]
    held.close()


def test_a_lease_ends_though_nothing_runs(serve: Serve) -> None:
    serving = serve()
    held, kept = Held(serving, ttl={"nanos": 500_000_000}), Held(serving)
    assert held.opened.ttl.nanos == 500_000_000 and kept.opened.ttl.seconds == 600
    held.call("Fork", pb.ForkRequest, count=3)
    for _ in range(4):  # each use renews it
        time.sleep(0.2)
        held.tokens()
    deadline = time.monotonic() + 10
    while len(serving.server.leases) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert refused(held.tokens) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert kept.tokens() == PROMPT and len(serving.llm.engine.scheduler.parking) == 1
    kept.close()
    assert refused(lambda: Held(serving, ttl={"seconds": 0})) == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_a_call_that_is_left_leaves_its_branch_as_it_was(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    held = Held(serving)
    own = parameters(None, temperature=0.0)
    own.stopping.ignore_eos = True
    call = held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own)
    next(call)
    assert held.tokens() == PROMPT
    assert refused(lambda: held.call("Fork", pb.ForkRequest)) == ("FAILED_PRECONDITION", "BRANCH_BUSY")
    assert refused(lambda: held.generate(greedy(2))) == ("FAILED_PRECONDITION", "BRANCH_BUSY")
    call.cancel()
    serving.whole()
    assert held.tokens() == PROMPT
    call = held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own, client_request_id="mine")
    assert next(call).request_id == "mine"
    [name] = serving.server.gateway.running
    serving.loop.run(serving.llm.abort(name))
    [*_, last] = call
    assert last.finished[0].finish.reason == 3 and last.branch.num_tokens == len(PROMPT) and held.tokens() == PROMPT
    call = held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own)
    next(call)
    held.close()
    assert refused(lambda: list(call))[0] in ("FAILED_PRECONDITION", "NOT_FOUND")


def test_sessions_are_listed_in_pages(serve: Serve) -> None:
    serving = serve()
    held = [Held(serving) for _ in range(5)]
    held[1].call("Fork", pb.ForkRequest, count=2)
    found: list[pb.Session] = []
    token = ""
    while not found or token:
        page = serving.sessions.ListSessions(pb.ListSessionsRequest(page_size=2, page_token=token))
        assert len(page.sessions) <= 2
        found += page.sessions
        token = page.next_page_token
    assert [session.session_id for session in found] == [one.id for one in held]
    assert [session.num_branches for session in found] == [1, 3, 1, 1, 1]
    assert all(590 < s.expire_time.seconds - s.open_time.seconds < 610 for s in found)
    for wrong in ("x", "-1", "9" * 5000):
        asked = pb.ListSessionsRequest(page_token=wrong)
        assert refused(lambda asked=asked: serving.sessions.ListSessions(asked)) == (
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        )
    for one in held:
        one.close()


def test_neighbours_are_not_starved(serve: Serve, tmp_path: Path) -> None:
    """Who fills the pool with sessions, and the queue with calls, takes nothing from others."""
    (tmp_path / "keys.toml").write_text(
        '[ada]\ntokens = ["ada-0123456789abcdef"]\nmax_requests = 3\nmax_branches = 200\n'
        '[bob]\ntokens = ["bob-0123456789abcdef"]\n',
        encoding="utf-8",
    )
    serving = serve(api_keys=str(tmp_path / "keys.toml"), max_requests=4)
    greedy_one = [Held(serving, seed=i, metadata=ADA) for i in range(20)]  # their blocks are more than there are
    own = parameters(60, temperature=1.0)
    own.stopping.ignore_eos = True
    for held in greedy_one:
        held.generate(own)
    endless = parameters(150, temperature=1.0)
    endless.stopping.ignore_eos = True
    calls = [
        held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=endless, stream_interval=100)
        for held in greedy_one[:3]
    ]
    for call in calls:
        next(call)
    full = refused(lambda: greedy_one[3].generate(own))
    assert full == ("RESOURCE_EXHAUSTED", "CLIENT_REQUESTS")
    other = Held(serving, metadata=BOB)
    [*_, last] = other.generate(own)
    assert len(other.tokens()) == len(PROMPT) + 60 == last.branch.num_tokens
    for call in calls:
        assert list(call)[-1].branch.num_tokens == len(PROMPT) + 210
    assert [len(held.tokens()) for held in greedy_one] == [len(PROMPT) + 210] * 3 + [len(PROMPT) + 60] * 17
    for held in [*greedy_one, other]:
        held.close()


def test_one_branch_has_one_call(serve: Serve) -> None:
    """Of many calls at once on a branch each is carried out or refused, none in part."""
    serving = serve()
    held = Held(serving)
    waiting: list[Callable[[], Any]] = []
    for i in range(12):
        append = pb.AppendRequest(session_id=held.id, branch="0", token_ids=ids(20 + i, 40 + i))
        waiting.append(held.stub.Append.future(append).result)
        own = pb.GenerateOnBranchRequest(session_id=held.id, branch="0", parameters=greedy(3), final_only=True)
        waiting.append(functools.partial(next, held.stub.GenerateOnBranch(own)))
    done = []
    for wait in waiting:
        try:
            done.append(wait())
        except grpc.RpcError as error:
            assert (error.code(), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "BRANCH_BUSY")
    tokens = held.tokens()
    appended = sum(isinstance(one, pb.AppendResponse) for one in done)
    generated = sum(len(one.finished[0].token_ids) for one in done if isinstance(one, pb.GenerateOnBranchResponse))
    assert len(tokens) == len(PROMPT) + 2 * appended + generated and done
    held.close()


def test_shared_blocks_are_those_that_others_hold(llm: LLM) -> None:
    """By forks, and by the prefix cache; counted from the tables themselves."""
    with llm.session(PROMPT, seed=1) as one:
        one.generate(max_tokens=20, ignore_eos=True)
        forks = one.fork(3)
        for count, fork in enumerate(forks):
            fork.rollback(3 * count)
            fork.generate(max_tokens=4 + 9 * count, ignore_eos=True)
        with llm.session(PROMPT, seed=2) as other:
            other.generate(max_tokens=3, ignore_eos=True)
            branches = [one, *forks, other]
            held = [branch._branch.tables["target"].blocks() for branch in branches]
            told = one.blocks(branches)
            for own, blocks in zip(held, told.branches, strict=True):
                others = {block for row in held if row is not own for block in row}
                assert (blocks.num_blocks, blocks.num_shared_blocks) == (len(own), len(others.intersection(own)))
            assert told.num_blocks == len({block for row in held for block in row})
            assert told.num_blocks_saved > 0 < told.branches[-1].num_shared_blocks < told.branches[-1].num_blocks
