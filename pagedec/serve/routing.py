"""Which replica a request goes to: the one that has most of its prompt's KV, unless that one has too much to do.

Pure: it knows neither connections nor clocks, and the same calls with the same seed choose alike.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from pagedec.errors import InvalidArgument, NotFound, PagedecError
from pagedec.fields import Integer, Number, check_fields, option
from pagedec.serve.prompt_keys import Key, Prompt, prefix_keys
from pagedec.serve.routing_config import RoutingConfig

__all__ = ["Choice", "Key", "NoReplica", "Prompt", "ReplicaLoad", "Router", "SessionLost", "prefix_keys"]
MAX_NOTES = 256
"""Times at which something was sent or has ended that are kept apart, for each replica."""
_PRESSURE = attrgetter("pressure")


class NoReplica(PagedecError):
    """There is nobody to send a request to."""

    code = "UNAVAILABLE"

    def __str__(self) -> str:
        return "no replica is there to take the request"


class SessionLost(NotFound):
    """A session's replica is gone, and its blocks with it."""

    def __init__(self, replica: str) -> None:
        super().__init__("replica", replica, "the sessions that it held have ended with it")
        self.args = (replica,)  # so that the error survives pickling between processes


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica says of itself. Raises `InvalidArgument`."""

    num_running: int = option(0, Integer("requests that it runs"))
    num_waiting: int = option(0, Integer("requests that wait for a seat"))
    kv_usage: float = option(0.0, Number("share of its blocks that requests hold", low=0, high=1))
    num_seats: int = option(64, Integer("requests that it can run at once", low=1))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why."""

    replica: str
    num_matched: int
    """Leading chunks of its prompt that the replica is taken to have."""
    why: Literal["session", "prefix", "load"]
    overridden: bool = False
    """Another replica has more of the prompt, and was too loaded."""


class _Record:
    """What is known of one replica: what it said last, what was sent since, and whose prefixes it has."""

    __slots__ = (
        "bit",
        "capacity",
        "held",
        "kv_usage",
        "name",
        "notes",
        "num_more",
        "num_requests",
        "num_reported",
        "num_seats",
        "num_sent",
        "pressure",
        "reported_at",
    )

    def __init__(self, name: str, bit: int, capacity: int, num_seats: int) -> None:
        self.name, self.bit, self.capacity, self.num_seats = name, bit, capacity, num_seats
        self.held: OrderedDict[Key, None] = OrderedDict()  # least recently used first; a key is older than those before
        self.num_reported, self.kv_usage, self.reported_at = 0, 0.0, -math.inf
        self.num_sent = 0  # by this router, and not ended
        self.notes: deque[tuple[float, int]] = deque()  # of what the last report misses: when, how many more or fewer
        self.num_more = 0  # their sum
        self.num_requests = 0
        self.pressure = 0.0, 0.0  # by which the less loaded of two is told

    def weigh(self) -> None:
        """Its load has changed."""
        self.num_requests = max(0, self.num_reported + self.num_more)
        self.pressure = self.num_requests / self.num_seats, self.kv_usage


