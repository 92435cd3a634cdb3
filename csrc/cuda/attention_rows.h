// A span's packed rows, and what becomes of them when a chunk ends.
#pragma once
#include "cuda/attention_work.h"

namespace pagedec::attention {

// Rows of a piece times the query heads of a virtual head, row-major.
struct PackedRows {
  const plan::Span *span = nullptr;
  int row0 = 0, num_packed = 0, heads = 1;  // row0: in the plan; heads: of each row
  int kv_head = 0, first_head = 0;
  bool is_first_span = false;               // of the piece

  PD_DEVICE void open(const Sections &p, const plan::Span &of) {
    const plan::Header &h = p.header;
    const plan::Piece &piece = p.of<plan::Piece>(h.pieces)[of.piece];
    const int parts = h.head_parts;
    int part = 0, begin = 0, end = h.group;
    kv_head = of.head;
    if (parts > 1) {
      part = of.head % parts, kv_head = of.head / parts;
      begin = h.group * part / parts, end = h.group * (part + 1) / parts;
    }
    span = &of, row0 = piece.row0, heads = end - begin, first_head = kv_head * h.group + begin;
    num_packed = piece.num_rows * heads, is_first_span = of.item0 == piece.item0;
  }
  PD_DEVICE const plan::Row &row(const Sections &p, int packed) const {
    return p.of<plan::Row>(p.header.rows)[row0 + packed / heads];
  }
  PD_DEVICE int head(int packed) const { return first_head + packed % heads; }
};

// What a chunk has of one row is folded into what was before, or begins it; it goes to the result, to a record for the
// merge, or to where this thread finds it for the next chunk. o(piece, i): its numbers; half: which of a thread's rows
// it is, of so many.
template <class E, int kHalves, int kPieces, class Of, class ColumnOf>
PD_DEVICE void end_row(const Work &w, const Sections &p, const PackedRows &rows, int packed, int half, int chunk,
                       bool is_last_item, bool has_ml, float m, float l, const Of &o, const ColumnOf &column_of) {
  // What is kept of pieces, then m and l.
  const auto total = [&](int piece, int i) -> float & {
    const int64_t place = ((int64_t)block_index() * kHalves + half) * (kPieces + 1) + piece;
    return w.totals[(place * 2 + i) * kThreads + thread_index()];
  };
  const plan::Row &row = rows.row(p, packed);
  const int first = row.begin / CHUNK, last = (row.end - 1) / CHUNK, head = rows.head(packed), dim = w.head_dim;
  if (chunk < first || chunk > last) return;
  PD_UNROLL for (int j = 0; j < kPieces; j++)  // -0 becomes 0, as where what was not seen added a 0
    PD_UNROLL for (int i = 0; i < 2; i++) o(j, i) = o(j, i) + 0.0f;
  // Of two rows that are one, and see one after the other (plan.h), neither has the result.
  const bool is_first_span = rows.is_first_span && !(row.split >= 0 && row.merge_chunk < first);
  if (is_first_span && chunk != first) {
    const float before_m = total(kPieces, 0), before_l = total(kPieces, 1);
    const bool is_empty = l == 0.0f;  // nothing of this chunk: what was before is all
    const Fold fold(before_m, m);
    m = is_empty ? before_m : fold.top, l = is_empty ? before_l : fold.of(before_l, l);
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) {
        const float before = total(j, i);
        o(j, i) = is_empty ? before : fold.of(before, o(j, i));
      }
  }
  total(kPieces, 0) = m, total(kPieces, 1) = l;
  const bool is_over = is_first_span && chunk == last && row.split < 0;
  const bool has_record = !is_over && row.split >= 0 && (!is_first_span || is_last_item);
  const int q_heads = p.header.q_heads;
  if (is_over) {
    const float by = weight_of(w, head, m, l);
    E *out = (E *)w.out + ((int64_t)row.row_id * q_heads + head) * dim;
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++)
        if (column_of(j) < dim) out[column_of(j) + i] = from_float<E>(o(j, i) * by);
  } else if (has_record) {
    float *record = w.partials + ((int64_t)(row.split + chunk - row.merge_chunk) * q_heads + head) * (dim + 2);
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++)
        if (column_of(j) < dim) record[column_of(j) + i] = o(j, i);
    if (has_ml) record[dim] = m, record[dim + 1] = l;
  } else {
    PD_UNROLL for (int j = 0; j < kPieces; j++)
      PD_UNROLL for (int i = 0; i < 2; i++) total(j, i) = o(j, i);
  }
}

}  // namespace pagedec::attention
