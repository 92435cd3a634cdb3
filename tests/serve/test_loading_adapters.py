"""Adapters that come and go while a server runs: who has named one keeps it, and only an operator's own folder is
read."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedec import AsyncLLM
from pagedec.client import ServedLora
from pagedec.errors import InvalidArgument, ModelFileError, RequestsFailed
from pagedec.serve.server import Server
from pagedec.serve.server_config import ServerConfig
from pagedec.v1 import admin_service_pb2 as ab
from pagedec.v1 import generation_service_pb2 as pb
from tests.engine.lora_models import PROMPTS, Adapted
from tests.serve.adapter_cases import (
    GREEDY,
    LORA,
    Admin,
    asked,
    exact,
    lora_flags,
    refused,
)
from tests.serve.serving import Loop, Serving, client_of, details, prompt, reason, streamed
from tests.serve.test_metrics import scraped

Serve = Callable[..., Serving]
COUNT = "pagedec_model_requests_total"


def test_one_comes_while_others_run(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    one = adapted.write("b1", 8, seed=11)
    running = adapters.generation.GenerateStream(
        pb.GenerateStreamRequest(prompt=prompt(PROMPTS[0]), parameters=exact(16000), model="a1")
    )
    next(running)
    admin.LoadAdapter(ab.LoadAdapterRequest(name="b1", path="b1"))
    admin.LoadAdapter(ab.LoadAdapterRequest(name="b1", path=one.lora_path))  # the same one
    with client_of(adapters) as client:
        assert [model.name for model in client.models()] == ["base", "a1", "a2", "a3", "b1"]
        [output] = client.generate(PROMPTS[1], GREEDY, lora_request=ServedLora("b1"))
    with adapted.load() as llm:
        [want] = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False, lora_request=one)
    assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert next(running)
    running.cancel()


def test_one_path_under_two_names(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    """They share what is cached, and each comes and goes by itself."""
    for name in ("b1", "b2"):
        admin.LoadAdapter(ab.LoadAdapterRequest(name=name, path="a1"))
    want, what = adapted.want(adapted.loras[0], PROMPTS[3]), PROMPTS[3]
    with client_of(adapters) as client:
        assert [model.name for model in client.models()][-2:] == ["b1", "b2"]
        found = [client.generate(what, GREEDY, lora_request=ServedLora(name))[0] for name in ("b1", "b2")]
        assert [output.outputs[0].token_ids for output in found] == [want] * 2
        assert [output.num_cached_tokens for output in found] == [0, (len(what) - 1) // 16 * 16]
        admin.UnloadAdapter(ab.UnloadAdapterRequest(name="b1"))
        [output] = client.generate(what, GREEDY, lora_request=ServedLora("b2"))
        assert output.outputs[0].token_ids == want
    assert adapters.server.gateway.models.names == ["base", "a1", "a2", "a3", "b2"]


def test_one_goes_while_its_requests_run(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    """And while they wait: who has named it goes on, and another one under its name is another one."""
    want, other = (adapted.want(lora, PROMPTS[1], 40) for lora in adapted.loras[:2])
    asking = pb.GenerateStreamRequest(prompt=prompt(PROMPTS[1]), parameters=exact(40), model="a1")
    admin.Pause(ab.PauseRequest())
    calls = [adapters.generation.GenerateStream(asking) for _ in range(3)]
    deadline = time.monotonic() + 20
    while len(adapters.server.gateway.running) < 3:
        assert time.monotonic() < deadline
    admin.UnloadAdapter(ab.UnloadAdapterRequest(name="a1"))
    assert reason(refused(lambda: next(adapters.generation.GenerateStream(asking)))) == "MODEL_NOT_FOUND"
    admin.LoadAdapter(ab.LoadAdapterRequest(name="a1", path="a2"))
    calls.append(adapters.generation.GenerateStream(asking))
    admin.Resume(ab.ResumeRequest())
    assert [streamed(list(call))[0][1] for call in calls] == [
        *[want] * 3,
        adapted.want(adapted.loras[1], PROMPTS[1], 40),
    ]
    with client_of(adapters) as client:
        assert [model.name for model in client.models()] == ["base", "a2", "a3", "a1"]


def test_they_come_and_go_under_load(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    """One name, now of these weights and now of those: each answer is one's or the other's, or there is none."""
    what, swaps = PROMPTS[1], 0
    ones = [adapted.write(f"d{i}", 8, seed=20 + i) for i in range(2)]
    with adapted.load() as llm:
        told = llm.generate([what] * 2, GREEDY, use_tqdm=False, lora_request=ones)
    wants = [output.outputs[0].token_ids for output in told]
    stop = threading.Event()

    def swap() -> int:
        for count in itertools.count():
            admin.LoadAdapter(ab.LoadAdapterRequest(name="hot", path=f"d{count % 2}"))
            time.sleep(0.02)
            admin.UnloadAdapter(ab.UnloadAdapterRequest(name="hot"))
            if stop.is_set():
                return count
        raise AssertionError

    def ask(number: int) -> int | None:
        """Whose the answer is."""
        if number % 5 == 0:  # somebody who leaves
            call = adapters.generation.Generate.future(asked("hot", what, exact(4000)))
            time.sleep(0.01)
            call.cancel()
        if number % 3 == 0:
            base = adapters.generation.Generate(asked("", what)).answers[0].token_ids
            assert list(base) == adapted.want(None, what)
        try:
            return wants.index(list(adapters.generation.Generate(asked("hot", what)).answers[0].token_ids))
        except grpc.RpcError as error:
            assert reason(error) == "MODEL_NOT_FOUND"
            return None

    with ThreadPoolExecutor(9) as pool:
        swapping = pool.submit(swap)
        found = list(pool.map(ask, range(80)))
        stop.set()
        swaps = swapping.result(60)
    assert swaps > 3 and {0, 1} <= set(found)
    assert adapters.server.gateway.models.names == ["base", "a1", "a2", "a3"]
    adapters.whole()
    assert adapters.llm.loop.call(lambda engine: len(engine.adapters.files)).result(30) == 0


def test_what_waits_for_a_seat_goes_on(serve: Serve, adapted: Adapted) -> None:
    """The items of a stream that are not let in yet, when what they have named is unloaded."""
    engine = {**LORA, "num_blocks": 1024, "max_model_len": 4096}
    serving = serve(engine=engine, lora=lora_flags(adapted), lora_dir=str(adapted.folder), admin_port=0, max_requests=1)
    long = serving.generation.GenerateStream(
        pb.GenerateStreamRequest(prompt=prompt(PROMPTS[0]), parameters=exact(4000))
    )
    next(long)
    items = [pb.GenerateBatchRequest(item_id=str(i), request=asked("a1", PROMPTS[i])) for i in range(3)]
    told = serving.generation.GenerateBatch(iter(items))
    deadline = time.monotonic() + 20
    while serving.server.gateway.num_waiting < 3:
        assert time.monotonic() < deadline
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        Admin(channel).UnloadAdapter(ab.UnloadAdapterRequest(name="a1"))
    long.cancel()
    answers = {int(one.item_id): list(one.response.answers[0].token_ids) for one in told}
    assert answers == {i: adapted.want(adapted.loras[0], PROMPTS[i]) for i in range(3)}


def test_what_an_administrator_may_not_load(adapters: Serving, adapted: Adapted, admin: Admin, tmp_path: Path) -> None:
    adapted.write("c1", 32, seed=12)
    (adapted.folder / "empty").mkdir(exist_ok=True)
    (adapted.folder / "out").symlink_to(tmp_path)

    def load(name: str, path: str) -> grpc.RpcError:
        return refused(lambda: admin.LoadAdapter(ab.LoadAdapterRequest(name=name, path=path)))

    for name, path, field in (
        ("", "a1", "name"), ("base", "a1", "name"), ("x" * 201, "a1", "name"), ("a\nb", "a1", "name"),
        ("c1", "", "path"), ("c1", "/etc", "path"), ("c1", "../x", "path"), ("c1", "out", "path"),
        ("c1", "a\0b", "path"), ("a1", "a2", "path"), ("c1", "c1", "max_lora_rank"),
    ):  # fmt: skip
        error = load(name, path)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, path, error)
        assert details(error)["BadRequest"].field_violations[0].field == field, (name, path)
    for path in ("empty", "missing"):
        error = load("c1", path)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "MODEL_FILE"
        assert path in (error.details() or "")
    error = refused(lambda: admin.UnloadAdapter(ab.UnloadAdapterRequest(name="c1")))
    assert error.code() is grpc.StatusCode.NOT_FOUND and reason(error) == "ADAPTER_NOT_FOUND"
    assert reason(refused(lambda: admin.UnloadAdapter(ab.UnloadAdapterRequest(name="base")))) == "ADAPTER_NOT_FOUND"
    assert adapters.server.gateway.models.names == ["base", "a1", "a2", "a3"]


@pytest.mark.parametrize(
    ("path", "size"), [("a/" * 2048 + "b", 4097), ("\u00e4/" * 1366, 4098), ("a/" * 300_000, 600_000)]
)
def test_a_path_that_is_too_long(adapters: Serving, admin: Admin, path: str, size: int) -> None:
    error = refused(lambda: admin.LoadAdapter(ab.LoadAdapterRequest(name="c1", path=path)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"path is of {size} bytes: must be of at most 4096 bytes"


def test_a_path_of_the_most_bytes_is_looked_for(adapters: Serving, admin: Admin) -> None:
    for path in ("a/" * 2048, "\u00e4/" * 1365 + "b"):
        error = refused(lambda path=path: admin.LoadAdapter(ab.LoadAdapterRequest(name="c1", path=path)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "MODEL_FILE"


def test_file_systems_are_asked_in_another_thread(
    adapters: Serving, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs keeps no request waiting."""
    asked_in, realpath = list[int](), os.path.realpath

    async def own_thread() -> int:
        return threading.get_ident()

    def asking(*given: Any, **options: Any) -> Any:
        asked_in.append(threading.get_ident())
        return realpath(*given, **options)

    monkeypatch.setattr(os.path, "realpath", asking)
    refused(lambda: admin.LoadAdapter(ab.LoadAdapterRequest(name="c1", path="missing")))
    assert asked_in and adapters.loop.run(own_thread()) not in asked_in


