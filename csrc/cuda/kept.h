// The tokens of a row that may be drawn: what top_k, top_p and min_p leave of it is a beginning of the row's order, so
// it is one order key (the last one kept) and one distance; a short beginning is also there as a list.
#pragma once
#include "cuda/noise.h"
#include "cuda/select.h"

namespace pagedec {

constexpr int kFirstTry = 256;  // tokens among which the end of top_p is looked for first

struct Room {  // shared memory of a row at a time
  SharedArray<uint64_t> list;
  int size;  // of the list: a power of two, kRowThreads or more
  MassBins bins;
};

struct Cuts {
  int32_t top_k;
  float temperature, top_p, min_p;
  int32_t always;  // so many tokens are kept at each cut, however little they weigh
};
PD_DEVICE Cuts cuts_of(const pd_draw &draw) { return {draw.top_k, draw.temperature, draw.top_p, draw.min_p, 1}; }

struct Kept {
  float inverse_temperature, least;  // least distance (min_p)
  uint64_t last, sure;               // the last key kept; up to which keys are kept however far they lie
  int num_listed;                    // keys in the room's list, with all that are kept; -1: they are not there

  PD_DEVICE bool keeps(uint64_t key, float distance) const {
    return key <= last && (distance >= least || key <= sure) && distance > kMinusInf;
  }
};

// The key with which the mass of the row's keys up to `limit` reaches top_p; the list has the row's first `n` keys.
PD_DEVICE uint64_t end_of_nucleus(const Row &row, const Mass &mass, float top_p, uint64_t limit, int n,
                                  const Room &room) {
  uint64_t sum = 0;
  if (n > 0 && limit <= room.list[n - 1]) {
    for (int i = thread_index(); i < n; i += kRowThreads) sum += room.list[i] <= limit ? mass.of(room.list[i]) : 0;
  } else {
    row.each([&](uint64_t key) { sum += key <= limit ? mass.of(key) : 0; });
  }
  const uint64_t share = (uint64_t)ceil((double)top_p * (double)block_total(sum)), wanted = share > 0 ? share : 1;
  if (n > 0) {
    const Crossing found = find_crossing(n, wanted, [&](int i) { return mass.of(room.list[i]); });
    if (found.at >= 0) return room.list[found.at];
  }
  const auto most = [&](int word) { return word == 0 ? ~0u : (uint32_t)(row.vocab - 1); };
  return select<uint64_t>(room.bins, wanted, mass, most, [&](auto visit) { row.each(visit); });
}

PD_DEVICE Kept keep(const Row &row, const Cuts &cuts, const Room &room) {
  const float inverse = quotient(1.0f, cuts.temperature);
  Kept kept{inverse < kLargest ? inverse : kLargest, kMinusInf, kNoKey, 0, -1};
  if (cuts.min_p > 0.0f) kept.least = (float)log((double)cuts.min_p);
  const int64_t always = cuts.always < row.vocab ? cuts.always : row.vocab;
  const int64_t top_k = cuts.top_k > always ? cuts.top_k : always;
  const bool cuts_count = cuts.top_k > 0 && top_k < row.vocab, cuts_mass = cuts.top_p < 1.0f;
  const bool spares = always > 1 && (cuts_mass || cuts.min_p > 0.0f);
  if (!cuts_count && !cuts_mass && !spares) return kept;
  const auto each = [&](auto visit) { row.each(visit); };
  int64_t num_first = cuts_count ? top_k : kFirstTry > always ? kFirstTry : always;
  num_first = num_first < row.vocab ? num_first : row.vocab;
  const int n = collect_first(room.list, room.size, num_first, row.own, each);
  for (int cut = 0; cut < 2; cut++) {  // one place where keys are counted, for both
    const int64_t number = cut == 0 ? always : top_k;
    if (!(cut == 0 ? spares : cuts_count)) continue;
    uint64_t end;
    if (number <= n) {
      end = room.list[number - 1];
    } else {
      const auto most = [&](int word) { return word == 0 ? ~0u : (uint32_t)(row.vocab - 1); };
      end = select<uint64_t>(room.bins, (uint64_t)number, Count{}, most, each);
    }
    (cut == 0 ? kept.sure : kept.last) = end;
  }
  if (cuts_mass) {
    const Mass mass(row.top, kept.inverse_temperature, row.vocab);
    const uint64_t end = end_of_nucleus(row, mass, cuts.top_p, kept.last, n, room);
    kept.last = end > kept.sure ? end : kept.sure;
  }
  if (n > 0 && kept.last <= room.list[n - 1]) kept.num_listed = n;
  return kept;
}

// visit(token, logit, distance, noise) of each of this thread's tokens that is kept.
template <class Visit>
PD_DEVICE void each_drawn(const Row &row, const Kept &kept, const Room &room, const NoiseKey &noise, Visit visit) {
  if (kept.num_listed >= 0) {
    for (int i = thread_index(); i < kept.num_listed; i += kRowThreads) {
      const uint64_t key = room.list[i];
      const float x = key_value(key), d = distance_of(x, row.top, kept.inverse_temperature);
      const int32_t token = key_token(key);
      if (kept.keeps(key, d)) visit(token, x, d, gumbel_of(philox(noise, (uint32_t)token / 4).of(token)));
    }
    return;
  }
  // Four tokens at a time, whose words are made together.
  PD_ROLLED
  for (int64_t first = 4 * thread_index(); first < row.vocab; first += 4 * kRowThreads) {
    const int64_t stop = first + 4 < row.vocab ? first + 4 : row.vocab;
    const Words words = philox(noise, (uint32_t)(first / 4));
    for (int64_t token = first; token < stop; token++) {
      const uint64_t key = order_key(row.x[token], token);
      const float x = key_value(key), d = distance_of(x, row.top, kept.inverse_temperature);
      if (kept.keeps(key, d)) visit((int32_t)token, x, d, gumbel_of(words.of((int32_t)token)));
    }
  }
}

}  // namespace pagedec
