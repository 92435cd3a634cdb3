"""Who is let in: how many requests may wait, how much one client may ask for, and whether there is time enough."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pagedec.serve.access import Client
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import BUSY_SECONDS, Refusal

GAIN = 0.1
"""How much of a new interval between two ends is taken in."""
LEAST_RETRY, MOST_RETRY = 0.1, 60.0
"""Seconds after which a refused client is told to try again."""


class Admission:
    """Counts what runs and waits. All of it belongs to the server's event loop."""

    def __init__(self, config: ServerConfig, num_seats: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_seats`: requests that a step can hold; the rest wait."""
        self._config, self._num_seats, self._clock = config, num_seats, clock
        self.num_inside = 0
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._interval = 0.0  # seconds between the ends of two requests while all seats are taken
        self._last_end: float | None = None

    @contextlib.contextmanager
    def seat(self, client: Client, num_tokens: int, seconds_left: float | None) -> Iterator[None]:
        """A place for one request of at most `num_tokens`, until it has ended. Raises `Refusal`."""
        self._check(client, num_tokens, seconds_left)
        self.num_inside += 1
        self._requests[client.name] += 1
        self._tokens[client.name] += num_tokens
        try:
            yield
        finally:
            self._note_end()
            self.num_inside -= 1
            self._requests[client.name] -= 1
            self._tokens[client.name] -= num_tokens
            if not self._requests[client.name]:
                del self._requests[client.name], self._tokens[client.name]

    @property
    def wait(self) -> float:
        """Seconds that a request which came now would wait for a seat, by what has ended lately."""
        ahead = self.num_inside + 1 - self._num_seats
        return max(0, ahead) * self._interval

    def most_tokens(self, client: Client) -> int | None:
        """Tokens that a client's requests may come to together; None: any."""
        return client.max_tokens or self._config.max_client_tokens

    # ---- inside
    def _check(self, client: Client, num_tokens: int, seconds_left: float | None) -> None:
        config = self._config
        if self.num_inside >= config.max_requests:
            problem = f"{self.num_inside} requests run or wait, which is max_requests"
            raise Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", problem, self._retry())
        most = client.max_requests or config.max_client_requests or math.inf
        if self._requests[client.name] >= most:
            problem = f"{self._requests[client.name]} requests of this client run or wait, which is max_client_requests"
            raise Refusal("RESOURCE_EXHAUSTED", "CLIENT_REQUESTS", problem, self._retry(), "max_client_requests")
        limit = self.most_tokens(client) or math.inf
        have = self._tokens[client.name]
        if have + num_tokens > limit:
            problem = f"this client's requests come to {have} tokens, and this one to {num_tokens}: at most {limit}"
            raise Refusal("RESOURCE_EXHAUSTED", "CLIENT_TOKENS", problem, self._retry(), "max_client_tokens")
        if seconds_left is not None and self.wait > seconds_left:
            problem = f"it would wait some {self.wait:.1f} seconds, and its deadline is in {max(0.0, seconds_left):.1f}"
            raise Refusal("RESOURCE_EXHAUSTED", "DEADLINE_TOO_SHORT", problem, self._retry())

    def _retry(self) -> float:
        return min(max(self.wait or BUSY_SECONDS, LEAST_RETRY), MOST_RETRY)

    def _note_end(self) -> None:
        now, last = self._clock(), self._last_end
        is_full = self.num_inside > self._num_seats
        self._last_end = now if is_full else None
        if is_full and last is not None:
            self._interval += (GAIN if self._interval else 1.0) * (now - last - self._interval)
