// Slot moves in list order. A thread owns whole (layer, head) pairs, so that the order holds without a barrier.
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
template <int64_t... Slots>
void copy_rows(std::integer_sequence<int64_t, Slots...>, int64_t slots, char *base, int64_t to, int64_t from,
               int64_t num, int64_t step) {
  const bool done = ((slots == Slots + 1 && (copy_rows<4 * (Slots + 1)>(base, to, from, num, step), true)) || ...);
  if (!done) copy_strided(base, to, from, num, step, slots * 4);
}

// One slot of V in pairs along the block: the first or the second half of each 4 bytes.
void copy_half(char *to, const char *from, int64_t dim, bool second) {
  const uint32_t taken = second ? 0xffff0000 : 0x0000ffff;
  for (int64_t i = 0; i < dim; i++) {
    uint32_t a, b;
    memcpy(&a, from + i * 4, 4), memcpy(&b, to + i * 4, 4);
    b = (b & ~taken) | (a & taken);
    memcpy(to + i * 4, &b, 4);
  }
}

// bf16: K in pairs along the head, V in pairs along the block.
void copy_slot(const CacheShape &shape, char *k, char *v, int64_t src, int64_t dst, int64_t head) {
  const SlotPlace from = shape.place(src, head), to = shape.place(dst, head);
  const int64_t dim = shape.head_dim, size = shape.block_size;
  if (shape.paired) {
    copy_strided(k, to.k * 2, from.k * 2, dim / 2, size * 4, 4);
    copy_strided(v, to.v * 2, from.v * 2, dim, 4, 2);
  } else {
    copy_strided(k, to.k * 4, from.k * 4, dim, size * 4, 4);
    memcpy(v + to.v * 4, v + from.v * 4, dim * 4);
  }
}

void copy_run(const CacheShape &shape, int64_t bytes, char *k, char *v, const Run &run, int64_t head) {
  const int64_t dim = shape.head_dim, size = shape.block_size, offset = run.src % size;
  const int64_t from = shape.head_base(run.src / size, head) * bytes,
                to = shape.head_base(run.dst / size, head) * bytes;
  const int64_t k_rows = shape.paired ? dim / 2 : dim;  // of 4 bytes a slot
  if (run.length == size)
    memcpy(k + to, k + from, dim * size * bytes);
  else
    copy_rows(std::make_integer_sequence<int64_t, 16>(), run.length, k, to + offset * 4, from + offset * 4, k_rows,
              size * 4);
  int64_t begin = offset, end = offset + run.length;
  if (shape.paired) {
    auto pair = [&](int64_t slot) { return slot / 2 * dim * 4; };
    if (begin % 2) copy_half(v + to + pair(begin), v + from + pair(begin), dim, true), begin++;
    if (end % 2 && end > begin) end--, copy_half(v + to + pair(end), v + from + pair(end), dim, false);
  }
  if (end > begin) memcpy(v + to + begin * dim * bytes, v + from + begin * dim * bytes, (end - begin) * dim * bytes);
}

}  // namespace

void kv_copy_part(const pd_kv_copy_args &a, int thread, int num_threads) {
  const CacheShape shape{a.kv_heads, a.head_dim, a.block_size, a.dtype == PD_BF16};
  const int64_t bytes = shape.paired ? 2 : 4, units = (int64_t)a.num_layers * a.kv_heads;
  if (thread == 0 && a.token_plane)
    for (int32_t i = 0; i < *a.num_moves; i++) a.token_plane[a.dst[i]] = a.token_plane[a.src[i]];
  for (int64_t u = units * thread / num_threads; u < units * (thread + 1) / num_threads; u++) {
    const int64_t start = u / a.kv_heads * a.layer_stride * bytes, head = u % a.kv_heads;
    char *k = (char *)a.k_cache + start, *v = (char *)a.v_cache + start;
    for (int32_t i = 0; i < *a.num_moves;) {
      const Run run = next_run(a, i);
      if (run.src % a.block_size == run.dst % a.block_size && run.src != run.dst)
        copy_run(shape, bytes, k, v, run, head);
      else if (run.src != run.dst)
        copy_slot(shape, k, v, run.src, run.dst, head);
      i += run.length;
    }
  }
}

}  // namespace pagedec
