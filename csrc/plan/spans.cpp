// How workers share a plan: long pieces are cut at chunk boundaries, and the parts are dealt out, longest first; among
// a CPU's threads neighbours to one of them, where that shares the work about as well.
// A static partition: it depends on the plan alone, and no bit of a result depends on it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "plan/plan.h"

namespace pagedec {
namespace {

using namespace plan;

constexpr int UNIT_FLOOR = 12;  // packed rows; below, a unit costs its reading and not its arithmetic
constexpr float SPAN_COST = 2;
// What a span costs a block of a device, in units: its records and queries come one behind another, 4 us on an H100
// where a unit takes 1.7. 16 branches of 1,040 tokens took 48 us, and those of 1,024 took 32, as long as eight workers
// had eight short spans each.
constexpr float SPAN_UNITS = 2.5f;
// Of what rows in several spans leave for the merge, (o, m, l) of each chunk and head: 512 rows behind 131,072 tokens,
// cut for hundreds of workers, had a gigabyte. Where there is so much, there are many pieces for the workers, too.
constexpr int64_t MOST_SPLIT_BYTES = 256 << 20;
// What a span costs a CPU's thread more where another one wrote its rows of q, and K and V of these: some 0.3 of a unit
// of few rows (measured on Zen 4, 2 threads: 16 and 64 branches of 50 tokens take 1.3 and 1.5 times as long).
constexpr float FAR_COST = 4;

class Spans {
 public:
  Spans(PlanDraft &p, Header &h, Workers w)
      : p_(p), h_(h), workers_(w.num), have_caches_(w.have_caches),
        unit_floor_(w.have_caches ? UNIT_FLOOR : w.most_rows),
        span_cost_(w.have_caches ? SPAN_COST : SPAN_UNITS * (float)unit_floor_) {}
  void cut();

 private:
  float item_cost(const Item &item) const {
    const int heads = (h_.group + h_.head_parts - 1) / h_.head_parts;
    float sum = 0;
    for (int u = item.unit0; u < item.unit0 + item.num_units; u++)
      sum += (float)std::max(unit_floor_, (p_.units[u].row1 - p_.units[u].row0) * heads);
    return sum;
  }
  float sum(int item0, int n) const {
    return std::accumulate(costs_.begin() + item0, costs_.begin() + item0 + n, span_cost_);
  }
  // Spans that are cut of a piece at most. On a device half a chunk or less stays with the one before it, where not
  // every chunk finds a worker of its own: a branch of 1,280 tokens alone would take longer than one of 1,300.
  int most_spans(const Piece &piece, int heads) const {
    constexpr int kChunkUnits = CHUNK / TILE;
    if (have_caches_ || (int64_t)p_.items.size() * heads <= workers_) return piece.num_items;
    return std::clamp((piece.num_units + kChunkUnits / 2 - 1) / kChunkUnits, 1, piece.num_items);
  }
  template <class Take>
  void each_split_row(const Piece &piece, int last_chunk, const Take &take) const;
  bool has_room(const Piece &piece, int last_chunk) const;
  void split_rows(const Piece &piece, int last_chunk);
  std::vector<int> longest_first() const;
  std::vector<int> neighbours() const;
  float longest_share(const std::vector<int> &owners) const;
  std::vector<int> owners() const;
  bool shares_whole_pieces(int heads);
  void deal();

