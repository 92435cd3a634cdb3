"""Guesses for beams: a search on the host, over what the model said behind the same last tokens before, and over what
followed them in the text. Beams go on much alike, so what one of them was told is a good guess for the others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from pagedec.core.constraint import permits
from pagedec.core.draft import Draft
from pagedec.core.protocol import Answer, DecoderContext, Query, Verdict
from pagedec.core.request import Branch
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.decoders.guesses import Tree
from pagedec.decoders.registry import decoder
from pagedec.params import BeamSearchParams
from pagedec.speculation import LookaheadSpeculation, NGramSpeculation

Gram = tuple[int, ...]
Odds = tuple[Sequence[int], Sequence[float]]
"""Tokens, and their log-probabilities."""
SURE = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
"""How much is given for the latest follower of so many equal tokens of text."""
MOST_ROWS = 8192
"""What rows said is kept of so many; the older half leaves where there are more."""
LIKELY = 16
"""Tokens that are kept of a row."""
LONGEST = 8
"""Last tokens that are told apart, at most: what a token costs must not grow with `prompt_lookup_max`."""
FEW = 4
"""Followers of equal text that are looked at."""


class Followers:
    """What follows the last tokens of a text, by as many of them as are known, at most `high`: what the model's row
    said, and which tokens stood there in a text. No more than `LONGEST` are told apart."""

    __slots__ = ("_high", "_low", "_rows", "_texts")

    def __init__(self, low: int, high: int) -> None:
        """`low`: of text, fewer equal tokens are not looked at."""
        self._low, self._high = min(low, LONGEST), min(high, LONGEST)
        self._rows: dict[Gram, Odds] = {}
        self._texts: dict[Gram, list[int]] = {}

    @property
    def reach(self) -> int:
        """Most last tokens that matter."""
        return self._high

    def read(self, tokens: Sequence[int], first: int) -> None:
        """Take in a text's tokens from `first` on."""
        for place in range(max(first, 1), len(tokens)):
            token = tokens[place]
            for size in range(self._low, min(self._high, place) + 1):
                known = self._texts.setdefault(tuple(tokens[place - size : place]), [])
                if not known or known[-1] != token:
                    if token in known:
                        known.remove(token)
                    known.append(token)
                    del known[:-FEW]

    def note(self, last: Gram, odds: Odds) -> None:
        """Take in what a row behind these last tokens said."""
        for size in range(1, min(self._high, len(last)) + 1):
            self._rows[last[-size:]] = odds
        if len(self._rows) > MOST_ROWS:
            self._rows = dict(islice(self._rows.items(), MOST_ROWS // 2, None))

    def behind(self, last: Gram) -> dict[int, float]:
        """What may follow, with log-probabilities, as far as they can be guessed."""
        found: dict[int, float] = {}
        sizes = range(min(self._high, len(last)), 0, -1)
        of_row = next((size for size in sizes if last[-size:] in self._rows), 0)
        of_text = next((size for size in sizes if last[-size:] in self._texts), 0)
        if of_row:
            found.update(zip(*self._rows[last[-of_row:]], strict=True))
        if of_text and of_text >= of_row:
            sure = SURE[min(of_text, len(SURE) - 1)]
            for i, token in enumerate(reversed(self._texts[last[-of_text:]])):
                guess = math.log(sure if i == 0 else (1 - sure) / (i + 1))
                found[token] = max(guess, found.get(token, -math.inf))
        return found


class Path(NamedTuple):
    """A beam as it may go on: a node of the draft behind the beam at `place`, its score as guessed, the last tokens,
    what its constraint forces next, and that one's state."""

    place: int
    group: int
    node: int
    score: float
    last: Gram
    forced: Sequence[int]
    state: Any


class GuessedBeam(DraftedBeam):
    """The draft is a beam search of its own over guesses: `breadth` times as wide, and as deep as levels are likely to
    be reached, at most `deepest` levels."""

    breadth: int
    watches = True
    reads_text: bool = True

    def __init__(self, params: BeamSearchParams, context: DecoderContext, low: int, high: int) -> None:
        super().__init__(params, context)
        self.followers = Followers(low, high)
        self.has_read_prompt = not self.reads_text
        self.skipped = frozenset(context.stopping.ends)

    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft]:
        """Level by level, the best of all guesses; those that find no room are left out. A level that lacks beams is
        never reached, so none is cut to fewer than there will be at least."""
        history, context = self.context.history, self.context
        if not self.has_read_prompt:
            self.has_read_prompt = True
            self.followers.read(history.slice(beams[0].tip, 0, context.prompt_length), 1)
        length = history.depth[beams[0].tip]
        trees, reach = [Tree(room) for _ in beams], min(self.followers.reach, length)
        paths = [
            Path(
                place,
                beam.state // self.group_width,
                0,
                beam.score,
                tuple(history.suffix(beam.tip, reach)),
                context.forced(beam),
                beam.constraint_state,
            )
            for place, beam in enumerate(beams)
        ]
        wide = self.breadth * (self.width if self.length == 0 else self.group_width)
        least = self.group_width * len({path.group for path in paths})
        for _ in range(min(self.depth(), context.left(beams[0]))):
            chosen = self._next(paths, wide)
            if not chosen or room < min(least, len(chosen)):
                break
            paths = [path._replace(node=trees[path.place].add(path.last[-1], path.node)) for path in chosen[:room]]
            room -= len(paths)
        return [tree.draft() for tree in trees]

    def _next(self, paths: Sequence[Path], wide: int) -> list[Path]:
        """The next level of the draft: of each group the best, in turns, its nodes not numbered yet."""
        by_group: dict[int, list[tuple[float, int, int, Path]]] = {}
        for i, path in enumerate(paths):
            own = by_group.setdefault(path.group, [])
            for token, logprob in self._guesses(path):
                own.append((path.score + logprob, -i, -token, path))
        found: list[list[Path]] = []
        for own in by_group.values():
            best = heapq.nlargest(wide, own, key=lambda entry: entry[:3])
            following = [self._follow(path, -token, score) for score, _, token, path in best]
            found.append([path for path in following if path is not None])
        return [path for ranked in zip_longest(*found) for path in ranked if path is not None]

    def _guesses(self, path: Path) -> Iterable[tuple[int, float]]:
        if path.forced:
            return [(path.forced[0], 0.0)]
        skipped = self.skipped
        return [guess for guess in self.followers.behind(path.last).items() if guess[0] not in skipped]

    def _follow(self, path: Path, token: int, score: float) -> Path | None:
        """The path with one token more; None where its constraint does not go on so."""
        own, state = self.context.constraint, path.state
        if own is not None:
            try:
                state = own.next(state, token) if permits(own.allowed(state), token) else None
                if state is None or own.is_over(state):
                    return None
            except Exception:  # it is raised again where the masks of beams that live are made
                return None
        last = (*path.last, token)[-self.followers.reach :]
        return path._replace(score=score, last=last, forced=path.forced[1:], state=state)

    def learn(self, queries: Sequence[Query], answers: Sequence[Answer], verdict: Verdict) -> None:
        """Each row is a guess for all that ends alike, and each beam's new tokens are text."""
        history, followers = self.context.history, self.followers
        for query, answer in zip(queries, answers, strict=True):
            draft, lasts = answer.draft, [tuple(history.suffix(query.branch.tip, self._known(query.branch)))]
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                lasts.append((*lasts[parent], token)[-followers.reach :])
            rows = answer.values[0] if len(answer.values) > 1 else ()
            for last, row in zip(lasts, rows, strict=False):
                followers.note(last, (row.tokens[:LIKELY].tolist(), row.logprobs[:LIKELY].tolist()))
        if not self.reads_text:
            return
        ends: list[tuple[Branch, tuple[int, ...]]] = []
        if verdict.children is not None:
            parents, tokens = verdict.children.parents.tolist(), verdict.children.tokens.tolist()
            ends += [(queries[at].branch, (token,)) for at, token in zip(parents, tokens, strict=True)]
        draft_of = {query.branch: answer.draft for query, answer in zip(queries, answers, strict=True)}
        for child in verdict.live:
            ends.append((child.parent, (*draft_of[child.parent].along(child.path), *child.tokens)))
        for branch, new in ends:
            known = history.suffix(branch.tip, self._known(branch))
            followers.read([*known, *new], len(known))

    def _known(self, branch: Branch) -> int:
        return min(self.followers.reach, self.context.history.depth[branch.tip])


@decoder("beam_ngram", params=BeamSearchParams, speculation=NGramSpeculation)
class NGramBeam(GuessedBeam):
    """Guesses from the text, the prompt's and all beams', and from rows that were seen."""

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        settings = params.speculation
        assert isinstance(settings, NGramSpeculation) and settings.prompt_lookup_max is not None
        assert settings.num_speculative_tokens is not None
        super().__init__(params, context, settings.prompt_lookup_min, settings.prompt_lookup_max)
        self.deepest, self.breadth = settings.num_speculative_tokens, 1 + settings.num_candidates


@decoder("beam_lookahead", params=BeamSearchParams, speculation=LookaheadSpeculation)
class LookaheadBeam(GuessedBeam):
    """Guesses from rows that were seen, those of drafts that came to nothing among them: they stand for the window."""

    def __init__(self, params: BeamSearchParams, context: DecoderContext) -> None:
        settings = params.speculation
        assert isinstance(settings, LookaheadSpeculation)
        self.reads_text = settings.pool_from_prompt
        super().__init__(params, context, 1, settings.ngram_size - 1)
        self.deepest = settings.ngram_size - 1
        self.breadth = -(-settings.num_guesses // self.group_width)
