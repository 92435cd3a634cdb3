"""AVX-512's instructions by their intrinsics' names, as numpy has them: what Intel's manual says of each, written for
these tests and not as the emulation computes it. Vectors are rows of 64 bytes; a result is what is stored of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LEAST, HALF_ULP = 2.0**-126, 2.0**-25


@dataclass(frozen=True)
class Case:
    """C++ with vectors a, b, c (x, y, z: the same as floats) and the mask k; the model; whether results are floats, of
    which a NaN is as good as another; what an input may be instead of anything: see `inputs` of the tests."""

    text: str
    model: Callable[[Array, Array, Array, Array], Array]
    floats: bool = False


def of(array: Array, dtype: Any) -> Array:
    return np.ascontiguousarray(array).view(dtype)


def f32(array: Array) -> Array:
    return of(array, np.float32)


def bits(mask: Array, lanes: int) -> Array:
    """[n] masks to [n, lanes] truths."""
    return (mask[:, None] >> np.arange(lanes, dtype=np.uint64) & np.uint64(1)).astype(bool)


def mask_of(truths: Array) -> Array:
    weights = np.uint64(1) << np.arange(truths.shape[1], dtype=np.uint64)
    return (truths * weights).sum(1, dtype=np.uint64)[:, None]


# ---- sums that are rounded once


def odd_sum(p: Array, c: Array) -> Array:
    """p + c in float64, whose last bit says whether something is missing: it rounds to fp32 as the exact sum does."""
    total = p + c
    back = total - p
    missing = (p - (total - back)) + (c - back)
    even = (of(total, np.uint64) & np.uint64(1)) == 0
    toward = np.where(missing > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & np.isfinite(missing) & (missing != 0) & even
    return np.where(inexact, np.nextafter(total, toward), total)


def fma(a: Array, b: Array, c: Array) -> Array:
    return odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)


def no_denormals(a: Array) -> Array:
    return np.where(np.abs(a) < np.float32(LEAST), np.copysign(np.float32(0), a), a).astype(np.float32)


def flushed_fma(a: Array, b: Array, c: Array) -> Array:
    """Tiny is what is below 2^-126 once it is rounded, were there no least exponent."""
    exact = odd_sum(no_denormals(a).astype(np.float64) * no_denormals(b), no_denormals(c).astype(np.float64))
    tiny = np.abs(exact) < LEAST * (1 - HALF_ULP)
    return np.where(tiny, np.copysign(np.float32(0), exact), exact).astype(np.float32)


def dot_of_pairs(c: Array, a: Array, b: Array) -> Array:
    def parts(v: Array) -> tuple[Array, Array]:
        words = of(v, np.uint32)
        return f32(words << 16), f32(words & np.uint32(0xFFFF0000))

    (a0, a1), (b0, b1) = parts(a), parts(b)
    return flushed_fma(a0, b0, flushed_fma(a1, b1, f32(c)))


def to_bf16(a: Array) -> Array:
    """The nearer of the two neighbours, of two equally near ones the even one; what overflows is infinite."""
    u = of(a, np.uint32)
    down = u & np.uint32(0xFFFF0000)
    size, low = np.abs(f32(a).astype(np.float64)), np.abs(f32(down).astype(np.float64))
    step = 2.0 ** (np.maximum((u >> 23 & 0xFF).astype(np.float64), 1) - 127 - 7)
    above = (size - low) * 2 - step
    up = (above > 0) | ((above == 0) & (down >> 16 & 1 == 1))
    nearest = (down >> 16) + np.where(up & np.isfinite(f32(a)), 1, 0).astype(np.uint32)
    small = np.where(u >> 23 & 0xFF == 0, down >> 16 & 0x8000, nearest)
    return np.where(np.isnan(f32(a)), down >> 16 | 0x40, small).astype(np.uint16)


def less_floor(a: Array) -> Array:
    """a - floor(a), rounded down: an exact zero is negative then. Of infinity nothing is left."""
    x = f32(a)
    exact = odd_sum(x.astype(np.float64), -np.floor(x).astype(np.float64))
    near = exact.astype(np.float32)
    down = np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(np.isinf(x), np.float32(0), np.where(down == 0, np.float32(-0.0), down)).astype(np.float32)


def scale(a: Array, b: Array) -> Array:
    x, y = f32(a), f32(b)
    power = np.clip(np.floor(np.nan_to_num(y, posinf=900, neginf=-900)), -900, 900).astype(int)
    out = np.ldexp(x.astype(np.float64), power).astype(np.float32)
    up, down = y == np.inf, y == -np.inf
    out = np.where(up & (x != 0), np.copysign(np.float32(np.inf), x), out)
    out = np.where(down, np.copysign(np.float32(0), x), out)
    out = np.where((up & (x == 0)) | (down & np.isinf(x)), np.float32(np.nan), out)
    quiet = of(a, np.uint32) & 0x400000 != 0
    of_nan = np.where(quiet & up, np.float32(np.inf), np.where(quiet & down, np.float32(0), np.float32(np.nan)))
    return np.where(np.isnan(y), np.float32(np.nan), np.where(np.isnan(x), of_nan, out)).astype(np.float32)


# ---- integers


def to_int(a: Array, rounded: Callable[[Array], Array]) -> Array:
    whole = rounded(f32(a).astype(np.float64))
    fits = (whole >= -(2.0**31)) & (whole < 2.0**31)
    return np.where(fits, np.where(fits, whole, 0), -(2.0**31)).astype(np.int64).astype(np.int32)


def lanes(operation: Callable[..., Array], dtype: Any) -> Callable[[Array, Array, Array, Array], Array]:
    """Of two vectors lane by lane."""
    return lambda a, b, c, k: operation(of(a, dtype), of(b, dtype)).astype(dtype)


def shifted(n: int, dtype: Any, left: bool) -> Callable[[Array, Array, Array, Array], Array]:
    width = 8 * np.dtype(dtype).itemsize

    def model(a: Array, b: Array, c: Array, k: Array) -> Array:
        x = of(a, dtype)
        if n >= width:
            return np.where(x < 0, -1, 0).astype(dtype) if np.dtype(dtype).kind == "i" else np.zeros_like(x)
        return x << dtype(n) if left else x >> dtype(n)

    return model


def pairs(a: Array, b: Array, wide: Any, count: int) -> Array:
    """Products of neighbours, added up in so many."""
    return (a.astype(wide) * b.astype(wide)).reshape(len(a), -1, count).sum(2)


def selected(k: Array, yes: Array, no: Array) -> Array:
    return np.where(bits(k, yes.shape[1]), yes, no)


def widened(count: int, narrow: Any, wide: Any) -> Callable[[Array, Array, Array, Array], Array]:
    return lambda a, b, c, k: of(a[:, :count], narrow).astype(wide)


def halves_of_lanes(half: int) -> Callable[[Array, Array, Array, Array], Array]:
    def model(a: Array, b: Array, c: Array, k: Array) -> Array:
        return np.stack([of(a, np.uint64)[:, half::2], of(b, np.uint64)[:, half::2]], 2).reshape(len(a), 8)

    return model


def permuted(a: Array, b: Array, c: Array, k: Array) -> Array:
    return selected(k, np.take_along_axis(of(c, np.uint16), (of(b, np.uint16) & 31).astype(int), 1), of(a, np.uint16))


def shuffled(a: Array, b: Array, c: Array, k: Array) -> Array:
    place = (np.arange(64) & 48) + (b & 15)
    return np.where(b & 128, 0, np.take_along_axis(a, place.astype(int), 1)).astype(np.uint8)


def logic(table: int) -> Callable[[Array, Array, Array, Array], Array]:
    def model(a: Array, b: Array, c: Array, k: Array) -> Array:
        x, y, z = (np.unpackbits(v, axis=1) for v in (a, b, c))
        return np.packbits(table >> (x * 4 + y * 2 + z) & 1, axis=1).astype(np.uint8)

    return model


def tree(operation: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array, Array], Array]:
    """Halves by halves, the upper one first."""

    def model(a: Array, b: Array, c: Array, k: Array) -> Array:
        x = operation(f32(a)[:, 8:], f32(a)[:, :8])
        x = operation(x[:, 4:], x[:, :4])
        x = operation(x[:, :2], x[:, 2:])
        return operation(x[:, :1], x[:, 1:])

    return model


def larger(a: Array, b: Array) -> Array:
    return np.where(a > b, a, b)


def smaller(a: Array, b: Array) -> Array:
    return np.where(a < b, a, b)


def same(a: Array, b: Array, c: Array, k: Array) -> Array:
    return a


F, I16, I32, U16, U32, U64 = np.float32, np.int16, np.int32, np.uint16, np.uint32, np.uint64
CASES = {
    **{f"{name}_ps": Case(f"_mm512_{name}_ps(x, y)", lanes(operation, F), True)
       for name, operation in [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide),
                               ("max", larger), ("min", smaller)]},
    "fmadd_ps": Case("_mm512_fmadd_ps(x, y, z)", lambda a, b, c, k: fma(f32(a), f32(b), f32(c)), True),
    "fmsub_ps": Case("_mm512_fmsub_ps(x, y, z)", lambda a, b, c, k: fma(f32(a), f32(b), -f32(c)), True),
    **{f"roundscale_ps {how}": Case(f"_mm512_roundscale_ps(x, {how} | _MM_FROUND_NO_EXC)",
                                    lambda a, b, c, k, whole=whole: whole(f32(a)), True)
       for how, whole in enumerate([np.rint, np.floor, np.ceil, np.trunc])},
    "reduce_ps": Case("_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)",
                      lambda a, b, c, k: less_floor(a), True),
    "scalef_ps": Case("_mm512_scalef_ps(x, y)", lambda a, b, c, k: scale(a, b), True),
    "dpbf16_ps": Case("_mm512_dpbf16_ps(x, (__m512bh)b, (__m512bh)c)", lambda a, b, c, k: dot_of_pairs(a, b, c), True),
    "cvtneps_pbh": Case("(__m256i)_mm512_cvtneps_pbh(x)", lambda a, b, c, k: to_bf16(a)),
    "cvtne2ps_pbh": Case("(__m512i)_mm512_cvtne2ps_pbh(x, y)",
                         lambda a, b, c, k: np.concatenate([to_bf16(b), to_bf16(a)], 1)),
    "cvtepi32_ps": Case("_mm512_cvtepi32_ps(a)", lambda a, b, c, k: of(a, I32).astype(F), True),
    "cvtph_ps": Case("_mm512_cvtph_ps(half)", lambda a, b, c, k: of(a[:, :32], np.float16).astype(F), True),
    "cvttps_epi32": Case("_mm512_cvttps_epi32(x)", lambda a, b, c, k: to_int(a, np.trunc)),
    "maskz_cvtps_epi32": Case("_mm512_maskz_cvtps_epi32(k, x)",
                              lambda a, b, c, k: selected(k, to_int(a, np.rint), np.zeros((1, 16), I32))),
    "reduce_add_ps": Case("_mm512_reduce_add_ps(x)", tree(np.add), True),
    "reduce_max_ps": Case("_mm512_reduce_max_ps(x)", tree(larger), True),
    **{f"cmp_ps_mask {name}": Case(f"(uint64_t)_mm512_cmp_ps_mask(x, y, {name})",
                                   lambda a, b, c, k, holds=holds: mask_of(holds(f32(a), f32(b))))
       for name, holds in [("_CMP_LT_OQ", np.less), ("_CMP_GT_OQ", np.greater),
                           ("_CMP_UNORD_Q", lambda a, b: np.isnan(a) | np.isnan(b))]},
    "cmplt_epi32_mask": Case("(uint64_t)_mm512_cmplt_epi32_mask(a, b)",
                             lambda a, b, c, k: mask_of(of(a, I32) < of(b, I32))),
    "cmplt_epi16_mask": Case("(uint64_t)_mm512_cmplt_epi16_mask(a, b)",
                             lambda a, b, c, k: mask_of(of(a, I16) < of(b, I16))),
    "cmpge_epu16_mask": Case("(uint64_t)_mm512_cmpge_epu16_mask(a, b)",
                             lambda a, b, c, k: mask_of(of(a, U16) >= of(b, U16))),
    "movepi8_mask": Case("(uint64_t)_mm512_movepi8_mask(a)", lambda a, b, c, k: mask_of(a >= 128)),
    **{name: Case(f"_mm512_{name}(a, b)", lanes(operation, dtype))
       for name, operation, dtype in [
           ("add_epi16", np.add, U16), ("add_epi32", np.add, U32), ("add_epi64", np.add, U64),
           ("sub_epi32", np.subtract, U32), ("and_si512", np.bitwise_and, U64), ("or_si512", np.bitwise_or, U64),
           ("xor_si512", np.bitwise_xor, U64), ("max_epu16", np.maximum, U16), ("max_epu32", np.maximum, U32)]},
    "mul_epu32": Case("_mm512_mul_epu32(a, b)",
                      lambda a, b, c, k: of(a, U32)[:, ::2].astype(U64) * of(b, U32)[:, ::2]),
    "madd_epi16": Case("_mm512_madd_epi16(a, b)",
                       lambda a, b, c, k: pairs(of(a, I16), of(b, I16), np.int64, 2).astype(I32)),
    "maddubs_epi16": Case("_mm512_maddubs_epi16(a, b)",
                          lambda a, b, c, k: pairs(a, of(b, np.int8), np.int64, 2).clip(-32768, 32767).astype(I16)),
    "dpbusd": Case("(add_dots_of_bytes(a, b, c), a)",
                   lambda a, b, c, k: (of(a, I32) + pairs(b, of(c, np.int8), np.int64, 4)).astype(I32)),
    "abs_epi8": Case("_mm512_abs_epi8(a)", lambda a, b, c, k: np.where(a >= 128, -a.astype(int), a).astype(np.uint8)),
    "shuffle_epi8": Case("_mm512_shuffle_epi8(a, b)", shuffled),
    "unpacklo_epi64": Case("_mm512_unpacklo_epi64(a, b)", halves_of_lanes(0)),
    "unpackhi_epi64": Case("_mm512_unpackhi_epi64(a, b)", halves_of_lanes(1)),
    **{f"{name} {n}": Case(f"_mm512_{name}(a, {n})", shifted(n, dtype, "sll" in name))
       for name, dtype in [("slli_epi16", U16), ("slli_epi32", U32), ("slli_epi64", U64), ("srli_epi16", U16),
                           ("srli_epi32", U32), ("srli_epi64", U64), ("srai_epi32", I32)]
       for n in (0, 3, 16, 63)},
    **{f"ternarylogic {table}": Case(f"_mm512_ternarylogic_epi{32 + table % 2 * 32}(a, b, c, {table})", logic(table))
       for table in (0xEA, 0xF8, 0x96, 0x01, 0x13)},
    "reduce_add_epi32": Case("_mm512_reduce_add_epi32(a)",
                             lambda a, b, c, k: of(a, U32).sum(1, dtype=U32)[:, None]),
    "reduce_max_epu32": Case("(int)_mm512_reduce_max_epu32(a)", lambda a, b, c, k: of(a, U32).max(1)[:, None]),
    "mask_mov_ps": Case("_mm512_mask_mov_ps(x, k, y)", lambda a, b, c, k: selected(k, of(b, U32), of(a, U32))),
    "mask_blend_ps": Case("_mm512_mask_blend_ps(k, x, y)", lambda a, b, c, k: selected(k, of(b, U32), of(a, U32))),
    "mask_mov_epi32": Case("_mm512_mask_mov_epi32(a, k, b)", lambda a, b, c, k: selected(k, of(b, U32), of(a, U32))),
    "mask_blend_epi32": Case("_mm512_mask_blend_epi32(k, a, b)",
                             lambda a, b, c, k: selected(k, of(b, U32), of(a, U32))),
    "mask_or_epi32": Case("_mm512_mask_or_epi32(a, k, b, c)",
                          lambda a, b, c, k: selected(k, of(b | c, U32), of(a, U32))),
    "mask_sub_epi8": Case("_mm512_mask_sub_epi8(a, k, b, c)", lambda a, b, c, k: selected(k, b - c, a)),
    "mask_permutexvar_epi16": Case("_mm512_mask_permutexvar_epi16(a, k, b, c)", permuted),
    "cvtepi8_epi32": Case("_mm512_cvtepi8_epi32(quarter)", widened(16, np.int8, I32)),
    "cvtepu8_epi32": Case("_mm512_cvtepu8_epi32(quarter)", widened(16, np.uint8, I32)),
    "cvtepi8_epi16": Case("_mm512_cvtepi8_epi16(half)", widened(32, np.int8, I16)),
    "cvtepu8_epi16": Case("_mm512_cvtepu8_epi16(half)", widened(32, np.uint8, I16)),
    "cvtepi16_epi32": Case("_mm512_cvtepi16_epi32(half)", widened(32, I16, I32)),
    "cvtepu16_epi32": Case("_mm512_cvtepu16_epi32(half)", widened(32, U16, I32)),
    "cvtepi32_epi16": Case("_mm512_cvtepi32_epi16(a)", lambda a, b, c, k: of(a, U32).astype(U16)),
    "cvtepi32_epi8": Case("_mm512_cvtepi32_epi8(a)", lambda a, b, c, k: of(a, U32).astype(np.uint8)),
    "castsi512_si256": Case("_mm512_castsi512_si256(a)", lambda a, b, c, k: a[:, :32]),
    "extracti64x4_epi64 0": Case("_mm512_extracti64x4_epi64(a, 0)", lambda a, b, c, k: a[:, :32]),
    "extracti64x4_epi64 1": Case("_mm512_extracti64x4_epi64(a, 1)", lambda a, b, c, k: a[:, 32:]),
    "broadcast_i32x4": Case("_mm512_broadcast_i32x4(quarter)", lambda a, b, c, k: np.tile(a[:, :16], 4)),
    "set1_epi16": Case("_mm512_set1_epi16((int16_t)k)", lambda a, b, c, k: np.repeat(k.astype(U16)[:, None], 32, 1)),
    "set1_epi32": Case("_mm512_set1_epi32((int)k)", lambda a, b, c, k: np.repeat(k.astype(U32)[:, None], 16, 1)),
    "set1_epi64": Case("_mm512_set1_epi64((int64_t)k)", lambda a, b, c, k: np.repeat(k[:, None], 8, 1)),
    "set1_ps": Case("_mm512_set1_ps(2.5f)", lambda a, b, c, k: np.full((len(a), 16), 2.5, F)),
    "setr_epi64": Case("_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, (int64_t)k)",
                       lambda a, b, c, k: np.where(np.arange(8) == 7, k[:, None], np.arange(8, dtype=U64))),
    "setzero": Case("_mm512_add_ps(_mm512_setzero_ps(), (__m512)_mm512_setzero_si512())",
                    lambda a, b, c, k: np.zeros((len(a), 16), F)),
    "casts": Case("_mm512_castps_si512(_mm512_castsi512_ps(a))", same),
    "mask_loadu_ps": Case("_mm512_mask_loadu_ps(x, k, pb)", lambda a, b, c, k: selected(k, of(b, U32), of(a, U32))),
    "maskz_loadu_ps": Case("_mm512_maskz_loadu_ps(k, pb)",
                           lambda a, b, c, k: selected(k, of(b, U32), np.zeros((1, 16), U32))),
    "load_si512": Case("_mm512_load_si512(memcpy(aligned, pa, 64))", same),
    "stream_ps": Case("(_mm512_stream_ps((float *)aligned, x), _mm_sfence(), _mm512_loadu_ps(aligned))", same),
    "mask_storeu_ps": Case("(memcpy(aligned, pb, 64), _mm512_mask_storeu_ps(aligned, k, x), _mm512_loadu_ps(aligned))",
                           lambda a, b, c, k: selected(k, of(a, U32), of(b, U32))),
    "mask_storeu_epi16": Case(
        "(memcpy(aligned, pb, 64), _mm256_mask_storeu_epi16(aligned, k, half), _mm512_loadu_si512(aligned))",
        lambda a, b, c, k: selected(k & np.uint64(0xFFFF), of(a, U16), of(b, U16))),
}  # fmt: skip
