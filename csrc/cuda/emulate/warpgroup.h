// What warpgroups have on the emulated device: barriers that count copies, copies of parts of tensors by an engine of
// its own, which are over when it pleases it, and products of four warps whose operands lie in shared memory.
//
// What can be got wrong with them is a fault: operands whose copy the warp has not waited for, or which threads have
// copied, or outside shared memory; a copy to where a product that has not been waited for still reads, or has read and
// nobody has said so through a barrier; sums that are looked at too soon are NaN; warps of a group that multiply
// different things; copies and products that nobody waits for; a barrier that its thread has begun and not shown by a
// meeting.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "cuda/emulate/machine.h"
#include "cuda/tensor_map.h"

namespace pagedec::emulate {

constexpr int GROUP = 4 * WARP;

uint32_t shared_address(const void *);

// A barrier is eight bytes of shared memory, known by where it is. A phase ends with `count` arrivals, and with as many
// bytes as were expected in it.
void begin_barrier(const void *barrier, int count);
void arrive(const void *barrier, int bytes = 0);  // and so many more are expected
void await_barrier(const void *barrier, uint32_t parity);  // of a phase
// As the driver makes one: false where it would not.
bool map_tensor(TensorMap &, const void *, const Extents &, const Strides &, const Extents &part, bool is_swizzled);
void begin_tensor_copy(char *to, const TensorMap &, const std::array<int, 4> &at, const void *barrier);

// Products: m64nNk16, whose operands are matrices of 8 rows x 16 bytes, 128 bytes in a row each, or swizzled rows.
using Value = float (*)(uint16_t bits);
void begin_products();  // of sums that are in registers now
void multiply_group(float *sums, int columns, uint64_t of_a, uint64_t of_b, bool adds, Value);
void end_products();
void await_products(int num_left);

// For the machine: what else a block has under way.
namespace under_way {
void begin_block(int num_threads);
bool has_copies();
void bring_one(bool is_needed, uint64_t drawn);  // of those; as it is drawn, none
void end_thread();
void meet(int first_warp, int num_warps);  // so that each knows what all have done
std::string end_block();  // empty, or what is wrong
void begin_copy(const char *to, int bytes);  // by this thread, of 16 bytes or fewer
void forget(const char *to, int bytes);      // it has waited for that by itself: it is not for products
}  // namespace under_way

}  // namespace pagedec::emulate
