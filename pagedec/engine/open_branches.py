"""What a session is made of: branches with names, calls that go out from them, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pagedec.core.adapter_places import Adapter
from pagedec.core.history import History
from pagedec.core.parked import Call, Parked, Parking

if TYPE_CHECKING:
    from pagedec.engine.engine import Engine

ROOT = "0"
"""The name of a session's first branch; the i-th fork of branch `a` is `a.i`."""
KEEPS = ("first", "all", "none")
SCORES = "scores"
"""In the place of `keep`: the call reads only."""
FEW_TOKENS = 1024
"""A history of so many is not worth being written anew."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What sessions may hold: one of them, and all of an engine together; and for how many seconds one lives that
    nobody uses (None: for ever)."""

    max_session_branches: int = 16384
    max_session_tokens: int = 1 << 20
    max_parked_branches: int = 65536
    max_parked_tokens: int = 1 << 22
    session_ttl: float | None = None


@dataclass(slots=True, eq=False)
class Owner:
    """One session: the history that its branches stand in, and what they have in common."""

    history: History
    seed: int
    salt: str
    priority: int
    ttl: float | None
    prompt_length: int
    adapter: Adapter | None = None
    """Which its calls go through."""
    branches: dict[str, OpenBranch] = field(default_factory=dict)
    """By name, in the order in which they were made."""
    last_used: float = 0.0
    num_calls: int = 0
    num_promised: int = 0
    """Tokens that the answers of its calls may add; what they have added already is counted twice."""
    num_coming: int = 0
    """Branches that its calls may add."""
    counted: int = 0
    """Tokens as they were last counted: of the history, but for those that are known to be dead."""
    size_before: int = FEW_TOKENS
    """The history's size when it was last looked at what of it is dead, ..."""
    num_dead: int = 0
    """... how many tokens were, of those that are still in it and that nobody can have come back to, ..."""
    num_loose: int = 0
    """... and how many at most have died since."""

    @property
    def expiry(self) -> float:
        """When it is closed if nobody uses it before."""
        return math.inf if self.ttl is None else self.last_used + self.ttl

    @property
    def tips(self) -> list[int]:
        """Where its branches are."""
        return [branch.place[1] for branch in self.branches.values()]


@dataclass(slots=True, eq=False)
class OpenBranch(Parked):
    """A parked branch with a name, which a client has in hand."""

    owner: Owner | None = None
    """None: it was closed."""
    name: str = ROOT
    num_forks: int = 0
    num_given: int = 0
    """How many tokens it has of the branch that it was made from."""
    epoch: int = 0
    """How often something was taken back; with the same noise the same text would come again."""
    why_closed: str = ""


class OpenCall(Call):
    """A client's call. `kept`: the new branches, where all answers are kept."""

    __slots__ = ("keep", "kept", "num_coming", "num_promised", "owner", "request_id", "size_before", "waits")

    def __init__(self, branch: OpenBranch, parking: Parking, request_id: str, keep: str | int, waits: bool) -> None:
        """`waits`: when it has ended nothing is kept until somebody has read it to its end."""
        super().__init__(branch, parking, keep not in ("none", SCORES))
        self.request_id, self.keep, self.waits = request_id, keep, waits
        self.kept: list[OpenBranch] = []
        self.owner: Owner | None = None
        """Whose it counts as, which may outlive its branch; None: it does not, or no more."""
        self.num_promised = self.num_coming = 0
        """Tokens and branches that its answers may add."""
        self.size_before = 0
        """Tokens of its session when it was begun."""


def seed_of(seed: int, name: str, epoch: int) -> int:
    """What a call draws with. A session's root draws with the session's own seed until something was taken back."""
    if name == ROOT and not epoch:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{name}/{epoch}".encode(), digest_size=8).digest(), "little")


def closing(branches: Iterable[OpenBranch]) -> Callable[[Engine], Any]:
    """What closes branches, for the loop."""

    def close(engine: Engine) -> None:
        for branch in branches:
            engine.sessions.close(engine, branch)

    return close
