"""Calls on sessions are requests like others: listed, aborted and measured, under the names that clients gave them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from pagedec.engine.engine import Engine
from pagedec.serve import leases as leases_module
from pagedec.serve.access import Client
from pagedec.serve.leases import Lease, Leases
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import session_service_pb2 as pb
from tests.serve.serving import Serving, parameters
from tests.serve.test_metrics import of, scraped
from tests.serve.test_session_service import ADA, BOB, KEYS, PROMPT, Held, ids, refused
from tests.support import wait_for

Serve = Callable[..., Serving]
Watched = tuple[Serving, admin_service_pb2_grpc.AdminServiceStub]
GENERATE, SCORE = "pagedec.v1.SessionService/GenerateOnBranch", "pagedec.v1.SessionService/Score"
ROWS = [pb.Continuation(token_ids=ids(5, 9)), pb.Continuation(token_ids=ids(5, 11, 12))]


@pytest.fixture
def watched(serve: Serve) -> Iterator[Watched]:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384}, metrics_port=0, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        yield serving, admin_service_pb2_grpc.AdminServiceStub(channel)


def test_they_are_measured(watched: Watched) -> None:
    serving, _ = watched
    held = Held(serving)
    own = parameters(12, temperature=1.0)
    own.stopping.ignore_eos = True
    held.generate(own)
    held.generate(own, final_only=True, keep=pb.Keep(none=True))
    held.call("Score", pb.ScoreRequest, continuations=ROWS)
    values = scraped(serving)
    assert of(values, "requests_finished_total", finished_reason="length") == 2
    assert of(values, "requests_finished_total", finished_reason="stop") == 1, "what is scored ends by itself"
    assert of(values, "requests_finished_total", finished_reason="cancelled") == 0
    assert of(values, "generation_tokens_total") == 24
    assert of(values, "e2e_request_latency_seconds_count") == 3
    assert of(values, "time_to_first_token_seconds_count") == 2
    assert of(values, "request_prompt_tokens_sum") == len(PROMPT) + 2 * (len(PROMPT) + 12)
    assert of(values, "calls_total", method=GENERATE, code="OK") == 2
    assert of(values, "calls_total", method=SCORE, code="OK") == 1
    assert of(values, "sessions") == of(values, "parked_branches") == 1
    held.call("Fork", pb.ForkRequest, count=3)
    held.call("Rollback", pb.RollbackRequest, num_tokens=5)
    values = scraped(serving)
    assert of(values, "parked_branches") == 4 and of(values, "kv_blocks_shared") >= 3
    assert of(values, "forks_total", kind="session") >= 3
    assert of(values, "rollback_tokens_total", by="session") == 5
    held.close()
    values = scraped(serving)
    assert of(values, "sessions") == of(values, "parked_branches") == of(values, "leaked_blocks") == 0


def test_they_are_aborted_by_the_names_that_clients_gave(watched: Watched) -> None:
    serving, admin = watched
    held = Held(serving)
    own = parameters(None, temperature=0.0)
    own.stopping.ignore_eos = True
    call = held.call("GenerateOnBranch", pb.GenerateOnBranchRequest, parameters=own, client_request_id="mine")
    assert next(call).request_id == "mine" and dict(call.initial_metadata())["x-request-id"] == "mine"
    stats = admin.GetStats(ab.GetStatsRequest())
    assert (stats.num_running, stats.num_sessions) == (1, 1)
    assert list(serving.server.gateway.running) == ["ipv4:127.0.0.1/mine"]
    assert refused(lambda: held.call("Score", pb.ScoreRequest, continuations=ROWS, client_request_id="mine")) == (
        "ALREADY_EXISTS", "REQUEST_EXISTS",
    )  # fmt: skip
    assert admin.Abort(ab.AbortRequest(request_ids=["mine"])).num_aborted == 1
    assert [answer.finish.reason for answer in list(call)[-1].finished] == [3]
    assert held.tokens() == PROMPT
    assert of(scraped(serving), "requests_finished_total", finished_reason="abort") == 1
    held.close()


def test_a_score_is_aborted_like_any_request(watched: Watched) -> None:
    serving, admin = watched
    held = Held(serving)
    admin.Pause(ab.PauseRequest())
    request = pb.ScoreRequest(session_id=held.id, branch="0", continuations=ROWS, client_request_id="mine")
    call = held.stub.Score.future(request)
    while not admin.GetStats(ab.GetStatsRequest()).num_waiting:
        pass
    assert admin.Abort(ab.AbortRequest(request_ids=["mine"])).num_aborted == 1
    assert refused(call.result) == ("FAILED_PRECONDITION", "REQUEST_FAILED")
    assert dict(call.initial_metadata())["x-request-id"] == "mine"
    admin.Resume(ab.ResumeRequest())
    held.close()


def test_a_session_has_its_client_s_salt_and_its_priority(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS, encoding="utf-8")
    serving = serve(api_keys=str(tmp_path / "keys.toml"))
    own, cached = parameters(2, temperature=0.0), []
    for metadata, salt, priority in ((ADA, "", 7), (BOB, "", 0), (ADA, "", 0), (ADA, "x", 0), (ADA, "x", 0)):
        held = Held(serving, metadata=metadata, cache_salt=salt, priority=priority)
        [owner] = serving.llm.engine.sessions.owners
        assert owner.priority == priority
        *_, last = held.generate(own)
        cached.append(last.usage.cached_tokens > 0)
        held.close()
    assert cached == [False, False, True, False, True]


def test_sessions_that_nobody_uses_cost_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are gone through where some were closed, and only then: thousands would take from everybody's calls."""
    serving, looks = serve(), list[int]()
    held, brief = Held(serving), Held(serving, ttl=Duration(seconds=3600))
    leases, sessions = serving.server.leases, serving.llm.engine.sessions
    drop, tidy = leases._drop_closed, sessions.tidy

    def noted() -> None:
        looks.append(len(leases))
        drop()

    num_tidied = [0]

    def counted(engine: Engine) -> None:
        num_tidied[0] += 1
        tidy(engine)

    monkeypatch.setattr(leases_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(leases, "_drop_closed", noted)
    monkeypatch.setattr(sessions, "tidy", counted)
    wait_for(lambda: num_tidied[0] > 5)
    assert not looks
    [owner] = [owner for owner in sessions.owners if owner.ttl == 3600]

    def pass_over(engine: Engine) -> None:
        owner.last_used, sessions._next_expiry = owner.last_used - 4000, 0.0

    serving.llm.loop.call(pass_over).result(60)
    wait_for(lambda: len(leases) == 1)
    assert looks == [2] and refused(lambda: brief.tokens()) is not None
    held.close()


def test_a_session_that_ends_before_its_client_was_told_of_it_is_let_go(serve: Serve) -> None:
    serving = serve()
    leases, sessions = serving.server.leases, serving.llm.engine.sessions
    held = Held(serving)
    [lease] = leases._leases.values()
    serving.llm.loop.call(lambda engine: sessions.close(engine, lease.session._branch)).result(60)
    wait_for(lambda: not leases)
    assert not leases._branches
    serving.loop.run(reopened(leases, lease))
    wait_for(lambda: not leases)
    assert not leases._branches and refused(lambda: held.tokens()) is not None


async def reopened(leases: Leases, lease: Lease) -> None:
    """As where the engine has closed it before the call that opens it goes on."""
    leases.open(lease.session, Client(name=lease.client), lease.ttl)
