"""Weights as groups of small integers: errors within what the integers allow, and no rounding beside theirs."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch

from pagedec.formats import quantize
from pagedec.formats.quantize import FORMS, Int4, from_iq4_nl, from_q4_1, from_q5_0, quantize_int4, quantize_q8
from pagedec.kernels.blocks import Blocks


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative(blocks: Blocks, w: torch.Tensor) -> float:
    """The squared error over the squared values."""
    return float((blocks.dequantize() - w).square().sum() / w.square().sum())


def test_names_say_the_form() -> None:
    assert {name: form.format for name, form in FORMS.items()} == {
        "int4": "int4_32", "int4_128": "int4_128", "int4_zero": "int4_zero_32", "int4_zero_128": "int4_zero_128",
    }  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n", [1, 33])
def test_normal_values_lose_as_much_as_steps_of_four_bits_do(name: str, n: int) -> None:
    form, w = FORMS[name], weight(n, 1024)
    # a group of G normal values spans about 2 sqrt(2 ln G) deviations in 15 steps; uniform errors are step^2 / 12
    span = 2 * (2 * torch.log(torch.tensor(float(form.group)))).sqrt()
    assert relative(quantize_int4(w, form), w) < float((span / 15) ** 2 / 12) * 1.25
    assert relative(quantize_q8(w), w) < 1e-4


@pytest.mark.parametrize("name", FORMS)
def test_the_search_is_never_worse_than_the_whole_range(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(64, 512, seed=1)
    w[::3, ::7] *= 4  # large values in some groups
    searched = quantize_int4(w, FORMS[name])
    monkeypatch.setattr(quantize, "SHRINKS", (1.0,))
    whole = quantize_int4(w, FORMS[name])
    group = FORMS[name].group
    errors = [(b.dequantize() - w).square().view(-1, group).sum(1) for b in (searched, whole)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all()) and float(errors[0].sum()) < float(errors[1].sum())


@pytest.mark.parametrize("name", FORMS)
def test_what_the_form_can_say_is_said_exactly(name: str) -> None:
    form = FORMS[name]
    generator = torch.Generator().manual_seed(2)
    q = torch.randint(0, 16, (7, 4, form.group), generator=generator).float()
    q[:, :, 0], q[:, :, 1] = 0, 15
    zero = torch.randint(-300, 300, (7, 4, 1), generator=generator) / 16 if form.has_zero else torch.tensor(8.0)
    if not form.has_zero:
        q = q.clamp(min=1)  # then -8 scales is no value: the largest is 7 scales, and
        q[:, :, 0] = 0  # one that is
    w = ((q - zero) * 2.0**-7).view(7, -1)
    assert torch.equal(quantize_int4(w, form).dequantize(), w)


def test_pieces_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(37, 256)
    for name, form in FORMS.items():
        whole = quantize_int4(w, form).data
        monkeypatch.setattr(quantize, "PIECE", 3 * 256 + 1)
        assert torch.equal(quantize_int4(w, form).data, whole), name
        monkeypatch.undo()


def test_zeros_and_what_is_no_number() -> None:
    for form in FORMS.values():
        w = weight(3, 256)
        w[2, :128] = 0.375  # all alike
        w[0], w[1, :128] = 0, torch.nan
        got = quantize_int4(w, form).dequantize()
        assert bool((got[0] == 0).all())
        assert bool(got[1, 128:].isfinite().all()) and bool(got[2].isfinite().all())
        assert bool(((got[2, :128] - 0.375).abs() < 1e-3).all())
    q8 = weight(2, 64)
    q8[0] = 0
    assert bool((quantize_q8(q8).dequantize()[0] == 0).all())


def test_a_group_is_named_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="k is 96; must be a multiple of 128"):
        quantize_int4(weight(2, 96), Int4(128, False))
    with pytest.raises(ValueError, match="k is 40; must be a multiple of 32"):
        quantize_q8(weight(2, 40))


def test_weights_may_be_views_in_bfloat16() -> None:
    w = weight(64, 32).bfloat16().T
    assert torch.equal(quantize_int4(w, FORMS["int4"]).data, quantize_int4(w.contiguous().float(), FORMS["int4"]).data)
    assert torch.equal(quantize_q8(w).data, quantize_q8(w.contiguous().float()).data)


def test_q4_1_is_all_but_the_same() -> None:
    w = weight(9, 256, seed=4) + 0.05
    w[3, :32] = 0.125
    raw = torch.from_numpy(gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType.Q4_1))
    expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.Q4_1))
    blocks = from_q4_1(raw, 256)
    least = torch.from_numpy(raw.numpy().reshape(9, 8, 20)[:, :, 2:4].copy()).view(torch.float16).float()
    error = (blocks.dequantize() - expected).abs().view(9, 8, 32).amax(-1)
    assert bool((error <= least[..., 0].abs() * 2.0**-11 + 1e-9).all())


@pytest.mark.parametrize(("name", "convert"), [("Q5_0", from_q5_0), ("IQ4_NL", from_iq4_nl)])
def test_what_bytes_can_say_becomes_them_without_a_rounding(name: str, convert: Callable[..., Blocks]) -> None:
    kind = gguf.GGMLQuantizationType[name]
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = torch.randint(0, 256, (5, 7, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw[:, :, :2] = torch.randn(5, 7).half()[:, :, None].view(torch.uint8)
    blocks = convert(raw.flatten(1), 7 * 32)
    assert blocks.format == "q8_0" and blocks.shape == (5, 7 * 32)
    expected = torch.from_numpy(gguf.quants.dequantize(raw.flatten(1).numpy(), kind))
    assert torch.equal(blocks.dequantize(), expected)


def test_q4_1_of_values_that_hardly_differ() -> None:
    """Whose zero points fp16 does not have."""
    raw = torch.zeros(1, 3 * 20, dtype=torch.uint8)
    for i, least in enumerate((0.5, -3.0, 0.004)):
        numbers = torch.tensor([2.0**-24, least], dtype=torch.float16)
        raw[0, 20 * i : 20 * i + 4], raw[0, 20 * i + 4 : 20 * i + 20] = numbers.view(torch.uint8), 0xF3
    expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.Q4_1))
    blocks = from_q4_1(raw, 96)
    assert blocks.is_finite
    assert bool(((blocks.dequantize() - expected).abs() <= expected.abs() * 2.0**-11).all())
