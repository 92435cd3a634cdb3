"""A lane's part of a step as flat arrays: collected branch by branch, laid out once with numpy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from pagedec.core.block import BlockPool
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.forward import (
    DRAW_DTYPE,
    NO_BEST_GROUPS,
    NO_BEST_ROWS,
    NO_DRAWS,
    NO_INTS,
    LaneForward,
    freeze,
)
from pagedec.core.marks import RowMarks
from pagedec.core.plan import AskSlice
from pagedec.core.protocol import Ask, Best, Query, RowBest, Sample, TopK
from pagedec.core.ranking import Ranking
from pagedec.core.rolling import Rolls
from pagedec.core.sampler import Sampler
from pagedec.core.stopping import Stopping
from pagedec.core.table import BlockTable, CopyPlan
from pagedec.fields import MAX_UINT64


@functools.lru_cache(maxsize=4096)
def draw_record(sampler: Sampler, stream: int) -> bytes:
    """A draw's record but for its row and position."""
    names = sampler.seed & MAX_UINT64, stream & MAX_UINT64
    record = (*names, 0, 0, sampler.top_k, sampler.temperature, sampler.top_p, sampler.min_p, 0, 0)
    return np.array([record], DRAW_DTYPE).tobytes()


class LaneBuilder:
    """Collects the rows of one lane's forward, branch by branch."""

    __slots__ = (
        "_adapters", "_banned", "_counts", "_draw_positions", "_draw_records", "_draw_rows", "_logprobs", "_marks",
        "_parents", "_positions", "_ranking", "_read_only", "_read_rows", "_starts", "_tables", "_tokens", "_topk",
        "_topk_k", "_verified", "pool", "rolls",
    )  # fmt: skip

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._tables: list[BlockTable] = []
        self._starts: list[int] = []  # cache index of each branch's first row
        self._counts: list[int] = []  # rows of each branch
        self._adapters: list[int] = []  # the place of each branch's adapter, -1: it has none
        self._tokens: list[int] = []
        self._read_only: list[int] = []  # rows that write nothing
        self._parents: list[tuple[int, np.ndarray]] = []  # (first row, parents of the rows from there on)
        self._positions: list[tuple[int, np.ndarray]] = []
        self._read_rows: list[int] = []
        self._draw_records: list[bytes] = []
        self._draw_rows: list[int] = []
        self._draw_positions: list[int] = []
        self._topk: list[int] = []
        self._topk_k = 0
        self._logprobs: list[tuple[int, int]] = []
        self._banned: list[tuple[int, tuple[int, ...]]] = []
        self._ranking: Ranking | None = None
        self.rolls = Rolls()
        self._verified: list[tuple[int, int]] = []  # draw, place of the rolled token
        self._marks: RowMarks | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def add_plain(
        self, table: BlockTable, start: int, token: int, record: bytes, banned: tuple[int, ...], adapter: int = -1
    ) -> int:
        """One pending token, and one token drawn from its row; returns the draw."""
        row = len(self._tokens)
        self._tables.append(table)
        self._starts.append(start)
        self._counts.append(1)
        self._adapters.append(adapter)
        self._tokens.append(token)
        return self.draw(row, start + 1, record, banned)

    def draw(self, row: int, position: int, record: bytes, banned: tuple[int, ...]) -> int:
        """Read out one row, and draw the token at `position` from it; returns the draw."""
        draw = len(self._draw_rows)
        self._draw_rows.append(len(self._read_rows))
        self._draw_positions.append(position)
        self._draw_records.append(record)
        if banned:
            self._banned.append((len(self._read_rows), banned))
        self._read_rows.append(row)
        return draw

    def add_gang(self, tables: Sequence[BlockTable], tokens: Sequence[int], adapter: int = -1) -> int:
        """One pending token of each of some branches; returns the first's row."""
        first = len(self._tokens)
        self._tables += tables
        self._starts += [table.length for table in tables]
        self._counts += [1] * len(tables)
        self._adapters += [adapter] * len(tables)
        self._tokens += tokens
        return first

    def rank_gang(
        self, first_row: int, queries: Sequence[Query], lengths: Sequence[int], stopping: Stopping, owner: int
    ) -> list[tuple[AskSlice, ...]]:
        """Read out one row of each query from `first_row` on, whose asks are one Best each and whose branches end
        `lengths` tokens."""
        ranking = self._ranking = self._ranking or Ranking()
        first = len(self._read_rows)
        known, out = dict[tuple[int, int], tuple[AskSlice, ...]](), list[tuple[AskSlice, ...]]()
        row = first
        for asks, alike in groupby(queries, key=_asks_of):
            own = list(alike)
            [ask] = asks
            assert isinstance(ask, Best)
            scores = [query.branch.score for query in own]
            group = ranking.add(owner, ask, row, lengths[row - first : row - first + len(own)], scores)
            slices = known.setdefault((group, ask.k), (AskSlice(group, 1, ask.k, True),))
            out += [slices] * len(own)
            row += len(own)
        if stopping.min_tokens:
            for i, query in enumerate(queries):
                self._banned.append((first + i, stopping.banned(query.branch.stop_state)))
        self._read_rows += range(first_row, first_row + len(queries))
        return out

    def add(
        self,
        table: BlockTable,
        start: int,
        tokens: Sequence[int],
        root: int,
        draft: Draft | Roll = EMPTY,
        adapter: int = -1,
    ) -> int:
        """The pending chain and the draft of one branch; without a pending token, a row that only reads the root's KV.

        `root` is the last accepted token, `adapter` the place of what the rows go through. Returns the row of the last
        chain token, which is the root where the chain is whole.
        """
        first = len(self._tokens)
        chain: Sequence[int] = tokens
        if not tokens:
            chain, start = (root,), start - 1
            self._read_only.append(first)
        size = draft.num_nodes
        self._tables.append(table)
        self._starts.append(start)
        self._counts.append(len(chain) + size)
        self._adapters.append(adapter)
        self._tokens += chain
        last = first + len(chain) - 1
        if size:
            self._tokens += [0] * size if isinstance(draft, Roll) else draft.tokens
            if not draft.is_chain:
                self._parents.append((last + 1, np.array(draft.parents, np.int32) + (len(chain) - 1)))
                depths = np.array(draft.depths()[1:], np.int32)
                self._positions.append((last + 1, depths + (start + len(chain) - 1)))
        return last

    def read(
        self,
        query: Query,
        root_row: int,
        length: int,
        draft: Draft | Roll,
        stopping: Stopping,
        read: dict[int, int] | None = None,
        owner: int = 0,
    ) -> tuple[AskSlice, ...]:
        """Read out what `query` asks of the branch whose root stands at `root_row` and ends `length` tokens.

        `read` receives each node's place among the rows read out. `owner` is the request's number: its rows may be
        ranked together.
        """
        depths, rows = draft.depths(), {} if read is None else read
        slices = []
        for ask in query.asks:
            nodes = range(len(depths)) if ask.nodes is None else [node for node in ask.nodes if node < len(depths)]
            self._read_nodes(nodes, rows, root_row, depths, stopping, query.branch.stop_state)
            if isinstance(ask, Sample):
                slices.append(AskSlice(len(self._draw_rows), len(nodes), len(ask.streams)))
                records = [draw_record(ask.sampler, stream) for stream in ask.streams]
                self._draw_records += records * len(nodes)
                self._draw_rows += [rows[node] for node in nodes for _ in records]
                self._draw_positions += [length + depths[node] for node in nodes for _ in records]
            elif isinstance(ask, TopK):
                slices.append(AskSlice(len(self._topk), len(nodes), ask.k))
                self._topk += [rows[node] for node in nodes]
                self._topk_k = max(self._topk_k, ask.k)
            elif isinstance(ask, Best):
                self._ranking = self._ranking or Ranking()
                slices.append(
                    AskSlice(self._ranking.add(owner, ask, rows[0], (length,), (query.branch.score,)), 1, ask.k, True)
                )
            elif isinstance(ask, RowBest):
                self._ranking = self._ranking or Ranking()
                own, at = [rows[node] for node in nodes], [length + depths[node] for node in nodes]
                slices.append(AskSlice(self._ranking.add_alone(ask, own, at), len(nodes), ask.k))
            else:
                slices.append(AskSlice(len(self._logprobs), len(nodes), 1))
                run = zip(ask.nodes, ask.tokens, strict=True)
                self._logprobs += [(rows[node], token) for node, token in run if node in rows]
        return tuple(slices)

    def _read_nodes(
        self, nodes: Sequence[int], rows: dict[int, int], root_row: int, depths: Sequence[int], stopping: Stopping,
        state: int,
    ) -> None:  # fmt: skip
        """Read out those of `nodes` that are not among `rows` yet, and note their places there."""
        if rows or not isinstance(nodes, range):
            nodes = [node for node in dict.fromkeys(nodes) if node not in rows]
        first = len(self._read_rows)
        self._read_rows += [root_row + node for node in nodes]
        rows.update(zip(nodes, range(first, first + len(nodes)), strict=True))
        if stopping.min_tokens:
            for node in nodes:
                self._banned.append((rows[node], stopping.banned(state, depths[node])))

    # ---- rows that are processed or reported
    @property
    def marks(self) -> RowMarks:
        """What is to be done with some of the rows read out, beside answering asks."""
        if self._marks is None:
            self._marks = RowMarks()
        return self._marks

    @property
    def num_read(self) -> int:
        return len(self._read_rows)

    def mask(self, read_rows: Iterable[int]) -> None:
        """Have rows read out masked; the masks follow."""
        self.marks.masked += read_rows

    def process(
        self, read_rows: Iterable[int], rule_id: int, prompt_length: int, of_logprobs: bool, branch: int = -1
    ) -> None:
        """Have rows read out of a branch processed: `branch` counts those added, the last is -1."""
        self.marks.process(read_rows, len(self._tables) + branch, rule_id, prompt_length, of_logprobs)

    def read_given(self, first_row: int, tokens: Sequence[int], num_top: int) -> tuple[int, int]:
        """Report each of `tokens` at the rows from `first_row` on: their first places among the given tokens and
        reported rows."""
        first = len(self._read_rows)
        self._read_rows += range(first_row, first_row + len(tokens))
        return self.marks.report_given(first, tokens, num_top)

    def roll(
        self,
        table: BlockTable,
        root_row: int,
        length: int,
        roll: Roll,
        rule_id: int = -1,
        prompt_length: int = 0,
    ) -> int:
        """Roll a chain behind the branch added last, whose table ends `length` tokens; returns its place among the
        rolls."""
        draw = np.frombuffer(bytearray(draw_record(roll.sampler, roll.stream)), DRAW_DTYPE)
        draw["row"], draw["position"] = root_row, length
        first, lag = length - table.pool.lag, table.pool.lag
        slots = [table.slot(first + i) for i in range(roll.count - 1)]
        record = [draw[0], len(self._tables) - 1, roll.count, -1, max(0, prompt_length - lag), rule_id, roll.rejects, 0]
        return self.rolls.add(record, roll, slots)

    def verify(self, draws: Iterable[int], rolled: Iterable[int]) -> None:
        """Have draws verify, by rejection, the tokens at these places among all rolled."""
        self._verified += zip(draws, rolled, strict=True)

    # ---- laying out
    def finish(self, copies: CopyPlan, loads: tuple[np.ndarray, np.ndarray] = (NO_INTS, NO_INTS)) -> LaneForward:
        """The lane's forward. Copies and fresh blocks are the pool's own since the last one, `loads` the adapters'."""
        pool = self.pool
        starts, counts = np.array(self._starts, np.int32), np.array(self._counts, np.int32)
        num_branches, num_rows = len(starts), len(self._tokens)
        indptr = np.zeros(num_branches + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        if num_rows == num_branches:
            branch_ids, index = np.arange(num_rows), starts
        else:
            branch_ids = np.repeat(np.arange(num_branches), counts)
            index = np.arange(num_rows, dtype=np.int32) + (starts - indptr[:-1])[branch_ids]
        block_table, slots = self._slots(branch_ids, index)
        positions, parents = self._trees(index)
        has_adapters = max(self._adapters, default=-1) >= 0
        copy_src, copy_dst = copies.arrays()
        fresh, pool.fresh = np.array(pool.fresh, np.int32), []
        moves = (NO_INTS, NO_INTS) if pool.offload is None else pool.offload.take_moves()
        topk, logprobs, banned = self._topk, _pairs(self._logprobs), _each(self._banned)
        verified = _pairs(self._verified)
        best_rows, best_groups = (NO_BEST_ROWS, NO_BEST_GROUPS) if self._ranking is None else self._ranking.arrays()
        forward = LaneForward(
            lane=pool.lane,
            token_ids=np.array(self._tokens, np.int32),
            positions=positions,
            slots=slots,
            row_indptr=indptr,
            kv_len=starts + counts,
            block_table=block_table,
            parents=parents,
            adapters=np.array(self._adapters, np.int32)[branch_ids] if has_adapters else NO_INTS,
            copy_src=copy_src,
            copy_dst=copy_dst,
            offload_blocks=moves[0],
            offload_places=moves[1],
            load_places=loads[0],
            load_adapters=loads[1],
            fresh=fresh,
            read_rows=np.array(self._read_rows, np.int32),
            draws=self._draws(),
            topk_rows=np.array(topk, np.int32) if topk else NO_INTS,
            topk_k=self._topk_k,
            logprob_rows=logprobs[0],
            logprob_tokens=logprobs[1],
            best_rows=best_rows,
            best_groups=best_groups,
            banned_rows=banned[0],
            banned_tokens=banned[1],
            masked_rows=np.array(self._marks.masked, np.int32) if self._marks and self._marks.masked else NO_INTS,
            rolls=self.rolls.records(),
            roll_slots=self.rolls.slots(),
            roll_indptr=self.rolls.indptr(),
            feature_slots=self.rolls.feature_slots(),
            verified_draws=verified[0],
            verified_tokens=verified[1],
            processing=None if self._marks is None else self._marks.processing(),
            report=None if self._marks is None else self._marks.report(),
        )
        freeze(forward)
        return forward

    def _slots(self, branch_ids: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The branches' block tables, and each row's slot, by its branch and its cache index."""
        pool, size = self.pool, self.pool.block_size
        width = max([table.num_blocks for table in self._tables], default=0)
        if not width:
            return pool.rows[:0, :0], np.zeros(0, np.int32)
        block_table = pool.rows[:, :width].take([table.row for table in self._tables], axis=0)
        slots = block_table[branch_ids, index // size] * size + index % size
        if self._read_only:
            slots[self._read_only] = -1
        return block_table, slots

    def _trees(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Positions, which differ from cache indices in trees only; and parents if there is a tree."""
        if not self._parents:
            return index, None
        positions = index.copy()
        parents = np.full(len(index), -1, np.int32)
        for first, values in self._positions:
            positions[first : first + len(values)] = values
        for first, values in self._parents:
            parents[first : first + len(values)] = values
        return positions, parents

    def _draws(self) -> np.ndarray:
        if not self._draw_records:
            return NO_DRAWS
        draws = np.frombuffer(bytearray().join(self._draw_records), DRAW_DTYPE)
        draws["row"] = self._draw_rows
        draws["position"] = self._draw_positions
        return draws


def _asks_of(query: Query) -> tuple[Ask, ...]:
    return query.asks


def _pairs(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    if not pairs:
        return NO_INTS, NO_INTS
    array = np.array(pairs, np.int32)
    return np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, 1])


def _each(given: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of each row with each of its tokens. They may be a vocabulary, of many rows the same one."""
    if not given:
        return NO_INTS, NO_INTS
    tokens = {id(own): own for _, own in given}
    arrays = {name: np.array(own, np.int32) for name, own in tokens.items()}
    rows = np.array([row for row, _ in given], np.int32).repeat([len(own) for _, own in given])
    return rows, np.concatenate([arrays[id(own)] for _, own in given])
