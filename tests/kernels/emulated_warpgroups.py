"""Kernels of warpgroups for the tests of the emulated CUDA device (emulated_kernels.py)."""

SOURCE = """
#include "cuda/warpgroup.h"
// A [64][16], then B [64][16], as operands lie: a[i][k] = i % 8 + k, b[n][k] = n - k
alignas(16) bf16 multiplied_by[2048];
alignas(64) TensorMap map_of_both;
static void give_operands() {
  emulate::map_tensor(map_of_both, multiplied_by, {64, 16, 2, 1}, {128, 2048, 0}, {64, 16, 1, 1}, false);
  for (int i = 0; i < 2048; i++) {
    const int row = i % 1024 / 128 * 8 + i % 64 / 8, k = i % 128 / 64 * 8 + i % 8;
    multiplied_by[i] = from_float<bf16>((float)(i < 1024 ? row % 8 + k : row - k));
  }
}
struct Stage {  // and whether it is there
  SharedArray<char> bytes;
  Barriers barriers;
};
static Stage staged(const SharedMemory &memory, const Barriers &barriers) {
  const Stage stage{memory.part<char>(0, 4096), barriers};
  if (thread_index() == 0) {
    begin_barrier(barriers, 0, 1);
    begin_barrier(barriers, 1, 128);
    show_barriers();
  }
  sync_block();
  return stage;
}
static void bring(const Stage &stage) {  // as a tensor of two rows of 32 matrices
  if (thread_index() > 0) return;
  arrive_expecting(stage.barriers, 0, 4096);
  for (int i = 0; i < 2; i++) begin_tensor_copy(stage.bytes.at(2048 * i), map_of_both, 0, 0, i, 0, stage.barriers, 0);
}
static void multiply(const Stage &stage, float (&sums)[32], int offset = 2048, bool adds = false) {
  const uint32_t at = shared_address(stage.bytes.at(0));
  begin_products();
  multiply_group<bf16>(sums, operand(at, 128, 256), operand(at + offset, 128, 256), adds);
  end_products();
}
static void tell(float *out, const float (&sums)[32]) {  // the first of a row, the last of the one eight below
  out[thread_index()] = sums[0] + 4096.0f * sums[31];
}
#define STAGED(name)                   \\
  LAUNCHED_SHARED(name##_memory);       \\
  SHARED_ARRAY(uint64_t, name##_of, 2); \\
  const Stage name = staged(name##_memory, name##_of);  \\
  float sums[32] = {}

void grouped(float *out) {  // twice the product
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  multiply(stage, sums, 2048, true);
  await_products<0>();
  tell(out, sums);
}
void sums_too_soon(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  tell(out, sums);
  await_products<0>();
}
void sums_of_one_group_too_soon(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  multiply(stage, sums);
  await_products<1>();
  tell(out, sums);
  await_products<0>();
}
void copied_again(float *out) {  // when all have said that they have multiplied
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  await_products<0>();
  arrive(stage.barriers, 1);
  if (thread_index() == 0) await_barrier(stage.barriers, 1, 0);
  bring(stage);
  await_barrier(stage.barriers, 0, 1);
  multiply(stage, sums, 2048, true);
  await_products<0>();
  tell(out, sums);
}
void heard_of_in_meetings(float *out) {  // what one warp has waited for; and that all have multiplied
  STAGED(stage);
  bring(stage);
  if (thread_index() < 32) await_barrier(stage.barriers, 0, 0);
  sync_block();
  multiply(stage, sums);
  await_products<0>();
  sync_group();
  bring(stage);
  await_barrier(stage.barriers, 0, 1);
  multiply(stage, sums, 2048, true);
  await_products<0>();
  tell(out, sums);
}
void reversed_in_group(float *out) {
  SHARED_ARRAY(float, values, 128);
  for (int i = 0; i < 2; i++) {
    values[thread_index()] = (float)thread_index();
    sync_group();
    out[thread_index()] = values[127 - thread_index()];
    sync_group();
  }
}

void groups_race(float *out) {
  SHARED_ARRAY(float, values, 256);
  values[thread_index()] = 1.0f;
  sync_group();
  out[thread_index() % 128] = values[(thread_index() + 128) % 256];
}
void half_a_group(float *out) {
  if (thread_index() < 64) sync_group();
}
void not_waited_for(float *out) {
  STAGED(stage);
  bring(stage);
  multiply(stage, sums);
  await_products<0>();
}
void nothing_there(float *out) {
  STAGED(stage);
  multiply(stage, sums);
  await_products<0>();
}
static void copy_by_threads(const Stage &stage) {
  for (int i = thread_index(); i < 256; i += 128) begin_copy(stage.bytes.at(16 * i), multiplied_by + 8 * i, true);
  end_copy_group();
}
void copied_by_threads(float *out) {  // to where a tensor was
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  copy_by_threads(stage);
  await_copies<0>();
  sync_block();
  multiply(stage, sums);
  await_products<0>();
}
void multiplied_and_copied_to_by_threads(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  copy_by_threads(stage);
  await_products<0>();
}
void copied_to_twice(float *out) {  // by threads, and before they are through as a tensor
  STAGED(stage);
  copy_by_threads(stage);
  sync_block();
  bring(stage);
  await_copies<0>();
}
void multiplied_and_copied_to(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  bring(stage);
  await_products<0>();
}
void not_said_to_be_free(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
  await_products<0>();
  sync_warp();
  bring(stage);
}
void different_operands(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums, thread_index() < 32 ? 0 : 2048);
  await_products<0>();
}
void products_left(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums);
}
void not_begun(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  const uint32_t at = shared_address(stage.bytes.at(0));
  multiply_group<bf16>(sums, operand(at, 128, 256), operand(at + 2048, 128, 256), false);
  end_products();
  await_products<0>();
}
void operand_outside(float *out) {
  STAGED(stage);
  bring(stage);
  await_barrier(stage.barriers, 0, 0);
  multiply(stage, sums, 1 << 15);
  await_products<0>();
}
void tensor_left(float *out) {
  STAGED(stage);
  bring(stage);
}
void tensor_askew(float *out) {
  STAGED(stage);
  if (thread_index() == 0) begin_tensor_copy(stage.bytes.at(16), map_of_both, 0, 0, 0, 0, stage.barriers, 0);
}
void never_there(float *out) {
  STAGED(stage);
  if (thread_index() == 0) arrive_expecting(stage.barriers, 0, 64);
  await_barrier(stage.barriers, 0, 0);
}
void one_too_many(float *out) {
  STAGED(stage);
  if (thread_index() == 0) arrive_expecting(stage.barriers, 0, 64);
  sync_block();
  arrive(stage.barriers, 0);
}
void begun_meanwhile(float *out) {
  SHARED_ARRAY(uint64_t, barriers, 1);
  if (thread_index() == 0) begin_barrier(barriers, 0, 128);
  arrive(barriers, 0);
}
#define GROUP_KERNELS(X)                                                                                      \\
  X(grouped) X(sums_too_soon) X(sums_of_one_group_too_soon) X(copied_again) X(heard_of_in_meetings)           \\
  X(reversed_in_group) X(groups_race) X(half_a_group) X(not_waited_for) X(nothing_there) X(copied_by_threads) \\
  X(multiplied_and_copied_to_by_threads) X(copied_to_twice) X(multiplied_and_copied_to)                       \\
  X(not_said_to_be_free) X(different_operands) X(products_left) X(begun_meanwhile) X(not_begun)               \\
  X(operand_outside) X(tensor_left) X(tensor_askew) X(never_there) X(one_too_many)
"""
