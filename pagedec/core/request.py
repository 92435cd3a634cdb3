"""A branch: where it stands in the history, and its block tables. A request: a decoder, the history it writes, the
branches that live, the answers that are done; and what happened to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pagedec.core.acceptance import Acceptance
from pagedec.core.adapter_places import Adapter
from pagedec.core.constraint import Constraint
from pagedec.core.history import History
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import Reports, TokenLogprobs
from pagedec.core.protocol import Decoder, Hypothesis, Query
from pagedec.core.sampler import Sampler
from pagedec.core.standing import Standing
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable
from pagedec.errors import RequestError

if TYPE_CHECKING:
    from pagedec.core.parked import Call
    from pagedec.core.resuming import Resume


KNOWN, LAST, GONE = -1, -2, -3
"""What a branch awaits of the step that is out: nothing, all of its tokens are known; the token with which it ends; or
nothing ever more, it has ended."""


@dataclass(slots=True, eq=False)
class Branch:
    """A tip in the history with a table for each lane. `state` is the decoder's, `stop_state` the stopping automaton's;
    both are immutable values, so they fork and roll back for free."""

    tip: int
    tables: dict[str, BlockTable]
    state: Any
    stop_state: int
    prompt_length: int
    score: float = 0.0
    given_length: int = 0
    """Tokens up to here are given: the prompt, or all that stands before the end of what a client appended. Stops look
    behind it."""
    planned_in: int = -1
    """The last step that has work for this branch, or had for the one that it comes of."""
    constraint_state: Any = None
    """The constraint's, where the request has one: an immutable value, too."""
    side: int = 0
    """Of a gang's: its node at the end of the first block that the gang is not known to share; 0: not looked up."""
    awaits: int = KNOWN
    """The draw of the step that is out which gives the token behind its tip; or KNOWN, LAST or GONE."""

    @property
    def table(self) -> BlockTable:
        """The target lane's table."""
        return self.tables["target"]

    def __post_init__(self) -> None:
        self.given_length = self.given_length or self.prompt_length

    def release(self) -> None:
        """Give back all blocks; the tip stays, and the pending chain brings them back."""
        for table in self.tables.values():
            table.release()


