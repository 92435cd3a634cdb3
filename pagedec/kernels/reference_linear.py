"""The meaning of pd_gemm in torch, the order of gate and up rows, and the linear layer of machines without a
compiler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagedec.kernels.records import Epilogue

GROUP = 16  # rows of gate, then of up: one vector of each lies in a 32-wide panel
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return the rows of gate and up [width, ...] in turns of 16, zero rows filling the last group of each."""
    if gate.shape != up.shape:
        raise ValueError(f"gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; they must be of one shape")
    if extra := -gate.shape[0] % GROUP:
        gate, up = (torch.cat([part, part.new_zeros(extra, *part.shape[1:])]) for part in (gate, up))
    return torch.stack([part.unflatten(0, (-1, GROUP)) for part in (gate, up)], 1).flatten(0, 2)  # one copy


def gated_product(product: Tensor, epilogue: Epilogue = Epilogue.SILU_MUL) -> Tensor:
    """Return what a gated epilogue makes of columns interleaved by 16."""
    rows, width = product.shape
    if width % (2 * GROUP):
        raise ValueError(f"product has {width} columns; gate and up in turns of 16 make a multiple of {2 * GROUP}")
    gate, up = product.view(rows, -1, 2, GROUP).unbind(2)
    return gated(gate, up, epilogue).reshape(rows, width // 2)


def gated(gate: Tensor, up: Tensor, epilogue: Epilogue) -> Tensor:
    """Return the activation of a gate, times what it gates."""
    if epilogue == Epilogue.CLAMPED_SWIGLU:
        gate = gate.clamp(max=SWIGLU_LIMIT)
        return (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * (gate * (SWIGLU_ALPHA * gate).sigmoid())
    return up * (functional.gelu(gate, approximate="tanh") if epilogue == Epilogue.GELU_MUL else functional.silu(gate))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    y: Tensor | None = None,
    y_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return epilogue(x W^T + bias) as y_dtype; with ADD, y plus that. For judging kernels: rows may vary with the
    batch."""
    product = x.to(compute_dtype) @ weight.to(compute_dtype).T
    if bias is not None:
        product = product + bias.to(compute_dtype)
    if epilogue == Epilogue.ADD:
        if y is None:
            raise ValueError("y is None; with ADD it must be what is added to")
        product = y.to(compute_dtype) + product
    elif epilogue == Epilogue.GELU:
        product = functional.gelu(product, approximate="tanh")
    elif epilogue != Epilogue.STORE:
        product = gated_product(product, epilogue)
    return product.to(y_dtype)


def _has_packed_linear(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


INT8_GROUP = 64  # values of a row of x that share a scale; their products' sum fits the 24 bits of fp32 in any order


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q [rows, k] fp32 integers of -127 .. 127, scale fp32 [rows]) with values = q * scale, to nearest even.

    A row with an infinity or NaN in it has q 0 and a scale that is no finite number; one of values below 2^-120 has q
    0.
    """
    values = values.float()
    largest = values.abs().amax(1)
    usable = (largest >= 2.0**-120) & largest.isfinite()
    factor = torch.where(usable, torch.full_like(largest, 127.0) / largest, 0.0)
    q = torch.where(usable[:, None], (values * factor[:, None]).round(), 0.0)
    return q, largest / 127.0


class Int8Linear:
    """x W^T + bias with each output's W, and each group of 64 values of a row of x, as int8 times a scale.

    A group's sum is an integer that fp32 cannot round, groups are added in order: the bits of the compiled kernels, in
    every batch.
    """

    __slots__ = ("bias", "k", "n", "scale", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.n, self.k = weight.shape
        self.weight, self.scale = quantize_rows(weight)
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, k], fp32 [rows, n]."""
        if x.ndim != 2 or x.shape[1] != self.k:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [rows, {self.k}]")
        product = torch.zeros(len(x), self.n)
        for start in range(0, self.k, INT8_GROUP):
            group = slice(start, start + INT8_GROUP)
            q, scale = quantize_rows(x[:, group])
            product += (q @ self.weight[:, group].T) * scale[:, None]
        product *= self.scale
        return product if self.bias is None else product + self.bias


class Int8WeightOnlyLinear:
    """x W^T + bias with each output's W as int8 times a scale, and x as it is: products and sums in fp32, the scale
    behind them."""

    __slots__ = ("bias", "k", "n", "product", "scale")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.n, self.k = weight.shape
        q, self.scale = quantize_rows(weight)
        self.product = TorchPackedLinear(q)
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, k], fp32 [rows, n]."""
        product = self.product(x.float()) * self.scale
        return product if self.bias is None else product + self.bias


class TorchPackedLinear:
    """x W^T + bias on torch's packed linear, every call of one shape: [block_rows, k].

    Torch chooses how to split a product by its shape, so that a row's bits may change with the number of rows beside
    it. Padding to one shape takes that choice away; whether the position inside a block matters is a property of the
    machine's library, which probe_invariance looks at. fp16 is multiplied as fp32, and rounded once.
    """

    __slots__ = ("bias", "block_rows", "dtype", "k", "n", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, block_rows: int = 16) -> None:
        if block_rows < 1:
            raise ValueError(f"block_rows is {block_rows}; it must be 1 or more")
        self.n, self.k = weight.shape
        self.block_rows = block_rows
        self.dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.bias = None if bias is None else bias.to(self.dtype).contiguous()
        weight = weight.to(self.dtype).contiguous()
        self.packed = _has_packed_linear(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, block_rows) if self.packed else weight

    def _block(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, k] in the weight's dtype, [rows, n]."""
        if x.ndim != 2 or x.shape[1] != self.k:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [rows, {self.k}]")
        rows, size = x.shape[0], self.block_rows
        out = x.new_empty(rows, self.n)
        for start in range(0, rows, size):
            block = x[start : start + size].to(self.dtype)
            if len(block) < size or not block.is_contiguous():
                block = torch.cat([block, block.new_zeros(size - len(block), self.k)])
            out[start : start + size] = self._block(block)[: rows - start]
        return out

    def probe_invariance(self, seed: int = 0) -> bool:
        """Return whether rows keep their bits alone, at every place of a block, and beside other rows."""
        size = self.block_rows
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2 * size + 1, self.k, generator=generator).to(self.weight.dtype)
        whole = self(x)
        if any(not torch.equal(self(x[i : i + 1])[0], whole[i]) for i in range(len(x))):
            return False
        for shift in range(1, size):
            if not torch.equal(self(x.roll(shift, 0)).roll(-shift, 0), whole):
                return False
        loud = torch.cat([x[:1], 1000 * x[1:size]])
        return torch.equal(self(loud)[0], whole[0])
