"""Beam search and beam sampling, alone and in groups, with the semantics of Hugging Face's releases.

What differs between these is small: `beam_pool.py` scores answers and says when a search is over, `beam_selection.py`
says who lives on. Where there are fewer candidates than beams (a small vocabulary, hard rules) fewer beams live, and
fewer answers may come; Hugging Face fills up with copies whose scores are -1e9 less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pagedec.core.cutting import closing
from pagedec.core.protocol import (
    Answer,
    Best,
    Candidates,
    Children,
    Decoder,
    DecoderContext,
    Hypothesis,
    Query,
    Verdict,
)
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders.agreement import Agreement, Node
from pagedec.decoders.beam_pool import Pool, Pooled, Scoring
from pagedec.decoders.beam_selection import Closers, by_score, continued, diversified, repeated, select
from pagedec.decoders.registry import decoder
from pagedec.params import BeamSearchParams


@dataclass(slots=True, eq=False)
class Group:
    """Beams that are ranked together, and what they have finished. Without groups there is one."""

    number: int
    pool: Pool
    done: bool = False
    held: list[Pooled] = field(default_factory=list)
    """Of its pool, what may still be returned."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Who lives on of a group: by place among the step's branches, tokens, and scores."""

    parents: np.ndarray
    tokens: np.ndarray
    scores: np.ndarray


