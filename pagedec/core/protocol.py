"""What decoders, the scheduler and the device say to one another.

A decoder is asked for queries, is given answers, and replies with the next generation of branches. It never sees a
block, a slot or a tensor. Everything here is an immutable value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pagedec.core.constraint import MAX_FORCED, Constraint
from pagedec.core.cutting import cut_drawn
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.sampler import GREEDY, Sampler
from pagedec.core.stopping import NO_STOPPING, Cut, Stopping

if TYPE_CHECKING:
    from pagedec.core.archive import Archive
    from pagedec.core.history import History
    from pagedec.core.request import Branch


# ---------------------------------------------------------------------------------------------------------------- asks
@dataclass(frozen=True, slots=True)
class Sample:
    """For each node, one token per stream. `nodes` None: every node that is run. Answer: int array [num_nodes,
    num_streams].

    A stream (64 bits) names a branch's randomness by what a user can name; the noise is a function of seed, stream, the
    index of the drawn token in the sequence, and the token's id, and of nothing else.
    """

    sampler: Sampler = GREEDY
    streams: tuple[int, ...] = (0,)
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TopK:
    """The `k` most probable tokens of each node, ties to the lower id.

    Answer: (token ids [num_nodes, k], log-probabilities [num_nodes, k] fp32), in descending order. Where the request
    processes its logits, the tokens are the best of the processed ones, and a log-probability is the processed logit
    less the log-sum-exp of the model's own: rules are applied to log-probabilities, without renormalising, as in
    Hugging Face's beam search.
    """

    k: int
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The log-probability of one given token at each of `nodes`. Answer: fp32 array [num_nodes]."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The best `k` continuations of a gang. Every query of the gang has this ask, with the same `k` and `sampler`;
    those with the same `group` are ranked together. Answer: the `Candidates` of the query's group, one object for all
    of its queries.

    Without a `sampler` they are ranked by score. With one, the processed log-probabilities are tempered and cut as it
    says (a temperature of 0 counts as 1; at least `min_tokens_to_keep` tokens of each row are kept at each cut), and
    candidates are drawn without replacement from softmax(score): by score plus Gumbel noise (Kool et al. 2019), whose
    name is the query's `stream`, and which is no part of the scores.
    """

    k: int
    sampler: Sampler | None = None
    stream: int = 0
    group: int = 0
    min_tokens_to_keep: int = 1

    @property
    def nodes(self) -> tuple[int, ...]:
        """Of the root: `RowBest` asks of those that are drafted behind it."""
        return (0,)


@dataclass(frozen=True, slots=True)
class RowBest:
    """The best `k` continuations of each of `nodes` by itself, as `Best` ranks those of a branch whose score is 0: for
    who ranks them in another way, or later, as a gang does that drafts. `streams[i]` names the noise of `nodes[i]`; it
    is read where there is a `sampler`. Answer: one `Candidates` for each node that was run, its parents all 0."""

    k: int
    nodes: tuple[int, ...]
    sampler: Sampler | None = None
    streams: tuple[int, ...] = ()
    min_tokens_to_keep: int = 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """Continuations of a gang's branches, the best first: at most the `k` that were asked for, fewer where no more are
    allowed. Ties go to the higher processed logit, then to the lower place of (branch, token)."""

    parents: np.ndarray  # int32 [num]: a place among the step's queries
    tokens: np.ndarray  # int32 [num]
    scores: np.ndarray  # fp32 [num]: the branch's score plus `logprobs`, added in fp32
    logprobs: np.ndarray  # fp32 [num]: processed (and with a sampler, tempered) log-probabilities, not renormalised
    keys: np.ndarray | None = None  # fp32 [num]: what they are ranked by: scores, with a sampler and their noise


Ask: TypeAlias = Sample | TopK | LogProbs | Best | RowBest


@dataclass(frozen=True, slots=True)
class Query:
    """Evaluate `branch` and answer `asks`. A step may strip the draft: `Answer.draft` says what was really run."""

    branch: Branch
    asks: tuple[Ask, ...]
    draft: Draft | Roll = EMPTY


@dataclass(frozen=True, slots=True)
class Answer:
    """`values[i]` answers `query.asks[i]`; its rows are the ask's nodes, or all of `draft`, the root's first."""

    draft: Draft
    values: tuple[Any, ...]


