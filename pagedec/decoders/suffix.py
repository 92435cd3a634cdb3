"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed before where the text ended as it ends now is
counted, in the request's own text and in answers that have ended; the draft is the tree of what followed most often.

The paper counts in suffix trees. Here a text is its tokens, and for each place the place before it at which the same 1,
2, 4, 8 or 16 tokens stood last (as in Lempel-Ziv coders). So a token costs the same wherever it stands, 48 bytes, and
the oldest are forgotten by writing over them; counts are those of the latest places.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from pagedec.core.draft import EMPTY, Draft
from pagedec.core.protocol import DecoderContext, Hypothesis
from pagedec.core.request import Branch
from pagedec.decoders.guesses import Tree
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.params import SamplingParams
from pagedec.speculation import MOST_COMPARED, Speculation, SuffixSpeculation

SIZES = (1, 2, 4, 8, 16)
"""Tokens of the ends by which places are found; how much longer they are alike is compared."""
BY_SIZE = [*enumerate(SIZES)][::-1]
PLACES = 16
"""Latest places that are counted."""
STEPS = 4 * PLACES
"""Places that are looked at for them: of several ends that have one hash, most are other ones."""
MULTIPLIER, MASK = 668265261, (1 << 30) - 1
"""The hash of an end is that of its first half times an odd number, plus that of its second."""
WEIGHTS = [pow(MULTIPLIER + 1, i, MASK + 1) for i in range(len(SIZES))]
"""By how much the hashes of ends grow, by size, where those of all tokens grow by one."""
NONE = -1
"""Stands between texts."""
FIRST = MOST_COMPARED
"""The first place: before each stand as many tokens as are compared."""
LEAST_ROOM = 256
PAST_ROOM = 1 << 20
"""Tokens that past answers have room for: 50 MB."""
APART = 1 << 32
"""From the tokens of one salt to those of the next: more than there are tokens."""
LIKELY = 0.75
"""A share from which a first token is a grade better."""
ROUNDING = 1e-6
"""Of shares: one tenth of 30 is 3."""


class Ring:
    """Tokens in a ring of `room` places, a power of two, and for each of `SIZES` the places that follow equal ends."""

    __slots__ = ("_made", "end", "hashes", "room", "tables", "tokens")

    def __init__(self, room: int) -> None:
        self.room, self.end = room, FIRST
        self.tokens = array("q", [NONE]) * room
        self.tables = [(array("i", [0]) * room, array("i", [0]) * room) for _ in SIZES]
        """By an end's hash: the latest place behind one; and by place: the one before it of the same hash."""
        self.hashes = [NONE & MASK] * len(SIZES)
        """Of the text's ends, by size."""
        self._made = [deque(repeat(NONE & MASK, size), size) for size in SIZES[:-1]]  # each size's, so many places ago

    def append(self, tokens: Sequence[int], is_found: bool = True, shift: int = 0) -> None:
        """Continue the text, for which there must be room before the ring's end. `is_found`: as places, too; `shift`:
        by how much hashes of tokens are larger."""
        place, mask, hashes, tables, made = self.end, self.room - 1, self.hashes, self.tables, self._made
        self.tokens[place : place + len(tokens)] = array("q", tokens)
        self.end += len(tokens)
        for token in tokens:
            if is_found:
                for (latest, before), value in zip(tables, hashes, strict=True):
                    slot = value & mask
                    before[place] = latest[slot]
                    latest[slot] = place
                place += 1
            value = token + shift & MASK
            hashes = [value]
            for own in made:
                half = own[0]
                own.append(value)
                value = half * MULTIPLIER + value & MASK
                hashes.append(value)
        self.hashes = hashes

    def rewind(self) -> None:
        """Go on at the ring's beginning; nothing is found in what is left of it."""
        self.tokens[self.end :] = array("q", [NONE]) * (self.room - self.end)
        self.end = FIRST

    def last(self, size: int) -> array[int]:
        """So many of the last tokens."""
        return self.tokens[self.end - size : self.end]

    def alike(self, place: int, end: array[int], size: int) -> int:
        """How many tokens before `place` are the last of `end`; it is known of `size`."""
        tokens, most = self.tokens, len(end)
        if tokens[place - most : place] == end:
            return most
        while size < most and tokens[place - size - 1] == end[most - size - 1]:
            size += 1
        return size

    def behind(self, place: int, most: int) -> tuple[int, ...]:
        """What stands from `place` on, at most so many tokens of one text."""
        found = tuple(self.tokens[place : place + most])
        return found[: found.index(NONE)] if NONE in found else found


def room_for(num_tokens: int) -> int:
    """A ring's room for so many tokens."""
    return max(LEAST_ROOM, 1 << (FIRST + num_tokens).bit_length())


class Salted:
    """Answers of one salt. Their tokens are kept as numbers of their own, `base` larger, so that nobody finds another
    one's; hashes of tokens are `shift` larger."""

    __slots__ = ("base", "num_answers", "number", "shift")

    def __init__(self, number: int) -> None:
        self.number, self.num_answers = number, 0
        self.base, self.shift = number * APART, number * MULTIPLIER & MASK


