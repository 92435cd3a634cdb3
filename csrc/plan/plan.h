// The attention plan of one step: what every layer of a kind repeats, on any device.
//
// A plan is one flat, relocatable array of int32 words (pd_plan_view): a Header, then sections at word offsets from the
// start.
//   rows     the batch's rows in packed order: neighbours share physical blocks, a tree's nodes stand in depth-first
//            order
//   pieces   runs of rows that are computed together
//   units    of each piece, ascending by tile: one tile of 64 positions and the rows that read it
//   items    (piece, chunk): the units of one chunk of 512 positions
//   spans    (piece, virtual head, run of items): the work of a CPU's thread or of a device's thread block, ordered by
//            worker; worker_indptr gives each its share
//   splits   rows whose chunks went to several spans, as indices into rows
//   paths    slots (block * block_size + offset) of the positions that a tree node does not find in its table's order
//
// A virtual head is a part of the query heads that one kv head serves: v = kv_head * head_parts + part, and the part
// holds the group's heads [group * part / head_parts, group * (part + 1) / head_parts). A piece's packed rows are rows
// x heads of the part, row-major; tensor cores take them in tiles of 16. Rows [row0, row1) of a unit read the same
// slots, so a tile is fetched once for them.
//
// A row at packed index i sees positions [begin, end). It folds the chunks begin/512 ... (end-1)/512 left to right; a
// chunk starts afresh, and inside it tiles follow each other in ascending order. With one block per item a row of
// several chunks puts (o, m, l) of chunk c into workspace[partial + c - begin/512], and whoever comes last folds them
// in that order. A worker folds inside its span and uses another, smaller workspace (`split`) for the rows in splits
// alone. Nothing of this changes a bit.
//
// On a device, branches that share whole chunks of a prompt are a piece up to there, and each is one of its own from
// there on: all pieces have long runs of units for all of their rows then, or few units. A row is two in the plan that
// see one after the other, and is in splits: its `split` and `merge_chunk` are the same in both.
//
// The words are all that there is to a plan: who carries it out brings the workspaces, and any number of workers may,
// whatever number it was made for.
#pragma once
#include <vector>

#include "plan/words.h"

namespace pagedec {

// A plan in the making: its sections apart. Of a context, so that a step's sections have the memory of those before.
struct PlanDraft {
  std::vector<plan::Row> rows;
  std::vector<plan::Piece> pieces;
  std::vector<plan::Unit> units;
  std::vector<plan::Item> items;
  std::vector<plan::Span> spans;
  std::vector<int32_t> worker_indptr, splits, paths;
  std::vector<int32_t> tails;    // by row: the row that sees on from where this one ends; -1: none does
  std::vector<char> is_tail;     // by piece: its rows are such
};

}  // namespace pagedec

struct pd_plan {
  std::vector<int32_t> words;  // none: nothing is planned

  const pagedec::plan::Header &header() const { return *(const pagedec::plan::Header *)words.data(); }
  template <class T>
  const T *section(const pagedec::plan::Section &s) const {
    return (const T *)(words.data() + s.offset);
  }
};

namespace pagedec {

// Who carries a plan out: so many. A CPU's threads find what they wrote in caches of their own; a device's blocks have
// one for all of them, and take about as long for a unit of few rows as for one of many.
struct Workers {
  int num;
  bool have_caches;
  int most_rows = ROWS_MAX;  // packed rows of a piece
};

int check_shape(const pd_attn_shape &);
int check_batch(const pd_attn_shape &, const pd_attn_batch &);
// Of checked arguments, which the header tells of already; fails on a visible block id that there cannot be.
int build_plan(PlanDraft &, plan::Header &, const pd_attn_shape &, const pd_attn_batch &, Workers);
void cut_spans(PlanDraft &, plan::Header &, Workers);
// All of it: the words, or none and an error.
int make_plan(PlanDraft &, std::vector<int32_t> &words, const pd_attn_shape *, const pd_attn_batch *, Workers);

}  // namespace pagedec
