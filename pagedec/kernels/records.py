"""The records of csrc/include/pagedec.h, field by field, for ctypes and numpy.

A record holds raw addresses: whoever fills one keeps the arrays behind it alive for as long as it is used.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

from pagedec.kernels.records_linear import CombineArgs, ExpertsArgs, GemmArgs, LoraArgs, RouteArgs, Segment
from pagedec.kernels.records_ranks import AddPartsArgs, AllGatherArgs, GatherArgs, JoinPartsArgs, MeetArgs
from pagedec.kernels.records_readout import (
    CHAIN_DTYPE,
    ArgmaxArgs,
    BestArgs,
    BestGroup,
    BestRow,
    Candidate,
    CopyRowsArgs,
    Draw,
    LayerKind,
    PickLogitsArgs,
    ProcessLogitsArgs,
    RestrictLogitsArgs,
    RollArgs,
    RollChain,
    Rules,
    SampleArgs,
    SoftCapArgs,
    SpreadLogitsArgs,
    TopkLseArgs,
    VerifyArgs,
)

__all__ = [
    "AddPartsArgs", "AllGatherArgs", "ArgmaxArgs", "AttentionArgs", "AttnBatch", "AttnShape", "BestArgs", "BestGroup",
    "BestRow", "BlockFormat", "C_NAMES", "Candidate", "CHAIN_DTYPE", "CombineArgs", "CopyRowsArgs", "Draw", "Dtype",
    "EmbedArgs", "Epilogue", "ExpertsArgs", "ExpertScore", "GatherArgs", "GemmArgs", "JoinPartsArgs", "KvCopyArgs",
    "KvKind", "LayerKind", "LayerNormArgs", "LoraArgs", "MeetArgs", "Op", "OP_KINDS", "OpKind", "PickLogitsArgs",
    "ProcessLogitsArgs", "ProgramRecord", "RestrictLogitsArgs", "RmsNormArgs", "RollArgs", "RollChain",
    "RopeKvWriteArgs", "RouteArgs", "Rules", "SampleArgs", "Segment", "SoftCapArgs", "SpreadLogitsArgs", "TopkLseArgs",
    "VerifyArgs",
]  # fmt: skip


class Dtype(IntEnum):
    """Element types of weights, activations and caches. CPUs have no F16."""

    F32 = 0
    BF16 = 1
    F16 = 2


class KvKind(IntEnum):
    """What an element of a KV cache is."""

    PLAIN = 0
    INT8 = 1
    FP8 = 2


class Epilogue(IntEnum):
    """What a linear layer does with its product."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3
    GELU = 4
    CLAMPED_SWIGLU = 5

    @property
    def is_gated(self) -> bool:
        """Whether outputs are gates and what they multiply, in turns of 16."""
        return self in (Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.CLAMPED_SWIGLU)


class ExpertScore(IntEnum):
    """What the logits of a mixture's experts become."""

    SOFTMAX = 0
    SOFTMAX_CHOSEN = 1
    SIGMOID = 2


class Quantization(IntEnum):
    """How a packed weight holds its numbers."""

    PLAIN = 0
    INT8 = 1
    BLOCKS = 2
    INT8_WEIGHT_ONLY = 3
    FP8 = 4


class BlockFormat(IntEnum):
    """What the blocks of a weight, or of a segment of one, are: kernels/blocks.py."""

    Q4_0 = 1
    Q8_0 = 2
    Q4_K = 3
    Q6_K = 4
    INT4_128 = 5
    INT4_ZERO_32 = 6
    INT4_ZERO_128 = 7
    MXFP4 = 8  # of CPUs alone


class OpKind(IntEnum):
    """Kernels that a program can hold."""

    GEMM = 1
    EMBED = 2
    RMS_NORM = 3
    ROPE_KV_WRITE = 4
    KV_COPY = 5
    ATTENTION = 6
    ARGMAX = 7
    TOPK_LSE = 8
    SAMPLE = 9
    LAYER_NORM = 10
    SOFT_CAP = 11
    PROCESS_LOGITS = 12
    BEST = 13
    VERIFY = 14
    ADD_PARTS = 15
    JOIN_PARTS = 16
    MEET = 17
    RESTRICT_LOGITS = 18
    COPY_ROWS = 19
    PICK_LOGITS = 20
    ALL_GATHER = 21
    GATHER = 22
    ROUTE = 23
    EXPERTS = 24
    COMBINE = 25
    LORA = 26
    SPREAD_LOGITS = 27


class EmbedArgs(Structure):
    """Rows of the embedding table, and the cache's token plane."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("token_ids", c_void_p),
        ("table", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("token_plane", c_void_p),
        ("dim", c_int32),
        ("vocab", c_int32),
        ("dtype", c_int32),
        ("scale", c_float),
        ("positions", c_void_p),
        ("position_table", c_void_p),
        ("num_positions", c_int32),
        ("first_id", c_int32),
        ("num_ids", c_int32),
        ("num_segments", c_int32),
        ("segments", c_void_p),
    ]


class RmsNormArgs(Structure):
    """RMS norm of (gathered) rows; `add`: added to out."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("row_ids", c_void_p),
        ("dim", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
        ("add", c_int32),
    ]


