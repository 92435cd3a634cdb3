"""Branches in a client's own hands: generate, append, roll back, fork and close, each at its own time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Query, Sample, Verdict
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.decoders.sampling import sampler_of
from pagedec.params import SamplingParams
from tests.algorithms.reference import Draw, sample


@dataclass(frozen=True, slots=True)
class InteractiveParams(SamplingParams):
    """How tokens are drawn in this session."""


def derived(stream: int, what: str, count: int) -> int:
    """A stream named by another one and an ordinal, never by an object's id."""
    return int.from_bytes(blake2b(f"{stream}/{what}/{count}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class SessionState:
    """A branch's name, its randomness, and how many tokens it still has to generate."""

    name: str = "s"
    stream: int = 0
    num_forks: int = 0
    num_rollbacks: int = 0
    remaining: int = 0

    def after_fork(self) -> SessionState:
        return replace(self, num_forks=self.num_forks + 1)

    def forked(self, name: str) -> SessionState:
        """The new branch of the fork that `self` has just counted."""
        return SessionState(name, derived(self.stream, "fork", self.num_forks))

    def rolled_back(self) -> SessionState:
        """A new epoch: with the old noise the same text would come back."""
        count = self.num_rollbacks + 1
        return replace(self, stream=derived(self.stream, "epoch", count), num_rollbacks=count)


@decoder("test-interactive", params=InteractiveParams)
class Interactive(Decoder):
    """Each branch generates while its state says so, else it is idle."""

    width = 1
    initial_state = SessionState()

    def __init__(self, params: InteractiveParams, context: DecoderContext) -> None:
        self.sampler = sampler_of(params)

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """One token for each branch that has some left to generate."""
        return [Query(b, (Sample(self.sampler, (b.state.stream,)),)) for b in branches if b.state.remaining]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """One token less to go."""
        live = []
        for query, answer in zip(queries, answers, strict=True):
            state = replace(query.branch.state, remaining=query.branch.state.remaining - 1)
            live.append(Child(query.branch, (int(answer.values[0][0, 0]),), state=state))
        return Verdict(tuple(live))

    def rank(self, state: SessionState) -> int:
        """A session's branches end by the client's hand; none outranks another."""
        return 0


def program(seed: int, name: str) -> list[tuple[str, int | str]]:
    """What the client does with one branch, in any order, before it closes it or leaves it idle."""
    rng = random.Random(f"{seed}/{name}")
    actions: list[tuple[str, int | str]] = [("generate", rng.randrange(1, 5))]
    for _ in range(rng.randrange(2, 5)):
        action = rng.choice(["generate", "rollback", "append", "fork"])
        if action != "fork":
            actions.append((action, rng.randrange(1, 5)))
        elif len(name) < 3:
            actions.append((action, name + "abcdefgh"[sum(kind == "fork" for kind, _ in actions)]))
    return [*actions, (rng.choice(["close", "idle"]), 0)]


def appended(value: int, room: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens that an append of `value` stands for."""
    return tuple((value + i) % vocab_size for i in range(min(value, room)))


def session(
    draw: Draw, prompt: Sequence[int], seed: int, limit: int, vocab_size: int, state: SessionState | None = None
) -> dict[str, list[int]]:
    """The same on plain lists: every branch's final text by name."""
    state, tokens = state or SessionState(), list(prompt)
    texts: dict[str, list[int]] = {}
    for action, value in program(seed, state.name):
        if action == "fork":
            assert isinstance(value, str)
            state = state.after_fork()
            texts |= session(draw, tokens, seed, limit, vocab_size, state.forked(value))
            continue
        assert isinstance(value, int)
        if action == "generate" and limit > len(tokens):
            tokens = sample(draw, tokens, state.stream, min(value, limit - len(tokens)))
        elif action == "append":
            tokens += appended(value, limit - len(tokens), vocab_size)
        elif action == "rollback":
            tokens, state = tokens[: max(1, len(tokens) - value)], state.rolled_back()
    return texts | {state.name: tokens}


@dataclass(slots=True)
class Client:
    """Carries out the programs through `edit`, each branch as soon as it is idle, whatever its siblings are doing.

    `branches` and `edit` are the running session's; `tokens` gives a tip's whole text.
    """

    branches: Callable[[], Sequence[Branch]]
    edit: Callable[[Verdict], object]
    tokens: Callable[[int], list[int]]
    seed: int
    limit: int
    vocab_size: int
    programs: dict[str, list[tuple[str, int | str]]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)

    def act(self) -> None:
        """Everything that can be done before the next step."""
        for branch in list(self.branches()):
            name = branch.state.name
            if name not in self.programs:
                self.programs[name] = program(self.seed, name)
            found: Branch | None = branch
            while found is not None and not found.state.remaining and self.programs[name]:
                found = self._apply(found, *self.programs[name].pop(0))
        alive = self.branches()
        started = all(branch.state.name in self.programs for branch in alive)
        resting = all(not branch.state.remaining for branch in alive)
        if alive and started and resting and not any(self.programs.values()):
            self.edit(Verdict(drop=tuple(alive)))

    def _apply(self, branch: Branch, action: str, value: int | str) -> Branch | None:
        state, tokens = branch.state, self.tokens(branch.tip)
        room = self.limit - len(tokens)
        if action == "fork":
            assert isinstance(value, str)
            state = state.after_fork()
            verdict = Verdict((Child(branch, state=state), Child(branch, state=state.forked(value))))
        else:
            assert isinstance(value, int)
            if action in ("close", "idle"):
                self.texts[state.name] = tokens
            verdict = {
                "generate": Verdict((Child(branch, state=replace(state, remaining=min(value, room))),)),
                "append": Verdict((Child(branch, appended(value, room, self.vocab_size)),)),
                "rollback": Verdict((Child(branch, keep=max(1, len(tokens) - value), state=state.rolled_back()),)),
                "idle": Verdict((Child(branch),)),
                "close": Verdict(drop=(branch,)),
            }[action]
        self.edit(verdict)
        return next((other for other in self.branches() if other.state.name == state.name), None)
