"""Where requests go among many replicas: random, the less loaded of two, or the one that has the prefix.

    python benchmarks/routing.py [--replicas 64] [--seconds 15]

Each replica is a real scheduler with a real block pool and prefix cache; only the device is made up, and so is the
time. A step takes STEP_SECONDS, and ROW_SECONDS for each of its rows. Capacity is how many such requests a second the
replicas get done when each has enough to do and no prefix cache. The first third of a run warms the caches and is not
counted. Replicas report four times a second, and their reports are late. All policies see the same arrivals and know
the same of load; what a decision costs is measured.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import numpy as np
from common import heading, table

from pagedec.core.forward import LaneAnswers
from pagedec.core.limits import SchedulerLimits
from pagedec.core.plan import StepPlan
from pagedec.core.request import Ended, Progress
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams
from pagedec.serve.routing import Choice, ReplicaLoad, Router, prefix_keys

STEP_SECONDS, ROW_SECONDS = 0.02, 50e-6
SEATS, BLOCKS, BLOCK, ROWS = 32, 4096, 16, 2048
"""Of a replica: requests at once, blocks of so many tokens, rows of a step."""
REPORT_SECONDS, LATE_SECONDS = 0.25, 0.1
NUM_PREFIXES, LONGEST_CHAT = 256, 4096
SHARED, CHATS = 0.6, 0.3
"""Parts of the arrivals that begin with a shared prefix, and that are turns of a conversation; the rest is unique."""
HOT = 0.3
"""Part of the arrivals that begin with one prefix, from the moment on at which it gets hot."""
POLICIES = ("random", "less loaded of two", "prefix")
VOCABULARY = 49152


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    policy: str
    rate: float
    """Requests a second, on all replicas."""
    num_replicas: int
    seconds: float
    hot: bool = False
    num_routers: int = 1
    """Which take turns and know nothing of each other."""
    caching: bool = True

    @property
    def counted_from(self) -> float:
        return self.seconds / (2 if self.hot else 3)


@dataclass(slots=True)
class Job:
    """A request on its way."""

    prompt: list[int]
    answer: int
    arrived: float
    router: Router | None = None
    is_turn: bool = False
    is_hot: bool = False
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a run has shown, counted from its warm part on."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    imbalance: list[float] = field(default_factory=list)
    """At each report: the most loaded replica's requests over the mean's."""
    decision_seconds: list[float] = field(default_factory=list)
    key_seconds: list[float] = field(default_factory=list)
    whys: Counter[str] = field(default_factory=Counter)
    hot_replicas: set[int] = field(default_factory=set)
    last_end: float = 0.0
    num_ended: int = 0
    """Requests, those before the warm part too."""


class Workload:
    """Prompts by a seed: prefixes of 512 to 2,048 tokens by Zipf's law with 32 to 256 of their own behind, turns of
    conversations, unique prompts; answers of 16 to 96 tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.text: list[int] = numbers.integers(10, VOCABULARY, 1 << 20).tolist()
        self.prefixes = [self.own(512, 2048) for _ in range(NUM_PREFIXES)]
        self.hot = self.own(2048, 2048)
        self.weights = list(itertools.accumulate(1 / rank for rank in range(1, NUM_PREFIXES + 1)))
        self.resting: deque[tuple[float, list[int]]] = deque()  # conversations whose turn has ended, and when

    def own(self, low: int, high: int) -> list[int]:
        start = self.rng.randrange(len(self.text) - high)
        return [self.rng.randrange(10, VOCABULARY), *self.text[start : start + self.rng.randint(low, high) - 1]]

    def job(self, now: float, hot: bool) -> Job:
        kind, answer = self.rng.random(), self.rng.randint(16, 96)
        [prefix] = self.rng.choices(self.prefixes, cum_weights=self.weights)
        own, turn = self.own(32, 256), self.rng.random() < 0.75
        if hot and self.rng.random() < HOT:
            return Job(self.hot + own, answer, now, is_hot=True)
        if kind < SHARED:
            return Job(prefix + own, answer, now)
        if kind >= SHARED + CHATS:
            return Job(self.own(256, 2048), answer, now)
        if turn and self.resting and self.resting[0][0] + 2.0 < now:
            return Job(self.resting.popleft()[1] + own, answer, now, is_turn=True)
        return Job(prefix + own, answer, now, is_turn=True)

    def arrivals(self, case: Case) -> Iterator[float]:
        rng, now = random.Random(1), 0.0
        while (now := now + rng.expovariate(case.rate)) < case.seconds:
            yield now


