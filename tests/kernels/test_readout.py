"""A read-out never looks at logits: it gets by with the backend's methods, whatever is asked and in whatever pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagedec.core.forward import EVERYTHING, LISTED, LaneAnswers, LaneForward, Masks, ProcessRows, ReportRows
from pagedec.core.logits_rules import LogitsRules
from pagedec.kernels.backend import Backend, CacheTensors, Drafted
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context
from pagedec.kernels.native import NativeBackend
from pagedec.kernels.readout import HostReadOut
from pagedec.kernels.row_buffer import RowBuffer
from tests.kernels import calls
from tests.kernels.test_best import groups_of, rows_of

ROWS, VOCAB = 23, 97
RULES = {5: LogitsRules(logit_bias=((3, 4.0), (90, -2.0))), 9: LogitsRules(allowed_token_ids=tuple(range(0, 97, 2)))}


class Sealed:
    """A tensor of which the host sees the shape, and takes ranges of rows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, rows: slice) -> Sealed:
        assert isinstance(rows, slice)
        return Sealed(self._tensor[rows])

    def opened(self) -> torch.Tensor:
        return self._tensor


def unsealed(value: Any) -> Any:
    if isinstance(value, Drafted):
        return dataclasses.replace(value, logits=unsealed(value.logits))
    return value.opened() if isinstance(value, Sealed) else value


