"""The best continuations of rows ranked together: against a plain sort of all of them, over every boundary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagedec.core.forward import BEST_GROUP_DTYPE, BEST_ROW_DTYPE, LaneForward, Reported, ReportRows
from pagedec.kernels.backend import Backend, CacheTensors
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import BestArgs, Context, KernelError
from pagedec.kernels.reference_best import CANDIDATE_DTYPE
from tests.kernels import calls

F32 = np.float32


def native(context: Context, num_threads: int = 0) -> Backend:
    return calls.native(context, num_threads)


def torch_backend() -> Backend:
    return ReferenceBackend(torch.float32)


def both_of(context: Context) -> list[Backend]:
    """The kernels and torch, which has been compared beside the processor's before the emulated device comes."""
    return [native(context), torch_backend()][: calls.either(context, 2, 1)]


def rows_of(sizes: list[int], scores: Any, seed: int = 0) -> np.ndarray:
    """Rows of groups one behind the other; their places are those of all rows, interleaved over groups."""
    rows = np.zeros(sum(sizes), BEST_ROW_DTYPE)
    rows["row"] = np.random.default_rng(seed).permutation(len(rows))
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    rows["place"][np.argsort(np.random.default_rng(seed).random(len(rows)))] = 0
    places = np.random.default_rng(seed).permutation(len(rows))
    for group in range(len(sizes)):
        places[group_of == group] = np.sort(places[group_of == group])
    rows["place"], rows["score"] = places, scores
    rows["stream"], rows["position"] = 3 * np.arange(len(rows)), 40
    return rows


def groups_of(sizes: list[int], ks: list[int], **fields: Any) -> np.ndarray:
    groups = np.zeros(len(sizes), BEST_GROUP_DTYPE)
    groups["stop"] = np.cumsum(sizes)
    groups["first"][1:] = groups["stop"][:-1]
    groups["k"], groups["temperature"], groups["top_p"], groups["min_tokens_to_keep"] = ks, 1.0, 1.0, 1
    for name, value in fields.items():
        groups[name] = value
    return groups


def plain(x: np.ndarray, lse: np.ndarray, rows: np.ndarray, group: np.void) -> list[tuple[Any, ...]]:
    """(place, token, key, value, score, logprob) of the best, by sorting everything."""
    own = slice(int(group["first"]), int(group["stop"]))
    values = x[rows["row"][own]]
    values = np.where(np.isnan(values), F32(-np.inf), values)
    with np.errstate(invalid="ignore", over="ignore"):
        logprobs = values - lse[own, None]
        scores = rows["score"][own, None] + logprobs
    at, tokens = np.nonzero(scores > -np.inf)
    score, value, logprob, place = scores[at, tokens], values[at, tokens], logprobs[at, tokens], rows["place"][own][at]
    order = np.lexsort((tokens, place, -value, -score))[: int(group["k"])]
    columns = place, tokens, score, value, score, logprob
    return list(zip(*(column[order].tolist() for column in columns), strict=True))


def check(backend: Backend, x: np.ndarray, rows: np.ndarray, groups: np.ndarray, given: bool = False) -> None:
    lse = backend.topk(torch.from_numpy(x), np.ascontiguousarray(rows["row"]), 0)[2].astype(F32)
    if given:
        lse = lse + F32(0.25)
    found = backend.best(torch.from_numpy(x.copy()), lse if given else None, rows, groups)
    assert len(found) == len(groups)
    for group, candidates in zip(groups, found, strict=True):
        assert candidates.dtype == CANDIDATE_DTYPE
        assert candidates.tolist() == plain(x, lse, rows, group)


def shaped(rng: np.random.Generator, n: int, vocab: int) -> np.ndarray:
    """Logits of every kind, most of them with ties, some with nothing allowed."""
    x = rng.normal(0, 3, (n, vocab)).astype(F32)
    kind = rng.integers(0, 8)
    if kind == 1:
        x = np.floor(x)
    elif kind == 2:
        x[:] = rng.integers(-1, 1, (n, 1))
    elif kind == 3:
        x[rng.random(x.shape) < 0.9] = -np.inf
    elif kind == 4:
        x[rng.random(n) < 0.6] = -np.inf
    elif kind == 5:
        x = np.sort(x, -1)  # the best come last
    elif kind == 6:
        x[rng.random(x.shape) < 0.1] = np.nan
        x[rng.random(x.shape) < 0.3] = -0.0
    elif kind == 7:
        x = np.repeat(np.floor(x[:1]), n, 0)  # rows alike
    return np.ascontiguousarray(x)


