"""What becomes of a linear layer's sums: activations over the whole range of fp32."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels import reference_linear as reference
from pagedec.kernels.library import Context, Epilogue
from pagedec.kernels.reference_linear import interleave_gate_up
from tests.kernels.calls import normal
from tests.kernels.test_gemm import Linear


def test_a_clamped_activation_is_accurate_over_the_whole_range(context: Context) -> None:
    """One input, weight 1 for the gate and a half for what it gates; NaN stays NaN."""
    gate = torch.cat([torch.linspace(-120, 120, 4801), torch.logspace(-30, 38, 500), -torch.logspace(-30, 38, 500)])
    gate = torch.cat([gate, torch.tensor([torch.inf, 7.0, 14.0, -14.0, torch.nan])])
    weight = interleave_gate_up(torch.tensor([[1.0]]), torch.tensor([[0.5]]))
    actual = Linear.pack(context, weight, None, 2)(gate[:, None].contiguous(), Epilogue.CLAMPED_SWIGLU)[:, 0].double()
    g, up = gate.double().clamp(max=7), (gate.double() / 2).clamp(-7, 7)
    exact, z = (up + 1) * g * torch.sigmoid(1.702 * g), 1.702 * g
    assert actual[-1].isnan()
    relative = 1e-6 + 3e-7 * z.abs().clamp(max=110)
    assert ((actual - exact).abs() <= relative * exact.abs() + 4e-36)[:-1].all()


@pytest.mark.parametrize("epilogue", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
def test_activation_is_accurate_over_the_whole_range(context: Context, epilogue: Epilogue) -> None:
    """One input, weight 1, up 1: the activation itself, also where e^x underflows or overflows."""
    gate = torch.cat([torch.linspace(-120, 120, 48001), torch.logspace(-30, 38, 500), -torch.logspace(-30, 38, 500)])
    x = torch.stack([gate, torch.ones_like(gate)], 1).contiguous()
    weight = interleave_gate_up(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    actual = Linear.pack(context, weight, None, 2)(x, epilogue)[:, 0].double()
    g = gate.double()
    z = g if epilogue == Epilogue.SILU_MUL else 2 * (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    exact = g * torch.sigmoid(z)
    # e^-z is as accurate as its fp32 argument: z half units in the last place of z
    relative = 1e-6 + 3e-7 * z.abs().clamp(max=110)
    assert ((actual - exact).abs() <= relative * exact.abs() + 4e-37).all()  # 1 + e^-z overflows at z = -88.7
    large = gate > 30
    assert torch.equal(actual[large].float(), gate[large])


@pytest.mark.parametrize("n", [1, 33, 96])
def test_gelu_is_near_float64_over_the_whole_range(context: Context, n: int) -> None:
    """One input, weight 1, any width: also where e^x underflows or overflows."""
    x = torch.cat([torch.linspace(-60, 60, 4001), torch.logspace(-30, 38, 500), -torch.logspace(-30, 38, 500)])[:, None]
    linear, bias = Linear.pack(context, torch.ones(n, 1)), normal(n, seed=1)
    actual, exact = linear(x, Epilogue.GELU).double(), x.double().expand(-1, n)
    exact = exact * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))
    z = 2 * (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    relative = 1e-6 + 3e-7 * z.abs().clamp(max=110)
    assert ((actual - exact).abs() <= relative * exact.abs() + 4e-37).all()
    near = x[x.abs()[:, 0] < 30].contiguous()
    shifted = Linear.pack(context, torch.ones(n, 1), bias)(near, Epilogue.GELU)
    expected = reference.linear(near, torch.ones(n, 1), bias, epilogue=Epilogue.GELU)
    assert torch.allclose(shifted, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(linear(near, Epilogue.GELU, y_dtype=torch.bfloat16), linear(near, Epilogue.GELU).bfloat16())


@pytest.mark.parametrize("rows", [1, 20])
def test_every_nan_is_one_in_bf16(context: Context, rows: int) -> None:
    """Rounding its bits as a number's would make a zero of one whose fraction is all ones, and infinity of another."""
    bits = {3: 0x7FFFFFFF, 17: 0xFFFFFFFF, 31: 0x7F800001, 33: 0xFFC00001, 49: 0x7FFFFFFF}
    bias = torch.zeros(50)
    bias.view(torch.int32)[list(bits)] = torch.tensor(list(bits.values())).to(torch.int32)
    x, weight = normal(rows, 64, seed=1, dtype=torch.bfloat16), normal(50, 64, seed=2, dtype=torch.bfloat16)
    isnan = Linear.pack(context, weight, bias)(x, y_dtype=torch.bfloat16).isnan()
    assert all(row.nonzero().flatten().tolist() == list(bits) for row in isnan)
