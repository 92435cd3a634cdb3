// Rows of the embedding table (and of the position table) into the residual stream, token ids into the cache's token
// plane.
#include <cmath>
#include <limits>

#include "common/check.h"
#include "cpu/blocks.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

// A row of a table in blocks: what a table of these values in E would have.
template <class E>
void read_row(const Segments &table, int64_t place, const pd_embed_args &a, float *out) {
  read_blocks(table, place, a.dim, out);
  for (int64_t i = 0; i < a.dim; i++) {
    E value;
    from_float(out[i], &value);
    out[i] = to_float(value) * a.scale;
  }
}

template <class E>
void embed_rows(const pd_embed_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  const Segments blocks(a.table, a.segments, a.segments ? a.num_segments : 0, a.vocab, a.dim);
  const F16 scale = set16(a.scale), nan = set16(std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const int32_t token = a.token_ids[r];
    float *out = a.out + r * a.dim;
    if (a.slots && a.slots[r] >= 0) a.token_plane[a.slots[r]] = token;
    // An id outside the table may come from an earlier kernel of the list, too late for an error: NaN cannot be
    // overlooked.
    const int32_t position = a.position_table ? a.positions[r] : 0;
    const int32_t num_ids = a.num_ids ? a.num_ids : a.vocab, place = token - a.first_id;
    const bool known =
        token >= 0 && token < num_ids && position >= 0 && (position < a.num_positions || !a.position_table);
    const bool own = known && place >= 0 && place < a.vocab;
    const E *row = (const E *)a.table + (own ? place : 0) * (int64_t)a.dim;
    const F16 other = known ? set16(0.0f) : nan;  // another rank's
    if (own && a.segments) read_row<E>(blocks, place, a, out);
    for (int64_t i = 0; i < a.dim && !(own && a.segments); i += 16)
      store_some(out + i, own ? load_some(row + i, a.dim - i) * scale : other, a.dim - i);
    if (!a.position_table || !known) continue;
    const E *offset = (const E *)a.position_table + position * (int64_t)a.dim;
    for (int64_t i = 0; i < a.dim; i += 16)
      store_some(out + i, load_some(out + i, a.dim - i) + load_some(offset + i, a.dim - i), a.dim - i);
  }
}

}  // namespace

void embed_part(const pd_embed_args &a, int thread, int num_threads) {
  a.dtype == PD_BF16 ? embed_rows<bf16>(a, thread, num_threads) : embed_rows<float>(a, thread, num_threads);
}

}  // namespace pagedec
