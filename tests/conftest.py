"""What all tests share: random numbers, a number of threads, and no machine so slow that a test fails for it."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import settings

from pagedec.executor import fork_server

settings.register_profile("pagedec", derandomize=True, deadline=None)
settings.load_profile("pagedec")
# A shell that starts this in the background has interrupts ignored, here and in every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray's processes, too: they run at 15, and by itself a proxy of Ray Serve has 5 seconds to answer for the first time.
os.environ |= {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30"}
# Nor do workers start before anybody asks for them: nobody asks for so plain ones.
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
os.environ |= {"RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of what is collected nothing goes before the end: garbage is not looked for there, neither now (half of the time
    that collecting takes) nor in what tests leave."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


KERNELS = ("kind", "isa", "library", "backend", "kernels", "dtype", "device")
"""Parameters in which cases are not alike: other code answers them."""
SLOW = re.compile("emulated|_on_avx2$")
"""Libraries of instructions, or devices, that are functions here."""


def _group(item: pytest.Item, mark: pytest.Mark) -> tuple[str, ...]:
    """Of cases that are much alike: a test, and what computes, but for what the mark says is `alike` there, too."""
    values = item.callspec.params  # type: ignore[attr-defined]
    apart = [name for name in KERNELS if name in values and name not in mark.kwargs.get("alike", ())]
    return item.nodeid.partition("[")[0], *(str(values[name]) for name in apart)


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of n like cases of a test that is `sampled(n)` all but one are long, the same ones until they are named anew. Of
    a test of kernel libraries those of the emulated ones and the slow one are sampled: they take the time."""
    groups = defaultdict[tuple[str, ...], list[pytest.Item]](list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and not any(map(item.get_closest_marker, ("long", "gpu"))):
            groups[_group(item, mark)].append(item)
    for (_, *kernels), group in groups.items():
        is_of_libraries = "library" in group[0].callspec.params  # type: ignore[attr-defined]
        if is_of_libraries and not any(name == "scalar" or SLOW.search(name) for name in kernels):
            continue
        kept = -(-len(group) // group[0].get_closest_marker("sampled").args[0])  # type: ignore[union-attr]
        for item in sorted(group, key=lambda item: blake2b(item.nodeid.encode()).digest())[kept:]:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _fork_servers_stay() -> Iterator[None]:
    """The last two, so that a worker process of a test need not wait for torch's import. Which test runs is no reason
    for another."""
    kept: deque[fork_server.ForkServer] = deque(maxlen=2)
    choose, environment = fork_server.current, fork_server.worker_environment

    def without_the_test() -> dict[str, str]:
        return {name: value for name, value in environment().items() if name != "PYTEST_CURRENT_TEST"}

    def current() -> fork_server.ForkServer:
        server = choose()
        if server not in kept:
            kept.append(server)
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "current", current)
        patch.setattr(fork_server, "worker_environment", without_the_test)
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # not imported for its own sake: the tests of the core run without it
        sys.modules["torch"].default_generator.manual_seed(0)  # of the CPU: manual_seed writes stacks for other devices
        if "OMP_NUM_THREADS" in os.environ:  # an engine that was told a number has set it for all that come later
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def tied_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """While transformers loads a model it keeps all others of the process from tying their weights, and two that load
    in threads may leave it so for good: every GPT-2 is then saved with an output matrix of its own. Whoever was seen
    first is told of, and later tests are spared."""
    yield
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None:
        return
    kind = loaded.PreTrainedModel
    if kind.tie_weights.__name__ == "tie_weights":
        TYING[:] = [kind.tie_weights]
    elif TYING:
        kind.tie_weights = TYING[0]
        warnings.warn(f"behind {request.node.nodeid} transformers tied no weights any more", stacklevel=1)


TYING: list[object] = []
