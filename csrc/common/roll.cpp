// Chains of tokens, each token drawn from what the one before it gave: forward, read-out, draw, and round again,
// without the caller. Computed is what single calls of the same kernels would: the rows of a round are one step.
#include <algorithm>
#include <iterator>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "common/check.h"

namespace pagedec {
namespace {

template <class T>
HostArray array(const T *from, size_t size, const T *&place) {
  return {from, (int64_t)(size * sizeof(T)), (const void **)&place};
}
template <class T>
HostArray array(const std::vector<T> &from, const T *&place) {
  return array(from.data(), from.size(), place);
}

// The rows of one round, as a forward's arrays.
struct Round {
  std::vector<int32_t> chains, token_ids, positions, slots, read_rows, indptr, kv_len, table;  // of the rows
  std::vector<int32_t> rows, places, prompt_lengths, query_rows;           // of those with rules
  std::vector<pd_draw> draws;
  std::vector<float> logits;  // looked at for NaN, where that is not where they are
  std::vector<int32_t> drawn, targets;       // and where they go to
  std::vector<int32_t> src_rows, dst_rows;   // of those that are kept
};

class Roller {
 public:
  Roller(pd_context *context, const pd_roll_args &a) : context_(context), a_(a) {
    int32_t slot = 0;
    for (int32_t c = 0; c < a.num_chains; c++) {
      first_.push_back(slot + c), first_slot_.push_back(slot);
      slot += a.chains[c].count - 1;
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
    for (auto *own : {&r.chains, &r.token_ids, &r.positions, &r.slots, &r.kv_len, &r.table}) own->clear();
    r.indptr.assign(1, 0);
    for (int32_t c = 0; c < a_.num_chains; c++) {
      if (a_.chains[c].count <= i) continue;
      const int32_t position = a_.draws[c].position + i - 1 - a_.lag;
      r.token_ids.push_back(a_.tokens[a_.indptr[first_[c] + i - 1]]);
      r.positions.push_back(position);
      r.slots.push_back(a_.chain_slots[first_slot_[c] + i - 1]);
      const int32_t *table = a_.block_table + a_.chains[c].branch * (int64_t)a_.table_stride;
      r.chains.push_back(c), r.kv_len.push_back(position + 1), r.indptr.push_back((int32_t)r.chains.size());
      r.table.insert(r.table.end(), table, table + a_.table_stride);
    }
    const int32_t n = (int32_t)r.chains.size();
    if (write(a_.num_rows, &n, 1) || write(a_.token_ids, r.token_ids.data(), n) ||
        write(a_.positions, r.positions.data(), n) || write(a_.slots, r.slots.data(), n) ||
        (a_.chain_ids && write(a_.chain_ids, r.chains.data(), n)))
      return -1;
    const pd_attn_batch batch{n,       n,         r.indptr.data(), r.kv_len.data(), r.table.data(),
                              nullptr, a_.table_stride, 1,         nullptr};
    for (int32_t k = 0; k < a_.num_kinds; k++)
      if (pd_attn_plan(context_, a_.kinds[k].plan, a_.kinds[k].shape, &batch)) return -1;
    return 0;
  }

  int write(int32_t *to, const int32_t *from, int64_t size) {
    return pd_memory_write(context_, to, from, size * (int64_t)sizeof(int32_t));
  }

  int forward(int32_t i) {
    const int32_t n = (int32_t)round_.chains.size();
    const bool is_one = n <= a_.room;
    if (!is_one && pd_run_program(context_, a_.body)) return -1;
    for (int32_t start = 0; start < n; start += a_.room) {
      const int32_t m = std::min(a_.room, n - start);
      round_.read_rows.resize(m);
      std::iota(round_.read_rows.begin(), round_.read_rows.end(), start);
      if (write(a_.num_read, &m, 1) || write(a_.read_rows, round_.read_rows.data(), m)) return -1;
      if (pd_run_program(context_, is_one ? a_.whole : a_.head)) return -1;
      if (read(i, start, m)) return -1;
    }
    return 0;
  }

  int read(int32_t i, int32_t start, int32_t m) {
    Round &r = round_;
    if (a_.refuse_nan && refuse_nan(m)) return -1;
    if (restrict_to_drawn(m) || process(start, m)) return -1;
    r.draws.clear(), r.targets.clear();
    for (int32_t row = 0; row < m; row++) {
      const int32_t c = r.chains[start + row], place = first_[c] + i;
      pd_draw draw = a_.draws[c];
      draw.row = row, draw.position += i;
      for (draw.rank = 0; draw.rank < a_.indptr[place + 1] - a_.indptr[place]; draw.rank++)
        r.draws.push_back(draw), r.targets.push_back(a_.indptr[place] + draw.rank);
    }
    if (keep(i, start, m)) return -1;
    const int32_t n = (int32_t)r.draws.size();
    r.drawn.resize(n);
    pd_sample_args sample{nullptr, nullptr, a_.logits, nullptr, a_.vocab, 0};
    const HostArray given[] = {array(&n, 1, sample.num_draws), array(r.draws, sample.draws)};
    const int64_t num_bytes = n * (int64_t)sizeof(int32_t);
    sample.token_ids = (int32_t *)place_of_answer(context_, r.drawn.data(), num_bytes);
    if (!sample.token_ids || carry(context_, given, 2) || pd_sample(context_, &sample) ||
        bring(context_, r.drawn.data(), sample.token_ids, num_bytes))
      return -1;
    for (int32_t d = 0; d < n; d++) a_.tokens[r.targets[d]] = r.drawn[d];
    return 0;
  }

  int refuse_nan(int32_t m) {
    const size_t size = m * (size_t)a_.vocab;
    const float *logits = a_.logits;
    if (pd_has_memory(context_)) {
      round_.logits.resize(size);
      if (pd_memory_read(context_, round_.logits.data(), logits, (int64_t)(size * sizeof(float)))) return -1;
      logits = round_.logits.data();
    }
    if (std::none_of(logits, logits + size, [](float x) { return x != x; })) return 0;
    return fail("pd_roll: logits are NaN: a row read a slot that no row had written");
  }

  int restrict_to_drawn(int32_t m) {
    if (a_.num_drawn == a_.vocab) return 0;
    pd_restrict_logits_args restrict{};
    const HostArray given[] = {array(&m, 1, restrict.num_rows)};
    if (carry(context_, given, 1)) return -1;
    restrict.logits = a_.logits, restrict.vocab = a_.vocab, restrict.num_drawn = a_.num_drawn;
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
    pd_copy_rows_args copy{};
    copy.src = a_.logits, copy.dst = a_.kept, copy.scale = 1.0f;
    copy.width = a_.vocab, copy.src_stride = copy.dst_stride = a_.vocab, copy.src_dtype = copy.dst_dtype = PD_F32;
    const HostArray given[] = {array(&count, 1, copy.num_rows), array(r.src_rows, copy.src_rows),
                               array(r.dst_rows, copy.dst_rows)};
    if (carry(context_, given, 3)) return -1;
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
    const HostArray given[] = {array(&count, 1, p.num_rows),
                               array(r.rows, p.rows),
                               array(r.places, p.rule_ids),
                               array(a_.rules, a_.num_rules, p.rules),
                               array(r.prompt_lengths, p.prompt_lengths),
                               array(r.query_rows, p.query_rows),
                               array(r.indptr, p.row_indptr),
                               array(r.kv_len, p.kv_len),
                               array(r.table, p.block_table)};
    if (carry(context_, given, (int)std::size(given))) return -1;
    p.logits = a_.logits, p.token_plane = a_.token_plane, p.branches = p.query_rows;  // a row a branch
    p.num_rules = a_.num_rules, p.num_branches = (int32_t)r.chains.size();
    p.table_stride = a_.table_stride, p.block_size = a_.block_size, p.vocab = a_.vocab;
    return pd_process_logits(context_, &p);
  }

  pd_context *context_;
  const pd_roll_args &a_;
  int32_t longest_ = 0;
  std::vector<int32_t> first_, first_slot_;  // of each chain: its first place, its first slot
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
  const int32_t least = std::max(1, a.lag);
  if (a.draws[c].position >= least) return 0;
  return fail("%s: draws[%d].position is %d; it must be %d or more", name, c, a.draws[c].position, least);
}

int check_roll(const pd_roll_args &a) {
  const char *name = "pd_roll";
  const std::pair<const char *, const void *> needed[] = {
      {"whole", a.whole}, {"body", a.body}, {"head", a.head}, {"kinds", a.kinds}, {"num_rows", a.num_rows},
      {"token_ids", a.token_ids}, {"positions", a.positions}, {"slots", a.slots}, {"num_read", a.num_read},
      {"read_rows", a.read_rows}, {"logits", a.logits}, {"chains", a.chains}, {"draws", a.draws},
      {"block_table", a.block_table}, {"token_plane", a.token_plane}, {"indptr", a.indptr}, {"tokens", a.tokens}};
  for (const auto &[field, pointer] : needed)
    if (check_pointer(name, field, pointer)) return -1;
  if (check_range(name, "num_chains", a.num_chains, 0, a.max_rows) || check_range(name, "room", a.room, 1, INT32_MAX) ||
      check_range(name, "vocab", a.vocab, 1, INT32_MAX) || check_range(name, "num_drawn", a.num_drawn, 1, a.vocab) ||
      check_range(name, "block_size", a.block_size, 1, 65536) || check_range(name, "lag", a.lag, 0, INT32_MAX) ||
      check_optional(name, "chain_ids", a.chain_ids))
    return -1;
  if (a.indptr[0]) return fail("%s: indptr[0] is %d; it must be 0", name, a.indptr[0]);
  int32_t place = 1;
  for (int32_t c = 0; c < a.num_chains; c++) {
    if (check_chain(a, c)) return -1;
    for (const int32_t stop = place + a.chains[c].count; place < stop; place++)
      if (a.indptr[place] <= a.indptr[place - 1] || a.indptr[place] - 1 - PD_MAX_RANK > a.indptr[place - 1])
        return fail("%s: indptr[%d] is %d behind %d; it must be 1 to %d more", name, place, a.indptr[place],
                    a.indptr[place - 1], 1 + PD_MAX_RANK);
  }
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
