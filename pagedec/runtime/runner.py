"""Carries out a step's forwards on the device: copies, then the draft lane's rolls, then the target."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pagedec.core.processing import NO_PROCESSING, Processing, ProcessRows
from pagedec.core.protocol import DRAW_DTYPE, Answers, LaneAnswers, LaneForward, RollPlan
from pagedec.errors import InvariantError
from pagedec.fields import MAX_UINT64
from pagedec.kernels.backend import CacheTensors
from pagedec.models.base import Model
from pagedec.models.buffers import READ_ROWS
from pagedec.runtime.cache import poison
from pagedec.runtime.readout import Reading, read_piece

MAX_RULES = 1024
"""Requests' rules kept in the form that a lane's model takes."""


class LaneRunner:
    """One model with its cache, a plan for each kind of its layers, and the programs over its buffers.

    `vocab_size`: token ids from there on are never drawn; None: all that the model knows may be.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheTensors,
        max_rows: int,
        debug: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.cache, self.backend, self.debug = model, cache, model.backend, debug
        known = model.arch.vocab_size
        self.num_drawn = known if vocab_size is None else min(known, vocab_size)
        self._rules: OrderedDict[int, tuple[Processing, Processing]] = OrderedDict()
        self.buffers = model.buffers(max_rows)
        self.plans = [self.backend.plan(shape) for shape in model.attention_shapes(cache.block_size)]
        self.programs = model.programs(self.buffers, cache, self.plans)

    def prepare(self, forward: LaneForward) -> None:
        """What must precede every read and write of the step: poison in debug builds, then the copies in order."""
        if self.debug and len(forward.fresh):
            poison(self.cache, forward.fresh)
        if len(forward.copy_src):
            self.backend.copy_slots(self.cache, forward.copy_src, forward.copy_dst)

    def execute(self, forward: LaneForward) -> LaneAnswers:
        """Evaluate the rows and answer what is asked of them."""
        reading, rows = Reading.of(forward), forward.read_rows
        if len(forward.token_ids):
            self.buffers.load(forward.token_ids, forward.positions, forward.slots)
            for plan in self.plans:
                plan.update(forward.row_indptr, forward.kv_len, forward.block_table, forward.parents)
            if 0 < len(rows) <= READ_ROWS:  # nearly always: one program, from token ids to logits
                logits = self.buffers.load_read(rows)
                self.programs.whole.run()
                self._read(forward, logits, 0, reading)
            else:
                self.programs.body.run()
                for start in range(0, len(rows), READ_ROWS):
                    logits = self.buffers.load_read(rows[start : start + READ_ROWS])
                    self.programs.head.run()
                    self._read(forward, logits, start, reading)
        return LaneAnswers(
            reading.draws, reading.topk_tokens, reading.topk_logprobs, reading.logprobs, [], reading.report
        )

    def _read(self, forward: LaneForward, logits: torch.Tensor, start: int, reading: Reading) -> None:
        if self.debug and bool(logits.isnan().any()):
            raise InvariantError("logits are NaN: a row read a slot that no row had written")
        if self.num_drawn < logits.shape[1]:
            logits[:, self.num_drawn :] = float("-inf")
        read_piece(self.backend, forward, logits, start, self.cache, reading)

    def _known_rules(self, processing: Processing) -> Processing:
        """A request's rules about the tokens of this model, which may know fewer than the request's own. Found by their identity:
        long ones take long to compare."""
        found = self._rules.get(id(processing))
        if found is None:
            if len(self._rules) >= MAX_RULES:
                self._rules.popitem(last=False)
            found = self._rules[id(processing)] = processing, processing.within(self.model.arch.vocab_size)
        return found[1]

    def _processing(self, rolls: Sequence[RollPlan], branches: Sequence[int]) -> ProcessRows | None:
        """The rows of a forward that reads one row for each roll: those whose request processes its logits."""
        rows = [row for row, roll in enumerate(rolls) if roll.processing is not NO_PROCESSING]
        if not rows:
            return None
        return ProcessRows(
            np.array(rows, np.int32), np.array([branches[row] for row in rows], np.int32),
            np.array([rolls[row].prompt_length for row in rows], np.int32), np.arange(len(rows), dtype=np.int32),
            tuple(self._known_rules(rolls[row].processing) for row in rows),
        )  # fmt: skip

    def roll(self, forward: LaneForward) -> list[tuple[int, ...]]:
        """Continue the chains that `execute` began: the i-th token of each is evaluated to give the next one."""
        rolls = forward.rolls
        chains: list[list[int]] = [[] for _ in rolls]
        processing = self._processing(rolls, [roll.branch for roll in rolls])
        answers = self.execute(_with_draws(forward, _first_draws(forward), processing))
        for chain, token in zip(chains, answers.draws.tolist(), strict=True):
            chain.append(token)
        for i in range(1, max(roll.count for roll in rolls)):
            going = [r for r, roll in enumerate(rolls) if roll.count > i]
            going_rolls = [rolls[r] for r in going]
            processing = self._processing(going_rolls, range(len(going)))
            step = _roll_forward(forward, going_rolls, [chains[r][-1] for r in going], i, processing)
            for r, token in zip(going, self.execute(step).draws.tolist(), strict=True):
                chains[r].append(token)
        return [tuple(chain) for chain in chains]


