// The matrix unit in plain C++, one function an instruction, as Intel's manual has them (Software Developer's Manual,
// volume 2: LDTILECFG and the like): kernels written for it run, slowly, on a processor that has none. What a processor
// answers with #GP or #UD ends the process here too, and says why.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace pagedec::emulation {

constexpr int TILES = 8, ROWS = 16, BYTES = 64, COLUMNS = BYTES / 4;  // palette 1

struct Tile {
  int rows, bytes;  // 0 and 0: not configured
  alignas(64) uint8_t data[ROWS][BYTES];  // zero behind rows and bytes
};
struct Unit {
  bool configured;
  Tile tiles[TILES];
};
inline constinit thread_local Unit unit{};

[[noreturn, gnu::cold, gnu::format(printf, 2, 3)]] inline void refuse(const char *instruction, const char *format,
                                                                      ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "pagedec: the emulated matrix unit refuses %s: ", instruction);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  abort();
}

inline Tile &configured(const char *instruction, int tile) {
  if (!unit.configured) refuse(instruction, "no shapes are loaded (#UD)");
  if (tile < 0 || tile >= TILES) refuse(instruction, "there is no tile %d (#UD)", tile);
  Tile &t = unit.tiles[tile];
  if (t.rows == 0) refuse(instruction, "tile %d has no shape (#UD)", tile);
  return t;
}

inline void tilerelease() { unit = {}; }

// memory: 64 bytes: palette, start row, 14 reserved, 16 x bytes of a row (uint16), 16 x rows (uint8).
inline void ldtilecfg(const void *memory) {
  const char *const name = "ldtilecfg";
  uint8_t in[64];
  memcpy(in, memory, 64);
  if (in[0] == 0) return tilerelease();
  if (in[0] != 1) refuse(name, "the palette is %d; there is 1 (#GP)", in[0]);
  if (in[1] != 0) refuse(name, "the start row is %d; every instruction begins at row 0 here", in[1]);
  for (int i = 2; i < 16; i++)
    if (in[i]) refuse(name, "reserved byte %d is %d (#GP)", i, in[i]);
  Unit loaded{};
  for (int i = 0; i < 16; i++) {
    uint16_t bytes;
    memcpy(&bytes, in + 16 + i * 2, 2);
    const int rows = in[48 + i];
    if (i >= TILES && (rows || bytes)) refuse(name, "tile %d is given a shape; there are %d tiles (#GP)", i, TILES);
    if (rows > ROWS) refuse(name, "tile %d is given %d rows; it has %d (#GP)", i, rows, ROWS);
    if (bytes > BYTES) refuse(name, "tile %d is given rows of %d bytes; they have %d (#GP)", i, bytes, BYTES);
    if (!rows != !bytes) refuse(name, "tile %d is given %d rows of %d bytes (#GP)", i, rows, bytes);
    if (i < TILES) loaded.tiles[i].rows = rows, loaded.tiles[i].bytes = bytes;
  }
  loaded.configured = true;
  unit = loaded;
}

inline void tilezero(int tile) {
  Tile &t = configured("tilezero", tile);
  memset(t.data, 0, sizeof t.data);
}

inline void tileloadd(int tile, const void *memory, int64_t stride) {
  Tile &t = configured("tileloadd", tile);
  memset(t.data, 0, sizeof t.data);
  for (int r = 0; r < t.rows; r++) memcpy(t.data[r], (const char *)memory + r * stride, t.bytes);
}

inline void tilestored(int tile, void *memory, int64_t stride) {
  const Tile &t = configured("tilestored", tile);
  for (int r = 0; r < t.rows; r++) memcpy((char *)memory + r * stride, t.data[r], t.bytes);
}

