"""Rolls of a head that lags behind the text and reads what its own rows before have made, chain by chain: the tokens,
the memory and the kept logits of a call for each kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.core.forward import ROLL_DTYPE, LaneForward, ProcessRows
from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.backend import AttentionShape, Rope
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, DEVICES, Epilogue, KernelError, available_isas, load
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls, cuda_library
from tests.kernels.test_block_swap import put

pytestmark = pytest.mark.skipif(not available_isas(), reason="there are no compiled kernels")
HEADS, KV_HEADS, DIM, BLOCK, ROOM, MAX_ROWS = 2, 1, 16, 8, 3, 9
HIDDEN, VOCAB, KNOWN, DRAWN, WIDTH = 32, 140, 57, 131, 66
CASES: list[Any] = [*itertools.product(available_isas(), calls.DTYPES)]
CASES += [
    pytest.param((case.values[0], dtype), marks=case.marks) for case in cuda_library.cases() for dtype in calls.CODES
]


@pytest.fixture(params=CASES, ids=str)
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    isa, dtype = request.param
    if isa == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    return DeviceBackend(load(isa), dtype) if isa in DEVICES else NativeBackend(load(isa), dtype, num_threads=2)


class Head:
    """A layer over a row's token and what its chain's row before has left; its logits are of some tokens."""

    def __init__(self, backend: NativeBackend) -> None:
        zeros, own, f32, i32 = backend.zeros, backend.dtype, torch.float32, torch.int32
        self.backend = backend
        self.num_rows, self.num_read, self.read_rows = zeros((1,), i32), zeros((1,), i32), zeros((ROOM,), i32)
        self.token_ids, self.positions, self.slots = (zeros((MAX_ROWS,), i32) for _ in range(3))
        self.features = SimpleNamespace(chains=zeros((MAX_ROWS,), i32))
        self.logits, self.known_logits = zeros((ROOM, VOCAB), f32), zeros((ROOM, KNOWN), f32)
        self.x, self.carried = zeros((MAX_ROWS, HIDDEN), f32), zeros((MAX_ROWS, HIDDEN), f32)
        self.pairs, self.read = zeros((MAX_ROWS, 2 * HIDDEN), own), zeros((ROOM, HIDDEN), own)
        self.qkv = zeros((MAX_ROWS, (HEADS + 2 * KV_HEADS) * DIM), own)
        self.q, self.attended = (zeros((MAX_ROWS, HEADS * DIM), own) for _ in range(2))
        self.cache = backend.cache(1, MAX_ROWS * WIDTH, KV_HEADS, DIM, BLOCK)
        self.plan = backend.plan(AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, 0.25))
        places = torch.full((VOCAB,), -1, dtype=i32)
        places[torch.randperm(VOCAB, generator=calls.generator(1))[:KNOWN]] = calls.ints(range(KNOWN))
        table, angles = calls.normal(VOCAB, HIDDEN, seed=2), calls.normal(BLOCK * WIDTH, DIM, seed=3)
        self.table, self.places = backend.place(table.to(own)), backend.place(places)
        self.rope = Rope(backend.place(angles), DIM)
        shapes = ((HIDDEN, HEADS * DIM), (KNOWN, HIDDEN), (self.qkv.shape[1], 2 * HIDDEN))
        self.out, self.head, self.to_qkv = (
            backend.pack(calls.normal(*shape, seed=i, scale=0.3)) for i, shape in enumerate(shapes)
        )
        lists = [(True, False), (False, True), (True, True)]
        self.body_list, self.head_list, self.whole_list = (self._recorded(*parts) for parts in lists)

    def _recorded(self, has_body: bool, has_head: bool) -> Any:
        p, n, m, chains = self.backend.program(), self.num_rows, self.num_read, self.features.chains
        if has_body:
            p.embed(n, self.token_ids, self.table, self.x, self.slots, self.cache.tokens)
            p.copy_rows(n, self.x, self.pairs[:, :HIDDEN])
            p.copy_rows(n, self.carried, self.pairs[:, HIDDEN:], chains, scale=0.5)
            p.linear(n, self.pairs, self.to_qkv, self.qkv)
            p.rope_kv_write(n, self.qkv, self.q, self.cache, 0, self.positions, self.slots, self.rope)
            p.attention(n, self.plan, self.q, self.cache, 0, self.attended)
            p.linear(n, self.attended, self.out, self.x, Epilogue.ADD)
            p.copy_rows(n, self.x, self.carried, dst_rows=chains)
        if has_head:
            p.rms_norm(m, self.x, None, self.read, 0.0, self.read_rows)
            p.linear(m, self.read, self.head, self.known_logits)
            p.spread_logits(m, self.known_logits, self.places, self.logits)
        p.finish()
        return p

    @property
    def programs(self) -> Any:
        return SimpleNamespace(whole=self.whole_list, body=self.body_list, head=self.head_list)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that stays."""
        return self.backend.memory.get(tensor) if isinstance(self.backend, DeviceBackend) else tensor.clone()


