"""Mixtures of experts as the compiled kernels' records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedec.kernels.addresses import address
from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.library import CombineArgs, Epilogue, ExpertsArgs, RouteArgs
from pagedec.kernels.native_weight import NativeExperts

if TYPE_CHECKING:
    from pagedec.kernels.native_program import NativeProgram


def route(
    program: NativeProgram,
    rows: torch.Tensor,
    logits: torch.Tensor,
    x: torch.Tensor,
    choice: ExpertChoice,
    routes: Routes,
    bias: torch.Tensor | None = None,
) -> None:
    """Record which experts rows take: `Program.route`."""
    f32, int32, dtype = torch.float32, torch.int32, program.backend.dtype
    record = RouteArgs(
        address(rows, int32, "rows"),
        address(logits, f32, "logits"),
        address(bias, f32, "bias"),
        address(x, dtype, "x"),
        address(routes.sorted, dtype, "sorted"),
        address(routes.first, int32, "first"),
        address(routes.chosen, int32, "chosen"),
        address(routes.places, int32, "places"),
        address(routes.weights, f32, "weights"),
        x.shape[1],
        int(program.backend.code),
        choice.num_experts,
        choice.num_chosen,
        int(choice.score),
        int(choice.normalize),
        choice.scale,
        0,
    )
    program.add(record, rows, logits, x, routes, bias)


def experts(
    program: NativeProgram,
    rows: torch.Tensor,
    x: torch.Tensor,
    weight: NativeExperts,
    routes: Routes,
    y: torch.Tensor,
    epilogue: Epilogue,
) -> None:
    """Record each expert's rows by its weight: `Program.experts`."""
    gemm = program.gemm(rows, x, weight.each, y, epilogue)
    first = address(routes.first, torch.int32, "first")
    record = ExpertsArgs(gemm, first, weight.stride, weight.count, routes.chosen.shape[1])
    program.linears.append((record.gemm, weight))
    program.add(record, rows, x, weight, routes, y)


def combine(
    program: NativeProgram,
    rows: torch.Tensor,
    y: torch.Tensor,
    routes: Routes,
    out: torch.Tensor,
    add: bool,
    shared: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
) -> None:
    """Record the weighted sums of what experts give: `Program.combine`."""
    f32, int32 = torch.float32, torch.int32
    record = CombineArgs(
        address(rows, int32, "rows"),
        address(y, f32, "y"),
        address(routes.places, int32, "places"),
        address(routes.weights, f32, "weights"),
        address(shared, f32, "shared"),
        address(gates, f32, "gates"),
        address(out, f32, "out"),
        y.shape[1],
        routes.places.shape[1],
        int(add),
        0,
    )
    program.add(record, rows, y, routes, shared, gates, out)
