// From a batch to rows, pieces, units and items. Cheap enough for every step.
#include <algorithm>
#include <climits>
#include <cstring>

#include "common/internal.h"
#include "plan/plan.h"

namespace pagedec {
namespace {

using namespace plan;

// packed rows; a piece is not made smaller than this to give every worker some
constexpr int ROWS_MIN = 24, DEVICE_ROWS_MIN = 32;

struct Segment {  // one branch's rows in a piece
  int branch, at, num_rows, num_plain;  // rows relative to the piece; those that read the table in order come first
  int begin, end, plain_end;            // positions that any row sees; that any plain row sees
  int shared;                           // whole tiles of physical blocks in common with the segment before
};

class Builder {
 public:
  Builder(PlanDraft &p, Header &h, const pd_attn_shape &s, const pd_attn_batch &b, Workers workers)
      : p_(p), h_(h), s_(s), b_(b), workers_(workers) {}
  int build();

 private:
  int num_rows(int branch) const { return b_.row_indptr[branch + 1] - b_.row_indptr[branch]; }
  int num_blocks(int tokens) const { return (tokens + s_.block_size - 1) / s_.block_size; }
  const int32_t *table(int branch) const { return b_.block_table + (size_t)branch * b_.table_stride; }
  void place_rows(int branch);
  void place_tree(int branch, int chain);
  void order_branches();
  void cut_pieces();
  int deep_step(int i) const;
  int common_chunks(int i, int j) const;
  void add_piece(int i0, int i1, int t0, int t1);
  void add_forked(int i, int j, int common);
  void add_segment(int branch, int t0, int t1, int shared);
  void add_units(int tile, int i, int j);
  void add_unit(int tile, int branch, int row0, int row1, int begin, int end);
  void add_path_unit(int tile, int branch, int row);
  int visible_block(int branch, int i);
  void fill_blocks(Unit &u, int branch, int first, int last);

