"""The torch backend: what it finds out about torch when weights are loaded."""

from __future__ import annotations

import logging

import pytest
import torch

from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.reference_linear import TorchPackedLinear


def test_every_shape_is_probed_once_and_none_varies_here(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = []
    original = TorchPackedLinear.probe_invariance
    monkeypatch.setattr(
        TorchPackedLinear, "probe_invariance", lambda self: probes.append((self.n, self.k)) or original(self)
    )
    backend = ReferenceBackend(torch.float32)
    for n, k in ((96, 64), (96, 64), (32, 96)):
        backend.pack(torch.randn(n, k))
    assert probes == [(96, 64), (32, 96)]
    assert backend.varying == set()


def test_a_shape_that_varies_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(TorchPackedLinear, "probe_invariance", lambda self: False)
    backend = ReferenceBackend(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        backend.pack(torch.randn(96, 64))
    assert backend.varying == {(96, 64)}
    assert "96 x 64 is not batch-invariant in torch.bfloat16" in caplog.text


def test_fp16_is_multiplied_as_fp32_and_rounded_once() -> None:
    x, weight, bias = torch.randn(19, 64).half(), torch.randn(96, 64).half(), torch.randn(96)
    linear = ReferenceBackend(torch.float16).pack(weight, bias)
    assert isinstance(linear, TorchPackedLinear)
    exact, got = x.double() @ weight.double().T + bias, linear(x)
    assert got.dtype == torch.float16 and torch.equal(linear(x[7:9]), got[7:9])
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-11 + 1e-4).all()
