"""Workers in processes of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import weakref

from pagedec.config import EngineConfig
from pagedec.environment import worker_environment
from pagedec.executor.channel import Channel
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
        super().__init__(config, lambda: start_group(config.parallel.tensor_parallel_size, load))


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
        ours, theirs = socket.socketpair()
        path = json.dumps(sys.path)  # the worker finds what we found, and runs nothing of the caller's script
        deaf = "import gc, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # Ctrl-C is ours, always
        deaf += "; gc.disable()"  # until it has imported torch: nothing of that is garbage, and to look takes 0.1 s
        begin = f"{deaf}; import json, sys; sys.path[:] = json.loads({path!r})"
        code = f"{begin}; from pagedec.executor.child import main; main({theirs.fileno()}, {load!r})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=worker_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self.channel)  # also where it is dropped
        self._end.atexit = False  # the kernel closes the channel then

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        return f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> None:
        self._end()

    def abandon(self) -> None:
        self._end.detach()


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
