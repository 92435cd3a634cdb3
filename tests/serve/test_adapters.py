"""Requests that name adapters as their model: answers are `LLM.generate`'s, whoever is beside them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import runpy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from pagedec.cli import bench_serve
from pagedec.client import AsyncClient, ServedLora
from pagedec.errors import InvalidArgument, NotFound
from pagedec.serve.tracing import Tracer
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import generation_service_pb2 as pb
from pagedec.v1 import model_service_pb2, open_inference_service_pb2_grpc
from pagedec.v1 import open_inference_service_pb2 as ob
from pagedec.v1 import session_service_pb2 as sb
from tests.batch.tiny import make_tiny
from tests.engine.lora_models import PROMPTS, Adapted, prompts_of
from tests.serve.adapter_cases import (
    GREEDY,
    LORA,
    MIXED,
    NAMES,
    Admin,
    asked,
    byte_lora,
    lora_flags,
    refused,
    served,
    without_loras,
)
from tests.serve.serving import Loop, Serving, client_of, details, parameters, plain, prompt, reason, streamed
from tests.serve.test_load import ROOT, bench
from tests.serve.test_metrics import scraped
from tests.support import wait_for

Serve = Callable[..., Serving]
DRAWN = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=8, logprobs=2, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)


# ---- answers
@pytest.mark.parametrize("params", [GREEDY, DRAWN, BEAMS], ids=["greedy", "drawn", "beams"])
def test_mixtures_are_as_offline(adapters: Serving, adapted: Adapted, adapted_llm: LLM, params: Any) -> None:
    """In one stream, each at once, and each as it grows."""
    loras = [adapted.choices[i] for i, _ in MIXED]
    prompts = [PROMPTS[j] for _, j in MIXED]
    want = [without_loras(o) for o in adapted_llm.generate(prompts, params, use_tqdm=False, lora_request=loras)]
    names = [served(NAMES[i]) for i, _ in MIXED]
    with client_of(adapters) as client:
        batch = client.generate(prompts, params, use_tqdm=False, lora_request=names)
        assert [plain(output) for output in batch] == want

        def one(name: ServedLora | None, what: list[int]) -> Any:
            return client.generate(what, params, use_tqdm=False, lora_request=name)[0]

        def grown(name: ServedLora | None, what: list[int]) -> Any:
            return list(client.stream(what, params, lora_request=name))[-1]

        with ThreadPoolExecutor(len(MIXED)) as pool:
            assert [plain(output) for output in pool.map(one, names, prompts)] == want
            assert [plain(output) for output in pool.map(grown, names, prompts)] == want
    assert len({str(output.outputs[0].token_ids) for output in want}) > len(want) // 2, "adapters change answers"


def test_a_client_has_a_model_of_its_own(adapters: Serving, adapted: Adapted) -> None:
    """Where a call names none."""
    [lora, *_] = adapted.loras
    with client_of(adapters, model="a1") as client:
        [output] = client.generate(PROMPTS[1], GREEDY)
        assert output.outputs[0].token_ids == adapted.want(lora, PROMPTS[1])
        assert client.get_default_sampling_params() == SamplingParams()
        [other] = client.generate(PROMPTS[1], GREEDY, lora_request=ServedLora("a2"))
        assert other.outputs[0].token_ids == adapted.want(adapted.loras[1], PROMPTS[1])
        with client.session(PROMPTS[1]) as own:
            assert own.generate(GREEDY).outputs[0].token_ids == output.outputs[0].token_ids

    async def grown() -> list[int]:
        async with AsyncClient(f"127.0.0.1:{adapters.server.port}") as client:
            outputs = client.generate(PROMPTS[1], GREEDY, lora_request=ServedLora("a1"))
            return [output async for output in outputs][-1].outputs[0].token_ids

    assert asyncio.run(grown()) == output.outputs[0].token_ids


def test_names_that_are_not_served(adapters: Serving, serve: Serve) -> None:
    """Errors say which are; and none else of a batch fails."""

    def stream() -> list[Any]:
        return list(adapters.generation.GenerateStream(pb.GenerateStreamRequest(prompt=prompt([5]), model="b1")))

    for call in (
        lambda: adapters.generation.Generate(asked("b1", [5, 9])), stream,
        lambda: adapters.sessions.OpenSession(sb.OpenSessionRequest(prompt=prompt([5]), model="b1")),
        lambda: adapters.models.GetModel(model_service_pb2.GetModelRequest(name="b1")),
        lambda: adapters.models.Detokenize(model_service_pb2.DetokenizeRequest(token_ids=[5], model="b1")),
    ):  # fmt: skip
        error = refused(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND and reason(error) == "MODEL_NOT_FOUND"
        assert error.details() == "there is no such model; known are base, a1, a2, a3"
        assert details(error)["ErrorInfo"].metadata["known"] == "known are base, a1, a2, a3"
    names = [None, ServedLora("nobody's"), ServedLora("a3")]
    with client_of(adapters) as client:
        with pytest.raises(NotFound, match="^model \"?'?nobody's.* does not exist; known are base, a1, a2, a3$"):
            client.generate([PROMPTS[0]] * 3, GREEDY, use_tqdm=False, lora_request=names)
        with pytest.raises(InvalidArgument, match=r"^lora_request is a list of 2: must be one for each of 3 prompts$"):
            client.generate([PROMPTS[0]] * 3, GREEDY, use_tqdm=False, lora_request=names[:2])
        with pytest.raises(InvalidArgument, match=r"^lora_request\[1\] is 'a1': must be a ServedLora"):
            client.generate([PROMPTS[0]] * 2, GREEDY, use_tqdm=False, lora_request=[None, "a1"])  # type: ignore
    items = [pb.GenerateBatchRequest(item_id=name, request=asked(name, [5, 9])) for name in ("b1", "a1", "base")]
    told = {one.item_id: one for one in adapters.generation.GenerateBatch(iter(items))}
    assert told["b1"].error.message == "there is no such model; known are base, a1, a2, a3"
    assert told["a1"].response.answers and told["base"].response.answers
    without = serve()
    assert reason(refused(lambda: without.generation.Generate(asked("a1", [5, 9])))) == "MODEL_NOT_FOUND"


def test_what_is_served(adapters: Serving) -> None:
    with client_of(adapters) as client:
        models = client.models()
    assert [(model.name, model.parent) for model in models] == [
        ("base", ""), ("a1", "base"), ("a2", "base"), ("a3", "base"),
    ]  # fmt: skip
    assert all(model.max_model_len == 16384 for model in models)
    told = adapters.models.GetModel(model_service_pb2.GetModelRequest(name="a2")).model
    assert (told.name, told.parent) == ("a2", "base")
    assert adapters.models.GetModel(model_service_pb2.GetModelRequest()).model == models[0]


def test_prefixes_are_their_own(adapters: Serving) -> None:
    """What one adapter has computed no other one finds."""
    long = prompts_of((70,), seed=8)[0]
    cached = [adapters.generation.Generate(asked(name, long)).usage.cached_tokens for name in (*NAMES, "a1", "base")]
    assert cached[:4] == [0, 0, 0, 0] and cached[4] == cached[5] == 64


# ---- who is beside them
def test_neighbours_who_leave_change_nothing(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    """Some cancel, some have no time, some ask for what there is not; those who stay have their answers. What is
    endless goes through as many adapters as have places: another one would wait for its end."""
    own = parameters(16000, temperature=0.0)
    own.stopping.ignore_eos = True

    def endless(name: str, **more: Any) -> Any:
        request = pb.GenerateStreamRequest(prompt=prompt(PROMPTS[0]), parameters=own, model=name)
        return adapters.generation.GenerateStream(request, **more)

    calls = [endless(name) for name in NAMES[:3]]
    late = [endless(name, timeout=1.0) for name in NAMES]
    for call in calls:
        next(call)
    with ThreadPoolExecutor(len(MIXED)) as pool:
        answers = [pool.submit(adapters.generation.Generate, asked(NAMES[i], PROMPTS[j])) for i, j in MIXED]
        for call in calls[:2]:
            call.cancel()
        assert reason(refused(lambda: next(endless("b1")))) == "MODEL_NOT_FOUND"
        told = [list(answer.result(60).answers[0].token_ids) for answer in answers]
    assert told == [adapted.want(adapted.choices[i], PROMPTS[j]) for i, j in MIXED]
    for call in late:
        assert refused(lambda call=call: list(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[misc]
    wait_for(lambda: len(adapters.server.gateway.running) == 1)  # clients know of their deadlines before the server
    assert admin.Abort(ab.AbortRequest(all=True)).num_aborted == 1
    assert [answer.finish.reason for answer in list(calls[2])[-1].finished] == [3]


# ---- streams that go on
def test_a_stream_goes_on_with_its_adapter_alone(adapters: Serving, serve: Serve, adapted: Adapted) -> None:
    """Here or at another server that has it, whatever it is called there; not with another one of its name."""
    own, what = parameters(24, temperature=1.0), PROMPTS[2]
    own.seed, own.stopping.ignore_eos = 9, True
    request = pb.GenerateStreamRequest(prompt=prompt(what), parameters=own, model="a1")
    messages = list(adapters.generation.GenerateStream(request))
    whole = streamed(messages)
    [(_, tokens)] = whole
    first = messages[0].resume
    assert first.fingerprint.model.startswith(adapters.llm.engine.executor.geometry.model)
    assert first.fingerprint.model != adapters.llm.engine.executor.geometry.model
    request.resume.CopyFrom(first)
    request.resume.answers.add(token_ids=tokens[:7], num_characters=0)
    paths = [lora.lora_path for lora in adapted.loras]
    other = serve(engine={**LORA, "max_loras": 1}, lora=(f"a1={paths[1]}", f"mine={paths[0]}"))

    def rest(serving: Serving, name: str) -> list[int]:
        request.model = name
        return streamed(list(serving.generation.GenerateStream(request)))[0][1]

    assert rest(adapters, "a1") == tokens[7:] == rest(other, "mine")
    for serving, name in ((other, "a1"), (adapters, "a2"), (adapters, "base")):
        error = refused(lambda serving=serving, name=name: rest(serving, name))  # type: ignore[misc]
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "RESUME_MODEL"


# ---- sessions
def test_sessions_keep_theirs(adapters: Serving, adapted: Adapted, adapted_llm: LLM, admin: Admin) -> None:
    """Forks, scores and rollbacks too, and when it is unloaded; and they say what they have."""
    [lora, *_] = adapted.loras
    with client_of(adapters) as client, adapted_llm.session(PROMPTS[3], seed=3, lora_request=lora) as own:
        with client.session(PROMPTS[3], seed=3, lora_request=ServedLora("a1")) as far, client.session([5]) as none:
            assert [session.model for session in client.sessions()] == ["a1", "base"]
            admin.UnloadAdapter(ab.UnloadAdapterRequest(name="a1"))
            params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
            for one in (own, far):
                one.generate(params)
            mine, theirs = own.fork(), far.fork()
            for one in (mine, theirs):
                one.rollback(4)
                one.append([7, 8])
            assert theirs.generate(params).outputs[0].token_ids == mine.generate(params).outputs[0].token_ids
            assert theirs.token_ids == mine.token_ids and far.token_ids == own.token_ids
            scores = [[score.logprob for score in one.score([[5, 9], [7]])] for one in (theirs, mine)]
            assert scores[0] == scores[1]
            assert none.generate(GREEDY).outputs[0].token_ids == adapted.want(None, [5])
        with pytest.raises(NotFound):
            client.session(PROMPTS[3], lora_request=ServedLora("a1"))
    assert adapters.llm.loop.call(lambda engine: len(engine.adapters.files)).result(30) == 0, "nobody has it any more"


# ---- others who ask
def test_traces_and_metrics_say_which(serve: Serve, adapted: Adapted) -> None:
    """Of adapters that there are, and of none else."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace.export", reason="opentelemetry-sdk is not installed")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    serving = serve(engine=LORA, lora=lora_flags(adapted), served_model_name="base", metrics_port=0)
    spans = memory.InMemorySpanExporter()
    tracer = Tracer(sdk.SimpleSpanProcessor(spans))
    tracer.model = "base"
    serving.server.gateway.watchers += (tracer,)

    def told(name: str) -> float:
        return scraped(serving)["pagedec_model_requests_total", (("model_name", name),)]

    assert [told(name) for name in ("base", "a1", "a2", "a3")] == [0, 0, 0, 0]
    with client_of(serving) as client:
        for name in NAMES:
            client.generate(PROMPTS[0], GREEDY, lora_request=served(name))
        with client.session(PROMPTS[0], lora_request=ServedLora("a2")) as branch:
            branch.generate(GREEDY)
            branch.score([[5]])
        with pytest.raises(NotFound):
            client.generate(PROMPTS[0], GREEDY, lora_request=ServedLora("b1"))
    assert [told(name) for name in ("base", "a1", "a2", "a3")] == [1, 1, 3, 1]
    named = [("base", "base"), ("a1", "a1"), ("a2", "a2"), ("a3", "a3"), ("a2", "a2"), ("a2", None)]
    found = [dict(span.attributes) for span in spans.get_finished_spans()]
    assert [(own["gen_ai.request.model"], own.get("gen_ai.response.model")) for own in found] == named
    labels = {dict(label).get("model_name") for _, label in scraped(serving)} - {None}
    assert labels == {"base", "a1", "a2", "a3"}
    serving.server.gateway.watchers = serving.server.gateway.watchers[:-1]
    tracer.close()


