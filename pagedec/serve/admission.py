"""Who is let in: how many requests may wait, how much one client may ask for, and whether there is time enough."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pagedec.serve.access import Client, Quota
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import BUSY_SECONDS, Refusal

GAIN = 0.1
"""How much of a new interval between two ends is taken in."""
LEAST_RETRY, MOST_RETRY = 0.1, 60.0
"""Seconds after which a refused client is told to try again."""
KEPT = 1.5
"""Seconds for which the last place is kept for one that was refused: a little longer than it is told to wait."""


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
        self._wakes: list[Callable[[], None]] = []
        self._last_refused = -math.inf  # when one that does not wait found no place
        self._is_others_turn = False  # a stream had the last place the last time

    @contextlib.contextmanager
    def seat(
        self, client: Client, num_tokens: int, seconds_left: float | None, num_of_stream: int | None = None
    ) -> Iterator[None]:
        """A place for one request of at most `num_tokens`, until it has ended. `num_of_stream`: how many requests of
        its stream have one, if it is of a stream whose requests wait. Raises `Refusal`."""
        self._check(client, num_tokens, seconds_left, num_of_stream)
        if self.num_inside + 1 == self._config.max_requests:
            self._is_others_turn = num_of_stream is not None
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
            for wake in self._wakes:
                wake()

    @contextlib.contextmanager
    def waiting(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called whenever a place is given up, after those that came before."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)

    def has_spare(self, num_of_stream: int) -> bool:
        """Whether a stream may have one more place. It leaves the last one to those who do not wait; where it has none
        at all it takes turns with them."""
        num_free = self._config.max_requests - self.num_inside
        if num_free != 1:
            return num_free > 1
        is_kept = self._is_others_turn and self._clock() - self._last_refused < KEPT
        return not num_of_stream and not is_kept

    @property
    def wait(self) -> float:
        """Seconds that a request which came now would wait for a seat, by what has ended lately."""
        ahead = self.num_inside + 1 - self._num_seats
        return max(0, ahead) * self._interval

    def most_tokens(self, client: Client) -> Quota:
        """Tokens that a client's requests may come to together; None: any."""
        return client.quota("tokens", self._config)

    # ---- inside
    def _check(self, client: Client, num_tokens: int, seconds_left: float | None, num_of_stream: int | None) -> None:
        config = self._config
        if self.num_inside >= config.max_requests:
            if num_of_stream is None:
                self._last_refused = self._clock()
            problem = f"{self.num_inside} requests run or wait, which is max_requests"
            raise Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", problem, self._retry())
        if num_of_stream is not None and not self.has_spare(num_of_stream):
            problem = f"{self.num_inside} requests run or wait, and the last place is left to others"
            raise Refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", problem, self._retry())
        most, name = client.quota("requests", config)
        if most is not None and self._requests[client.name] >= most:
            problem = f"{self._requests[client.name]} requests of this client run or wait, which is {name}"
            raise Refusal("RESOURCE_EXHAUSTED", "CLIENT_REQUESTS", problem, self._retry(), name)
        most, name = self.most_tokens(client)
        have = self._tokens[client.name]
        if most is not None and have + num_tokens > most:
            problem = f"this client's requests come to {have} tokens, and this one to {num_tokens}: at most {most}"
            raise Refusal("RESOURCE_EXHAUSTED", "CLIENT_TOKENS", problem, self._retry(), name)
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
