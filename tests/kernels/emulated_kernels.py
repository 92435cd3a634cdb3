"""Kernels for the tests of the emulated CUDA device: right ones, and such as do what no kernel may."""

from tests.kernels import emulated_warpgroups

_OF_WARPS = """
#include <algorithm>
#include "cuda/emulate/memory.h"
#include "cuda/matrix.h"
using namespace pagedec;
static int lane() { return thread_index() % kWarp; }

void shuffled(float *out) { out[thread_index()] = shuffle(10.0f * thread_index(), (lane() + 1) % kWarp); }
void crossed(float *out) { out[thread_index()] = shuffle_xor((float)thread_index(), 5); }
void voted(float *out) { out[thread_index()] = (float)ballot(lane() % 3 == 0); }
void summed(float *out) { out[thread_index()] = block_sum<4>((float)thread_index()); }
void begins(float *out) {
  SHARED_ARRAY(float, values, 128);
  out[thread_index()] = values[thread_index()];
}
void reversed(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = (float)thread_index();
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
}
void halved(float *out) {  // bf16 beside bf16: threads of one word, and no race
  SHARED_ARRAY(bf16, values, 128);
  values[thread_index()] = from_float<bf16>((float)thread_index());
  sync_block();
  out[thread_index()] = to_float(values[thread_index() ^ 1]);
}
void turned(float *out) {  // within a warp, whose meetings order what its lanes do
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = (float)thread_index();
  sync_warp();
  const float next = values[thread_index() / kWarp * kWarp + (lane() + 1) % kWarp];
  sync_warp();
  values[thread_index()] = next;
  out[thread_index()] = next;
}
void counted(float *out) {
  SHARED_ARRAY(uint32_t, sums, 2);
  if (thread_index() < 2) sums[thread_index()] = 0;
  sync_block();
  atomic_add(sums, 0, (uint32_t)thread_index());
  atomic_or(sums, 1, 1u << lane());
  sync_block();
  out[thread_index()] = (float)(sums[0] + (sums[1] == 0xffffffffu));
}
void drawn(float *out) { out[0] = std::fmod(out[0] * 3.0f + (float)thread_index(), 65521.0f); }  // says in which order
alignas(16) float given[256];  // memory of the device
void copied(float *out) {  // two groups, the second of which is not waited for at first; a lane brings zeros
  LAUNCHED_SHARED(memory);
  const SharedArray<float> values = memory.part<float>(64, 512);
  for (int i = 0; i < 2; i++) {
    if (thread_index() < 32) begin_copy(values.at(4 * lane() + 128 * i), given + 4 * lane() + 128 * i, lane() != 5);
    end_copy_group();
  }
  await_copies<1>();
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
  await_copies<0>();
  sync_block();
  out[thread_index()] = out[thread_index()] + values[128 + thread_index()];
}
void multiplied(float *out) {  // 16 x 16 by 16 x 8: a[i][k] = i + k, b[n][k] = n - k, of which lanes have what PTX says
  SHARED_ARRAY(bf16, a, 256);
  SHARED_ARRAY(bf16, b, 256);
  for (int i = lane(); i < 256; i += 32) {
    a[i] = from_float<bf16>((float)(i / 16 + i % 16));
    b[i] = from_float<bf16>((float)(i / 16 - i % 16));
  }
  sync_warp();
  float d[4] = {0.5f, 0.5f, 0.5f, 0.5f};
  uint32_t of_a[4], of_b[4];
  load_matrices(of_a, a.at(lane() % 16 * 16 + lane() / 16 * 8));
  load_matrices(of_b, b.at((lane() / 16 * 8 + lane() % 8) * 16 + lane() / 8 % 2 * 8));
  multiply_add<bf16>(d, of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; i++) out[(lane() / 4 + i / 2 * 8) * 8 + 2 * (lane() % 4) + i % 2] = d[i];
}
void transposed(float *out) {  // each lane two values of a column
  SHARED_ARRAY(bf16, x, 256);
  for (int i = lane(); i < 256; i += 32) x[i] = from_float<bf16>((float)i);
  sync_warp();
  uint32_t r[4];
  load_transposed(r, x.at(lane() * 8));
  for (int i = 0; i < 4; i++) out[i * 32 + lane()] = to_float(bf16{(uint16_t)(r[i] >> 16)});
}
void rounded(float *out) {  // 1 and eight times 2^-25: each is cut off before they are added
  const uint32_t ones = 0x3f803f80u, tiny = 0x33003300u, a[4] = {ones, ones, 0, 0};
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  multiply_add<bf16>(d, a, tiny, 0);
  out[thread_index()] = d[0];
}
void rounded_fp16(float *out) {  // the same of 0.5 times fp16's least number, which is not lost where it stands alone
  const uint32_t halves = 0x38003800u, tiny = 0x00010001u, a[4] = {halves, halves, 0, 0};
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f}, alone[4] = {};
  multiply_add<fp16>(d, a, tiny, 0);
  multiply_add<fp16>(alone, a, tiny, 0);
  out[thread_index()] = d[0] + alone[0];
}
void some_leave(float *out) {  // who has ended is not waited for
  out[thread_index()] = 1.0f;
  if (thread_index() >= 64) return;
  sync_block();
  out[thread_index()] = 2.0f;
}

void read_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  out[thread_index()] = values[(thread_index() + 32) % 128];
}
void written_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  sync_block();
  const float other = values[(thread_index() + 32) % 128];
  values[thread_index()] = other + 1.0f;
}
void written_twice(float *out) {
  SHARED_ARRAY(float, values, 4);
  values[lane() % 4] = 1.0f;
}
void shuffled_between(float *out) {  // a shuffle orders no memory
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = shuffle_xor((float)thread_index(), 1);
  out[thread_index()] = shuffle_xor((float)ballot(true), 1);
  out[thread_index()] = values[thread_index() ^ 1];
}
void multiplied_between(float *out) {  // nor do matrices that are loaded and multiplied
  SHARED_ARRAY(bf16, a, 256);
  SHARED_ARRAY(bf16, b, 256);
  for (int i = lane(); i < 256; i += 32) a[i] = from_float<bf16>(1.0f);
  sync_warp();
  b[lane()] = a[lane()];
  uint32_t of_a[4];
  float d[4] = {};
  load_matrices(of_a, a.at(lane() * 8));
  multiply_add<bf16>(d, of_a, of_a[0], of_a[1]);
  out[thread_index()] = d[0] + to_float(b[lane() ^ 1]);
}
void lanes_race(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  out[thread_index()] = values[thread_index() ^ 1];
}
void warps_race(float *out) {  // warps have met, each by itself
  SHARED_ARRAY(float, values, 1);
  if (thread_index() == 0) values[0] = 1.0f;
  sync_warp();
  out[thread_index()] = values[0];
}
void counted_too_soon(float *out) {  // before all see that it begins with 0
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  atomic_add(sums, 0, 1u);
}
void looked_at_too_soon(float *out) {
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  sync_block();
  atomic_add(sums, 0, 1u);
  out[thread_index()] = (float)sums[0];
}
void changed_while_read(float *out) {
  SHARED_ARRAY(uint32_t, sums, 1);
  if (thread_index() == 0) sums[0] = 0;
  sync_block();
  if (thread_index() != 77) out[thread_index()] = (float)sums[0];
  else atomic_add(sums, 0, 1u);
}
void outside(float *out) {
  SHARED_ARRAY(float, values, 64);
  values[thread_index()] = 1.0f;
}
void half_wait(float *out) {
  if (lane() < 16) sync_block();
  else sync_warp();
}
void lanes_left(float *out) {
  if (lane() == 7) return;
  sync_warp();
}
void copied_too_soon(float *out) {
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(lane() * 4), given, true);
  end_copy_group();
  out[thread_index()] = values[lane() * 4];
  await_copies<0>();
}
void copied_over(float *out) {
  SHARED_ARRAY(float, values, 128);
  values[thread_index()] = 1.0f;
  sync_block();
  out[thread_index()] = values[127 - thread_index()];
  if (thread_index() < 32) begin_copy(values.at(lane() * 4), given, true);
  end_copy_group();
  await_copies<0>();
}
void copies_left(float *out) {
  SHARED_ARRAY(float, values, 128);
  if (thread_index() < 32) begin_copy(values.at(lane() * 4), given, true);
}
void copied_askew(float *out) {
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(1), given, true);
}
void row_askew(float *out) {
  SHARED_ARRAY(bf16, values, 512);
  uint32_t r[4];
  load_matrices(r, values.at(lane() + 1));
}
void zeros_askew(float *out) {  // a device may look at the address even so
  SHARED_ARRAY(float, values, 128);
  begin_copy(values.at(lane() * 4), given + 1, false);
}
struct alignas(16) Four { float values[4]; };
void loaded_whole(float *out) { out[thread_index()] = load_whole<Four>(given + 4 * lane()).values[thread_index() % 4]; }
void loaded_askew(float *out) { out[thread_index()] = load_whole<Four>(given + 4 * lane() + 2).values[0]; }
void eight_askew(float *out) {  // in the device's memory, as this processor would read it
  out[thread_index()] = (float)((const uint64_t *)(given + 1))[lane()];
}
void shared_askew(float *out) {
  LAUNCHED_SHARED(memory);
  out[thread_index()] = memory.part<double>(4, 32)[lane()];
}
void shifted_too_far(float *out) { out[thread_index()] = (float)(1u << (thread_index() + 1)); }
void overflown(float *out) { out[thread_index()] = (float)((thread_index() + 1) * (1 << 30)); }
void no_integer(float *out) { out[thread_index()] = (float)(int)(given[255] * 1e9f * thread_index()); }
void outside_of_registers(float *out) {
  float own[4] = {};
  for (int i = 0; i < 4; i++) own[(thread_index() + i) % 5] = 1.0f;
  out[thread_index()] = own[0];
}
void both_too_much(float *out) {  // no more than each may be alone
  LAUNCHED_SHARED(memory);
  SHARED_ARRAY(float, values, 12 << 10);
  values[0] = memory.part<float>(0, 1)[0];
}
void met_elsewhere(float *out) {
  if (lane() < 16) out[thread_index()] = shuffle(1.0f, lane());
  else sync_warp();
}
void launched_with_less(float *out) {
  LAUNCHED_SHARED(memory);
  memory.part<float>(4000, 25)[0] = 1.0f;
}
void not_awaited(float *out) {  // as a launch that may begin early looks at its threads' end
  if (thread_index() != 70) await_kernels();
  emulate::check_awaited();
}
float *kept;  // memory of the device: 1 when kernels in front began, 2 when they are through
void found_early(float *out) {
  const float before = kept[thread_index()];
  await_kernels();
  out[thread_index()] = before + 16.0f * kept[thread_index()];
  kept[thread_index()] = 2.0f;
}
void copied_early(float *out) {
  SHARED_ARRAY(float, values, 128);
  if (thread_index() < 32) begin_copy(values.at(4 * lane()), kept + 4 * lane(), true);
  end_copy_group();
  await_kernels();
  await_copies<0>();
  sync_block();
  out[thread_index()] = values[thread_index()];
}
void written_early(float *out) {
  kept[thread_index()] = 2.0f;
  await_kernels();
}
#define EARLY_KERNELS(X) X(found_early) X(copied_early) X(written_early)
void too_much(float *out) { SHARED_ARRAY(float, values, 1 << 20); values[0] = 1.0f; }

#define KERNELS(X)                                                                                         \\
  X(shuffled) X(crossed) X(voted) X(summed) X(begins) X(reversed) X(halved) X(turned) X(counted) X(drawn)    \\
  X(copied) X(multiplied) X(transposed) X(rounded) X(copied_too_soon) X(copied_over) X(copies_left)          \\
  X(copied_askew) X(row_askew) X(zeros_askew) X(loaded_whole) X(loaded_askew) X(met_elsewhere)               \\
  X(launched_with_less) X(rounded_fp16) X(eight_askew) X(shared_askew) X(shifted_too_far) X(overflown)         \\
  X(no_integer) X(outside_of_registers) X(both_too_much)                                                     \\
  X(some_leave) X(counted_too_soon) X(looked_at_too_soon) X(changed_while_read)                              \\
  X(read_too_soon) X(written_too_soon) X(written_twice) X(lanes_race) X(warps_race) X(outside) X(half_wait)  \\
  X(lanes_left) X(too_much) X(shuffled_between) X(multiplied_between) X(not_awaited)"""
_RUN = """
extern "C" const char *run(const char *name, int blocks, int threads, uint64_t seed, float *out) {
  static std::string problem;
  problem = "no such kernel";
  for (int i = 0; i < 256; i++) given[i] = (float)i;
  give_operands();
  emulate::set_seed(seed);
#define RUN(kernel, before) \\
  if (!strcmp(name, #kernel)) problem = emulate::run(blocks, threads, 4096, [&] { kernel(out); }, before);
#define X(kernel) RUN(kernel, nullptr)
  KERNELS(X)
  GROUP_KERNELS(X)
#undef X
  const emulate::Opened opened;
  kept = (float *)emulate::allocate(128 * sizeof(float));
  std::fill(kept, kept + 128, 1.0f);
  emulate::Before before;
  std::fill(kept, kept + 128, 2.0f);
#define X(kernel) RUN(kernel, &before)
  EARLY_KERNELS(X)
  emulate::release(kept);
  return problem.c_str();
}
"""

SOURCE = _OF_WARPS + emulated_warpgroups.SOURCE + _RUN
