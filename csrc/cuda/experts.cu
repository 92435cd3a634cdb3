// Mixtures of experts around their linear layers: which experts a row takes, its copies in their order, and their sum.
//
// Bits     Choices and weights are of exact operations in the order of csrc/cpu/experts.cpp, so they are a CPU's, and
//          hang on no other row. What is counted are integers.
// Choice   A warp a row: a lane has every 32nd expert, in registers. The last key that is chosen is found in the bits
//          of keys from the highest on, by ballots, until as many as are chosen lie below what was tried: whether 8 or
//          1,000 are chosen, these are at most 32 rounds.
// Order    The kernel behind it: a block has an equal share of the rows, and counts in shared memory all choices, and
//          those of rows before its own, which is less than another kernel that does it once. It gives its choices
//          their places, row after row, and copies rows there, of which each is read once.
// Sums     Element by element, a block a row's 256 columns at a time.
#include "cuda/launch.h"
#include "cuda/readout.h"

namespace pagedec {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kOrderBlocks = 2;  // of a multiprocessor: each reads all choices
constexpr float kTiny = 1e-20f;  // of a sum of weights that are all 0

PD_DEVICE float sigmoid(float x) { return quotient(1.0f, 1.0f + exp_small(-x)); }

// A row's experts: lane, lane + 32, ..., kOwn of them. Keys of those that there are not are above all others.
template <int kOwn>
struct Choice {
  const pd_route_args &a;
  float scores[kOwn];    // softmax's without its sum
  uint32_t keys[kOwn];   // the less, the better
  float sum = 0.0f;      // of softmax
  bool is_number = true;

  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  // Those that there are not, too: a branch around each of 32 has ptxas work for minutes.
  template <class Visit>
  PD_DEVICE void each(const Visit &visit) const {
    PD_UNROLL for (int j = 0; j < kOwn; j++) visit(j);
  }
  PD_DEVICE int count_up_to(uint32_t key) const {
    int count = 0;
    each([&](int j) { count += count_bits(ballot(keys[j] <= key)); });
    return count;
  }
  PD_DEVICE void look_at(const float *logits);
  PD_DEVICE uint32_t last_key() const;
  PD_DEVICE void choose(int64_t row) const;
};

template <int kOwn>
PD_DEVICE void Choice<kOwn>::look_at(const float *logits) {
  float own[kOwn], top = kMinusInf;
  bool is_one = true;
  each([&](int j) { own[j] = j * kWarp + lane() < a.num_experts ? logits[j * kWarp + lane()] : kMinusInf; });
  each([&](int j) { top = upper(top, without_nan(own[j])), is_one &= own[j] == own[j]; });
  PD_UNROLL for (int mask = kWarp / 2; mask; mask /= 2) top = upper(top, shuffle_xor(top, mask));
  is_number = ballot(!is_one) == 0;
  each([&](int j) { scores[j] = a.score == PD_SIGMOID ? sigmoid(own[j]) : exp_small(own[j] - top); });
  if (a.score == PD_SOFTMAX || (a.score == PD_SOFTMAX_CHOSEN && a.bias)) {  // 16 sums, as a CPU's lanes have them
    each([&](int j) {
      PD_UNROLL for (int half = 0; half < 2; half++)
        if (j * kWarp + half * 16 < a.num_experts) sum = sum + shuffle(scores[j], half * 16 + lane() % 16);
    });
    PD_UNROLL for (int mask = 8; mask; mask /= 2) sum = sum + shuffle_xor(sum, mask);
  }
  each([&](int j) {
    const int expert = j * kWarp + lane();
    float key = own[j];
    if (a.bias && expert < a.num_experts)
      key = (a.score == PD_SIGMOID ? scores[j] : quotient(scores[j], sum)) + a.bias[expert];
    keys[j] = expert < a.num_experts ? falling_bits(without_nan(key)) : ~0u;
  });
}

// Up to which there are num_chosen keys, or more of which the last are equal.
template <int kOwn>
PD_DEVICE uint32_t Choice<kOwn>::last_key() const {
  uint32_t key = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    const int count = count_up_to(key | (bit - 1));
    if (count == a.num_chosen) return key | (bit - 1);
    if (count < a.num_chosen) key |= bit;
  }
  return key;
}

