"""A process that has imported what a worker needs, and forks one whenever it is asked to. Workers then begin within
milliseconds, not after the seconds that torch takes to import, and share the memory of what is imported.

Python's `multiprocessing` has such a server, too: one for the whole program, whose children run the program's script
again. This one runs nothing of the caller's, and none but workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any, NoReturn

from pagedec.environment import own_variables, set_own_variables, worker_environment

PRELOADED = ("pagedec.runtime.loading", "pagedec.executor.child")
BEGIN_SECONDS = 120.0
"""How long a server may take to begin: it imports torch, perhaps from a cold disk."""
SILENT_SECONDS = 10.0
"""How long it may take to answer later. One that has not is stopped, and another takes its place."""
END_SECONDS = 5.0
_MAX_ORDER_BYTES = 65536
_NUMBER = struct.Struct("<i")
_FLAGS = ["-P", *(["-E"] if sys.flags.ignore_environment else []), *(["-s"] if sys.flags.no_user_site else [])]
"""Before the path is ours, nothing is found that we would not have found: no `signal.py` of the directory we are in."""
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """A server of what this process is now: `current` gives it. It ends where nobody holds it any more."""

    def __init__(self, given: Any) -> None:
        self.given = given
        """What workers take over from this process. Where that has changed, they need another server."""
        self._control, theirs = pair(socket.SOCK_SEQPACKET)
        # Ctrl-C is the engine's, always, and so is what ends a whole group of processes: it may finish what runs.
        deaf = "import gc, signal; [signal.signal(told, signal.SIG_IGN) for told in (signal.SIGINT, signal.SIGTERM)]"
        deaf += "; gc.disable()"  # nothing of what is imported is garbage, and to look takes 0.1 s
        begin = f"{deaf}; import sys; sys.path[:] = {ascii(import_path())}"  # workers find what we find
        code = f"{begin}; from pagedec.executor.fork_server import main; main({theirs.fileno()})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _has_errors() else subprocess.DEVNULL,
                env=worker_environment(),
                cwd=None if _directory() else "/",  # torch's own libraries need one that is there
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._patience, self._is_silent = BEGIN_SECONDS, False
        self._end = weakref.finalize(self, _end, self._process, self._control)
        self._end.atexit = False  # the kernel closes the socket then

    def is_running(self) -> bool:
        return self._process.poll() is None and not self._is_silent

    def fork(self, load: str, channel: socket.socket) -> ForkedProcess:
        """A process that runs `pagedec.executor.child.main` with `channel`. Raises `OSError` where there is none."""
        life, theirs = pair(socket.SOCK_SEQPACKET)
        try:
            with theirs, open(os.devnull, "wb") as nowhere:
                order = json.dumps({"load": load, "environ": own_variables()}).encode()
                # What it writes goes where our own errors go now.
                errors = 2 if _has_errors() else nowhere.fileno()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: nothing will come
                    socket.send_fds(self._control, [order], [channel.fileno(), theirs.fileno(), errors])
            if not _is_readable(life, seconds := self._patience):
                self._is_silent = True
                raise TimeoutError(f"process {self.pid}, which forks workers, has said nothing for {seconds:g} s")
            self._patience = SILENT_SECONDS
            answer = life.recv(_NUMBER.size)
            if not answer:
                raise ChildProcessError(
                    f"process {self.pid}, which forks workers, has ended, or can have no more of them"
                )
            pid = _NUMBER.unpack(answer)[0]
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
        except BaseException:
            life.close()
            raise
        return ForkedProcess(pid, life)

    def let_go(self) -> None:
        """In a fork: it is the parent's, and must notice when that is gone."""
        self._end.detach()
        self._control.close()


class ForkedProcess:
    """A process that a server has forked. It stays a zombie until `close`, so that its number is no other's while
    somebody may kill it."""

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid, self._life = pid, life
        self._status: int | None = None
        self._is_orphan = False
        """Its server was killed, and it with that: where this process takes in orphans, it must be waited for here."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. Any thread may ask."""
        if self._status is None:
            with contextlib.suppress(OSError):  # nothing is told yet, or never will be
                told = self._life.recv(_NUMBER.size, socket.MSG_DONTWAIT | socket.MSG_PEEK)
                self._is_orphan = not told
                self._status = _NUMBER.unpack(told)[0] if told else -signal.SIGKILL
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None where it runs for longer than that."""
        if self.poll() is None and self._is_held:
            _is_readable(self._life, seconds)
        return self.poll()

    def kill(self) -> None:
        if self.poll() is None and self._is_held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._life.close()
        for _ in range(10 if self._is_orphan else 0):  # it may not have fallen to this process yet
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    break
            time.sleep(0.01)

    @property
    def _is_held(self) -> bool:
        return self._life.fileno() >= 0


_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_choosing = threading.Lock()


def current() -> ForkServer:
    """A server of this process as it is now: its environment, path, directory, processors, user and limits. Variables
    of our own are read when a worker loads; what others read is theirs to know."""
    environ = worker_environment()
    rest = {name: environ[name] for name in environ.keys() - own_variables(environ).keys()}
    limits = [resource.getrlimit(kind) for name, kind in vars(resource).items() if name.startswith("RLIMIT_")]
    user = os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)
    given = rest, import_path(), _directory(), os.sched_getaffinity(0), user, limits
    with _choosing:
        for server in _servers:
            if server.given == given and server.is_running():
                return server
        server = ForkServer(given)
        _servers.add(server)
        return server


def import_path() -> list[str]:
    """Where imports look: what else is in `sys.path`, a `Path` say, Python passes over."""
    return [place for place in sys.path if isinstance(place, str)]


def _has_errors() -> bool:
    """Whether there is a standard error: what runs in the background may have been started without, or closed it."""
    with contextlib.suppress(OSError):
        os.fstat(2)
        return sys.__stderr__ is not None
    return False


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed, or no longer ours to read
        return ""


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that a fork does not keep open, even one of another thread's while they are made use of."""
    ours, theirs = map(_above_streams, socket.socketpair(socket.AF_UNIX, kind))
    _ends.update((ours, theirs))
    return ours, theirs


