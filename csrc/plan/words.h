// The words of a plan, as plan.h tells of them: what kernels need of it.
#pragma once
#include <cstdint>

#include "pagedec.h"

namespace pagedec {

constexpr int TILE = 64, CHUNK = 512, CHUNK_TILES = CHUNK / TILE;
constexpr int MIN_BLOCK = 8, MAX_BLOCK = 256, MAX_TILE_BLOCKS = TILE / MIN_BLOCK;
constexpr int MAX_HEAD_DIM = 256;
// packed rows of a piece: q, o, l of 48 rows of 64 and one tile stay near L1 (96 rows: 2-20 % slower)
constexpr int ROWS_MAX = 48;

constexpr int SPANS_A_WORKER = 4;  // to aim for (8: 64 beams 3-33 % slower, no gain elsewhere)

constexpr int32_t PLAN_MAGIC = 0x6e6c7064;  // "dpln"
constexpr int32_t PLAN_VERSION = 2;

namespace plan {

struct Section { int32_t offset, count; };  // in words; in records
struct Header {
  int32_t magic, version, num_words;
  int32_t q_heads, kv_heads, head_dim, block_size, dtype, kv_kind, window;
  int32_t scale_bits, soft_cap_bits;  // the bits of a float
  int32_t num_branches, num_rows;
  int32_t group, head_parts;          // q_heads / kv_heads; parts of a group
  int32_t num_workers;
  int32_t num_partials;               // (o, m, l) records of the one-block-per-item workspace, for each query head
  int32_t num_split_partials;         // and of the workspace that spans use
  Section rows, pieces, units, items, spans, worker_indptr, splits, paths;
};
struct Row {
  int32_t row_id;       // in the batch
  int32_t begin, end;   // positions it sees; its own is end - 1
  int32_t branch_id;
  int32_t partial;      // first record in the item workspace, -1: one chunk, nothing to merge
  int32_t split;        // first record in the span workspace, that of merge_chunk; -1: in one span
  int32_t merge_chunk;  // the first chunk that has a record: what the first span has of a row is folded into one
};
struct Piece { int32_t row0, num_rows, unit0, num_units, item0, num_items; };
struct Unit {
  int32_t tile, row0, row1;  // rows relative to the piece
  int32_t path;              // paths[path + i] is the slot of lane path_lane + i; -1: every lane stands in its block
  int32_t path_lane;
  int32_t blocks[MAX_TILE_BLOCKS];  // block ids; repeated where no row looks; of blocks longer than a tile the one
};
struct Item { int32_t piece, chunk, unit0, num_units; };
struct Span { int32_t piece, head, item0, num_items; };  // head: virtual

}  // namespace plan

}  // namespace pagedec
