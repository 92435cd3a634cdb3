// Attention on tensor cores: K and V of units come to shared memory while those before are computed.
#pragma once
#include <algorithm>

#include "cuda/attention_few.h"
#include "cuda/attention_many.h"

namespace pagedec::attention {
namespace {

// A worker's spans: those of few rows to the first, which leaves the others to the second.
template <class Few, class Many>
PD_DEVICE void walk_spans(const Work &w, const Few &run_few, const Many &run_many) {
  const Sections p{*(const plan::Header *)w.words, w.words};
  const int32_t *indptr = p.of<int32_t>(p.header.worker_indptr);
  for (int worker = block_index(); worker < p.header.num_workers; worker += num_grid_blocks())
    for (int i = indptr[worker], last = indptr[worker + 1]; i < last;) {
      i = run_few(i, last);
      if (i < last) i = run_many(i, last);
    }
}

// Of the largest heads a multiprocessor has registers for one block.
template <class S>
PD_KERNEL_BLOCKS(kThreadsWithCopier, (S::kColumns > 128 ? 1 : kBlocksAtATime)) half_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  walk_spans(
      w, [&](int i, int last) { return Few<S>(w, memory).run(i, last); },
      [&](int i, int last) { return Many<S>(w, memory).run(i, last); });
}

// As many as there is room for, of which a multiprocessor has so much for all of its blocks, and the driver takes a
// little of each: two blocks with two stages or more, or one. For two stages of the largest heads an SM80 has no room,
// nor have most later ones that are not an H100 or B200.
template <class Walk>
int stages_for(int64_t most_of_block) {
  constexpr int64_t kTaken = (1 << 10) + 128;
  const auto fitting = [](int64_t room) {
    int stages = Walk::kMostStages;
    while (stages > 1 && Walk::bytes(stages) > room) stages--;
    return stages;
  };
  const int of_two = fitting((most_of_block + kTaken) / 2 - kTaken);
  return of_two > 1 ? of_two : fitting(most_of_block);
}

// What walks say of their shared memory is what a launch gives.
template <class S>
int put(pd_context &c, Work w) {
  const int64_t most = target(c).max_shared_bytes;
  w.few_stages = stages_for<Few<S>>(most), w.num_stages = stages_for<Many<S>>(most);
  const int64_t bytes = std::max(Few<S>::bytes(w.few_stages), Many<S>::bytes(w.num_stages));
  return launch(c, "pd_attention", half_kernel<S>, Grid(kThreadsWithCopier, kBlocksAtATime, bytes), w);
}

template <class E>
int put_plain(pd_context &c, const Work &w, int head_dim) {
  if (head_dim <= 64) return put<HalfStages<E, 64>>(c, w);
  return head_dim <= 128 ? put<HalfStages<E, 128>>(c, w) : put<HalfStages<E, 256>>(c, w);
}

}  // namespace
}  // namespace pagedec::attention