template <int kOwn>
PD_DEVICE void Choice<kOwn>::choose(int64_t row) const {
  const uint32_t last = last_key(), before = (1u << lane()) - 1;
  int num_below = 0, num_equal = 0, num_taken = 0;
  each([&](int j) { num_below += count_bits(ballot(keys[j] < last)); });
  uint32_t taken[kOwn];  // of all lanes
  float total = 0.0f;
  each([&](int j) {
    const uint32_t equal = ballot(keys[j] == last);
    const int place = num_equal + count_bits(equal & before);  // of equal ones those of lower number
    taken[j] = ballot(keys[j] < last || (keys[j] == last && place < a.num_chosen - num_below));
    num_equal += count_bits(equal);
  });
  const auto weight = [&](int j) { return a.score == PD_SOFTMAX ? quotient(scores[j], sum) : scores[j]; };
  const bool divides = a.normalize || a.score == PD_SOFTMAX_CHOSEN;
  if (divides)
    each([&](int j) {
      const float own = weight(j);
      for (uint32_t left = taken[j]; left; left &= left - 1)
        total = total + shuffle(own, count_bits((left & -left) - 1));
    });
  each([&](int j) {
    if (taken[j] >> lane() & 1) {
      const int64_t to = row * a.num_chosen + num_taken + count_bits(taken[j] & before);
      const float own = divides ? quotient(weight(j), total + kTiny) : weight(j);
      a.chosen[to] = j * kWarp + lane();
      a.weights[to] = is_number ? own * a.scale : bits_float(0x7fc00000u);
    }
    num_taken += count_bits(taken[j]);
  });
}

template <int kOwn>
PD_KERNEL(kThreads) choose_kernel(pd_route_args a) {
  let_next_begin();
  await_kernels();
  const int64_t step = (int64_t)num_grid_blocks() * kWarps;  // few rows are as many blocks'
  const int64_t first = thread_index() / kWarp * (int64_t)num_grid_blocks() + block_index();
  for (int64_t row = first; row < *a.num_rows; row += step) {
    Choice<kOwn> choice{a, {}, {}};
    choice.look_at(a.logits + row * a.num_experts);
    choice.choose(row);
  }
}

struct alignas(16) Piece {
  uint32_t words[4];
};
template <class T>
PD_DEVICE T load(const T *p) {
  return *p;
}
PD_DEVICE Piece load(const Piece *p) { return load_whole<Piece>(p); }

// x to all its places among rows of `width` of T.
template <class T>
PD_DEVICE void copy_row(const T *x, T *sorted, int64_t width, const SharedArray<int32_t> &places, int num_places) {
  for (int64_t i = thread_index(); i < width; i += kThreads) {
    const T value = load(x + i);
    for (int p = 0; p < num_places; p++) sorted[places[p] * width + i] = value;
  }
}

// counts becomes the sum of those before.
PD_DEVICE void sum_before(const SharedArray<uint32_t> &counts) {
  constexpr int kOwn = PD_MAX_EXPERTS / kThreads;
  SHARED_ARRAY(uint32_t, of_warps, kWarps);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  uint32_t own[kOwn], sum = 0;
  PD_UNROLL for (int j = 0; j < kOwn; j++) own[j] = counts[thread_index() * kOwn + j], sum += own[j];
  uint32_t until = sum;
  PD_UNROLL for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = shuffle(until, (lane - step) & (kWarp - 1));
    if (lane >= step) until += other;
  }
  if (lane == kWarp - 1) of_warps[warp] = until;
  sync_block();
  uint32_t before = until - sum;
  for (int w = 0; w < warp; w++) before += of_warps[w];
  PD_UNROLL for (int j = 0; j < kOwn; j++) counts[thread_index() * kOwn + j] = before, before += own[j];
  sync_block();
}

