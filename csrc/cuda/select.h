// The first keys of an order, by a block of kRowThreads threads. Keys are unsigned integers of 64 or 128 bits, all
// different; `each(visit)` calls visit(key) of every key that a thread has, and all threads call it alike.
//
// Two ways lead to the first n. One is to take the first key of each thread: the n-th of those is not before the n-th
// of all, and few keys are before it (some 1.4 n for n = 256 of 512 threads), so all of those are collected in shared
// memory and sorted. The other, for large n or where they find no room, goes through the bits of keys from the highest
// on, 11 at a time: how many keys (or what mass) has each value of these bits tells in which the n-th lies. It takes
// three to six passes, whatever the keys are.
#pragma once
#include "cuda/readout.h"

namespace pagedec {

constexpr int kBins = 2048;  // values of 11 bits
constexpr int kBinsOfThread = kBins / kRowThreads;

// Sorts the first n of them, in the room of a power of two.
template <class K>
PD_DEVICE void sort_keys(const SharedArray<K> &keys, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + thread_index(); i < size; i += kRowThreads) keys[i] = ~(K)0;
  for (int width = 2; width <= size; width *= 2)
    for (int stride = width / 2; stride; stride /= 2) {
      sync_block();
      for (int pair = thread_index(); pair < size / 2; pair += kRowThreads) {
        const int i = 2 * pair - (pair & (stride - 1));
        const K a = keys[i], b = keys[i + stride];
        if ((a > b) != ((i & width) != 0)) keys[i] = b, keys[i + stride] = a;
      }
    }
  sync_block();
}

// keys = those from `first` to `last`, sorted. How many; -1 if there are more than `room`, a power of two.
template <class K, class Each>
PD_DEVICE int collect(const SharedArray<K> &keys, int room, K first, K last, Each each) {
  SHARED_ARRAY(uint32_t, count, 1);
  sync_block();  // what was there has been read
  if (thread_index() == 0) count[0] = 0;
  sync_block();
  bool is_full = false;
  each([&](K key) {
    if (is_full || key < first || key > last) return;
    const uint32_t place = atomic_add(count, 0, 1u);
    is_full = place >= (uint32_t)room;
    if (!is_full) keys[place] = key;  // in any order, until they are sorted
  });
  sync_block();
  const uint32_t n = count[0];
  if (n > (uint32_t)room) return -1;
  sort_keys(keys, (int)n);
  return (int)n;
}

// The n-th of the threads' first keys, so that there are n or more up to it: n <= kRowThreads, which is the room
// that keys have at least; `own` is the first of this thread's.
template <class K>
PD_DEVICE K bound_of_first(const SharedArray<K> &keys, int64_t n, K own) {
  sync_block();  // what was there has been read
  keys[thread_index()] = own;
  sort_keys(keys, kRowThreads);
  return keys[n - 1];
}
// keys = n or more that come first, sorted. How many; -1 if they find no room, or n is too large for their bound.
template <class K, class Each>
PD_DEVICE int collect_first(const SharedArray<K> &keys, int room, int64_t n, K own, Each each) {
  return n > kRowThreads ? -1 : collect(keys, room, (K)0, bound_of_first(keys, n, own), each);
}

struct Crossing {
  int at;  // -1: nowhere
  uint64_t before, weight;
};
// The first of n <= kBins at which the sum of the weights so far is at least `wanted` (above 0).
template <class WeightAt>
PD_DEVICE Crossing find_crossing(int n, uint64_t wanted, WeightAt weight_at) {
  SHARED_ARRAY(uint64_t, of_warps, kRowWarps);
  SHARED_ARRAY(uint64_t, found, 2);
  SHARED_ARRAY(int32_t, at, 1);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, first = thread_index() * kBinsOfThread;
  uint64_t own[kBinsOfThread], sum = 0;
  for (int j = 0; j < kBinsOfThread; j++) own[j] = first + j < n ? weight_at(first + j) : 0, sum += own[j];
  uint64_t until = sum;  // from the warp's first on
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t other = shuffle(until, (lane - step) & (kWarp - 1));
    if (lane >= step) until += other;
  }
  sync_block();  // what the call before found has been read
  if (thread_index() == 0) at[0] = -1;
  if (lane == kWarp - 1) of_warps[warp] = until;
  sync_block();
  uint64_t before = until - sum;
  for (int w = 0; w < warp; w++) before += of_warps[w];
  for (int j = 0; j < kBinsOfThread; j++, before += own[j - 1])
    if (before < wanted && before + own[j] >= wanted) at[0] = first + j, found[0] = before, found[1] = own[j];
  sync_block();
  if (at[0] < 0) return {-1, 0, 0};
  return {at[0], found[0], found[1]};
}

// Sums by bin. Of masses the high and the low half each, since shared memory adds 32 bits at once.
struct CountBins {
  SharedArray<uint32_t> low;
  PD_DEVICE void clear(int i) const { low[i] = 0; }
  PD_DEVICE void add(int i, uint64_t) const { atomic_add(low, i, 1u); }
  PD_DEVICE uint64_t at(int i) const { return low[i]; }
};
struct MassBins {
  SharedArray<uint32_t> low, high;
  PD_DEVICE void clear(int i) const { low[i] = 0, high[i] = 0; }
  PD_DEVICE void add(int i, uint64_t weight) const {
    const uint32_t part = (uint32_t)weight, before = atomic_add(low, i, part);
    const uint32_t rest = (uint32_t)(weight >> 32) + (before + part < before ? 1u : 0u);
    if (rest) atomic_add(high, i, rest);
  }
  PD_DEVICE uint64_t at(int i) const { return (uint64_t)high[i] << 32 | low[i]; }
};

struct Count {  // as a weight
  static constexpr bool kAlike = true;
  template <class K>
  PD_DEVICE uint64_t of(K) const {
    return 1;
  }
};

// A key so that those up to it weigh `wanted` (above 0) or more, and without the last of them less; the last of all
// where all weigh less. Weights follow from a key's first 32 bits. most(w): the largest value of the w-th 32 bits from
// the highest on.
template <class K, class Bins, class Weight, class Most, class Each>
PD_DEVICE K select(const Bins &bins, uint64_t wanted, Weight weight, Most most, Each each) {
  constexpr int kWords = (int)sizeof(K) / 4;
  K prefix = 0;
  int shift = 0;
  for (int level = 0; level < 3 * kWords; level++) {
    const int word = level / 3, part = level % 3, low = part == 0 ? 21 : part == 1 ? 10 : 0;
    const int width = part == 2 ? 10 : 11;
    shift = 32 * (kWords - 1 - word) + low;
    if (most(word) >> low == 0) {
      prefix = prefix << width;
      continue;
    }
    sync_block();
    for (int i = thread_index(); i < kBins; i += kRowThreads) bins.clear(i);
    sync_block();
    each([&](K key) {
      const K rest = key >> shift;
      if (rest >> width == prefix) bins.add((int)(uint32_t)rest & ((1 << width) - 1), weight.of(key));
    });
    sync_block();
    const Crossing found = find_crossing(kBins, wanted, [&](int i) { return bins.at(i); });
    if (found.at < 0) return ~(K)0;
    prefix = prefix << width | (K)found.at;
    wanted -= found.before;
    // Where all that is left weighs alike, and without one of it the bin too little, the bin is kept whole.
    if ((Weight::kAlike || shift % 32 == 0) && found.weight - wanted < weight.of(prefix << shift)) break;
  }
  return ((prefix + 1) << shift) - 1;
}

}  // namespace pagedec
