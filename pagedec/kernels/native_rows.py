"""Rows of buffers that go elsewhere, for the compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedec.kernels.addresses import address, rows_at
from pagedec.kernels.library import CopyRowsArgs, SpreadLogitsArgs

if TYPE_CHECKING:
    from pagedec.kernels.native_program import NativeProgram


def copy_rows_args(
    rows: int | None,
    src: torch.Tensor,
    dst: torch.Tensor,
    src_rows: int | None,
    dst_rows: int | None,
    scale: float = 1.0,
) -> CopyRowsArgs:
    """The record; `rows`, `src_rows` and `dst_rows` are addresses. Raises ValueError where a tensor is none of rows."""
    if src.shape[1] != dst.shape[1]:
        raise ValueError(f"dst has {dst.shape[1]} columns; it must have {src.shape[1]}, as src")
    (own, stride, dtype), (to, dst_stride, dst_dtype) = rows_at(src, "src"), rows_at(dst, "dst")
    return CopyRowsArgs(rows, own, to, src_rows, dst_rows, stride, dst_stride, src.shape[1], dtype, dst_dtype, scale)


def copy_rows(
    program: NativeProgram,
    rows: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    src_rows: torch.Tensor | None = None,
    dst_rows: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """`Program.copy_rows`."""
    counted = address(rows, torch.int32, "rows")
    lists = (address(src_rows, torch.int32, "src_rows"), address(dst_rows, torch.int32, "dst_rows"))
    record = copy_rows_args(counted, src, dst, *lists, scale)
    program.add(record, rows, src, dst, src_rows, dst_rows)


def spread_logits(
    program: NativeProgram, rows: torch.Tensor, src: torch.Tensor, places: torch.Tensor, dst: torch.Tensor
) -> None:
    """`Program.spread_logits`."""
    record = SpreadLogitsArgs(
        address(rows, torch.int32, "rows"),
        address(src, torch.float32, "src"),
        address(places, torch.int32, "places"),
        address(dst, torch.float32, "dst"),
        dst.shape[1],
        src.shape[1],
    )
    program.add(record, rows, src, places, dst)
