"""A program with a terminal of its own: what is typed goes in, what is shown comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SOURCES = Path(__file__).resolve().parent.parent
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
PAGEDEC = (sys.executable, "-c", "from pagedec.cli.main import command; command()")
"""As the installed script does."""


class Terminal:
    """Starts the command; leaves with `wait`, or kills it. All three standard streams are the terminal, but
    `redirected` ones."""

    def __init__(self, command: Sequence[str], columns: int = 60, term: str = "xterm", **redirected: int) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        streams = {"stdin": inner, "stdout": inner, "stderr": inner} | redirected
        self.process = subprocess.Popen(
            command,
            cwd=SOURCES,
            env=os.environ | {"TERM": term},
            start_new_session=True,
            **streams,
            preexec_fn=lambda: fcntl.ioctl(inner, termios.TIOCSCTTY, 0),
            pass_fds=(inner,),
        )
        os.close(inner)
        self.shown = ""
        """All that was shown so far, line ends as they are in a file."""
        self._data = b""
        self._seen = 0

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, text: str, seconds: float = 60) -> str:
        """Wait for a text behind what was waited for before; returns what was shown in between, the text included."""
        deadline = time.monotonic() + seconds
        while text not in self.shown[self._seen :]:
            assert time.monotonic() < deadline and self._read(0.1), f"no {text!r} in {self.shown[self._seen :]!r}"
        begin = self._seen
        self._seen = self.shown.index(text, begin) + len(text)
        return self.shown[begin : self._seen]

    def wait(self, seconds: float = 60) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, f"does not end: {self.shown!r}"
        return self.process.wait(timeout=max(deadline - time.monotonic(), 1))

    def _read(self, seconds: float) -> bool:
        """Whether there may be more to read."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the other side has closed
            return False
        self._data += data
        self.shown = self._data.decode("utf-8", "ignore").replace("\r\n", "\n")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._fd)
