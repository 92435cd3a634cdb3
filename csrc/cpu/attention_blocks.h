// From a unit's blocks to a tile: where they lie, a tree's slots in order, bytes as elements, and vectors that are
// longer than a block.
#pragma once
#include "cpu/attention_state.h"
#include "cpu/widen.h"

namespace pagedec {

// A head of a unit's block, as one of b.
template <class T>
void AttentionLoop<T>::place(const plan::Unit &u, int block, int kv_head, Blocks<C> &b, int c) const {
  const int64_t first = u.tile * TILE & (block_ - 1);  // token of the part: block sizes are powers of 2
  const int64_t at = ((int64_t)u.blocks[block] * h_.kv_heads + kv_head) * words_;
  const int64_t scales = at + d_ * block_ + first * SCALES<T>;
  b.k[c] = k_ + at + first * T::STEP, b.v[c] = v_ + at + first * d_;
  b.k_scale[c] = k_ + scales, b.v_scale[c] = v_ + scales;
}

template <class T>
Blocks<typename T::C> AttentionLoop<T>::locate(const plan::Unit &u, int kv_head) const {
  Blocks<C> b;
  for (int c = 0; c * size_ < TILE; c++) place(u, c, kv_head, b, c);
  b.tokens = block_;
  return b;
}

// Of a block its part in a tile, laid out like a block of size_ tokens.
template <class T>
void AttentionLoop<T>::copy_part(const Blocks<C> &b, int c, C *k, C *v) const {
  const int run = size_ * T::STEP, words = d_ * size_;
  for (int i = 0; i < d_ / T::STEP; i++) memcpy(k + i * run, b.k[c] + i * b.tokens * T::STEP, run * sizeof(C));
  memcpy(v, b.v[c], words * sizeof(C));
  if constexpr (SCALED<T>)
    memcpy(k + words, b.k_scale[c], size_ * SCALES<T>), memcpy(v + words, b.v_scale[c], size_ * SCALES<T>);
}

// A tree node's tile in position order: whole blocks before the nodes where they are, the rest copied once a tile and
// branch, then slot by slot as one node follows another. A window may leave blocks before the nodes out of one node's
// unit and not of the next one's.
template <class T>
void AttentionLoop<T>::gather(const plan::Unit &u, const plan::Row &row, int kv_head, Blocks<C> &blocks) {
  constexpr int S = T::STEP;
  const int start = u.tile * TILE, words = (d_ + SCALES<T>) * size_;
  const int before = row.begin < start + u.path_lane ? (u.path_lane + size_ - 1) / size_ : 0;  // blocks that it sees
  const bool fresh = s_->gathered_tile != u.tile || s_->gathered_branch != row.branch_id ||
                     !std::equal(u.blocks, u.blocks + before, s_->gathered_blocks);
  if (fresh) {
    s_->gathered_tile = u.tile, s_->gathered_branch = row.branch_id;
    std::copy_n(u.blocks, MAX_TILE_BLOCKS, s_->gathered_blocks);
    std::fill_n(s_->gathered_slots, TILE, -1);
  }
  for (int c = 0; c * size_ < TILE; c++) {
    if (!joins() && (c + 1) * size_ <= u.path_lane) continue;
    C *k = s_->gathered_k + c * words, *v = s_->gathered_v + c * words;
    if (fresh && c * size_ < u.path_lane) copy_part(blocks, c, k, v);
    blocks.k[c] = k, blocks.v[c] = v;
    blocks.k_scale[c] = k + d_ * size_, blocks.v_scale[c] = v + d_ * size_;
  }
  blocks.tokens = size_;
  for (int lane = std::max(u.path_lane, row.begin - start); lane < std::min(TILE, row.end - start); lane++) {
    const int slot = p_.paths[u.path + lane - u.path_lane], to = lane % size_, from = slot % block_;
    if (s_->gathered_slots[lane] == slot) continue;
    s_->gathered_slots[lane] = slot;
    const int64_t block = ((int64_t)(slot / block_) * h_.kv_heads + kv_head) * words_;
    C *to_k = s_->gathered_k + lane / size_ * words, *to_v = s_->gathered_v + lane / size_ * words;
    C *k = to_k + to * S, *v = to_v + (to / S) * d_ * S + to % S;
    const C *from_k = k_ + block + from * S, *from_v = v_ + block + (from / S) * d_ * S + from % S;
    for (int i = 0; i < d_ / S; i++)
      memcpy(k + (int64_t)i * size_ * S, from_k + (int64_t)i * block_ * S, S * sizeof(C));
    for (int i = 0; i < d_; i++) v[i * S] = from_v[i * S];
    if constexpr (SCALED<T>) {
      const int64_t at = d_ * size_ + to * SCALES<T>, from_at = block + d_ * block_ + from * SCALES<T>;
      memcpy(to_k + at, k_ + from_at, SCALES<T>), memcpy(to_v + at, v_ + from_at, SCALES<T>);
    }
  }
}

// A unit's bytes, once for all of its rows. What is to come is fetched beside that.
template <class T>
Blocks<typename T::E> AttentionLoop<T>::widen(const Blocks<C> &b) {
  if constexpr (SCALED<T>) {
    Blocks<E> wide;
    auto &to = s_->widened;
    const int n = d_ * size_;
    const auto elements = h_.kv_kind == PD_KV_INT8 ? widen_bytes<PD_KV_INT8, E> : widen_bytes<PD_KV_FP8, E>;
    // K of a longer block than a tile in pieces, each a step of dimensions.
    const int steps = b.tokens == size_ ? 1 : d_ / T::STEP, part = n / steps;
    for (int c = 0; c * size_ < TILE; c++) {
      for (int i = 0; i < steps; i++) {
        const int64_t from = i * b.tokens * T::STEP;
        elements(b.k[c] + from, part, to.k + c * n + i * part, next_.k[c] + from);
      }
      elements(b.v[c], n, to.v[turn()] + c * n, next_.v[c]);
      wide.k[c] = to.k + c * n, wide.v[c] = to.v[turn()] + c * n;
    }
    wide.tokens = size_;
    return wide;
  } else {
    return b;
  }
}

template <class T>
void AttentionLoop<T>::read_scales(const Blocks<C> &b) {
  tile_.k_scale = s_->widened.k_scale[turn()], tile_.v_scale = s_->widened.v_scale[turn()];
  for (int c = 0; c * size_ < TILE; c++) {
    widen_scales(b.k_scale[c], size_, s_->widened.k_scale[turn()] + c * size_, next_.k_scale[c]);
    widen_scales(b.v_scale[c], size_, s_->widened.v_scale[turn()] + c * size_, next_.v_scale[c]);
  }
}

template <class T>
template <class M>
void AttentionLoop<T>::vectors(const Blocks<M> &b, const M **k, const M **v) const {
  for (int c = 0; c < NT; c++) k[c] = b.k[c * vec::W >> shift_] + (c * vec::W & (size_ - 1)) * T::STEP;
  for (int c = 0; c * size_ < TILE; c++) v[c] = b.v[c];
}

// K vectors longer than a block.
template <class T>
template <class M>
void AttentionLoop<T>::join_k(const Blocks<M> &b, const M **k) {
  M *const wide = (M *)s_->joined_k;
  for (int c = 0; c * size_ < TILE; c++)
    for (int i = 0; i < d_ / T::STEP; i++)
      memcpy(wide + (c * size_ / vec::W * (d_ / T::STEP) + i) * vec::W * T::STEP + c * size_ % vec::W * T::STEP,
             b.k[c] + i * size_ * T::STEP, size_ * T::STEP * sizeof(M));
  for (int c = 0; c < NT; c++) k[c] = wide + c * vec::W * d_;
}

// V of blocks one behind the other is V of a longer block.
template <class T>
void AttentionLoop<T>::join_v(const Blocks<E> &b, E *to) {
  const int words = d_ * size_, line = 64 / (int)sizeof(E);
  for (int c = 0; c * size_ < TILE; c++)
    for (int i = 0; i < words; i += line) {
      memcpy(to + c * words + i, b.v[c] + i, 64);
      prefetch<true>(tile_.next_v[c] + i);
    }
}

// Where the halves of V lie that the matrix unit takes: in blocks, one behind the other already, or joined.
template <class T>
void AttentionLoop<T>::place_halves(const Blocks<E> &b, bool gathered) {
  if constexpr (MatrixUnit<T>::EXIST) {
    const E *joined = nullptr;
    if constexpr (SCALED<T>)
      joined = s_->widened.v[turn()];
    else if (joins() && gathered)
      joined = s_->gathered_v;
    else if (joins())
      join_v(b, s_->unit.joined_v[turn()]), joined = s_->unit.joined_v[turn()];
    for (int i = 0; i < 2; i++) {
      const int c = i * HALF / size_, at = i * HALF % size_ * d_;
      half_[i] = joined ? joined + i * HALF * d_ : b.v[c] + at;
      next_half_[i] = joined ? half_[i] : tile_.next_v[c] + at;
    }
  }
}

}  // namespace pagedec
