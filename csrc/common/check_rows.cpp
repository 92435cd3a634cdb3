// What can be wrong with the records of kernels that go through rows of the residual stream, or of logits.
#include <cmath>

#include "common/check.h"

namespace pagedec {
namespace {

template <class Args>
int check_norm(const char *name, const Args &a) {
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "x", a.x, a.num_rows) ||
      check_array(name, "out", a.out, a.num_rows) || check_optional(name, "row_ids", a.row_ids) ||
      check_dtype(name, a.dtype) ||
      check_range(name, "dim", a.dim, 1, INT32_MAX))
    return -1;
  if (!(a.eps >= 0.0f) || !std::isfinite(a.eps))
    return fail("%s: eps is %g; it must be 0 or more", name, (double)a.eps);
  return 0;
}

template <class A>
int check_parts(const char *name, const A &a) {
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "parts", a.parts, a.num_rows) ||
      check_array(name, "out", a.out, a.num_rows) || check_range(name, "dim", a.dim, 1, INT32_MAX) ||
      check_range(name, "num_parts", a.num_parts, 1, INT32_MAX))
    return -1;
  return check_range(name, "part_stride", a.part_stride, 0, INT64_MAX);
}

}  // namespace

int check_rms_norm(const pd_rms_norm_args &a) {
  const char *name = "pd_rms_norm";
  if (check_norm(name, a)) return -1;
  if (check_range(name, "add", a.add, 0, 1)) return -1;
  if (a.add ? check_pointer(name, "weight", a.weight) : check_optional(name, "weight", a.weight)) return -1;
  if (a.add && a.dtype != PD_F32) return fail("%s: dtype is %d; with add it must be %d (fp32)", name, a.dtype, PD_F32);
  return 0;
}

int check_layer_norm(const pd_layer_norm_args &a) {
  const char *name = "pd_layer_norm";
  return check_norm(name, a) || check_pointer(name, "weight", a.weight) ? -1 : check_optional(name, "bias", a.bias);
}

int check_embed(const pd_embed_args &a) {
  const char *name = "pd_embed";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "token_ids", a.token_ids, a.num_rows) ||
      check_pointer(name, "table", a.table) || check_array(name, "out", a.out, a.num_rows) ||
      check_dtype(name, a.dtype) || check_range(name, "dim", a.dim, 1, INT32_MAX) ||
      check_range(name, "vocab", a.vocab, 1, INT32_MAX))
    return -1;
  if (a.num_ids ? a.first_id < 0 || a.first_id > a.num_ids - a.vocab : a.first_id != 0)
    return fail("pd_embed: first_id is %d; it must be 0 to num_ids - vocab, which is %d", a.first_id,
                a.num_ids ? a.num_ids - a.vocab : 0);
  if ((a.slots == nullptr) != (a.token_plane == nullptr))
    return fail("pd_embed: %s is NULL; slots and token_plane must be given together",
                a.slots ? "token_plane" : "slots");
  if (a.position_table && (check_array("pd_embed", "positions", a.positions, a.num_rows) ||
                           check_range("pd_embed", "num_positions", a.num_positions, 1, INT32_MAX)))
    return -1;
  if (a.positions && !a.position_table)
    return fail("pd_embed: position_table is NULL; positions and position_table must be given together");
  if (check_optional(name, "slots", a.slots) || check_optional(name, "token_plane", a.token_plane) ||
      check_optional(name, "position_table", a.position_table))
    return -1;
  if (a.segments && check_segments(name, a.segments, a.num_segments, a.vocab, a.dim)) return -1;
  if (!std::isfinite(a.scale)) return fail("pd_embed: scale is %g; it must be finite", (double)a.scale);
  return 0;
}

int check_soft_cap(const pd_soft_cap_args &a) {
  const char *name = "pd_soft_cap";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "x", a.x, a.num_rows) ||
      check_range(name, "n", a.n, 1, INT32_MAX))
    return -1;
  if (!(a.cap > 0.0f) || !std::isfinite(a.cap))
    return fail("%s: cap is %g; it must be above 0 and finite", name, (double)a.cap);
  return 0;
}

int check_add_parts(const pd_add_parts_args &a) { return check_parts("pd_add_parts", a); }

int check_join_parts(const pd_join_parts_args &a) {
  const char *name = "pd_join_parts";
  if (check_parts(name, a) || check_pointer(name, "widths", a.widths)) return -1;
  if (!kReadsRecords) return 0;
  int64_t sum = 0;
  for (int32_t p = 0; p < a.num_parts; p++) {
    if (check_range(name, "widths[]", a.widths[p], 0, a.dim)) return -1;
    sum += a.widths[p];
  }
  if (sum == a.dim) return 0;
  return fail("%s: widths add up to %lld; they must to dim, which is %d", name, (long long)sum, a.dim);
}

}  // namespace pagedec
