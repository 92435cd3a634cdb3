// Linear layers of more than few rows in bf16 and fp16 on devices of compute capability 9.0: tiles of outputs x
// rows, of which warpgroups have 64 outputs each. Their products read W and x in shared memory, whereto another group
// copies them, a few stages ahead and over the ends of tiles.
//
// Bits     are those of every other kernel: an instruction's group of 16 of k is theirs, and so are chunks. A thread
//          has each of its outputs three times: the sum of the chunks before, and those of two chunks in turns, of
//          which one is added while the other is multiplied. So a group's tile is 64 x 128 at most.
// Stages   64 of k: W [2 steps][outputs / 8][4 pieces][8], as it lies in memory, 16 bytes each, so that eight outputs
//          of a piece are one matrix of 128 bytes; then x, of which a row is 128 bytes, whose eight pieces change
//          places with its number (swizzled_operand). An engine brings each in one piece, as tensors of which it knows
//          where they end. Only the device knows where rows end: those behind, as many as there is memory of, are
//          multiplied, too, whatever they are, and become nothing.
#include "cuda/gemm_tiles.h"
#include "cuda/tensor_map.h"
#include "cuda/warpgroup.h"

namespace pagedec::gemm {
namespace {

constexpr int kGroups = 2, kGroupOutputs = 64;
constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;  // one copies
// Of a thread: three times 64 sums, and what a block's others then leave.
constexpr int kProductRegisters = 224, kCopyRegisters = 56;
constexpr int kStageSteps = 2, kStageK = kStageSteps * kStep, kChunkStages = kChunk / kStageK;
constexpr int kStepPieces = kStep / 8, kPieces = kStageK / 8;
constexpr int kPieceBytes = 16, kMatrixBytes = 8 * kPieceBytes, kPanelStepBytes = kPanel * kStepPieces * kPieceBytes;
constexpr int kGroupPanels = kGroupOutputs / kPanel, kGroupBytes = kStageSteps * kGroupPanels * kPanelStepBytes;
constexpr int kBoxRows = 64, kRowBytes = kStageK * 2;
static_assert(kRowBytes == kSwizzledRow && kPieces * kPieceBytes == kRowBytes);
constexpr int kStageRoom = 192 << 10, kMostStages = 12;
// Of sums, on their way to y; rows begin where lanes that write them meet no bank twice.
constexpr int kSlabRows = 32, kSlabStride = kPanel + 4, kSlab = kGroupOutputs / kPanel * kSlabRows * kSlabStride;
constexpr int64_t kSlabsAt = kStageRoom, kBarriersAt = kSlabsAt + kGroups * kSlab * (int64_t)sizeof(float);
constexpr int kBarriers = 2 * kMostStages;
constexpr int64_t kSharedBytes = kBarriersAt + kBarriers * (int64_t)sizeof(uint64_t);

template <int kActiveGroups, int kTileRows>
struct GroupShape {
  static constexpr int kActive = kActiveGroups, kRows = kTileRows, kOutputs = kActive * kGroupOutputs;
  static constexpr int kOwn = kRows / 2;  // of a thread
  static constexpr int kWBytes = kActive * kGroupBytes, kStageBytes = kWBytes + kRows * kRowBytes;
  static constexpr int kStages = kStageRoom / kStageBytes < kMostStages ? kStageRoom / kStageBytes : kMostStages;
  static_assert(kRows % kSlabRows == 0 && kRows % kBoxRows == 0 && kStageBytes % kSwizzleBytes == 0 && kStages >= 4);

