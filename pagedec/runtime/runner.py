"""One lane of a device: a model, its cache, and the programs over its buffers, carried out for one forward after the
other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagedec.core.forward import LaneAnswers, LaneForward, Masks, Problems, ProcessRows, num_rolled
from pagedec.core.logits_rules import LogitsRules
from pagedec.core.wire import Step
from pagedec.errors import InvariantError
from pagedec.kernels.backend import Backend, CacheTensors, Drafted, ReadOut
from pagedec.kernels.drawn import LateReadOut
from pagedec.kernels.row_buffer import RowBuffer
from pagedec.models.buffers import READ_ROWS
from pagedec.models.model import Model
from pagedec.runtime.adapters import AdapterLoader
from pagedec.runtime.offloaded_blocks import OffloadedBlocks


class RuleTable(dict[int, Any]):
    """Rules in a backend's own form, by number, made when a row first names them: ones that make no sense fail whoever
    uses them."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        super().__init__()
        self._backend, self._vocab_size = backend, vocab_size
        self.told: dict[int, LogitsRules] = {}

    def __missing__(self, rule_id: int) -> Any:
        known = self.told[rule_id].within(self._vocab_size)
        self[rule_id] = made = self._backend.rules(known, self._vocab_size)
        return made


class LaneRunner:
    """One model with its cache, a plan for each kind of its layers, and the programs over its buffers.

    `vocab_size`: token ids from there on are never drawn; None: all that the model knows may be.
    `num_offload_blocks`: places in the host's memory for blocks that the pool gives up.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheTensors,
        max_rows: int,
        debug: bool = False,
        vocab_size: int | None = None,
        num_offload_blocks: int = 0,
    ) -> None:
        self.model, self.cache, self.backend, self.debug = model, cache, model.backend, debug
        self._process = os.getpid()
        self._offload = OffloadedBlocks(cache, num_offload_blocks, self.backend) if num_offload_blocks else None
        known = self._num_known = model.arch.vocab_size
        self.num_drawn = known if vocab_size is None else min(known, vocab_size)
        self._rules = RuleTable(self.backend, known)
        self._adapters = None if model.adapters is None else AdapterLoader(model.adapters)
        self.buffers = model.buffers(max_rows)
        self.plans = [self.backend.plan(shape) for shape in model.attention_shapes(cache.block_size)]
        self.programs = self._plain = model.programs(self.buffers, cache, self.plans)
        if self.buffers.adapters is not None:  # where no row has one, none of their kernels is there
            self._plain = model.programs(self.buffers.without_adapters(), cache, self.plans)
        self._chained = model.chained(self.buffers, cache, self.plans) or self.programs
        self._roller = None  # the draft lane has one; it is in one piece
        if self.backend.link is None:
            self._roller = self.backend.roller(
                self._chained, self.buffers, self.plans, cache, self.num_drawn, debug, model.lag
            )
        link = self.backend.link
        # ranks that exchange values in their devices' streams are through with a step when these are
        self._waits = link is not None and link.received is not None
        self._drawn = self.backend.drawn_tokens()
        self._kept, self._reported = RowBuffer(self.backend, known), RowBuffer(self.backend, known)
        self._has_answered = False  # a model that gives no numbers is told at its first answer: nobody looks again
        self.is_begun = self.is_through = True
        """All programs of the last forward are on their way; have been run, whatever became of what was read."""

    def learn(self, rule_id: int, rules: LogitsRules) -> None:
        """Keep what a request has done to its logits under a number, as far as it is about tokens that this model
        knows."""
        self._rules.told[rule_id] = rules

    def forget(self, rule_id: int) -> None:
        """No row will name this number any more."""
        self._rules.told.pop(rule_id, None)
        self._rules.pop(rule_id, None)

    def tell_adapters(self, step: Step) -> None:
        """Keep which files a step's adapters are in."""
        if self._adapters is not None:
            self._adapters.tell(step.new_adapters, step.old_adapters)

    def prepare(self, forward: LaneForward) -> Problems:
        """What must precede every read and write of the step: adapters take places, blocks go to the host and come
        back, fresh ones are poisoned in debug builds, then the copies in order. Gives the adapters that are not
        there."""
        problems: Problems = {}
        if os.getpid() != self._process and torch.get_num_threads() > 1:  # a fork has but this one: torch would wait
            torch.set_num_threads(1)
        if self._adapters is not None and len(forward.load_places):
            problems = self._adapters.load(forward.load_places, forward.load_adapters)
        if self._offload is not None and len(forward.offload_blocks):
            self._offload.move(forward.offload_blocks, forward.offload_places)
        if self.debug and len(forward.fresh):
            self.backend.poison(self.cache, forward.fresh)
        if len(forward.copy_src):
            self.backend.copy_slots(self.cache, forward.copy_src, forward.copy_dst)
        return problems

    def execute(
        self,
        forward: LaneForward,
        masks: Callable[[], Masks] | None = None,
        drafted: Drafted | None = None,
        keep: Callable[[torch.Tensor, int], None] | None = None,
        chains: np.ndarray | None = None,
    ) -> LaneAnswers:
        """Evaluate the rows and answer what is asked of them. `masks` is asked when the rows are on their way: between
        a program's run and what is read of its logits. `drafted` is what `verified_draws` verify. `keep` is shown the
        logits of each piece that is read out, processed, and its first row's place. `chains`: as in `evaluate`."""
        read_out, pieces = None, self.evaluate(forward, chains=chains)
        try:
            for logits, start in pieces:
                self._restrict(logits)
                read_out = read_out or self._read_out(forward, masks, drafted)
                read_out.read(logits, start)
                if keep is not None:
                    keep(logits, start)
        except Exception:
            for _ in pieces:  # the ranks that share the model are on their way through all of it
                pass
            raise
        return (read_out or self._read_out(forward)).answers()

    def begin(self, forward: LaneForward) -> Callable[[], LaneAnswers]:
        """As `execute` where draws alone are asked for, and reports. They are there when what this gives is called:
        until then the device works by itself, and rows of the next forward may be of tokens that it draws."""
        read_out = None  # not before the rows have the tokens that were drawn last
        pieces = self.evaluate(forward, is_late=True)
        try:
            for logits, start in pieces:
                self._restrict(logits)
                read_out = read_out or self._late_read_out(forward)
                read_out.read(logits, start)
            return (read_out or self._late_read_out(forward)).later()
        except Exception:
            for _ in pieces:
                pass
            self.backend.wait()
            self.is_through = self.is_begun
            self._drawn.begin(len(forward.draws))  # for the step behind, whose rows are nobody's
            raise

    def follow(self, forward: LaneForward) -> Callable[[], object]:
        """Evaluate rows that the first rank reads out. What this gives returns when they are through; until then the
        device works by itself."""
        for _ in self.evaluate(forward, is_late=True):
            pass
        self._drawn.begin(0)
        return self._drawn.later()

    def _restrict(self, logits: torch.Tensor) -> None:
        if (self.debug or not self._has_answered) and self.backend.has_nan(logits):
            causes = "weights that are no numbers or overflow, or a row read a slot that no row had written"
            raise InvariantError(f"logits are NaN: {causes}")
        self._has_answered = True
        if self.num_drawn < self._num_known:
            self.backend.restrict(logits, num_drawn=self.num_drawn)

    def evaluate(
        self, forward: LaneForward, is_late: bool = False, chains: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Evaluate the rows. Gives the logits of each piece that is to be read out, and its first row's place.
        `is_late`: nobody waits for the device; `chains`: the rolls that the rows go on with, each row one."""
        rows = forward.read_rows
        self.is_begun = self.is_through = not len(forward.token_ids)
        if self.is_through:
            return
        self.buffers.load(forward.token_ids, forward.positions, forward.slots, forward.adapters)
        if forward.token_ids.min() < 0:
            awaited = np.flatnonzero(forward.token_ids < 0)
            self._drawn.put(self.buffers.token_ids, awaited, -1 - forward.token_ids[awaited])
        for plan in self.plans:
            plan.update(forward.row_indptr, forward.kv_len, forward.block_table, forward.parents)
        own, features = self.buffers.adapters, self.buffers.features
        programs = self._plain if own is None or not own.is_used else self.programs
        if features is not None:
            programs = self.programs if chains is None else self._chained
            features.load(forward.feature_slots, _beginnings(forward) if chains is None else chains)
        is_one = 0 < len(rows) <= READ_ROWS  # nearly always: one program, from token ids to logits
        if not is_one:
            programs.body.run()
        for start in range(0, len(rows), READ_ROWS):
            logits = self.buffers.load_read(rows[start : start + READ_ROWS])
            (programs.whole if is_one else programs.head).run()
            self.is_through = not self._waits and start + READ_ROWS >= len(rows)
            yield logits, start
        self.is_begun = True
        if self._waits and is_late:
            return
        if self._waits:
            self.backend.wait()
        self.is_through = True

    def _read_out(
        self, forward: LaneForward, masks: Callable[[], Masks] | None = None, drafted: Drafted | None = None
    ) -> ReadOut:
        given = masks() if masks is not None and len(forward.masked_rows) else None
        return self.backend.read_out(forward, self.cache, self._rules, given, drafted, self._reported)

    def _late_read_out(self, forward: LaneForward) -> LateReadOut:
        return LateReadOut(self.backend, forward, self.cache, self._rules, self._drawn, self._reported)

    # ---- chains
    def roll(self, forward: LaneForward) -> np.ndarray:
        """The forward, and the chains that begin in it: the i-th token of each is evaluated to give the next one.
        Returns the chains, one behind the other, each place by place: int32 [roll_indptr[-1]]."""
        counts, indptr = forward.rolls["count"], forward.roll_indptr
        firsts, rows = np.cumsum(counts) - counts, self._kept_rows(forward.rolls)
        tokens, widths = np.empty(num_rolled(forward), np.int32), np.diff(indptr)
        first = _beginning(forward, widths[firsts])
        tokens[indptr[firsts].repeat(widths[firsts]) + first.draws["rank"]] = self.execute(
            first, keep=self._keeper(rows)
        ).draws
        if self._roller is not None:
            self._roller.carry_on(forward, tokens, self._rules, self._kept.rows, rows)
            return tokens
        first_slots = np.cumsum(counts - 1) - (counts - 1)
        for i in range(1, int(counts.max())):
            going = np.nonzero(counts > i)[0]
            slots = forward.roll_slots[first_slots[going] + (i - 1)]
            own, before = firsts[going] + i, tokens[indptr[firsts[going] + (i - 1)]]
            draws = _draws(forward.rolls[going], i, widths[own])
            step = _continued(forward, forward.rolls[going], before, slots, draws, self.model.lag)
            keep = self._keeper(rows[going], i)
            drawn = self.execute(step, keep=keep, chains=going.astype(np.int32)).draws
            tokens[indptr[own].repeat(widths[own]) + draws["rank"]] = drawn
        return tokens

    def drafted(self, forward: LaneForward, rolled: np.ndarray, given: np.ndarray) -> Drafted:
        """Of the forward that was rolled last: the tokens at the places `given` among `rolled`, which were kept.
        Another lane's kernels read what they were drawn from, which is in no order with this lane's."""
        self.backend.wait()
        rolls = forward.rolls
        ends, places = np.cumsum(rolls["count"]), np.searchsorted(forward.roll_indptr, given, side="right") - 1
        owners = np.searchsorted(ends, places, side="right")
        index = places - (ends - rolls["count"])[owners]
        draws = rolls["draw"][owners]
        draws["row"], draws["position"] = self._kept_rows(rolls)[owners] + index, draws["position"] + index
        return Drafted(self._kept.rows, draws, rolled[given])

    def _kept_rows(self, rolls: np.ndarray) -> np.ndarray:
        """Where the logits begin that each roll's tokens are drawn from, -1: they are not kept. There is room."""
        counts = np.where(rolls["is_kept"] != 0, rolls["count"], 0)
        self._kept.reserve(int(counts.sum()))
        return np.where(counts > 0, np.cumsum(counts) - counts, -1)

    def _keeper(self, rows: np.ndarray, i: int = 0) -> Callable[[torch.Tensor, int], None] | None:
        """Keeps the logits that the i-th tokens of chains are drawn from, in the order of `rows`, their first ones."""
        if not (rows >= 0).any():
            return None

        def keep(logits: torch.Tensor, start: int) -> None:
            own = rows[start : start + len(logits)]
            chosen = np.nonzero(own >= 0)[0]
            if len(chosen):
                self.backend.copy_rows(logits, chosen, self._kept.rows, own[chosen] + i)

        return keep


def _beginning(forward: LaneForward, widths: np.ndarray) -> LaneForward:
    """The draft lane's forward, read out at the rows where chains begin."""
    rolls = forward.rolls
    rows, processing = np.ascontiguousarray(rolls["draw"]["row"]), _processing(rolls, rolls["branch"])
    return replace(forward, read_rows=rows, draws=_draws(rolls, 0, widths), processing=processing)


def _beginnings(forward: LaneForward) -> np.ndarray:
    """For each row the chain that begins behind it, -1: none. int32 [num_rows]."""
    chains = np.full(len(forward.token_ids), -1, np.int32)
    chains[forward.rolls["draw"]["row"]] = np.arange(len(forward.rolls))
    return chains


def _continued(
    forward: LaneForward, rolls: np.ndarray, tokens: np.ndarray, slots: np.ndarray, draws: np.ndarray, lag: int
) -> LaneForward:
    """One more row for each chain: its last token, in the slot reserved for it."""
    rows = np.arange(len(rolls), dtype=np.int32)
    kv_len = draws["position"][draws["rank"] == 0] - np.int32(lag)
    return LaneForward(
        lane=forward.lane,
        token_ids=tokens,
        positions=kv_len - np.int32(1),
        slots=slots,
        row_indptr=np.arange(len(rolls) + 1, dtype=np.int32),
        kv_len=kv_len,
        block_table=forward.block_table[rolls["branch"]],
        read_rows=rows,
        draws=draws,
        processing=_processing(rolls, rows),
    )


def _draws(rolls: np.ndarray, i: int, widths: np.ndarray) -> np.ndarray:
    """How the i-th token of each chain is drawn, and those behind it, `widths` in all, from one read-out row each."""
    draws = rolls["draw"].repeat(widths)
    draws["row"] = np.arange(len(rolls)).repeat(widths)
    draws["rank"] = np.arange(len(draws)) - (np.cumsum(widths) - widths).repeat(widths)
    draws["position"] += i
    return draws


def _processing(rolls: np.ndarray, branches: np.ndarray) -> ProcessRows | None:
    """The rows of a forward that reads one row for each roll: those whose request processes its logits."""
    rows = np.nonzero(rolls["rule_id"] >= 0)[0].astype(np.int32)
    if not len(rows):
        return None
    some = rolls[rows]
    return ProcessRows(
        rows,
        np.ascontiguousarray(branches[rows]),
        np.ascontiguousarray(some["prompt_length"]),
        np.ascontiguousarray(some["rule_id"]),
        np.zeros(len(rows), np.int32),
    )
