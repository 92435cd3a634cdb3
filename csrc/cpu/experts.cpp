// Mixtures of experts around their linear layers: which experts a row takes, its copies in their order, and their sum.
//
// Bits     Choices and weights are of exact operations in one order, so they are the same on every instruction set and
//          hang on no other row.
// Threads  Rows are chosen for by an equal share of them. Then each thread counts all choices for itself, which is
//          less than a barrier more, and copies an equal share of the places.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/vec_small.h"

namespace pagedec {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;          // of a sum of weights that are all 0
constexpr int64_t kColumns = 256;        // threads share columns of sums as well as rows

float sigmoid(float x) { return 1.0f / (1.0f + exp_small(-x)); }

// What orders experts. Scores would round some logits to one number.
float key_of(const pd_route_args &a, const float *logits, int32_t e, float top, float sum) {
  float key = logits[e];
  if (a.bias) key = (a.score == PD_SIGMOID ? sigmoid(key) : exp_small(key - top) / sum) + a.bias[e];
  return key == key ? key : kNone;
}

float exp_sum(const float *logits, int32_t n, float top) {
  F16 sum = set16(0.0f);
  for (int32_t i = 0; i < n; i += 16) sum = sum + exp_small(load_some(logits + i, n - i, kNone) - set16(top));
  return sum_lanes(sum);
}

void choose(const pd_route_args &a, int64_t row) {
  const float *logits = a.logits + row * a.num_experts;
  int32_t *chosen = a.chosen + row * a.num_chosen;
  float *weights = a.weights + row * a.num_chosen;
  const bool over_all = a.score == PD_SOFTMAX || (a.score == PD_SOFTMAX_CHOSEN && a.bias);
  float top = kNone, sum = 0.0f;
  bool is_number = true;
  for (int32_t e = 0; e < a.num_experts; e++) top = std::max(top, logits[e]), is_number &= logits[e] == logits[e];
  if (over_all) sum = exp_sum(logits, a.num_experts, top);
  int32_t count = 0;
  for (int32_t e = 0; e < a.num_experts; e++) {  // weights hold the keys of the best so far, in order
    const float key = key_of(a, logits, e, top, sum);
    if (count == a.num_chosen && !(key > weights[count - 1])) continue;
    int32_t at = count < a.num_chosen ? count++ : count - 1;
    for (; at > 0 && key > weights[at - 1]; at--) weights[at] = weights[at - 1], chosen[at] = chosen[at - 1];
    weights[at] = key, chosen[at] = e;
  }
  std::sort(chosen, chosen + count);
  float total = 0.0f;
  for (int32_t i = 0; i < count; i++) {
    const float logit = logits[chosen[i]];
    weights[i] = a.score == PD_SIGMOID ? sigmoid(logit) : exp_small(logit - top);
    if (a.score == PD_SOFTMAX) weights[i] = weights[i] / sum;
    total = total + weights[i];
  }
  const bool divides = a.normalize || a.score == PD_SOFTMAX_CHOSEN;
  for (int32_t i = 0; i < count; i++) {
    if (divides) weights[i] = weights[i] / (total + kTiny);
    weights[i] = is_number ? weights[i] * a.scale : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace

void route_rows_part(const pd_route_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  for (int64_t r = rows.begin; r < rows.end; r++) choose(a, r);
}

void route_part(const pd_route_args &a, int thread, int num_threads) {
  const int64_t num_places = (int64_t)*a.num_rows * a.num_chosen;
  int32_t next[PD_MAX_EXPERTS + 1] = {};
  for (int64_t i = 0; i < num_places; i++) next[a.chosen[i] + 1]++;
  for (int32_t e = 0; e < a.num_experts; e++) next[e + 1] += next[e];
  if (thread == 0) memcpy(a.first, next, (a.num_experts + 1) * sizeof *next);
  const Range own = share(num_places, thread, num_threads);
  const int64_t bytes = a.dim * (a.dtype == PD_F32 ? 4 : 2);
  for (int64_t i = 0; i < num_places; i++) {
    const int64_t place = next[a.chosen[i]]++;
    if (place < own.begin || place >= own.end) continue;
    a.places[i] = (int32_t)place;
    memcpy((char *)a.sorted + place * bytes, (const char *)a.x + i / a.num_chosen * bytes, bytes);
  }
}

void combine_part(const pd_combine_args &a, int thread, int num_threads) {
  const int64_t pieces = (a.dim + kColumns - 1) / kColumns;
  const Range units = share(*a.num_rows * pieces, thread, num_threads);
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t row = u / pieces, begin = u % pieces * kColumns, end = std::min<int64_t>(begin + kColumns, a.dim);
    const int32_t *places = a.places + row * a.num_chosen;
    const float *weights = a.weights + row * a.num_chosen;
    const F16 gate = set16(a.gates ? sigmoid(a.gates[row]) : 0.0f);
    float *out = a.out + row * a.dim;
    for (int64_t i = begin; i < end; i += 16) {
      F16 sum = set16(weights[0]) * load_some(a.y + (int64_t)places[0] * a.dim + i, end - i);
      for (int32_t e = 1; e < a.num_chosen; e++)
        sum = sum + set16(weights[e]) * load_some(a.y + (int64_t)places[e] * a.dim + i, end - i);
      if (a.shared) sum = sum + gate * load_some(a.shared + row * a.dim + i, end - i);
      store_some(out + i, a.add ? load_some(out + i, end - i) + sum : sum, end - i);
    }
  }
}

}  // namespace pagedec