  static PD_DEVICE int row_tiles(int num_rows) { return (num_rows + kRows - 1) / kRows; }
  static PD_DEVICE int tiles(int num_rows, int n) { return row_tiles(num_rows) * ((n + kOutputs - 1) / kOutputs); }
  static PD_DEVICE TilePlace place(int tile, int num_rows, int n) {
    const int columns = (n + kOutputs - 1) / kOutputs, band = tile / (kBand * columns);
    const int in_band = tile % (kBand * columns), height = lower(kBand, row_tiles(num_rows) - band * kBand);
    return {(band * kBand + in_band % height) * kRows, in_band / height * kOutputs};
  }
};

struct alignas(16) Four {
  float x[4];
};
struct alignas(8) FourHalves {
  uint32_t pairs[2];
};

// What becomes of 16 rows of sums of a panel: a lane has four columns of y, and every fourth row, or every eighth where
// y is gated and has half as many.
class Outputs {
 public:
  PD_DEVICE Outputs(const pd_gemm_args &a, int panel)
      : a_(a), gated_(is_gated(a.epilogue)), lanes_(gated_ ? kPanel / 8 : kPanel / 4), width_(gated_ ? a.n / 2 : a.n),
        place_(thread_index() % kWarp % lanes_ * 4), column_(panel * 4 * lanes_ + place_),
        is_whole_(width_ % 4 == 0 && (uintptr_t)a.y % 16 == 0) {
    PD_UNROLL for (int i = 0; i < 4; i++) {
      const bool has = a.bias && column_ + i < width_;
      bias_.x[i] = has ? a.bias[panel * kPanel + place_ + i] : 0.0f;
      up_bias_.x[i] = has && gated_ ? a.bias[panel * kPanel + kPanel / 2 + place_ + i] : 0.0f;
    }
  }
  // From `first` on, of kSlabStride / 4 a row.
  PD_DEVICE void finish(int num_rows, int row, const SharedArray<Four> &sums, int first) const {
    if (column_ >= width_) return;
    const int step = kWarp / lanes_, begin = thread_index() % kWarp / lanes_;
    if (a_.epilogue == PD_ADD) return add(num_rows, row + begin, sums, first + begin * (kSlabStride / 4) + place_ / 4);
    PD_ROLLED for (int r = begin; r < kTileRows && row + r < num_rows; r += step) {
      const int at = first + r * (kSlabStride / 4) + place_ / 4;
      Four x = with(load_whole(sums, at), bias_), up{};
      if (gated_) up = with(load_whole(sums, at + kPanel / 8), up_bias_);
      PD_UNROLL for (int i = 0; i < 4; i++) x.x[i] = activated(a_.epilogue, x.x[i], up.x[i]);
      put((int64_t)(row + r) * width_ + column_, x);
    }
  }

 private:
  PD_DEVICE Four with(Four x, const Four &bias) const {
    PD_UNROLL for (int i = 0; i < 4; i++) x.x[i] = a_.bias ? x.x[i] + bias.x[i] : x.x[i];
    return x;
  }
  PD_DEVICE void add(int num_rows, int row, const SharedArray<Four> &sums, int at) const {
    constexpr int kStep = 4, kNumber = kTileRows / kStep;
    float *y = (float *)a_.y + (int64_t)row * width_ + column_;
    Four before[kNumber];  // all under way before the first is needed
    PD_UNROLL for (int r = 0; r < kNumber; r++) {
      const float *from = y + (int64_t)r * kStep * width_;
      if (row + r * kStep >= num_rows) before[r] = Four{};
      else if (is_whole_) before[r] = load_whole<Four>(from);
      else PD_UNROLL for (int i = 0; i < 4; i++) before[r].x[i] = column_ + i < width_ ? from[i] : 0.0f;
    }
    PD_UNROLL for (int r = 0; r < kNumber; r++) {
      if (row + r * kStep >= num_rows) break;
      const Four x = with(load_whole(sums, at + r * kStep * (kSlabStride / 4)), bias_);
      PD_UNROLL for (int i = 0; i < 4; i++) before[r].x[i] = before[r].x[i] + x.x[i];
      put((int64_t)(row + r * kStep) * width_ + column_, before[r]);
    }
  }
  PD_DEVICE void put(int64_t at, const Four &x) const {
    if (!is_whole_) {
      PD_UNROLL for (int i = 0; i < 4; i++)
        if (column_ + i < width_) store(a_, at + i, x.x[i]);
    } else if (a_.y_dtype == PD_F32) {
      *(Four *)((float *)a_.y + at) = x;
    } else {
      *(FourHalves *)((uint16_t *)a_.y + at) = a_.y_dtype == PD_BF16 ? halves<bf16>(x) : halves<fp16>(x);
    }
  }
  template <class E>
  static PD_DEVICE FourHalves halves(const Four &x) {
    return {pair_of<E>(x.x[0], x.x[1]), pair_of<E>(x.x[2], x.x[3])};
  }

