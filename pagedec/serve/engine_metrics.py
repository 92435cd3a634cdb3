"""The engine's side of the metrics: its census, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedec.decoders.registry import drafting_names
from pagedec.engine.census import Census, DraftCount
from pagedec.engine.stats import BEAM, OTHER, PARALLEL, SESSION, Spent

Value = Callable[[Census], float]
GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("num_requests_running", "Requests that were let in", lambda c: c.num_running),
    ("num_requests_waiting", "Requests that hold nothing: not let in yet, or gave way", lambda c: c.num_waiting),
    ("sessions", "Open sessions", lambda c: c.num_sessions),
    ("parked_branches", "Branches of sessions", lambda c: c.num_parked_branches),
    ("kv_cache_usage_perc", "KV blocks that are held, from 0 to 1", lambda c: c.num_blocks_used / max(1, c.num_blocks)),
    ("kv_blocks_shared", "KV blocks that several branches hold", lambda c: c.num_blocks_shared),
    ("kv_blocks_saved", "KV blocks more that would be held if branches shared none", lambda c: c.num_blocks_saved),
    ("leaked_blocks", "KV blocks that nobody holds and that are not free: 0, or a bug", lambda c: c.num_blocks_leaked),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("num_preemptions", "Times that requests gave way", lambda c: _spent(c).num_preemptions),
    ("prompt_tokens", "Tokens of prompts", lambda c: _spent(c).num_prompt_tokens),
    ("prefix_cache_queries", "Tokens that were looked for in the prefix cache", lambda c: _spent(c).num_prompt_tokens),
    ("prefix_cache_hits", "Tokens of them that it held", lambda c: _spent(c).num_cached_tokens),
    ("evicted_blocks", "Cached KV blocks that were given up for others", lambda c: c.num_evicted_blocks),
    ("offloaded_blocks", "Evicted KV blocks that the host's memory has taken", lambda c: c.num_offloaded_blocks),
    ("restored_blocks", "KV blocks that it has given back", lambda c: c.num_restored_blocks),
    ("copied_blocks", "KV blocks that were copied for writing", lambda c: c.num_copied_blocks),
    ("engine_steps", "Steps", lambda c: c.num_steps),
    ("engine_step_rows", "Rows of all steps", lambda c: c.num_rows),
    ("engine_failed_steps", "Steps that the device did not carry out", lambda c: c.num_failed_steps),
    ("worker_restarts", "Times that workers were lost and brought back", lambda c: c.num_restarts),
    ("worker_restart_seconds", "What that took, in all", lambda c: c.restart_seconds),
    ("engine_failed_requests", "Requests that could not be carried out", lambda c: c.num_failed),
)
DRAFTS: tuple[tuple[str, str, Callable[[DraftCount], float]], ...] = (
    ("spec_decode_num_drafts", "Drafts that were run", lambda d: d.num_drafts),
    ("spec_decode_num_draft_tokens", "Tokens of drafts", lambda d: d.num_drafted),
    ("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted", lambda d: d.num_accepted),
)
PLACES: tuple[tuple[str, str, Callable[[DraftCount], tuple[int, ...]]], ...] = (
    ("spec_decode_num_drafts_per_pos", "Drafts that had a token in this place, from 0", lambda d: d.drafted),
    ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted up to this place, from 0", lambda d: d.accepted),
)
FIRST_PLACES, MOST_PLACES = 4, 32
"""Places in a draft that are told of from the start; and how many when there were drafts as long. A request may ask for
one of a thousand tokens, and its places would be told of for good."""
NOTHING = DraftCount(0, 0, 0, (), ())
PREFIX = "pagedec_"


class EngineMetrics(Collector):
    """Told when somebody looks: until then the engine counts as it always does."""

    def __init__(self, take: Callable[[], Census]) -> None:
        self._take = take

    def describe(self) -> Iterator[Metric]:
        """The same without asking the engine."""
        return self._families(Census())

    def collect(self) -> Iterator[Metric]:
        """All of them, as the engine stands now."""
        return self._families(self._take())

    def _families(self, census: Census) -> Iterator[Metric]:
        for name, text, value in GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value(census))
        for name, text, value in COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value(census))
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks: held, only findable, or free", labels=["state"])
        free = census.num_blocks - census.num_blocks_used - census.num_blocks_cached
        for state, number in (("used", census.num_blocks_used), ("cached", census.num_blocks_cached), ("free", free)):
            blocks.add_metric([state], number)
        yield blocks
        forks = CounterMetricFamily(PREFIX + "forks", "Block tables that were forked, by who had it", labels=["kind"])
        for kind in (PARALLEL, BEAM, SESSION, OTHER):
            forks.add_metric([kind], (census.forks or {}).get(kind, 0))
        yield forks
        yield from _draft_families(census)


def _draft_families(census: Census) -> Iterator[Metric]:
    drafts = dict.fromkeys(drafting_names(), NOTHING)
    drafts |= {name: count for name, count in (census.drafts or {}).items() if count.num_drafts or name in drafts}
    for name, text, value in DRAFTS:
        family = CounterMetricFamily(PREFIX + name, text, labels=["method"])
        for method, count in drafts.items():
            family.add_metric([method], value(count))
        yield family
    for name, text, places in PLACES:
        family = CounterMetricFamily(PREFIX + name, text, labels=["method", "position"])
        for method, count in drafts.items():
            values = places(count)
            for i in range(min(max(FIRST_PLACES, len(values)), MOST_PLACES)):
                family.add_metric([method, str(i)], values[i] if i < len(values) else 0)
        yield family
    back = CounterMetricFamily(PREFIX + "rollback_tokens", "Tokens that were taken back, by whom", labels=["by"])
    back.add_metric(["session"], census.num_session_taken_back)
    back.add_metric(["decoder"], _spent(census).num_taken_back)
    back.add_metric(["draft"], sum(count.num_drafted - count.num_accepted for count in drafts.values()))
    yield back


def _spent(census: Census) -> Spent:
    return census.spent or Spent()
