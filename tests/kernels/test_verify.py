"""Verification by rejection: exact by enumeration, the published mistakes, and the kernels against their meaning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pagedec.core.forward import DRAW_DTYPE
from pagedec.kernels import reference_verify as reference
from pagedec.kernels.library import Context, KernelError, VerifyArgs
from pagedec.kernels.reference_readout import sample
from tests.kernels import calls
from tests.kernels.test_sample import chi_square_p

Table = np.ndarray
LEAST_P = 1e-4
SAMPLERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.4}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5}, {"temperature": 0.0},
]  # fmt: skip


def draws_of(n: int = 1, **own: Any) -> Table:
    """So many alike, from row 0."""
    draws = np.zeros(n, DRAW_DTYPE)
    for name, value in {"temperature": 1.0, "top_p": 1.0, "position": 1, **own}.items():
        draws[name] = value
    return draws


def total_variation(p: Table, q: Table) -> float:
    return float(np.abs(p - q).sum() / 2)


def answered(p: Table, q: Table, accept: Callable[..., float] = reference.acceptance) -> Table:
    """The distribution of what is answered for a token drafted from q: by enumeration of the drafts."""
    out = np.zeros(len(p))
    for token in range(len(p)):
        kept = accept(p, q, token) if q[token] > 0 else 0.0
        left = reference.residual(p, q)
        out[token] += q[token] * kept
        if left is None:
            out[token] += q[token] * (1 - kept)
        else:
            out += q[token] * (1 - kept) * left
    return out


def pairs(seed: int, num: int = 200) -> list[tuple[Table, Table]]:
    """Distributions over 2 to 8 tokens: of any sharpness, with tokens that one, the other or both lack, and equal."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        size = int(rng.integers(2, 9))
        p, q = (rng.dirichlet(np.full(size, rng.choice([0.1, 1.0, 10.0]))) for _ in range(2))
        for one in (p, q):
            one[rng.random(size) < rng.choice([0.0, 0.5])] = 0
            one[rng.integers(size)] += 1e-3
            one /= one.sum()
        found.append((p, p.copy()) if rng.random() < 0.1 else (p, q))
    return found


# ---- exactness
def test_what_is_answered_is_distributed_as_the_target_is() -> None:
    assert max(total_variation(answered(p, q), p) for p, q in pairs(1)) < 1e-9


@pytest.mark.parametrize("own", SAMPLERS, ids=str)
@pytest.mark.parametrize("other", SAMPLERS, ids=str)
def test_whatever_both_samplers_are(own: dict[str, Any], other: dict[str, Any]) -> None:
    """p and q are what is really drawn from; the draft model may know fewer tokens, or more."""
    rng = np.random.default_rng(3)
    for sizes in ((8, 8), (8, 5), (6, 8)):
        x, y = (rng.normal(0, 2, (1, size)).astype(np.float32) for size in sizes)
        [draw], [draft] = draws_of(**own), draws_of(**other)
        p = reference.distribution(x[0], draw, max(sizes))
        q = reference.distribution(y[0], draft, max(sizes))
        assert total_variation(answered(p, q), p) < 1e-9
        assert abs(p.sum() - 1) < 1e-12 and (p[sizes[0] :] == 0).all() and (q[sizes[1] :] == 0).all()


def test_a_chain_of_drafts_is_the_targets_text() -> None:
    """The joint distribution of three drafted tokens and the one behind them, over all drafts, all places where one
    is rejected, and all texts behind it."""
    rng, size, length = np.random.default_rng(5), 3, 3
    for _ in range(10):
        p, q = ({text: rng.dirichlet(np.ones(size)) for n in range(length + 1)
                 for text in itertools.product(range(size), repeat=n)} for _ in range(2))  # fmt: skip

        def mass(text: tuple[int, ...], given: tuple[int, ...] = (), model: dict[Any, Table] = p) -> float:
            return float(np.prod([model[text[:i]][text[i]] for i in range(len(given), len(text))]))

        found: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(size), repeat=length + 1), 0.0)
        for draft in itertools.product(range(size), repeat=length):
            reached = mass(draft, model=q)
            for i in range(length):
                here, there = p[draft[:i]], q[draft[:i]]
                kept, left = reference.acceptance(here, there, draft[i]), reference.residual(here, there)
                assert left is not None
                for text in found:
                    if text[:i] == draft[:i]:
                        found[text] += reached * (1 - kept) * left[text[i]] * mass(text, text[: i + 1])
                reached *= kept
            for token in range(size):  # the one that a full acceptance is followed by
                found[(*draft, token)] += reached * p[draft][token]
        assert max(abs(mass(text) - value) for text, value in found.items()) * len(found) < 1e-9


