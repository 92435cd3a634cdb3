"""Sessions that clients hold: whose they are, how much of them a client may have, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pagedec.engine.sessions import Sessions
from pagedec.errors import InvalidArgument, NotFound, PagedecError, SessionLimit, Shown, counted
from pagedec.llm import AsyncLLM, AsyncSession, AsyncSessionBranch
from pagedec.llm.async_session import conversations_of, recount
from pagedec.lora.request import LoRARequest
from pagedec.serve.access import Client
from pagedec.serve.server_config import ServerConfig
from pagedec.text.conversation import Conversation

LOOK_SECONDS = 0.25
"""How often it is looked whether leases have ended."""
ID_BYTES = 24
"""Of a session's name, which nobody may guess."""
SHARE = 2
"""A client who has no quota may have the 1/SHARE-th part of what the engine allows all of them."""
MESSAGE_BYTES = 8
"""Of a chat's messages, tools and variables, which a session keeps, that count as one token at least. Text that becomes
tokens has fewer for each."""
SHOWN_ID = 64
"""Characters of a session's name, or a branch's, that a message repeats."""


TAG_END = "."
"""Between a server's tag and the rest of a session's name; in neither of them."""


def tagged(tag: str, name: str) -> str:
    """A session's name that says where it is, if there is a tag."""
    return f"{tag}{TAG_END}{name}" if tag else name


def tag_of(session_id: str) -> str:
    """The tag that a session's name begins with; "" where it has none."""
    tag, end, _ = session_id.partition(TAG_END)
    return tag if end else ""