class Router:
    """Chooses replicas, and remembers what it chose.

    **Who wins.** Of the replicas that have a part of the prompt, at least `min_match` of its chunks, the one that has
    most; of several that have as much, the less loaded of two drawn ones. A replica is passed over when it is
    overloaded: when it has both more than `balance_abs` requests beyond, and more than `balance_rel` times, what the
    least loaded one has (in proportion to their seats), or when its blocks are in use up to `max_kv_usage` and the
    least loaded one's are not. The two thresholds are those of SGLang's router (`--balance-abs-threshold`,
    `--balance-rel-threshold`), which compares the most with the least loaded worker and then leaves prefixes aside for
    everybody; here only the replica in question is left, since a hot one says nothing of the others. The least share is
    that of Ray Serve's PrefixCacheAffinityRouter (`match_rate_threshold`). Where nobody is left, two replicas are drawn
    and the less loaded one wins (Mitzenmacher 2001): with reports that are late, "the least loaded of all" would be one
    replica for everybody.

    **Load** is what runs and waits by the last report, with what was sent since and without what has ended since, over
    the seats; the use of blocks decides between equals. A replica that never reports has what was sent and not ended.

    **Memory.** A replica is taken to have the prefixes that were sent to it last, up to its capacity. That is a guess:
    nothing fails where it is wrong. A decision costs time for the prompt's chunks and the number of replicas, however
    many requests there have been.
    """

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self.config = config or RoutingConfig()
        self._replicas: dict[str, _Record] = {}
        self._all: list[_Record] = []  # the same, at hand
        self._mask = 0  # of all their bits
        self._slots: list[_Record | None] = []  # by the number of its bit
        self._holders: dict[Key, int] = {}  # bits of the replicas that have it
        self._draw = random.Random(self.config.seed)

    # ---- replicas
    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of those that there are, in the order in which they came."""
        return tuple(self._replicas)

    @property
    def num_chunks(self) -> int:
        """Chunks that are remembered, of all replicas together."""
        return sum(len(replica.held) for replica in self._replicas.values())

    def add(self, replica: str, num_tokens: int | None = None) -> None:
        """A replica has come, and has nothing yet. `num_tokens`: what its pool holds. Raises `InvalidArgument` if it is
        there already."""
        if replica in self._replicas:
            raise InvalidArgument("replica", replica, "must not be the name of one that is there")
        if num_tokens is not None and num_tokens < 1:
            raise InvalidArgument("num_tokens", num_tokens, "must be at least 1, or None")
        config = self.config
        capacity = config.replica_chunks if num_tokens is None else max(1, num_tokens // config.chunk_ids)
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        found = _Record(replica, 1 << slot, capacity, config.num_seats)
        self._slots[slot : slot + 1] = [found]
        self._replicas[replica] = found
        self._all.append(found)
        self._mask |= found.bit

    def remove(self, replica: str) -> None:
        """A replica is gone, and all that is known of it. Raises `NotFound`."""
        found = self._replicas.pop(replica, None)
        if found is None:
            raise NotFound("replica", replica)
        self._all.remove(found)
        self._mask &= ~found.bit
        self._slots[found.bit.bit_length() - 1] = None
        for key in found.held:
            self._release(key, found)

    def report(self, replica: str, load: ReplicaLoad, at: float = math.inf) -> None:
        """What a replica says of itself, as it was at the time `at`, by the clock of `choose` and `done`: what was sent
        later comes on top. Nothing follows from one that is older than the last, or of a replica that is gone."""
        found = self._replicas.get(replica)
        if found is None or at < found.reported_at:
            return
        if at < math.inf:
            found.reported_at = at
        found.num_reported, found.kv_usage = load.num_running + load.num_waiting, load.kv_usage
        found.num_seats = load.num_seats
        while found.notes and found.notes[0][0] <= at:
            found.num_more -= found.notes.popleft()[1]
        found.weigh()

    def load(self, replica: str) -> int:
        """Requests that a replica is taken to have. Raises `NotFound`."""
        found = self._replicas.get(replica)
        if found is None:
            raise NotFound("replica", replica)
        return found.num_requests

    # ---- requests
    def choose(
        self,
        keys: Sequence[Key],
        session: str | None = None,
        *,
        among: Collection[str] | None = None,
        now: float = 0.0,
    ) -> Choice:
        """Where a request goes that has these `prefix_keys`; it counts as sent, until `done`.

        `session`: the replica that has the request's session, which wins always. `among`: those that come into
        question; None: all. Raises `SessionLost` if the session's replica is gone, `NoReplica` if there is none.
        """
        if session is not None:
            home = self._replicas.get(session)
            if home is None:
                raise SessionLost(session)
            num_matched = self._num_matched(keys, home)
            self._send(home, keys, now)
            return Choice(session, num_matched, "session")
        wanted = None if among is None else set(among)
        replicas = self._all if wanted is None else [one for one in self._all if one.name in wanted]
        if not replicas:
            raise NoReplica
        least: _Record | None = None
        num_most, overridden = 0, False
        for num_matched, mask in self._levels(keys, self._mask if wanted is None else sum(one.bit for one in replicas)):
            num_most = max(num_most, num_matched)
            if num_matched < max(1, self.config.min_match * len(keys)):
                break
            least = least or min(replicas, key=_PRESSURE)
            ready = [one for one in self._of(mask) if not self._overloaded(one, least)]
            if ready:
                found = self._lighter(ready)
                self._send(found, keys, now)
                return Choice(found.name, num_matched, "prefix", overridden)
            overridden = True
        found = self._lighter(replicas)
        num_matched = self._num_matched(keys, found)
        self._send(found, keys, now)
        return Choice(found.name, num_matched, "load", overridden and num_matched < num_most)

    def done(self, replica: str, now: float = 0.0) -> None:
        """A request that was sent there has ended, or has not been taken. Of a replica that is gone it is nothing."""
        found = self._replicas.get(replica)
        if found is not None and found.num_sent:
            found.num_sent -= 1
            _note(found, now, -1)

    # ---- inside
    def _send(self, replica: _Record, keys: Sequence[Key], now: float) -> None:
        replica.num_sent += 1
        _note(replica, now, 1)
        held, holders, bit = replica.held, self._holders, replica.bit
        for key in reversed(keys):  # what is before is used later, so it is forgotten later
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                holders[key] = holders.get(key, 0) | bit
        while len(held) > replica.capacity:
            self._release(held.popitem(last=False)[0], replica)

    def _release(self, key: Key, replica: _Record) -> None:
        left = self._holders[key] & ~replica.bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _levels(self, keys: Sequence[Key], mask: int) -> list[tuple[int, int]]:
        """How many leading keys are matched, and the bits of those that match so many and no more; most first."""
        levels = []
        for num_matched, key in enumerate(keys):
            left = self._holders.get(key, 0) & mask
            if left != mask:
                levels.append((num_matched, mask & ~left))
                mask = left
            if not mask:
                break
        if mask:
            levels.append((len(keys), mask))
        return levels[::-1]

    def _num_matched(self, keys: Sequence[Key], replica: _Record) -> int:
        return next((i for i, key in enumerate(keys) if key not in replica.held), len(keys))

    def _of(self, mask: int) -> Iterator[_Record]:
        while mask:
            low = mask & -mask
            found = self._slots[low.bit_length() - 1]
            assert found is not None
            yield found
            mask ^= low

    def _overloaded(self, replica: _Record, least: _Record) -> bool:
        config = self.config
        have, part = replica.num_requests, least.num_requests * replica.num_seats / least.num_seats
        if have - part > config.balance_abs and have > config.balance_rel * part:
            return True
        return replica.kv_usage >= config.max_kv_usage > least.kv_usage

    def _lighter(self, replicas: list[_Record]) -> _Record:
        """The less loaded of two that are drawn; of equals the first, which is any."""
        if len(replicas) > 1:
            replicas = self._draw.sample(replicas, 2)
        return min(replicas, key=_PRESSURE)


def _note(replica: _Record, now: float, change: int) -> None:
    notes = replica.notes
    replica.num_more += change
    replica.weigh()
    if notes and notes[-1][0] == now:
        change += notes.pop()[1]
    elif len(notes) == MAX_NOTES:  # they are dated later than they were, so a late report may miss none
        first, second = notes.popleft(), notes.popleft()
        notes.appendleft((second[0], first[1] + second[1]))
    notes.append((now, change))
