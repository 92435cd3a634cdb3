"""What `replicas.py` holds the router against: any replica for any request."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import RequestRouter


class RandomRouter(RequestRouter):
    """Draws a replica for each request."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """One that is drawn, then the others."""
        drawn = random.sample(candidate_replicas, len(candidate_replicas))
        return [[one] for one in drawn]
