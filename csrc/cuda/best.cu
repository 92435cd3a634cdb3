// The best continuations of rows that are ranked together: a block a group. A continuation is 128 bits whose order is
// that of the ranking: its key, its logit, its row, its token. A small k takes two passes over the group's rows, the
// threads' first ones and what is not behind the k-th of them; a large one runs of as many as find room (select.h).
// Where continuations are drawn, each pass cuts each row anew (kept.h): there may be any number of rows, and what is
// kept of them lies nowhere.
#include "cuda/launch.h"
#include "cuda/kept.h"

namespace pagedec {
namespace {

using Entry = unsigned __int128;
constexpr Entry kNoEntry = ~(Entry)0;
constexpr int kEntries = 1024, kRoom = kRowThreads;

PD_DEVICE Entry entry_of(float key, float value, int64_t row, int64_t token) {
  const uint64_t rank = (uint64_t)falling_bits(key) << 32 | falling_bits(value);
  return (Entry)rank << 64 | (uint64_t)row << 32 | (uint64_t)token;
}

// The rows of a group.
struct Ranked {
  const pd_best_args &a;
  const pd_best_group &group;
  const Room &room;

  PD_DEVICE float logprob(int64_t row, float x) const {
    const float less = x - a.lse[row];
    return group.is_drawn ? quotient(less, group.temperature) : less;
  }
  // visit(entry) of each of this thread's continuations.
  template <class Visit>
  PD_DEVICE void each(Visit visit) const {
    for (int32_t i = group.first; i < group.stop; i++) {
      const pd_best_row &r = a.rows[i];
      const float *x = a.logits + r.row * (int64_t)a.vocab;
      const auto offer = [&](int64_t token, float value, float noise) {
        const float score = r.score + logprob(i, value);
        if (score > kMinusInf) visit(entry_of(score + noise, value, i, token));
      };
      if (!group.is_drawn) {
        each_logit(x, a.vocab, [&](int64_t t, float value) { offer(t, without_nan(value), 0.0f); });
        continue;
      }
      const Row row = scan_row(x, a.vocab);
      if (row.is_empty()) continue;  // the whole block
      const Cuts cuts{group.top_k, group.temperature, group.top_p, group.min_p, group.min_tokens_to_keep};
      const Kept kept = keep(row, cuts, room);
      each_drawn(row, kept, room, {group.seed, r.stream, r.position},
                 [&](int32_t token, float value, float, float noise) { offer(token, value, noise); });
    }
  }
};

PD_DEVICE void rank_group(const Ranked &ranked, const SharedArray<Entry> &entries, const CountBins &bins,
                          pd_candidate *candidates, int32_t *count) {
  const int32_t k = ranked.group.k;
  const auto each = [&](auto visit) { ranked.each(visit); };
  const auto most = [&](int word) {
    return word < 2 ? ~0u : (uint32_t)(word == 2 ? ranked.group.stop : ranked.a.vocab) - 1;
  };
  Entry first = 0, last = kNoEntry;
  bool in_runs = k > kRowThreads;
  if (!in_runs) {
    each([&](Entry entry) { last = entry < last ? entry : last; });
    last = bound_of_first(entries, k, last);
  }
  for (int32_t done = 0;;) {
    const int32_t left = k - done, run = left < kEntries ? left : kEntries;
    if (in_runs) last = select<Entry>(bins, (uint64_t)(done + run), Count{}, most, each);
    const int found = collect(entries, kEntries, first, last, each);
    if (found < 0) {
      in_runs = true;
      continue;
    }
    const int32_t n = found < left ? found : left;
    for (int32_t i = thread_index(); i < n; i += kRowThreads) {
      const Entry entry = entries[i];
      const int64_t row = (int64_t)(uint32_t)(entry >> 32);
      const float value = rising_float((uint32_t)(entry >> 64)), logprob = ranked.logprob(row, value);
      const pd_best_row &r = ranked.a.rows[row];
      candidates[done + i] = {r.place, (int32_t)(uint32_t)entry, rising_float((uint32_t)(entry >> 96)), value,
                              r.score + logprob, logprob};
    }
    done += n;
    if (!in_runs || done == k || n < run) {
      if (thread_index() == 0) *count = (int32_t)done;
      return;
    }
    first = last + 1;
  }
}

PD_KERNEL(kRowThreads) lse_kernel(pd_best_args a) {
  for (int64_t i = block_index(); i < *a.num_rows; i += num_grid_blocks()) {
    const float lse = log_sum_exp(scan_row(a.logits + a.rows[i].row * (int64_t)a.vocab, a.vocab));
    if (thread_index() == 0) a.lse[i] = lse;
  }
}

PD_KERNEL(kRowThreads) best_kernel(pd_best_args a) {
  SHARED_ARRAY(Entry, entries, kEntries);
  SHARED_ARRAY(uint32_t, counts, kBins);
  SHARED_ARRAY(uint64_t, list, kRoom);
  SHARED_ARRAY(uint32_t, low, kBins);
  SHARED_ARRAY(uint32_t, high, kBins);
  const Room room{list, kRoom, {low, high}};
  int64_t at = 0;
  for (int32_t g = 0, next = block_index(); g < a.num_groups; at += a.groups[g++].k) {
    if (g != next) continue;
    next += num_grid_blocks();
    rank_group({a, a.groups[g], room}, entries, CountBins{counts}, a.candidates + at, a.counts + g);
  }
}

}  // namespace

int enqueue_best(pd_context &c, const pd_best_args &a) {
  if (!a.has_lse && launch(c, "pd_best", lse_kernel, kRowThreads, a)) return -1;
  return launch(c, "pd_best", best_kernel, kRowThreads, a);
}

}  // namespace pagedec
