"""The output file: whole lines only, appended one by one, so that a job which is killed at any moment can go on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagedec.batch.replies import RECORD_ID, as_line, is_error
from pagedec.errors import InvalidArgument, PagedecError

SYNC_SECONDS = 5.0
"""Longest time that answers lie in the system's memory only: a killed process loses none, a machine without power
these."""
BEGINNING = b'{"id": "line-'


class OutputError(PagedecError):
    """The output cannot be written. What is in it is whole, and the job can go on once the cause is gone."""

    code = "FAILED_PRECONDITION"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class Done(NamedTuple):
    """What an earlier run has recorded of a line."""

    digest: str
    settings: str
    is_error: bool


class Journal:
    """An output file, locked against other jobs. `done` maps line numbers to what the file has of them: with `restart`
    nothing, with `retry_failed` no errors. The records that are not in it are thrown away when the new run begins: one
    that fails before that costs no answers, and a process that is killed meanwhile leaves the file as it was or as it
    is to be.

    Raises InvalidArgument if the file is no output of a batch, cannot be opened, or belongs to a job that runs.
    """

    def __init__(self, path: Path, restart: bool = False, retry_failed: bool = False) -> None:
        self.path, self._keeps_some = path, not restart
        self._fd = _open_alone(path)
        try:
            found, self._length = self._scan(restart)
            kept = {} if restart else found
            self.done = {n: entry for n, entry in kept.items() if not (retry_failed and entry.is_error)}
            self.stale = restart or len(self.done) < len(found)
            if not restart and self._length < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, self._length)  # the record in whose middle the job was killed
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()

    def _scan(self, restart: bool) -> tuple[dict[int, Done], int]:
        """What the file has, and where its last whole record ends. A restart takes records of any jobs, and nothing
        else."""
        done: dict[int, Done] = {}
        length = 0
        with open(self.path, "rb") as file:
            for at, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    size = min(len(data), len(BEGINNING))
                    is_lost = done and not data.strip(b"\0")  # how some file systems end a file when the power fails
                    if (
                        data[:size] != BEGINNING[:size] and not is_lost
                    ):  # nothing of somebody else's file may be cut off
                        raise self._foreign(at)
                    break
                number, entry = self._entry(at, data)
                if number in done and not restart:
                    problem = f"line {at} is a second record of input line {number}"
                    raise self._refused(f"{problem}; name another file, or start over with restart=True")
                done[number] = entry
                length += len(data)
        return done, length

    def _entry(self, at: int, data: bytes) -> tuple[int, Done]:
        try:
            record = json.loads(data)
            match = RECORD_ID.fullmatch(record["id"])
            failed = is_error(record)
            number = None if match is None else int(match[1])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign(at) from None
        if match is None or number is None:
            raise self._foreign(at)
        return number, Done(match[2], match[3], failed)

    def _foreign(self, at: int) -> InvalidArgument:
        return self._refused(f"line {at} is no record of a batch; name another file, this one stays as it is")

    def _refused(self, limit: str) -> InvalidArgument:
        return InvalidArgument("output", str(self.path), limit)

    def begin(self) -> None:
        """Throw away the records that are to be forgotten. May be called again. Raises OutputError."""
        if not self.stale:
            return
        try:
            if self._keeps_some:
                self._replace()
            else:
                os.ftruncate(self._fd, 0)
                self._length = 0
        except OSError as error:
            done = "replaced" if self._keeps_some else "written"
            raise OutputError(self.path, f"cannot be {done}: {error.strerror}") from error
        self.stale = False

    def _replace(self) -> None:
        """Put a file with the records of `done` in the place of this one, at once and locked as this one is."""
        target = Path(os.path.realpath(self.path))
        name = hashlib.blake2b(os.fsencode(target.name), digest_size=8).hexdigest()
        part = target.with_name(f".pagedec-{name}.part")  # what a killed process has left of it is written over
        fd = os.open(part, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, self.path)
            length = self._copy(fd)
            os.fsync(fd)
            os.replace(part, target)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        os.close(self._fd)
        self._fd, self._length = fd, length
        directory = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _copy(self, fd: int) -> int:
        """Write the records of `done` to another file, which is for the same people to read. Returns their bytes."""
        before = os.fstat(self._fd)
        os.fchmod(fd, stat.S_IMODE(before.st_mode))
        with contextlib.suppress(PermissionError):  # of a file that is somebody else's
            os.fchown(fd, before.st_uid, before.st_gid)
        with open(self.path, "rb") as file, open(fd, "wb", closefd=False) as copy:
            for at, data in enumerate(file, start=1):
                if self._entry(at, data)[0] in self.done:
                    copy.write(data)
        return os.fstat(fd).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, whole. Raises OutputError, and leaves the file as it was before, if the disk does not take
        it."""
        self.begin()
        data = as_line(record)
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # only a full disk or a limit stops in the middle; the next write says which
                written += os.write(self._fd, data[written:])
            self._length += len(data)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):  # a torn line at the end is cut off when the job goes on
                os.ftruncate(self._fd, self._length)
            raise OutputError(self.path, f"cannot be written: {error.strerror}") from error

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Put everything on the disk and give the file to others. May be called again."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise OutputError(self.path, f"cannot be written: {error.strerror}") from error
        finally:
            os.close(fd)


def _open_alone(path: Path) -> int:
    """The file, made if it is not there, locked."""
    while True:
        fd = _open(path)
        try:
            _lock(fd, path)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another job has put a file in its place between the two


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidArgument("output", str(path), f"cannot be written: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidArgument("output", str(path), "must be a plain file: a job that goes on reads it")
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidArgument("output", str(path), "another job is writing it") from None
    except OSError as error:
        raise InvalidArgument("output", str(path), f"cannot be locked: {error.strerror}") from error