# ------------------------------------------------------------------------------------------------------------ verdicts
@dataclass(frozen=True, slots=True)
class Child:
    """A branch of the next generation: `parent`, rolled back to `keep` tokens (of the whole sequence, at least 1) or
    continued by the draft nodes of `path` (from 1, each the parent of the next), then by `tokens`. A `score` or `state`
    of None is the parent's. `state` is the decoder's own immutable value."""

    parent: Branch
    tokens: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    keep: int | None = None
    score: float | None = None
    state: Any = None

    @property
    def is_plain(self) -> bool:
        return not self.tokens and not self.path and self.keep is None and self.score is None and self.state is None


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """A gang's next generation as arrays. The same as a `Child` for each entry, and settled without one: the branch of
    query `parents[i]`, continued by `tokens[i]`, with `scores[i]` and, if given, `states[i]`. A parent's last child is
    the parent's `Branch` itself; `rank` is not asked."""

    parents: np.ndarray  # int [num]: places among the step's queries
    tokens: np.ndarray  # int [num]
    scores: np.ndarray  # float [num]
    states: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.parents)

    def objects(self, queries: Sequence[Query]) -> tuple[Child, ...]:
        """The same one by one."""
        states = self.states if self.states is not None else [None] * len(self)
        rows = zip(self.parents.tolist(), self.tokens.tolist(), self.scores.tolist(), states, strict=True)
        return tuple(
            Child(queries[parent].branch, (token,), score=score, state=state) for parent, token, score, state in rows
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer: the history of `tip` followed by `tokens`. Never a table, so it costs no block while it waits.

    `rank` orders a request's answers. `reason` is "stop" or "length"; `stop_token` the token id that ended it, if one
    did; `stop_string` the string that did, behind which the answer's text has `excess_bytes` more. `is_stranded`: rules
    left nothing to go on with.
    """

    tip: int
    tokens: tuple[int, ...] = ()
    rank: int = 0
    score: float = 0.0
    reason: str = "stop"
    stop_token: int | None = None
    stop_string: str | None = None
    excess_bytes: int = 0
    ancestry: tuple[int, ...] = ()
    """Of a gang's: which branch of its generation, by place, each generated token was chosen behind."""
    is_stranded: bool = False
    prompt_length: int | None = None
    """Tokens of it that were not generated; None: the request's prompt. Fewer of one that was rolled back into that."""

    @staticmethod
    def ended(tip: int, cut: Cut, rank: int = 0, score: float = 0.0, prompt_length: int | None = None) -> Hypothesis:
        """The answer that ends behind `tip` as `cut` says."""
        reason, by = cut.reason or "stop", (cut.stop_token, cut.stop_string, cut.excess_bytes)
        return Hypothesis(tip, cut.tokens, rank, score, reason, *by, (), cut.is_stranded, prompt_length)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The next generation. Touched are the branches queried, named as a parent, or dropped: of these only the children
    live on, at their parent's place; the untouched live on as they are. One that leaves no branch ends the request."""

    live: tuple[Child, ...] = ()
    done: tuple[Hypothesis, ...] = ()
    drop: tuple[Branch, ...] = ()
    children: Children | None = None
    """Of a gang: in place of `live`, which is empty then, as is `drop`."""
    settled: int | None = None
    """Of a gang: all answers that can still come agree on so many tokens, the prompt's counted. These are told."""


# ------------------------------------------------------------------------------------------------------------- decoders
@dataclass(frozen=True, slots=True)
class DecoderContext:
    """What a decoder may know of its request: the history it continues (a branch names its text by `branch.tip`; the
    prompt is in it already), the end tokens, the vocabulary's size, the longest sequence any branch may reach, and when
    a branch ends. Lengths count tokens from the sequence's beginning, the prompt's too."""

    history: History
    prompt_length: int
    max_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    stopping: Stopping = NO_STOPPING
    constraint: Constraint | None = None
    draft_forced: bool = True
    """`forced` may be asked."""
    rules: LogitsRules = NO_RULES
    archive: Archive | None = None
    """What requests leave to later ones of the same engine. None: there is no engine."""

    def left(self, branch: Branch) -> int:
        """How many tokens ahead of `branch` a draft is of use: behind them there is room for one more."""
        return self.max_length - self.history.depth[branch.tip] - 1

    def ending(self, branch: Branch, token: int) -> Cut | None:
        """How `branch` ends with `token`: at a stop token, a stop string, or a length; or before it, where rules
        left nothing to draw. None: it goes on.

        Other branches are ended by the scheduler. A gang's are not: their decoder ranks what ends among what goes on,
        and keeps no branch alive behind its end. Raises `Forbidden` for a token that the constraint does not allow:
        its log-probability among an answer's is minus infinity.
        """
        state, room = branch.constraint_state, self.left(branch) + 1
        cut, _ = cut_drawn(self, branch.tip, branch.stop_state, state, (token,), room)
        return cut if cut.reason is not None else None

    def continued(self, branch: Branch, token: int, score: float, state: Any) -> Branch:
        """What `branch` would be in the next generation, continued by a token that does not end it: to look further
        ahead from, where a step has evaluated what stands behind. It has no tables."""
        own, behind = self.constraint, branch.constraint_state
        return replace(
            branch,
            tip=self.history.append_one(branch.tip, token),
            tables={},
            state=state,
            stop_state=self.stopping.next(branch.stop_state, token),
            score=score,
            constraint_state=behind if own is None else own.next(behind, token),
        )

    def forced(self, branch: Branch) -> Sequence[int]:
        """Tokens that must follow `branch`, because its constraint allows no other: a draft that is always right."""
        if self.constraint is None or not self.draft_forced:
            return ()
        left = self.left(branch)
        try:
            return self.constraint.forced(branch.constraint_state, min(MAX_FORCED, left)) if left > 0 else ()
        except Exception:  # it is raised again where the masks are made, and ends the request there
            return ()


class Decoder(Protocol):
    """A decoding algorithm. One instance a request; it holds that request's search state. Derive from this."""

    lanes: tuple[str, ...] = ("target",)
    """("target",), or ("target", "draft") where queries may carry a Roll."""
    gang: bool = False
    """True: all queried branches are evaluated in one step or none, and the decoder ends them itself (beams)."""
    revises: bool = False
    """True: `advance` may take tokens back (`keep`), or drop answers. Like a gang's, they are then told when they end:
    nobody who reads a stream can give tokens back. False: what `advance` appends stands, and is told at once."""
    resumes: bool = False
    """True: a branch's state is the streams that it stands for, and what follows tokens that were drawn before is what
    would have followed. False: an interrupted request has to begin anew."""
    processes_logprobs: bool = False
    """True: the request's rules change log-probabilities instead of logits, without renormalising, as in Hugging Face's
    beam search."""
    scores_given: bool = False
    """True: what it appends is reported token by token, as a prompt is."""
    plain_sampler: Sampler | None = None
    """Not None: all that it does is to draw one token a step for each stream of each branch's state, with this sampler.
    Then it may be stepped without being asked."""
    resting_sampler: Sampler | None = None
    """Not None: how widely it drafts is not its own to say. The likeliest nodes of its drafts are run, as many as pay.
    Where none do it is not asked: it is stepped like one whose `plain_sampler` this is."""
    grant_sizes: Sequence[int] = ()
    """Of one with a `resting_sampler` whose drafts cannot be cut: numbers of rows, of which it is told one as `room`.
    Empty: all nodes of its drafts are asked about, so that any of them may be left out."""
    width: int
    """The most branches that live at once, from 1 to 16384. A gang fails when it is wider, and is refused where so many
    branches do not fit; of others it is what admission expects."""
    initial_state: Any
    """The root branch's state."""

    @abstractmethod
    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """Queries of the branches that want to advance; the others are idle. Where there are none, it is not asked
        again before a client edits the request. Pure and repeatable. `room`: rows that no chain needs, as far as can be
        told; a draft that finds none is stripped."""

    @abstractmethod
    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """The only place where state changes. Called once for each step in which queries of this request were run."""

    @abstractmethod
    def rank(self, state: Any) -> int:
        """The rank of the hypothesis that a branch of this state becomes when the scheduler ends it at a stop: a whole
        number from 0, one for each branch that lives. A stream's reader knows an answer by it. Asked of every `Child`'s
        state, a gang's too."""

    def conclude(self, branches: Sequence[Branch]) -> Sequence[Hypothesis] | None:
        """The answers so far, best first, of a request whose time is over; `branches` are those that live. None: each
        living branch is one as it stands."""
        return None

    def ended(self, answers: Sequence[Hypothesis]) -> None:
        """The request is over, with these answers: what it leaves to later ones goes into `context.archive` now. Not
        called of one that fails or is aborted."""
        return

    def waiting(self) -> Iterable[Hypothesis] | None:
        """Of a gang: the answers that have ended and may still be done. Of others' tokens, and of branches that live no
        more, nothing need be reported then, so it is forgotten. None: whatever ended may be done later."""
        return None
