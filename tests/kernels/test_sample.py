from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pagedec.kernels import reference_readout as reference
from pagedec.kernels.library import Context, KernelError, SampleArgs
from tests.kernels import calls

LEAST_P = 1e-4  # of a chi-square test: some 70 tests with fixed seeds; a right sampler passes all with probability 0.99


def logits(vocab: int, seed: int, scale: float = 2.5, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def expected_tokens(context: Context, x: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """argmax(log p + G): p in float64 from the reference, G the context's own noise."""
    tokens = []
    for draw in draws:
        row = x[draw["row"]]
        noise = context.gumbel(int(draw["seed"]), int(draw["stream"]), int(draw["position"]), 0, len(row))
        tokens.append(int(np.argmax(reference.log_probabilities(row, draw) + noise.astype(np.float64))))
    return np.array(tokens, np.int32)


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p of the counts; what is expected less than 5 times is one cell together."""
    expected = probabilities * counts.sum()
    assert not counts[probabilities == 0].any(), "a token that is not kept was drawn"
    rare = expected < 5
    observed, wanted = counts[~rare].astype(float), expected[~rare]
    if expected[rare].sum() > 0:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    if len(wanted) == 1:
        return 1.0
    stats = pytest.importorskip("scipy.stats")  # not there where gpu_check.sh runs
    return float(stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


# ---- the noise


def test_philox_gives_the_published_words() -> None:
    """Known answers of philox4x32-10 from the Random123 distribution."""
    ones, c3 = 2**64 - 1, np.array([0, 0xFFFFFFFF, 0x03707344], np.uint64)
    pi_key, pi_stream = 0x299F31D0A4093822, 0x85A308D3243F6A88
    assert reference.philox(0, 0, 0, c3[:1]).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert reference.philox(ones, ones, -1, c3[1:2]).tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]
    expected = [[0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]]
    assert reference.philox(pi_key, pi_stream, 0x13198A2E, c3[2:]).tolist() == expected


KEYS = [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**64 - 1, 2**31 - 1), (0xDEADBEEF00C0FFEE, 1 << 40, 77), (5, 0, -1)]


@pytest.mark.same_bits
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_noise_is_the_formula(context: Context, key: tuple[int, int, int]) -> None:
    # -log(-log(u)): both logarithms to 2 ulp; the inner error is relative, so absolute after the outer one.
    for first, num in ((0, 70000), (1, 1), (3, 130), (63, 2), (2**31 - 300, 200), (64, 0)):
        noise, true = context.gumbel(*key, first, num), reference.gumbel(*key, first, num)
        assert noise.shape == (num,)
        assert np.all(np.abs(noise - true) <= 2.0**-24 * (4 + 4 * np.abs(true)))


def test_noise_has_the_same_bits_on_every_instruction_set(contexts: list[Context]) -> None:
    for key, first, num in [
        ((9, 8, 7), 5, 100_000),
        *((key, first, 700) for key in KEYS for first in (0, 3, 2**31 - 800)),
    ]:
        one, *others = (context.gumbel(*key, first, num) for context in contexts)
        assert all(other.tobytes() == one.tobytes() for other in others)


@pytest.mark.same_bits
def test_noise_is_gumbel_distributed(context: Context) -> None:
    noise = context.gumbel(3, 0, 0, 0, 100000)
    stats = pytest.importorskip("scipy.stats")
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > LEAST_P
    assert noise.max() < 16.1


# ---- draws are the argmax of log p + G

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1e-6},
    {"temperature": 1e30},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.7},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "temperature": 4.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 2000, "top_p": 0.97, "temperature": 1.5},
    {"top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
]
SHAPES = ["normal", "flat", "peaked", "ties", "masked"]


def shaped(kind: str, vocab: int, seed: int) -> np.ndarray:
    x = logits(vocab, seed)
    if kind == "flat":
        x *= np.float32(0.01)
    elif kind == "peaked":
        x[0, seed % vocab] += np.float32(25.0)
    elif kind == "ties":
        x = np.floor(x)
    elif kind == "masked":
        x[0, np.random.default_rng(seed).random(vocab) < 0.9] = -np.inf
        x[0, 0] = 1.0
    return x


@pytest.mark.sampled(20)
@pytest.mark.same_bits
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 130, 5000, 49152])
def test_draw_is_the_argmax_of_log_p_plus_noise(context: Context, vocab: int, kind: str) -> None:
    x = shaped(kind, vocab, vocab + len(kind))
    draws = np.concatenate([calls.draws(2, **parameters) for parameters in PARAMETERS])
    draws["seed"], draws["stream"], draws["position"] = 11, np.arange(len(draws)), 5
    assert calls.sample(context, x, draws).tolist() == expected_tokens(context, x, draws).tolist()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [reference.FEW - 1, reference.FEW, reference.FEW + 1, 3000])
def test_the_reference_keeps_what_sorting_everything_does(vocab: int, kind: str) -> None:
    """Whether the mass of a nucleus lies in the few largest or not."""
    row = shaped(kind, vocab, 3)[0]
    for top_p in (1e-6, 0.3, 0.9, 0.9999, 1 - 1e-7):
        [draw] = calls.draws(1, top_p=top_p)
        found = np.flatnonzero(reference.log_probabilities(row, draw) > -np.inf)
        ordered = np.lexsort((np.arange(vocab), -row))
        mass = np.cumsum(np.exp(row[ordered].astype(float) - float(row.max())))
        wanted = ordered[: int(np.searchsorted(mass, float(draw["top_p"]) * mass[-1])) + 1]
        assert found.tolist() == sorted(wanted.tolist()), top_p


def test_every_instruction_set_draws_the_same(contexts: list[Context]) -> None:
    for kind, vocab in [*itertools.product(SHAPES, (1, 7, 64, 130, 3001, 5000)), ("normal", 49_152), ("ties", 49_152)]:
        x = shaped(kind, vocab, 4)
        draws = np.concatenate([calls.draws(60, stream=np.arange(60), **parameters) for parameters in PARAMETERS])
        first, *others = (calls.sample(context, x, draws).tolist() for context in contexts)
        assert all(other == first for other in others)


@pytest.mark.same_bits
def test_reference_draws_the_same_tokens(context: Context) -> None:
    x = logits(800, 3, rows=3)
    draws = np.concatenate([calls.draws(9, stream=np.arange(9), **parameters) for parameters in PARAMETERS])
    draws["row"] = np.arange(len(draws)) % 3
    draws["temperature"][::10] = 0.0
    assert calls.sample(context, x, draws).tolist() == reference.sample(x, draws).tolist()


# ---- distributions

DISTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "temperature": 1.4},
    {"top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 12, "top_p": 0.85, "min_p": 0.03, "temperature": 2.0},
]


@pytest.mark.sampled(4)
@pytest.mark.same_bits
@pytest.mark.parametrize("parameters", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("vocab", [23, 700])
def test_tokens_follow_the_exact_distribution(context: Context, vocab: int, parameters: dict[str, Any]) -> None:
    x = logits(vocab, vocab, 1.5)
    draws = calls.draws(20000, seed=vocab, position=np.arange(20000), **parameters)
    probabilities = np.exp(reference.log_probabilities(x[0], draws[0]))
    counts = np.bincount(calls.sample(context, x, draws), minlength=vocab)
    assert chi_square_p(counts, probabilities) > LEAST_P


@pytest.mark.same_bits
@pytest.mark.parametrize(
    "step",
    [{"seed": 1}, {"stream": 1}, {"stream": 1 << 32}, {"position": 1}, {"stream": 1, "position": 1}],
    ids=str,
)
def test_neighbouring_draws_are_independent(context: Context, step: dict[str, int]) -> None:
    x = logits(6, 1, 1.0)
    first = calls.draws(20000, seed=3, stream=5, position=2 * np.arange(20000))
    second = first.copy()
    for field, by in step.items():
        second[field] += second[field].dtype.type(by)
    pairs = calls.sample(context, x, first).astype(np.int64) * 6 + calls.sample(context, x, second)
    p = np.exp(reference.log_probabilities(x[0], first[0]))
    assert chi_square_p(np.bincount(pairs, minlength=36), np.outer(p, p).reshape(-1)) > LEAST_P


@pytest.mark.same_bits
def test_same_key_same_token_whatever_the_logits_of_others(context: Context) -> None:
    """The coupling that speculation rests on: with equal noise, close distributions mostly give the same token."""
    x = logits(500, 2, rows=2)
    x[1] = x[0] + logits(500, 3, 0.1)[0]
    draws = calls.draws(4000, position=np.repeat(np.arange(2000), 2), row=np.tile([0, 1], 2000))
    tokens = calls.sample(context, x, draws).reshape(-1, 2)
    p, q = (np.exp(reference.log_probabilities(row, draws[0])) for row in x)
    distance = 0.5 * np.abs(p - q).sum()
    agreement = (tokens[:, 0] == tokens[:, 1]).mean()
    # Gumbel coupling agrees with probability at least (1 - tv) / (1 + tv); 4 standard errors below.
    assert agreement >= (1 - distance) / (1 + distance) - 4 * np.sqrt(0.25 / 2000)


# ---- what a draw may not depend on


def mixed_draws(num_rows: int, seed: int, each: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    draws = np.concatenate([calls.draws(each, **parameters) for parameters in (*PARAMETERS, {"temperature": 0.0})])
    draws["row"] = np.sort(generator.integers(0, num_rows, len(draws)))
    draws["stream"] = generator.integers(0, 2**63, len(draws))
    draws["position"] = generator.integers(0, 2**31 - 1, len(draws))
    return draws


@pytest.mark.sampled(4)
def test_order_neighbours_and_threads_do_not_matter(context: Context) -> None:
    x, draws = logits(1500, 6, rows=5), mixed_draws(5, 7, calls.either(context, 4, 1))
    alone = np.concatenate([calls.sample(context, x, draw.reshape(1)) for draw in draws])
    order = np.random.default_rng(8).permutation(len(draws))
    for num_threads in (1, 2, 3):
        threaded = calls.threads(context, num_threads)
        assert calls.sample(threaded, x, draws).tolist() == alone.tolist()
        assert calls.sample(threaded, x, draws[order]).tolist() == alone[order].tolist()


def test_a_second_call_sees_new_logits(context: Context) -> None:
    draws = calls.draws(1, top_k=3)
    for place in (5, 70, 11):
        x = np.zeros((1, 100), np.float32)
        x[0, place] = 90.0
        assert calls.sample(context, x, draws).tolist() == [place]


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_temperature_zero_is_argmax(context: Context, vocab: int) -> None:
    x = np.floor(logits(vocab, 4, rows=6))
    draws = calls.draws(6, row=np.arange(6), temperature=0.0, top_k=2, top_p=0.3, min_p=0.5)
    assert calls.sample(context, x, draws).tolist() == calls.argmax(context, x).tolist()


# ---- edges


@pytest.mark.parametrize("parameters", [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_nan_and_minus_infinity_are_never_drawn(context: Context, parameters: dict[str, Any]) -> None:
    x = np.full((1, 300), -np.inf, np.float32)
    x[0, 1::3] = np.nan
    x[0, [4, 130, 299]] = 0.5
    n = calls.either(context, 2000, 40)
    draws = calls.draws(n, position=np.arange(n), **parameters)
    tokens = set(calls.sample(context, x, draws).tolist())
    assert tokens == ({4, 130} if "top_k" in parameters else {4, 130, 299})


def test_nothing_to_draw_gives_token_0(context: Context) -> None:
    x = np.full((2, 90), -np.inf, np.float32)
    x[1] = np.nan
    for parameters in PARAMETERS:
        assert calls.sample(context, x, calls.draws(2, row=[0, 1], **parameters)).tolist() == [0, 0]


def test_infinite_logits_share_the_draw(context: Context) -> None:
    x, n = logits(200, 3), calls.either(context, 200, 30)
    x[0, [3, 150]] = np.inf
    for parameters in PARAMETERS[:4]:
        tokens = calls.sample(context, x, calls.draws(n, position=np.arange(n), **parameters))
        assert set(tokens.tolist()) == {3, 150}


@pytest.mark.sampled(10)
@pytest.mark.same_bits
@pytest.mark.parametrize("parameters", [{"top_p": 0.0999}, {"top_p": 0.45}, {"top_k": 3}, {"top_k": 1500}], ids=str)
def test_exactly_the_lowest_ids_of_equals_are_kept(context: Context, parameters: dict[str, Any]) -> None:
    """The last token kept is drawn (missed with probability exp(-10 or less), of few tokens exp(-4)), the one behind it
    never."""
    x, n = np.zeros((1, calls.either(context, 2000, 40)), np.float32), calls.either(context, 20000, 150)
    draws = calls.draws(n, position=np.arange(n), **parameters)
    num_kept = int(np.isfinite(reference.log_probabilities(x[0], draws[0])).sum())
    assert calls.sample(context, x, draws).max() == num_kept - 1


def test_top_k_beyond_the_vocabulary_keeps_everything(context: Context) -> None:
    n = calls.either(context, 300, 40)
    x, position = logits(77, 1), np.arange(n)
    everything = calls.sample(context, x, calls.draws(n, position=position)).tolist()
    for top_k in (77, 78, 2**31 - 1):
        assert calls.sample(context, x, calls.draws(n, position=position, top_k=top_k)).tolist() == everything


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row", -1, r"draws\[1\].row is -1"),
        ("top_k", -5, r"draws\[1\].top_k is -5"),
        ("temperature", -0.5, r"draws\[1\].temperature is -0.5"),
        ("temperature", np.nan, r"draws\[1\].temperature is nan"),
        ("temperature", np.inf, r"draws\[1\].temperature is inf"),
        ("top_p", 0.0, r"draws\[1\].top_p is 0"),
        ("top_p", 1.5, r"draws\[1\].top_p is 1.5"),
        ("top_p", np.nan, r"draws\[1\].top_p is -?nan"),
        ("min_p", -0.1, r"draws\[1\].min_p is -0.1"),
        ("min_p", 1.1, r"draws\[1\].min_p is 1.1"),
    ],
)
def test_invalid_draw_is_named(context: Context, field: str, value: float, message: str) -> None:
    draws = calls.draws(3)
    draws[field][1] = value
    with pytest.raises(KernelError, match=f"^pd_sample: {message}"):
        calls.sample(context, logits(10, 1), draws)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("vocab", 0, "vocab is 0"), ("logits", None, "logits is NULL"), ("draws", None, "draws is NULL")],
)
def test_invalid_field_is_named(context: Context, field: str, value: object, message: str) -> None:
    num, draws, data = calls.count(1), calls.draws(1), np.zeros(8, np.float32)
    fields: dict[str, object] = {"num_draws": num.data_ptr(), "vocab": 4, "draws": draws.ctypes.data}
    fields |= {"logits": data.ctypes.data, "token_ids": data.ctypes.data, field: value}
    with pytest.raises(KernelError, match=f"^pd_sample: {message}"):
        context.call(SampleArgs(**fields))


def test_noise_of_invalid_ranges_is_refused(context: Context) -> None:
    for first, num, message in (
        (-1, 4, "first_token is -1"),
        (0, -2, "num_tokens is -2"),
        (2**31 - 4, 9, "num_tokens is 9"),
    ):
        with pytest.raises(KernelError, match=f"^pd_gumbel: {message}"):
            context.gumbel(0, 0, 0, first, num)


def test_streams_of_one_request_differ(context: Context) -> None:
    tokens = [
        calls.sample(context, logits(1000, 5), calls.draws(50, stream=stream, position=np.arange(50))).tolist()
        for stream in range(5)
    ]
    assert all(a != b for a, b in itertools.pairwise(tokens))
