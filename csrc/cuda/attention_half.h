// Attention on tensor cores: K and V of units come to shared memory while those before are computed.
#pragma once
#include <algorithm>

#include "cuda/attention_few.h"
#include "cuda/attention_many.h"

namespace pagedec::attention {
namespace {

template <class Walk>
PD_DEVICE void each_share(const Work &w, const Walk &walk) {
  const Sections p{*(const plan::Header *)w.words, w.words};
  for (int worker = block_index(); worker < p.header.num_workers; worker += num_grid_blocks()) {
    const int32_t *indptr = p.of<int32_t>(p.header.worker_indptr) + worker;
    walk(indptr[0], indptr[1]);
  }
}

// Of a worker's spans those of few rows, then the others. Where the registers of one do not bear the other's beside
// them, these are two kernels.
template <class S, bool kFew, bool kMany>
PD_KERNEL_BLOCKS(kThreads, kBlocksAtATime) half_kernel(Work w) {
  LAUNCHED_SHARED(memory);
  let_next_begin();
  bool has_many = !kFew;
  if constexpr (kFew) each_share(w, [&](int i, int last) { has_many |= Few<S>(w, memory).run(i, last); });
  if (!has_many) return await_kernels();
  if constexpr (kFew && kMany) sync_block();  // what both need is found anew: kept, it would take registers
  if constexpr (kMany)
    each_share(w, [&](int i, int last) {
      for (; i < last; i++) Many<S>(w, memory).run(i);
    });
  await_kernels();  // who has no span, too
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

// What walks say of their shared memory is what a launch gives, which is `launched`: a kernel, its grid, its argument.
template <class S, class Launched>
int put(pd_context &c, Work w, const Launched &launched) {
  const int64_t most = target(c).max_shared_bytes;
  w.few_stages = stages_for<Few<S>>(most), w.num_stages = stages_for<Many<S>>(most);
  const int64_t of_few = Few<S>::bytes(w.few_stages), of_many = Many<S>::bytes(w.num_stages);
  const auto grid = [](int64_t bytes) { return Grid(kThreads, kBlocksAtATime, bytes); };
  if constexpr (!S::kHasScales) return launched(half_kernel<S, true, true>, grid(std::max(of_few, of_many)), w);
  else
    return launched(half_kernel<S, true, false>, grid(of_few), w) ||
                   launched(half_kernel<S, false, true>, grid(of_many), w)
               ? -1
               : 0;
}

template <class E, class Launched>
int put_plain(pd_context &c, const Work &w, int head_dim, const Launched &launched) {
  if (head_dim <= 64) return put<HalfStages<E, 64>>(c, w, launched);
  return head_dim <= 128 ? put<HalfStages<E, 128>>(c, w, launched) : put<HalfStages<E, 256>>(c, w, launched);
}

}  // namespace
}  // namespace pagedec::attention
