"""The port of the metrics: HTTP for whoever scrapes, and nothing of it for whoever keeps connections."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

LOG = logging.getLogger("pagedec.serve")
SILENT_SECONDS = 10.0
"""In which a connection must say or take something."""
MOST_CONNECTIONS = 32
"""At the same time, each with a thread. One more ends the oldest one, which is nobody who scrapes: that is quick."""
ACCEPT_SECONDS = 0.1
"""Before the next try where a connection cannot be taken: the system says that it is there for as long as it is."""


class MetricsPort:
    """Answers with a registry's metrics, from threads of its own."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listen at an address. Raises `OSError` where that is not possible."""
        host = host.strip("[]")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._server = _Server(family, (str(address[0]), port))
        self._server.set_app(_answering(make_wsgi_app(registry)))
        self.port = int(self._server.server_port)
        """The port as it is."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="pagedec-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._open: list[socket.socket] = []
        self._opening = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without looking for the host's name, which takes as long as a name server does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError:  # there are no more files for this process, perhaps
            time.sleep(ACCEPT_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread. The oldest one gives way where there are too many."""
        with self._opening:
            if len(self._open) >= MOST_CONNECTIONS:
                _hang_up(self._open.pop(0))
            self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is over."""
        with self._opening:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What goes wrong with a connection: he has left, or said nothing. Python would write a traceback."""
        LOG.debug("metrics_port: a connection has failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request, whose path is his."""

    def get_stderr(self) -> Any:
        """Of what goes wrong while an answer is sent nobody is told."""
        return io.StringIO()


def _answering(page: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The same, with an answer and a line where it fails, as for what is asked with headers that are none."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return page(environ, start)
        except Exception:
            LOG.exception("metrics_port: a request cannot be answered")
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]

    return answer


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has gone by itself
        pass