@dataclass(slots=True, eq=False)
class Lease:
    """One session in a client's hands, with its open branches by their names."""

    session_id: str
    number: int
    client: str
    session: AsyncSession
    ttl: float
    opened: float
    lora: LoRARequest | None = None
    """The adapter of all its branches."""
    messages: WeakKeyDictionary[Conversation, int] = field(default_factory=WeakKeyDictionary)
    """Bytes of what a chat has brought, messages, tools and variables, by the conversations up to there."""
    num_bytes: int = 0
    """Of those that some branch has, as they were last counted."""
    num_bringing: int = 0
    """Calls that may give messages to branches which nobody knows yet."""
    branches: dict[str, AsyncSessionBranch] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Each counted once however many branches share it; or more, for what a chat keeps that is no token."""
        return max(self.session.session_state().num_tokens, tokens_of(self.num_bytes))

    def find(self, name: str) -> AsyncSessionBranch:
        """An open branch. Raises `NotFound`."""
        branch = self.branches.get(name)
        if branch is None:
            raise NotFound("branch", name[:SHOWN_ID], "it was closed, or never was")
        return branch


class Addition(NamedTuple):
    """What a call may add. `field`: what of its message asks for so much; `words`: what the field comes to, where it is
    not that number; `beside`: branches that are there already, whatever else the client holds."""

    number: int = 0
    field: str = ""
    words: str = ""
    beside: int = 0

    @property
    def shown(self) -> int | Shown:
        """What an error says that the field is."""
        return Shown(self.words) if self.words else self.number


NOTHING = Addition()


class Leases:
    """All sessions of a server. Belongs to its event loop.

    How long a session lives says the engine; `watch` has it look at its clock though nothing runs.
    """

    def __init__(self, config: ServerConfig, tag: str = "") -> None:
        """`tag`: what the names of all sessions begin with, for those who look for the server that has one."""
        self._config, self._tag = config, tag
        self._sessions: Sessions | None = None
        self._leases: dict[str, Lease] = {}
        self._of: dict[str, dict[str, Lease]] = {}  # by their clients' names
        self._numbers = itertools.count(1)
        self._branches: Counter[str] = Counter()  # of clients, those that are just being made too
        self._tokens: Counter[str] = Counter()  # of clients, those that are just being made
        self._num_bytes = 0  # of all chats
        self._num_closed = 0  # branches that the engine had closed when it was last looked which they are

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, sessions: Sessions) -> None:
        """The model is there, and these are its engine's."""
        self._sessions = sessions

    # ---- who has what
    def ttl(self, wanted: float | None) -> float:
        """The lease that a client gets. Raises `InvalidArgument`."""
        if wanted is not None and wanted <= 0:
            raise InvalidArgument("ttl", wanted, "must be longer than 0 seconds")
        return min(self._config.lease if wanted is None else wanted, self._config.max_lease)

    def find(self, session_id: str, client: Client) -> Lease:
        """A client's own session. Raises `NotFound`, for another's too."""
        lease = self._of.get(client.name, {}).get(session_id)
        if lease is None:
            raise NotFound("session", session_id[:SHOWN_ID], "it was closed, or was not used for as long as its lease")
        return lease

    def listed(self, client: Client, behind: int, count: int) -> list[Lease]:
        """A client's sessions in the order in which they were opened, those after number `behind`."""
        own = (lease for lease in self._of.get(client.name, {}).values() if lease.number > behind)
        return list(itertools.islice(own, count))

    # ---- what comes and goes
    async def make_room(self, client: Client, tokens: Addition) -> None:
        """Where a client may not have so many tokens more, have those looked for that are dead in his sessions, and
        messages that no branch has: what was taken back counts until then."""
        limit, _ = self._most_tokens(client)
        if 0 < tokens.number <= limit < self._held_tokens(client, limit - tokens.number) + tokens.number:
            await recount([lease.session for lease in self._of.get(client.name, {}).values()])
            for lease in self._of.get(client.name, {}).values():
                self._weigh(lease)

    def _most_tokens(self, client: Client) -> tuple[int, str]:
        """What a client's sessions may hold, and the quota that says so."""
        assert self._sessions is not None, "a model is loaded before it is asked"
        limit, quota = client.quota("session_tokens", self._config)
        return limit or max(1, self._sessions.limits.max_parked_tokens // SHARE), quota

    def _held_tokens(self, client: Client, enough: int) -> int:
        """What a client's sessions hold, and are about to. Where those of all clients hold so few that it is enough to
        know that: theirs."""
        assert self._sessions is not None
        coming, own = self._tokens[client.name], self._of.get(client.name, {}).values()
        total = self._sessions.num_tokens + tokens_of(self._num_bytes) + coming
        return total if total <= enough else coming + sum(lease.num_tokens for lease in own)

    @contextlib.contextmanager
    def room(self, client: Client, branches: Addition, tokens: Addition) -> Iterator[None]:
        """Until this is left, a client has so many branches and tokens more than his sessions hold. Raises
        `SessionLimit` where he may not, and `InvalidArgument` where he never may."""
        config, name, sessions = self._config, client.name, self._sessions
        assert sessions is not None, "a model is loaded before it is asked"
        allowed = sessions.limits
        most, quota = client.quota("branches", config)
        most = most or max(1, allowed.max_parked_branches // SHARE)
        held = self._branches[name]
        if branches.number > most - branches.beside:
            problem = (
                f"must be at most {most - branches.beside}: a client's sessions may have {counted(most, 'branch')}"
            )
            problem += f" ({quota}), the one that it goes on from included"
            raise InvalidArgument(branches.field, branches.shown, problem)
        if branches.number and held + branches.number > most:
            raise SessionLimit(quota, most, _too_many(counted(held, "branch"), branches.number))
        limit, quota = self._most_tokens(client)
        if tokens.number > limit:
            problem = f"must come to at most {limit}: a client's sessions may hold no more ({quota})"
            raise InvalidArgument(tokens.field, tokens.shown, problem)
        held = self._held_tokens(client, limit - tokens.number) if tokens.number else 0
        if held + tokens.number > limit:
            raise SessionLimit(quota, limit, _too_many(counted(held, "token"), tokens.number))
        self._branches[name] += branches.number
        self._tokens[name] += tokens.number
        try:
            yield
        finally:
            self._branches[name] -= branches.number
            self._tokens[name] -= tokens.number
            self._forget(name)

    def open(
        self,
        session: AsyncSession,
        client: Client,
        ttl: float,
        conversation: Conversation | None = None,
        num_bytes: int = 0,
        lora: LoRARequest | None = None,
    ) -> Lease:
        """A new session is this client's. `conversation`, `num_bytes`: see `keep`."""
        number = next(self._numbers)
        lease = Lease(
            tagged(self._tag, secrets.token_urlsafe(ID_BYTES)), number, client.name, session, ttl, time.time(), lora
        )
        self._leases[lease.session_id] = lease
        self._of.setdefault(client.name, {})[lease.session_id] = lease
        self.add(lease, [session])
        self.keep(lease, conversation, num_bytes)
        return lease

    def keep(self, lease: Lease, conversation: Conversation | None, num_bytes: int) -> None:
        """A chat has brought messages, tools or variables of so many bytes, negative: they were refused; up to there
        this is the conversation, None: it is no chat. They count until `make_room` finds that no branch has them."""
        if conversation is not None and self._leases.get(lease.session_id) is lease:
            lease.messages[conversation] = lease.messages.get(conversation, 0) + num_bytes
            lease.num_bytes += num_bytes
            self._num_bytes += num_bytes

    @contextlib.contextmanager
    def keeping(self, lease: Lease, conversation: Conversation | None, num_bytes: int) -> Iterator[None]:
        """The same while it is being appended. A call that is cancelled may have been carried out."""
        self.keep(lease, conversation, num_bytes)
        try:
            with self.bringing(lease):
                yield
        except PagedecError:
            self.keep(lease, conversation, -num_bytes)
            raise

    @contextlib.contextmanager
    def bringing(self, lease: Lease) -> Iterator[None]:
        """Until this is left, a call may have made branches, or given a message to one: what the session keeps is not
        counted anew meanwhile."""
        lease.num_bringing += 1
        try:
            yield
        finally:
            lease.num_bringing -= 1

    def add(self, lease: Lease, branches: Iterable[AsyncSessionBranch]) -> None:
        """A session has new branches. Where it was closed meanwhile they were, too, or nobody holds them."""
        for branch in branches if self._leases.get(lease.session_id) is lease else ():
            lease.branches[branch.name] = branch
            self._branches[lease.client] += 1
            if branch.closed:  # meanwhile: that may have been looked at
                self._num_closed = -1

    def drop(self, lease: Lease, names: Iterable[str] | None = None) -> None:
        """Branches were closed; None: all of the session."""
        for name in list(lease.branches) if names is None else names:
            if lease.branches.pop(name, None) is not None:
                self._branches[lease.client] -= 1
        if not lease.branches and self._leases.pop(lease.session_id, None) is not None:
            self._num_bytes -= lease.num_bytes
            own = self._of[lease.client]
            del own[lease.session_id]
            if not own:
                del self._of[lease.client]
        self._forget(lease.client)

    async def watch(self, llm: AsyncLLM) -> None:
        """Close sessions whose leases have ended. Returns when the model was given up."""
        sessions = llm.engine.sessions
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if llm.loop.closed:
                return
            if self._leases or sessions.dropped:
                await asyncio.wrap_future(llm.loop.call(lambda engine: engine.sessions.tidy(engine)))
            if self._num_closed != sessions.num_closed:  # going through thousands takes long
                self._num_closed = sessions.num_closed
                self._drop_closed()

    def _drop_closed(self) -> None:
        """Let go of what the engine has closed: leases that have ended, and branches of calls that were cancelled
        behind it."""
        for lease in list(self._leases.values()):
            if not lease.session.session_state().num_branches:
                self.drop(lease)
            elif gone := [name for name, branch in lease.branches.items() if branch.closed]:
                self.drop(lease, gone)

    def _weigh(self, lease: Lease) -> None:
        """Count what a chat's branches have; the first one, which is the session, also when it was closed."""
        if lease.num_bringing or self._leases.get(lease.session_id) is not lease:
            return
        had = conversations_of([lease.session, *lease.branches.values()])
        num_bytes = sum(lease.messages.get(conversation, 0) for conversation in had)
        self._num_bytes += num_bytes - lease.num_bytes
        lease.num_bytes = num_bytes

    def _forget(self, name: str) -> None:
        """Keep no number of a client who has nothing."""
        for counter in (self._branches, self._tokens):
            if not counter[name]:
                del counter[name]


def tokens_of(num_bytes: int) -> int:
    """What a chat's messages, tools and variables count as, at least."""
    return -(-num_bytes // MESSAGE_BYTES)


def _too_many(held: str, more: int) -> str:
    asked = f"{more} more {'is' if more == 1 else 'are'} asked for"
    return f"a client's sessions may hold no more; they hold {held}, and {asked}"
