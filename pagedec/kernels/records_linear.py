"""The records of linear layers, plain ones and those of experts, and of low-rank updates."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class Segment(Structure):
    """Outputs of a weight in blocks that are in one format, from first_output on."""

    _fields_ = [("format", c_int32), ("first_output", c_int32)]


class GemmArgs(Structure):
    """y = epilogue(x W^T + bias), W packed by pd_pack, pd_pack_int8, pd_pack_blocks,
    pd_pack_int8_weight_only or pd_pack_fp8."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("dtype", c_int32),
        ("y_dtype", c_int32),
        ("epilogue", c_int32),
        ("quantization", c_int32),
        ("next_packed", c_void_p),
        ("next_bytes", c_int64),
        ("segments", c_void_p),
        ("num_segments", c_int32),
        ("x_rows", c_int32),
    ]


class RouteArgs(Structure):
    """Which experts a row takes, with which weights, and its copies in the order of experts."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("sorted", c_void_p),
        ("first", c_void_p),
        ("chosen", c_void_p),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("dim", c_int32),
        ("dtype", c_int32),
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
        ("score", c_int32),
        ("normalize", c_int32),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class ExpertsArgs(Structure):
    """Each expert's rows by its weight."""

    _fields_ = [
        ("gemm", GemmArgs),
        ("first", c_void_p),
        ("expert_bytes", c_int64),
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
    ]


class CombineArgs(Structure):
    """Weighted sums of what a row's experts give."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("y", c_void_p),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("shared", c_void_p),
        ("gates", c_void_p),
        ("out", c_void_p),
        ("dim", c_int32),
        ("num_chosen", c_int32),
        ("add", c_int32),
        ("reserved", c_int32),
    ]


class LoraArgs(Structure):
    """Low-rank updates of a layer's outputs, each row's by its own adapter."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("adapters", c_void_p),
        ("x", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("scales", c_void_p),
        ("ranks", c_void_p),
        ("parts", c_void_p),
        ("low", c_void_p),
        ("z", c_void_p),
        ("y", c_void_p),
        ("num_places", c_int32),
        ("num_parts", c_int32),
        ("rank", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("dtype", c_int32),
        ("y_dtype", c_int32),
        ("epilogue", c_int32),
    ]
