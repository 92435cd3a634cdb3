// Linear layers of few rows in bf16 and fp16: a block of eight warps has a panel of 32 outputs for up to 32 rows.
//
// Warps    have every eighth chunk of k. Each copies its own steps of W and x to shared memory, several ahead and over
//          the ends of chunks and panels, and waits for nobody: at few rows a layer is its weights, which lie in the
//          order in which they are read. Chunks' sums meet in shared memory.
// Rows     W is what tensor cores take 16 rows of, x what they take 8 columns of: 8, 16 or 32 rows are 1, 2 or 4 tiles.
#include "cuda/gemm.h"
#include "cuda/gemm_experts.h"
#include "cuda/gemm_weight_only.h"

namespace pagedec::gemm {
namespace {

constexpr int kBlocks = 1;  // of a multiprocessor, which has room for one more: the next layer's may begin
// Of a block; on some devices (SM86, SM89, SM120) it has no more.
constexpr int kSharedBytes = 99 << 10;
constexpr int kChunkSteps = kChunk / kStep, kPieces = kStep / 8;  // pieces: of 16 bytes, of a row in a step
constexpr int kLargestTiles = kFewRows / 8;

// How shared memory is divided.
template <int kTiles, bool kBytes>
struct Room {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kSlots = kTiles == 1 ? 2 * kWarps : kWarps;  // of chunks' sums
  // Of a row of a chunk's sums: what lanes write at a time, eight outputs of four rows, meets no bank twice, and of 32
  // rows, which have no room for that, few.
  static constexpr int kStride = kPanel + (kTiles <= 2 ? 4 : 3);
  static constexpr int kSums = kSlots * kRows * kStride;
  static constexpr int kWPieces = kPanel * kPieces / (kBytes ? 2 : 1), kStagePieces = kWPieces + kRows * kPieces;
  static constexpr int kDepth = (kSharedBytes - 4 * kSums) / (kWarps * kStagePieces * (int)sizeof(Eight));
  static_assert(kDepth >= 2);
};

template <int kRows>
struct Place {  // of an item in its layer: the first row, and the panel
  int row = 0, panel = 0;
  template <class Found>
  PD_DEVICE void set(const Found &found) {
    const int groups = Panels<kRows>::groups(found.num_rows);
    row = found.at % groups * kRows, panel = found.at / groups;
  }
};

// What a warp multiplies, step by step: of its chunks one after another, and of the block's items, panels of Items.
template <class E, int kTiles, bool kBytes, bool kAligned, class Items>
class Stream {
  using R = Room<kTiles, kBytes>;

 public:
  PD_DEVICE Stream(const pd_gemm_args &a, const Items &items, int first_item, const SharedArray<Eight> &pieces)
      : items_(items), k_of_rows_(a.k), num_steps_((a.k + kStep - 1) / kStep), pieces_(pieces),
        first_stage_(warp() * R::kDepth * R::kStagePieces), item_(first_item), chunk_(warp()), x_((const E *)a.x),
        num_rows_(items.num_rows) {
    if (chunk_ * kChunkSteps >= num_steps_) item_ = items.number;  // k has fewer chunks than there are warps
    begin_chunk();
  }
  PD_DEVICE int num_chunks() const { return (num_steps_ + kChunkSteps - 1) / kChunkSteps; }
  PD_DEVICE int steps_of(int chunk) const { return lower(kChunkSteps, num_steps_ - chunk * kChunkSteps); }