def test_files_that_have_changed_are_another_adapter(adapters: Serving, adapted: Adapted, admin: Admin) -> None:
    """Of the same name and path: it must be unloaded first, and what runs keeps what it had."""
    adapted.write("e1", 8, seed=31)
    request = ab.LoadAdapterRequest(name="e1", path="e1")
    admin.LoadAdapter(request)
    running = adapters.generation.GenerateStream(
        pb.GenerateStreamRequest(prompt=prompt(PROMPTS[0]), parameters=exact(40), model="e1")
    )
    messages = [next(running)]
    one = adapted.write("e1", 8, seed=32)
    error = refused(lambda: admin.LoadAdapter(request))
    assert details(error)["BadRequest"].field_violations[0].field == "path"
    assert (error.details() or "").endswith("had when e1 was read from there; remove it first")
    admin.UnloadAdapter(ab.UnloadAdapterRequest(name="e1"))
    admin.LoadAdapter(request)
    with adapted.load() as llm:
        [want] = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False, lora_request=one)
    told = adapters.generation.Generate(asked("e1", PROMPTS[0]))
    assert list(told.answers[0].token_ids) == want.outputs[0].token_ids
    assert len(streamed([*messages, *running])[0][1]) == 40


def test_metrics_forget_the_names_of_what_is_unloaded(serve: Serve, adapted: Adapted) -> None:
    """Also where a request or a session goes on with it; under a name that is there again they count from 0."""
    serving = serve(engine=LORA, lora=lora_flags(adapted), lora_dir=str(adapted.folder), admin_port=0, metrics_port=0)

    def told() -> dict[str, float]:
        """By all names but the model's."""
        found = {dict(label)["model_name"]: value for (name, label), value in scraped(serving).items() if name == COUNT}
        return {name: value for name, value in found.items() if name != serving.server.gateway.model}

    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel, client_of(serving) as client:
        admin = Admin(channel)
        with client.session(PROMPTS[0], lora_request=ServedLora("a1")) as branch:
            branch.generate(GREEDY)
            assert told() == {"a1": 1, "a2": 0, "a3": 0}
            admin.UnloadAdapter(ab.UnloadAdapterRequest(name="a1"))
            assert told() == {"a2": 0, "a3": 0}
            branch.generate(GREEDY)
            assert told() == {"a2": 0, "a3": 0}
            admin.LoadAdapter(ab.LoadAdapterRequest(name="a1", path="a2"))
            branch.generate(GREEDY)
            client.generate(PROMPTS[0], GREEDY, lora_request=ServedLora("a1"))
            assert told() == {"a1": 2, "a2": 0, "a3": 0}
        for i in range(20):
            admin.LoadAdapter(ab.LoadAdapterRequest(name=f"n{i}", path="a1"))
            if i % 2:
                client.generate(PROMPTS[0], GREEDY, lora_request=ServedLora(f"n{i}"))
            admin.UnloadAdapter(ab.UnloadAdapterRequest(name=f"n{i}"))
        assert told() == {"a1": 2, "a2": 0, "a3": 0}


