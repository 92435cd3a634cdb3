// Rows into the residual stream, what ranks have computed of it, and rows copied: nothing here adds within a row.
#include <type_traits>

#include "cuda/blocks.h"
#include "cuda/launch.h"

namespace pagedec {
namespace {

constexpr int kThreads = 256;

// The place of this thread among all, and how many there are: kernels go through elements in such steps.
PD_DEVICE int64_t first_element() { return (int64_t)block_index() * kThreads + thread_index(); }
PD_DEVICE int64_t num_threads_in_all() { return (int64_t)num_grid_blocks() * kThreads; }

// in_blocks: the table's segments, where it is one; its values are then rounded to what a table of E would have.
template <class E, bool kInBlocks>
PD_KERNEL(kThreads) embed_kernel(pd_embed_args a, Segments in_blocks) {
  const float nan = bits_float(0x7fc00000u);
  const int32_t num_ids = a.num_ids ? a.num_ids : a.vocab;
  for (int64_t i = first_element(); i < *a.num_rows * (int64_t)a.dim; i += num_threads_in_all()) {
    const int64_t r = i / a.dim, d = i % a.dim;
    const int32_t token = a.token_ids[r], place = token - a.first_id;
    const int32_t position = a.position_table ? a.positions[r] : 0;
    if (d == 0 && a.slots && a.slots[r] >= 0) a.token_plane[a.slots[r]] = token;
    // An id outside the table may come from an earlier kernel, too late for an error: NaN cannot be overlooked.
    const bool known =
        token >= 0 && token < num_ids && position >= 0 && (position < a.num_positions || !a.position_table);
    float x = known ? 0.0f : nan;  // 0: another rank's
    if (known && place >= 0 && place < a.vocab) {
      if constexpr (kInBlocks) x = to_float(from_float<E>(value_in_blocks(in_blocks, place, d))) * a.scale;
      else x = to_float(((const E *)a.table)[place * (int64_t)a.dim + d]) * a.scale;
    }
    if (known && a.position_table) x = x + to_float(((const E *)a.position_table)[position * (int64_t)a.dim + d]);
    a.out[i] = x;
  }
}

PD_KERNEL(kThreads) add_parts_kernel(pd_add_parts_args a) {
  for (int64_t i = first_element(); i < *a.num_rows * (int64_t)a.dim; i += num_threads_in_all()) {
    float sum = a.parts[i];
    for (int64_t p = 1; p < a.num_parts; p++) sum = sum + a.parts[p * a.part_stride + i];
    a.out[i] = a.add ? a.out[i] + sum : sum;
  }
}

PD_KERNEL(kThreads) join_parts_kernel(pd_join_parts_args a) {
  for (int64_t i = first_element(); i < *a.num_rows * (int64_t)a.dim; i += num_threads_in_all()) {
    const int64_t r = i / a.dim;
    int64_t d = i % a.dim, p = 0;
    while (d >= a.widths[p]) d -= a.widths[p++];
    a.out[i] = a.parts[p * a.part_stride + r * a.widths[p] + d];
  }
}

PD_KERNEL(kThreads) soft_cap_kernel(pd_soft_cap_args a) {
  for (int64_t i = first_element(); i < *a.num_rows * (int64_t)a.n; i += num_threads_in_all())
    a.x[i] = a.cap * hyperbolic_tangent(quotient(a.x[i], a.cap));
}

template <class D, class S>
PD_DEVICE D scaled(S x, float scale) {
  if constexpr (std::is_same_v<S, D>)
    if (scale == 1.0f) return x;
  return from_float<D>(to_float(x) * scale);
}
// A warp has a piece of a row, a lane some numbers of it under way.
template <class S, class D>
PD_KERNEL(kThreads) copy_rows_kernel(pd_copy_rows_args a) {
  constexpr int kAhead = 8, kPiece = kAhead * kWarp;
  const int64_t pieces = (a.width + (int64_t)kPiece - 1) / kPiece, units = *a.num_rows * pieces;
  for (int64_t u = first_element() / kWarp; u < units; u += num_threads_in_all() / kWarp) {
    const int64_t r = u / pieces, first = u % pieces * kPiece + thread_index() % kWarp;
    const int64_t from = a.src_rows ? a.src_rows[r] : r, to = a.dst_rows ? a.dst_rows[r] : r;
    if (to < 0) continue;
    const S *src = (const S *)a.src + from * a.src_stride + first;
    D *dst = (D *)a.dst + to * a.dst_stride + first;
    S x[kAhead];
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kWarp < a.width) x[j] = src[j * kWarp];
    PD_UNROLL for (int j = 0; j < kAhead; j++)
      if (first + j * kWarp < a.width) dst[j * kWarp] = scaled<D>(x[j], a.scale);
  }
}

PD_KERNEL(kThreads) spread_logits_kernel(pd_spread_logits_args a) {
  for (int64_t i = first_element(); i < *a.num_rows * (int64_t)a.vocab; i += num_threads_in_all()) {
    const int64_t r = i / a.vocab;
    const int32_t place = a.places[i % a.vocab];
    a.dst[i] = place < 0 ? -INFINITY : a.src[r * a.draft_vocab + place];
  }
}

}  // namespace

int enqueue_embed(pd_context &c, const pd_embed_args &a) {
  const Segments in_blocks(a.table, a.segments, a.segments ? a.num_segments : 0, a.vocab, a.dim);
  return of_dtype(a.dtype, [&](auto e) {
    const auto kernel = a.segments ? embed_kernel<decltype(e), true> : embed_kernel<decltype(e), false>;
    return launch(c, "pd_embed", kernel, kThreads, a, in_blocks);
  });
}
int enqueue_add_parts(pd_context &c, const pd_add_parts_args &a) {
  return launch(c, "pd_add_parts", add_parts_kernel, kThreads, a);
}
int enqueue_join_parts(pd_context &c, const pd_join_parts_args &a) {
  return launch(c, "pd_join_parts", join_parts_kernel, kThreads, a);
}
int enqueue_copy_rows(pd_context &c, const pd_copy_rows_args &a) {
  return of_dtype(a.src_dtype, [&](auto s) {
    return of_dtype(a.dst_dtype, [&](auto d) {
      return launch(c, "pd_copy_rows", copy_rows_kernel<decltype(s), decltype(d)>, kThreads, a);
    });
  });
}
int enqueue_spread_logits(pd_context &c, const pd_spread_logits_args &a) {
  return launch(c, "pd_spread_logits", spread_logits_kernel, kThreads, a);
}
int enqueue_soft_cap(pd_context &c, const pd_soft_cap_args &a) {
  return launch(c, "pd_soft_cap", soft_cap_kernel, kThreads, a);
}

}  // namespace pagedec
