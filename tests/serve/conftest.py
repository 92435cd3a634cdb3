"""Servers over a tiny random model, and one over the default model, for what needs text."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from pagedec import LLM, AsyncLLM
from tests.engine.conftest import EOS
from tests.engine.lora_models import Adapted
from tests.models.checkpoints import make_checkpoint, variant
from tests.serve.adapter_cases import LORA, Admin, lora_flags
from tests.serve.serving import Loop, Serving

assert EOS == 2


@pytest.fixture(scope="session")
def server_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session", autouse=True)
def _debug() -> Iterator[None]:
    """The pool is checked after every step and fresh blocks are poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_DEBUG", "1")
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and 131 tokens whose end token comes up every now and then."""
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(variant("tiny", length=8, initializer_range=0.15, max_position_embeddings=16384), path)
    return path


@pytest.fixture
def serve(server_loop: Loop, tiny_path: Path) -> Iterator[Callable[..., Serving]]:
    """Makes servers over the tiny model: `engine` holds engine arguments, the rest are the server's options."""
    made: list[Serving] = []

    def make(engine: dict[str, object] | None = None, **options: object) -> Serving:
        settings: dict[str, object] = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "num_blocks": 64,
            "max_model_len": 256,
            **(engine or {}),
        }
        serving = Serving(server_loop, functools.partial(AsyncLLM, str(tiny_path), **settings), **options)
        made.append(serving)
        return serving.ready()

    yield make
    for serving in made:
        if not serving.is_closed:
            serving.whole()
            serving.close()


@pytest.fixture(scope="session")
def text_server(server_loop: Loop) -> Iterator[Serving]:
    """The default model."""
    serving = Serving(server_loop, lambda: AsyncLLM("smollm2", num_blocks=96, max_model_len=512)).ready()
    yield serving
    serving.whole()
    serving.close()


@pytest.fixture(scope="session")
def text_llm() -> Iterator[LLM]:
    """The default model without a server."""
    with LLM("smollm2", num_blocks=96, max_model_len=512) as made:
        yield made


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[LLM]:
    """The tiny model without a server."""
    with LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64, max_model_len=256) as made:
        yield made


class Compiling(NamedTuple):
    """Grammars that are compiled when they may: `begun` is set when the first one is."""

    begun: threading.Event
    go_on: threading.Event


@pytest.fixture
def compiling(text_server: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    """Holds what `text_server` compiles, until the test's end at the latest."""
    grammars: Any = text_server.llm.engine.grammars
    held, compile_ = Compiling(threading.Event(), threading.Event()), grammars._compile

    def slow(*given: Any) -> Any:
        held.begun.set()
        assert held.go_on.wait(60)
        return compile_(*given)

    monkeypatch.setattr(grammars, "_compile", slow)
    yield held
    held.go_on.set()


@pytest.fixture(scope="session")
def adapted(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tiny_path, tmp_path_factory.mktemp("loras"))


@pytest.fixture
def adapted_llm(adapted: Adapted) -> Iterator[LLM]:
    """Without a server."""
    with adapted.load(max_loras=3, num_blocks=256) as made:
        yield made


@pytest.fixture
def adapters(serve: Callable[..., Serving], adapted: Adapted) -> Serving:
    """Three of them, with places for two; an administrator may load more."""
    engine = {**LORA, "num_blocks": 1024, "max_model_len": 16384}
    options = {"admin_port": 0, "lora_dir": str(adapted.folder), "served_model_name": "base"}
    return serve(engine=engine, lora=lora_flags(adapted), **options)


@pytest.fixture
def admin(adapters: Serving) -> Iterator[Admin]:
    with grpc.insecure_channel(f"127.0.0.1:{adapters.server.admin_port}") as channel:
        yield Admin(channel)
