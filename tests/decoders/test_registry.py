"""A decoder of a user's own file is found by its parameters' type and by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec.core.history import History
from pagedec.core.protocol import DecoderContext
from pagedec.decoders import Sampling, decoder, decoder_for, make_decoder, registry
from pagedec.errors import InvalidArgument, NotFound
from pagedec.params import SamplingParams


@pytest.fixture(autouse=True)
def _same_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_params", dict(registry._by_params))
    yield


@dataclass(frozen=True, slots=True)
class OwnParams(SamplingParams):
    bonus: int = 3


class Own(Sampling):
    """Somebody's decoder."""


CONTEXT = DecoderContext(History(16), 1, 10, 100)


def test_found_by_type_and_by_name() -> None:
    decoder("own", params=OwnParams)(Own)
    assert type(make_decoder(OwnParams(bonus=4), CONTEXT)) is Own
    assert type(make_decoder(SamplingParams(), CONTEXT)) is Sampling
    assert decoder_for("own").make is Own and decoder_for(OwnParams).name == "own"


def test_a_subclass_of_known_parameters_uses_their_decoder() -> None:
    assert type(make_decoder(OwnParams(), CONTEXT)) is Sampling


def test_unknown_parameters_name_the_known_ones() -> None:
    with pytest.raises(NotFound, match=r"sampling \(SamplingParams\)"):
        make_decoder({"temperature": 1}, CONTEXT)
    with pytest.raises(NotFound, match="decoder 'beams' does not exist"):
        decoder_for("beams")


def test_taken_names_and_types_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sampling"):
        decoder("sampling", params=OwnParams)(Own)
    with pytest.raises(InvalidArgument, match="params"):
        decoder("own", params=SamplingParams)(Own)
    assert decoder_for("sampling").make is Sampling


def test_a_reloaded_module_replaces_its_decoder() -> None:
    decoder("own", params=OwnParams)(Own)
    again: Any = type("Own", (Sampling,), {"__module__": Own.__module__, "__qualname__": Own.__qualname__})
    decoder("own", params=OwnParams)(again)
    assert decoder_for("own").make is again