def random_case(seed: int, most_rows: int, most_vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, most_rows + 1)) for _ in range(rng.integers(1, 4))]
    n, vocab = sum(sizes), int(rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 129, int(rng.integers(1, most_vocab))]))
    scores = rng.choice([F32(0), F32(-1.5), F32(-70.25), F32(-np.inf)], n, p=[0.4, 0.3, 0.28, 0.02])
    if rng.random() < 0.5:
        scores = rng.normal(-20, 5, n).astype(F32)
    ks = [int(rng.choice([1, 2, 3, 8, 63, 64, 65, 257, 1024, rng.integers(1, 1025)])) for _ in sizes]
    return shaped(rng, n, vocab), rows_of(sizes, scores, seed), groups_of(sizes, ks)


@pytest.mark.sampled(8)
@pytest.mark.same_bits
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_cases_equal_a_plain_sort(context: Context, part: int) -> None:
    backend = native(context)
    for seed in range(part * 250, (part + 1) * 250, calls.either(context, 1, 15)):
        check(backend, *random_case(seed, 12, 400), given=seed % 3 == 0)


def test_torch_ranks_alike() -> None:
    for seed in range(200):
        check(torch_backend(), *random_case(seed, 12, 400), given=seed % 3 == 0)


@pytest.mark.sampled(10)
@pytest.mark.same_bits
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 127, 128, 129, 300])
def test_many_rows(context: Context, num_rows: int) -> None:
    for seed, k in enumerate((1, 2 * num_rows, 1024)):
        rng = np.random.default_rng(seed + num_rows)
        x = shaped(rng, num_rows, 999)
        rows, groups = rows_of([num_rows], rng.normal(-9, 3, num_rows).astype(F32)), groups_of([num_rows], [k])
        for backend in both_of(context):
            check(backend, x, rows, groups)


@pytest.mark.sampled(8)
@pytest.mark.same_bits
@pytest.mark.parametrize("k", [1, 8, 128, 1024])
def test_a_large_vocabulary(context: Context, k: int) -> None:
    rng = np.random.default_rng(k)
    x = rng.normal(0, 3, (6, 49153)).astype(F32)
    check(native(context), x, rows_of([2, 4], rng.normal(-9, 3, 6).astype(F32)), groups_of([2, 4], [k, k]))
    check(native(context), np.zeros((6, 49153), F32), rows_of([6], np.zeros(6, F32)), groups_of([6], [k]))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(context: Context, num_threads: int) -> None:
    for seed in range(calls.either(context, 60, 10)):
        x, rows, groups = random_case(seed, 9, 300)
        groups["is_drawn"] = seed % 2
        whole = native(context, 1).best(torch.from_numpy(x), None, rows, groups)
        shared = native(context, num_threads).best(torch.from_numpy(x), None, rows, groups)
        assert [a.tobytes() for a in whole] == [a.tobytes() for a in shared]


def cases_for_all() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for seed in range(200):
        x, rows, groups = random_case(seed, 12, 400)
        groups["is_drawn"], groups["top_p"], groups["temperature"] = seed % 2, 0.9 if seed % 4 > 1 else 1.0, 1.3
        yield x, rows, groups
    rng = np.random.default_rng(0)
    for num_rows in (63, 64, 127, 128, 129, 300):
        scores = rng.normal(-9, 3, num_rows).astype(F32)
        for k in (1, 2 * num_rows, 1024):
            yield shaped(rng, num_rows, 999), rows_of([num_rows], scores), groups_of([num_rows], [k])
    for k, cut in zip((1, 8, 40, 128, 700, 1024) * len(CUTS), CUTS, strict=False):
        x, scores = rng.normal(0, 3, (6, 5000 if k % 3 else 49153)).astype(F32), rng.normal(-9, 3, 6).astype(F32)
        yield x, rows_of([2, 4], scores), groups_of([2, 4], [k, k])
        yield x, rows_of([2, 4], scores), groups_of([2, 4], [k, k], is_drawn=1, seed=7, **cut)
    yield np.zeros((6, 49153), F32), rows_of([6], np.zeros(6, F32)), groups_of([6], [700])


def test_every_instruction_set_gives_the_same_bits(contexts: list[Context]) -> None:
    for x, rows, groups in cases_for_all():
        first, *others = (native(context).best(torch.from_numpy(x), None, rows, groups) for context in contexts)
        for other in others:
            assert [a.tobytes() for a in first] == [b.tobytes() for b in other]


# ---- with noise: a draw without replacement

CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 1, "min_tokens_to_keep": 3},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.01, "min_tokens_to_keep": 2},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1.0, "min_tokens_to_keep": 5},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "min_tokens_to_keep": 2},
    {"top_k": 600, "top_p": 0.97, "temperature": 1.5},
]


