#include "cuda/emulate/warpgroup.h"

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "cuda/emulate/matrix.h"

namespace pagedec::emulate {
namespace {

constexpr int MAX_WARPS = MAX_THREADS / WARP, LINE = 16;  // bytes that are watched together
constexpr int MATRIX = 128;

using Clock = std::array<uint32_t, MAX_WARPS>;  // what of each warp is known

// What a warp knows, and whoever waits for a barrier at which it arrived: how far others are, and which phases of
// barriers are over.
struct Known {
  Clock clock{};
  std::map<const void *, uint32_t> waited;
};
void join(Known &mine, const Known &other) {
  for (int i = 0; i < MAX_WARPS; i++) mine.clock[i] = std::max(mine.clock[i], other.clock[i]);
  for (const auto &[barrier, phases] : other.waited) mine.waited[barrier] = std::max(mine.waited[barrier], phases);
}

struct Barrier {
  int count = 0, missing = 0, bytes = 0;  // bytes: expected and not come
  uint32_t phases = 0;                    // that are over
  Moment begun{};
  Known told{}, seen{};  // by those who arrived; by those who wait
};
enum class Is : uint8_t { nothing, coming, there };
struct Line {
  Is is = Is::nothing;
  const void *barrier = nullptr;           // that its copy arrives at, and in which phase
  uint32_t phase = 0;
  uint32_t reading = 0;                    // products under way, of any warp
  std::array<uint32_t, MAX_WARPS> read{};  // when, by each
};
struct Coming {
  std::vector<Copy> copies;
  const void *barrier;
};
struct Product {
  float *sums;
  int columns;
  uint64_t of_a, of_b;
  bool adds;
  Value value;
  int group;
};
struct Sums {  // whose registers nobody may look at
  float *registers;
  int num_under_way;
  std::vector<float> values;
};
struct Thread {
  std::vector<Product> products;
  std::vector<Sums> sums;
  int group = 0;
  bool is_fenced = false;
  uint64_t done = 0;  // what it has multiplied, of which all of its group must have the same
};
struct State {
  std::map<const void *, Barrier> barriers;
  std::vector<Line> lines;
  std::vector<Thread> threads;
  std::vector<Coming> coming;
  std::vector<Known> known;  // by warps
};
State s;

int64_t offset_of(const void *p) { return (const char *)p - shared_begin(); }
int warp() { return place().thread / WARP; }
Thread &thread() { return s.threads[place().thread]; }
Barrier &barrier_at(const void *at) {
  const auto found = s.barriers.find(at);
  if (found == s.barriers.end()) fault("a barrier that was not begun");
  if (!is_known(found->second.begun)) fault("a barrier that was begun meanwhile: its threads have not met since");
  return found->second;
}
Line &line_at(int64_t byte) {
  if (byte < 0 || byte + LINE > shared_size()) fault("byte %lld, outside shared memory", (long long)byte);
  if (s.lines.size() < (size_t)(shared_size() / LINE)) s.lines.resize(shared_size() / LINE);
  return s.lines[byte / LINE];
}

void end_if_complete(Barrier &barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.phases++;
  barrier.missing = barrier.count;
  join(barrier.seen, barrier.told);
  wake_those_at_barriers();
}

// Nobody reads there any more, as far as this thread knows, and nothing is on its way there.
void check_free(int64_t byte) {
  const Line &line = line_at(byte);
  if (line.is == Is::coming) fault("byte %lld of shared memory is copied to twice at a time", (long long)byte);
  if (line.reading) fault("byte %lld of shared memory is copied to while products read it", (long long)byte);
  const Clock &mine = s.known[warp()].clock;
  for (int w = 0; w < MAX_WARPS; w++)
    if (w != warp() && line.read[w] > mine[w])
      fault("byte %lld of shared memory is copied to, and warp %d has not said that it has read it", (long long)byte,
            w);
}
void check_there(int64_t byte) {
  const Line &line = line_at(byte);
  if (line.is == Is::nothing)
    fault("byte %lld of shared memory is multiplied, and nothing was copied", (long long)byte);
  if (line.is == Is::coming) fault("byte %lld of shared memory is multiplied while it is copied to", (long long)byte);
  if (s.known[warp()].waited[line.barrier] <= line.phase)
    fault("byte %lld of shared memory is multiplied, and nobody waited for its copy", (long long)byte);
}

// Operands: where 16 bytes of a row lie, k = 0 ... 7 or 8 ... 15.
struct Operand {
  int64_t begin, along_k, along_rows;
  bool is_swizzled;
  explicit Operand(uint64_t bits)
      : begin((int64_t)(bits & 0x3fff) << 4), along_k((int64_t)(bits >> 16 & 0x3fff) << 4),
        along_rows((int64_t)(bits >> 32 & 0x3fff) << 4), is_swizzled(bits >> 62 == 1) {
    if ((bits >> 46 & 0xffff) || bits >> 63) fault("an operand with an offset, or a swizzle of fewer than 128 bytes");
  }
  int64_t at(int row, int k) const {
    if (!is_swizzled) return begin + row / 8 * along_rows + k * along_k + row % 8 * LINE;
    const int64_t plain = begin + row / 8 * along_rows + row % 8 * MATRIX + k * LINE;
    return plain ^ (plain >> 7 & 7) << 4;
  }
  const uint16_t *row(int r, int k) const { return (const uint16_t *)(shared_begin() + at(r, k)); }
};
template <class Do>
void each_line(const Product &p, const Do &act) {
  const Operand a(p.of_a), b(p.of_b);
  for (int k = 0; k < 2; k++) {
    for (int row = 0; row < GROUP / 2; row++) act(a.at(row, k));
    for (int column = 0; column < p.columns; column++) act(b.at(column, k));
  }
}

// This thread's part: of D rows g and g + 8 of its warp's 16, columns 2t and 2t + 1 of each eight.
void carry_out(const Product &p, std::vector<float> &sums) {
  const Operand a(p.of_a), b(p.of_b);
  const int lane = place().thread % WARP, g = lane / 4, t = lane % 4, first = warp() % 4 * 16;
  double of_a[2][16], of_b[16];
  for (int i = 0; i < 32; i++) of_a[i / 16][i % 16] = p.value(a.row(first + g + i / 16 * 8, i % 16 / 8)[i % 8]);
  for (int column = 0; column < p.columns / 4; column++) {
    for (int k = 0; k < 16; k++) of_b[k] = p.value(b.row(column / 2 * 8 + 2 * t + column % 2, k / 8)[k % 8]);
    for (int i = 0; i < 2; i++) {
      float &sum = sums[column / 2 * 4 + i * 2 + column % 2];
      if (!p.adds) sum = 0.0f;
      for (int half = 0; half < 2; half++) {
        double terms[9] = {sum};
        for (int k = 0; k < 8; k++) terms[1 + k] = of_a[i][half * 8 + k] * of_b[half * 8 + k];
        sum = sum_of_nine(terms);
      }
    }
  }
}

Sums &sums_of(Thread &mine, float *registers, int number) {
  for (Sums &sums : mine.sums)
    if (sums.registers == registers) return sums;
  if (!mine.is_fenced) fault("sums are multiplied to that were not fenced");
  mine.sums.push_back({registers, 0, std::vector<float>(registers, registers + number)});
  std::fill(registers, registers + number, std::numeric_limits<float>::quiet_NaN());
  return mine.sums.back();
}

}  // namespace

uint32_t shared_address(const void *p) { return (uint32_t)offset_of(p); }

void begin_barrier(const void *at, int count) {
  touch((const char *)at, 8, true);
  if (!s.barriers.insert({at, {count, count, 0, 0, moment()}}).second) fault("a barrier that was begun before");
}
void arrive(const void *at, int bytes) {
  Barrier &barrier = barrier_at(at);
  if (barrier.missing == 0) fault("more arrive at a barrier than it counts");
  barrier.bytes += bytes;
  join(barrier.told, s.known[warp()]);
  s.known[warp()].clock[warp()]++;
  barrier.missing--;
  end_if_complete(barrier);
}
void await_barrier(const void *at, uint32_t parity) {
  touch((const char *)at, 8, false);
  Barrier &barrier = barrier_at(at);
  while ((barrier.phases & 1) == parity) wait_at_barrier();
  Known &mine = s.known[warp()];
  join(mine, barrier.seen);
  mine.waited[at] = barrier.phases;
}

// Each line of what comes.
template <class Do>
static void each_line(const Copy &copy, const Do &act) {
  const int64_t first = offset_of(copy.to);
  for (int64_t byte = first / LINE * LINE; byte < first + copy.bytes; byte += LINE) act(byte);
}
namespace {
struct Tensor {  // what a map is here
  const char *begin;
  int64_t extents[4], strides[3];
  uint16_t part[4];
  bool is_swizzled;
};
}  // namespace
bool map_tensor(TensorMap &map, const void *begin, const Extents &extents, const Strides &strides, const Extents &part,
                bool is_swizzled) {
  Tensor tensor{(const char *)begin, {}, {0, 0, 0}, {}, is_swizzled};
  static_assert(sizeof(Tensor) <= sizeof(TensorMap));
  const int64_t most = (int64_t)1 << 32, row = part.of[0] * 2;
  bool is_right = (uintptr_t)begin % LINE == 0 && row % LINE == 0 && !(is_swizzled && row != MATRIX);
  for (int i = 0; i < 4; i++) {
    is_right = is_right && extents.of[i] >= 1 && extents.of[i] <= most && part.of[i] >= 1 && part.of[i] <= 256;
    tensor.extents[i] = extents.of[i], tensor.part[i] = (uint16_t)part.of[i];
  }
  for (int i = 0; i < 3; i++) {
    const bool is_there = extents.of[i + 1] > 1 || part.of[i + 1] > 1;
    const int64_t stride = strides.of[i];
    is_right = is_right && (!is_there || (stride > 0 && stride % LINE == 0 && stride < most << 8));
    tensor.strides[i] = strides.of[i];
  }
  memcpy(&map, &tensor, sizeof tensor);
  return is_right;
}
void begin_tensor_copy(char *to, const TensorMap &map, const std::array<int, 4> &at, const void *barrier) {
  Tensor t;
  memcpy(&t, &map, sizeof t);
  if ((uintptr_t)&map % 64) fault("a tensor's map that is not aligned");
  if (shared_address(to) % (t.is_swizzled ? 8 * MATRIX : MATRIX)) fault("a copy of a tensor that is not aligned");
  const uint32_t phase = barrier_at(barrier).phases;
  Coming coming{{}, barrier};
  int64_t pieces = 0;  // of 16 bytes of the part
  for (int d = 0; d < t.part[3]; d++)
    for (int c = 0; c < t.part[2]; c++)
      for (int b = 0; b < t.part[1]; b++)
        for (int a = 0; a < t.part[0]; a += LINE / 2, pieces++) {
          const int64_t place[4] = {(int64_t)at[0] + a, (int64_t)at[1] + b, (int64_t)at[2] + c, (int64_t)at[3] + d};
          bool is_there = true;
          for (int i = 0; i < 4; i++) is_there = is_there && place[i] >= 0 && place[i] < t.extents[i];
          const char *from = t.begin + place[0] * 2;
          for (int i = 0; i < 3; i++) from += place[i + 1] * t.strides[i];
          int64_t byte = offset_of(to) + pieces * LINE;
          if (t.is_swizzled) byte ^= (byte >> 7 & 7) << 4;
          check_free(byte);
          Line &line = line_at(byte);
          line.is = Is::coming, line.barrier = barrier, line.phase = phase;
          coming.copies.push_back({(char *)shared_begin() + byte, is_there ? from : nullptr, LINE, 0});
        }
  s.coming.push_back(coming);
}

void begin_products() {
  meet_in(Meeting::begin_products);
  thread().is_fenced = true;
}
void multiply_group(float *sums, int columns, uint64_t of_a, uint64_t of_b, bool adds, Value value) {
  meet_in(Meeting::multiply_group);
  Thread &mine = thread();
  const Product p{sums, columns, of_a, of_b, adds, value, mine.group};
  if (place().thread % WARP == 0) {
    each_line(p, check_there);
    each_line(p, [](int64_t byte) { line_at(byte).reading++; });
  }
  sums_of(mine, sums, columns / 2).num_under_way++;
  mine.products.push_back(p);
  for (uint64_t part : {of_a, of_b, (uint64_t)columns, (uint64_t)adds}) mine.done = (mine.done ^ part) * 0x100000001b3;
}
void end_products() {
  meet_in(Meeting::end_products);
  thread().group++;
  thread().is_fenced = false;
}
void await_products(int num_left) {
  meet_in(Meeting::await_products);
  Thread &mine = thread();
  std::vector<Product> left;
  for (const Product &p : mine.products) {
    if (p.group >= mine.group - num_left) {
      left.push_back(p);
      continue;
    }
    Sums &sums = sums_of(mine, p.sums, p.columns / 2);
    carry_out(p, sums.values);
    sums.num_under_way--;
    if (place().thread % WARP == 0)
      each_line(p, [](int64_t byte) {
        Line &line = line_at(byte);
        line.reading--, line.read[warp()] = s.known[warp()].clock[warp()];
      });
  }
  mine.products.swap(left);
  std::erase_if(mine.sums, [](const Sums &sums) {
    if (sums.num_under_way == 0) std::copy(sums.values.begin(), sums.values.end(), sums.registers);
    return sums.num_under_way == 0;
  });
  meet_in(Meeting::await_products);  // what one lane tells others is true of all
}

namespace under_way {

void begin_block(int num_threads) {
  s = {};
  s.threads.resize(num_threads), s.known.resize(MAX_WARPS);
  for (int w = 0; w < MAX_WARPS; w++) s.known[w].clock[w] = 1;
}
bool has_copies() { return !s.coming.empty(); }
void bring_one(bool is_needed, uint64_t drawn) {
  if (!is_needed && drawn % 4) return;
  const size_t which = drawn / 4 % s.coming.size();
  Coming one = s.coming[which];
  s.coming.erase(s.coming.begin() + which);
  Barrier &barrier = s.barriers[one.barrier];
  for (Copy &copy : one.copies) {
    bring(copy), barrier.bytes -= copy.bytes;
    each_line(copy, [](int64_t byte) { line_at(byte).is = Is::there; });
  }
  end_if_complete(barrier);
}
void meet(int first_warp, int num_warps) {
  if (s.barriers.empty()) return;
  Known all{};
  for (int w = first_warp; w < first_warp + num_warps; w++) join(all, s.known[w]);
  for (int w = first_warp; w < first_warp + num_warps; w++) s.known[w] = all, s.known[w].clock[w]++;
}
void end_thread() {
  if (!thread().products.empty()) fault("it ends with %d products under way", (int)thread().products.size());
}
std::string end_block() {
  if (!s.coming.empty()) return "it ends with " + std::to_string(s.coming.size()) + " copies under way";
  const size_t num_groups = s.threads.size() / GROUP;
  for (size_t group = 0; group < num_groups; group++)
    for (int i = 1; i < GROUP; i++)
      if (s.threads[group * GROUP + i].done != s.threads[group * GROUP].done)
        return "threads of group " + std::to_string(group) + " have multiplied different things";
  return "";
}
void begin_copy(const char *to, int bytes) {
  if (s.barriers.empty()) return;
  each_line({(char *)to, nullptr, bytes, 0}, [](int64_t byte) {
    check_free(byte);
    line_at(byte).is = Is::coming;
  });
}
void forget(const char *to, int bytes) {
  if (s.barriers.empty()) return;
  each_line({(char *)to, nullptr, bytes, 0}, [](int64_t byte) { line_at(byte).is = Is::nothing; });
}

}  // namespace under_way
}  // namespace pagedec::emulate