  const pd_gemm_args &a_;
  const bool gated_;
  const int lanes_, width_, place_, column_;  // lanes that share a row
  const bool is_whole_;
  Four bias_, up_bias_;
};

// How the engine finds what it brings: W by panels' steps, x by rows.
struct Maps {
  TensorMap w[kGroups], x[kGroups];  // of one group's outputs, or two; of kBoxRows rows, or twice as many
};

template <class S>
struct Block {
  const pd_gemm_args &a;
  const Maps &maps;
  int num_rows, num_stages;
  SharedArray<char> stages;
  SharedArray<float> slabs;  // [groups][kSlab]
  SharedArray<Four> fours;   // the same
  Barriers barriers;         // stages that are there, then those that are free

  PD_DEVICE int num_tiles() const { return S::tiles(anew(num_rows), a.n); }
};
struct Position {  // in the ring of stages, and of how many rounds
  int stage = 0;
  uint32_t parity = 0;

  template <class S>
  PD_DEVICE void advance() {
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
};
constexpr int kFree = kMostStages;

// What the group does that copies: a thread of one warp brings weights, and one of another rows, each on its own. A
// stage takes as long as the longer of their chains of instructions, of which each wait, each word to a barrier and
// each copy that begins is some 85 clocks (H100); tensor cores need 512 for the largest tile.
template <class S>
class Copies {
 public:
  PD_DEVICE explicit Copies(const Block<S> &block) : b_(block) {}

  // Weights, which no kernel writes, come while the kernels before this one still run.
  PD_DEVICE void run() const {
    const int thread = thread_index() % kGroupThreads;
    if (thread == 0)
      each_stage(S::kWBytes, [&](const TilePlace &place, int i, int stage) {
        begin_tensor_copy(b_.stages.at(stage * S::kStageBytes), b_.maps.w[S::kActive - 1], 0, 0, place.column / kPanel,
                          i * kStageSteps, b_.barriers, stage);
      });
    await_kernels();
    if (thread == kWarp)
      each_stage(S::kRows * kRowBytes, [&](const TilePlace &place, int i, int stage) {
        begin_tensor_copy(b_.stages.at(stage * S::kStageBytes + S::kWBytes), b_.maps.x[S::kRows / kBoxRows - 1],
                          i * kStageK, place.row, b_.barriers, stage);
      });
  }

 private:
  // copy(tile's place, i, stage) of what a stage has of so many bytes: behind the last panel, row and step are zeros.
  template <class Copy>
  PD_DEVICE void each_stage(int bytes, const Copy &copy) const {
    Position to;
    for (int tile = block_index(); tile < b_.num_tiles(); tile += num_grid_blocks_anew()) {
      const TilePlace place = S::place(tile, b_.num_rows, b_.a.n);
      PD_ROLLED for (int i = 0; i < b_.num_stages; i++) {
        await_barrier(b_.barriers, kFree + to.stage, to.parity ^ 1);
        arrive_expecting(b_.barriers, to.stage, bytes);
        copy(place, i, to.stage);
        to.template advance<S>();
      }
    }
  }

  const Block<S> &b_;
};

// What a group does that multiplies.
template <class E, class S>
class Products {
 public:
  PD_DEVICE explicit Products(const Block<S> &block) : b_(block), group_(thread_index() / kGroupThreads) {}

  PD_DEVICE void run() {
    for (int tile = block_index(); tile < b_.num_tiles(); tile += num_grid_blocks_anew())
      run_tile(tile);
  }

 private:
  static PD_DEVICE int warp() { return thread_index() % kGroupThreads / kWarp; }

  using Sums = float[S::kOwn];