def drawn(x: np.ndarray, lse: np.ndarray, rows: np.ndarray, group: np.void, noise: Any) -> list[tuple[Any, ...]]:
    """(-key, place, token, score) by key, from the definition: temper, cut, add the noise, sort."""
    found = []
    for i in range(int(group["first"]), int(group["stop"])):
        row, t = x[rows["row"][i]], float(group["temperature"])
        order = np.lexsort((np.arange(len(row)), -row))
        order = order[row[order] > -np.inf]
        if not len(order):
            continue
        mass, least = np.exp((row[order].astype(float) - float(row[order[0]])) / t), int(group["min_tokens_to_keep"])
        num = max(int(group["top_k"]), least) if group["top_k"] else len(order)
        mass = mass[:num]
        if group["top_p"] < 1:
            num = max(int(np.searchsorted(np.cumsum(mass), float(group["top_p"]) * mass.sum())) + 1, least)
        mass = mass[:num]
        num = max(int((mass >= float(group["min_p"])).sum()), min(least, len(mass)))
        kept = order[:num]
        scores = rows["score"][i] + (row[kept] - lse[i]) / group["temperature"]
        keys = scores + noise(int(rows["stream"][i]), len(row))[kept]
        columns = zip(keys, kept, scores, strict=True)
        found += [(-key, int(rows["place"][i]), int(token), float(score)) for key, token, score in columns]
    return sorted(found)[: int(group["k"])]


def assert_alike(got: np.ndarray, wanted: list[tuple[Any, ...]]) -> None:
    """The same candidates, but for what rounding of the noise exchanges."""
    assert len(got) == len(wanted)
    if wanted:
        keys = -np.array([entry[0] for entry in wanted])
        assert np.allclose(got["key"], keys, rtol=0, atol=2e-5)
        found = {(c[0], c[1]): (c[2], c[4]) for c in got[["place", "token", "key", "value", "score"]].tolist()}
        exact = {(place, token): (-key, score) for key, place, token, score in wanted}
        both = sorted(set(found) & set(exact))
        assert np.allclose([found[name] for name in both], [exact[name] for name in both], rtol=0, atol=2e-5)
        for name in set(found) ^ set(exact):
            assert abs((found.get(name) or exact[name])[0] - keys[-1]) < 4e-5


@pytest.mark.sampled(12)
@pytest.mark.same_bits
@pytest.mark.parametrize("vocab", [1, 7, 64, 130, 5000])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_are_the_best_of_score_plus_noise(context: Context, vocab: int, cut: dict[str, Any]) -> None:
    def noise(stream: int, size: int) -> np.ndarray:
        return context.gumbel(7, stream, 40, 0, size)

    for seed, k in list(enumerate((1, 3, 40, 700)))[calls.either(context, 0, 1) :: calls.either(context, 1, 2)]:
        rng = np.random.default_rng(seed)
        sizes = [3, 1, 5]
        x = rng.normal(0, 2, (9, vocab)).astype(F32)
        if seed == 1:
            x[rng.random(x.shape) < 0.5] = -np.inf
        rows = rows_of(sizes, rng.normal(-9, 1, 9).astype(F32), seed)
        groups = groups_of(sizes, [k, 2 * k, k], is_drawn=1, seed=7, **cut)
        for backend in both_of(context):
            lse = backend.topk(torch.from_numpy(x), np.ascontiguousarray(rows["row"]), 0)[2].astype(F32)
            for group, got in zip(groups, backend.best(torch.from_numpy(x), None, rows, groups), strict=True):
                wanted = drawn(x, lse, rows, group, noise)
                assert_alike(got, wanted)


def test_inclusion_is_that_of_drawing_one_after_the_other(cpu: Context) -> None:
    """Two of five without replacement: how often each is in is what enumeration says."""
    logits = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], F32))
    p = np.exp(logits[0].astype(float))
    wanted = [p[t] + sum(p[s] * p[t] / (1 - p[s]) for s in range(5) if s != t) for t in range(5)]
    counts, trials = np.zeros(5), 20000
    rows = rows_of([1] * trials, np.zeros(trials, F32))
    rows["row"], rows["stream"] = 0, np.arange(trials)
    groups = groups_of([1] * trials, [2] * trials, is_drawn=1, seed=5)
    for found in native(cpu).best(torch.from_numpy(logits), None, rows, groups):
        counts[found["token"]] += 1
    share = counts / trials
    assert np.all(np.abs(share - wanted) < 4 * np.sqrt(np.array(wanted) * (1 - np.array(wanted)) / trials))


# ---- a forward's rows, read out in pieces


def forward_of(rows: np.ndarray, groups: np.ndarray, num_read: int, **more: Any) -> LaneForward:
    none = np.empty(0, np.int32)
    return LaneForward(
        "target",
        none,
        none,
        none,
        none,
        none,
        none.reshape(0, 0),
        read_rows=np.arange(num_read, dtype=np.int32),
        best_rows=rows,
        best_groups=groups,
        **more,
    )


