"""The tensors a forward works in, allocated once for the largest step."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch

from pagedec.kernels.backend import Backend
from pagedec.kernels.experts import Routes
from pagedec.kernels.link import Link
from pagedec.models.architecture import Architecture
from pagedec.models.mixture import Mixture
from pagedec.models.packing import padded_width
from pagedec.models.sharding import shares

NOBODY = np.empty(0, np.int32)
"""The places of adapters where no row has one."""
READ_ROWS = 128  # rows of logits held at once: 128 x 49152 fp32 are 25 MB; a step that reads out more does it in turns


class RankBuffers:
    """What the ranks that share a model give one another: parts of sums over `hidden`, and columns of logits.

    parts fp32 [world, max_rows, hidden] are of a forward's first sum, and two that the others take in turns: nobody
    writes one of them again before all ranks have met at another, and so have read the first. logits fp32 [world,
    READ_ROWS * max(widths)]; `widths` are the token ids that each rank has, of which this one's begin at `first_id`.
    """

    def __init__(self, link: Link, max_rows: int, hidden: int, num_ids: int) -> None:
        f32 = torch.float32
        own = shares(num_ids, link.world)
        self.rank, self.num_ids, self.first_id = link.rank, num_ids, own[link.rank].start
        self.widths = [len(ids) for ids in own]
        self._first, *self._turns = (link.parts((max_rows, hidden), f32) for _ in range(3))
        self.logits = link.parts((READ_ROWS * max(self.widths),), f32)
        width = self.widths[self.rank]
        self.own_logits = self.logits[self.rank][: READ_ROWS * width].view(READ_ROWS, width)

    @property
    def first_parts(self) -> torch.Tensor:
        """The parts of a forward's first sum."""
        return self._first

    def next_parts(self) -> torch.Tensor:
        """The parts of the sum that is recorded next."""
        self._turns.reverse()
        return self._turns[0]


class MixtureBuffers:
    """What a mixture of experts works in: logits fp32 [max_rows, num_experts]; whom rows take, and their copies; inner
    [max_rows * num_chosen, width] in the model's dtype, and out fp32 [max_rows * num_chosen, hidden] of all experts; of
    one that all rows take shared_inner [max_rows, shared_width], and where it is weighed shared_out fp32 [max_rows,
    hidden] and gates fp32 [max_rows, 1]."""

    def __init__(self, mixture: Mixture, hidden: int, max_rows: int, backend: Backend) -> None:
        f32, choice, zeros = torch.float32, mixture.choice, backend.zeros
        num_places, weighed = max_rows * choice.num_chosen, max_rows if mixture.names.shared_gate else 0
        self.logits = zeros((max_rows, choice.num_experts), f32)
        self.routes = Routes.allocate(zeros, max_rows, hidden, choice, backend.dtype)
        self.inner = zeros((num_places, padded_width(mixture.width)), backend.dtype)
        self.out = zeros((num_places, hidden), f32)
        self.shared_inner = zeros((max_rows, padded_width(mixture.shared_width)), backend.dtype)
        self.shared_out, self.gates = zeros((weighed, hidden), f32), zeros((weighed, 1), f32)


class AdapterBuffers:
    """What rows' low-rank adapters are told by, and work in: places int32 [max_rows], of which -1 is none; low fp32
    [max_rows * low_width]; z fp32 [max_rows, 2 * mlp_width], a gated layer's outputs before its gates."""

    def __init__(self, low_width: int, max_rows: int, mlp_width: int, backend: Backend) -> None:
        self.places = backend.zeros((max_rows,), torch.int32)
        self.low = backend.zeros((max_rows * low_width,), torch.float32)
        self.z = backend.zeros((max_rows, 2 * mlp_width), torch.float32)
        self._write, self._nobody, self._is_used = backend.writer(self.places), np.full(max_rows, -1, np.int32), True
        self.load(NOBODY)

    def load(self, places: np.ndarray) -> None:
        """The places of a step's rows; none: no row has one."""
        if len(places):
            self._write(places)
        elif self._is_used:
            self._write(self._nobody)
        self._is_used = len(places) > 0

    @property
    def is_used(self) -> bool:
        """Whether some row of the step has one."""
        return self._is_used


