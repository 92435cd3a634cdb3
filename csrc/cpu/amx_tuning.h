// What decides how fast linear layers are on the matrix unit, and no bit of them: sizes of what rests in which cache,
// and from how many rows on which way is taken. `cmake -DPAGEDEC_TUNING="AMX_PART_LINES=6;AMX_AHEAD=32768"` builds the
// library with others, and benchmarks/amx_sweep.py times one against another.
//
// Where nothing else is said, numbers are of a loop that does nothing but load, multiply and store, timed on Sapphire
// Rapids (L1 48 KB, L2 2 MB a core); these kernels have not been timed there. Four products (two tiles of rows by both
// halves of a panel, a line of k) take 20 ns, the four loads before them 10 from L1 and 24 from L2: two of the four
// must come from L1.
#pragma once
#include <cstdint>
#ifdef PD_WITH_OR_WITHOUT_UNIT
#error "this file is compiled once for the unit and for its emulation: name it in PAGEDEC_UNIT_SOURCES (CMakeLists.txt)"
#endif

namespace pagedec {

constexpr int64_t tuned(const char *given, int64_t usual) {
  if (*given == 'P') return usual;  // the name itself: the build says nothing of it
  int64_t n = 0;
  for (; *given; given++) {
    if (*given < '0' || *given > '9') throw "a tuned number has digits alone";
    n = n * 10 + (*given - '0');
  }
  return n;
}
#define PD_TEXT_OF(x) #x
#define PD_TEXT(x) PD_TEXT_OF(x)
#define PD_TUNED(type, name, usual) constexpr type name = (type)tuned(PD_TEXT(PD_##name), usual)

// A part of a panel, in lines of k: 9 lines are 18 KB, which stay in L1 while two tiles of rows pass (18 KB more, each
// line once), and their sums, 4 KB. Parts of 6 to 9 lines were alike, of 12 a tenth slower, a whole k of 18 a fifth.
PD_TUNED(int, AMX_PART_LINES, 9);
static_assert(AMX_PART_LINES > 0);
// Tiles whose sums rest in memory from part to part: 16 KB, and as much of the group before, which becomes y meanwhile.
PD_TUNED(int, AMX_GROUP_TILES, 8);
static_assert(AMX_GROUP_TILES > 0 && AMX_GROUP_TILES % 2 == 0, "two tiles pass the unit at once");
// All rows of a block pass a panel before the next, so that weights come from memory once; the block's x stays in L2
// meanwhile: nine tenths of it hold that and two panels, which are as large as 64 rows. 512 rows of k = 1536 fit, the
// largest that were timed.
PD_TUNED(int64_t, AMX_L2_BYTES, (2 << 20) / 10 * 9);

// One tile of rows leaves memory to the processor's own prefetching, which gave 1.2 times the read.
PD_TUNED(int, AMX_PREFETCH_MIN_ROWS, 17);
// So much of a panel is prefetched before it is its turn; where it has several groups of tiles, all of it must be.
PD_TUNED(int64_t, AMX_AHEAD, 64 * 1024);
// Rows of y at once, so that a call of an epilogue is worth it.
PD_TUNED(int, AMX_FINISH_ROWS, 4);

// Of a group of threads that share rows, for each thread there is (gemm_shares.h); not measured.
PD_TUNED(int, AMX_ROW_SPLIT_MIN_ROWS, 64);

// Measured on the unit with kernels before these: 16 rows are faster without tiles (6.8 ms against 8), 32 with them (8
// against 10.1).
PD_TUNED(int, INT8_AMX_MIN_ROWS, 24);
// Weights in blocks; not measured: with plain int8 the unit is faster from 24 on.
PD_TUNED(int, BLOCK_AMX_MIN_ROWS, 32);
// Values of k that become bytes at once: 16 KB, which stay in L1.
PD_TUNED(int64_t, BLOCK_AMX_SLICE_VALUES, 512);

}  // namespace pagedec