  // Weights, which no kernel writes, come while the kernels before this one still run.
  PD_DEVICE void begin() {
    if constexpr (Items::kIsKnown) {
      Stream ahead = *this;
      PD_UNROLL for (int i = 0; i < R::kDepth; i++) ahead.copy_weights(i), ahead.advance();
      await_kernels();
    }
    PD_UNROLL for (int i = 0; i < R::kDepth; i++) {
      if constexpr (!Items::kIsKnown) copy_weights(i);
      copy_rows(i), end_copy_group(), advance();
    }
  }
  // The step's operands are there, to be multiplied; the one that takes its place is on its way.
  PD_DEVICE void multiply(float (&sums)[2][kTiles][4]) {
    await_copies<R::kDepth - 1>();
    sync_warp();
    uint32_t w[2][2][4], x[kTiles][4];
    const int stage = first_stage_ + stage_ * R::kStagePieces;
    load_weights(stage, w);
    PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
      load_matrices(x[tile], pieces_.at(stage + R::kWPieces + tile * kWarp + lane()));
    sync_warp();  // all have looked
    copy_weights(stage_), copy_rows(stage_), end_copy_group(), advance();
    stage_ = stage_ + 1 == R::kDepth ? 0 : stage_ + 1;
    PD_UNROLL for (int i = 0; i < 2; i++)
      PD_UNROLL for (int half = 0; half < 2; half++)
        PD_UNROLL for (int tile = 0; tile < kTiles; tile++)
          multiply_add<E>(sums[half][tile], w[half][i], x[tile][2 * i], x[tile][2 * i + 1]);
  }

 private:
  static PD_DEVICE int lane() { return thread_index() % kWarp; }
  static PD_DEVICE int warp() { return thread_index() / kWarp; }

  // Of 16 outputs each and 16 of k.
  PD_DEVICE void load_weights(int stage, uint32_t (&w)[2][2][4]) const {
    [[maybe_unused]] const int of_lane = 8 * (lane() / 8 % 2 * kPieces + lane() / 16) + lane() % 8;
    PD_UNROLL for (int half = 0; half < 2; half++) {
      if constexpr (kBytes) {
        const Eight two = pieces_[stage + half * kWarp + lane()];
        const Eight of_g = widen_eight<E>(two.pairs[0], two.pairs[1]);
        const Eight of_8 = widen_eight<E>(two.pairs[2], two.pairs[3]);  // output g + 8
        PD_UNROLL for (int i = 0; i < 8; i++)
          w[half][i / 4][i % 4] = (i % 2 ? of_8 : of_g).pairs[i / 4 * 2 + i % 4 / 2];
      } else {
        PD_UNROLL for (int i = 0; i < 2; i++)
          load_matrices(w[half][i], pieces_.at(stage + 8 * (2 * half * kPieces + 2 * i) + of_lane));
      }
    }
  }
  PD_DEVICE void begin_chunk() {
    if (item_ >= items_.number) return;
    const auto found = items_.find(item_);
    Place<R::kRows> place;
    place.set(found);
    left_ = steps_of(chunk_);
    x_ = (const E *)found.a.x, num_rows_ = found.num_rows;
    w_ = (const char *)found.a.packed + ((int64_t)place.panel * num_steps_ + chunk_ * kChunkSteps) * kStepBytes;
    k_ = chunk_ * kChunk + lane() / 8 * 8;
    row_ = place.row + lane() % 8;
  }
  PD_DEVICE void advance() {
    w_ += kStepBytes, k_ += kStep;
    if (--left_ > 0) return;
    chunk_ += kWarps;
    const bool is_through = chunk_ * kChunkSteps >= num_steps_;
    if (is_through) chunk_ = warp(), item_ += num_grid_blocks();
    if (Items::kIsKnown || is_through) return begin_chunk();
    w_ += (kWarps - 1) * kChunkSteps * kStepBytes, k_ += (kWarps - 1) * kChunk;
    left_ = steps_of(chunk_);
  }
  PD_DEVICE void copy_weights(int stage) const {
    if (item_ >= items_.number) return;
    PD_UNROLL for (int i = 0; i < R::kWPieces / kWarp; i++) {
      const int piece = i * kWarp + lane();
      begin_copy(pieces_.at(first_stage_ + stage * R::kStagePieces + piece), w_ + piece * 16, true);
    }
  }
  PD_DEVICE void copy_rows(int stage) const {
    if (item_ >= items_.number) return;
    const int to = first_stage_ + stage * R::kStagePieces + R::kWPieces + lane();
    PD_UNROLL for (int tile = 0; tile < kTiles; tile++) {
      const int row = row_ + 8 * tile, left = row < num_rows_ ? k_of_rows_ - k_ : 0;
      const E *from = x_ + (int64_t)row * k_of_rows_ + k_;
      if (kAligned) begin_copy<16, true>(pieces_.at(to + tile * kWarp), from, left > 0);
      else pieces_[to + tile * kWarp] = load_some(from, left, false);
    }
  }

