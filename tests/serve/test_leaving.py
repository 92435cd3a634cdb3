"""Whoever leaves a call, in whatever mode and wherever its request stands, leaves no block behind: what is asked of the
engine before its next step finds it whole."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tests.algorithms.reconsider  # noqa: F401  it registers a decoder
from pagedec.serve import session_service
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import parameters_pb2 as pp
from pagedec.v1 import session_service_pb2 as sb
from tests.in_step import slow_down
from tests.serve.serving import Serving, greedy, parameters, prompt
from tests.serve.test_session_service import Held
from tests.support import wait_for

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
LARGE = {"num_blocks": 1024, "max_model_len": 16384}
NUM_TOKENS = 2000


def table(method: str, **given: object) -> pp.Parameters:
    own = greedy(NUM_TOKENS)
    own.speculation.table.update({"method": method, "adaptive": False, **given})
    return own


def modes() -> dict[str, pp.Parameters]:
    beams = pp.Parameters(beam_search=pp.BeamSearch(beam_width=4), stopping=pp.Stopping(max_tokens=NUM_TOKENS))
    drawn = pp.Parameters(
        beam_search=pp.BeamSearch(beam_width=4, do_sample=True), stopping=pp.Stopping(max_tokens=NUM_TOKENS)
    )
    few = greedy(NUM_TOKENS)
    few.logits_rules.allowed_token_ids.extend(range(9, 40))
    custom = pp.Parameters(custom=pp.CustomDecoder(name="reconsider"), stopping=pp.Stopping(max_tokens=NUM_TOKENS))
    custom.custom.parameters.update({"n": 2, "retries": 1})
    made = {
        "greedy": greedy(NUM_TOKENS), "sampled": parameters(NUM_TOKENS, n=3, temperature=1.0), "beams": beams,
        "drawn beams": drawn, "n-grams": table("ngram"), "suffixes": table("suffix"), "lookahead": table("lookahead"),
        "jacobi": table("jacobi"), "few tokens": few, "custom": custom,
    }  # fmt: skip
    for own in made.values():
        own.stopping.ignore_eos = True
    return made


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def left(serving: Serving, num_running: int = 0) -> None:
    """It has left: nothing but `num_running` requests is there before another step."""
    until(lambda: len(serving.server.gateway.running) <= num_running)
    held = serving.llm.loop.call(lambda engine: (len(engine.unfinished), len(engine.scheduler.requests))).result(10)
    assert held == (num_running, num_running)


def stream(own: pp.Parameters, tokens: list[int]) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(prompt=prompt(tokens), parameters=own)


def test_while_it_answers(serve: Serve) -> None:
    serving = serve(engine=LARGE)
    stats = serving.llm.engine.stats
    for name, own in modes().items():
        before = stats.num_steps
        call = serving.generation.GenerateStream(stream(own, PROMPT))
        until(lambda before=before: stats.num_steps > before + 5)
        call.cancel()
        left(serving)
        assert stats.num_finished == 0, name


def test_while_its_prompt_is_read(serve: Serve) -> None:
    serving = serve(engine={**LARGE, "max_num_batched_tokens": 64})
    slow_down(serving.llm)
    stats, num_prompt_steps = serving.llm.engine.stats, 3000 // 64
    for i, name in enumerate(("greedy", "sampled", "beams", "n-grams")):
        before = stats.num_steps
        call = serving.generation.GenerateStream(stream(modes()[name], [5 + i + j * 7 % 120 for j in range(3000)]))
        until(lambda before=before: stats.num_steps > before)
        call.cancel()
        left(serving)
        assert stats.num_steps < before + num_prompt_steps, "it was left in the middle"


def test_while_it_waits(serve: Serve) -> None:
    serving = serve(engine={**LARGE, "max_num_seqs": 1})
    first = serving.generation.GenerateStream(stream(greedy(15_000), PROMPT))
    next(first)
    waiting = [serving.generation.GenerateStream(stream(own, PROMPT)) for own in modes().values()]
    until(lambda: len(serving.server.gateway.running) == 1 + len(waiting))
    for call in waiting:
        call.cancel()
    left(serving, 1)
    first.cancel()
    left(serving)


KEPT = {"parameters": parameters(2, n=4), "keep": {"all": True}}


@pytest.mark.parametrize(
    ("rpc", "kind", "given"),
    [
        ("GenerateOnBranch", sb.GenerateOnBranchRequest, KEPT),
        ("Fork", sb.ForkRequest, {"count": 3}),
        ("OpenSession", sb.OpenSessionRequest, {"prompt": prompt(PROMPT)}),
    ],
)
def test_branches_of_which_no_client_could_be_told_are_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, rpc: str, kind: Any, given: dict[str, Any]
) -> None:
    """The call was cancelled when all was done, before its last message was sent."""
    serving, telling, stand = serve(), threading.Event(), session_service._stand

    async def waits(branch: Any, branches: Any) -> Any:
        telling.set()
        await asyncio.sleep(60)

    held = Held(serving)
    named = {} if rpc == "OpenSession" else {"session_id": held.id, "branch": "0"}
    monkeypatch.setattr(session_service, "_stand", waits)
    method = getattr(serving.sessions, rpc)
    call = getattr(method, "future", method)(kind(**named, **given))
    assert telling.wait(60)
    call.cancel()
    monkeypatch.setattr(session_service, "_stand", stand)
    wait_for(lambda: serving.llm.engine.sessions.num_branches == 1)
    [lease] = serving.server.leases._leases.values()
    assert list(lease.branches) == ["0"] and held.tokens() == PROMPT
    held.close()
    assert not serving.server.leases._branches