  // A chunk's sums are added while the next one's first stage is multiplied, to others.
  PD_DEVICE void run_tile(int tile) {
    Sums own, even, odd;
    PD_UNROLL for (int i = 0; i < S::kOwn; i++) own[i] = odd[i] = even[i] = 0.0f;
    for (int stage = 0;;) {
      multiply_chunk(stage, even, odd, own);
      if ((stage += kChunkStages) >= b_.num_stages) {
        add_last(even, own);
        break;
      }
      multiply_chunk(stage, odd, even, own);
      if ((stage += kChunkStages) >= b_.num_stages) {
        add_last(odd, own);
        break;
      }
    }
    finish(S::place(tile, b_.num_rows, b_.a.n), own);
  }
  PD_DEVICE void multiply_chunk(int stage, Sums &sums, Sums &before, Sums &own) {
    const int end = lower(stage + kChunkStages, b_.num_stages);
    multiply_stage(false, sums);
    hold(before);
    PD_UNROLL for (int i = 0; i < S::kOwn; i++) own[i] = own[i] + before[i];
    PD_ROLLED for (stage++; stage < end; stage++) multiply_stage(true, sums);
  }
  PD_DEVICE void add_last(Sums &sums, Sums &own) {
    await_products<0>();
    hold(sums);
    release(before_);
    before_ = -1;
    PD_UNROLL for (int i = 0; i < S::kOwn; i++) own[i] = own[i] + sums[i];
  }
  // The stage before is then through.
  PD_DEVICE void multiply_stage(bool adds, Sums &sums) {
    await_barrier(b_.barriers, now_.stage, now_.parity);
    hold(sums);
    begin_products();
    PD_UNROLL for (int i = 0; i < kStageSteps; i++) multiply_step(i, adds || i > 0, sums);
    end_products();
    await_products<1>();
    if (before_ >= 0) release(before_);
    before_ = now_.stage;
    now_.template advance<S>();
  }
  PD_DEVICE void multiply_step(int step, bool adds, Sums &sums) const {
    const int of_group = (step * S::kActive + group_) * kGroupPanels * kPanelStepBytes;
    const uint32_t w = shared_address(b_.stages.at(now_.stage * S::kStageBytes + of_group));
    const uint32_t x = shared_address(b_.stages.at(now_.stage * S::kStageBytes + S::kWBytes));
    PD_UNROLL for (int i = 0; i < kStepPieces; i += 2)
      multiply_group<E>(sums, operand(w + i * kMatrixBytes, kMatrixBytes, kStepPieces * kMatrixBytes),
                        swizzled_operand(x + (step * kStepPieces + i) * kPieceBytes), adds || i > 0);
  }
  PD_DEVICE void release(int stage) const {
    if (thread_index() % kWarp == 0) arrive(b_.barriers, kFree + stage);
  }
  // Slabs of kSlabRows rows and the group's panels; a warp goes on with half of a panel's.
  PD_DEVICE void finish(TilePlace place, float (&own)[S::kOwn]) const {
    const int g = thread_index() % kWarp / 4, t = thread_index() % 4, first = group_ * kSlab;
    const Outputs outputs(b_.a, (place.column + group_ * kGroupOutputs) / kPanel + warp() % 2);
    constexpr int kOwn = kSlabRows / 2;
    PD_ROLLED for (int row = 0; row < S::kRows && place.row + row < b_.num_rows; row += kSlabRows) {
      PD_UNROLL for (int i = 0; i < kOwn; i++) {
        const int r = warp() / 2 * kSlabRows + i / 4 * 8 + 2 * t + i % 2;
        b_.slabs[first + r * kSlabStride + warp() % 2 * 16 + i / 2 % 2 * 8 + g] = own[i];
      }
      sync_group();
      const int half = warp() / 2 * (kSlabRows / 2), at = first + (warp() % 2 * kSlabRows + half) * kSlabStride;
      outputs.finish(b_.num_rows, place.row + row + half, b_.fours, at / 4);
      sync_group();  // nobody looks at this slab any more
      PD_UNROLL for (int i = kOwn; i < S::kOwn; i++) own[i - kOwn] = own[i];
    }
  }