def test_who_may_load_them(serve: Serve, adapted: Adapted, tmp_path: Path) -> None:
    """Who may do what else AdminService does; and nobody where no folder was said."""
    keys = tmp_path / "keys.toml"
    tokens = {"user": "u" * 20, "operator": "o" * 20}
    keys.write_text(
        f'[user]\ntokens = ["{tokens["user"]}"]\n[operator]\ntokens = ["{tokens["operator"]}"]\nis_admin = true\n'
    )
    serving = serve(engine=LORA, lora_dir=str(adapted.folder), admin_port=0, api_keys=str(keys))
    [lora, *_] = adapted.loras
    request, back = ab.LoadAdapterRequest(name="a1", path=lora.lora_path), ab.UnloadAdapterRequest(name="a1")
    with grpc.insecure_channel(f"127.0.0.1:{serving.server.admin_port}") as channel:
        admin = Admin(channel)

        def both(who: str | None) -> list[str]:
            metadata, found = [("authorization", f"Bearer {tokens[who]}")] if who else [], list[str]()
            for call in (
                lambda: admin.LoadAdapter(request, metadata=metadata),
                lambda: admin.UnloadAdapter(back, metadata=metadata),
            ):
                try:
                    call()
                except grpc.RpcError as error:
                    found.append(reason(error))
            return found

        assert both(None) == ["TOKEN_MISSING"] * 2 and both("user") == ["NOT_ADMIN"] * 2 and both("operator") == []
    plain_server = serve(engine=LORA, admin_port=0)
    with grpc.insecure_channel(f"127.0.0.1:{plain_server.server.admin_port}") as channel:
        error = refused(lambda: Admin(channel).LoadAdapter(request))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "NO_LORA_DIR"


