"""What may not be drawn becomes minus infinity, by words of bits, from a token on, and single logits; nothing else is
touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedec.core.forward import EVERYTHING, LISTED, Masks
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, KernelError, RestrictLogitsArgs
from pagedec.kernels.masked import check_masks, mask_words
from pagedec.kernels.native import NativeBackend
from tests.kernels import calls
from tests.kernels.test_guard_pages import guarded
from tests.masks import of_words

VOCABS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4095, 4096, 4097, 8225]


def native(context: Context, num_threads: int = 0) -> NativeBackend:
    return calls.native(context, num_threads)


def logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """With NaN and both infinities among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    kinds = rng.random(x.shape)
    x[kinds < 0.02], x[kinds > 0.98], x[(kinds > 0.5) & (kinds < 0.51)] = np.nan, np.inf, -np.inf
    return torch.from_numpy(x)


def restriction(rows: int, vocab: int, seed: int) -> dict[str, Any]:
    """Rows with and without words, words of every density, with bits behind the vocabulary; tokens banned twice."""
    rng = np.random.default_rng(seed)
    width = -(-vocab // 32)
    density = rng.choice([0.0, 0.01, 0.5, 0.99, 1.0], (7, width, 1))
    flags = rng.random((7, width, 32)) < density
    num_banned = int(rng.integers(0, 3 * rows + 1))
    return {
        "places": rng.integers(-1, 7, rows).astype(np.int32),
        "words": np.packbits(flags.reshape(7, -1), axis=1, bitorder="little").view(np.uint32),
        "banned_rows": rng.integers(0, max(1, rows), num_banned).astype(np.int32),
        "banned_tokens": rng.integers(0, vocab, num_banned).astype(np.int32),
        "num_drawn": int(rng.choice([0, 1, vocab // 2, vocab - 1, vocab])),
    }


def expected(x: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """Logit by logit."""
    out = x.clone()
    banned = set(zip(fields["banned_rows"].tolist(), fields["banned_tokens"].tolist(), strict=True))
    for row in range(len(x)):
        place = int(fields["places"][row])
        for token in range(x.shape[1]):
            word = 0xFFFFFFFF if place < 0 else int(fields["words"][place, token // 32])
            if not word >> token % 32 & 1 or token >= fields["num_drawn"] or (row, token) in banned:
                out[row, token] = -torch.inf
    return out


def test_the_reference_is_the_definition() -> None:
    for seed, vocab in enumerate([*VOCABS[:10], 100]):
        for rows in (0, 1, 5):
            x, fields = logits(rows, vocab, seed), restriction(rows, vocab, seed + rows)
            wanted = expected(x, fields)
            ReferenceBackend(torch.float32).restrict(x, **fields)
            assert calls.same_bits(x, wanted)


def check(context: Context, rows: int, vocab: int, seed: int, num_threads: int = 0, **change: Any) -> None:
    x, fields = logits(rows, vocab, seed), restriction(rows, vocab, seed) | change
    wanted = x.clone()
    ReferenceBackend(torch.float32).restrict(wanted, **fields)
    native(context, num_threads).restrict(x, **fields)
    assert calls.same_bits(x, wanted)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_kernel_restricts_alike(context: Context, rows: int, vocab: int) -> None:
    for seed in range(4):
        check(context, rows, vocab, 100 * seed + rows)


@pytest.mark.parametrize(("rows", "vocab"), [(300, 33), (300, 1000), (17, 49153), (1, 49152), (1, 151936)])
def test_many_rows_and_large_vocabularies(context: Context, rows: int, vocab: int) -> None:
    check(context, rows, vocab, rows, num_drawn=vocab - 7)


@pytest.mark.parametrize("vocab", VOCABS)
def test_each_part_alone(context: Context, vocab: int) -> None:
    none = np.empty(0, np.int32)
    alone = {"places": None, "words": None, "banned_rows": none, "banned_tokens": none, "num_drawn": None}
    fields = restriction(9, vocab, vocab)
    check(context, 9, vocab, 1, **alone)
    check(context, 9, vocab, 2, **alone | {"places": fields["places"], "words": fields["words"]})
    pair = {"banned_rows": np.array([8, 0], np.int32), "banned_tokens": np.array([vocab - 1, vocab // 2], np.int32)}
    check(context, 9, vocab, 3, **alone | pair)
    for num_drawn in (0, 1, vocab // 2, vocab - 1, vocab):
        check(context, 9, vocab, 4, **alone | {"num_drawn": num_drawn})


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(context: Context, num_threads: int) -> None:
    for rows in (0, 1, 2, 17):
        check(context, rows, 8225, rows, num_threads)


@pytest.mark.parametrize("at_front", [False, True])
@pytest.mark.parametrize("vocab", [1, 31, 33, 4097])
def test_ends_of_arrays(context: Context, vocab: int, at_front: bool) -> None:
    """An error is a segmentation fault."""
    x, fields = logits(3, vocab, 1), restriction(3, vocab, 5)
    wanted = x.clone()
    ReferenceBackend(torch.float32).restrict(wanted, **fields)
    x, counts = guarded(x, at_front=at_front), [calls.count(3), calls.count(len(fields["banned_rows"]))]
    names = ("places", "words", "banned_rows", "banned_tokens")
    tensors = [*counts, *(torch.from_numpy(fields[name].view(np.int32)) for name in names)]
    n, banned, places, words, rows, tokens = (guarded(tensor, at_front=at_front) for tensor in tensors)
    addresses = [tensor.data_ptr() for tensor in (n, x, places, words, banned, rows, tokens)]
    context.call(RestrictLogitsArgs(*addresses, vocab, len(fields["words"]), fields["num_drawn"], 0))
    assert calls.same_bits(x, wanted)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", None, "num_rows is NULL"),
        ("num_rows", -1, "num_rows is -1; it must be 0 to"),
        ("logits", None, "logits is NULL"),
        ("vocab", 0, "vocab is 0; it must be 1 to"),
        ("num_drawn", -1, "num_drawn is -1; it must be 0 to 40"),
        ("num_drawn", 41, "num_drawn is 41; it must be 0 to 40"),
        ("num_words", -1, "num_words is -1; it must be 0 to"),
        ("words", None, "words is NULL"),
        ("places", [0, 2], r"places\[1\] is 2; it must be -1 to 1"),
        ("places", [-2, 0], r"places\[0\] is -2; it must be -1 to 1"),
        ("num_banned", -1, "num_banned is -1; it must be 0 to"),
        ("banned_rows", None, "banned_rows is NULL"),
        ("banned_rows", [2], r"banned_rows\[0\] is 2; it must be 0 to 1"),
        ("banned_rows", [-1], r"banned_rows\[0\] is -1; it must be 0 to 1"),
        ("banned_tokens", None, "banned_tokens is NULL"),
        ("banned_tokens", [40], r"banned_tokens\[0\] is 40; it must be 0 to 39"),
        ("banned_tokens", [-1], r"banned_tokens\[0\] is -1; it must be 0 to 39"),
    ],
)
def test_mistakes_are_named(context: Context, field: str, value: Any, message: str) -> None:
    arrays: dict[str, Any] = {
        "num_rows": [2], "places": [-1, 1], "words": [0] * 4,
        "num_banned": [1], "banned_rows": [1], "banned_tokens": [39],
    }  # fmt: skip
    numbers = {"vocab": 40, "num_words": 2, "num_drawn": 40}
    if field in numbers:
        numbers[field] = value
    elif field in arrays:
        arrays[field] = [value] if isinstance(value, int) else value
    x = torch.zeros(2, 40)
    held = {name: None if values is None else calls.ints(values) for name, values in arrays.items()}
    addresses = {name: calls.pointer(tensor) for name, tensor in held.items()}
    record = RestrictLogitsArgs(logits=None if field == "logits" else x.data_ptr(), **addresses, **numbers)
    with pytest.raises(KernelError, match=f"^pd_restrict_logits: {message}"):
        context.call(record)
    assert not x.any()


# ---- masks as words
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_lists_become_words(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    words = rng.integers(0, 2**32, (3, -(-vocab // 32)), np.uint32)
    lists = [rng.integers(0, vocab, size).astype(np.int32) for size in (0, 1, vocab, 5)]  # some twice
    places = np.array([LISTED, EVERYTHING, 2, LISTED, LISTED, 0, LISTED, EVERYTHING], np.int32)
    counts = np.zeros(len(places) + 1, np.int32)
    counts[1:][places == LISTED] = [len(tokens) for tokens in lists]
    for given, kinds in ((words, places), (words[:0, :0], np.where(places >= 0, EVERYTHING, places))):
        masks = Masks(kinds.astype(np.int32), given, np.cumsum(counts, dtype=np.int32), np.concatenate(lists))
        found, bits = mask_words(check_masks(masks, len(places), vocab), vocab)
        x = torch.zeros(len(places), vocab)
        ReferenceBackend(torch.float32).restrict(x, found, bits)
        left = iter(lists)
        for row, place in zip(x.tolist(), kinds.tolist(), strict=True):
            own = set(next(left).tolist()) if place == LISTED else set(range(vocab))
            if place >= 0:
                own = {token for token in own if int(words[place, token // 32]) >> token % 32 & 1}
            assert {token for token, value in enumerate(row) if value == 0} == own


def test_words_alone_are_not_copied() -> None:
    words = np.ones((2, 4), np.uint32)
    assert mask_words(of_words(words), 128)[1] is words
