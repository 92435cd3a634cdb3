"""The metrics' port answers whoever scrapes, whatever others do there."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from socketserver import TCPServer

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pagedec.serve import metrics_port
from pagedec.serve.metrics_port import MetricsPort
from tests.serve.serving import WAIT

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("one", "One", registry=made).set(1)
    return made


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    made = MetricsPort(registry(), "127.0.0.1", 0)
    yield made
    made.close()


def connected(port: MetricsPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port.port), timeout=WAIT)


def scraped(port: MetricsPort, host: str = "127.0.0.1", **headers: str) -> str:
    request = urllib.request.Request(f"http://{host}:{port.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        text: str = answer.read().decode()
    return text


def quiet(port: MetricsPort) -> None:
    """Return when all connections are over."""
    end = time.monotonic() + WAIT
    while port._server._open:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_who_hangs_up_leaves_nothing_on_standard_error(port: MetricsPort, capfd: pytest.CaptureFixture[str]) -> None:
    """As probes of TCP do, and whoever gives up waiting."""
    for said in (b"", SCRAPE, b"GET /met") * 3:
        with connected(port) as made:
            made.sendall(said)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert "one 1.0" in scraped(port)
    quiet(port)
    assert capfd.readouterr() == ("", "")


def test_who_says_nothing_is_sent_away(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_port._Handler.timeout == metrics_port.SILENT_SECONDS, "it is what is waited for by itself"
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.05)
    with connected(port) as silent, connected(port) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert silent.recv(1) == b"" and slow.recv(1) == b""
    quiet(port)


def test_many_who_say_nothing_keep_nobody_out(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "MOST_CONNECTIONS", 4)
    silent = [connected(port) for _ in range(12)]
    assert "one 1.0" in scraped(port)
    assert len(port._server._open) <= 4
    assert [made.recv(1) for made in silent[:9]] == [b""] * 9, "the oldest ones"
    for made in silent:
        made.close()


def test_where_no_connection_can_be_taken_it_is_not_tried_without_a_pause(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says that one waits for as long as it does."""
    slept = list[float]()

    def full(server: TCPServer) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(TCPServer, "get_request", full)
        patch.setattr(metrics_port.time, "sleep", slept.append)
        with pytest.raises(OSError, match="too many"):
            port._server.get_request()
    assert slept == [metrics_port.ACCEPT_SECONDS]


def test_headers_that_are_none_are_a_line(
    port: MetricsPort, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "pagedec.serve"), pytest.raises(urllib.error.HTTPError, match="500"):
        scraped(port, Accept="application/openmetrics-text; version=a.b.c")
    assert [record.getMessage() for record in caplog.records] == ["metrics_port: a request cannot be answered"]
    quiet(port)
    assert capfd.readouterr() == ("", "")


def test_an_address_of_version_6() -> None:
    try:
        made = MetricsPort(registry(), "[::1]", 0)
    except OSError:
        pytest.skip("this machine has no such address")
    assert "one 1.0" in scraped(made, "[::1]")
    made.close()
