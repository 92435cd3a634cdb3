// Linear layers of more than kFewRows rows in bf16 and fp16 on devices of compute capability 9.0: tiles of outputs x
// rows, of which warpgroups have 64 outputs each. Their products read W and x in shared memory, whereto another group
// copies them, a few stages ahead and over the ends of tiles.
//
// Bits     are those of every other kernel: an instruction's group of 16 of k is theirs, and so are chunks. A thread
//          has each of its outputs three times: the sum of the chunks before, and those of two chunks in turns, of
//          which one is added while the other is multiplied. So a group's tile is 64 x 128 at most.
// Stages   64 of k: W by groups [2 steps][outputs / 8][4 pieces][8], as it lies in memory, 16 bytes each, so that eight
//          outputs of a piece are one matrix of 128 bytes; then x, of which a row is 128 bytes, whose eight pieces
//          change places with its number (swizzle_row). An engine brings both, as tensors of which it is told where
//          they end, but for where rows end, which only the device knows: there threads copy x by 16 bytes.
#include "cuda/gemm_tiles.h"
#include "cuda/tensor_map.h"
#include "cuda/warpgroup.h"

namespace pagedec::gemm {
namespace {

constexpr int kGroups = 2, kGroupOutputs = 64, kCluster = 2;
constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;  // one copies
// Of a thread: three times 64 sums, and what a block's others then leave.
constexpr int kProductRegisters = 232, kCopyRegisters = 40;
constexpr int kStageSteps = 2, kStageK = kStageSteps * kStep, kChunkStages = kChunk / kStageK;
constexpr int kStepPieces = kStep / 8, kPieces = kStageK / 8;
constexpr int kPieceBytes = 16, kMatrixBytes = 8 * kPieceBytes, kPanelStepBytes = kPanel * kStepPieces * kPieceBytes;
constexpr int kGroupPanels = kGroupOutputs / kPanel, kGroupBytes = kStageSteps * kGroupPanels * kPanelStepBytes;
constexpr int kBoxRows = 64, kRowBytes = kStageK * 2, kBoxBytes = kBoxRows * kRowBytes;  // that come together
static_assert(kRowBytes == kSwizzledRow && kPieces * kPieceBytes == kRowBytes);
constexpr int kStageRoom = 192 << 10, kMostStages = 12;
// Of sums, on their way to y; rows begin where lanes that write them meet no bank twice.
constexpr int kSlabRows = 32, kSlabStride = kPanel + 4, kSlab = kGroupOutputs / kPanel * kSlabRows * kSlabStride;
constexpr int64_t kSlabsAt = kStageRoom, kBarriersAt = kSlabsAt + kGroups * kSlab * (int64_t)sizeof(float);
constexpr int64_t kSharedBytes = kBarriersAt + 2 * kMostStages * (int64_t)sizeof(uint64_t);

// kTogether: blocks that share the weights of tiles of other rows, each of which brings all of them some.
template <int kActiveGroups, int kTileRows, int kTogether = 1>
struct GroupShape {
  static constexpr int kActive = kActiveGroups, kRows = kTileRows, kOutputs = kActive * kGroupOutputs;
  static constexpr int kShare = kTogether;
  static_assert(kShare == 1 || kShare == kActive);
  static constexpr int kOwn = kRows / 2;  // of a thread
  static constexpr int kWBytes = kActive * kGroupBytes, kStageBytes = kWBytes + kRows * kRowBytes;
  static constexpr int kStages = kStageRoom / kStageBytes < kMostStages ? kStageRoom / kStageBytes : kMostStages;
  static_assert(kRows % kSlabRows == 0 && kRows % kBoxRows == 0 && kStageBytes % kSwizzleBytes == 0 && kStages >= 4);