class ModelRunner:
    """All lanes of an engine in this process."""

    def __init__(self, lanes: Mapping[str, LaneRunner]) -> None:
        self.lanes = dict(lanes)

    def execute(self, forwards: Mapping[str, LaneForward]) -> Answers:
        """Carry out one step. Rolled tokens enter the target's rows before its forward."""
        for lane, forward in forwards.items():
            self.lanes[lane].prepare(forward)
        answers: Answers = {}
        draft, target = forwards.get("draft"), forwards.get("target")
        if draft is not None:
            runner = self.lanes["draft"]
            if draft.rolls:
                rolled = runner.roll(draft)
                answers["draft"] = LaneAnswers(*_nothing(), rolled=rolled)
                if target is not None:
                    _enter_rolled(target, draft.rolls, rolled)
            else:
                answers["draft"] = runner.execute(draft)
        if target is not None:
            answers["target"] = self.lanes["target"].execute(target)
        return answers


def _enter_rolled(target: LaneForward, rolls: list[RollPlan], rolled: list[tuple[int, ...]]) -> None:
    for roll, chain in zip(rolls, rolled, strict=True):
        if roll.target_row >= 0:
            target.token_ids[roll.target_row : roll.target_row + roll.count] = chain


def _draw(roll: RollPlan, row: int, position: int) -> tuple[int, int, int, int, int, float, float, float]:
    s = roll.sampler
    return (s.seed & MAX_UINT64, roll.stream & MAX_UINT64, row, position, s.top_k, s.temperature, s.top_p, s.min_p)


def _first_draws(forward: LaneForward) -> np.ndarray:
    return np.array(
        [_draw(roll, i, int(forward.positions[roll.row]) + 1) for i, roll in enumerate(forward.rolls)], DRAW_DTYPE
    )


def _nothing() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32), np.empty(0, np.float32)


def _with_draws(forward: LaneForward, draws: np.ndarray, processing: ProcessRows | None) -> LaneForward:
    """The draft lane's forward, read out at the rows where chains begin."""
    none = np.empty(0, np.int32)
    return LaneForward(
        forward.lane, forward.token_ids, forward.positions, forward.slots, forward.parents, forward.row_indptr,
        forward.kv_len, forward.block_table, none, none, none,
        np.array([roll.row for roll in forward.rolls], np.int32), draws, none, 0, none, none, none, none, [],
        processing,
    )  # fmt: skip


def _roll_forward(
    forward: LaneForward, rolls: list[RollPlan], tokens: list[int], i: int, processing: ProcessRows | None
) -> LaneForward:
    """One more row for each chain: its last token, in the slot reserved for it."""
    n = len(rolls)
    branches = [roll.branch for roll in rolls]
    positions = forward.positions[[roll.row for roll in rolls]] + np.int32(i)
    draws = np.array(
        [_draw(roll, r, int(at) + 1) for r, (roll, at) in enumerate(zip(rolls, positions, strict=True))], DRAW_DTYPE
    )
    none = np.empty(0, np.int32)
    return LaneForward(
        forward.lane, np.array(tokens, np.int32), positions, np.array([r.slots[i - 1] for r in rolls], np.int32), None,
        np.arange(n + 1, dtype=np.int32), positions + np.int32(1), forward.block_table[branches], none, none, none,
        np.arange(n, dtype=np.int32), draws, none, 0, none, none, none, none, [], processing,
    )  # fmt: skip