# ---- published mistakes
def test_mistake_scored_with_the_raw_distribution() -> None:
    """Drawn under top-k and scored with q before it: biased. What is scored is what the draft's own draw kept."""
    rng, worst = np.random.default_rng(7), 0.0
    for _ in range(50):
        x, y = rng.normal(0, 2, (2, 8)).astype(np.float32)
        [plain], [cut] = draws_of(), draws_of(top_k=2)
        p, raw, drawn = (reference.distribution(row, own, 8) for row, own in ((x, plain), (y, plain), (y, cut)))
        wrong = np.zeros(8)
        for token in np.flatnonzero(drawn):
            kept, left = reference.acceptance(p, raw, token), reference.residual(p, raw)
            assert left is not None
            wrong[token] += drawn[token] * kept
            wrong += drawn[token] * (1 - kept) * left
        worst = max(worst, total_variation(wrong, p))
        assert total_variation(answered(p, drawn), p) < 1e-9
    assert worst > 0.1


def test_mistake_deterministic_drafts_scored_with_q(contexts: list[Context]) -> None:
    """The most probable token of a draft model was not drawn from its q: it is a draft with q = 1, by temperature 0."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])
    left = reference.residual(p, q)
    assert left is not None
    wrong = np.eye(3)[0] * reference.acceptance(p, q, 0) + (1 - reference.acceptance(p, q, 0)) * left
    assert total_variation(wrong, p) > 0.3
    assert total_variation(answered(p, np.eye(3)[0]), p) < 1e-9
    n = 4000
    draws, drafts = draws_of(n), draws_of(n, temperature=0.0)
    draws["position"] = np.arange(n)
    tokens = verify(contexts[-1], np.log(p[None]), draws, np.log(q[None]), drafts, np.zeros(n, np.int32))
    assert chi_square_p(np.bincount(tokens, minlength=3), p) > LEAST_P


def test_mistake_one_number_for_all_acceptances() -> None:
    """A generator that is seeded anew before each acceptance gives the same number: ours are named by positions."""
    draws = draws_of(5000, seed=5)
    draws["position"] = np.arange(len(draws))
    numbers = np.array([reference.uniform(draw) for draw in draws])
    stats = pytest.importorskip("scipy.stats")  # not there where gpu_check.sh runs
    assert stats.kstest(numbers, "uniform").pvalue > LEAST_P and len(set(numbers)) == len(numbers)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / np.sqrt(len(numbers))
    p, q = {(): np.array([0.5, 0.5])}, {(): np.array([0.8, 0.2])}
    for first in range(2):
        p[first,], q[first,] = p[()], q[()]
    joint = np.zeros((2, 2))  # with one number u for both: a draft (0, 0) is accepted whole or not at all
    for a, b in itertools.product(range(2), repeat=2):
        limits = sorted({0.0, *(min(1.0, p[()][t] / q[()][t]) for t in (a, b)), 1.0})
        for low, high in itertools.pairwise(limits):
            u, weight = (low + high) / 2, q[()][a] * q[()][b] * (high - low)
            first = a if u < p[()][a] / q[()][a] else 1
            second = (np.eye(2)[b] if u < p[()][b] / q[()][b] else np.eye(2)[1]) if first == a else p[()]
            joint[first] += weight * second
    assert total_variation(joint.ravel(), np.full(4, 0.25)) > 0.05


def test_mistake_one_key_for_draft_and_replacement(contexts: list[Context]) -> None:
    """Replaced with the noise that the draft was drawn with: biased. With another stream's it is not."""
    n = 6000
    x, y = np.array([[0.5, 1.5, -1.0, -1.0]], np.float32), np.array([[-3.0, 0.5, 1.5, 1.5]], np.float32)
    draws = draws_of(n, seed=11)
    draws["position"] = np.arange(n)
    p = reference.distribution(x[0], draws[0], 4)
    found = []
    for stream in (0, 1 << 63):
        drafts = draws.copy()
        drafts["stream"] = stream
        drafted = calls.sample(contexts[-1], y, drafts)
        tokens = verify(contexts[-1], x, draws, y, drafts, drafted)
        found.append(chi_square_p(np.bincount(tokens, minlength=4), p))
    assert found[0] < LEAST_P < found[1]


def test_mistake_nothing_left_of_equal_distributions(context: Context, cpu: Context) -> None:
    """0 / 0: where p is q all is accepted, token 0 too, and no NaN is drawn from."""
    p = np.array([0.25, 0.75])
    assert reference.residual(p, p) is None and reference.acceptance(p, p, 0) == 1.0
    assert reference.acceptance(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0) == 0.0
    n, x = calls.either(context, 500, 12), np.random.default_rng(1).normal(0, 1, (1, 70)).astype(np.float32)
    for own in SAMPLERS:
        draws = draws_of(n, **own)
        draws["position"] = np.arange(n)
        drafts = draws.copy()
        drafts["stream"] = 1 << 63
        drafted = calls.sample(cpu, x, drafts)
        assert np.array_equal(verify(context, x, draws, x, drafts, drafted), drafted)


