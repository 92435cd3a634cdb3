// Linear layers of experts: what of them a block does, by the kernels of linear layers.
//
// Work     An expert's rows have as many items, panels or tiles, as in a layer of their own, and all experts' items are
//          numbered in a row, of which a block has every `grid`-th, whoever they are of: one expert has many rows and
//          most have none. Operands run ahead over the ends of items here, too. A kernel for few rows takes the experts
//          that have few, one for many the others, so both have some to do in a step of many rows.
// Finding  Which expert has how many rows is known on the device only: first[]. A lane has looked at a 32nd of it (five
//          numbers, where there are 128 experts), all of them side by side, and keeps where its experts' items end.
//          Then a warp finds an item's expert by a ballot of lanes and a sum over the experts of one, in registers:
//          some 60 instructions, which no copy that is under way waits for.
// Bits     Whatever an item is of, who computes it has the expert's record, rows and number of rows: those are the
//          bits of a layer.
#pragma once
#include "cuda/gemm.h"

namespace pagedec::gemm {

// Whose an item is: the record of a layer, how many rows it has, and which of its items this one is.
struct OfLayer {
  const pd_gemm_args &a;
  int num_rows, at;
};
struct OfExpert {
  pd_gemm_args a;
  int num_rows, at;
};

// Items of one layer, to be found where those of experts may be.
struct OneLayer {
  static constexpr bool kIsKnown = true;  // before the kernels in front are through
  const pd_gemm_args &a;
  int num_rows, number;

  PD_DEVICE OfLayer find(int item) const { return {a, num_rows, item}; }
};

// Items of experts that have `least` to `most` rows; Count: how many of so many rows and n outputs. A warp calls all of
// it together.
template <class Count>
class Experts {
 public:
  static constexpr bool kIsKnown = false;
  static constexpr int num_rows = 0;  // each has its own
  int number;

  PD_DEVICE Experts(const pd_experts_args &a, int least, int most = INT32_MAX)
      : number(0), a_(a), least_(least), most_(most), end_(0) {
    const int begin = lane() * num_own(), end = lower(begin + num_own(), a.num_experts);
    int row = begin < end ? a.first[begin] : 0;
    PD_UNROLL_BY(4)
    for (int expert = begin; expert < end; expert++) {
      const int next = a.first[expert + 1];
      end_ += count(next - row), row = next;
    }
    end_ = sum_until(end_), number = shuffle(end_, kWarp - 1);
  }
  PD_DEVICE OfExpert find(int item) const {
    const int of = count_bits(ballot(end_ <= item));  // the lane, whose experts are looked at again, a lane each
    const int before = shuffle(end_, of > 0 ? of - 1 : 0), expert = of * num_own() + lane();
    const bool is_one = lane() < num_own() && expert < a_.num_experts;
    const int first = is_one ? a_.first[expert] : 0, rows = is_one ? a_.first[expert + 1] - first : 0;
    const int items = count(rows), until = (of > 0 ? before : 0) + sum_until(items);
    const int found = count_bits(ballot(until <= item));
    const int at = item - shuffle(until - items, found);
    return record(of * num_own() + found, shuffle(first, found), shuffle(rows, found), at);
  }

 private:
  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  PD_DEVICE int num_own() const { return (a_.num_experts + kWarp - 1) / kWarp; }  // experts of a lane
  static PD_DEVICE int sum_until(int x) {  // of lanes up to this one
    PD_UNROLL for (int step = 1; step < kWarp; step *= 2) {
      const int other = shuffle(x, (lane() - step) & (kWarp - 1));
      if (lane() >= step) x += other;
    }
    return x;
  }
  PD_DEVICE int count(int rows) const { return rows < least_ || rows > most_ ? 0 : Count::of(rows, a_.gemm.n); }
  PD_DEVICE OfExpert record(int expert, int first, int rows, int at) const {
    pd_gemm_args one = a_.gemm;
    const int width = is_gated(one.epilogue) ? one.n / 2 : one.n;
    one.x = (const char *)one.x + first * ((int64_t)one.k * (one.dtype == PD_F32 ? 4 : 2));
    one.y = (char *)one.y + first * ((int64_t)width * (one.y_dtype == PD_F32 ? 4 : 2));
    one.packed = (const char *)one.packed + expert * a_.expert_bytes;
    if (one.bias) one.bias += (int64_t)expert * one.n;
    return {one, rows, at};
  }

  const pd_experts_args &a_;
  const int least_, most_;
  int end_;  // behind the items of this lane's experts and of those before
};

// Panels, for so many rows each: of a panel one group of rows after the other.
template <int kRows>
struct Panels {
  static PD_DEVICE int groups(int rows) { return (rows + kRows - 1) / kRows; }
  static PD_DEVICE int of(int rows, int n) { return groups(rows) * ((n + kPanel - 1) / kPanel); }
};

// Which of a block's items comes first, where those of others were dealt before.
PD_DEVICE int first_item(int num_before) {
  const int grid = num_grid_blocks();
  return (block_index() - num_before % grid + grid) % grid;
}

// Rows of an expert that are few, where weights are not in blocks: with more of them registers would spill.
constexpr int kFewOfExpert = kTileRows;
// As enqueue_few and the others: few rows of an expert, and many.
int enqueue_experts_few(pd_context &, const pd_experts_args &, int most_rows);
int enqueue_experts_many(pd_context &, const pd_experts_args &);
int enqueue_experts_int8(pd_context &, const pd_experts_args &);
int enqueue_experts_int8_many(pd_context &, const pd_experts_args &);
int enqueue_experts_blocks(pd_context &, const pd_experts_args &);
int enqueue_experts_blocks_many(pd_context &, const pd_experts_args &, const Segments &);

}  // namespace pagedec::gemm
