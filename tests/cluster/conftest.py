"""One Ray cluster for all that need one: to start it costs 10 seconds of a processor."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

ROOM = {"object_store_memory": 80 * 2**20, "include_dashboard": False, "include_log_monitor": False}


@pytest.fixture(scope="package", autouse=True)
def _debug() -> Iterator[None]:
    """The pool is checked after every step and fresh blocks are poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDEC_DEBUG", "1")
        yield


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """A node of two processors on this machine, and this process connected to it."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "no_monitor": True, **ROOM})
    before = signal.getsignal(signal.SIGTERM)
    ray.init(made.address, log_to_driver=False, configure_logging=False)
    signal.signal(signal.SIGTERM, before)  # Ray has one of its own
    yield made
    ray.shutdown()
    made.shutdown()