  const Block<S> &b_;
  const int group_;
  Position now_;     // what is multiplied next
  int before_ = -1;  // the stage that is being multiplied
};

template <class E, class S>
PD_DEVICE void run_tiles(const pd_gemm_args &a, const Maps &maps, int num_rows, const SharedMemory &memory) {
  const Block<S> block{a, maps, num_rows, (a.k + kStageK - 1) / kStageK,
                    memory.part<char>(0, S::kStages * S::kStageBytes),
                    memory.part<float>(kSlabsAt, kGroups * kSlab),
                    memory.part<Four>(kSlabsAt, kGroups * kSlab / 4),
                    memory.part<uint64_t>(kBarriersAt, kBarriers)};
  if (thread_index() == 0) {
    PD_ROLLED for (int i = 0; i < S::kStages; i++) {
      begin_barrier(block.barriers, i, 2);
      begin_barrier(block.barriers, kFree + i, S::kActive * kGroupWarps);
    }
    show_barriers();
  }
  sync_block();
  const int group = thread_index() / kGroupThreads;
  if (group == kGroups) {
    change_registers<kCopyRegisters, false>();
    Copies<S>(block).run();
  } else if (group < S::kActive) {
    change_registers<kProductRegisters, true>();
    await_kernels();
    Products<E, S>(block).run();
  } else {
    await_kernels();
  }
}

// What tiles cost for each k: what comes from the second cache.
template <class S>
PD_DEVICE int cost(int num_rows, int n, int blocks) {
  return (S::tiles(num_rows, n) + blocks - 1) / blocks * (S::kOutputs + S::kRows);
}

template <class E>
PD_KERNEL(kBlockThreads) gemm_hopper_kernel(pd_gemm_args a, PD_GRID_CONSTANT(Maps) maps, int few_rows) {
  let_next_begin();
  const int num_rows = *a.num_rows, blocks = num_grid_blocks();
  if (num_rows <= few_rows) return await_kernels();
  LAUNCHED_SHARED(memory);
  using A = GroupShape<1, 64>;
  using B = GroupShape<2, 64>;
  using C = GroupShape<1, 128>;
  using D = GroupShape<2, 128>;
  const int of_a = cost<A>(num_rows, a.n, blocks), of_b = cost<B>(num_rows, a.n, blocks);
  const int of_c = cost<C>(num_rows, a.n, blocks), of_d = cost<D>(num_rows, a.n, blocks);
  const int best = lower(lower(of_a, of_b), lower(of_c, of_d));
  if (of_d == best) run_tiles<E, D>(a, maps, anew(num_rows), memory);
  else if (of_c == best) run_tiles<E, C>(a, maps, anew(num_rows), memory);
  else if (of_b == best) run_tiles<E, B>(a, maps, anew(num_rows), memory);
  else run_tiles<E, A>(a, maps, anew(num_rows), memory);
}

}  // namespace

bool is_for_hopper(const pd_context &c, const pd_gemm_args &a) {
  const bool has_warpgroups = target(c).capability == 90 && kSharedBytes <= target(c).max_shared_bytes;
  return has_warpgroups && a.quantization == PD_PLAIN && a.k % 8 == 0 && a.x_rows > 0 && (uintptr_t)a.x % 16 == 0;
}
// Where tiles of 64 outputs are for most multiprocessors, they are as fast with 17 rows as with 64 (H100: qkv of 8B
// 23 us, and 27 to 36 by the kernel of few rows); of 4,096 outputs they are for half, and that is faster up to 32.
int few_rows(const pd_context &c, const pd_gemm_args &a) {
  const int64_t tiles = (a.n + kGroupOutputs - 1) / kGroupOutputs;
  return is_for_hopper(c, a) && 3 * tiles >= 2 * target(c).num_multiprocessors ? kTileRows : kFewRows;
}

int enqueue_hopper(pd_context &c, const pd_gemm_args &a, int few_rows) {
  const auto kernel = a.dtype == PD_F16 ? gemm_hopper_kernel<fp16> : gemm_hopper_kernel<bf16>;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, steps = (a.k + kStep - 1) / kStep;
  constexpr int kMatrixRows = kPanelStepBytes / kMatrixBytes;  // a panel's step as rows of 128 bytes
  Maps maps;
  for (int i = 0; i < kGroups; i++)
    if (map_tensor(maps.w[i], a.packed, {kMatrixBytes / 2, kMatrixRows, panels, steps},
                   {kMatrixBytes, steps * kPanelStepBytes, kPanelStepBytes},
                   {kMatrixBytes / 2, kMatrixRows, (i + 1) * kGroupPanels, kStageSteps}, false) ||
        map_tensor(maps.x[i], a.x, {a.k, a.x_rows, 1, 1}, {2 * (int64_t)a.k, 0, 0}, {kStageK, (i + 1) * kBoxRows, 1, 1},
                   true))
      return -1;
  return launch_early(c, "pd_gemm", kernel, Grid(kBlockThreads, 1, kSharedBytes), a, maps, few_rows);
}

}  // namespace pagedec::gemm
#if !defined(__CUDACC__)
#include "cuda/context.h"
// For tests: 90, and products of more than 32 rows are this file's; else they are gemm_many.cu's.
extern "C" PD_EXPORT void pd_emulate_hopper(pd_context *context, int32_t capability) {
  context->capability = capability;
}
#endif
