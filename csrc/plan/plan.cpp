// A plan's flat form.
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

plan::Header describe(const pd_attn_shape &s, const pd_attn_batch &b) {
  plan::Header h{};
  h.magic = PLAN_MAGIC, h.version = PLAN_VERSION;
  h.q_heads = s.q_heads, h.kv_heads = s.kv_heads, h.head_dim = s.head_dim, h.block_size = s.block_size,
  h.dtype = s.dtype, h.kv_kind = s.kv_kind, h.window = s.window;
  memcpy(&h.scale_bits, &s.scale, 4);
  memcpy(&h.soft_cap_bits, &s.soft_cap, 4);
  h.num_branches = b.num_branches, h.num_rows = b.num_rows;
  return h;
}

void flatten(const PlanDraft &p, plan::Header &h, std::vector<int32_t> &words) {
  words.assign(sizeof(plan::Header) / 4, 0);
  h.rows = append(words, p.rows), h.pieces = append(words, p.pieces), h.units = append(words, p.units);
  h.items = append(words, p.items), h.spans = append(words, p.spans), h.worker_indptr = append(words, p.worker_indptr);
  h.splits = append(words, p.splits), h.paths = append(words, p.paths);
  h.num_words = (int32_t)words.size(), h.num_workers = h.worker_indptr.count - 1;
  memcpy(words.data(), &h, sizeof h);
}

}  // namespace

int make_plan(PlanDraft &draft, std::vector<int32_t> &words, const pd_attn_shape *s, const pd_attn_batch *b,
              Workers workers) {
  words.clear();
  if (!s) return fail("pd_attn_plan: shape is NULL");
  if (!b) return fail("pd_attn_plan: batch is NULL");
  if (check_shape(*s) || check_batch(*s, *b)) return -1;
  try {
    plan::Header h = describe(*s, *b);
    if (build_plan(draft, h, *s, *b, workers)) return -1;
    flatten(draft, h, words);
    return 0;
  } catch (const std::bad_alloc &) {
    words.clear();
    return fail("pd_attn_plan: out of memory for a plan of %d rows", b->num_rows);
  }
}

}  // namespace pagedec

extern "C" int pd_plan_view(const pd_plan *p, const int32_t **words, int64_t *num_words) {
  using pagedec::fail;
  if (!p) return fail("pd_plan_view: plan is NULL");
  if (!words) return fail("pd_plan_view: words is NULL");
  if (!num_words) return fail("pd_plan_view: num_words is NULL");
  if (p->words.empty()) return fail("pd_plan_view: the plan holds nothing; pd_attn_plan must succeed first");
  *words = p->words.data();
  *num_words = (int64_t)p->words.size();
  return 0;
}