class FeatureBuffers:
    """What a head that drafts works in: slots int32 [max_rows], where the target has each row's features; chains int32
    [max_rows], which chain each row begins or goes on with, -1: none; rows [max_rows, width], features; carried fp32
    [max_rows, hidden], by chain what its last row has come to; fused fp32 [max_rows, hidden], what rows read in place
    of features; pairs [max_rows, 2 * hidden], what attention reads; logits fp32 [READ_ROWS, num_drafted], where the
    head knows a part of the vocabulary."""

    def __init__(self, max_rows: int, hidden: int, width: int, num_drafted: int, backend: Backend) -> None:
        f32, own, zeros = torch.float32, backend.dtype, backend.zeros
        self.slots, self.chains = zeros((max_rows,), torch.int32), zeros((max_rows,), torch.int32)
        self._writes = backend.writer(self.slots), backend.writer(self.chains)
        self.rows, self.pairs = zeros((max_rows, width), own), zeros((max_rows, 2 * hidden), own)
        self.carried, self.fused = zeros((max_rows, hidden), f32), zeros((max_rows, hidden), f32)
        self.logits = zeros((READ_ROWS, num_drafted), f32)

    def load(self, slots: np.ndarray, chains: np.ndarray) -> None:
        """Of a step's rows. `slots`: none of rows that go on with a chain."""
        for write, array in zip(self._writes, (slots, chains), strict=True):
            if len(array):
                write(array)


class StepBuffers:
    """Inputs and activations of one lane. `num_rows` rows of each count in a step, `num_read` rows of the read-out.

    token_ids, positions, slots int32 [max_rows]; read_rows int32 [READ_ROWS]; x fp32 [max_rows, hidden] is the residual
    stream; block fp32 [max_rows, hidden] a block's output, where the model norms that; logits fp32 [READ_ROWS, vocab];
    the rest in the model's dtype. `low_width`: the most numbers that a row's adapter makes of a layer's inputs; 0:
    there are none.
    """

    def __init__(self, arch: Architecture, max_rows: int, backend: Backend, mlp_width: int, low_width: int = 0) -> None:
        f32, own, zeros = torch.float32, backend.dtype, backend.zeros

        def ints(size: int) -> torch.Tensor:
            return zeros((size,), torch.int32)

        heads, width = arch.num_attention_heads + 2 * arch.num_kv_heads, arch.num_attention_heads * arch.head_dim
        self.max_rows = max_rows
        self.num_rows, self.num_read = ints(1), ints(1)
        self.token_ids, self.positions, self.slots = ints(max_rows), ints(max_rows), ints(max_rows)
        self.read_rows = ints(READ_ROWS)
        self._load = [backend.writer(own) for own in (self.num_rows, self.token_ids, self.positions, self.slots)]
        self._load_read = [backend.writer(own) for own in (self.num_read, self.read_rows)]
        self._views: dict[int, torch.Tensor] = {}  # the first rows of the logits: as many in step after step
        self.x = zeros((max_rows, arch.hidden_size), f32)
        self.block = zeros((max_rows if arch.names.has_out_norms else 0, arch.hidden_size), f32)
        self.normed = zeros((max_rows, arch.hidden_size), own)
        self.qkv = zeros((max_rows, heads * arch.head_dim), own)
        self.q = zeros((max_rows, width), own)
        self.attended = zeros((max_rows, width), own)
        self.mlp = zeros((max_rows, mlp_width), own)
        self.read = zeros((READ_ROWS, arch.hidden_size), own)
        self.mixture: MixtureBuffers | None = None
        if arch.mixture is not None:
            self.mixture = MixtureBuffers(arch.mixture, arch.hidden_size, max_rows, backend)
        self.adapters: AdapterBuffers | None = None
        if low_width:
            self.adapters = AdapterBuffers(low_width, max_rows, mlp_width, backend)
        self.features: FeatureBuffers | None = None
        link = backend.link
        self.ranks = None if link is None else RankBuffers(link, max_rows, arch.hidden_size, arch.vocab_size)
        self.logits = zeros((READ_ROWS if link is None or link.rank == 0 else 0, arch.vocab_size), f32)

    def load(
        self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, adapters: np.ndarray = NOBODY
    ) -> None:
        """Put a step's rows in place, `adapters` as in `LaneForward`."""
        n = len(token_ids)
        assert n <= self.max_rows, f"{n} rows in a step; at most {self.max_rows} fit"
        for write, array in zip(self._load, (np.array([n], np.int32), token_ids, positions, slots), strict=True):
            write(array)
        if self.adapters is not None:
            self.adapters.load(adapters)

    def without_adapters(self) -> StepBuffers:
        """The same, for steps in which no row has one."""
        plain = copy(self)
        plain.adapters = None
        return plain

    def load_read(self, rows: np.ndarray) -> torch.Tensor:
        """Choose the rows to read out; the view of the logits that will hold them."""
        n = len(rows)
        assert n <= READ_ROWS
        for write, array in zip(self._load_read, (np.array([n], np.int32), rows), strict=True):
            write(array)
        view = self._views.get(n)
        if view is None:
            view = self._views[n] = self.logits[:n]
        return view
