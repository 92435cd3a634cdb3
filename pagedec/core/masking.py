"""A step's masks: collected with its rows, made when these are on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from pagedec.core.constraint import Allowed, Constraint, permits
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.forward import EVERYTHING, LISTED, LaneForward, Masks, split_rolled
from pagedec.core.request import Branch, Request
from pagedec.errors import RequestError, counted, told


@dataclass(slots=True)
class MaskedWork:
    """The rows of one branch that are masked, as nodes of its draft: each has the state of its own path."""

    request: Request
    branch: Branch
    nodes: Sequence[int] = (0,)
    draft: Draft | Roll = EMPTY
    roll: int = -1
    """The place of a Roll among the draft lane's."""


@dataclass(slots=True)
class StepMasks:
    """Makes a step's masks, when it is called with what the draft lane has rolled: int32, one chain behind the other.

    Rows of a request whose constraint raises may draw anything: it is among `failed`, and ends with the step.
    """

    vocab_size: int
    works: list[MaskedWork] = field(default_factory=list)
    rolling: LaneForward | None = None
    """The draft lane's, which rolls what some of them depend on."""
    failed: dict[Request, RequestError] = field(default_factory=dict)

    def __call__(self, rolled: np.ndarray) -> Masks:
        chains = split_rolled(self.rolling, rolled) if self.rolling is not None and len(rolled) else []
        rows: list[list[Allowed]] = []
        for work in self.works:
            made: list[Allowed] = [None] * len(work.nodes)
            if work.request not in self.failed:
                try:
                    made = self._rows_of(work, chains)
                except Exception as error:
                    self._fail(work.request, error)
            rows.append(made)
        masks = pack_rows([*chain.from_iterable(rows)], self.vocab_size)
        if not outside(masks.tokens, self.vocab_size):
            return masks
        for work, made in zip(self.works, rows, strict=True):
            listed = [row for row in made if row is not None and row.dtype != np.uint32]
            if any(outside(row, self.vocab_size) for row in listed):
                self._fail(work.request, ValueError(f"it names tokens that are not from 0 to {self.vocab_size - 1}"))
                made[:] = [None] * len(made)
        return pack_rows([*chain.from_iterable(rows)], self.vocab_size)

    def _fail(self, request: Request, error: Exception) -> None:
        problem = RequestError(request.id, f"its constraint cannot say what is allowed: {told(error)}")
        problem.__cause__ = error
        self.failed[request] = problem

    def _rows_of(self, work: MaskedWork, chains: Sequence[Sequence[int]]) -> list[Allowed]:
        constraint, branch, draft = work.request.constraint, work.branch, work.draft
        stopping = work.request.stopping
        assert constraint is not None
        if isinstance(draft, Roll):
            draft = draft.draft(chains[work.roll])
        states = {0: branch.constraint_state}
        if draft.tokens:
            states = node_states(constraint, stopping.stops, branch.constraint_state, draft)
        depths = draft.depths()
        rows: list[Allowed] = []
        for node in work.nodes:
            if node not in states:  # behind a token that cannot be accepted
                rows.append(None)
                continue
            allowed = constraint.allowed(states[node])
            if allowed is not None and not (allowed.any() if allowed.dtype == np.uint32 else len(allowed)):
                length = work.request.history.depth[branch.tip] + depths[node]
                raise ValueError(f"nothing is allowed behind {counted(length, 'token')}")
            banned = stopping.banned(branch.stop_state, depths[node])
            rows.append(without(allowed, banned, self.vocab_size) if banned else allowed)
        return rows


def node_states(constraint: Constraint, stops: frozenset[int], state: Any, draft: Draft) -> dict[int, Any]:
    """The state at each node of a draft behind `state`, but at those that cannot be accepted."""
    states = {0: state}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
        if parent not in states or token in stops or not permits(constraint.allowed(states[parent]), token):
            continue
        after = constraint.next(states[parent], token)
        if not constraint.is_over(after):
            states[node] = after
    return states


def without(allowed: Allowed, banned: tuple[int, ...], vocab_size: int) -> Allowed:
    """What is allowed but for `banned`; all of it where nothing else is: an answer that can only end, ends."""
    if allowed is not None and allowed.dtype != np.uint32:
        left = allowed[~np.isin(allowed, _ids(banned))]
        return left if len(left) else allowed
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32) if allowed is None else allowed
    left = words & ~_words(banned, len(words))
    return left if left.any() else allowed


@lru_cache(maxsize=8)
def _ids(tokens: tuple[int, ...]) -> np.ndarray:
    """A request's stop tokens, of which there may be a vocabulary, for all of its rows."""
    return np.array(tokens, np.int64)


@lru_cache(maxsize=8)
def _words(tokens: tuple[int, ...], width: int) -> np.ndarray:
    """The same as `width` words of bits; what lies behind them is left out."""
    ids, bits = _ids(tokens), np.zeros(width * 32, np.uint8)
    bits[ids[ids < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def outside(tokens: np.ndarray, vocab_size: int) -> bool:
    """Whether some of the ids are none of the vocabulary's."""
    return len(tokens) > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size


def pack_rows(rows: Sequence[Allowed], vocab_size: int) -> Masks:
    """What each row allows, as arrays."""
    width = -(-vocab_size // 32)
    words = [row for row in rows if row is not None and row.dtype == np.uint32]
    listed = [row for row in rows if row is not None and row.dtype != np.uint32]
    places = np.full(len(rows), EVERYTHING, np.int32)
    counts = np.zeros(len(rows) + 1, np.int32)
    num_words = 0
    for i, row in enumerate(rows):
        if row is None:
            continue
        if row.dtype == np.uint32:
            places[i] = num_words
            num_words += 1
        else:
            places[i] = LISTED
            counts[i + 1] = len(row)
    return Masks(
        places,
        np.stack(words) if words else np.empty((0, width), np.uint32),
        np.cumsum(counts, dtype=np.int32),
        np.concatenate(listed).astype(np.int32, copy=False) if listed else np.empty(0, np.int32),
    )
