"""Logits of some tokens at their places among all; the others are minus infinity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedec.kernels import reference
from pagedec.kernels.library import Context, KernelError, SpreadLogitsArgs
from tests.kernels import calls
from tests.kernels.row_calls import spread_logits
from tests.kernels.test_guard_pages import guarded


def places_of(vocab: int, known: int) -> Tensor:
    """Of `known` tokens anywhere among `vocab`."""
    places = torch.full((vocab,), -1, dtype=torch.int32)
    places[torch.randperm(vocab, generator=calls.generator(vocab))[:known]] = calls.ints(range(known))
    return places


def check(context: Context, rows: int, vocab: int, known: int) -> None:
    src, places = calls.normal(rows, known, seed=known), places_of(vocab, known)
    if rows:
        src[-1, known // 2] = torch.nan
    expected = torch.full((rows, vocab), -torch.inf)
    for token, place in enumerate(places.tolist()):
        if place >= 0:
            expected[:, token] = src[:, place]
    assert calls.same_bits(reference.spread_logits(src, places), expected)
    assert calls.same_bits(spread_logits(context, src, places), expected)


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize(("vocab", "known"), [(1, 1), (2, 1), (131, 40), (513, 512), (1000, 1000)])
def test_logits_are_at_their_places(context: Context, rows: int, vocab: int, known: int) -> None:
    check(context, rows, vocab, known)


@pytest.mark.parametrize("vocab", [4095, 4096, 4097, 49152])
def test_large_vocabularies(context: Context, vocab: int) -> None:
    check(context, 2, vocab, vocab // 3)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(context: Context, num_threads: int) -> None:
    for rows in (0, 1, 2, 5):
        check(calls.threads(context, num_threads), rows, 8195, 800)


@pytest.mark.parametrize("at_front", [False, True])
def test_ends_of_arrays(context: Context, at_front: bool) -> None:
    for vocab, known in ((1, 1), (40, 7), (4097, 33)):
        own = [calls.count(2), calls.normal(2, known, seed=1), places_of(vocab, known), torch.zeros(2, vocab)]
        n, src, places, dst = (guarded(tensor, at_front=at_front) for tensor in own)
        context.call(SpreadLogitsArgs(*(tensor.data_ptr() for tensor in (n, src, places, dst)), vocab, known))
        assert calls.same_bits(dst, reference.spread_logits(src, places))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", None, "num_rows is NULL"),
        ("src", None, "src is NULL"),
        ("dst", None, "dst is NULL"),
        ("places", None, "places is NULL"),
        ("vocab", 0, "vocab is 0; it must be 1 to"),
        ("draft_vocab", 0, "draft_vocab is 0; it must be 1 to"),
    ],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    held = {"num_rows": calls.count(2), "src": torch.ones(2, 3), "places": calls.ints([0, -1, 2, 1])}
    held["dst"] = torch.zeros(2, 4)
    fields: dict[str, object] = {name: calls.pointer(tensor) for name, tensor in held.items()}
    fields |= {"vocab": 4, "draft_vocab": 3, field: value}
    with pytest.raises(KernelError, match=f"^pd_spread_logits: {message}"):
        context.call(SpreadLogitsArgs(**fields))
    assert not held["dst"].any()


@pytest.mark.parametrize("place", [-2, 3])
def test_mistakes_are_named(context: Context, place: int) -> None:
    with pytest.raises(KernelError, match=rf"^pd_spread_logits: places\[2\] is {place}; it must be -1 to 2"):
        spread_logits(context, torch.ones(1, 3), calls.ints([0, -1, place]))