@decoder("beam", params=BeamSearchParams)
class Beam(Decoder):
    """A branch's state is its beam's number: 0 .. beam_width - 1, one group's after the other's, best first within a
    group.

    Groups follow 4.38's search whatever `hf_semantics` says: later releases have none. Answers that have ended are kept
    as a tip and a token, and cost no block while they wait.
    """

    gang = True
    initial_state = 0

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        self.params, self.context = params, context
        self.width, self.group_width = params.beam_width, params.beam_width // params.num_beam_groups
        # one beam is no beam search in Hugging Face: rules change logits, it ends with its first end, and has one token
        is_search = self.processes_logprobs = self.width > 1
        self.span = context.max_length - context.prompt_length
        semantics = "4.38" if params.num_beam_groups > 1 else params.hf_semantics
        self.v5 = semantics == "5"
        early_stopping = params.early_stopping if is_search else True
        scoring = Scoring(params.length_penalty, early_stopping, self.span, semantics)
        self.groups = [Group(i, Pool(self.group_width, scoring)) for i in range(params.num_beam_groups)]
        self.closers = Closers(context.stopping, context.vocab_size)
        ends = (*context.eos_token_ids, *context.stopping.ends)
        self.pads = [ends[0]] * self.group_width if ends and ends[0] < context.vocab_size else []
        """What a group that is done counts as choosing."""
        self._set_ask()
        self.length = 0
        self.written: list[int] = []
        """Of each branch the tokens of its text, as bits: asked for by groups with a repetition penalty alone."""
        self.scores = np.zeros(1, np.float32)  # these four: of the branches that live, in the order of their numbers
        self.streams = np.zeros(1, np.uint64)
        self.agreement = Agreement(context.prompt_length)
        self.nodes: list[Node] = [self.agreement.root]
        self.numbers: list[np.ndarray] = [np.zeros(1, np.int32)]
        """Of each generation: its branches' numbers."""
        self.numberings: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        self.behind: list[np.ndarray] = []
        """Of each generation but the root's: the places of its branches' parents in the one before."""

    def _set_ask(self) -> None:
        """How many candidates a group looks at (`num`), and what is asked for: more where some may be displaced, or
        may end where nothing told so before."""
        params, stopping, width = self.params, self.context.stopping, self.group_width
        per_beam = max(2, 1 + len(stopping.ends)) if self.width > 1 else 1
        self.num = (min(2, per_beam) if params.do_sample and not self.v5 else per_beam) * width
        spare = 0 if stopping.strings is None else len(stopping.strings.strings) * width
        if params.diversity_penalty:
            spare += (self.width - width) * width  # so many candidates may be of tokens that others have chosen
        sampler = None
        if params.do_sample:
            sampler = Sampler(params.temperature or 1.0, params.top_k, params.top_p, params.min_p, params.seed or 0)
        keep = per_beam if params.do_sample else 1
        self.ask = Best(self.num + spare, sampler, min_tokens_to_keep=keep)
        self.asks = [(replace(self.ask, group=group.number),) for group in self.groups]

    # ---- asking
    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """All beams, in the order of their numbers."""
        ask, ordered = self.ask, sorted(branches, key=_number)
        if ask.sampler is not None:
            k, sampler, keep, streams = ask.k, ask.sampler, ask.min_tokens_to_keep, self.streams.tolist()
            asks = [(Best(k, sampler, stream, 0, keep),) for stream in streams]
            return [Query(branch, own) for branch, own in zip(ordered, asks, strict=True)]
        asks, width = self.asks, self.group_width
        return [Query(branch, asks[branch.state // width]) for branch in ordered]

    # ---- choosing
    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """One step of every group, in their order."""
        branches = [query.branch for query in queries]
        return self._step(
            branches, {b.state // self.group_width: a.values[-1] for b, a in zip(branches, answers, strict=True)}
        )

    def _step(self, branches: Sequence[Branch], best: Mapping[int, Candidates]) -> Verdict:
        """One level of the search: `branches` in the order of their numbers, and the best of each group."""
        self.length += 1
        taken: list[int] = []  # tokens that groups have chosen in this step
        chosen: list[tuple[Group, Chosen]] = []
        for group in self.groups:
            if group.done:
                taken += self.pads
                continue
            candidates = best[0 if self.length == 1 else group.number]
            if taken and self.params.diversity_penalty:
                candidates = self._diversified(candidates, taken, branches)
            own = self._choose(group, candidates, branches)
            taken += own.tokens.tolist()
            if not group.done:
                chosen.append((group, own))
        if not chosen:
            return Verdict(done=self._answers([group.pool for group in self.groups]) or self._stranded(branches))
        return self._go_on(chosen)

    def _choose(self, group: Group, candidates: Candidates, branches: Sequence[Branch]) -> Chosen:
        """Who ends, who lives on, and whether the group's search is over."""
        last = self.length >= self.span
        if self.ask.sampler is not None:  # they stand in the order in which they were drawn
            candidates = by_score(candidates, self.num)
        parents, tokens, scores = candidates.parents, candidates.tokens, candidates.scores
        ends = self.closers.find(self.length - 1, branches, parents, tokens)
        if self.context.constraint is not None:
            ends |= closing(self.context, branches, parents, tokens)
        if last and self.v5:
            ends[:] = True
        running, ended = select(ends, self.group_width)
        if self.ask.sampler is not None:  # those that fill up what stop strings have ended may be better ones
            running = running[np.argsort(-scores[running], kind="stable")]
        for i in ended.tolist():
            self._finish(group, float(scores[i]), branches, int(parents[i]), int(tokens[i]))
        own = Chosen(parents[running], tokens[running], scores[running])
        if len(running) == 0:
            group.done = True
        else:
            best = own.scores[0] if self.v5 else scores[: self.num].max()
            group.done = group.pool.is_done(float(best), self.length)
        if last and not group.done:  # only in 4.38: what is left is finished as it stands
            group.done = True
            for total, parent, token in zip(
                own.scores.tolist(), own.parents.tolist(), own.tokens.tolist(), strict=True
            ):
                self._finish(group, total, branches, parent, token)
        return own

    def _finish(self, group: Group, total: float, branches: Sequence[Branch], at: int, token: int) -> None:
        """Take `token` behind the branch at place `at` for an answer, if it is good enough."""
        score = group.pool.scoring.score(total, self.length)
        if group.pool.accepts(score):
            branch = branches[at]
            cut = self.context.ending(branch, token)
            hypothesis = Hypothesis(branch.tip, (token,), reason="length")
            if cut is not None:
                hypothesis = Hypothesis.ended(branch.tip, cut)
            group.pool.add(score, Pooled(hypothesis, self.length - 1, at))

    def _diversified(self, candidates: Candidates, taken: Sequence[int], branches: Sequence[Branch]) -> Candidates:
        """The candidates as the tokens of earlier groups leave them."""
        counts = np.bincount(np.array(taken), minlength=self.context.vocab_size)[candidates.tokens]
        with np.errstate(over="ignore"):  # as large as that, it forbids
            amounts = np.float32(self.params.diversity_penalty) * counts.astype(np.float32)
        if self.params.repetition_penalty != 1:
            if not self.written:
                self.written = [bits_of(self.context.history.tokens(branch.tip)) for branch in branches]
            for i in np.flatnonzero(counts).tolist():
                if self.written[int(candidates.parents[i])] >> int(candidates.tokens[i]) & 1:
                    amounts[i] = repeated(candidates.logprobs[i], amounts[i], self.params.repetition_penalty)
        return diversified(candidates, self.scores[candidates.parents], amounts)

    # ---- going on
    def _go_on(self, chosen: Sequence[tuple[Group, Chosen]]) -> Verdict:
        """The next generation, and what is settled with it."""
        [(_, one)] = chosen if len(chosen) == 1 else [(None, joined([own for _, own in chosen]))]
        parents, tokens, self.scores = one.parents, one.tokens, one.scores
        self.numbers.append(self._numbered(tuple((group.number, len(own.parents)) for group, own in chosen)))
        self.behind.append(parents)
        if self.ask.sampler is not None:
            self.streams = continued(self.streams[parents], tokens)
        if self.written:
            pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
            self.written = [self.written[parent] | 1 << token for parent, token in pairs]
        settled = self._settle(parents.tolist(), tokens.tolist())
        children = Children(parents, tokens, self.scores, self.numbers[-1].tolist())
        return Verdict(children=children, settled=settled)

    def _numbered(self, sizes: tuple[tuple[int, int], ...]) -> np.ndarray:
        """The numbers of the branches of groups that have so many each: one array for all generations alike."""
        if sizes not in self.numberings:
            parts = [np.arange(size, dtype=np.int32) + number * self.group_width for number, size in sizes]
            self.numberings[sizes] = np.concatenate(parts)
        return self.numberings[sizes]

    def _settle(self, places: Sequence[int], tokens: Sequence[int]) -> int:
        """How many tokens all agree on that live or wait and may be returned."""
        fresh: list[Pooled] = []
        gone: list[Node] = []
        for group in self.groups:
            held = group.pool.entries[: self.params.num_answers]
            new = [entry for entry in held if entry.node is None]
            if new:
                kept = set(map(id, held))
                gone += [entry.node for entry in group.held if id(entry) not in kept and entry.node is not None]
                group.held, fresh = held, fresh + new
        parents = [self.nodes[entry.at] for entry in fresh] + [self.nodes[place] for place in places]
        last = [entry.hypothesis.tokens[0] for entry in fresh]
        nodes = self.agreement.grow(parents, [*last, *tokens], distinct=len(self.groups) == 1)
        for entry, node in zip(fresh, nodes, strict=False):
            entry.node = node
        self.agreement.release(self.nodes)
        self.agreement.release(gone)
        self.nodes = nodes[len(fresh) :]
        return self.agreement.settle()

    # ---- ending
    def conclude(self, branches: Sequence[Branch]) -> Sequence[Hypothesis]:
        """The best so far: what has ended, and the beams that live as they stand, ranked together."""
        pools = [group.pool.copy() for group in self.groups]
        for at, branch in enumerate(sorted(branches, key=_number)):
            group = self.groups[branch.state // self.group_width]
            pool, length = pools[group.number], max(self.length, 1)
            score = pool.scoring.score(branch.score, length)
            if not group.done and pool.accepts(score):
                pool.add(score, Pooled(Hypothesis(branch.tip, reason="length"), self.length, at))
        return self._answers(pools)

    def waiting(self) -> Sequence[Hypothesis]:
        """What the pools hold."""
        return [entry.hypothesis for group in self.groups for entry in group.pool.entries]

    def _stranded(self, branches: Sequence[Branch]) -> tuple[Hypothesis, ...]:
        """The beams as they stand, where rules leave no token to go on with and nothing has ended."""
        self.length -= 1
        for group in self.groups:
            group.done = False
        return tuple(replace(answer, is_stranded=True) for answer in self.conclude(branches))

    def _answers(self, pools: Sequence[Pool]) -> tuple[Hypothesis, ...]:
        """The best of all pools; of equal ones the later group's first, as in 4.38."""
        pairs = [pair for pool in reversed(pools) for pair in zip(pool.scores, pool.entries, strict=True)]
        pairs.sort(key=lambda pair: -pair[0])
        return tuple(
            replace(entry.hypothesis, rank=rank, score=score, ancestry=self._ancestry(entry))
            for rank, (score, entry) in enumerate(pairs[: self.params.num_answers])
        )

    def _ancestry(self, entry: Pooled) -> tuple[int, ...]:
        """The number of the beam that each of an answer's tokens was chosen behind."""
        at, generation = entry.at, entry.generation
        found = [int(self.numbers[generation][at])] if entry.hypothesis.tokens else []
        while generation > 0:
            at, generation = int(self.behind[generation - 1][at]), generation - 1
            found.append(int(self.numbers[generation][at]))
        return tuple(reversed(found))

    def rank(self, state: int) -> int:
        """A beam's own number."""
        return state


def joined(parts: Sequence[Chosen]) -> Chosen:
    """Those of several groups, in their order."""
    return Chosen(*(np.concatenate([getattr(part, name) for part in parts]) for name in Chosen.__slots__))


def bits_of(tokens: Sequence[int]) -> int:
    """The set of `tokens`: a bit for each."""
    bits = 0
    for token in set(tokens):
        bits |= 1 << token
    return bits


def _number(branch: Branch) -> int:
    return int(branch.state)
