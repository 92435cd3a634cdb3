"""How many replicas there should be: by what they have to do, and by what their blocks are used.

Ray's controller runs this. It imports nothing of ours, since what it runs is sent to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

KV_USAGE = "kv_usage"
"""What replicas call the share of their blocks that is in use, when they report it."""


def wanted_replicas(
    num_requests: float, kv_usages: Iterable[float], target_ongoing_requests: float, target_kv_usage: float
) -> float:
    """So many that each had `target_ongoing_requests` of the requests that run or wait, and used `target_kv_usage` of
    its blocks; not rounded, and not bounded."""
    return max(num_requests / target_ongoing_requests, sum(kv_usages) / target_kv_usage)


class QueueAndKvPolicy:
    """An autoscaling policy of Ray Serve, which applies its delays and bounds to what this says."""

    def __init__(self, target_ongoing_requests: float, target_kv_usage: float) -> None:
        self._requests, self._kv_usage = target_ongoing_requests, target_kv_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """`context`: Serve's `AutoscalingContext`."""
        reported = (context.aggregated_metrics or {}).get(KV_USAGE, {})
        wanted = wanted_replicas(context.total_num_requests, reported.values(), self._requests, self._kv_usage)
        return max(context.capacity_adjusted_min_replicas, wanted), {}
