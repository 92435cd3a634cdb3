"""Serve a model over gRPC until it is told to stop.

A termination signal or Ctrl-C ends it in order: health checks are told, running requests may end (--drain-timeout), the
rest is aborted, and the exit status is 0. A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import resource
from collections.abc import Callable

from pagedec import environment
from pagedec.cli.adapter_flags import HINTS
from pagedec.cli.arguments import (
    ENGINE,
    add_engine_arguments,
    add_options,
    engine_config,
    given_options,
    given_sampling,
)
from pagedec.cli.console import DONE, FAILED, say
from pagedec.cli.parser import Parser
from pagedec.cli.signals import SIGNALS
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.formats.generation import WRITTEN
from pagedec.serve.server_config import ServerConfig

FILES = 65536
"""As in deploy/pagedec.service."""
EPILOG = """\
examples:
  pagedec serve --port 50051
  pagedec serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --api-keys keys.toml
  pagedec serve --lora sql=./sql-adapter --lora chat=./chat.gguf --max-loras 2
  pagedec serve --speculative-config '{"method": "ngram"}' --admin-port 50052 --metrics-port 9090
"""


def add_arguments(parser: Parser) -> None:
    """Add the server's options and the engine's arguments."""
    parser.hints.update(HINTS)
    add_options(parser, "server", ServerConfig)
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    options = given_options(arguments, ServerConfig)
    arguments.lora = [*options.lora] or options.lora_dir  # which have the engine take adapters
    config = recommending(arguments)
    environment.quiet_grpc()  # it waits for who reads standard error, while it holds up all connections
    from pagedec.serve.logs import begin_logging

    begin_logging(options.log_level, options.log_format)
    allow_connections()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options, config))


def recommending(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration, which recommends to clients what the file's table [sampling] says. Raises
    `InvalidArgument` for what cannot be recommended."""
    config, table = engine_config(arguments), {}
    for name, value in given_sampling(arguments).items():
        if name not in WRITTEN:
            limit = (
                f"must not be in the table [sampling] of {arguments.config}: a server's requests say it themselves. "
                f"It may have what --override-generation-config takes: {', '.join(WRITTEN)}"
            )
            raise InvalidArgument(name, value, limit)
        table[WRITTEN[name]] = value
    own = config.model.override_generation_config or {}
    is_flag = hasattr(arguments, f"{ENGINE}override_generation_config")
    merged = {**table, **own} if is_flag else {**own, **table}
    model = dataclasses.replace(config.model, override_generation_config=merged or None)
    return dataclasses.replace(config, model=model)


def allow_connections() -> None:
    """Let the process have `FILES` open as far as the system lets it: each connection is one, and shells give out 1024,
    with which nobody gets in behind a thousand who are idle, probes neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # where there is no such wheel
        return None
    return uvloop.new_event_loop


async def _serve(options: ServerConfig, config: EngineConfig) -> int:
    from pagedec.engine.loop import THREAD
    from pagedec.llm.async_llm import AsyncLLM
    from pagedec.serve.logs import quiet_tasks, quiet_threads
    from pagedec.serve.server import Server

    quiet_tasks(asyncio.get_running_loop())
    quiet_threads({THREAD})  # the server says what it has died of
    server = Server(options, lambda: AsyncLLM(**config.to_kwargs()))
    told = asyncio.Event()
    events = asyncio.get_running_loop()
    for number in SIGNALS:
        events.add_signal_handler(number, _signalled, told)
    starting = asyncio.ensure_future(server.start())
    waiting = asyncio.ensure_future(told.wait())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # a model that is being loaded cannot be stopped in the middle
        os._exit(DONE)
    try:
        starting.result()
    except OSError as error:
        say(f"error: {error}")
        return FAILED
    gc.collect()
    gc.freeze()  # what was imported stays: going through it would hold everybody up for 110 ms now and then
    broken = asyncio.ensure_future(server.wait())
    await asyncio.wait({waiting, broken}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():  # whoever has started it starts it anew
        say("error: the engine has failed; its log says why")
        await server.stop()
        return FAILED
    await server.end()
    return DONE


def _signalled(told: asyncio.Event) -> None:
    if told.is_set():
        os._exit(FAILED)
    told.set()
