// Gumbel-max draws: a block a draw, whose tokens that are kept (kept.h) get their noise; the highest sum wins, or one
// that many places behind it.
#include "cuda/launch.h"
#include "cuda/kept.h"

namespace pagedec {
namespace {

constexpr int kRoom = 2048;

PD_KERNEL_BLOCKS(kRowThreads, 1) sample_kernel(pd_sample_args a) {
  SHARED_ARRAY(uint64_t, list, kRoom);
  SHARED_ARRAY(uint32_t, low, kBins);
  SHARED_ARRAY(uint32_t, high, kBins);
  const Room room{list, kRoom, {low, high}};
  for (int64_t i = block_index(); i < *a.num_draws; i += num_grid_blocks()) {
    const pd_draw draw = a.draws[i];
    const Row row = scan_row(a.logits + draw.row * (int64_t)a.vocab, a.vocab);
    int32_t token = row.argmax();
    if (draw.temperature > 0.0f && !row.is_empty()) {
      const Kept kept = keep(row, cuts_of(draw), room);
      uint64_t last = kNoKey, first = kNoKey;
      for (int rank = 0; rank <= draw.rank; rank++) {
        uint64_t best = kNoKey;
        each_drawn(row, kept, room, {draw.seed, draw.stream, draw.position},
                   [&](int32_t t, float, float d, float noise) {
                     const uint64_t key = order_key(d + noise, t);
                     if (key < best && (rank == 0 || key > last)) best = key;
                   });
        last = block_least(best);
        if (rank == 0) first = last;
        if (last == kNoKey) break;
      }
      last = last == kNoKey ? first : last;
      token = last == kNoKey ? token : key_token(last);
    } else if (draw.rank > 0 && !row.is_empty()) {
      uint64_t last = row.first;
      for (int rank = 0; rank < draw.rank && last != kNoKey; rank++) {
        uint64_t best = kNoKey;
        row.each([&](uint64_t key) { best = key > last && key < best && key_value(key) > kMinusInf ? key : best; });
        last = block_least(best);
      }
      token = last == kNoKey ? token : key_token(last);
    }
    if (thread_index() == 0) a.token_ids[i] = token;
  }
}

// A thread four tokens, whose words are made at once.
PD_KERNEL(kRowThreads) gumbel_kernel(NoiseKey key, int64_t first, int64_t stop, float *out) {
  const int64_t step = 4 * (int64_t)num_grid_blocks() * kRowThreads;
  int64_t t = first / 4 * 4 + 4 * ((int64_t)block_index() * kRowThreads + thread_index());
  for (; t < stop; t += step) {
    const Words words = philox(key, (uint32_t)(t / 4));
    for (int j = 0; j < 4; j++)
      if (t + j >= first && t + j < stop) out[t + j - first] = gumbel_of(words.of(j));
  }
}

}  // namespace

int enqueue_sample(pd_context &c, const pd_sample_args &a) {
  return launch(c, "pd_sample", sample_kernel, kRowThreads, a);
}

}  // namespace pagedec

using namespace pagedec;

extern "C" int pd_gumbel(pd_context *context, uint64_t seed, uint64_t stream, int32_t position, int32_t first_token,
                         int32_t num_tokens, float *out) {
  if (check_gumbel(context, first_token, num_tokens, out)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_gumbel: another thread works in this context");
  if (num_tokens == 0) return 0;
  return launch(*context, "pd_gumbel", gumbel_kernel, kRowThreads, NoiseKey{seed, stream, position},
                (int64_t)first_token, (int64_t)first_token + num_tokens, out);
}