  static constexpr int kStepBytes = R::kWPieces * 16;

  const Items &items_;
  const int k_of_rows_, num_steps_;
  const SharedArray<Eight> pieces_;  // [warps][stages][W's, x's]
  const int first_stage_;
  int item_, chunk_, left_ = 0;  // whose operands come next: a panel for some rows, and how many of the chunk's steps
  const E *x_;                   // of the item's layer
  int num_rows_;
  const char *w_ = nullptr;
  int k_ = 0, row_ = 0;  // that this lane copies
  int stage_ = 0;        // that is multiplied next
};

// All panels, for kRows rows at a time.
template <class E, int kTiles, bool kBytes, bool kAligned, class Items>
PD_DEVICE void run_items(const pd_gemm_args &a, const Items &items, int first_item, const SharedMemory &memory) {
  using R = Room<kTiles, kBytes>;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, g = lane / 4, t = lane % 4;
  const auto partial = memory.part<float>(0, R::kSums);
  Stream<E, kTiles, kBytes, kAligned, Items> stream(
      a, items, first_item, memory.part<Eight>(4 * R::kSums, kWarps * R::kDepth * R::kStagePieces));
  stream.begin();
  const int num_chunks = stream.num_chunks();
  for (int item = first_item; item < items.number; item += num_grid_blocks()) {
    // Outputs of a thread: column `lane` of rows warp, warp + 8, ...
    float own[kTiles] = {}, before[kTiles] = {};
    Place<R::kRows> place;
    if constexpr (Items::kIsKnown) {  // experts' are added to nothing
      place.set(items.find(item));
      PD_UNROLL for (int i = 0; i < kTiles; i++) {
        const int row = place.row + warp + 8 * i;
        before[i] = before_sum(a, row, place.panel, row < items.num_rows);
      }
    }
    for (int first = 0; first < num_chunks; first += R::kSlots) {
      const int stop = lower(first + R::kSlots, num_chunks);
      for (int chunk = first + warp; chunk < stop; chunk += kWarps) {
        float sums[2][kTiles][4] = {};
        PD_ROLLED for (int step = stream.steps_of(chunk); step > 0; step--) stream.multiply(sums);
        PD_UNROLL for (int i = 0; i < 8 * kTiles; i++) {
          const int half = i / 4 / kTiles, tile = i / 4 % kTiles, output = 16 * half + i % 4 / 2 * 8 + g;
          partial[((chunk - first) * R::kRows + 8 * tile + 2 * t + i % 2) * R::kStride + output] =
              sums[half][tile][i % 4];
        }
      }
      sync_block();
      PD_UNROLL_BY(4)
      for (int slot = 0; slot < stop - first; slot++)
        PD_UNROLL for (int i = 0; i < kTiles; i++)
          own[i] = own[i] + partial[(slot * R::kRows + warp + 8 * i) * R::kStride + lane];
      sync_block();
    }
    const auto found = items.find(item);
    if constexpr (!Items::kIsKnown) place.set(found);  // now: until here it would take registers
    const float scale = kBytes ? weight_scales(found.a)[place.panel * kPanel + lane] : 1.0f;
    PD_ROLLED for (int i = 0; i < kTiles; i++) {  // one body: activations are long
      const int row = place.row + warp + 8 * i;
      finish(found.a, row, place.panel, kBytes ? own[0] * scale : own[0], row < found.num_rows, before[0]);
      PD_UNROLL for (int j = 1; j < kTiles; j++) own[j - 1] = own[j], before[j - 1] = before[j];
    }
  }
}

template <class E, int kTiles, bool kBytes, bool kAligned>
PD_DEVICE void run_panels(const pd_gemm_args &a, int num_rows, const SharedMemory &memory) {
  const OneLayer items{a, num_rows, Panels<8 * kTiles>::of(num_rows, a.n)};
  run_items<E, kTiles, kBytes, kAligned>(a, items, block_index(), memory);
}

template <class E, bool kBytes>
PD_KERNEL_BLOCKS(kThreads, kBlocks + 1) gemm_few_kernel(pd_gemm_args a, int most_rows) {
  let_next_begin();
  LAUNCHED_SHARED(memory);
  const int num_rows = *a.num_rows;  // which no kernel writes either
  if (num_rows > most_rows) return await_kernels();
  if (!is_aligned(a.x, a.k)) run_panels<E, kLargestTiles, kBytes, false>(a, num_rows, memory);
  else if (num_rows <= 8) run_panels<E, 1, kBytes, true>(a, num_rows, memory);
  else if (num_rows <= 16) run_panels<E, 2, kBytes, true>(a, num_rows, memory);
  else run_panels<E, kLargestTiles, kBytes, true>(a, num_rows, memory);
}

// The panels of experts with so many rows, behind `before` others of this kernel; and how many these are.
template <class E, int kTiles, bool kBytes, bool kAligned>
PD_DEVICE int run_experts(const pd_experts_args &a, int least, int most, int before, const SharedMemory &memory) {
  const Experts<Panels<8 * kTiles>> items(a, least, most);
  run_items<E, kTiles, kBytes, kAligned>(a.gemm, items, first_item(before), memory);
  return items.number;
}

// Each expert by the tiles that its rows need: the fewer these are, the more weights are under way. More than two tiles
// of rows would spill.
template <class E, bool kBytes>
PD_KERNEL_BLOCKS(kThreads, kBlocks + 1) experts_few_kernel(pd_experts_args a, int most_rows) {
  let_next_begin();
  LAUNCHED_SHARED(memory);
  const int num_rows = *a.gemm.num_rows;  // no expert has more
  await_kernels();
  if (num_rows < 1) return;
  if (!is_aligned(a.gemm.x, a.gemm.k)) {
    run_experts<E, 2, kBytes, false>(a, 1, most_rows, 0, memory);
  } else {
    const int before = run_experts<E, 1, kBytes, true>(a, 1, 8, 0, memory);
    if (num_rows > 8) run_experts<E, 2, kBytes, true>(a, 9, most_rows, before, memory);
  }
}

}  // namespace

int enqueue_few(pd_context &c, const pd_gemm_args &a, int most_rows) {
  const bool is_bytes = a.quantization == PD_INT8_WEIGHT_ONLY;
  const auto of_bf16 = is_bytes ? gemm_few_kernel<bf16, true> : gemm_few_kernel<bf16, false>;
  const auto of_fp16 = is_bytes ? gemm_few_kernel<fp16, true> : gemm_few_kernel<fp16, false>;
  return launch_early(c, "pd_gemm", a.dtype == PD_F16 ? of_fp16 : of_bf16, Grid(kThreads, kBlocks, kSharedBytes), a,
                      most_rows);
}

int enqueue_experts_few(pd_context &c, const pd_experts_args &a, int most_rows) {
  const bool is_bytes = a.gemm.quantization == PD_INT8_WEIGHT_ONLY;
  const auto of_bf16 = is_bytes ? experts_few_kernel<bf16, true> : experts_few_kernel<bf16, false>;
  const auto of_fp16 = is_bytes ? experts_few_kernel<fp16, true> : experts_few_kernel<fp16, false>;
  // Where k has so few chunks that half the warps have none, a second block has as much under way.
  const int blocks = a.gemm.k <= kWarps / 2 * kChunk ? 2 * kBlocks : kBlocks;
  return launch_early(c, "pd_experts", a.gemm.dtype == PD_F16 ? of_fp16 : of_bf16, Grid(kThreads, blocks, kSharedBytes),
                      a, most_rows);
}

}  // namespace pagedec::gemm