class Replica:
    """A scheduler, and a device that takes time and draws what comes to its mind."""

    def __init__(self, number: int, caching: bool) -> None:
        self.number = number
        self.scheduler = Scheduler(
            SchedulerLimits(
                num_blocks={"target": BLOCKS},
                vocab_size=VOCABULARY,
                block_size=BLOCK,
                max_num_seqs=SEATS,
                max_num_batched_tokens=ROWS,
                enable_prefix_caching=caching,
            )
        )
        self.jobs: dict[str, Job] = {}
        self.plan: StepPlan | None = None
        self.names = itertools.count()
        self.numbers = np.random.default_rng(number)

    def add(self, job: Job) -> None:
        name = str(next(self.names))
        make = functools.partial(make_decoder, SamplingParams())
        self.scheduler.add(self.scheduler.admit(name, make, job.prompt, Stopping(max_tokens=job.answer)))
        self.jobs[name] = job

    def start(self) -> float | None:
        """Seconds that the step takes which begins now; None: there is nothing to do."""
        plan = self.scheduler.plan()
        if not plan.forwards:
            self.scheduler.settle(plan, {})
            return None
        self.plan = plan
        return STEP_SECONDS + ROW_SECONDS * plan.num_rows

    def end(self, now: float, outcome: Outcome, case: Case) -> list[Job]:
        """Jobs that end with the step."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        draws = self.numbers.integers(10, VOCABULARY, len(plan.forwards["target"].draws), np.int32)
        ended = []
        for event in self.scheduler.settle(plan, {"target": LaneAnswers(draws)}):
            job, counts = self.jobs[event.request.id], self.jobs[event.request.id].arrived >= case.counted_from
            if isinstance(event, Progress):
                if not job.tokens and counts:
                    outcome.ttft.append(now - job.arrived)
                job.tokens += event.tokens
            elif isinstance(event, Ended):
                outcome.num_ended += 1
                if counts:
                    outcome.prompt_tokens += len(job.prompt)
                    outcome.cached_tokens += event.request.num_cached_tokens
                ended.append(self.jobs.pop(event.request.id))
        return ended

    def load(self) -> ReplicaLoad:
        pool = self.scheduler.pools["target"]
        running = sum(request.started for request in self.scheduler.requests)
        usage = 1 - pool.num_available / pool.num_blocks
        return ReplicaLoad(running, len(self.jobs) - running, usage, SEATS)


class Simulation:
    """Replicas, routers and what happens next."""

    def __init__(self, case: Case) -> None:
        self.case, self.outcome, self.workload = case, Outcome(), Workload()
        self.replicas = [Replica(i, case.caching) for i in range(case.num_replicas)]
        self.routers = [Router() for _ in range(case.num_routers)]
        for router in self.routers:
            for one in self.replicas:
                router.add(str(one.number), BLOCKS * BLOCK)
        self.rng = random.Random(2)
        self.agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.turns = itertools.count(), itertools.count()

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), what))

    def run(self) -> Outcome:
        for when in self.workload.arrivals(self.case):
            self.at(when, self.arrive)
        self.at(0.0, self.look)
        while self.agenda:
            now, _, what = heapq.heappop(self.agenda)
            what(now)
        return self.outcome

    def arrive(self, now: float) -> None:
        job = self.workload.job(now, self.case.hot and now >= self.case.counted_from)
        router = self.routers[next(self.turns) % len(self.routers)]
        began = time.perf_counter()
        keys = prefix_keys(job.prompt) if self.case.policy == "prefix" else ()
        made = time.perf_counter()
        choice = self.choose(router, keys, now)
        ended = time.perf_counter()
        if now >= self.case.counted_from:
            self.outcome.key_seconds.append(made - began)
            self.outcome.decision_seconds.append(ended - made)
            self.outcome.whys[choice.why] += 1
            self.outcome.whys["overridden"] += choice.overridden
            if job.is_hot:
                self.outcome.hot_replicas.add(int(choice.replica))
        self.send(self.replicas[int(choice.replica)], job, router, now)

    def choose(self, router: Router, keys: tuple[bytes, ...], now: float) -> Choice:
        if self.case.policy == "random":
            return Choice(str(self.rng.randrange(len(self.replicas))), 0, "load")
        return router.choose(keys, now=now)

    def send(self, replica: Replica, job: Job, router: Router, now: float) -> None:
        job.router = router
        replica.add(job)
        if replica.plan is None:
            self.begin(replica, now)

    def begin(self, replica: Replica, now: float) -> None:
        seconds = replica.start()
        if seconds is not None:
            self.at(now + seconds, functools.partial(self.finish, replica))

    def finish(self, replica: Replica, now: float) -> None:
        for job in replica.end(now, self.outcome, self.case):
            assert job.router is not None
            job.router.done(str(replica.number), now=now)
            self.outcome.last_end = now
            if job.is_turn and len(job.prompt) < LONGEST_CHAT:
                self.workload.resting.append((now, job.prompt + job.tokens))
        self.begin(replica, now)

    def look(self, now: float) -> None:
        """Replicas report; the reports come later."""
        loads = [(str(one.number), one.load()) for one in self.replicas]
        self.at(now + LATE_SECONDS, lambda _: self.tell(loads, now))
        if self.case.counted_from <= now < self.case.seconds:
            counts = [load.num_running + load.num_waiting for _, load in loads]
            self.outcome.imbalance.append(max(counts) / max(1e-9, statistics.fmean(counts)))
        if now < self.case.seconds:
            self.at(now + REPORT_SECONDS, self.look)

    def tell(self, loads: list[tuple[str, ReplicaLoad]], at: float) -> None:
        for router in self.routers:
            for name, load in loads:
                router.report(name, load, at=at)


def simulate(case: Case) -> Outcome:
    return Simulation(case).run()


def capacity(num_replicas: int) -> float:
    """Requests a second that replicas get done, each by itself and without a prefix cache, when all are there at once:
    as one does, times their number."""
    outcome = simulate(Case("random", 1000.0, 1, 0.4, caching=False))
    return num_replicas * outcome.num_ended / outcome.last_end


def shown(case: Case, outcome: Outcome) -> list[object]:
    """A line of a table."""
    ttft, whys = np.array(outcome.ttft), outcome.whys
    decisions = statistics.fmean(outcome.decision_seconds)
    num = len(outcome.decision_seconds)
    return [
        case.policy + (f", {case.num_routers} routers" if case.num_routers > 1 else ""),
        f"{100 * outcome.cached_tokens / outcome.prompt_tokens:.1f} %",
        f"{statistics.fmean(outcome.imbalance):.2f}",
        f"{1e3 * ttft.mean():.0f}",
        f"{1e3 * np.percentile(ttft, 99):.0f}",
        f"{100 * whys['prefix'] / num:.0f} %",
        f"{100 * whys['overridden'] / num:.1f} %",
        f"{1e6 * decisions:.1f}",
        f"{1 / decisions:,.0f}",
        f"{1e6 * statistics.fmean(outcome.key_seconds):.0f}" if case.policy == "prefix" else "",
    ]


COLUMNS = [
    "policy", "hit rate, tokens", "most / mean load", "ttft ms, mean", "p99", "by prefix", "overridden",
    "us a decision", "decisions/s", "us for keys",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="of simulated time, a run")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.8, 1.2], help="parts of the capacity")
    parser.add_argument("--routers", type=int, default=4, help="of the last line for each load")
    given = parser.parse_args()
    heading(f"Routing: {given.replicas} replicas in a simulation")
    full = capacity(given.replicas)
    print(f"Capacity without prefix caches: {full:.0f} requests a second.\n")
    groups: dict[str, list[Case]] = {}
    for load in given.loads:
        cases = [Case(policy, load * full, given.replicas, given.seconds) for policy in POLICIES]
        groups[f"Load {load:.2f}"] = [*cases, replace(cases[-1], num_routers=given.routers)]
    middle = 0.8 * full
    groups[f"Load 0.80, one prefix suddenly has {100 * HOT:.0f} % of the arrivals; counted from there on"] = [
        Case(policy, middle, given.replicas, given.seconds, hot=True) for policy in POLICIES
    ]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for name, cases in groups.items():
            outcomes = list(processes.map(simulate, cases))
            print(f"{name}: {cases[0].rate:.0f} requests a second\n")
            table(COLUMNS, [shown(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)])
            if cases[0].hot:
                counts = ", ".join(f"{c.policy} {len(o.hot_replicas)}" for c, o in zip(cases, outcomes, strict=True))
                print(f"Replicas that were sent the hot prefix: {counts}\n", flush=True)


if __name__ == "__main__":
    main()
