"""How many calls whose requests are streams a replica has at a time: Ray Serve takes each for a request that runs, for
as long as it is open, whether anything comes or not, and sends nothing more to who has `max_ongoing_requests`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from pagedec.serve.calls import RPC
from pagedec.serve.statuses import BUSY_SECONDS, Refusal

Answering = Callable[[Any, Any], AsyncIterator[Any]]
"""A service's method whose requests and answers are streams."""


class StreamPlaces:
    """Half of what a replica takes, and of these a half for one client. Belongs to the replica's event loop."""

    def __init__(self, max_ongoing_requests: int) -> None:
        self._all = max_ongoing_requests
        self._most = max(1, max_ongoing_requests // 2)
        self._most_own = max(1, self._most // 2)
        self._taken: Counter[str] = Counter()

    def within(self, answering: Answering) -> Answering:
        """The method, with a place for each of its calls. Calls raise `Refusal` where there is none."""

        async def answer(requests: Any, context: Any) -> AsyncIterator[Any]:
            with self.taken(RPC.get().client.name):
                async with contextlib.aclosing(answering(requests, context)) as answers:  # type: ignore[type-var]
                    async for one in answers:
                        yield one

        return answer

    @contextlib.contextmanager
    def taken(self, client: str) -> Iterator[None]:
        """A place for one call of a client, until this is left. Raises `Refusal`."""
        own, num_taken = self._taken[client], self._taken.total()
        if num_taken >= self._most:
            self._refuse("QUEUE_FULL", f"{num_taken} calls have streams of requests", "half", "")
        if own >= self._most_own:
            problem = f"{own} calls of this client have streams of requests"
            self._refuse("CLIENT_REQUESTS", problem, "a quarter", "max_ongoing_requests")
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]

    def _refuse(self, reason: str, problem: str, share: str, quota: str) -> None:
        problem += f" at this replica, which may be {share} of max_ongoing_requests, {self._all}, and at least one"
        raise Refusal("RESOURCE_EXHAUSTED", reason, problem, BUSY_SECONDS, quota)