PD_KERNEL(kThreads) order_kernel(pd_route_args a) {
  SHARED_ARRAY(uint32_t, next, PD_MAX_EXPERTS);    // place of an expert's next row
  SHARED_ARRAY(uint32_t, earlier, PD_MAX_EXPERTS);  // choices of rows before the block's
  SHARED_ARRAY(int32_t, places, PD_MAX_EXPERTS);
  let_next_begin();
  await_kernels();
  const int64_t rows = *a.num_rows, begin = rows * block_index() / num_grid_blocks();
  const int64_t end = rows * (block_index() + 1) / num_grid_blocks(), num_choices = rows * a.num_chosen;
  if (begin == end && block_index() > 0) return;
  for (int e = thread_index(); e < PD_MAX_EXPERTS; e += kThreads) next[e] = 0, earlier[e] = 0;
  sync_block();
  for (int64_t first = thread_index(); first < num_choices; first += kAhead * kThreads) {
    int32_t ahead[kAhead];  // what is counted holds up loads that come behind it
    PD_UNROLL for (int j = 0; j < kAhead; j++) {
      const int64_t i = first + j * kThreads;
      ahead[j] = i < num_choices ? a.chosen[i] : -1;
    }
    PD_UNROLL for (int j = 0; j < kAhead; j++) {
      if (ahead[j] < 0) continue;
      atomic_add(next, ahead[j], 1u);
      if (first + j * kThreads < begin * a.num_chosen) atomic_add(earlier, ahead[j], 1u);
    }
  }
  sync_block();
  sum_before(next);
  if (block_index() == 0) {
    for (int e = thread_index(); e < a.num_experts; e += kThreads) a.first[e] = (int32_t)next[e];
    if (thread_index() == 0) a.first[a.num_experts] = (int32_t)num_choices;
  }
  sync_block();
  for (int e = thread_index(); e < a.num_experts; e += kThreads) next[e] = next[e] + earlier[e];
  const int64_t bytes = a.dim * (int64_t)(a.dtype == PD_F32 ? 4 : 2);
  const bool is_whole = bytes % 16 == 0 && ((uintptr_t)a.x | (uintptr_t)a.sorted) % 16 == 0;
  for (int64_t row = begin; row < end; row++) {
    sync_block();  // what was there has been read
    for (int i = thread_index(); i < a.num_chosen; i += kThreads) {  // all different
      const int32_t expert = a.chosen[row * a.num_chosen + i], place = (int32_t)next[expert];
      next[expert] = (uint32_t)place + 1;
      places[i] = place, a.places[row * a.num_chosen + i] = place;
    }
    sync_block();
    const char *x = (const char *)a.x + row * bytes;
    if (is_whole) copy_row((const Piece *)x, (Piece *)a.sorted, bytes / 16, places, a.num_chosen);
    else copy_row((const uint16_t *)x, (uint16_t *)a.sorted, bytes / 2, places, a.num_chosen);
  }
}

PD_KERNEL(kThreads) combine_kernel(pd_combine_args a) {
  let_next_begin();
  await_kernels();
  const int64_t pieces = ((int64_t)a.dim + kThreads - 1) / kThreads, number = *a.num_rows * pieces;
  for (int64_t piece = block_index(); piece < number; piece += num_grid_blocks()) {
    const int64_t row = piece / pieces, i = piece % pieces * kThreads + thread_index();
    if (i >= a.dim) continue;
    const int32_t *places = a.places + row * a.num_chosen;
    const float *weights = a.weights + row * a.num_chosen;
    float *out = a.out + row * a.dim + i;
    const float before = a.add ? *out : 0.0f;
    float sum = weights[0] * a.y[places[0] * (int64_t)a.dim + i];
    PD_UNROLL_BY(8)
    for (int e = 1; e < a.num_chosen; e++) sum = sum + weights[e] * a.y[places[e] * (int64_t)a.dim + i];
    if (a.shared) sum = sum + sigmoid(a.gates[row]) * a.shared[row * a.dim + i];
    *out = a.add ? before + sum : sum;
  }
}

// The kernel of the fewest experts a lane.
template <int kOwn>
auto choose_of(int num_experts) {
  if constexpr (kOwn * kWarp < PD_MAX_EXPERTS)
    if (num_experts > kOwn * kWarp) return choose_of<2 * kOwn>(num_experts);
  return choose_kernel<kOwn>;
}

}  // namespace

int enqueue_route(pd_context &c, const pd_route_args &a) {
  if (launch_early(c, "pd_route", choose_of<1>(a.num_experts), grid_of_rows(c, kThreads), a)) return -1;
  return launch_early(c, "pd_route", order_kernel, Grid(kThreads, kOrderBlocks), a);
}
int enqueue_combine(pd_context &c, const pd_combine_args &a) {
  return launch_early(c, "pd_combine", combine_kernel, grid_of_rows(c, kThreads), a);
}

}  // namespace pagedec