  PlanDraft &p_;
  Header &h_;
  const pd_attn_shape &s_;
  const pd_attn_batch &b_;
  const Workers workers_;
  std::vector<int> row_ids_, ends_, paths_;     // by batch row, each branch's in packed order; a row's path, -1: none
  std::vector<int> num_plain_, base_;  // by branch; base: position of the first node, INT_MAX if all rows are plain
  std::vector<int> order_, shared_tiles_;       // branches; whole tiles shared with the branch before
  std::vector<int> packed_paths_;               // as p_.rows
  std::vector<Segment> segments_;
  int from_ = 0, until_ = INT_MAX;              // positions that the piece in the making is of
  int bad_branch_ = -1, bad_block_ = 0;
};

// A chain's rows see the table's first slots; so do a tree's first nodes while each is the child of the one before.
void Builder::place_rows(int branch) {
  const int row0 = b_.row_indptr[branch], n = num_rows(branch), before = b_.kv_len[branch] - n;
  int chain = n;
  if (b_.parents)
    for (chain = 0; chain < n && b_.parents[row0 + chain] < 0;) chain++;
  for (int i = 0; i < chain; i++) {
    row_ids_[row0 + i] = row0 + i;
    ends_[row0 + i] = before + i + 1;
  }
  num_plain_[branch] = n;
  base_[branch] = INT_MAX;
  if (chain < n) place_tree(branch, chain);
}

// Depth first, so that in a gathered tile only the new node's slot differs from one row to the next.
void Builder::place_tree(int branch, int chain) {
  const int row0 = b_.row_indptr[branch], nodes = num_rows(branch) - chain, base = b_.kv_len[branch] - nodes,
            size = s_.block_size;
  const int32_t *parents = b_.parents + row0 + chain;
  std::vector<int> first(nodes + 1, -1), next(nodes, -1), depth(nodes, 0),
      stack;  // first[0]: of the last chain row, then by node
  auto up = [&](int k) { return parents[k] - chain; };                             // -1: the last chain row
  for (int k = nodes - 1; k >= 0; k--) {
    next[k] = first[up(k) + 1];
    first[up(k) + 1] = k;
  }
  int plain = 1, at = row0 + chain;
  while (plain < nodes && up(plain) == plain - 1) plain++;
  for (int k = first[0]; k >= 0;) {
    depth[k] = up(k) < 0 ? 0 : depth[up(k)] + 1;
    row_ids_[at] = row0 + chain + k;
    ends_[at] = base + depth[k] + 1;
    if (k >= plain) {
      paths_[at] = (int)p_.paths.size();
      p_.paths.resize(p_.paths.size() + depth[k] + 1);
      for (int v = k, d = depth[k]; d >= 0; d--, v = up(v))
        p_.paths[paths_[at] + d] = visible_block(branch, (base + v) / size) * size + (base + v) % size;
    }
    at++;
    if (next[k] >= 0) stack.push_back(next[k]);
    k = first[k + 1];
    if (k < 0 && !stack.empty()) {
      k = stack.back();
      stack.pop_back();
    }
  }
  num_plain_[branch] = chain + plain;
  if (plain < nodes) base_[branch] = base;
}

// Branches with a common run of physical blocks become neighbours: the lexicographic order of their tables.
void Builder::order_branches() {
  for (int i = 0; i < b_.num_branches; i++)
    if (num_rows(i) && !(b_.elsewhere && b_.elsewhere[i])) order_.push_back(i);
  const int n = (int)order_.size(), size = s_.block_size;
  shared_tiles_.assign(n + 1, 0);
  if (!b_.share) return;
  auto in_order = [&](int x) { return std::min(b_.kv_len[x], base_[x]); };
  std::sort(order_.begin(), order_.end(), [&](int x, int y) {
    const int lx = in_order(x), ly = in_order(y), shorter = std::min(lx, ly),
              whole = size > TILE ? num_blocks(shorter / TILE * TILE) : shorter / size,
              c = memcmp(table(x), table(y), (size_t)whole * 4);
    return c ? c < 0 : lx != ly ? lx < ly : x < y;
  });
  for (int i = 1; i < n; i++) {
    const int most = std::min(in_order(order_[i]), in_order(order_[i - 1])) / TILE;
    const int32_t *x = table(order_[i]), *y = table(order_[i - 1]);
    int &k = shared_tiles_[i];
    auto block = [&](int tile) { return tile * TILE / size; };  // the first of a tile
    while (k < most && !memcmp(x + block(k), y + block(k), (size_t)num_blocks(TILE) * 4)) k++;
  }
}

// A branch's block that a row sees. Where there cannot be one like it the plan fails in the end.
int Builder::visible_block(int branch, int i) {
  const int block = table(branch)[i];
  if (block >= 0 && block < INT_MAX / s_.block_size) return block;
  bad_branch_ = branch, bad_block_ = i;
  return 0;
}

// The blocks of a tile that hold positions first .. last; its other places repeat the nearest of them.
void Builder::fill_blocks(Unit &u, int branch, int first, int last) {
  const int at = u.tile * TILE / s_.block_size, lo = first / s_.block_size, hi = last / s_.block_size;
  for (int c = 0; c < num_blocks(TILE); c++) u.blocks[c] = visible_block(branch, std::clamp(at + c, lo, hi));
}

void Builder::add_unit(int tile, int branch, int row0, int row1, int begin, int end) {
  Unit u{tile, row0, row1, -1, TILE, {}};
  fill_blocks(u, branch, std::max(begin, tile * TILE), std::min(end, tile * TILE + TILE) - 1);
  p_.units.push_back(u);
}

void Builder::add_path_unit(int tile, int branch, int row) {
  const int at = p_.pieces.back().row0 + row, start = tile * TILE, from = std::max(base_[branch], start);
  const int first = std::max(p_.rows[at].begin, start);
  if (first >= start + TILE || p_.rows[at].end <= start) return;
  Unit u{tile, row, row + 1, packed_paths_[at] + from - base_[branch], from - start, {}};
  if (first < from)
    fill_blocks(u, branch, first, from - 1);
  else
    std::fill_n(u.blocks, num_blocks(TILE), p_.paths[u.path + first - from] / s_.block_size);
  p_.units.push_back(u);
}

// Segments i .. j-1 hold the same blocks in this tile.
void Builder::add_units(int tile, int i, int j) {
  const int lo = tile * TILE, hi = lo + TILE;
  const Segment &g = segments_[i], &last = segments_[j - 1];
  if (base_[g.branch] < hi) {  // tiles with nodes off the table's order are never shared
    if (g.num_plain && g.begin < hi && g.plain_end > lo)
      add_unit(tile, g.branch, g.at, g.at + g.num_plain, g.begin, g.plain_end);
    for (int r = g.num_plain; r < g.num_rows; r++) add_path_unit(tile, g.branch, g.at + r);
    return;
  }
  int begin = INT_MAX, end = 0, branch = -1;
  for (; i < j; i++) {
    const Segment &x = segments_[i];
    if (x.begin >= hi || x.end <= lo) continue;
    branch = x.branch, begin = std::min(begin, x.begin), end = std::max(end, x.end);
  }
  if (branch >= 0) add_unit(tile, branch, g.at, last.at + last.num_rows, begin, end);
}

void Builder::add_segment(int branch, int t0, int t1, int shared) {
  const int row0 = b_.row_indptr[branch], at = (int)p_.rows.size() - p_.pieces.back().row0;
  Segment g{branch, at, t1 - t0, std::clamp(num_plain_[branch] - t0, 0, t1 - t0), INT_MAX, 0, 0, shared};
  for (int t = t0; t < t1; t++) {
    const int end = std::min(ends_[row0 + t], until_);
    const int begin = std::max(s_.window ? std::max(0, end - s_.window) : 0, from_);
    const int chunks = (end - 1) / CHUNK - begin / CHUNK + 1;
    p_.rows.push_back({row_ids_[row0 + t], begin, end, branch, chunks > 1 ? h_.num_partials : -1, -1, begin / CHUNK});
    p_.tails.push_back(-1);
    packed_paths_.push_back(paths_[row0 + t]);
    if (chunks > 1) h_.num_partials += chunks;
    g.begin = std::min(g.begin, begin);
    g.end = std::max(g.end, end);
    if (t - t0 < g.num_plain) g.plain_end = std::max(g.plain_end, end);
  }
  segments_.push_back(g);
}

// Rows of branches i0 .. i1-1, whole; of a single branch rows t0 .. t1-1.
void Builder::add_piece(int i0, int i1, int t0, int t1) {
  const int unit0 = (int)p_.units.size();
  p_.pieces.push_back({(int)p_.rows.size(), 0, unit0, 0, (int)p_.items.size(), 0});
  p_.is_tail.push_back(from_ > 0);
  segments_.clear();
  int begin = INT_MAX, end = 0;
  for (int i = i0; i < i1; i++) {
    const bool one = i1 - i0 == 1;
    add_segment(order_[i], one ? t0 : 0, one ? t1 : num_rows(order_[i]), i > i0 ? shared_tiles_[i] : 0);
    begin = std::min(begin, segments_.back().begin);
    end = std::max(end, segments_.back().end);
  }
  Piece &piece = p_.pieces.back();
  piece.num_rows = (int)p_.rows.size() - piece.row0;
  const int n = (int)segments_.size();
  for (int tile = begin / TILE; tile <= (end - 1) / TILE; tile++)
    for (int i = 0, j; i < n; i = j) {
      for (j = i + 1; j < n && segments_[j].shared > tile; j++) {}
      add_units(tile, i, j);
    }
  piece.num_units = (int)p_.units.size() - unit0;
  for (int u = unit0; u < (int)p_.units.size(); u++) {
    const int chunk = p_.units[u].tile / CHUNK_TILES;
    if (u == unit0 || p_.items.back().chunk != chunk) {
      p_.items.push_back({(int)p_.pieces.size() - 1, chunk, u, 0});
      piece.num_items++;
    }
    p_.items.back().num_units++;
  }
}

// Of a run of neighbours from i on that share whole chunks: a piece's rows, which end where these do; else 0.
int Builder::deep_step(int i) const {
  if (workers_.have_caches || s_.window || i + 1 >= (int)order_.size() || shared_tiles_[i + 1] < CHUNK_TILES) return 0;
  return std::max(1, workers_.most_rows / ((h_.group + h_.head_parts - 1) / h_.head_parts));
}

// That branches i .. j-1 have in common, with a position left for each row behind them.
int Builder::common_chunks(int i, int j) const {
  int common = INT_MAX;
  for (int k = i; k < j; k++) {
    const int row0 = b_.row_indptr[order_[k]], n = num_rows(order_[k]);
    if (k > i) common = std::min(common, shared_tiles_[k] * TILE);
    common = std::min(common, *std::min_element(ends_.begin() + row0, ends_.begin() + row0 + n) - 1);
  }
  return common / CHUNK;
}

// A piece up to where branches i .. j-1 part, and then one of each.
void Builder::add_forked(int i, int j, int common) {
  const int row0 = (int)p_.rows.size();
  until_ = common;
  add_piece(i, j, 0, num_rows(order_[i]));
  from_ = until_, until_ = INT_MAX;
  const int num_shared = (int)p_.rows.size() - row0;
  for (int k = i; k < j; k++) add_piece(k, k + 1, 0, num_rows(order_[k]));
  for (int r = row0; r < row0 + num_shared; r++) p_.tails[r] = r + num_shared;
  from_ = 0;
}

// Pieces: neighbours that share at least the first tile, of nearly equal size; a branch of many rows makes several.
void Builder::cut_pieces() {
  const int heads = (h_.group + h_.head_parts - 1) / h_.head_parts;
  const int even = (int)((int64_t)b_.num_rows * s_.q_heads / ((int64_t)SPANS_A_WORKER * workers_.num));
  const int most = workers_.most_rows, least = workers_.have_caches ? ROWS_MIN : DEVICE_ROWS_MIN;
  const int step = std::max(1, std::min(most, std::max(least, even)) / heads), n = (int)order_.size();
  // Of one branch's rows a device makes pieces as large as may be: smaller ones would take no less time.
  const int own = workers_.have_caches ? step : std::max(1, most / heads);
  auto rows = [&](int k) { return num_rows(order_[k]); };
  // Of the run of neighbours at i: where it stops, its rows that are in no piece yet, and how many a piece may have.
  int end = 0, total = 0, most_of_run = step;
  for (int i = 0; i < n;) {
    int r = rows(i), j = i + 1;
    if (r > step) {
      const int pieces = (r + own - 1) / own;
      for (int x = 0; x < pieces; x++)
        add_piece(i, i + 1, (int)((int64_t)r * x / pieces), (int)((int64_t)r * (x + 1) / pieces));
      i++;
      continue;
    }
    if (i >= end) {
      const int deep = deep_step(i), least_shared = deep ? CHUNK_TILES : 1;
      most_of_run = deep ? deep : step;
      for (end = j, total = r; end < n && shared_tiles_[end] >= least_shared && rows(end) <= step;)
        if (!deep && deep_step(end)) break;
        else total += rows(end++);
    }
    const int pieces = (total + most_of_run - 1) / most_of_run, want = (total + pieces - 1) / pieces;
    while (j < end && r + rows(j) <= want) r += rows(j++);
    const int common = deep_step(i) && j > i + 1 ? common_chunks(i, j) * CHUNK : 0;
    if (common) add_forked(i, j, common);
    else add_piece(i, j, 0, rows(i));
    i = j, total -= r;
  }
}

int Builder::build() {
  p_.rows.clear(), p_.pieces.clear(), p_.units.clear(), p_.items.clear(), p_.paths.clear();
  p_.tails.clear(), p_.is_tail.clear();
  row_ids_.resize(b_.num_rows), ends_.resize(b_.num_rows), paths_.assign(b_.num_rows, -1);
  num_plain_.resize(b_.num_branches), base_.resize(b_.num_branches);
  h_.group = s_.q_heads / s_.kv_heads;
  const int most = std::min(ROWS_MAX, workers_.most_rows);
  h_.head_parts = (h_.group + most - 1) / most;
  for (int i = 0; i < b_.num_branches; i++) place_rows(i);
  order_branches();
  cut_pieces();
  if (bad_branch_ >= 0)
    return fail("pd_attn_plan: block_table[%d][%d] is %d; a block that a row sees must be 0 to %d", bad_branch_,
                bad_block_, table(bad_branch_)[bad_block_], INT_MAX / s_.block_size - 1);
  return 0;
}

}  // namespace

int build_plan(PlanDraft &p, plan::Header &h, const pd_attn_shape &s, const pd_attn_batch &b, Workers workers) {
  if (Builder(p, h, s, b, workers).build()) return -1;
  cut_spans(p, h, workers);
  return 0;
}

}  // namespace pagedec