class PastAnswers:
    """The latest answers of an engine's requests that drafted so: as many as its own table says, and `PAST_ROOM`
    tokens. The oldest are forgotten first. They are shared as the prefix cache is: within a salt."""

    def __init__(self, own: Speculation | None, room: int = PAST_ROOM) -> None:
        """`own`: how the engine's requests draft that say nothing of it."""
        kind = own if isinstance(own, SuffixSpeculation) else SuffixSpeculation()
        self.most = kind.suffix_decoding_max_cached_requests
        self.text, self._kept = Ring(room if self.most else LEAST_ROOM), deque[tuple[int, bytes]]()
        self._salts: dict[bytes, Salted] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: bytes, tokens: Sequence[int]) -> None:
        """Keep one more, of the salt of this key. Of one that is longer than a quarter of the room, the end."""
        text, kept = self.text, self._kept
        if not tokens or not self.most:
            return
        tokens = tokens[-(text.room // 4) :]
        if text.end + len(tokens) + 1 > text.room:
            while kept and kept[0][0] >= text.end:
                self._forget()
            text.rewind()
        while kept and text.end <= kept[0][0] <= text.end + len(tokens):
            self._forget()
        whose = self._salts.get(key)
        if whose is None:
            number = self._free.pop() if self._free else len(self._salts) + 1
            whose = self._salts[key] = Salted(number)
        whose.num_answers += 1
        kept.append((text.end, key))
        text.append([token + whose.base for token in tokens], shift=whose.shift)
        text.append([NONE], is_found=False)
        while len(kept) > self.most:
            self._forget()

    def whose(self, key: bytes) -> Salted | None:
        """That of a salt, of which some answer is kept."""
        return self._salts.get(key)

    def reach(self, most: int) -> int:
        """How many tokens back the latest `most` answers begin, of which there is one."""
        return (self.text.end - self._kept[-min(most, len(self._kept))][0] - 1) % self.text.room + 1

    def _forget(self) -> None:
        _, key = self._kept.popleft()
        whose = self._salts[key]
        whose.num_answers -= 1
        if not whose.num_answers:
            del self._salts[key]
            self._free.append(whose.number)


def longest(
    texts: Sequence[tuple[Ring, int]], end: array[int], hashes: Sequence[int]
) -> tuple[int, list[tuple[Ring, int]]]:
    """How many of the last tokens, which are `end`, stand somewhere before a place of these texts, each as far back as
    is said; and the latest such places. `hashes`: of the ends, by size."""
    length = len(end)
    for i, size in BY_SIZE:
        if size > length:
            continue
        found, same, value = list[tuple[int, Ring, int]](), end[length - size :], hashes[i]
        before_same = end[length - size - 1] if size < length else NONE - 1
        for text, oldest in texts:
            tokens, last, mask = text.tokens, text.end, text.room - 1
            latest, before = text.tables[i]
            place, behind = latest[value & mask], 0
            for _ in range(STEPS):
                age = last - place & mask
                if age <= behind or age > oldest or len(found) == PLACES:  # one that was written over leads anywhere
                    break
                if tokens[place - size : place] == same and tokens[place] != NONE:
                    is_longer = tokens[place - size - 1] == before_same
                    found.append((text.alike(place, end, size + 1) if is_longer else size, text, place))
                place, behind = before[place], age
        if found:
            size = max([alike for alike, _, _ in found])
            return size, [(text, place) for alike, text, place in found if alike == size]
    return 0, []


def grow(behind: dict[tuple[int, ...], int], most: int, least: float) -> tuple[Tree, list[int]]:
    """The tree of the at most `most` beginnings that are met most often in these texts, each of which was met so many
    times; and how often each node was met: none less than `least` times. Of equal ones the shorter come first."""
    tree, counts = Tree(most), list[int]()
    if len(behind) == 1:
        [(text, num)] = behind.items()
        return tree, [num] * tree.grow(text if num >= least else ())
    waiting, order = list[Any](), 0
    beginnings, node, depth = [*behind.items()], 0, 0
    while True:
        groups: dict[int, list[Any]] = {}
        for known in beginnings:
            text, num = known
            if len(text) > depth:
                token = text[depth]
                if token in groups:
                    groups[token][0] += num
                    groups[token].append(known)
                else:
                    groups[token] = [num, known]
        for token, own in groups.items():
            if own[0] >= least:
                order += 1
                heapq.heappush(waiting, (-own[0], depth, order, node, token, own))
        if not waiting or len(tree) == most:
            return tree, counts
        num, depth, _, node, token, own = heapq.heappop(waiting)
        counts.append(-num)
        node, depth, beginnings = tree.add(token, node), depth + 1, own[1:]


@dataclass(slots=True)
class Written:
    """What was read of a stream, up to `tip`: its `text`, which begins at place `first` with the token behind the
    prompt; or with the prompt, where that is not `follows`, what its request's streams have in common."""

    text: Ring
    tip: int
    first: int
    follows: Ring | None

    @property
    def texts(self) -> list[tuple[Ring, int]]:
        """All of it, the latest first."""
        return [(own, own.room) for own in (self.text, self.follows) if own is not None]

    def behind(self, text: Ring, place: int, most: int) -> tuple[int, ...]:
        """What stands from a place of one of its texts on, so many tokens: what reaches the end goes on with itself."""
        found = text.behind(place, most)
        if len(found) == most:
            return found
        if text is self.follows:
            found += self.text.behind(self.first, most - len(found))
        return (found * most)[:most]


@decoder("suffix", params=SamplingParams, speculation=SuffixSpeculation)
class Suffix(Sampling):
    """Drafts what most often followed the longest end that stood somewhere before, in its own text or in past answers:
    the tree of which more tokens are expected to be accepted."""

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, SuffixSpeculation) and settings.num_speculative_tokens is not None
        self.num_tokens, self.num_compared = settings.num_speculative_tokens, settings.suffix_decoding_max_tree_depth
        self.factor, self.least = settings.suffix_decoding_max_spec_factor, settings.suffix_decoding_min_token_prob
        self.num_past, archive = settings.suffix_decoding_max_cached_requests, context.archive
        self.past = archive.of(PastAnswers) if archive is not None and self.num_past else None
        self.given: tuple[int, Ring] | None = None  # the prompt's last node, and the prompt
        self.streams: dict[int, Written] = {}

    def draft(self, branch: Branch, room: int) -> Draft:
        """Where both trees are as good the own one."""
        most, left = min(self.num_tokens, room), self.context.left(branch)
        if most < 1 or left < 1:
            return EMPTY
        own = self._read(branch)
        end, hashes = own.text.last(min(self.num_compared, self.context.history.depth[branch.tip])), own.text.hashes
        size, places = longest(own.texts, end, hashes)
        count = min(most, int(self.factor * size + ROUNDING))
        followed = [own.behind(text, place, min(count, left)) for text, place in places]
        score, draft = self._drafted(size, followed, count)
        past = self.past
        if past is not None and (whose := past.whose(self.context.history.salted)) is not None:
            end = array("q", [token + whose.base for token in end])
            hashes = [value + whose.shift * weight & MASK for value, weight in zip(hashes, WEIGHTS, strict=True)]
            size, places = longest([(past.text, past.reach(self.num_past))], end, hashes)
            count = min(most, int(self.factor * size + ROUNDING))
            followed = [text.behind(place, min(count, left)) for text, place in places]
            other, others = self._drafted(size, followed, count, whose.base)
            draft = others if other > score else draft
        return draft

    def ended(self, answers: Sequence[Hypothesis]) -> None:
        """Answers are kept where the request may see others'."""
        if self.past is None:
            return
        history, first = self.context.history, self.context.prompt_length
        for answer in answers:
            length = max(first, history.depth[answer.tip])
            self.past.add(history.salted, [*history.slice(answer.tip, first, length), *answer.tokens])

    # ---- inside
    def _drafted(self, size: int, followed: Sequence[tuple[int, ...]], most: int, base: int = 0) -> tuple[float, Draft]:
        """A draft of at most so many tokens from what followed wherever the last `size` tokens stood, in tokens `base`
        larger; and how many of it are expected to be accepted."""
        if most < 1:
            return 0.0, EMPTY
        behind: dict[tuple[int, ...], int] = {}
        for text in followed:
            behind[text] = behind.get(text, 0) + 1
        if base:
            behind = {tuple([token - base for token in text]): num for text, num in behind.items()}
        tree, counts = grow(behind, most, self.least * len(followed) - ROUNDING)
        if not counts:
            return 0.0, EMPTY
        grade = 2 * size.bit_length() + (counts[0] >= LIKELY * len(followed))
        return sum(counts) / len(followed), tree.draft(grade)

    def _read(self, branch: Branch) -> Written:
        """The branch's stream, read up to its tip."""
        history, tip, own = self.context.history, branch.tip, self.streams.get(branch.state[0])
        length, known = history.depth[tip], 0 if own is None else history.depth[own.tip]
        goes_on = own is not None and known <= length and history.ancestor(tip, known) == own.tip
        if own is None or not goes_on or own.text.end + length - known >= own.text.room:
            own, known = self._begin(branch)
            self.streams[branch.state[0]] = own
        own.text.append(history.suffix(tip, length - known))
        own.tip = tip
        return own

    def _begin(self, branch: Branch) -> tuple[Written, int]:
        """A stream of the branch of which no more is read than what stands before it, and how many tokens that are."""
        history, tip, first = self.context.history, branch.tip, self.context.prompt_length
        length = history.depth[tip]
        prompt = history.ancestor(tip, min(first, length))
        if self.given is None and length >= first:
            self.given = prompt, Ring(room_for(first))
            self.given[1].append(history.slice(tip, 0, first))
        follows = self.given[1] if self.given is not None and self.given[0] == prompt else None
        first = first if follows is not None else 0
        text = Ring(room_for(2 * (length - first) + MOST_COMPARED))
        text.append(history.slice(tip, max(0, first - self.num_compared), first), is_found=False)
        return Written(text, tip, text.end, follows), first
