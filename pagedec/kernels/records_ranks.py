"""The records of csrc/include/pagedec.h by which ranks put together what each has computed, for ctypes."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p


class AddPartsArgs(Structure):
    """The ranks' parts of a sum, added in their order."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("parts", c_void_p),
        ("out", c_void_p),
        ("part_stride", c_int64),
        ("dim", c_int32),
        ("num_parts", c_int32),
        ("add", c_int32),
        ("reserved", c_int32),
    ]


class JoinPartsArgs(Structure):
    """The ranks' columns of rows, side by side."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("parts", c_void_p),
        ("widths", c_void_p),
        ("out", c_void_p),
        ("part_stride", c_int64),
        ("dim", c_int32),
        ("num_parts", c_int32),
    ]


class MeetArgs(Structure):
    """Ranks on one machine wait for one another."""

    _fields_ = [("arrivals", c_void_p), ("seconds", c_double), ("rank", c_int32), ("world", c_int32)]


class AllGatherArgs(Structure):
    """Each rank's values to all, by NCCL."""

    _fields_ = [("own", c_void_p), ("parts", c_void_p), ("num_values", c_int64)]


class GatherArgs(Structure):
    """Each rank's values to the first, by NCCL."""

    _fields_ = [("own", c_void_p), ("parts", c_void_p), ("num_values", c_int64)]