# ---- the kernels
def verify(
    context: Context, x: Table, draws: Table, y: Table, drafts: Table, drafted: Table, threads: int = 1
) -> Table:
    x, y = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.float32)
    drafted, out, count = drafted.astype(np.int32), np.full(len(draws), -7, np.int32), calls.count(len(draws))
    arrays = [draws, drafts, drafted, x, y, out]
    own = context if threads == 1 else calls.threads(context, threads)
    own.call(VerifyArgs(calls.pointer(count), *(array.ctypes.data for array in arrays), x.shape[1], y.shape[1]))
    return out


def cases(sizes: tuple[int, int], n: int, step: int = 1) -> Iterator[tuple[Table, Table, Table, Table, Table]]:
    """Arguments of `verify`: so many drafts for each two samplers, or for those of each step."""
    rng = np.random.default_rng(sizes[0])
    for own, other in [*itertools.product(SAMPLERS, SAMPLERS)][::step]:
        x = rng.normal(0, 2, (n, sizes[0])).astype(np.float32)
        y = rng.normal(0, 2, (n, sizes[1])).astype(np.float32)
        shared = min(sizes)
        y[:, :shared] += x[:, :shared]
        x[:, rng.random(sizes[0]) < 0.1] = -np.inf
        draws, drafts = draws_of(n, seed=9, **own), draws_of(n, seed=9, **other)
        for one in (draws, drafts):
            one["row"], one["position"] = np.arange(n), rng.integers(1, 1000, n)
        drafts["stream"] = 1 << 63
        yield x, draws, y, drafts, sample(y, drafts)


SIZES = [(7, 7), (130, 130), (3000, 2900), (64, 300)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_do_as_the_reference_says(contexts: list[Context], sizes: tuple[int, int]) -> None:
    """The same tokens on every instruction set and any threads; and the reference's, but where a number stands within
    rounding of a limit."""
    n, equal, total = 20, 0, 0
    for case in cases(sizes, n):
        first, *others = [verify(context, *case) for context in contexts]
        assert all(np.array_equal(first, other) for other in others)
        assert np.array_equal(first, verify(contexts[-1], *case, threads=3))
        equal += int((first == reference.verify(*case)).sum())
        total += n
    assert equal >= 0.995 * total


@pytest.mark.sampled(10)
@pytest.mark.same_bits
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_library_does_as_the_reference_says(context: Context, sizes: tuple[int, int]) -> None:
    """The emulated device, too, for which 20 drafts would take long: each sampler in both roles."""
    different = 0
    for case in cases(sizes, 2, calls.either(context, 1, 5)):
        first = verify(context, *case)
        assert np.array_equal(first, verify(context, *case, threads=5))
        different += int((first != reference.verify(*case)).sum())
    assert different <= 1


@pytest.mark.sampled(10)
@pytest.mark.parametrize("own", SAMPLERS[:-1], ids=str)
def test_kernels_answer_the_targets_distribution(contexts: list[Context], own: dict[str, Any]) -> None:
    rng, n = np.random.default_rng(2), 6000
    x, y = (rng.normal(0, 1.5, (1, 40)).astype(np.float32) for _ in range(2))
    draws = draws_of(n, seed=3, **own)
    draws["position"] = np.arange(n)
    drafts = draws.copy()
    drafts["stream"] = 1 << 63
    drafted = calls.sample(contexts[-1], y, drafts)
    tokens = verify(contexts[-1], x, draws, y, drafts, drafted)
    p = reference.distribution(x[0], draws[0], 40)
    q = reference.distribution(y[0], drafts[0], 40)
    assert chi_square_p(np.bincount(tokens, minlength=40), p) > LEAST_P
    share, wanted = float((tokens == drafted).mean()), float(np.minimum(p, q).sum())
    assert abs(share - wanted) < 4 * np.sqrt(0.25 / n)


def test_a_row_in_which_nothing_may_be_drawn(context: Context) -> None:
    x, y = np.full((1, 9), -np.inf, np.float32), np.zeros((1, 9), np.float32)
    draws = draws_of(1)
    assert verify(context, x, draws, y, draws, np.array([4])).tolist() == [0]


def test_wrong_arguments_are_refused(context: Context) -> None:
    x, draws = np.zeros((1, 9), np.float32), draws_of(1)
    with pytest.raises(KernelError, match=r"pd_verify: drafted\[0\] is 9; it must be 0 to 8"):
        verify(context, x, draws, x, draws, np.array([9]))
    wrong = draws.copy()
    wrong["top_p"] = 0
    with pytest.raises(KernelError, match=r"drafts\[0\].top_p is 0; it must be above 0"):
        verify(context, x, draws, x, wrong, np.array([1]))
    with pytest.raises(KernelError, match=r"draws\[0\].top_p is 0"):
        verify(context, x, wrong, x, draws, np.array([1]))