class LayerNormArgs(Structure):
    """Layer norm of (gathered) rows."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("row_ids", c_void_p),
        ("dim", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
    ]


class RopeKvWriteArgs(Structure):
    """Rotate q and k, write k and v to their slots."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("qkv", c_void_p),
        ("q_out", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("interleaved", c_int32),
        ("norm_eps", c_float),
        ("kv_kind", c_int32),
        ("norms_all_heads", c_int32),
    ]


class KvCopyArgs(Structure):
    """Slot moves in list order, in every layer and head."""

    _fields_ = [
        ("num_moves", c_void_p),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("token_plane", c_void_p),
        ("features", c_void_p),
        ("layer_stride", c_int64),
        ("num_layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("kv_kind", c_int32),
        ("feature_bytes", c_int32),
    ]


class AttnShape(Structure):
    """What a kind of attention layer has in common."""

    _fields_ = [
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("kv_kind", c_int32),
    ]


class AttnBatch(Structure):
    """A step's rows, branches and block tables."""

    _fields_ = [
        ("num_branches", c_int32),
        ("num_rows", c_int32),
        ("row_indptr", c_void_p),
        ("kv_len", c_void_p),
        ("block_table", c_void_p),
        ("parents", c_void_p),
        ("table_stride", c_int32),
        ("share", c_int32),
        ("elsewhere", c_void_p),
    ]


class AttentionArgs(Structure):
    """One layer's attention under a plan."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("plan", c_void_p),
        ("q", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
    ]


class Op(Structure):
    """One kernel of a program."""

    _fields_ = [("kind", c_int32), ("reserved", c_int32), ("args", c_void_p)]


class ProgramRecord(Structure):
    """A list that is carried out again and again, and what a device has recorded of it."""

    _fields_ = [("ops", c_void_p), ("num_ops", c_int64), ("recording", c_void_p)]


# The C name of every record, and the program kind of those that are kernels.
C_NAMES: dict[type[Structure], str] = {
    Segment: "pd_segment",
    GemmArgs: "pd_gemm_args",
    EmbedArgs: "pd_embed_args",
    RmsNormArgs: "pd_rms_norm_args",
    LayerNormArgs: "pd_layer_norm_args",
    RopeKvWriteArgs: "pd_rope_kv_write_args",
    KvCopyArgs: "pd_kv_copy_args",
    AttnShape: "pd_attn_shape",
    AttnBatch: "pd_attn_batch",
    AttentionArgs: "pd_attention_args",
    SoftCapArgs: "pd_soft_cap_args",
    Rules: "pd_rules",
    ProcessLogitsArgs: "pd_process_logits_args",
    RestrictLogitsArgs: "pd_restrict_logits_args",
    CopyRowsArgs: "pd_copy_rows_args",
    SpreadLogitsArgs: "pd_spread_logits_args",
    PickLogitsArgs: "pd_pick_logits_args",
    ArgmaxArgs: "pd_argmax_args",
    TopkLseArgs: "pd_topk_lse_args",
    Draw: "pd_draw",
    SampleArgs: "pd_sample_args",
    VerifyArgs: "pd_verify_args",
    BestRow: "pd_best_row",
    BestGroup: "pd_best_group",
    Candidate: "pd_candidate",
    BestArgs: "pd_best_args",
    AddPartsArgs: "pd_add_parts_args",
    JoinPartsArgs: "pd_join_parts_args",
    MeetArgs: "pd_meet_args",
    AllGatherArgs: "pd_all_gather_args",
    GatherArgs: "pd_gather_args",
    RouteArgs: "pd_route_args",
    ExpertsArgs: "pd_experts_args",
    CombineArgs: "pd_combine_args",
    LoraArgs: "pd_lora_args",
    Op: "pd_op",
    ProgramRecord: "pd_program",
    RollChain: "pd_chain",
    LayerKind: "pd_layer_kind",
    RollArgs: "pd_roll_args",
}
OP_KINDS: dict[type[Structure], OpKind] = {
    GemmArgs: OpKind.GEMM,
    EmbedArgs: OpKind.EMBED,
    RmsNormArgs: OpKind.RMS_NORM,
    RopeKvWriteArgs: OpKind.ROPE_KV_WRITE,
    KvCopyArgs: OpKind.KV_COPY,
    AttentionArgs: OpKind.ATTENTION,
    ArgmaxArgs: OpKind.ARGMAX,
    TopkLseArgs: OpKind.TOPK_LSE,
    SampleArgs: OpKind.SAMPLE,
    LayerNormArgs: OpKind.LAYER_NORM,
    SoftCapArgs: OpKind.SOFT_CAP,
    ProcessLogitsArgs: OpKind.PROCESS_LOGITS,
    BestArgs: OpKind.BEST,
    VerifyArgs: OpKind.VERIFY,
    AddPartsArgs: OpKind.ADD_PARTS,
    JoinPartsArgs: OpKind.JOIN_PARTS,
    MeetArgs: OpKind.MEET,
    RestrictLogitsArgs: OpKind.RESTRICT_LOGITS,
    CopyRowsArgs: OpKind.COPY_ROWS,
    PickLogitsArgs: OpKind.PICK_LOGITS,
    AllGatherArgs: OpKind.ALL_GATHER,
    GatherArgs: OpKind.GATHER,
    RouteArgs: OpKind.ROUTE,
    ExpertsArgs: OpKind.EXPERTS,
    CombineArgs: OpKind.COMBINE,
    LoraArgs: OpKind.LORA,
    SpreadLogitsArgs: OpKind.SPREAD_LOGITS,
}
