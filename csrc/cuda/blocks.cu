// Weights in blocks, packed for kernels (blocks.h).
#include "cuda/blocks.h"

#include "cuda/launch.h"

namespace pagedec {
namespace {

constexpr int kThreads = 256;

// Value v of a block as it comes, without a sign; of 8 bits as a byte.
PD_DEVICE uint32_t read_value(const BlockShape &shape, const uint8_t *block, int v) {
  if (shape.kind == BlockKind::BYTES) return block[2 + v];
  if (shape.kind == BlockKind::SIX) {
    const int half = v / 128, at = v % 128;
    const uint32_t low = block[half * 64 + at % 64] >> at / 64 * 4 & 15;
    return low | (block[128 + half * 32 + at % 32] >> at / 32 * 2 & 3) << 4;
  }
  if (shape.has_scales) return block[16 + v / 64 * 32 + v % 32] >> v % 64 / 32 * 4 & 15;
  return block[shape.header / kPanelOutputs + v % (shape.values / 2)] >> v / (shape.values / 2) * 4 & 15;
}
// Whole scales of a group: of Q4_K its own and its minimum's, of Q6_K those of 16 values each.
PD_DEVICE void read_scales(const BlockShape &shape, const uint8_t *block, int group, uint8_t (&scales)[2]) {
  if (shape.kind == BlockKind::SIX) {
    scales[0] = block[192 + 2 * group], scales[1] = block[193 + 2 * group];
    return;
  }
  for (int i = 0; i < 2; i++) {
    const uint8_t *own = block + 4 + 4 * i, rest = block[12 + group % 4] >> 4 * i & 15;
    scales[i] = group < 4 ? own[group] & 63 : rest | (own[group - 4] >> 2 & 48);
  }
}

// A lane's words of a group, of up to four outputs; `blocks`: of the first, `row` bytes from the next.
PD_DEVICE void write_group(const BlockShape &shape, const uint8_t *blocks, int64_t row, int outputs, int lane,
                           int group, uint32_t *data) {
  const int first = group * X_GROUP + lane % kGroupLanes * 8;
  uint32_t high[2] = {};
  for (int tile = 0; tile < kPanelTiles; tile++) {
    const int output = 8 * tile + lane / kGroupLanes;
    uint32_t words[2] = {};
    for (int i = 0; i < 8 && output < outputs; i++)
      words[i / 4] |= read_value(shape, blocks + output * row, first + i) << i % 4 * 8;
    if (shape.kind == BlockKind::BYTES) {
      data[lane * kPanelTiles + tile] = words[0], data[(kWarp + lane) * kPanelTiles + tile] = words[1];
      continue;
    }
    data[lane * kPanelTiles + tile] = (words[0] & 0x0f0f0f0fu) | (words[1] & 0x0f0f0f0fu) << 4;
    for (int i = 0; i < 2; i++) high[i] |= (words[i] >> 4 & 0x03030303u) << 2 * tile;
  }
  if (shape.kind != BlockKind::SIX) return;
  for (int i = 0; i < 2; i++) data[kWarp * kPanelTiles + lane * 2 + i] = high[i];
}
// An output's numbers: of its block, and of a group.
PD_DEVICE void write_scales(const BlockShape &shape, const uint8_t *block, bool is_there, int output, int group,
                            uint8_t *unit, uint8_t *scales) {
  const int halves = shape.header / (2 * kPanelOutputs), at = shape.kind == BlockKind::SIX ? 208 : 0;
  for (int i = 0; i < 2 * halves && group == 0; i++)
    unit[i / 2 * 2 * kPanelOutputs + output * 2 + i % 2] = is_there ? block[at + i] : 0;
  if (!shape.has_scales) return;
  uint8_t own[2] = {};
  if (is_there) read_scales(shape, block, group, own);
  for (int i = 0; i < 2; i++) scales[i * kPanelOutputs + output] = own[i];
}

// A thread has a lane's part of a group.
PD_KERNEL(kThreads) pack_blocks_kernel(const uint8_t *blocks, int64_t n, int64_t k, BlockShape shape, char *packed) {
  const int64_t groups = k / X_GROUP, row = k / shape.values * shape.num_bytes;
  const int64_t panels = (n + kPanelOutputs - 1) / kPanelOutputs;
  const int in_unit = shape.values / X_GROUP, whole = shape.group_header + shape.group_data;
  const int64_t panel_bytes = groups / in_unit * (shape.header + in_unit * whole);
  for (int64_t i = (int64_t)block_index() * kThreads + thread_index(); i < panels * groups * kWarp;
       i += (int64_t)num_grid_blocks() * kThreads) {
    const int lane = (int)(i % kWarp);
    const int64_t group = i / kWarp % groups, panel = i / kWarp / groups;
    const int64_t outputs = lower(n - panel * kPanelOutputs, (int64_t)kPanelOutputs);
    const uint8_t *from = blocks + panel * kPanelOutputs * row + group / in_unit * shape.num_bytes;
    const GroupPlace at = group_place(shape, packed + panel * panel_bytes, group);
    write_group(shape, from, row, (int)outputs, lane, (int)(group % in_unit), (uint32_t *)at.data);
    write_scales(shape, from + lane * row, lane < outputs, lane, (int)(group % in_unit), (uint8_t *)at.unit,
                 (uint8_t *)at.scales);
  }
}

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int64_t pd_packed_blocks_bytes(int64_t n, int64_t k, int32_t format) {
  if (check_size("pd_packed_blocks_bytes", n, k) || check_blocks("pd_packed_blocks_bytes", k, format)) return -1;
  return (n + kPanelOutputs - 1) / kPanelOutputs * block_shape(format).panel_bytes(k);
}
int pd_pack_blocks(pd_context *context, const void *blocks, int64_t n, int64_t k, int32_t format, void *packed) {
  const char *name = "pd_pack_blocks";
  if (!context) return fail("%s: context is NULL", name);
  if (!blocks) return fail("%s: blocks is NULL", name);
  if (check_pack(name, context, blocks, packed) || check_size(name, n, k) || check_blocks(name, k, format)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("%s: another thread works in this context", name);
  return launch(*context, name, pack_blocks_kernel, kThreads, (const uint8_t *)blocks, n, k, block_shape(format),
                (char *)packed);
}
}
