"""What an engine has done so far, as its steps count it; `census.py` counts what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedec.core.acceptance import Acceptance
from pagedec.core.costs import StepCosts
from pagedec.core.request import Request
from pagedec.decoders.sampling import Sampling

PARALLEL, BEAM, SESSION, OTHER = "parallel", "beam", "session", "other"
"""Who has block tables forked: several answers of one sampling, a gang, a client; and all the rest, recomputing
included."""


@dataclass(slots=True)
class Spent:
    """What requests have cost, summed over some of them. A prompt counts from its first row on."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_taken_back: int = 0
    """Tokens that decoders have taken back."""
    forks: dict[str, int] = field(default_factory=lambda: {PARALLEL: 0, BEAM: 0})

    def add(self, request: Request) -> None:
        """Count one more request."""
        self.num_preemptions += request.num_preemptions
        self.num_taken_back += request.num_taken_back
        if request.first_step >= 0:
            self.num_prompt_tokens += request.prompt_length
            self.num_cached_tokens += request.num_cached_tokens
        if request.decoder.gang:
            self.forks[BEAM] += request.num_forks
        elif isinstance(request.decoder, Sampling):
            self.forks[PARALLEL] += request.num_forks


@dataclass(slots=True)
class EngineStats:
    """Counts and seconds since the engine was made. `plan`, `execute` and `settle` are the parts of all steps.

    Blocks are the target lane's, as the last step used them, before what it finished was given back: for KV use over
    time, read them after each step.
    """

    num_steps: int = 0
    num_steps_ahead: int = 0
    """Steps behind which the next one was planned before their answers were there."""
    num_rows: int = 0
    num_finished: int = 0
    num_failed: int = 0
    """Requests that could not be carried out."""
    num_failed_steps: int = 0
    """Steps that the device did not carry out; their requests went on from their histories, or were given up."""
    num_output_tokens: int = 0
    plan_seconds: float = 0.0
    execute_seconds: float = 0.0
    settle_seconds: float = 0.0
    num_blocks: int = 0
    """Of the pool."""
    num_blocks_used: int = 0
    """Held by block tables, or by a copy that the step made."""
    num_blocks_cached: int = 0
    """Held by nobody, but findable in the prefix cache."""
    max_blocks_used: int = 0
    """The most that any step used."""
    num_forced_tokens: int = 0
    """Of requests that have ended: tokens that came of no step of their own, since a constraint allowed no other."""
    ended: Spent = field(default_factory=Spent)
    """What requests have cost that are over, however they ended."""
    drafts: dict[str, Acceptance] = field(default_factory=dict)
    """What became of drafts, by the name of the decoder that proposed them."""
    costs: StepCosts | None = None
    """What steps are believed to take, by their rows; None: no request has drafted as widely as pays yet."""
    num_wished_rows: int = 0
    """Rows of all drafts that were weighed for what they pay."""
    num_granted_rows: int = 0
    """Those of them that were run."""

    def drafts_of(self, decoder: str) -> Acceptance:
        """The counts of one decoder, which grow."""
        return self.drafts.setdefault(decoder, Acceptance())
