// What a plan's arguments must be. Everything that is read later is checked here, so that building and running need no
// checks.
#include <climits>
#include <cmath>

#include "common/check.h"
#include "plan/plan.h"

namespace pagedec {
namespace {

int check_branch(const pd_attn_shape &s, const pd_attn_batch &b, int branch) {
  const int row0 = b.row_indptr[branch], n = b.row_indptr[branch + 1] - row0, len = b.kv_len[branch];
  if (n < 0)
    return fail("pd_attn_plan: row_indptr[%d] is %d, below row_indptr[%d] = %d", branch + 1, row0 + n, branch, row0);
  if (len < 0) return fail("pd_attn_plan: kv_len[%d] is %d; it must be 0 or more", branch, len);
  if (len < n) return fail("pd_attn_plan: kv_len[%d] is %d; it must be at least the branch's %d rows", branch, len, n);
  if (n && (int64_t)b.table_stride * s.block_size < len)
    return fail("pd_attn_plan: table_stride is %d; kv_len[%d] = %d needs %d blocks of %d", b.table_stride, branch, len,
                (len + s.block_size - 1) / s.block_size, s.block_size);
  if (!b.parents) return 0;
  int chain = 0;
  while (chain < n && b.parents[row0 + chain] < 0) chain++;
  if (n && !chain)
    return fail("pd_attn_plan: parents[%d] is %d; the first row of branch %d must be a chain row (-1)", row0,
                b.parents[row0], branch);
  for (int i = chain; i < n; i++) {
    const int p = b.parents[row0 + i];
    if (p < 0)
      return fail("pd_attn_plan: parents[%d] is %d; no chain row of branch %d may follow its first tree node", row0 + i,
                  p, branch);
    if (p >= i)
      return fail("pd_attn_plan: parents[%d] is %d; a parent stands before its node, which is row %d of branch %d",
                  row0 + i, p, i, branch);
    if (p < chain - 1)
      return fail("pd_attn_plan: parents[%d] is %d; a node's parent is a node or the last chain row, %d, of branch %d",
                  row0 + i, p, chain - 1, branch);
  }
  return 0;
}

}  // namespace

int check_shape(const pd_attn_shape &s) {
  if (s.q_heads < 1) return fail("pd_attn_plan: q_heads is %d; it must be at least 1", s.q_heads);
  if (s.kv_heads < 1) return fail("pd_attn_plan: kv_heads is %d; it must be at least 1", s.kv_heads);
  if (s.q_heads % s.kv_heads)
    return fail("pd_attn_plan: q_heads is %d; it must be a multiple of kv_heads = %d", s.q_heads, s.kv_heads);
  if (s.head_dim < 16 || s.head_dim > MAX_HEAD_DIM || s.head_dim % 16)
    return fail("pd_attn_plan: head_dim is %d; it must be a multiple of 16 from 16 to %d", s.head_dim, MAX_HEAD_DIM);
  if (s.block_size < MIN_BLOCK || s.block_size > MAX_BLOCK || (s.block_size & (s.block_size - 1)))
    return fail("pd_attn_plan: block_size is %d; it must be 8, 16, 32, 64, 128 or 256", s.block_size);
  if (check_dtype("pd_attn_plan", s.dtype)) return -1;
  if (check_kv_kind("pd_attn_plan", s.kv_kind)) return -1;
  if (s.window < 0) return fail("pd_attn_plan: window is %d; it must be 0 or more", s.window);
  if (!(s.scale > 0) || !std::isfinite(s.scale))
    return fail("pd_attn_plan: scale is %g; it must be positive and finite", s.scale);
  if (!(s.soft_cap >= 0) || !std::isfinite(s.soft_cap))
    return fail("pd_attn_plan: soft_cap is %g; it must be finite, 0 or more", s.soft_cap);
  return 0;
}

int check_batch(const pd_attn_shape &s, const pd_attn_batch &b) {
  if (b.num_branches < 0) return fail("pd_attn_plan: num_branches is %d; it must be 0 or more", b.num_branches);
  if (b.num_rows < 0) return fail("pd_attn_plan: num_rows is %d; it must be 0 or more", b.num_rows);
  if ((int64_t)b.num_rows * s.q_heads * s.head_dim > INT_MAX)
    return fail("pd_attn_plan: num_rows is %d; %d rows of %d heads of %d are more than 2^31 - 1 numbers", b.num_rows,
                b.num_rows, s.q_heads, s.head_dim);
  if (b.num_branches == 0)
    return b.num_rows ? fail("pd_attn_plan: num_rows is %d; without branches it must be 0", b.num_rows) : 0;
  if (!b.row_indptr) return fail("pd_attn_plan: row_indptr is NULL");
  if (!b.kv_len) return fail("pd_attn_plan: kv_len is NULL");
  if (!b.block_table) return fail("pd_attn_plan: block_table is NULL");
  if (b.table_stride < 0) return fail("pd_attn_plan: table_stride is %d; it must be 0 or more", b.table_stride);
  if (b.row_indptr[0]) return fail("pd_attn_plan: row_indptr[0] is %d; it must be 0", b.row_indptr[0]);
  for (int i = 0; i < b.num_branches; i++)
    if (b.row_indptr[i + 1] > b.num_rows)
      return fail("pd_attn_plan: row_indptr[%d] is %d; it must not pass num_rows = %d", i + 1, b.row_indptr[i + 1],
                  b.num_rows);
    else if (check_branch(s, b, i))
      return -1;
  if (b.row_indptr[b.num_branches] != b.num_rows)
    return fail("pd_attn_plan: row_indptr[%d] is %d; it must be num_rows = %d", b.num_branches,
                b.row_indptr[b.num_branches], b.num_rows);
  return 0;
}

}  // namespace pagedec
