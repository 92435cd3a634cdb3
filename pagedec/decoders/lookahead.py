"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations gives n-grams, and those that begin with the last
token are verified beside it. Window and guesses are branches of one draft, so they need no mask of their own:

row 0      root - 01 - 02      a chain: each column continues the one before
row 1       10    11   12      each under the node above it, one position further
row 2       20    21   22      what the target draws here is the window's next row
guesses    root - g - g - g    with common beginnings shared
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.protocol import Answer, DecoderContext, Query, Sample, Verdict
from pagedec.core.request import Branch
from pagedec.core.sampler import GREEDY
from pagedec.decoders.guesses import Tree, arbitrary
from pagedec.decoders.registry import decoder
from pagedec.decoders.sampling import Sampling
from pagedec.params import SamplingParams
from pagedec.speculation import LookaheadSpeculation

Rows = list[list[int]]


class GuessPool:
    """What may follow a token: at most `size` guesses for each, of which the least recently inserted leaves. Using one
    does not keep it."""

    __slots__ = ("_known", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[int, dict[tuple[int, ...], None]] = {}

    def insert(self, token: int, guess: tuple[int, ...]) -> None:
        """Known ones become the latest."""
        known = self._known.setdefault(token, {})
        known.pop(guess, None)
        known[guess] = None
        if len(known) > self._size:
            del known[next(iter(known))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """The guesses for what follows `token`, the latest first."""
        return [*reversed(self._known.get(token, {}))]


@decoder("lookahead", params=SamplingParams, speculation=LookaheadSpeculation)
class Lookahead(Sampling):
    """W columns by N - 1 rows, at most G guesses. A window begins with one arbitrary row and gains one a step; then
    each step gives a new last row, and the window moves by one column.

    Its own tokens are the most probable ones, however the answer is drawn.
    """

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        settings = params.speculation
        assert isinstance(settings, LookaheadSpeculation)
        self.num_columns, self.num_rows = settings.window_size, settings.ngram_size - 1
        self.reads_text = settings.pool_from_prompt
        self.ends = frozenset(() if params.temperature == 0 else context.eos_token_ids)
        self.pool = GuessPool(settings.num_guesses)
        self.windows: dict[int, Rows] = {}  # by stream; row 0 without the root, which is its first column
        self.num_read: dict[int, int] = {}  # by stream: how much of its text was read
        full = self.num_rows * (settings.window_size + settings.num_guesses)
        self.guess_share = settings.num_guesses / max(1, settings.window_size + settings.num_guesses)
        if self.resting_sampler is not None:
            self.grant_sizes = sorted({max(self.num_rows, full // part) for part in (4, 2, 1)})

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        """What a constraint forces, or guesses and then as many columns of the window as there is room for. Where that
        is granted, branches share it alike, and guesses leave the window its part."""
        queries = []
        for i, branch in enumerate(branches):
            if self.reads_text:
                self._read_text(branch)
            own = room if not self.grant_sizes else room // (len(branches) - i)
            queries.append(self._query(branch, own))
            room -= queries[-1].draft.num_nodes
        return queries

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        """As every method that drafts; what was accepted may be guessed again."""
        verdict = super().advance(queries, answers)
        if self.reads_text:
            draft_of = {query.branch: answer.draft for query, answer in zip(queries, answers, strict=True)}
            for child in verdict.live:
                new = [*draft_of[child.parent].along(child.path), *child.tokens]
                known = self.context.history.suffix(child.parent.tip, self.num_rows)
                self._insert_text([*known, *new])
                length = self.context.history.depth[child.parent.tip] + len(new)
                self.num_read |= dict.fromkeys(child.state, length)
        return verdict

    def learn(self, query: Query, answer: Answer) -> None:
        """Each column with what the target drew under it is a guess for later; the window moves on."""
        if len(query.asks) < 2 or answer.draft.num_nodes < query.draft.num_nodes:  # it was stripped
            return
        branch, new = query.branch, answer.values[1][:, 0].tolist()
        rows = self._window(branch, len(new))
        if len(rows) < self.num_rows:
            following = [*(row[1:] for row in rows), new[1:]]
        else:
            below = [*rows[1:], new]
            for i, token in enumerate((self.context.history.token[branch.tip], *rows[0])):
                self.pool.insert(token, tuple(row[i] for row in below))
            below[-1] = self._without_ends(branch, new)
            following = [below[0][1:], *below[1:]]
        for stream in branch.state:
            self.windows[stream] = following

    # ---- inside
    def _query(self, branch: Branch, room: int) -> Query:
        forced = self.forced(branch, room)
        if forced.num_nodes:  # the window waits: its tokens stand for places that are known now
            return Query(branch, (Sample(self.sampler, branch.state),), forced)
        left, tree = self.context.left(branch), Tree(max(0, room))
        if self.grant_sizes and self.num_columns:
            tree.most = max(self.num_rows, int(room * self.guess_share)) if room >= self.num_rows else 0
        for guess in self.pool.behind(self.context.history.token[branch.tip]):
            tree.grow(guess[: max(0, left)])
        tree.most = max(0, room)
        verified = Sample(self.sampler, branch.state, tuple(range(len(tree) + 1)))
        num_rows = len(self.windows.get(branch.state[0], [[]]))
        # the last column's last row is num_columns + num_rows - 2 tokens ahead
        widest = min(self._full_width(num_rows), left - num_rows + 2, (tree.most - len(tree) + 1) // num_rows)
        if widest < 1:
            return Query(branch, (verified,), tree.draft())
        last = _lay(tree, self._window(branch, widest))
        return Query(branch, (verified, Sample(GREEDY, (0,), last)), tree.draft())

    def _full_width(self, num_rows: int) -> int:
        """Columns of a window of so many rows: each row that is added costs one."""
        return self.num_columns + self.num_rows - num_rows if self.num_columns else 0

    def _window(self, branch: Branch, num_columns: int) -> Rows:
        """The branch's window, cut or filled to a number of columns."""
        rows = self.windows.get(branch.state[0], [[]])
        sizes = [num_columns - (i == 0) for i in range(len(rows))]
        return [
            row[:size] + arbitrary(self.prompt(branch), size - len(row), branch.tip + i)
            for i, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def _without_ends(self, branch: Branch, row: list[int]) -> list[int]:
        """End tokens lead nowhere: in a drawn answer's window others stand for them."""
        if self.ends.isdisjoint(row):
            return row
        others = arbitrary(self.prompt(branch), len(row), branch.tip)
        return [other if token in self.ends else token for token, other in zip(row, others, strict=True)]

    def _read_text(self, branch: Branch) -> None:
        """What of a branch's text was not read yet: the prompt, and what came while nobody asked."""
        length, first = self.context.history.depth[branch.tip], self.num_read.get(branch.state[0], 0)
        if first < length:
            self._insert_text(self.context.history.slice(branch.tip, max(0, first - self.num_rows), length))
            self.num_read |= dict.fromkeys(branch.state, length)

    def _insert_text(self, tokens: Sequence[int]) -> None:
        """Every n-gram of a text is a guess."""
        size = self.num_rows
        for i in range(len(tokens) - size):
            self.pool.insert(tokens[i], tuple(tokens[i + 1 : i + 1 + size]))


def _lay(tree: Tree, rows: Rows) -> tuple[int, ...]:
    """Add a window to a draft; the nodes of its last row. They share nothing with guesses: nobody verifies them."""
    above = [0]
    for token in rows[0]:
        above.append(tree.add(token, above[-1]))
    for row in rows[1:]:
        above = [tree.add(token, node) for token, node in zip(row, above, strict=True)]
    return tuple(above)
