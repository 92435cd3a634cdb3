"""What a model and a runner need of the kernels, whichever way they are carried out.

A backend records a forward once, as a program over fixed buffers, and carries it out every step: what changes between
steps is read through the buffers. There are compiled kernels of a processor (native.py), those of a device (device.py)
and torch (fallback.py), with one meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneAnswers, LaneForward, Masks
from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.blocks import Blocks
from pagedec.kernels.link import Link
from pagedec.kernels.records import KvKind

if TYPE_CHECKING:
    from pagedec.kernels.block_swap import BlockSwap
    from pagedec.kernels.drawn import DrawnTokens
    from pagedec.kernels.experts import Matrices
    from pagedec.kernels.program import Program
    from pagedec.kernels.row_buffer import RowBuffer


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One kind of attention layer. A logit is scale * q.k; with soft_cap > 0, soft_cap * tanh(logit / soft_cap). With
    sinks, fp32 [num_heads] of each layer, each head's softmax has one more logit, of no value (gpt-oss, 2025)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `cos_sin` fp32 [max_position, rotary_dim], the cosines, then the sines; None: no rotation."""

    cos_sin: torch.Tensor | None
    rotary_dim: int = 0
    interleaved: bool = False


NO_ROTATION = Rope(None)
HeadNorms: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, float]
"""RMS norm weights fp32 [head_dim] of q and of k, applied to each head before the rotation, and eps; or weights for all
heads, to whose numbers they are then applied at once."""
NO_NORMS: HeadNorms = (None, None, 0.0)


def are_of_all_heads(norms: HeadNorms, head_dim: int) -> bool:
    """Whether norms are over all heads of a row at once."""
    return any(norm is not None and len(norm) > head_dim for norm in norms[:2])


KV_KINDS = {torch.int8: KvKind.INT8, torch.float8_e4m3fn: KvKind.FP8}
"""Of caches of bytes, by the dtype of their tensors."""


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """KV of one lane, laid out as csrc/include/pagedec.h says, and the token id of every slot.

    bf16: k [num_layers, num_blocks, kv_heads, head_dim/2, block_size, 2],
          v [num_layers, num_blocks, kv_heads, block_size/2, head_dim, 2];
    fp32: k [num_layers, num_blocks, kv_heads, head_dim, block_size],
          v [num_layers, num_blocks, kv_heads, block_size, head_dim];
    on a CUDA device both as that v, in any dtype;
    in bytes (int8 or float8_e4m3fn): the same sizes with head_dim + 2 for head_dim; of each [kv_head] piece the first
          head_dim * block_size bytes are laid out as above (on a CUDA device each 16 of a head in an order of their
          own), then come bf16 scales [block_size];
    tokens int32 [num_blocks * block_size];
    features [num_blocks * block_size, feature_width] in the layers' dtype, what a draft head reads of every slot; None:
          nothing does.
    """

    k: torch.Tensor
    v: torch.Tensor
    tokens: torch.Tensor
    num_kv_heads: int
    head_dim: int
    block_size: int
    features: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def kind(self) -> KvKind:
        """What an element is."""
        return KV_KINDS.get(self.k.dtype, KvKind.PLAIN)

    @property
    def sides(self) -> list[torch.Tensor]:
        """All that a block has: views [num_layers or 1, num_blocks, ...]."""
        slots = [self.tokens] if self.features is None else [self.tokens, self.features]
        return [self.k, self.v, *(side.view(1, self.num_blocks, self.block_size, *side.shape[1:]) for side in slots)]


