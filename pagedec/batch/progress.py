"""How far a job is: a bar on a terminal, a line from time to time elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from tqdm import tqdm

REPORT_SECONDS = 30.0
"""Between two lines of a report: a night's log stays readable."""


class Pace:
    """Counts lines and tokens of one run, with their rates and the time that is left.

    `bar`: draw one. `report`: takes a line every REPORT_SECONDS.
    """

    def __init__(self, num_lines: int, num_before: int, bar: bool, report: Callable[[str], None] | None = None) -> None:
        self.num_lines, self.num_before, self.report = num_lines, num_before, report
        self.bar = tqdm(
            total=num_lines, initial=num_before, desc="lines", unit="line", disable=not bar, dynamic_ncols=True
        )
        self.began = self.reported = time.perf_counter()

    def update(self, num_done: int, num_errors: int, num_tokens: int) -> None:
        now = time.perf_counter()
        seconds = max(now - self.began, 1e-9)
        rates = f"{num_tokens / seconds:.1f} tokens/s"
        self.bar.set_postfix_str(f"{rates}, {num_errors} errors", refresh=False)
        self.bar.update(num_done - self.bar.n)
        if self.report is None or now - self.reported < REPORT_SECONDS:
            return
        self.reported = now
        rate = (num_done - self.num_before) / seconds
        left = tqdm.format_interval((self.num_lines - num_done) / rate) if rate else "unknown time"
        share = f"{num_done} of {self.num_lines} lines ({num_done / self.num_lines:.0%}), {num_errors} with errors"
        self.report(f"{share}; {rate:.2f} lines/s, {rates}, {left} left")

    def close(self) -> None:
        self.bar.close()