@pytest.fixture
def texts(server_loop: Loop, tmp_path: Path) -> Iterator[tuple[Serving, LLM, LoRARequest]]:
    """A model of bytes with an adapter, served and not."""
    path, lora = str(make_tiny(tmp_path)), LoRARequest("tuned", 1, byte_lora(tmp_path / "tuned", 3))
    settings: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_blocks": 256, "enable_lora": True}
    loras = (f"tuned={lora.lora_path}",)
    serving = Serving(server_loop, lambda: AsyncLLM(path, **settings), lora=loras, served_model_name="bytes").ready()
    with LLM(path, **settings) as llm:
        yield serving, llm, lora
    serving.whole()
    serving.close()


def test_the_open_inference_protocol_names_them(texts: tuple[Serving, LLM, LoRARequest]) -> None:
    serving, llm, lora = texts
    stub = open_inference_service_pb2_grpc.GRPCInferenceServiceStub(serving.channel)
    for name, is_ready in (("bytes", True), ("tuned", True), ("b1", False), ("", False)):
        assert stub.ModelReady(ob.ModelReadyRequest(name=name)).ready is is_ready
    assert stub.ModelMetadata(ob.ModelMetadataRequest(name="tuned")).name == "tuned"
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    raw = json.dumps({"temperature": 0, "max_tokens": 9, "ignore_eos": True})

    def request(name: str, streams: bool) -> ob.ModelInferRequest:
        made = ob.ModelInferRequest(model_name=name)
        for what, text in (("text_input", "hello there"), ("sampling_parameters", raw)):
            made.inputs.add(name=what, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
        for what, value in (("stream", streams), ("exclude_input_in_output", True)):
            made.inputs.add(name=what, datatype="BOOL", shape=[1]).contents.bool_contents.append(value)
        return made

    def text_of(response: ob.ModelInferResponse) -> str:
        [output] = [i for i, one in enumerate(response.outputs) if one.name == "text_output"]
        if response.raw_output_contents:
            return response.raw_output_contents[output][4:].decode()
        return response.outputs[output].contents.bytes_contents[0].decode()

    wants = set()
    for name, own in (("tuned", lora), ("bytes", None)):
        [want] = llm.generate(["hello there"], params, use_tqdm=False, lora_request=own)
        assert text_of(stub.ModelInfer(request(name, False))) == want.outputs[0].text
        pieces = [one.infer_response for one in stub.ModelStreamInfer(iter([request(name, True)]))]
        assert "".join(map(text_of, pieces)) == want.outputs[0].text and pieces[0].model_name == name
        wants.add(want.outputs[0].text)
    assert len(wants) == 2
    assert reason(refused(lambda: stub.ModelMetadata(ob.ModelMetadataRequest(name="b1")))) == "MODEL_NOT_FOUND"
    assert reason(refused(lambda: stub.ModelInfer(request("b1", False)))) == "MODEL_NOT_FOUND"
    [failed] = stub.ModelStreamInfer(iter([request("b1", True)]))
    assert failed.error_message == "there is no such model; known are bytes, tuned"


def test_chats_texts_and_beams_through_one(texts: tuple[Serving, LLM, LoRARequest]) -> None:
    """In sessions, too; and texts are spelled when it is gone."""
    serving, llm, lora = texts
    hi, params = [{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    own: dict[str, Any] = {"lora_request": lora}
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    with client_of(serving, model="tuned") as client:
        assert client.chat(hi, params)[0].outputs[0].text == llm.chat(hi, params, **own)[0].outputs[0].text
        near, remote = llm.beam_search(["Hi"], beams, **own)[0], client.beam_search(["Hi"], beams)[0]
        assert [beam.text for beam in remote.sequences] == [beam.text for beam in near.sequences]
        assert client.tokenize("Hi") == llm.get_tokenizer().encode("Hi")
        with (
            llm.session(messages=hi, **own) as mine,
            client.session(messages=hi, lora_request=ServedLora("tuned")) as theirs,
        ):
            for _ in range(2):
                assert theirs.generate(params).outputs[0].text == mine.generate(params).outputs[0].text
                mine.append({"role": "user", "content": "And?"}), theirs.append({"role": "user", "content": "And?"})
        outputs = list(client.stream("Hi", params.clone(n=2, temperature=1.0, seed=1)))
        serving.server.gateway.models.unload("tuned")
        assert str(outputs[-1].tree())
        with pytest.raises(NotFound):
            client.chat(hi, params)


def test_the_example_goes_through_one(texts: tuple[Serving, LLM, LoRARequest]) -> None:
    serving, llm, lora = texts
    example, shown = runpy.run_path(str(ROOT / "examples" / "grpc_client.py")), io.StringIO()
    with contextlib.redirect_stdout(shown):
        example["main"](f"127.0.0.1:{serving.server.port}", "tuned")
    params, prompts = SamplingParams(temperature=0, max_tokens=12, stop=["\n"]), ["The capital of France is"]
    [want], [plain] = (llm.generate(prompts, params, use_tqdm=False, lora_request=own) for own in (lora, None))
    assert shown.getvalue().startswith(f"{prompts[0]!r} -> {want.outputs[0].text!r}\n")
    assert want.outputs[0].text != plain.outputs[0].text


def test_a_load_names_them_in_turns(texts: tuple[Serving, LLM, LoRARequest]) -> None:
    serving, _, _ = texts
    requests = bench_serve.made(bench_serve.LoadOptions(model=("tuned", "bytes"), num_prompts=5), {})
    assert [request.model for request in requests] == ["tuned", "bytes", "tuned", "bytes", "tuned"]
    assert [own.model for own in bench_serve.made(bench_serve.LoadOptions(num_prompts=2), {})] == ["", ""]
    flags = ["--address", f"127.0.0.1:{serving.server.port}", "--num-prompts", "4", "--output-len", "3"]
    done = bench("--json", *flags, "--model", "tuned", "--model", "bytes")
    assert done.returncode == 0 and json.loads(done.stdout)["completed"] == 4, done.stderr
    none = bench(*flags, "--model", "b1")
    assert none.returncode == 1 and "NOT_FOUND: there is no such model; known are bytes, tuned" in none.stderr
