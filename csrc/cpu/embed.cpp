// Rows of the embedding table (and of the position table) into the residual stream, token ids into the cache's token
// plane.
#include <cmath>
#include <limits>

#include "cpu/check_small.h"
#include "cpu/vec_small.h"

namespace pagedec {
namespace {

template <class E>
void embed_rows(const pd_embed_args &a, int thread, int num_threads) {
  const Range rows = share(*a.num_rows, thread, num_threads);
  const F16 scale = set16(a.scale), nan = set16(std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const int32_t token = a.token_ids[r];
    float *out = a.out + r * a.dim;
    if (a.slots && a.slots[r] >= 0) a.token_plane[a.slots[r]] = token;
    // An id outside the table may come from an earlier kernel of the list, too late for an error: NaN cannot be
    // overlooked.
    const int32_t position = a.position_table ? a.positions[r] : 0;
    const bool known =
        token >= 0 && token < a.vocab && position >= 0 && (position < a.num_positions || !a.position_table);
    const E *row = (const E *)a.table + (known ? token : 0) * (int64_t)a.dim;
    for (int64_t i = 0; i < a.dim; i += 16)
      store_some(out + i, known ? load_some(row + i, a.dim - i) * scale : nan, a.dim - i);
    if (!a.position_table || !known) continue;
    const E *offset = (const E *)a.position_table + position * (int64_t)a.dim;
    for (int64_t i = 0; i < a.dim; i += 16)
      store_some(out + i, load_some(out + i, a.dim - i) + load_some(offset + i, a.dim - i), a.dim - i);
  }
}

}  // namespace

int check_embed(const pd_embed_args &a) {
  const char *name = "pd_embed";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "token_ids", a.token_ids, a.num_rows) ||
      check_pointer(name, "table", a.table) || check_array(name, "out", a.out, a.num_rows) ||
      check_dtype(name, a.dtype) || check_range(name, "dim", a.dim, 1, INT32_MAX) ||
      check_range(name, "vocab", a.vocab, 1, INT32_MAX))
    return -1;
  if ((a.slots == nullptr) != (a.token_plane == nullptr))
    return fail("pd_embed: %s is NULL; slots and token_plane must be given together",
                a.slots ? "token_plane" : "slots");
  if (a.position_table && (check_array("pd_embed", "positions", a.positions, a.num_rows) ||
                           check_range("pd_embed", "num_positions", a.num_positions, 1, INT32_MAX)))
    return -1;
  if (a.positions && !a.position_table)
    return fail("pd_embed: position_table is NULL; positions and position_table must be given together");
  if (!std::isfinite(a.scale)) return fail("pd_embed: scale is %g; it must be finite", (double)a.scale);
  return 0;
}

void embed_part(const pd_embed_args &a, int thread, int num_threads) {
  a.dtype == PD_BF16 ? embed_rows<bf16>(a, thread, num_threads) : embed_rows<float>(a, thread, num_threads);
}

}  // namespace pagedec
