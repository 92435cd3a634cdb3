// What may not be drawn becomes -inf: a warp has a word of a row at a time, a lane the token of a bit. Nothing is read
// but bits, and each thread writes the same value, so who comes first does not matter.
#include "cuda/launch.h"

namespace pagedec {
namespace {

constexpr int kThreads = 256;

PD_KERNEL(kThreads) restrict_logits_kernel(pd_restrict_logits_args a) {
  const int64_t thread = (int64_t)block_index() * kThreads + thread_index();
  const int64_t num_threads = (int64_t)num_grid_blocks() * kThreads;
  const int64_t width = ((int64_t)a.vocab + kWarp - 1) / kWarp;
  const int64_t first = a.places ? 0 : a.num_drawn / kWarp, words = width - first;  // in front of it nothing is banned
  for (int64_t u = thread / kWarp; u < *a.num_rows * words; u += num_threads / kWarp) {
    const int64_t r = u / words, w = first + u % words, token = w * kWarp + thread % kWarp;
    const int32_t place = a.places ? a.places[r] : -1;
    const uint32_t word = place < 0 ? ~0u : a.words[place * width + w];
    const bool is_allowed = token < a.num_drawn && (word >> thread % kWarp & 1u);
    if (token < a.vocab && !is_allowed) a.logits[r * a.vocab + token] = -INFINITY;
  }
  const int32_t num_banned = a.num_banned ? *a.num_banned : 0;
  for (int64_t i = thread; i < num_banned; i += num_threads)
    a.logits[a.banned_rows[i] * (int64_t)a.vocab + a.banned_tokens[i]] = -INFINITY;
}

}  // namespace

int enqueue_restrict_logits(pd_context &c, const pd_restrict_logits_args &a) {
  return launch(c, "pd_restrict_logits", restrict_logits_kernel, kThreads, a);
}

}  // namespace pagedec