@pytest.mark.sampled(8)
@pytest.mark.same_bits
@pytest.mark.parametrize("num_rows", [1, 5, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("is_drawn", [0, 1])
def test_pieces_are_merged(context: Context, num_rows: int, is_drawn: int) -> None:
    rng = np.random.default_rng(num_rows)
    x = np.floor(rng.normal(0, 3, (num_rows, 300))).astype(F32) if not is_drawn else shaped(rng, num_rows, 300)
    sizes = [num_rows - num_rows // 3, num_rows // 3][: 1 + (num_rows >= 3)]
    rows = rows_of(sizes, np.floor(rng.normal(-9, 3, num_rows)).astype(F32))
    rows["row"] = rows["place"]
    groups = groups_of(sizes, [2 * size for size in sizes], is_drawn=is_drawn, top_k=9)
    all_rows = np.arange(num_rows, dtype=np.int32)
    report = ReportRows(all_rows[::2], np.full(len(all_rows[::2]), 2, np.int32), all_rows[:0], all_rows[:0])
    forward = forward_of(rows, groups, num_rows, report=report)
    cache = CacheTensors(*[torch.empty(0)] * 3, 1, 16, 8)
    for backend in (native(context), torch_backend()):
        answers = []
        for piece in (num_rows, 128, 7):
            read_out = backend.read_out(forward, cache, {})
            for start in range(0, num_rows, piece):
                read_out.read(torch.from_numpy(x[start : start + piece].copy()), start)
            answers.append(read_out.answers())
        for given in answers[1:]:
            for name in ("counts", "parents", "tokens", "scores", "logprobs"):
                assert np.array_equal(getattr(given, f"best_{name}"), getattr(answers[0], f"best_{name}"))
            assert isinstance(given.report, Reported) and isinstance(answers[0].report, Reported)
            assert np.array_equal(given.report.best_ranks, answers[0].report.best_ranks)
            assert np.array_equal(given.report.best_logprobs, answers[0].report.best_logprobs)
        given = answers[0]
        assert given.best_counts.sum() == len(given.best_tokens)
        for i, (row, token) in enumerate(zip(given.best_parents.tolist(), given.best_tokens.tolist(), strict=True)):
            assert given.report is not None
            wanted = 1 + int((x[row] > x[row, token]).sum()) if row % 2 == 0 else 0
            assert given.report.best_ranks[i] == wanted


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "vocab is 0"),
        ({"num_groups": -1}, "num_groups is -1"),
        ({"logits": None}, "logits is NULL"),
        ({"lse": None}, "lse is NULL"),
        ({"candidates": None}, "candidates is NULL"),
        ({"counts": None}, "counts is NULL"),
        ({"group.k": 0}, r"groups\[0\].k is 0; it must be 1 or more"),
        ({"group.first": 1}, r"groups\[0\].first is 1; it must be 0"),
        ({"group.stop": 3}, r"groups\[0\].stop is 3; it must be 0 to 2"),
        ({"group.stop": 1}, "the groups end with row 1 of 2"),
        ({"group.top_k": -1}, r"groups\[0\].top_k is -1"),
        ({"group.temperature": 0.0}, r"groups\[0\].temperature is 0; it must be above 0"),
        ({"group.temperature": np.nan}, r"groups\[0\].temperature is nan"),
        ({"group.top_p": 0.0}, r"groups\[0\].top_p is 0; it must be above 0"),
        ({"group.min_p": 1.5}, r"groups\[0\].min_p is 1.5"),
        ({"group.min_tokens_to_keep": 0}, r"groups\[0\].min_tokens_to_keep is 0"),
        ({"row.row": -1}, r"rows\[0\].row is -1"),
    ],
)
def test_an_invalid_record_is_named(context: Context, change: dict[str, Any], message: str) -> None:
    rows, groups, count = rows_of([2], 0.0), groups_of([2], [3]), calls.count(2)
    x, lse, found, counts = np.zeros((2, 8), F32), np.zeros(2, F32), np.zeros(3, CANDIDATE_DTYPE), np.zeros(1, np.int32)
    fields: dict[str, Any] = {
        "num_rows": count.data_ptr(), "logits": x.ctypes.data, "lse": lse.ctypes.data, "rows": rows.ctypes.data,
        "groups": groups.ctypes.data, "candidates": found.ctypes.data, "counts": counts.ctypes.data, "num_groups": 1,
        "vocab": 8,
    }  # fmt: skip
    for name, value in change.items():
        record, _, field = name.rpartition(".")
        if record:
            {"group": groups, "row": rows}[record][field][0] = value
        else:
            fields[name] = value
    with pytest.raises(KernelError, match=f"^pd_best: {message}"):
        context.call(BestArgs(**fields))
