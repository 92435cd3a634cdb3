"""GenerateBatch streams of more than may run: order, what others find meanwhile, what operators see and end, and that
nothing is left of them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import grpc
import pytest

from pagedec import AsyncLLM
from pagedec.serve import generation_service
from pagedec.serve.access import Client
from pagedec.serve.side_by_side import side_by_side
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import admin_service_pb2_grpc
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import parameters_pb2 as pp
from tests.in_step import slow_down
from tests.serve.serving import WAIT, Loop, Serving, greedy, prompt, reason
from tests.serve.test_metrics import of, scraped
from tests.support import wait_for

Serve = Callable[..., Serving]
PROMPT = [5, 9, 33, 21]
LARGE = {"num_blocks": 1024, "max_model_len": 16384}
ME = Client(name="ipv4:127.0.0.1")
ABORTED = 3


def long(max_tokens: int = 16) -> pp.Parameters:
    own = greedy(max_tokens)
    own.stopping.ignore_eos = True
    return own


class Batch:
    """A stream whose answers are read in a thread, in the order in which they come."""

    def __init__(self, serving: Serving, items: list[pp.Parameters], name: str = "") -> None:
        self.answers: list[pb.GenerateBatchResponse] = []
        self._items, self._name = items, name
        self.call = serving.generation.GenerateBatch(self._sent(), timeout=2 * WAIT)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _sent(self) -> Iterator[pb.GenerateBatchRequest]:
        for i, own in enumerate(self._items):
            name = f"{self._name}{i}" if self._name else ""
            request = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=own, client_request_id=name)
            yield pb.GenerateBatchRequest(item_id=f"{i}", request=request)

    def _read(self) -> None:
        with suppress(grpc.RpcError):  # it was cancelled
            for answer in self.call:
                self.answers.append(answer)

    def read(self) -> list[pb.GenerateBatchResponse]:
        self._reading.join(2 * WAIT)
        assert not self._reading.is_alive()
        return self.answers


def nothing_left(serving: Serving) -> None:
    serving.whole()
    gateway = serving.server.gateway
    own = gateway.admission
    assert not gateway._waiting and not own._wakes and not own._requests and not own._tokens


def waits(serving: Serving, count: int) -> None:
    wait_for(lambda: of(scraped(serving), "num_batch_requests_waiting") == count, WAIT)


def taken(serving: Serving, client: Client) -> ExitStack:
    """A place that somebody has."""
    held = ExitStack()

    async def take() -> None:
        held.enter_context(serving.server.gateway.admission.seat(client, 1, None))

    async def give_up() -> None:
        held.close()

    serving.loop.run(take())
    made = ExitStack()
    made.callback(lambda: serving.loop.run(give_up()))
    return made


def test_more_than_are_read_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered in their order, and others find a place whenever they ask."""
    monkeypatch.setattr(generation_service, "side_by_side", functools.partial(side_by_side, most=8))
    serving = serve(max_requests=4)
    slow_down(serving.llm)
    batch, num_others = Batch(serving, [long(4)] * 80), 0
    wait_for(lambda: bool(batch.answers))
    while len(batch.answers) < 80 - 8:  # so many are read yet
        serving.generation.Generate(pb.GenerateRequest(prompt=prompt(PROMPT), parameters=long(2)))
        num_others += 1
    answers = batch.read()
    places = {answer.item_id: place for place, answer in enumerate(answers)}
    assert all(answer.HasField("response") for answer in answers) and len(places) == 80 and num_others > 5
    assert max(abs(int(item) - place) for item, place in places.items()) <= 4
    nothing_left(serving)


def test_a_large_one_is_not_passed_by_small_ones(serve: Serve) -> None:
    serving = serve(max_client_tokens=100)
    slow_down(serving.llm)
    answers = Batch(serving, [*[long(20)] * 4, long(90), *[long(20)] * 30]).read()
    assert [answer.item_id for answer in answers].index("4") <= 5
    nothing_left(serving)


