// The plan's C interface and its flat form.
#include <cstring>
#include <new>

#include "common/internal.h"
#include "plan/plan.h"

namespace pagedec {
namespace {

template <class T>
plan::Section append(std::vector<int32_t> &words, const std::vector<T> &records) {
  static_assert(sizeof(T) % 4 == 0);
  const plan::Section s{(int32_t)words.size(), (int32_t)records.size()};
  words.resize(words.size() + records.size() * (sizeof(T) / 4));
  if (!records.empty()) memcpy(words.data() + s.offset, records.data(), records.size() * sizeof(T));
  return s;
}

void flatten(pd_plan &p, const pd_attn_batch &b, plan::Header &h) {
  const pd_attn_shape &s = p.shape;
  h.magic = PLAN_MAGIC, h.version = PLAN_VERSION;
  h.q_heads = s.q_heads, h.head_dim = s.head_dim, h.block_size = s.block_size, h.dtype = s.dtype, h.window = s.window;
  memcpy(&h.scale_bits, &s.scale, 4);
  memcpy(&h.soft_cap_bits, &s.soft_cap, 4);
  h.num_branches = b.num_branches, h.num_rows = b.num_rows, h.num_workers = (int32_t)p.worker_indptr.size() - 1;
  p.words.assign(sizeof(plan::Header) / 4, 0);
  h.rows = append(p.words, p.rows), h.pieces = append(p.words, p.pieces), h.units = append(p.words, p.units);
  h.items = append(p.words, p.items), h.spans = append(p.words, p.spans), h.worker_indptr = append(p.words, p.worker_indptr);
  h.splits = append(p.words, p.splits), h.paths = append(p.words, p.paths);
  h.num_words = (int32_t)p.words.size();
  memcpy(p.words.data(), &h, sizeof h);
}

int make(pd_plan &p, const pd_attn_shape &s, const pd_attn_batch &b) {
  p.ready = false;
  if (check_shape(s) || check_batch(s, b)) return -1;
  p.shape = s;
  plan::Header h{};
  h.kv_heads = s.kv_heads;
  if (build_plan(p, h, b, num_threads())) return -1;
  flatten(p, b, h);
  p.state_bytes = attention_state_bytes(s);
  const size_t partial = (size_t)s.q_heads * (s.head_dim + 2);
  if (!p.states.reserve(p.state_bytes * h.num_workers) || (h.num_split_partials && !p.partials.reserve(partial * h.num_split_partials)))
    return fail("pd_attn_plan: out of memory for %d workers and %d partial results", h.num_workers, h.num_split_partials);
  p.ready = true;
  return 0;
}

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" {
pd_plan *pd_plan_new(void) {
  pd_plan *p = new (std::nothrow) pd_plan;
  if (!p) fail("pd_plan_new: out of memory");
  return p;
}
void pd_plan_free(pd_plan *p) { delete p; }

int pd_attn_plan(pd_plan *p, const pd_attn_shape *s, const pd_attn_batch *b) {
  if (!p) return fail("pd_attn_plan: plan is NULL");
  if (!s) return fail("pd_attn_plan: shape is NULL");
  if (!b) return fail("pd_attn_plan: batch is NULL");
  try {
    return make(*p, *s, *b);
  } catch (const std::bad_alloc &) {
    p->ready = false;
    return fail("pd_attn_plan: out of memory for a plan of %d rows", b->num_rows);
  }
}

int pd_plan_view(const pd_plan *p, const int32_t **words, int64_t *num_words) {
  if (!p) return fail("pd_plan_view: plan is NULL");
  if (!words) return fail("pd_plan_view: words is NULL");
  if (!num_words) return fail("pd_plan_view: num_words is NULL");
  if (!p->ready) return fail("pd_plan_view: the plan holds nothing; pd_attn_plan must succeed first");
  *words = p->words.data();
  *num_words = (int64_t)p->words.size();
  return 0;
}
}