INT8_QUANTIZATIONS = ("int8", "int8_weight_only")
"""Kinds of weights that are integers of 8 bits with a scale an output."""
BLOCK_QUANTIZATIONS = (
    *("int4", "int4_128", "int4_zero", "int4_zero_128"),
    *("gguf", "awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "torchao", "mxfp4"),
)
"""Kinds of weights that come in blocks; all other numbers of a model are the backend's."""


def checked_quantization(
    quantization: str | None, known: Sequence[str] = INT8_QUANTIZATIONS + BLOCK_QUANTIZATIONS
) -> str | None:
    """Return it if it is a known quantisation of weights, or None; else ValueError."""
    if quantization is not None and quantization not in known:
        raise ValueError(f"quantization is {quantization!r}; it must be None or one of {', '.join(map(repr, known))}")
    return quantization


class Plan(Protocol):
    """How a step's attention is carried out, for every layer of one kind."""

    def update(
        self, row_indptr: np.ndarray, kv_len: np.ndarray, block_table: np.ndarray, parents: np.ndarray | None
    ) -> None:
        """Plan the step's rows. int32 arrays as in `LaneForward`; not needed afterwards."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that are verified by rejection, in the order of `LaneForward.verified_draws`, and what each was drawn
    from."""

    logits: torch.Tensor  # fp32 [*, vocab of the draft model], processed
    draws: np.ndarray  # DRAW_DTYPE [num_verified]: how; `row` counts rows of `logits`
    tokens: np.ndarray  # int32 [num_verified]


class Roller(Protocol):
    """Chains of drawn tokens without the host: a recorded forward, its read-out and its draws, again and again."""

    def carry_on(
        self, forward: LaneForward, tokens: np.ndarray, rules: Mapping[int, Any], kept: torch.Tensor, rows: np.ndarray
    ) -> None:
        """Draw all tokens of `forward.rolls` but those of each one's first place, and put them behind these: `tokens`
        int32 [roll_indptr[-1]], as in `LaneAnswers.rolled`. `rows` int32 [num_rolls]: the first row of `kept` fp32
        [*, vocab] that receives what a chain's tokens are drawn from; -1: none does."""


class ReadOut(Protocol):
    """One forward's answers, filled piece by piece. Logits stay where they are; what comes back are small host
    arrays."""

    def read(self, logits: torch.Tensor, start: int) -> None:
        """Answer what is asked of the read-out rows `start` .. `start + len(logits) - 1`, whose logits fp32 [n, vocab]
        are given, and may be changed in place. Raises ValueError where masks are due and others or none were given."""

    def answers(self) -> LaneAnswers:
        """All of them, when every piece has been read."""


class Backend(Protocol):
    """Kernels for one dtype of weights and activations, and one kind of KV."""

    name: str
    """Instruction set of the compiled kernels, or "reference"."""
    dtype: torch.dtype
    quantization: str | None
    """What models' linear layers are packed with: None, one of INT8_QUANTIZATIONS or of BLOCK_QUANTIZATIONS."""
    kv_kind: KvKind
    """What caches hold."""
    device: int
    """Which of the devices of its kind; of processors there is one."""
    overlaps: bool
    """Calls that answer nothing return before they are carried out."""
    link: Link | None
    """The way to the ranks that share the model; None: there are none."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None) -> Any:
        """Take a [n, k] weight into the backend's form. Gated weights are interleaved by the caller.

        quantization "int8": each output's row as integers of -127 .. 127 and one scale, from the weight in the numbers
        given; rows of x alike in groups of 64 when the layer runs. "int8_weight_only": the same, but rows of x stay,
        and integers become numbers of the backend's dtype on their way. None: in the backend's dtype.
        """

    def pack_blocks(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None) -> Any:
        """Take a weight that stays in its blocks, the outputs of `parts` one behind the other; gated parts are
        interleaved by the caller. Rows of x are int8 in groups of 32 when the layer runs; where all parts are `Fp8`
        they stay, and results are those of a weight in numbers. Raises ValueError where `segments_of` does, and on a
        device that has no such kernels.
        """

    def pack_experts(
        self, count: int, matrices: Matrices, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> Any:
        """Take the weights [n, k] of `count` experts, one after the other: all numbers, as `pack` takes them, or all
        blocks of one format. bias [count, n]. Raises ValueError where one differs from the first."""

    def settle(self) -> None:
        """All weights are packed: give back what packing needed."""

    def program(self) -> Program: ...

    def plan(self, shape: AttentionShape) -> Plan: ...

    def copy_slots(self, cache: CacheTensors, src: np.ndarray, dst: np.ndarray) -> None:
        """Slot dst[i] = slot src[i] for i = 0, 1, ... in order, in every layer and head, in the token plane and in
        the features."""

    # ---- memory
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor where kernels can read it: itself, or a copy. Raises MemoryError."""

    def wait(self) -> None:
        """Return when all is through that was asked for: what it wrote is there for another backend's kernels."""

    def room(self) -> int | None:
        """Bytes of a device's own memory that can be taken; None: it is the host's."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros where the kernels work: what a forward's buffers are made of. Raises MemoryError."""

    def write(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        """Put a host array at the beginning of a tensor of its dtype, along its first side."""

    def writer(self, tensor: torch.Tensor) -> Callable[[np.ndarray], None]:
        """What does so for one tensor, step after step: what can be looked up is looked up once."""

    def cache(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        feature_width: int = 0,
    ) -> CacheTensors:
        """KV of one lane in the kernels' own layout, of the backend's kind, a token plane in which nothing is, and
        features of so many numbers a slot in the backend's dtype; 0: none. Memory is taken as blocks are written, where
        the device can do that. Raises OSError or MemoryError."""

    def block_swap(self, cache: CacheTensors, num_places: int) -> BlockSwap:
        """What copies blocks to so many places of the host, and back. Raises MemoryError."""

    def poison(self, cache: CacheTensors, blocks: np.ndarray) -> None:
        """Make blocks unreadable: whatever reads a slot before it is written turns into NaN."""

    # ---- read-out
    def rules(self, rules: LogitsRules, vocab_size: int) -> Any:
        """A request's rules in the backend's own form. Raises InvalidArgument for what has no meaning for this
        vocabulary."""

    def read_out(
        self,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, Any],
        masks: Masks | None = None,
        drafted: Drafted | None = None,
        room: RowBuffer | None = None,
    ) -> ReadOut:
        """Begin to answer what a forward asks. `cache` is the one that its rows were evaluated in; `rules` has the
        backend's form of all rules that it names, `masks` what `masked_rows` are masked with, `drafted` what
        `verified_draws` verify. `room`: where reported rows are copied to while they are read; None: room of its
        own."""

    def drawn_tokens(self) -> DrawnTokens:
        """Where a lane's draws stand until somebody asks for them."""

    def roller(
        self,
        programs: Any,
        buffers: Any,
        plans: Sequence[Any],
        cache: CacheTensors,
        num_drawn: int,
        debug: bool = False,
        lag: int = 0,
    ) -> Roller | None:
        """What rolls chains with a model's programs over its buffers; token ids from `num_drawn` on are never drawn.
        None where each token needs the host. `debug`: NaN among logits is an error. `lag`: how many positions a token's
        slot is before its own. Where buffers have features, their `chains` tell of each row which chain it is of."""

    # ---- parts of a read-out. Logits are fp32 [n, vocab] where the kernels work, other arrays the host's
    def has_nan(self, logits: torch.Tensor) -> bool:
        """Whether there is a NaN among logits."""

    def restrict(
        self,
        logits: torch.Tensor,
        places: np.ndarray | None = None,
        words: np.ndarray | None = None,
        banned_rows: np.ndarray = NO_INTS,
        banned_tokens: np.ndarray = NO_INTS,
        num_drawn: int | None = None,
    ) -> None:
        """What may not be drawn becomes -inf, in place. `places` int32 [n]: each row's place in `words` uint32
        [*, ceil(vocab / 32)], which has a bit for each token, the lowest first, and 0 bans it; -1, or None: none is
        banned so. logits[banned_rows, banned_tokens] are banned, int32 [num_banned]; and all tokens from `num_drawn`
        on."""

    def copy_rows(self, src: torch.Tensor, src_rows: np.ndarray, dst: torch.Tensor, dst_rows: np.ndarray) -> None:
        """dst[dst_rows[i]] = src[src_rows[i]], of fp32 [*, width] both: two tensors, and no row of dst twice."""

    def pick(self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """logits[rows, tokens]: fp32 [num_picked]."""

    def pick_ranked(
        self, logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray | torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same, and each one's rank int32 [num_picked]: 1 + how many of its row are greater. Nothing is greater
        than a NaN, which is greater than nothing. Fastest where a row's stand side by side. `tokens` may be where the
        kernels work."""

    def process_logits(
        self, logits: torch.Tensor, start: int, forward: LaneForward, cache: CacheTensors, rules: Mapping[int, Any]
    ) -> None:
        """Apply the rules that `forward.processing` names in place to logits fp32 [n, vocab], the read-out rows `start`
        .. `start + n - 1`. Histories are read from the cache's token plane."""

    def sample(self, logits: torch.Tensor, draws: np.ndarray) -> np.ndarray:
        """One token for each draw (DRAW_DTYPE) from logits fp32 [num_rows, vocab]: int32 [num_draws]."""

    def verify(self, logits: torch.Tensor, draws: np.ndarray, drafted: Drafted) -> np.ndarray:
        """Each drafted token where it is accepted, with probability min(1, p / q), else a draw from norm(max(0, p -
        q)), as pd_verify says: int32 [num_drafted]. `draws` (DRAW_DTYPE) says what p is taken from, of logits."""

    def topk(self, logits: torch.Tensor, row_ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token ids int32 [n, k], logits fp32 [n, k], log-sum-exp fp32 [n]) of the rows, ties to the lower id."""

    def best(
        self, logits: torch.Tensor, lse: np.ndarray | None, rows: np.ndarray, groups: np.ndarray
    ) -> list[np.ndarray]:
        """Of each group (BEST_GROUP_DTYPE) of `rows` (BEST_ROW_DTYPE) of logits fp32 [*, vocab], the first candidates
        in order (CANDIDATE_DTYPE). A log-probability is a logit less the row's `lse` fp32 [rows]; None: less its
        log-sum-exp."""