  PlanDraft &p_;
  Header &h_;
  const int workers_;
  const bool have_caches_;
  const int unit_floor_;
  const float span_cost_;
  std::vector<float> costs_, span_costs_;  // by item; by span
  std::vector<int> whole_owners_;          // of spans that are pieces; none: these are cut
};

// Rows that see chunks after the first span's last one: their results are put together once all spans are done. Of
// each, the first chunk that has a record, and how many have.
template <class Take>
void Spans::each_split_row(const Piece &piece, int last_chunk, const Take &take) const {
  for (int i = piece.row0; i < piece.row0 + piece.num_rows; i++) {
    const Row &r = p_.rows[i], &end = p_.tails[i] < 0 ? r : p_.rows[p_.tails[i]];
    const int first = std::max(r.begin / CHUNK, last_chunk), last = (end.end - 1) / CHUNK;
    if (last > last_chunk) take(i, first, last - first + 1);
  }
}
bool Spans::has_room(const Piece &piece, int last_chunk) const {
  int64_t records = h_.num_split_partials;
  each_split_row(piece, last_chunk, [&](int, int, int n) { records += n; });
  return records * h_.q_heads * (h_.head_dim + 2) * (int64_t)sizeof(float) <= MOST_SPLIT_BYTES;
}
void Spans::split_rows(const Piece &piece, int last_chunk) {
  each_split_row(piece, last_chunk, [&](int i, int first, int n) {
    const int tail = p_.tails[i];
    for (int row : {i, tail < 0 ? i : tail})
      p_.rows[row].split = h_.num_split_partials, p_.rows[row].merge_chunk = first;
    h_.num_split_partials += n;
    p_.splits.push_back(tail < 0 ? i : tail);
  });
}

// The worker of each span. A device has hundreds of workers, so nothing looks at all of them for each span.
std::vector<int> Spans::longest_first() const {
  const int n = (int)span_costs_.size();
  std::vector<int> by(n), owners(n);
  std::iota(by.begin(), by.end(), 0);
  std::sort(by.begin(), by.end(), [&](int x, int y) {
    return span_costs_[x] != span_costs_[y] ? span_costs_[x] > span_costs_[y] : x < y;
  });
  using Load = std::pair<float, int>;  // of a worker; of equals, the first has the next span
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int w = 0; w < workers_; w++) loads.push({0.f, w});
  for (int i : by) {
    const auto [load, worker] = loads.top();
    loads.pop();
    owners[i] = worker;
    loads.push({load + span_costs_[i], worker});
  }
  return owners;
}

// Each worker has a run of the batch's rows, as the kernels beside attention give each thread one. The spans of a piece
// follow each other.
std::vector<int> Spans::neighbours() const {
  const int n = (int)span_costs_.size();
  const float total = std::accumulate(span_costs_.begin(), span_costs_.end(), 0.f);
  std::vector<int> first(h_.num_rows, n), owners(n);  // by row of the batch, where it is a piece's first
  for (int i = n - 1; i >= 0; i--) first[p_.rows[p_.pieces[p_.spans[i].piece].row0].row_id] = i;
  float before = 0;
  for (int at : first)
    for (int i = at; i < n && p_.spans[i].piece == p_.spans[at].piece; i++) {
      owners[i] = std::min(workers_ - 1, (int)((before + span_costs_[i] / 2) / total * (float)workers_));
      before += span_costs_[i];
    }
  return owners;
}

float Spans::longest_share(const std::vector<int> &owners) const {
  std::vector<float> loads(workers_, 0.f);
  for (size_t i = 0; i < owners.size(); i++) loads[owners[i]] += span_costs_[i];
  return *std::max_element(loads.begin(), loads.end());
}

std::vector<int> Spans::owners() const {
  if (!have_caches_) return longest_first();
  const std::vector<int> near = neighbours();
  const float far = FAR_COST * (float)(near.size() / workers_), longest = longest_share(near);
  // however spans are dealt, the longest share is no shorter than an even one: mostly that is answer enough
  if (longest <= std::accumulate(span_costs_.begin(), span_costs_.end(), 0.f) / (float)workers_ + far) return near;
  const std::vector<int> even = longest_first();
  return longest <= longest_share(even) + far ? near : even;
}

// Whether a device's workers have nearly the same when no piece is cut, or, where some have nothing, cuts would cost
// what they save: then there is nothing to merge.
bool Spans::shares_whole_pieces(int heads) {
  constexpr float NEARLY = 1.05f;
  const int64_t num = (int64_t)p_.pieces.size() * heads;
  if (2 * num < workers_) return false;
  for (const Piece &piece : p_.pieces) span_costs_.insert(span_costs_.end(), heads, sum(piece.item0, piece.num_items));
  whole_owners_ = longest_first();
  const float even = std::accumulate(span_costs_.begin(), span_costs_.end(), 0.f) / (float)workers_;
  if (longest_share(whole_owners_) > (num < workers_ ? even + span_cost_ : NEARLY * even)) whole_owners_.clear();
  span_costs_.clear();
  return !whole_owners_.empty();
}

void Spans::deal() {
  const int n = (int)p_.spans.size();
  const std::vector<int> owners = whole_owners_.empty() ? this->owners() : whole_owners_;
  p_.worker_indptr.assign(workers_ + 1, 0);
  for (int worker : owners) p_.worker_indptr[worker + 1]++;
  std::partial_sum(p_.worker_indptr.begin(), p_.worker_indptr.end(), p_.worker_indptr.begin());
  std::vector<int> next(p_.worker_indptr.begin(), p_.worker_indptr.end() - 1);
  std::vector<Span> dealt(n);
  for (int i = 0; i < n; i++) dealt[next[owners[i]]++] = p_.spans[i];  // in memory order: heads of the same blocks
  p_.spans.swap(dealt);
}

void Spans::cut() {
  const int heads = h_.kv_heads * h_.head_parts;
  p_.spans.clear(), p_.splits.clear();
  float total = 0;
  for (const Item &item : p_.items) {
    costs_.push_back(item_cost(item));
    total += costs_.back();
  }
  const float target =
      (total + span_cost_ * (float)p_.pieces.size()) * (float)heads / (float)(SPANS_A_WORKER * workers_);
  const bool is_whole = !have_caches_ && shares_whole_pieces(heads);
  for (int i = 0; i < (int)p_.pieces.size(); i++) {
    const Piece &piece = p_.pieces[i];
    const int n = piece.num_items, want = (int)std::ceil(sum(piece.item0, n) / target);
    int spans = workers_ == 1 || is_whole ? 1 : std::clamp(want, 1, most_spans(piece, heads));
    int last_chunk = p_.items[piece.item0 + n / spans - 1].chunk;  // of the first
    const bool has_tails = p_.tails[piece.row0] >= 0;
    if (spans > 1 && !p_.is_tail[i] && !has_room(piece, last_chunk))
      spans = 1, last_chunk = p_.items[piece.item0 + n - 1].chunk;
    for (int x = 0; x < spans; x++) {
      const int from = piece.item0 + n * x / spans, to = piece.item0 + n * (x + 1) / spans;
      for (int v = 0; v < heads; v++) {
        p_.spans.push_back({i, v, from, to - from});
        span_costs_.push_back(sum(from, to - from));
      }
    }
    if ((spans > 1 || has_tails) && !p_.is_tail[i]) split_rows(piece, last_chunk);
  }
  deal();
}

}  // namespace

void cut_spans(PlanDraft &p, plan::Header &h, Workers workers) { Spans(p, h, workers).cut(); }

}  // namespace pagedec
