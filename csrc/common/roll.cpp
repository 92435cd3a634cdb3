// Chains of tokens, each token drawn from what the one before it gave: forward, read-out, draw, and round again,
// without the caller. Computed is what single calls of the same kernels would: the rows of a round are one step.
#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "common/check.h"

namespace pagedec {
namespace {

// The rows of one round, as a forward's arrays.
struct Round {
  std::vector<int32_t> chains, indptr, kv_len, table;  // of the rows
  std::vector<int32_t> rows, places, prompt_lengths, query_rows;           // of those with rules
  std::vector<pd_draw> draws;
  std::vector<int32_t> drawn, src_rows, dst_rows;  // the last two: of those that are kept
};

class Roller {
 public:
  Roller(pd_context *context, const pd_roll_args &a) : context_(context), a_(a) {
    int32_t first = 0, slot = 0;
    for (int32_t c = 0; c < a.num_chains; c++) {
      first_.push_back(first), first_slot_.push_back(slot);
      first += a.chains[c].count, slot += a.chains[c].count - 1;
      longest_ = std::max(longest_, a.chains[c].count);
    }
  }

  int carry_on() {
    for (int32_t i = 1; i < longest_; i++)
      if (begin(i) || forward(i)) return -1;
    return 0;
  }

 private:
  // A row for each chain that has an i-th token: the one before it, in the slot reserved for it.
  int begin(int32_t i) {
    Round &r = round_;
    r.chains.clear(), r.kv_len.clear(), r.table.clear(), r.indptr.assign(1, 0);
    for (int32_t c = 0; c < a_.num_chains; c++) {
      if (a_.chains[c].count <= i) continue;
      const int32_t row = (int32_t)r.chains.size(), position = a_.draws[c].position + i - 1;
      a_.token_ids[row] = a_.tokens[first_[c] + i - 1];
      a_.positions[row] = position;
      a_.slots[row] = a_.chain_slots[first_slot_[c] + i - 1];
      const int32_t *table = a_.block_table + a_.chains[c].branch * (int64_t)a_.table_stride;
      r.chains.push_back(c), r.kv_len.push_back(position + 1), r.indptr.push_back(row + 1);
      r.table.insert(r.table.end(), table, table + a_.table_stride);
    }
    const int32_t n = (int32_t)r.chains.size();
    *a_.num_rows = n;
    const pd_attn_batch batch{n, n, r.indptr.data(), r.kv_len.data(), r.table.data(), nullptr, a_.table_stride, 1};
    for (int32_t k = 0; k < a_.num_kinds; k++)
      if (pd_attn_plan(context_, a_.kinds[k].plan, a_.kinds[k].shape, &batch)) return -1;
    return 0;
  }

  int forward(int32_t i) {
    const int32_t n = *a_.num_rows;
    const bool is_one = n <= a_.room;
    if (!is_one && pd_run(context_, a_.body, a_.num_body)) return -1;
    for (int32_t start = 0; start < n; start += a_.room) {
      const int32_t m = std::min(a_.room, n - start);
      *a_.num_read = m;
      for (int32_t row = 0; row < m; row++) a_.read_rows[row] = start + row;
      if (is_one ? pd_run(context_, a_.whole, a_.num_whole) : pd_run(context_, a_.head, a_.num_head)) return -1;
      if (read(i, start, m)) return -1;
    }
    return 0;
  }

  int read(int32_t i, int32_t start, int32_t m) {
    Round &r = round_;
    const float *logits = a_.logits, *end = logits + m * (int64_t)a_.vocab;
    if (a_.refuse_nan && std::any_of(logits, end, [](float x) { return x != x; }))
      return fail("pd_roll: logits are NaN: a row read a slot that no row had written");
    if (restrict_to_drawn(m) || process(start, m)) return -1;
    r.draws.clear(), r.drawn.resize(m);
    for (int32_t row = 0; row < m; row++) {
      pd_draw draw = a_.draws[r.chains[start + row]];
      draw.row = row, draw.position += i;
      r.draws.push_back(draw);
    }
    if (keep(i, start, m)) return -1;
    const pd_sample_args sample{&m, r.draws.data(), a_.logits, r.drawn.data(), a_.vocab, 0};
    if (pd_sample(context_, &sample)) return -1;
    for (int32_t row = 0; row < m; row++) a_.tokens[first_[r.chains[start + row]] + i] = r.drawn[row];
    return 0;
  }

  int restrict_to_drawn(int32_t m) {
    if (a_.num_drawn == a_.vocab) return 0;
    pd_restrict_logits_args restrict{};
    restrict.num_rows = &m, restrict.logits = a_.logits, restrict.vocab = a_.vocab, restrict.num_drawn = a_.num_drawn;
    return pd_restrict_logits(context_, &restrict);
  }

