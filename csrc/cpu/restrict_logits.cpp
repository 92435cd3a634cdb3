// What may not be drawn becomes -inf: by words of bits, from a token id on, and single logits.
#include <algorithm>

#include "cpu/row_max.h"

namespace pagedec {
namespace {

// Threads share columns as well as rows: a decode step may have one row of a large vocabulary. Whole words.
constexpr int64_t kColumns = 4096;

// Columns begin .. end - 1 of a row; begin is a word's first.
void mask(float *x, const uint32_t *words, int64_t begin, int64_t end) {
  const F16 banned = set16(kMinusInf);
  for (int64_t i = begin; i < end; i += 16) {
    const uint32_t bits = words[i / 32] >> i % 32 & 0xffff;
    if (bits == 0xffff) continue;
    store_some(x + i, select(bits_mask(bits), load_some(x + i, end - i), banned), end - i);
  }
}

}  // namespace

void restrict_logits_part(const pd_restrict_logits_args &a, int thread, int num_threads) {
  const int64_t vocab = a.vocab, width = (vocab + 31) / 32, pieces = (vocab + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t r = u / pieces, begin = u % pieces * kColumns, end = std::min(begin + kColumns, vocab);
    const int64_t tail = std::clamp<int64_t>(a.num_drawn, begin, end);
    float *x = a.logits + r * vocab;
    if (a.places && a.places[r] >= 0) mask(x, a.words + a.places[r] * width, begin, tail);
    std::fill(x + tail, x + end, kMinusInf);
  }
  // Each of its own columns, behind the mask: that writes again what it has read.
  for (int32_t i = 0, n = a.num_banned ? *a.num_banned : 0; i < n; i++) {
    const int64_t u = a.banned_rows[i] * pieces + a.banned_tokens[i] / kColumns;
    if (u >= units.begin && u < units.end) a.logits[a.banned_rows[i] * vocab + a.banned_tokens[i]] = kMinusInf;
  }
}

}  // namespace pagedec