def test_many_that_wait_ask_seldom(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = serve(max_client_requests=1, metrics_port=0)
    admission, asked = serving.server.gateway.admission, list[None]()
    with taken(serving, ME):
        seat = admission.seat

        def counted(*given: object) -> object:
            asked.append(None)
            return seat(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(admission, "seat", counted)
        batches = [Batch(serving, [long(2)] * 50) for _ in range(4)]
        waits(serving, 200)
        before, began = len(asked), time.monotonic()
        time.sleep(1)
        assert len(asked) - before <= 4 * 11 * (time.monotonic() - began)
    for batch in batches:
        assert [answer.item_id for answer in batch.read()] == [f"{i}" for i in range(50)]
    nothing_left(serving)


def test_operators_see_and_end_what_waits(serve: Serve) -> None:
    serving = serve(engine=LARGE, max_client_requests=1, metrics_port=0, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        assert of(scraped(serving), "num_batch_requests_waiting") == 0
        batch = Batch(serving, [long(16000)] * 6, "mine-")
        waits(serving, 5)
        told = admin.GetStats(ab.GetStatsRequest())
        assert (told.num_running + told.num_waiting, told.num_batch_requests_waiting) == (1, 5)
        named = pb.GenerateRequest(prompt=prompt(PROMPT), parameters=long(2), client_request_id="mine-3")
        with pytest.raises(grpc.RpcError) as caught:
            serving.generation.Generate(named)
        assert reason(caught.value) == "REQUEST_EXISTS"
        assert admin.Abort(ab.AbortRequest(request_ids=["mine-3"])).num_aborted == 1
        waits(serving, 4)
        wait_for(lambda: not serving.server.gateway.named(["mine-3"]))
        assert admin.Abort(ab.AbortRequest(all=True)).num_aborted == 5
        answers = {answer.item_id: answer.response for answer in batch.read()}
    assert sorted(answers) == [f"{i}" for i in range(6)]
    for item, response in answers.items():
        [answer] = response.answers
        assert answer.finish.reason == ABORTED and response.request_id == f"mine-{item}"
        assert bool(answer.token_ids) <= (item == "0") and list(response.prompt.token_ids) == PROMPT
        assert response.prompt.block_size == serving.llm.kv_cache.block_size
    values = scraped(serving)
    assert of(values, "num_batch_requests_waiting") == 0
    assert of(values, "requests_finished_total", finished_reason="abort") == 6
    assert serving.llm.engine.stats.num_finished == 0
    nothing_left(serving)


def test_a_client_that_is_gone(serve: Serve) -> None:
    serving = serve(engine=LARGE, max_requests=4, metrics_port=0)
    batches = [Batch(serving, [long(16000)] * 30)]
    waits(serving, 27)
    batches.append(Batch(serving, [long(16000)] * 30))
    wait_for(lambda: len(serving.server.gateway.running) == 60)
    waits(serving, 56)  # the last place is for a stream that has none
    for batch in batches:
        batch.call.cancel()
        assert not batch.read()
    nothing_left(serving)
    assert of(scraped(serving), "num_batch_requests_waiting") == 0


def test_a_drain_refuses_what_waits(serve: Serve) -> None:
    serving = serve(engine=LARGE, max_requests=3, metrics_port=0, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        batch = Batch(serving, [long(16000)] * 20)
        waits(serving, 18)
        impatient = ab.DrainRequest()
        impatient.timeout.FromSeconds(2)
        assert admin.Drain(impatient).num_aborted == 2
        answers = {answer.item_id: answer for answer in batch.read()}
        assert [answers[f"{i}"].response.answers[0].finish.reason for i in range(2)] == [ABORTED] * 2
        for i in range(2, 20):
            error = answers[f"{i}"].error
            assert error.code == grpc.StatusCode.UNAVAILABLE.value[0] and "no more requests" in error.message
        nothing_left(serving)
        admin.Resume(ab.ResumeRequest())
    assert len(Batch(serving, [long(2)] * 9).read()) == 9


def test_a_drain_without_time_counts_what_was_let_in_alone(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """What has waited was refused, and may be asked of another server."""
    serving = serve(engine=LARGE, max_requests=3, metrics_port=0)
    batch = Batch(serving, [long(16000)] * 20)
    waits(serving, 18)
    assert serving.loop.run(serving.server.drain(0.0, 0.0)) == 2
    answers = {answer.item_id: answer for answer in batch.read()}
    assert [answers[f"{i}"].response.answers[0].finish.reason for i in range(2)] == [ABORTED] * 2
    assert all(answers[f"{i}"].error.code == grpc.StatusCode.UNAVAILABLE.value[0] for i in range(2, 20))
    assert "draining: 2 requests left after 0 s, aborted" in caplog.messages
    assert of(scraped(serving), "requests_finished_total", finished_reason="abort") == 2
    nothing_left(serving)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_has_failed(server_loop: Loop, tiny_path: object) -> None:
    engine = {"dtype": "float32", "skip_tokenizer_init": True, **LARGE}
    serving = Serving(server_loop, lambda: AsyncLLM(str(tiny_path), **engine), max_requests=3, metrics_port=0).ready()
    batch = Batch(serving, [long(16000)] * 20)
    waits(serving, 18)

    def broken() -> None:
        raise RuntimeError("our own mistake")

    serving.llm.loop.after_step.append(broken)
    answers = batch.read()
    assert len(answers) == 20 and all(answer.HasField("error") for answer in answers)
    assert sum("the engine has failed" in answer.error.message for answer in answers) == 20, "what ran, too"
    gateway = serving.server.gateway
    assert not gateway.running and not gateway._waiting and not gateway.admission.num_inside
    serving.close()


def test_each_has_one_name_in_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """However long it has waited."""
    caplog.set_level("INFO", "pagedec.calls")
    serving = serve(max_client_requests=1, metrics_port=0)
    with taken(serving, ME):
        batch = Batch(serving, [long(2)] * 5)
        waits(serving, 5)
        time.sleep(0.5)
    batch.read()
    wait_for(lambda: any("GenerateBatch" in record.getMessage() for record in caplog.records))
    [line] = [record for record in caplog.records if "GenerateBatch" in record.getMessage()]
    assert line.fields["request_ids"] == [f"request-{i}" for i in range(5)]  # type: ignore[attr-defined]