  // What the i-th tokens are drawn from, of chains that have rows for it.
  int keep(int32_t i, int32_t start, int32_t m) {
    Round &r = round_;
    r.src_rows.clear(), r.dst_rows.clear();
    for (int32_t row = 0; row < m; row++) {
      const int32_t kept_row = a_.chains[r.chains[start + row]].kept_row;
      if (kept_row >= 0) r.src_rows.push_back(row), r.dst_rows.push_back(kept_row + i);
    }
    const int32_t count = (int32_t)r.src_rows.size();
    if (count == 0) return 0;
    const pd_copy_rows_args copy{&count, a_.logits, a_.kept, r.src_rows.data(), r.dst_rows.data(), a_.vocab, 0};
    return pd_copy_rows(context_, &copy);
  }

  // The rules of those rows whose request has some.
  int process(int32_t start, int32_t m) {
    Round &r = round_;
    r.rows.clear(), r.places.clear(), r.prompt_lengths.clear(), r.query_rows.clear();
    for (int32_t row = 0; row < m; row++) {
      const pd_chain &chain = a_.chains[r.chains[start + row]];
      if (chain.rules < 0) continue;
      r.rows.push_back(row), r.places.push_back(chain.rules), r.prompt_lengths.push_back(chain.prompt_length);
      r.query_rows.push_back(start + row);
    }
    const int32_t count = (int32_t)r.rows.size();
    if (count == 0) return 0;
    pd_process_logits_args p{};
    p.num_rows = &count, p.logits = a_.logits, p.rows = r.rows.data(), p.rule_ids = r.places.data(), p.rules = a_.rules;
    p.prompt_lengths = r.prompt_lengths.data(), p.branches = p.query_rows = r.query_rows.data();  // a row a branch
    p.row_indptr = r.indptr.data(), p.kv_len = r.kv_len.data(), p.block_table = r.table.data();
    p.token_plane = a_.token_plane, p.num_rules = a_.num_rules, p.num_branches = (int32_t)r.chains.size();
    p.table_stride = a_.table_stride, p.block_size = a_.block_size, p.vocab = a_.vocab;
    return pd_process_logits(context_, &p);
  }

  pd_context *context_;
  const pd_roll_args &a_;
  int32_t longest_ = 0;
  std::vector<int32_t> first_, first_slot_;  // of each chain: its first token, its first slot
  Round round_;
};

int check_chain(const pd_roll_args &a, int32_t c) {
  const char *name = "pd_roll";
  const pd_chain &chain = a.chains[c];
  auto bad = [&](const char *field, int32_t value, const char *limit) {
    return fail("%s: chains[%d].%s is %d; it must be %s", name, c, field, value, limit);
  };
  if (chain.count < 1) return bad("count", chain.count, "1 or more");
  if (chain.branch < 0) return bad("branch", chain.branch, "0 or more");
  if (chain.rules >= a.num_rules) return bad("rules", chain.rules, "below num_rules");
  if (chain.kept_row >= 0 && !a.kept) return bad("kept_row", chain.kept_row, "-1 where kept is NULL");
  if (a.draws[c].position < 1) return fail("%s: draws[%d].position is %d; it must be 1 or more", name, c,
                                           a.draws[c].position);
  return 0;
}

int check_roll(const pd_roll_args &a) {
  const char *name = "pd_roll";
  const std::pair<const char *, const void *> needed[] = {
      {"whole", a.whole}, {"body", a.body}, {"head", a.head}, {"kinds", a.kinds}, {"num_rows", a.num_rows},
      {"token_ids", a.token_ids}, {"positions", a.positions}, {"slots", a.slots}, {"num_read", a.num_read},
      {"read_rows", a.read_rows}, {"logits", a.logits}, {"chains", a.chains}, {"draws", a.draws},
      {"block_table", a.block_table}, {"token_plane", a.token_plane}, {"tokens", a.tokens}};
  for (const auto &[field, pointer] : needed)
    if (check_pointer(name, field, pointer)) return -1;
  if (check_range(name, "num_chains", a.num_chains, 0, a.max_rows) || check_range(name, "room", a.room, 1, INT32_MAX) ||
      check_range(name, "vocab", a.vocab, 1, INT32_MAX) || check_range(name, "num_drawn", a.num_drawn, 1, a.vocab) ||
      check_range(name, "block_size", a.block_size, 1, 65536))
    return -1;
  for (int32_t c = 0; c < a.num_chains; c++)
    if (check_chain(a, c)) return -1;
  return 0;
}

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" int pd_roll(pd_context *context, const pd_roll_args *a) {
  if (!context) return fail("pd_roll: context is NULL");
  if (!a) return fail("pd_roll: args is NULL");
  if (check_roll(*a)) return -1;
  try {
    return Roller(context, *a).carry_on();
  } catch (const std::bad_alloc &) {
    return fail("pd_roll: no memory for %d chains", a->num_chains);
  }
}
