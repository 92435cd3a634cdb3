"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counts and seconds since the engine was made. `plan`, `execute` and `settle` are the parts of all steps."""

    num_steps: int = 0
    num_rows: int = 0
    num_finished: int = 0
    num_output_tokens: int = 0
    plan_seconds: float = 0.0
    execute_seconds: float = 0.0
    settle_seconds: float = 0.0

    @property
    def host_seconds_per_step(self) -> float:
        """Mean time of a step in which the device has nothing to do."""
        return (self.plan_seconds + self.settle_seconds) / max(self.num_steps, 1)