  static PD_DEVICE int row_tiles(int num_rows) { return (num_rows + kShare * kRows - 1) / (kShare * kRows); }
  static PD_DEVICE int tiles(int num_rows, int n) { return row_tiles(num_rows) * ((n + kOutputs - 1) / kOutputs); }
  static PD_DEVICE TilePlace place(int tile, int num_rows, int n) {
    const int columns = (n + kOutputs - 1) / kOutputs, band = tile / (kBand * columns);
    const int in_band = tile % (kBand * columns), height = lower(kBand, row_tiles(num_rows) - band * kBand);
    const int of_block = kShare > 1 ? cluster_rank() * kRows : 0;
    return {(band * kBand + in_band % height) * kRows * kShare + of_block, in_band / height * kOutputs};
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
  TensorMap w, x;
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

// What the group does that copies.
template <class E, class S>
class Copies {
 public:
  PD_DEVICE explicit Copies(const Block<S> &block) : b_(block) {}

  // Weights, which no kernel writes, come while the kernels before this one still run.
  PD_DEVICE void run() {
    const bool has_tile = block_index() / S::kShare < b_.num_tiles();
    const int ahead = has_tile ? lower(S::kStages, b_.num_stages) : 0;
    if (has_tile) {
      const int column = S::place(block_index() / S::kShare, b_.num_rows, b_.a.n).column;
      PD_ROLLED for (int i = 0; i < ahead; i++) copy_weights(column, i, i);
    }
    await_kernels();
    int num = 0;
    for (int tile = block_index() / S::kShare; tile < b_.num_tiles(); tile += num_grid_blocks_anew() / S::kShare) {
      const TilePlace place = S::place(tile, b_.num_rows, b_.a.n);
      PD_ROLLED for (int i = 0; i < b_.num_stages; i++) {
        if (num++ >= ahead) {
          await_barrier<(S::kShare > 1)>(b_.barriers, kFree + to_.stage, to_.parity ^ 1);
          copy_weights(place.column, i, to_.stage);
        }
        PD_ROLLED for (int box = 0; box < S::kRows / kBoxRows; box++) copy_rows(place.row, i, box);
        arrive_with_copies(b_.barriers, to_.stage);
        to_.template advance<S>();
      }
    }
  }

 private:
  static PD_DEVICE int thread() { return thread_index() % kGroupThreads; }

  // Behind the last panel and the last step are zeros.
  PD_DEVICE void copy_weights(int column, int stage_of_k, int stage) const {
    if (thread() > 0) return;
    expect(b_.barriers, stage, S::kWBytes);
    const auto copy = [&](int group) {
      void *to = b_.stages.at(stage * S::kStageBytes + group * kGroupBytes);
      const int panel = column / kPanel + group * kGroupPanels, step = stage_of_k * kStageSteps;
      if constexpr (S::kShare == 1) begin_tensor_copy(to, b_.maps.w, 0, 0, panel, step, b_.barriers, stage);
      else begin_tensor_copies(to, b_.maps.w, 0, 0, panel, step, b_.barriers, stage, (1 << S::kShare) - 1);
    };
    if constexpr (S::kShare > 1) copy(cluster_rank());
    else PD_ROLLED for (int group = 0; group < S::kActive; group++) copy(group);
  }
  // By the engine, or of four rows each warp at a time; zeros where there is no row, or k has ended.
  PD_DEVICE void copy_rows(int row, int stage_of_k, int box) const {
    const int to = to_.stage * S::kStageBytes + S::kWBytes + box * kBoxBytes;
    row += box * kBoxRows;
    if (row + kBoxRows <= b_.num_rows) {
      if (thread() > 0) return;
      expect(b_.barriers, to_.stage, kBoxBytes);
      return begin_tensor_copy(b_.stages.at(to), b_.maps.x, stage_of_k * kStageK, row, b_.barriers, to_.stage);
    }
    constexpr int kRowsAtATime = kGroupThreads / kPieces;
    const int of_box = thread() / kPieces, piece = thread() % kPieces, k = stage_of_k * kStageK + piece * 8;
    const E *from = (const E *)b_.a.x + (int64_t)(row + of_box) * b_.a.k + k;
    PD_UNROLL for (int i = 0; i < kBoxRows; i += kRowsAtATime) {
      begin_copy(b_.stages.at(to + swizzle_row(of_box + i, piece)), from, row + of_box + i < b_.num_rows && k < b_.a.k);
      from += (int64_t)kRowsAtATime * b_.a.k;
    }
  }

  const Block<S> &b_;
  Position to_;  // where copies go next
};

// What a group does that multiplies.
template <class E, class S>
class Products {
 public:
  PD_DEVICE explicit Products(const Block<S> &block) : b_(block), group_(thread_index() / kGroupThreads) {}

  PD_DEVICE void run() {
    for (int tile = block_index() / S::kShare; tile < b_.num_tiles(); tile += num_grid_blocks_anew() / S::kShare)
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
    if (b_.num_rows % (S::kShare * S::kRows)) fence_async();  // there are rows that threads have copied
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
    const int of_group = group_ * kGroupBytes + step * kGroupPanels * kPanelStepBytes;
    const uint32_t w = shared_address(b_.stages.at(now_.stage * S::kStageBytes + of_group));
    const uint32_t x = shared_address(b_.stages.at(now_.stage * S::kStageBytes + S::kWBytes));
    PD_UNROLL for (int i = 0; i < kStepPieces; i += 2)
      multiply_group<E>(sums, operand(w + i * kMatrixBytes, kMatrixBytes, kStepPieces * kMatrixBytes),
                        swizzled_operand(x + (step * kStepPieces + i) * kPieceBytes), adds || i > 0);
  }
  PD_DEVICE void release(int stage) const {
    const int lane = thread_index() % kWarp;
    if constexpr (S::kShare > 1) {
      if (lane < S::kShare) arrive_at(b_.barriers, kFree + stage, lane);
    } else if (lane == 0) {
      arrive(b_.barriers, kFree + stage);
    }
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
                    memory.part<uint64_t>(kBarriersAt, 2 * kMostStages)};
  if (thread_index() == 0) {
    PD_ROLLED for (int i = 0; i < S::kStages; i++) {
      begin_barrier(block.barriers, i, kGroupThreads);
      begin_barrier(block.barriers, kFree + i, S::kShare * S::kActive * kGroupWarps);
    }
    show_barriers();
  }
  S::kShare > 1 ? sync_cluster() : sync_block();
  const int group = thread_index() / kGroupThreads;
  if (group == kGroups) {
    change_registers<kCopyRegisters, false>();
    Copies<E, S>(block).run();
  } else if (group < S::kActive) {
    change_registers<kProductRegisters, true>();
    await_kernels();
    Products<E, S>(block).run();
  } else {
    await_kernels();
  }
  if constexpr (S::kShare > 1) sync_cluster();  // others still bring weights here, or say that they have used theirs
}

// What tiles cost for each k: what comes from the second cache.
template <class S>
PD_DEVICE int cost(int num_rows, int n, int blocks) {
  const int rounds = (S::tiles(num_rows, n) * S::kShare + blocks - 1) / blocks;
  return rounds * (S::kOutputs / S::kShare + S::kRows);
}

template <class E>
PD_KERNEL(kBlockThreads) gemm_hopper_kernel(pd_gemm_args a, PD_GRID_CONSTANT(Maps) maps) {
  let_next_begin();
  const int num_rows = *a.num_rows, blocks = num_grid_blocks();
  if (num_rows <= kFewRows) return await_kernels();
  LAUNCHED_SHARED(memory);
  using A = GroupShape<1, 64>;
  using B = GroupShape<2, 64>;
  using C = GroupShape<1, 128>;
  using D = GroupShape<2, 128>;
  using F = GroupShape<2, 128, kCluster>;
  const int of_a = cost<A>(num_rows, a.n, blocks), of_b = cost<B>(num_rows, a.n, blocks);
  const int of_c = cost<C>(num_rows, a.n, blocks), of_d = cost<D>(num_rows, a.n, blocks);
  const int of_f = cost<F>(num_rows, a.n, blocks), best = lower(lower(lower(of_a, of_b), lower(of_c, of_d)), of_f);
  if (of_f == best) run_tiles<E, F>(a, maps, anew(num_rows), memory);
  else if (of_d == best) run_tiles<E, D>(a, maps, anew(num_rows), memory);
  else if (of_c == best) run_tiles<E, C>(a, maps, anew(num_rows), memory);
  else if (of_b == best) run_tiles<E, B>(a, maps, anew(num_rows), memory);
  else run_tiles<E, A>(a, maps, anew(num_rows), memory);
}

}  // namespace

bool is_for_hopper(const pd_context &c, const pd_gemm_args &a) {
  return target(c).capability == 90 && a.quantization == PD_PLAIN && a.k % 8 == 0 && (uintptr_t)a.x % 16 == 0 &&
         kSharedBytes <= target(c).max_shared_bytes;
}
int enqueue_hopper(pd_context &c, const pd_gemm_args &a) {
  const auto kernel = a.dtype == PD_F16 ? gemm_hopper_kernel<fp16> : gemm_hopper_kernel<bf16>;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, steps = (a.k + kStep - 1) / kStep;
  constexpr int kMatrixRows = kPanelStepBytes / kMatrixBytes;  // a panel's step as rows of 128 bytes
  Maps maps;
  if (map_tensor(maps.w, a.packed, {kMatrixBytes / 2, kMatrixRows, panels, steps},
                 {kMatrixBytes, steps * kPanelStepBytes, kPanelStepBytes},
                 {kMatrixBytes / 2, kMatrixRows, kGroupPanels, kStageSteps}, false) ||
      map_tensor(maps.x, a.x, {a.k, INT32_MAX, 1, 1}, {2 * (int64_t)a.k, 0, 0}, {kStageK, kBoxRows, 1, 1}, true))
    return -1;
  return launch_early(c, "pd_gemm", kernel, Grid(kBlockThreads, 1, kSharedBytes, kCluster), a, maps);
}

}  // namespace pagedec::gemm
#if !defined(__CUDACC__)
#include "cuda/context.h"
// For tests: 90, and products of more than 32 rows are this file's; else they are gemm_many.cu's.
extern "C" PD_EXPORT void pd_emulate_hopper(pd_context *context, int32_t capability) {
  context->capability = capability;
}
#endif
