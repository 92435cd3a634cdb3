"""The kernels that put rows elsewhere, called on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedec.kernels.library import Context, CopyRowsArgs, SpreadLogitsArgs
from tests.kernels import calls


def copy_rows(
    context: Context,
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor | None = None,
    dst_rows: Tensor | None = None,
    scale: float = 1.0,
    num_rows: int | None = None,
) -> None:
    ids = dst_rows if src_rows is None else src_rows
    rows = calls.count((len(src) if ids is None else len(ids)) if num_rows is None else num_rows)
    own, to = (calls.pointer(x) if x.is_contiguous() else x.data_ptr() for x in (src, dst))
    context.call(
        CopyRowsArgs(
            num_rows=calls.pointer(rows),
            src=own,
            dst=to,
            src_rows=calls.pointer(src_rows),
            dst_rows=calls.pointer(dst_rows),
            src_stride=src.stride(0),
            dst_stride=dst.stride(0),
            width=src.shape[1],
            src_dtype=calls.CODES[src.dtype],
            dst_dtype=calls.CODES[dst.dtype],
            scale=scale,
        )
    )


def spread_logits(context: Context, src: Tensor, places: Tensor) -> Tensor:
    out, rows = torch.full((len(src), len(places)), torch.nan), calls.count(len(src))
    context.call(
        SpreadLogitsArgs(
            num_rows=calls.pointer(rows),
            src=calls.pointer(src),
            places=calls.pointer(places),
            dst=calls.pointer(out),
            vocab=len(places),
            draft_vocab=src.shape[1],
        )
    )
    return out
