// How a CPU's threads share a plan: long pieces are cut at chunk boundaries, and the parts are dealt out longest first.
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
constexpr int PIECE_COST = 2;

class Spans {
 public:
  Spans(PlanDraft &p, Header &h, int workers) : p_(p), h_(h), workers_(workers) {}
  void cut();

 private:
  float item_cost(const Item &item) const {
    const int heads = (h_.group + h_.head_parts - 1) / h_.head_parts;
    float sum = 0;
    for (int u = item.unit0; u < item.unit0 + item.num_units; u++)
      sum += (float)std::max(UNIT_FLOOR, (p_.units[u].row1 - p_.units[u].row0) * heads);
    return sum;
  }
  float sum(int item0, int n) const {
    return std::accumulate(costs_.begin() + item0, costs_.begin() + item0 + n, (float)PIECE_COST);
  }
  void split_rows(const Piece &piece, int last_chunk);
  void deal();

  PlanDraft &p_;
  Header &h_;
  const int workers_;
  std::vector<float> costs_, span_costs_;  // by item; by span
};

// Rows that see chunks after the first span's last one: their results are put together once all spans are done.
void Spans::split_rows(const Piece &piece, int last_chunk) {
  for (int i = piece.row0; i < piece.row0 + piece.num_rows; i++) {
    Row &r = p_.rows[i];
    const int first = r.begin / CHUNK, last = (r.end - 1) / CHUNK;
    if (last <= last_chunk) continue;
    r.split = h_.num_split_partials;
    r.merge_chunk = std::max(first, last_chunk);
    h_.num_split_partials += last - first + 1;
    p_.splits.push_back(i);
  }
}

// A device has hundreds of workers, so nothing looks at all of them for each span.
void Spans::deal() {
  const int n = (int)p_.spans.size();
  std::vector<int> by(n), owner(n);
  std::iota(by.begin(), by.end(), 0);
  std::stable_sort(by.begin(), by.end(), [&](int x, int y) { return span_costs_[x] > span_costs_[y]; });
  using Load = std::pair<float, int>;  // of a worker; of equals, the first has the next span
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int w = 0; w < workers_; w++) loads.push({0.f, w});
  p_.worker_indptr.assign(workers_ + 1, 0);
  for (int i : by) {
    const auto [load, worker] = loads.top();
    loads.pop();
    owner[i] = worker;
    p_.worker_indptr[worker + 1]++;
    loads.push({load + span_costs_[i], worker});
  }
  std::partial_sum(p_.worker_indptr.begin(), p_.worker_indptr.end(), p_.worker_indptr.begin());
  std::vector<int> next(p_.worker_indptr.begin(), p_.worker_indptr.end() - 1);
  std::vector<Span> dealt(n);
  for (int i = 0; i < n; i++) dealt[next[owner[i]]++] = p_.spans[i];  // in memory order: heads of the same blocks
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
      (total + (float)(PIECE_COST * p_.pieces.size())) * (float)heads / (float)(SPANS_A_WORKER * workers_);
  for (int i = 0; i < (int)p_.pieces.size(); i++) {
    const Piece &piece = p_.pieces[i];
    const int n = piece.num_items, want = (int)std::ceil(sum(piece.item0, n) / target);
    const int spans = workers_ == 1 ? 1 : std::clamp(want, 1, n);
    for (int x = 0; x < spans; x++) {
      const int from = piece.item0 + n * x / spans, to = piece.item0 + n * (x + 1) / spans;
      for (int v = 0; v < heads; v++) {
        p_.spans.push_back({i, v, from, to - from});
        span_costs_.push_back(sum(from, to - from));
      }
      if (!x && spans > 1) split_rows(piece, p_.items[to - 1].chunk);
    }
  }
  deal();
}

}  // namespace

void cut_spans(PlanDraft &p, plan::Header &h, int workers) { Spans(p, h, workers).cut(); }

}  // namespace pagedec