def _above_streams(end: socket.socket) -> socket.socket:
    """One that is no standard stream, where the program was started without some of these."""
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))


def _let_go() -> None:
    global _choosing
    _choosing = threading.Lock()  # another thread may have held it
    for server in _servers:
        server.let_go()
    for end in list(_ends):
        end.close()
    _servers.clear()


os.register_at_fork(after_in_child=_let_go)


def _is_readable(end: socket.socket, seconds: float) -> bool:
    with selectors.PollSelector() as selector:  # which needs no descriptor
        selector.register(end, selectors.EVENT_READ)
        return bool(selector.select(seconds))


# ------------------------------------------------------------------------------------------------------- in the server
def main(descriptor: int) -> NoReturn:
    """Fork a worker for each message, until nobody can send one and none is left."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # not looked at by any worker, and so not copied
    _Forking(socket.socket(fileno=descriptor)).run()
    os._exit(0)


class _Forking:
    def __init__(self, control: socket.socket) -> None:
        self._control, self._selector, self._pid = control, selectors.DefaultSelector(), os.getpid()
        self._lives = dict[int, socket.socket]()
        """Of workers that run, or have not been waited for; closed: nobody wants to know how they end."""
        self._ended = set[int]()
        self._woken, waking = socket.socketpair()
        for end in self._woken, waking:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # whoever has started us may have blocked it
        self._waking = waking
        self._selector.register(control, selectors.EVENT_READ, self._take)
        self._selector.register(self._woken, selectors.EVENT_READ, self._tell)

    def run(self) -> None:
        while self._control.fileno() >= 0 or self._lives:
            for key, _ in self._selector.select():
                key.data()

    def _take(self) -> None:
        order, descriptors, _, _ = socket.recv_fds(self._control, _MAX_ORDER_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not order:  # the engine's process is gone, or wants no more
            self._selector.unregister(self._control)
            self._control.close()
            return
        if len(descriptors) < 3:  # there is no room for more; whoever asks finds the other end closed
            for descriptor in descriptors:
                os.close(descriptor)
            return
        channel, life, errors = descriptors
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that numpy's BLAS has threads; it minds forks
                number = os.fork()
        except OSError as error:
            number = -(error.errno or errno.EAGAIN)
        if number == 0:
            self._become(channel, life, errors, json.loads(order))
        os.close(channel)
        os.close(errors)
        end = socket.socket(fileno=life)
        with contextlib.suppress(OSError):  # it has been given up
            end.send(_NUMBER.pack(number))
        if number < 0:
            end.close()
            return
        self._lives[number] = end
        self._selector.register(end, selectors.EVENT_READ, lambda: self._forget(number))

    def _tell(self) -> None:
        """Say who has ended. What a worker leaves behind stays until nobody can kill it any more."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for pid, life in list(self._lives.items()):
            if pid in self._ended or not (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                continue
            self._ended.add(pid)
            if life.fileno() < 0:
                self._bury(pid)
                continue
            with contextlib.suppress(OSError):  # its own end is closed
                life.send(_NUMBER.pack(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))

    def _forget(self, pid: int) -> None:
        self._selector.unregister(self._lives[pid])
        self._lives[pid].close()
        if pid in self._ended:
            self._bury(pid)

    def _bury(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self._ended.remove(pid)
        del self._lives[pid]

    def _become(self, channel: int, life: int, errors: int, order: dict[str, Any]) -> NoReturn:
        """The worker. It dies with this process, which alone can say how it ended."""
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._woken, self._waking, *self._lives.values()):
                end.close()
            self._selector.close()
            os.close(life)
            os.dup2(errors, 2)
            os.close(errors)
            set_own_variables(order["environ"])
            from pagedec.executor.child import main as work

            if os.getppid() == self._pid:  # alive when prctl was called
                work(channel, order["load"])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            with contextlib.suppress(Exception):  # perhaps nobody reads it
                traceback.print_exc()
                sys.stderr.flush()
        finally:
            os._exit(status)
