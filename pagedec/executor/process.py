"""Workers in processes of this machine."""

from __future__ import annotations

import weakref

from pagedec.config import EngineConfig
from pagedec.executor import fork_server
from pagedec.executor.channel import Channel
from pagedec.executor.fork_server import ForkedProcess, ForkServer
from pagedec.executor.group import WorkerGroup
from pagedec.executor.remote import RemoteExecutor

LOAD_WORKER = "pagedec.runtime.loading:load_worker"
STOP_SECONDS = 5.0
"""How long a worker that was told to end may take before it is killed: it may be in the middle of a step."""


class ProcessExecutor(RemoteExecutor):
    """One worker process for each device that shares the model.

    `load` names what makes the worker there of a configuration and its `Ranks`, as "module:function".
    """

    def __init__(self, config: EngineConfig, load: str = LOAD_WORKER) -> None:
        self._servers = servers = list[ForkServer]()

        def launch() -> WorkerGroup:
            servers[:] = [fork_server.current()]  # stays, however many workers end
            return start_group(config.parallel.tensor_parallel_size, load)

        super().__init__(config, launch)

    def stop(self) -> None:
        super().stop()
        self._servers.clear()


def start_group(world: int, load: str = LOAD_WORKER) -> WorkerGroup:
    """Start `world` processes; none is left where one cannot be started."""
    workers: list[WorkerProcess] = []
    try:
        workers += (WorkerProcess(load) for _ in range(world))
        return WorkerGroup(workers)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


class WorkerProcess:
    """A process that loads what it is told to, and then carries out steps. It ends with the channel to it."""

    def __init__(self, load: str = LOAD_WORKER) -> None:
        server = fork_server.current()
        ours, theirs = fork_server.pair()
        try:
            self._process = server.fork(load, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self.channel, server)  # also where it is dropped
        self._end.atexit = False  # the kernel closes the channel then

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        status = self._process.wait(STOP_SECONDS)
        if status is None:
            return "does not answer any more"
        return f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> None:
        self._end()

    def abandon(self) -> None:
        self._end.detach()
        self._process.close()


def _end(process: ForkedProcess, channel: Channel, _: ForkServer) -> None:
    channel.close()
    if process.wait(STOP_SECONDS) is None:
        process.kill()
        process.wait(STOP_SECONDS)
    process.close()
