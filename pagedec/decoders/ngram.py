"""Prompt lookup: where the text ended as it ends now, it went on in some way; that is the draft. It needs no model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders.guesses import Tree
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.params import SamplingParams
from pagedec.speculation import NGramSpeculation

PLACES = 8
"""Places looked at for each candidate: what goes on alike everywhere must not be searched without end."""
INDEXED = 8
"""Tokens of the longest n-grams that are kept: what a token costs must not grow with `prompt_lookup_max`. Longer equal
ends are found by comparing what stands before the latest places of these."""
COMPARED = 32
"""Places at which longer ends are compared."""
GRADES = 4
"""Lengths of equal ends that are told apart: the longer, the likelier it goes on alike."""


class NGramIndex:
    """Where n-grams of `low` to `high` tokens were followed by more, in all sequences of a history. Each token is read
    once; where sequences part, each goes on in a part of its own, and what is before is shared."""

    __slots__ = ("_high", "_history", "_kept", "_low", "_part_of")

    def __init__(self, history: History, low: int, high: int) -> None:
        self._history, self._low, self._high = history, low, high
        self._kept = min(low, INDEXED), min(high, INDEXED)
        self._part_of: dict[int, _Part] = {0: _Part(None, 0, [])}  # by history node

    def continuations(self, tip: int, count: int) -> Iterator[tuple[int, list[int]]]:
        """What followed the last tokens of `tip` before in its own text, `count` tokens each, with how many of those
        were alike: of the longest equal ends first, of these the latest first. What reaches the text's end goes on with
        itself. Of ends longer than `INDEXED` each of the latest places is told once, with its longest."""
        part, length = self._read(tip), self._history.depth[tip]
        for size, place in chain(self._longer(part, length), self._indexed(part, length)):
            followed = part.tokens(place, min(place + count, length))
            for i in range(count - len(followed)):
                followed.append(followed[i])
            yield size, followed

    def _indexed(self, part: _Part, length: int) -> Iterator[tuple[int, int]]:
        """Equal ends that are kept as n-grams: how long, and where they were followed."""
        last = part.gram(length, min(self._kept[1], length - 1))
        for size in range(len(last), self._low - 1, -1):
            for place in part.places(last[len(last) - size :], length):
                yield size, place

    def _longer(self, part: _Part, length: int) -> Iterator[tuple[int, int]]:
        """Longer ones."""
        kept, high = self._kept[1], min(self._high, length - 1)
        if high <= kept:
            return
        end, found = part.tokens(max(0, length - high), length)[::-1], []
        for place in islice(part.places(part.gram(length, kept), length), COMPARED):
            before = part.tokens(max(0, place - high), place)[::-1]
            pairs = enumerate(zip(before, end, strict=False))
            size = next((i for i, (one, other) in pairs if one != other), min(len(before), len(end)))
            if size >= max(self._low, kept + 1):
                found.append((size, place))
        yield from sorted(found, reverse=True)

    def _read(self, tip: int) -> _Part:
        """The part in which `tip` is, with all tokens up to there in it."""
        history, (low, high), missing, node = self._history, self._kept, [], tip
        while node not in self._part_of:
            missing.append(node)
            node = history.parent[node]
        part, length = self._part_of[node], history.depth[node]
        if missing:
            if length != part.end:  # another sequence has gone on from there
                part = _Part(part, length, part.tokens(max(0, length - high), length))
            part.extend(history.suffix(tip, len(missing)), low, high)
            self._part_of.update(dict.fromkeys(missing, part))
        return part


class _Part:
    """A stretch of one sequence, from its token `start` on, behind the part `before`."""

    __slots__ = ("_behind", "_first", "_text", "before", "start")

    def __init__(self, before: _Part | None, start: int, context: list[int]) -> None:
        """`context`: the last tokens before it."""
        self.before, self.start = before, start
        self._text, self._first = context, start - len(context)
        # n-gram: the place of the token behind it; of several, which are few, a list of them, ascending
        self._behind: dict[tuple[int, ...], int | list[int]] = {}

    @property
    def end(self) -> int:
        return self._first + len(self._text)

    def extend(self, tokens: Sequence[int], low: int, high: int) -> None:
        behind, last = self._behind, tuple(self._text[-high:])
        for place, token in enumerate(tokens, self.end):
            for start in range(len(last) - low + 1):
                gram = last[start:]
                known = behind.get(gram)
                if known is None:
                    behind[gram] = place
                elif isinstance(known, list):
                    known.append(place)
                else:
                    behind[gram] = [known, place]
            last = (*last, token)[-high:]
        self._text += tokens

    def gram(self, length: int, size: int) -> tuple[int, ...]:
        """The last `size` of the first `length` tokens."""
        stop = length - self._first
        return tuple(self._text[stop - size : stop])

    def tokens(self, begin: int, stop: int) -> list[int]:
        """Tokens `begin` to `stop` of the sequence that the part stands in."""
        if begin >= self._first:
            return self._text[begin - self._first : stop - self._first]
        part, pieces = self, []
        while begin < part._first and part.before is not None:
            pieces.append(part._text[part.start - part._first : max(0, stop - part._first)])
            part, stop = part.before, min(stop, part.start)
        pieces.append(part._text[begin - part._first : stop - part._first])
        return [token for piece in reversed(pieces) for token in piece]

    def places(self, gram: tuple[int, ...], length: int) -> Iterator[int]:
        """Where tokens behind `gram` stand among the first `length`, the last first."""
        part: _Part | None = self
        while part is not None:
            known = part._behind.get(gram)
            if isinstance(known, list):
                for i in range(bisect_left(known, length) - 1, -1, -1):
                    yield known[i]
            elif known is not None and known < length:
                yield known
            length, part = part.start, part.before


@decoder("ngram", params=SamplingParams, speculation=NGramSpeculation)
class NGram(Sampling):
    """Drafts what followed the last tokens before, up to `num_candidates` different continuations as one tree."""

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, NGramSpeculation) and settings.prompt_lookup_max is not None
        assert settings.num_speculative_tokens is not None
        self.num_candidates, self.num_tokens = settings.num_candidates, settings.num_speculative_tokens
        self.index = NGramIndex(context.history, settings.prompt_lookup_min, settings.prompt_lookup_max)

    def draft(self, branch: Branch, room: int) -> Draft:
        """Equal beginnings are drafted once; a continuation that another one begins with is none of its own."""
        tree, left, grade = Tree(room), self.num_candidates, 0
        count = min(self.num_tokens, self.context.left(branch))
        if count < 1 or room < 1:
            return tree.draft()
        for size, tokens in islice(self.index.continuations(branch.tip, count), PLACES * left):
            grade = grade or min(size, GRADES)
            left -= tree.grow(tokens) > 0
            if not left or len(tree) == room:
                break
        return tree.draft(grade)