// What a product's operands must be: sum[rows][columns] += x[rows][k] w[k][columns], k and columns in words of 4 bytes.
inline void check_product(const char *name, int sum, int x, int w) {
  const Tile &c = configured(name, sum), &a = configured(name, x), &b = configured(name, w);
  if (sum == x || sum == w || x == w) refuse(name, "tiles %d, %d, %d are not three (#UD)", sum, x, w);
  for (int tile : {sum, x, w})
    if (unit.tiles[tile].bytes % 4)
      refuse(name, "rows of tile %d have %d bytes, not whole words (#UD)", tile, unit.tiles[tile].bytes);
  if (a.rows != c.rows) refuse(name, "tile %d has %d rows, the sums in tile %d have %d (#UD)", x, a.rows, sum, c.rows);
  if (a.bytes / 4 != b.rows)
    refuse(name, "tile %d has %d words a row, tile %d has %d rows (#UD)", x, a.bytes / 4, w, b.rows);
  if (b.bytes != c.bytes)
    refuse(name, "tile %d has %d bytes a row, the sums in tile %d have %d (#UD)", w, b.bytes, sum, c.bytes);
}

// The unit's own rounding, whatever the thread's: to nearest even, denormals are zero on the way in and out, no
// exception is noted.
class OwnRounding {
 public:
  OwnRounding() {
    const uint32_t own = 0x9fc0;  // flush to zero, denormals are zeros, exceptions masked
    asm volatile("stmxcsr %0" : "=m"(before_) : : "memory");
    asm volatile("ldmxcsr %0" : : "m"(own) : "memory");
  }
  ~OwnRounding() { asm volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }

 private:
  uint32_t before_;
};

inline float to_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Of each sum: the even and the odd products in order, each product added unrounded; both to each other; that to what
// was there.
inline __attribute__((noinline)) void tdpbf16ps(int sum, int x, int w) {
  check_product("tdpbf16ps", sum, x, w);
  const OwnRounding rounding;
  Tile &c = unit.tiles[sum];
  const Tile &a = unit.tiles[x], &b = unit.tiles[w];
  uint32_t words[ROWS][COLUMNS], row[COLUMNS];
  float even[ROWS][COLUMNS], odd[ROWS][COLUMNS], old[COLUMNS];
  memcpy(words, b.data, sizeof words);
  for (int k = 0; k < b.rows; k++)
    for (int n = 0; n < COLUMNS; n++)
      even[k][n] = to_float(words[k][n] << 16), odd[k][n] = to_float(words[k][n] & 0xffff0000);
  for (int m = 0; m < c.rows; m++) {
    float first[COLUMNS] = {}, second[COLUMNS] = {};
    memcpy(row, a.data[m], sizeof row);
    for (int k = 0; k < b.rows; k++) {
      const float x0 = to_float(row[k] << 16), x1 = to_float(row[k] & 0xffff0000);
      for (int n = 0; n < COLUMNS; n++) {
        first[n] = __builtin_fmaf(x0, even[k][n], first[n]);
        second[n] = __builtin_fmaf(x1, odd[k][n], second[n]);
      }
    }
    memcpy(old, c.data[m], sizeof old);
    for (int n = 0; n < COLUMNS; n++) old[n] += first[n] + second[n];
    memcpy(c.data[m], old, c.bytes);
  }
}

// Bytes of x are signed, of w unsigned; exact, but for the sum's 32 bits.
inline __attribute__((noinline)) void tdpbsud(int sum, int x, int w) {
  check_product("tdpbsud", sum, x, w);
  Tile &c = unit.tiles[sum];
  const Tile &a = unit.tiles[x], &b = unit.tiles[w];
  typedef uint32_t Words __attribute__((vector_size(BYTES)));
  Words row[ROWS], sums;  // of w; of what is not there, zeros
  memcpy(row, b.data, sizeof row);
  for (int m = 0; m < c.rows; m++) {
    memcpy(&sums, c.data[m], sizeof sums);
    for (int k = 0; k < b.rows; k++)
      for (int i = 0; i < 4; i++) sums += (uint32_t)(int8_t)a.data[m][k * 4 + i] * (row[k] >> 8 * i & 0xff);
    memcpy(c.data[m], &sums, c.bytes);
  }
}

}  // namespace pagedec::emulation
