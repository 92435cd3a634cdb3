"""What records a forward, kernel by kernel: the same calls whoever carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pagedec.kernels.backend import NO_NORMS, CacheTensors, HeadNorms, Rope
from pagedec.kernels.experts import ExpertChoice, Routes
from pagedec.kernels.lora import LoraWeights
from pagedec.kernels.records import Epilogue


class Program(Protocol):
    """Records kernels over fixed buffers; `run` carries them out in order. `rows` is an int32 tensor of one element:
    how many rows of the buffers count in a step."""

    def embed(
        self,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        table: Any,
        out: torch.Tensor,
        slots: torch.Tensor,
        token_plane: torch.Tensor,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
        position_table: torch.Tensor | None = None,
        ids: tuple[int, int] | None = None,
    ) -> None:
        """out fp32 [rows, dim] = table[token_ids] * scale, plus position_table[positions] where they are given (both in
        the backend's dtype); and the ids into the token plane at `slots`, where one is not negative. A table that
        `pack_blocks` gave is read as its values in that dtype. With `ids` (first, number of all) the table has some
        rows of a larger one, from `first` on; of ids elsewhere in that, out is 0."""

    def rms_norm(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        eps: float,
        row_ids: torch.Tensor | None = None,
        add: bool = False,
    ) -> None:
        """RMS norm over x fp32 [*, dim], of the rows `row_ids` where given; out [rows, dim] in the backend's dtype.

        With `add`, out is fp32 and is added to: a norm behind a block, into the residual stream. Without a weight out
        has the rows as they are.
        """

    def layer_norm(
        self,
        rows: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        eps: float,
        row_ids: torch.Tensor | None = None,
    ) -> None:
        """Layer norm over x fp32 [*, dim], weight and bias fp32 [dim]; the rest as in `rms_norm`."""

    def soft_cap(self, rows: torch.Tensor, x: torch.Tensor, cap: float) -> None:
        """x fp32 [rows, n] becomes cap * tanh(x / cap)."""

    def copy_rows(
        self,
        rows: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        src_rows: torch.Tensor | None = None,
        dst_rows: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """dst[dst_rows[r]] = src[src_rows[r]] * scale, in fp32 and rounded to dst's dtype; of one dtype and with scale
        1 the bits as they are. src and dst [*, width] of float32, bfloat16 or float16, two arrays or columns of wider
        ones; src_rows and dst_rows int32 [rows], None: r itself. A row whose dst_rows is -1 is left out, and none of
        dst is named twice."""

    def spread_logits(self, rows: torch.Tensor, src: torch.Tensor, places: torch.Tensor, dst: torch.Tensor) -> None:
        """dst fp32 [rows, vocab] = src[:, places], and -inf where places int32 [vocab] is -1: logits of a head that
        knows some tokens, fp32 [rows, draft_vocab], as those of the whole vocabulary."""

    def linear(
        self, rows: torch.Tensor, x: torch.Tensor, weight: Any, y: torch.Tensor, epilogue: Epilogue = Epilogue.STORE
    ) -> None: ...

    def lora(
        self,
        rows: torch.Tensor,
        adapters: torch.Tensor,
        x: torch.Tensor,
        weights: LoraWeights,
        low: torch.Tensor,
        y: torch.Tensor,
        epilogue: Epilogue = Epilogue.ADD,
        z: torch.Tensor | None = None,
    ) -> None:
        """What each row's adapter adds to a linear layer that has read x [rows, k]. adapters int32 [rows]: the place
        of each in `weights`, -1: it has none. With ADD y [rows, n] is added to, fp32 or in the backend's dtype; with a
        gated epilogue y [rows, n / 2] becomes that of z fp32 [rows, n], the layer's outputs, and what is added. low
        fp32 [rows * num_parts * rank] is worked in."""

    def route(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        x: torch.Tensor,
        choice: ExpertChoice,
        routes: Routes,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Choose each row's experts by logits fp32 [rows, num_experts], and by bias fp32 [num_experts] where it is
        given, and put its copies of x [rows, dim] where `routes` has them, all of which is written."""

    def experts(
        self, rows: torch.Tensor, x: torch.Tensor, weight: Any, routes: Routes, y: torch.Tensor, epilogue: Epilogue
    ) -> None:
        """`linear` of each expert's rows of x [rows * num_chosen, k] by its weight of those that `pack_experts`
        gave."""

    def combine(
        self,
        rows: torch.Tensor,
        y: torch.Tensor,
        routes: Routes,
        out: torch.Tensor,
        add: bool,
        shared: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> None:
        """out fp32 [rows, dim] = the weighted sum of what a row's experts have given, y fp32 [rows * num_chosen, dim],
        and sigmoid(gates) * shared where they are given, fp32 [rows, 1] and [rows, dim]; with `add`, out += that."""

    def rope_kv_write(
        self,
        rows: torch.Tensor,
        qkv: torch.Tensor,
        q: torch.Tensor,
        cache: CacheTensors,
        layer: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: Rope,
        norms: HeadNorms = NO_NORMS,
    ) -> None: ...

    def attention(
        self,
        rows: torch.Tensor,
        plan: Any,
        q: torch.Tensor,
        cache: CacheTensors,
        layer: int,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None: ...

    def sum_parts(self, rows: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """out fp32 [rows, dim] = the sum of what every rank has in its part, in the order of ranks; with `add`, out +=
        that. parts fp32 [world, max_rows, dim] is of the backend's link, and filled by the kernel before this one."""

    def join_parts(self, rows: torch.Tensor, parts: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
        """At rank 0, out fp32 [rows, sum(widths)] = what every rank r has in its part, rows of widths[r] values one
        behind the other, side by side in the order of ranks. parts fp32 [world, max_rows * max(widths)]."""

    def finish(self) -> None:
        """No more kernels follow; `run` may be called."""

    def run(self) -> None: ...