@dataclass(slots=True, eq=False)
class Request:
    """One request's whole life. Requests run in the order of `(priority, arrival)`."""

    id: str
    decoder: Decoder
    history: History
    branches: list[Branch]
    stopping: Stopping
    limit: int
    """The longest sequence any branch may reach."""
    priority: int
    arrival: int
    prompt_length: int
    plain: Sampler | None = None
    """The decoder's sampler if it does nothing but sample: its steps need no queries."""
    rules: LogitsRules = NO_RULES
    reports: Reports | None = None
    """None: it reports nothing."""
    constraint: Constraint | None = None
    """What its answers may be; None: anything."""
    forced: Callable[[Branch], Sequence[int]] | None = None
    """The tokens that a branch's constraint leaves no choice about; None: nobody asks."""
    records: dict[int, bytes] = field(default_factory=dict)
    """A plain stream's draw but for its row and position."""
    done: list[Hypothesis] = field(default_factory=list)
    limited_by: str = "max_tokens"
    """What set `limit`."""
    max_time: float | None = None
    """Seconds that it may take; the engine has the clock, and concludes it."""
    concluded: bool = False
    """It was ended before its answers were complete."""
    closed: bool = False
    """No branch lives any more, or the request was aborted."""
    idle: bool = False
    """The last propose asked nothing; it is not asked again before a client's edit."""
    queries: list[Query] = field(default_factory=list)
    started: bool = False
    """It was let in: it holds blocks, or has work in the step that is planned."""
    common_length: int = 0
    """Of a gang: how many tokens all its live branches are known to share; it is looked up when a whole block more may
    be shared."""
    settled_length: int = 0
    """Of a gang: how many tokens all its answers are known to share, the prompt's counted; those behind the prompt are
    told."""
    asked_in: int = -1
    """The step whose queries `queries` are."""
    first_step: int = -1
    """The step in which its first row ran."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    num_forks: int = 0
    """Block tables that its decoder has had forked."""
    num_taken_back: int = 0
    """Tokens that its decoder has taken back."""
    num_released_branches: int = 0
    """Idle branches that gave way, one by one; they come back by their pending chain."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of what its decoder has proposed; what was forced is not among it."""
    standing: Standing | None = None
    """Of one that drafts as widely as pays."""
    home: Call | None = None
    """The parked branch that it goes out from; None: it began with a prompt."""
    scored_from: int | None = None
    """Tokens from here on are reported as a prompt's are, on every branch, and kept by history node; None: none are.
    Nothing behind it is looked up in the prefix cache."""
    seed: int = 0
    """What names its randomness."""
    lora: Adapter | None = None
    """The low-rank adapter that its rows go through, ..."""
    adapter: int = 0
    """... and its number; 0: none."""
    place: int = -1
    """Of its adapter, in the step that is planned; -1: it has none."""
    resume: Resume | None = None
    """What was told of its answers before it was interrupted, elsewhere; None: nothing, or it stands in the history."""
    num_forced_tokens: int = 0
    """Drafted tokens that its constraint left no choice about."""

    def hold(self, hypotheses: Sequence[Hypothesis]) -> None:
        """These answers end, and tables are about to be given up: where they have a home, it keeps what it needs."""
        if self.home is not None:
            self.home.hold(self, hypotheses)

    @property
    def marks_rows(self) -> bool:
        """Its read-out rows are processed, masked or reported."""
        return self.reports is not None or self.rules is not NO_RULES or self.constraint is not None

    def awaits_prompt_report(self, branch: Branch) -> bool:
        """Rows of the prompt that the branch still has must run, even where their KV could be found."""
        reports = self.reports
        if reports is None or reports.reporting.num_prompt_logprobs is None:
            return False
        return reports.num_evaluated < branch.prompt_length

    @property
    def order(self) -> tuple[int, int]:
        """The place among all requests: lower priority first, then who came first."""
        return self.priority, self.arrival

    def output(self, hypothesis: Hypothesis) -> list[int]:
        """The generated tokens of a finished answer."""
        count = max(0, self.history.depth[hypothesis.tip] - self.num_given(hypothesis))
        return [*self.history.suffix(hypothesis.tip, count), *hypothesis.tokens]

    def num_given(self, hypothesis: Hypothesis) -> int:
        """Tokens of a finished answer that were not generated."""
        return self.prompt_length if hypothesis.prompt_length is None else hypothesis.prompt_length


class Progress(NamedTuple):
    """A branch was given new tokens. `rank` is that of the answer it will become. Gangs are not streamed: beams
    reorder.

    `logprobs`: their reports, where the request has any; None for a token that did not come of the model."""

    request: Request
    rank: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Settled(NamedTuple):
    """All answers of a gang that can still come go on with these tokens, which no event before told of. What follows
    behind them is told when the answers end.

    `logprobs`: their reports, where the request has any."""

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Finished(NamedTuple):
    """An answer is complete. Its last tokens were reported as progress before, unless the request's decoder is a
    gang."""

    request: Request
    hypothesis: Hypothesis


class Ended(NamedTuple):
    """No branch lives: all of the request's answers are in `request.done`."""

    request: Request


class Waiting(NamedTuple):
    """The request's decoder asks nothing: nothing happens to it before a client's edit."""

    request: Request


class Failed(NamedTuple):
    """The request cannot be carried out, and is forgotten. `error` names it and says why; others do not notice."""

    request: Request
    error: RequestError


Event: TypeAlias = Progress | Settled | Finished | Ended | Waiting | Failed


def order_of(request: Request) -> tuple[int, int]:
    """Requests' key where they stand in order."""
    return request.order
