"""Timing that survives a noisy machine: contestants take turns, medians are quoted with their spread."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one contestant over all rounds, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def interleave(contestants: Mapping[str, Callable[[], object]], rounds: int = 7, warmup: int = 1) -> dict[str, Timing]:
    """Run all contestants once a round, so that a slow spell of the machine meets them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def ratio(a: Timing, b: Timing) -> tuple[float, float]:
    """Median and half quartile distance of a/b, pair by pair."""
    pairs = Timing(tuple(x / y for x, y in zip(a.seconds, b.seconds, strict=True)))
    return pairs.median, pairs.spread * pairs.median


def self_spread(a: Timing) -> float:
    """What the ratio of a run to the run one round later varies by: the noise that any ratio here has."""
    pairs = [x / y for x, y in zip(a.seconds, a.seconds[1:], strict=False)]
    return Timing(tuple(pairs)).spread if len(pairs) > 1 else 0.0


def machine() -> str:
    """Processor, cores, Python and date, as a results file needs them."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{datetime.date.today()}, {model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def heading(title: str) -> None:
    """The title, the machine and the command, so that the output can be kept as it is."""
    print(f"## {title}\n\n{machine()}\n\n    {' '.join(['python', *sys.argv])}\n")


def table(columns: list[str], rows: Iterable[list[object]]) -> None:
    """Print a Markdown table; numbers come formatted. Each row is printed when it is there: what is stopped, or fails,
    keeps those before."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
    print(flush=True)


def wait_for_huge_pages() -> None:
    """Return when the weights of all engines are in huge pages, as they are a second after an engine was made."""
    for thread in threading.enumerate():
        if thread.name == "pagedec-huge-pages":
            thread.join()