# ---- from the start
@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("a1", InvalidArgument, r"^lora is 'a1': must be NAME=PATH, the path that of a"),
        ("=/x", InvalidArgument, r"^lora is '=/x': must be NAME=PATH"),
        ("mine={tmp}/none", ModelFileError, r"^lora is 'mine=.*/none': .*/none: does not exist$"),
        ("mine={tmp}", ModelFileError, r"^lora is 'mine=.*': .*adapter_config.json: "),
        ("base={a1}", InvalidArgument, r"^lora is 'base=.*': name is 'base': must be another name than the model's"),
        ("big={big}", InvalidArgument, r"^lora is 'big=.*': max_lora_rank is 16: must be at least 32, the rank"),
    ],
)
def test_a_broken_one_keeps_a_server_from_starting(
    server_loop: Loop, adapted: Adapted, tmp_path: Path, text: str, kind: type[Exception], problem: str
) -> None:
    """Before it says that it is ready, with the flag, the name and the file; nothing stays open."""
    big = adapted.write("big", 32, seed=13)
    given = text.format(tmp=tmp_path, a1=adapted.loras[0].lora_path, big=big.lora_path)
    made: list[AsyncLLM] = []

    def load() -> AsyncLLM:
        settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
        made.append(AsyncLLM(str(adapted.path), **settings, **LORA))
        return made[-1]

    async def start() -> None:
        await Server(ServerConfig(port=0, lora=(given,), served_model_name="base"), load).start()

    with pytest.raises(kind, match=problem):
        server_loop.run(start())
    with pytest.raises(InvalidArgument, match=r"^lora_dir is '.*/none': must be a folder that is there$"):
        Server(ServerConfig(port=0, admin_port=0, lora_dir=f"{tmp_path}/none"), load)
    assert all(llm.loop.closed for llm in made)


def test_one_whose_files_are_gone_fails_its_own_requests(serve: Serve, adapted: Adapted, tmp_path: Path) -> None:
    """They are read when the device needs them."""
    lora = Adapted(adapted.path, tmp_path).write("gone", 8, seed=14)
    serving = serve(engine=LORA, lora=(*lora_flags(adapted)[:1], f"gone={lora.lora_path}"))
    (tmp_path / "gone" / "adapter_model.safetensors").unlink()
    error = refused(lambda: serving.generation.Generate(asked("gone", PROMPTS[0])))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION and reason(error) == "MODEL_FILE"
    told = serving.generation.Generate(asked("a1", PROMPTS[0]))
    assert list(told.answers[0].token_ids) == adapted.want(adapted.loras[0], PROMPTS[0])
    with client_of(serving) as client, pytest.raises(RequestsFailed) as caught:
        client.generate([PROMPTS[0]] * 2, GREEDY, use_tqdm=False, lora_request=[ServedLora("gone"), ServedLora("a1")])
    assert [output.error is None for output in caught.value.outputs] == [False, True]
