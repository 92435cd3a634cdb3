"""The functions of csrc/include/pagedec.h, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from pagedec.kernels.records import (
    C_NAMES,
    OP_KINDS,
    AttnBatch,
    AttnShape,
    Op,
    ProgramRecord,
    RollArgs,
)

_P_INT32 = POINTER(c_int32)
_STATUS = ctypes.c_int  # 0, or -1 with pd_last_error

_KERNELS: dict[str, tuple[list[Any], Any]] = {
    C_NAMES[record].removesuffix("_args"): ([c_void_p, POINTER(record)], _STATUS) for record in OP_KINDS
}
# name -> (argument types, result type)
PROTOTYPES: dict[str, tuple[list[Any], Any]] = {
    "pd_abi_version": ([], c_int32),
    "pd_last_error": ([], c_char_p),
    "pd_isa": ([], c_char_p),
    "pd_best_isa": ([], c_char_p),
    "pd_num_devices": ([], c_int32),
    "pd_context_new": ([c_int32, c_int32], c_void_p),
    "pd_context_free": ([c_void_p], None),
    "pd_num_threads": ([c_void_p], c_int32),
    "pd_stream": ([c_void_p], c_void_p),
    "pd_await": ([c_void_p], _STATUS),
    "pd_has_memory": ([c_void_p], c_int32),
    "pd_memory_new": ([c_void_p, c_int64], c_void_p),
    "pd_memory_free": ([c_void_p], None),
    "pd_memory_write": ([c_void_p, c_void_p, c_void_p, c_int64], _STATUS),
    "pd_memory_read": ([c_void_p, c_void_p, c_void_p, c_int64], _STATUS),
    "pd_fetch_new": ([c_void_p, c_int64], c_void_p),
    "pd_fetch_free": ([c_void_p], None),
    "pd_fetch_begin": ([c_void_p, c_void_p, c_void_p, c_int64], _STATUS),
    "pd_fetch_end": ([c_void_p, c_void_p, c_void_p], _STATUS),
    "pd_memory_fill": ([c_void_p, c_void_p, c_int32, c_int64], _STATUS),
    "pd_memory_map": ([c_void_p, c_void_p, c_int64], _STATUS),
    "pd_memory_unmap": ([c_void_p], _STATUS),
    "pd_memory_room": ([c_void_p, POINTER(c_int64), POINTER(c_int64)], _STATUS),
    "pd_packed_bytes": ([c_int64, c_int64, c_int32], c_int64),
    "pd_pack": ([c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p], _STATUS),
    "pd_packed_int8_bytes": ([c_int64, c_int64], c_int64),
    "pd_pack_int8": ([c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p], _STATUS),
    "pd_packed_int8_weight_only_bytes": ([c_int64, c_int64], c_int64),
    "pd_pack_int8_weight_only": ([c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p], _STATUS),
    "pd_packed_fp8_bytes": ([c_int64, c_int64], c_int64),
    "pd_pack_fp8": ([c_void_p, c_void_p, c_int64, c_int64, c_void_p], _STATUS),
    "pd_packed_blocks_bytes": ([c_int64, c_int64, c_int32], c_int64),
    "pd_pack_blocks": ([c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p], _STATUS),
    "pd_allow_vnni": ([c_void_p, c_int32], ctypes.c_int),
    "pd_plan_new": ([], c_void_p),
    "pd_plan_free": ([c_void_p], None),
    "pd_attn_plan": ([c_void_p, c_void_p, POINTER(AttnShape), POINTER(AttnBatch)], _STATUS),
    "pd_plan_view": ([c_void_p, POINTER(_P_INT32), POINTER(c_int64)], _STATUS),
    "pd_gumbel": ([c_void_p, c_uint64, c_uint64, c_int32, c_int32, c_int32, c_void_p], _STATUS),
    "pd_nccl_open": ([c_char_p], c_int32),
    "pd_nccl_id": ([c_void_p], _STATUS),
    "pd_nccl_join": ([c_void_p, c_void_p, c_int32, c_int32, ctypes.c_double], _STATUS),
    "pd_nccl_alike": ([c_void_p], _STATUS),
    "pd_nccl_world": ([c_void_p], c_int32),
    "pd_run": ([c_void_p, POINTER(Op), c_int64], _STATUS),
    "pd_run_program": ([c_void_p, POINTER(ProgramRecord)], _STATUS),
    "pd_program_clear": ([POINTER(ProgramRecord)], None),
    "pd_roll": ([c_void_p, POINTER(RollArgs)], _STATUS),
    "pd_probe_read": ([c_void_p, c_void_p, c_int64, c_int32], ctypes.c_double),
    "pd_probe_dot": ([c_void_p, c_int32, ctypes.c_double], ctypes.c_double),
    **_KERNELS,
}
