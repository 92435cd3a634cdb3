// Slot moves in list order. A thread owns whole (layer, head) pairs, and the same part of each slot's features, so that
// the order holds without a barrier.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/cache_layout.h"
#include "common/check.h"

namespace pagedec {
namespace {

// Moves first .. first + length: neighbours inside one block to the same offsets of another block.
struct Run {
  int32_t src, dst, length;
};

Run next_run(const pd_kv_copy_args &a, int32_t first) {
  const int32_t size = a.block_size, src = a.src[first], dst = a.dst[first];
  Run run{src, dst, 1};
  if (src % size != dst % size || src == dst) return run;
  const int32_t room = size - src % size < *a.num_moves - first ? size - src % size : *a.num_moves - first;
  while (run.length < room && a.src[first + run.length] == src + run.length &&
         a.dst[first + run.length] == dst + run.length)
    run.length++;
  return run;
}

PD_INLINE void copy_strided(char *base, int64_t to, int64_t from, int64_t num, int64_t step, int64_t bytes) {
  for (int64_t i = 0; i < num; i++) memcpy(base + to + i * step, base + from + i * step, bytes);
}

// A copy of a size that the compiler knows is a few moves instead of a call.
template <int64_t Bytes>
void copy_rows(char *base, int64_t to, int64_t from, int64_t num, int64_t step) {
  copy_strided(base, to, from, num, step, Bytes);
}
template <int64_t Word, int64_t... Slots>
void copy_rows(std::integer_sequence<int64_t, Slots...>, int64_t slots, char *base, int64_t to, int64_t from,
               int64_t num, int64_t step) {
  const bool done = ((slots == Slots + 1 && (copy_rows<Word *(Slots + 1)>(base, to, from, num, step), true)) || ...);
  if (!done) copy_strided(base, to, from, num, step, slots * Word);
}

// Word: what lies side by side of a slot in K, a pair of elements in bf16 layers, else one.
template <class Word, bool PAIRED>
struct Copier {
  static constexpr int64_t WORD = sizeof(Word), ELEMENT = PAIRED ? WORD / 2 : WORD;
  const CacheShape &shape;
  char *const k, *const v;

  // One slot of V in pairs along the block: the first or the second half of each word.
  static void copy_half(char *to, const char *from, int64_t dim, bool second) {
    const Word low = (Word)((Word)~(Word)0 >> (WORD * 4)), taken = second ? (Word)~low : low;
    for (int64_t i = 0; i < dim; i++) {
      Word a, b;
      memcpy(&a, from + i * WORD, WORD), memcpy(&b, to + i * WORD, WORD);
      b = (Word)((b & ~taken) | (a & taken));
      memcpy(to + i * WORD, &b, WORD);
    }
  }

  void copy_scales(int64_t from, int64_t to, int64_t num) const {
    memcpy(k + to, k + from, num * shape.scale), memcpy(v + to, v + from, num * shape.scale);
  }

  void copy_slot(int64_t src, int64_t dst, int64_t head) const {
    const SlotPlace from = shape.place(src, head), to = shape.place(dst, head);
    const int64_t dim = shape.head_dim, size = shape.block_size;
    copy_strided(k, to.k, from.k, dim * ELEMENT / WORD, size * WORD, WORD);
    if (PAIRED)
      copy_strided(v, to.v, from.v, dim, WORD, ELEMENT);
    else
      memcpy(v + to.v, v + from.v, dim * ELEMENT);
    if (shape.scale) copy_scales(from.scale, to.scale, 1);
  }

  void copy_run(const Run &run, int64_t head) const {
    const int64_t dim = shape.head_dim, size = shape.block_size, offset = run.src % size;
    const int64_t from = shape.head_base(run.src / size, head), to = shape.head_base(run.dst / size, head);
    if (run.length == size)
      memcpy(k + to, k + from, shape.head_bytes());
    else
      copy_rows<WORD>(std::make_integer_sequence<int64_t, 16>(), run.length, k, to + offset * WORD,
                      from + offset * WORD, dim * ELEMENT / WORD, size * WORD);
    int64_t begin = offset, end = offset + run.length;
    if (PAIRED) {
      auto pair = [&](int64_t slot) { return slot / 2 * dim * WORD; };
      if (begin % 2) copy_half(v + to + pair(begin), v + from + pair(begin), dim, true), begin++;
      if (end % 2 && end > begin) end--, copy_half(v + to + pair(end), v + from + pair(end), dim, false);
    }
    const int64_t token = dim * ELEMENT;
    if (end > begin) memcpy(v + to + begin * token, v + from + begin * token, (end - begin) * token);
    const int64_t scales = shape.head_bytes() + offset * shape.scale;
    if (shape.scale) copy_scales(from + scales, to + scales, run.length);
  }
};

template <class Word, bool PAIRED>
void copy_moves(const pd_kv_copy_args &a, const CacheShape &shape, int thread, int num_threads) {
  const int64_t units = (int64_t)a.num_layers * a.kv_heads;
  for (int64_t u = units * thread / num_threads; u < units * (thread + 1) / num_threads; u++) {
    const int64_t start = u / a.kv_heads * a.layer_stride * shape.element, head = u % a.kv_heads;
    const Copier<Word, PAIRED> copier{shape, (char *)a.k_cache + start, (char *)a.v_cache + start};
    for (int32_t i = 0; i < *a.num_moves;) {
      const Run run = next_run(a, i);
      if (run.src % a.block_size == run.dst % a.block_size && run.src != run.dst)
        copier.copy_run(run, head);
      else if (run.src != run.dst)
        copier.copy_slot(run.src, run.dst, head);
      i += run.length;
    }
  }
}

void copy_features(const pd_kv_copy_args &a, int thread, int num_threads) {
  const int64_t lines = (a.feature_bytes + 63) / 64;
  const int64_t begin = lines * thread / num_threads * 64;
  const int64_t end = std::min<int64_t>(lines * (thread + 1) / num_threads * 64, a.feature_bytes);
  char *const features = (char *)a.features + begin;
  for (int32_t i = 0; begin < end && i < *a.num_moves; i++)
    if (a.src[i] != a.dst[i])
      memcpy(features + a.dst[i] * (int64_t)a.feature_bytes, features + a.src[i] * (int64_t)a.feature_bytes,
             end - begin);
}

}  // namespace

void kv_copy_part(const pd_kv_copy_args &a, int thread, int num_threads) {
  const CacheShape shape(a.kv_heads, a.head_dim, a.block_size, a.dtype, a.kv_kind);
  if (thread == 0 && a.token_plane)
    for (int32_t i = 0; i < *a.num_moves; i++) a.token_plane[a.dst[i]] = a.token_plane[a.src[i]];
  const auto copy = shape.paired ? (shape.scale ? copy_moves<uint16_t, true> : copy_moves<uint32_t, true>)
                                 : (shape.scale ? copy_moves<uint8_t, false> : copy_moves<uint32_t, false>);
  copy(a, shape, thread, num_threads);
  if (a.features) copy_features(a, thread, num_threads);
}

}  // namespace pagedec