@dataclass(frozen=True, slots=True)
class Rolls:
    """Chains of any branches, in blocks of any order; some with rules, some kept."""

    forward: LaneForward
    tokens: np.ndarray
    kept_rows: np.ndarray
    lag: int

    @property
    def chain(self) -> np.ndarray:
        """Where the tokens of the chains themselves are, place by place, and behind them how many tokens there are."""
        return self.forward.roll_indptr

    @classmethod
    def make(cls, lag: int, is_wide: bool = False) -> Rolls:
        rng, counts = np.random.default_rng(3), [4, 1, 6, 2, 5, 3, 6]
        rolls, firsts = np.zeros(len(counts), ROLL_DTYPE), np.cumsum(counts) - counts
        rolls["count"], rolls["branch"] = counts, rng.permutation(len(counts) + 2)[: len(counts)]
        positions = [max(1, lag), 7, 509, 31, 12, 64, 40]
        rolls["draw"] = calls.draws(len(counts), seed=range(len(counts)), position=positions, stream=1)
        rolls["draw"]["temperature"][2:5] = [0.0, 0.7, 1.3]
        rolls["rule_id"], rolls["prompt_length"] = [-1, 5, 5, -1, 6, -1, 5], np.maximum(1, np.array(positions) - 3)
        table = rng.permutation(MAX_ROWS * WIDTH).reshape(MAX_ROWS, WIDTH).astype(np.int32)
        slots = [
            table[roll["branch"]][at // BLOCK] * BLOCK + at % BLOCK
            for roll in rolls
            for at in range(roll["draw"]["position"] - lag, roll["draw"]["position"] - lag + roll["count"] - 1)
        ]
        none = np.zeros(0, np.int32)
        widths = rng.permutation(np.arange(sum(counts)) % 4 + 1) if is_wide else np.ones(sum(counts), np.int32)
        places = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
        forward = LaneForward(
            "draft", none, none, none, none, none, table, rolls=rolls, roll_slots=np.array(slots), roll_indptr=places
        )
        tokens = np.full(int(places[-1]), -1, np.int32)
        for first in firsts:
            tokens[places[first] : places[first + 1]] = rng.integers(0, DRAWN, places[first + 1] - places[first])
        kept_rows = np.where(np.arange(len(counts)) % 3 == 1, -1, firsts).astype(np.int32)
        return cls(forward, tokens, kept_rows, lag)


def known(backend: NativeBackend) -> dict[int, Any]:
    rules = {5: LogitsRules(repetition_penalty=1.5), 6: LogitsRules(no_repeat_ngram_size=1, presence_penalty=0.5)}
    return {number: backend.rules(own, VOCAB) for number, own in rules.items()}


def step_by_step(head: Head, rolls: Rolls, kept: torch.Tensor) -> np.ndarray:
    """The same by single calls."""
    backend, chains, counts = head.backend, rolls.forward.rolls, rolls.forward.rolls["count"]
    tokens, firsts, first_slots = rolls.tokens.copy(), np.cumsum(counts) - counts, np.cumsum(counts - 1) - (counts - 1)
    for i in range(1, int(counts.max())):
        going = np.nonzero(counts > i)[0].astype(np.int32)
        n, rows, own_places = len(going), np.arange(len(going), dtype=np.int32), rolls.chain[firsts[going] + i]
        positions = chains["draw"]["position"][going] + i - 1 - rolls.lag
        slots, given = rolls.forward.roll_slots[first_slots[going] + i - 1], tokens[rolls.chain[firsts[going] + i - 1]]
        inputs = (head.num_rows, head.token_ids, head.positions, head.slots, head.features.chains)
        for tensor, array in zip(inputs, (np.array([n]), given, positions, slots, going), strict=True):
            backend.write(tensor, array.astype(np.int32))
        table = rolls.forward.block_table[chains["branch"][going]]
        shape = (np.arange(n + 1, dtype=np.int32), (positions + 1).astype(np.int32), table)
        head.plan.update(*shape, None)
        head.body_list.run()
        ruled = rows[chains["rule_id"][going] >= 0]
        own = chains[going[ruled]]
        processing = ProcessRows(ruled, ruled, own["prompt_length"].copy(), own["rule_id"].copy(), np.zeros_like(ruled))
        step = LaneForward("draft", given, positions, slots, *shape, read_rows=rows, processing=processing)
        for start in range(0, n, ROOM):
            piece = going[start : start + ROOM]
            backend.write(head.num_read, np.array([len(piece)], np.int32))
            backend.write(head.read_rows, rows[start : start + ROOM])
            head.head_list.run()
            logits = head.logits[: len(piece)]
            backend.restrict(logits, num_drawn=DRAWN)
            backend.process_logits(logits, start, step, head.cache, known(backend))
            keeping = np.nonzero(rolls.kept_rows[piece] >= 0)[0].astype(np.int32)
            if len(keeping):
                backend.copy_rows(logits, keeping, kept, rolls.kept_rows[piece[keeping]] + i)
            for row, (chain, place) in enumerate(zip(piece, own_places[start : start + ROOM], strict=True)):
                stop = rolls.chain[firsts[chain] + i + 1]
                draws = chains["draw"][[chain]].repeat(stop - place)
                draws["row"], draws["position"], draws["rank"] = row, draws["position"] + i, np.arange(stop - place)
                tokens[place:stop] = backend.sample(logits, draws)
    return tokens


@pytest.mark.parametrize("is_wide", [False, True], ids=["chains", "wide"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_roll_is_its_single_steps(backend: NativeBackend, lag: int, is_wide: bool) -> None:
    """`is_wide`: 1 to 4 tokens are drawn at each place."""
    rolls, found = Rolls.make(lag, is_wide), []
    for way in ("single", "rolled"):
        head = Head(backend)
        kept = backend.zeros((int(rolls.forward.rolls["count"].sum()), VOCAB), torch.float32)
        for seed, tensor in enumerate((head.cache.k, head.cache.v, head.carried)):
            put(backend, tensor, calls.normal(*tensor.shape, seed=seed, dtype=tensor.dtype))
        put(backend, head.cache.tokens, calls.ints(torch.arange(len(head.cache.tokens)) * 7 % DRAWN))
        tokens = rolls.tokens.copy()
        if way == "single":
            tokens = step_by_step(head, rolls, kept)
        else:
            roller = backend.roller(head.programs, head, [head.plan], head.cache, DRAWN, debug=True, lag=lag)
            assert roller is not None
            roller.carry_on(rolls.forward, tokens, known(backend), kept, rolls.kept_rows)
        tensors = (head.carried, kept, head.cache.k, head.cache.v, head.cache.tokens)
        found.append([torch.from_numpy(tokens), *map(head.host, tensors)])
    assert all(calls.same_bits(one, other) for one, other in zip(*found, strict=True))
    tokens, carried, kept, *_, plane = found[1]
    counts = rolls.forward.rolls["count"]
    is_put = np.ones(int(counts.sum()), bool)
    is_put[np.cumsum(counts) - 1] = False
    assert plane[rolls.forward.roll_slots].tolist() == tokens[rolls.chain[:-1][is_put]].tolist(), "all but the last"
    for first, stop in itertools.pairwise(rolls.chain.tolist()):
        assert len(set(tokens[first:stop].tolist())) == stop - first or first in rolls.chain[np.cumsum(counts) - counts]
    assert len(set(tokens.tolist())) > 8 and int(tokens.max()) < DRAWN
    rolled = kept[kept.count_nonzero(1) > 0]
    assert len(rolled) == sum(counts[rolls.kept_rows >= 0] - 1) and rolled[:, DRAWN:].isneginf().all()
    before = calls.normal(*carried.shape, seed=2)
    assert [not row.equal(old) for row, old in zip(carried, before, strict=True)] == [*(counts > 1), False, False]


@pytest.mark.parametrize(
    ("lag", "message"), [(-1, "lag is -1; it must be 0 to"), (8, r"draws\[0\].position is 1; it must be 8 or more")]
)
def test_a_lag_that_cannot_be_is_named(lag: int, message: str) -> None:
    backend, rolls = NativeBackend(load(available_isas()[0]), torch.float32), Rolls.make(0)
    head = Head(backend)
    roller = backend.roller(head.programs, head, [head.plan], head.cache, DRAWN, lag=lag)
    assert roller is not None
    kept = backend.zeros((len(rolls.tokens), VOCAB), torch.float32)
    with pytest.raises(KernelError, match=f"^pd_roll: {message}"):
        roller.carry_on(rolls.forward, rolls.tokens, known(backend), kept, rolls.kept_rows)


@pytest.mark.parametrize("width", [0, 17])
def test_a_width_that_cannot_be_is_named(width: int) -> None:
    backend, rolls = NativeBackend(load(available_isas()[0]), torch.float32), Rolls.make(0, is_wide=True)
    head = Head(backend)
    roller = backend.roller(head.programs, head, [head.plan], head.cache, DRAWN, lag=0)
    assert roller is not None
    rolls.forward.roll_indptr[10:] += width - np.diff(rolls.forward.roll_indptr)[9]
    kept = backend.zeros((len(rolls.tokens), VOCAB), torch.float32)
    with pytest.raises(
        KernelError, match=rf"^pd_roll: indptr\[10\] is {width + 21} behind 21; it must be 1 to 16 more$"
    ):
        roller.carry_on(rolls.forward, rolls.tokens, known(backend), kept, rolls.kept_rows)