class SealingBackend:
    """Another backend, whose tensors nobody else can look into."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sealed:
        return Sealed(self._backend.zeros(shape, dtype))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._backend, name)
        return lambda *args, **named: method(
            *map(unsealed, args), **{name: unsealed(value) for name, value in named.items()}
        )


def ints(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def case(seed: int) -> tuple[LaneForward, np.ndarray, Masks, Drafted]:
    """Something of all that can be asked; some rows are asked for several things, some for nothing."""
    rng = np.random.default_rng(seed)
    rows = np.arange(ROWS, dtype=np.int32)
    some = [np.sort(rng.permutation(rows)[:size]) for size in (9, 7, 8, 6, 14, 5)]
    processed, topk, asked, masked, reported, ranked = some
    draws = calls.draws(20, row=rng.integers(0, ROWS, 20), stream=rng.integers(0, 9, 20), position=7)
    draws["temperature"] = rng.choice([0.0, 1.3], 20)
    best = rows_of([3, 2], np.float32(-1.5))
    best["row"] = ranked[best["place"]]
    given = np.sort(rng.choice(reported, 10))
    bits = rng.random((2, VOCAB + 31)) < 0.5
    places = ints([0, LISTED, EVERYTHING, 1, LISTED, 0])
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    masks = Masks(places, words, ints([0, 0, 3, 3, 3, 7, 7]), rng.permutation(VOCAB)[:7].astype(np.int32))
    forward = LaneForward(
        "target", rows, rows, rows, np.arange(ROWS + 1, dtype=np.int32), np.ones(ROWS, np.int32),
        np.zeros((ROWS, 1), np.int32), read_rows=rows, draws=draws, topk_rows=topk, topk_k=4, logprob_rows=asked,
        logprob_tokens=ints(rng.integers(0, VOCAB, len(asked))), best_rows=best, best_groups=groups_of([3, 2], [6, 4]),
        banned_rows=ints(rng.integers(0, ROWS, 30)), banned_tokens=ints(rng.integers(0, VOCAB, 30)),
        masked_rows=masked, verified_draws=ints([1, 4, 13]),
        processing=ProcessRows(processed, processed, 0 * processed, rng.choice([5, 9], 9), ints(rng.integers(0, 2, 9))),
        report=ReportRows(reported, ints(rng.integers(0, 4, 14)), given, ints(rng.integers(0, VOCAB, 10))),
    )  # fmt: skip
    drafts = calls.draws(3, row=[2, 0, 1], stream=50, position=7)
    drafted = Drafted(calls.normal(3, VOCAB, seed=seed), drafts, ints(rng.integers(0, VOCAB, 3)))
    return forward, np.floor(4 * rng.normal(0, 2, (ROWS, VOCAB))).astype(np.float32) / 4, masks, drafted


def read(
    backend: Backend, case: tuple[LaneForward, np.ndarray, Masks, Drafted], piece: int, sealed: bool, room: bool = False
) -> LaneAnswers:
    forward, x, masks, drafted = case
    known = {number: backend.rules(rules, VOCAB) for number, rules in RULES.items()}
    cache = CacheTensors(torch.empty(0), torch.empty(0), torch.zeros(8, dtype=torch.int32), 1, 16, 8)
    if sealed:
        backend = cast(Backend, SealingBackend(backend))
        drafted = dataclasses.replace(drafted, logits=cast(torch.Tensor, Sealed(drafted.logits)))
    own = RowBuffer(backend, VOCAB) if room else None
    read_out = HostReadOut(backend, forward, cache, known, masks, drafted, own)
    for start in range(0, ROWS, piece):
        logits = torch.from_numpy(x[start : start + piece].copy())
        read_out.read(cast(torch.Tensor, Sealed(logits)) if sealed else logits, start)
    return read_out.answers()


def assert_same(a: Any, b: Any, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(a):
        first, second = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(first):
            assert_same(first, second, but)
        elif field.name in but:
            assert np.allclose(first, second, rtol=0, atol=1e-5), field.name
        elif isinstance(first, dict):
            assert first == second, field.name
        else:
            assert first.dtype == second.dtype and np.array_equal(first, second), field.name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(5))
def test_logits_are_never_looked_at(context: Context, seed: int) -> None:
    """And pieces change nothing, whoever has the room for copies."""
    asked = case(seed)
    for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32)):
        whole = read(backend, asked, ROWS, sealed=False)
        for piece in calls.either(context, [ROWS, 10, 1], [10]):
            assert_same(read(backend, asked, piece, sealed=True), whole)
            assert_same(read(backend, asked, piece, sealed=True, room=True), whole)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(5))
def test_backends_agree(context: Context, seed: int) -> None:
    """All but the last bits of a sum of exponentials."""
    names = ("topk_logprobs", "logprobs", "best_scores", "best_logprobs", "best_keys")
    names += ("top_logprobs", "given_logprobs", "draw_logprobs")
    first, second = (
        read(backend, case(seed), ROWS, sealed=False)
        for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32))
    )
    assert_same(first, second, names)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(5))
def test_reports_are_of_the_models_own_logits(context: Context, seed: int) -> None:
    forward, x, *_ = asked = case(seed)
    answers = read(NativeBackend(context.library, torch.float32), asked, 10, sealed=False)
    report, wide = answers.report, x.astype(np.float64)
    assert report is not None and forward.report is not None
    logprobs = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    picks = [
        (forward.report.given_rows, forward.report.given_tokens, report.given_logprobs, report.given_ranks),
        (forward.draws["row"], answers.draws, report.draw_logprobs, report.draw_ranks),
        *(
            (forward.topk_rows, answers.topk_tokens[:, i], report.topk_logprobs[:, i], report.topk_ranks[:, i])
            for i in range(forward.topk_k)
        ),
    ]
    for rows, tokens, found, ranks in picks:
        own = np.isin(rows, forward.report.rows)
        assert own.any()
        rows, tokens = rows[own], tokens[own]
        assert np.allclose(found[own], logprobs[rows, tokens], rtol=0, atol=1e-5)
        assert ranks[own].tolist() == (1 + (x[rows] > x[rows, tokens][:, None]).sum(1)).tolist()
    asked_rows = np.isin(forward.logprob_rows, forward.report.rows)
    rows, tokens = forward.logprob_rows[asked_rows], forward.logprob_tokens[asked_rows]
    assert report.logprob_ranks[asked_rows].tolist() == (1 + (x[rows] > x[rows, tokens][:, None]).sum(1)).tolist()
    assert np.allclose(answers.logprobs, logprobs[forward.logprob_rows, forward.logprob_tokens], rtol=0, atol=1e-5)
    assert report.top_ids.tolist() == [
        token
        for row, k in zip(forward.report.rows.tolist(), forward.report.num_top.tolist(), strict=True)
        for token in np.lexsort((np.arange(VOCAB), -x[row]))[:k].tolist()
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(5))
def test_reports_have_the_bits_of_a_copy_where_nothing_changes_logits(context: Context, seed: int) -> None:
    asked, none = case(seed), np.zeros(0, np.int32)
    plain = dataclasses.replace(asked[0], processing=None, banned_rows=none, banned_tokens=none, masked_rows=none)
    for backend in (NativeBackend(context.library, torch.float32), ReferenceBackend(torch.float32)):
        copied = read(backend, asked, ROWS, sealed=False).report
        whole = read(backend, (plain, *asked[1:]), ROWS, sealed=False)
        assert copied is not None and whole.report is not None
        for field in ("top_ids", "top_logprobs", "given_logprobs", "given_ranks", "logprob_ranks"):
            assert np.array_equal(getattr(whole.report, field), getattr(copied, field)), field
        assert_same(read(backend, (plain, *asked[1:]), 10, sealed=True), whole)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_nan_is_found(context: Context, backend: str) -> None:
    own: Backend = ReferenceBackend(torch.float32)
    if backend == "native":
        own = NativeBackend(context.library, torch.float32)
    x = calls.normal(3, 70, seed=1)
    x[0, 0], x[1, 1] = torch.inf, -torch.inf
    assert not own.has_nan(x)
    for at in ((0, 0), (2, 69)):
        y = x.clone()
        y[at] = torch.nan
        assert own.has_nan(y)
