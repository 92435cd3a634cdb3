#include "cuda/emulate/machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "cuda/emulate/memory.h"
#include "cuda/emulate/warpgroup.h"

#if !defined(__x86_64__)
#error "the emulator switches between fibers with the registers of x86-64"
#endif

extern "C" void pd_emulate_switch(void **from, void *to);
asm(R"(
.text
.type pd_emulate_switch, @function
.globl pd_emulate_switch
.hidden pd_emulate_switch
pd_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pd_emulate_switch, .-pd_emulate_switch
)");

namespace pagedec::emulate {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t MEET_AND_ORDER = 0, RELEASE = 65, FIRST_MEETING = 66;  // in place of the size of what lanes give
constexpr int64_t GRANULE = 2;  // bytes: the smallest value that kernels keep in shared memory

enum class Waits { nothing, block, group, warp, barrier, kernels, over };

struct Fiber {
  void *stack_pointer = nullptr;
  Waits waits = Waits::nothing;
  int copy_group = 0;  // that the next copy is of
  std::vector<Copy> copies{};
  bool has_awaited = false;  // the kernels before
};

struct Warp {
  alignas(64) char data[WARP * 64];
  int num_arrived = 0, num_live = 0;
  size_t size = 0;           // of what lanes give in this meeting, or what else it is
  uint32_t order_round = 0;  // meetings so far that order memory between lanes: no shuffle and no product does
};

struct Group {
  int num_arrived = 0;
  uint32_t round = 0;
};
struct Changes {  // atomic ones, which do one another no harm
  Moment last;
  bool many_warps = false;  // have made some since the block met
  bool many_lanes = false;  // of the last one's warp have, since they met
};
struct Shadow {
  Changes changes;
  Moment write, read;
  bool many_groups = false, many_warps = false;  // have read it since the block met, or their group
  bool many_lanes = false;                       // of the warp of `read` have, since they met
  bool is_coming = false;   // a copy has begun and is not over
};

struct Region {
  const void *tag;
  int64_t begin, bytes;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Group> groups;
  std::unique_ptr<char[]> stacks;
  size_t num_stacks = 0;
  std::vector<char> memory;
  std::vector<Shadow> shadows;
  std::vector<Region> regions;
  const std::function<void()> *body = nullptr;
  void *home = nullptr;
  int num_live = 0, num_arrived = 0;
  uint32_t block_round = 0;
  int64_t launch_bytes = 0;  // of shared memory, that a launch gives
  Place place{};
  Before *before = nullptr;  // what blocks find until they have waited for the kernels in front
  std::string problem;
  uint64_t seed = 1;
  std::mt19937_64 draw;

  Fiber &fiber() { return fibers[place.thread]; }
  Warp &warp() { return warps[place.thread / WARP]; }
  Group &group() { return groups[place.thread / GROUP]; }
  Moment moment() { return {place.thread, block_round, group().round, warp().order_round}; }
};

Machine m;        // not of each thread: to find it would cost more than most of what is done with it
std::mutex turn;  // of those who launch
thread_local bool is_running_now = false;

void to_home() { pd_emulate_switch(&m.fiber().stack_pointer, m.home); }

void wait(Waits what) {
  m.fiber().waits = what;
  to_home();
}

void wake(int first, int stop, Waits what) {
  for (int i = first; i < stop; i++)
    if (m.fibers[i].waits == what) m.fibers[i].waits = Waits::nothing;
}
void end_block_meeting() {
  m.num_arrived = 0, m.block_round++;
  under_way::meet(0, (int)m.warps.size());
  wake(0, (int)m.fibers.size(), Waits::block);
}

void end_warp_meeting(int warp) {
  m.warps[warp].num_arrived = 0;
  if (m.warps[warp].size == MEET_AND_ORDER) m.warps[warp].order_round++;
  wake(warp * WARP, std::min((int)m.fibers.size(), (warp + 1) * WARP), Waits::warp);
}

void begin_fiber() {
  (*m.body)();
  if (!m.fiber().copies.empty()) fault("it ends with %d copies under way", (int)m.fiber().copies.size());
  under_way::end_thread();
  m.fiber().waits = Waits::over;
  m.warp().num_live--;
  if (--m.num_live && m.num_arrived == m.num_live) end_block_meeting();  // a barrier is for those that are left
  for (;;) to_home();
}

void *prepared(char *stack) {  // what the switch finds: six registers and where to begin
  void **top = (void **)(stack + STACK_BYTES - 64);
  *--top = nullptr;  // a function begins 8 bytes off 16
  *--top = (void *)begin_fiber;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}

void begin_block(int block) {
  const int num_threads = m.place.num_threads;
  m.place.block = block;
  m.num_live = num_threads, m.num_arrived = 0, m.block_round = 0;
  m.fibers.assign(num_threads, {});
  m.warps.resize((num_threads + WARP - 1) / WARP);
  m.groups.assign((num_threads + GROUP - 1) / GROUP, {});
  under_way::begin_block(num_threads);
  for (size_t w = 0; w < m.warps.size(); w++) {
    m.warps[w].num_arrived = 0, m.warps[w].order_round = 0;
    m.warps[w].num_live = std::min(WARP, num_threads - (int)w * WARP);
  }
  if (m.num_stacks < (size_t)num_threads) {
    m.stacks.reset(new char[num_threads * STACK_BYTES]);
    m.num_stacks = num_threads;
  }
  for (int i = 0; i < num_threads; i++) m.fibers[i].stack_pointer = prepared(m.stacks.get() + i * STACK_BYTES);
  std::fill(m.memory.begin(), m.memory.end(), (char)0xff);
  std::fill(m.shadows.begin(), m.shadows.end(), Shadow{});
}

std::string waiting() {
  std::string text;
  const auto tell = [&](Waits what, const char *name) {
    const auto count = std::count_if(m.fibers.begin(), m.fibers.end(), [&](const Fiber &f) { return f.waits == what; });
    if (count || what == Waits::block || what == Waits::warp)
      text += (text.empty() ? "" : ", ") + std::to_string(count) + " for " + name;
  };
  tell(Waits::block, "their block"), tell(Waits::group, "their group"), tell(Waits::warp, "their warp");
  tell(Waits::barrier, "a barrier");
  return "threads wait for ever: " + text;
}

bool is_early() { return m.before && m.before->is_shown(); }
// The kernels in front are through; and what memory was asked for meanwhile has come.
void end_early() {
  for (Fiber &fiber : m.fibers)
    for (Copy &copy : fiber.copies) bring(copy);
  if (!m.before->hide() && m.problem.empty()) m.problem = "memory is written that kernels in front may use";
  wake(0, (int)m.fibers.size(), Waits::kernels);
}

void run_block(int block) {
  begin_block(block);
  if (m.before) m.before->show();
  const int num_threads = (int)m.fibers.size();
  std::vector<int> ready;
  while (m.num_live && m.problem.empty()) {
    ready.clear();
    for (int i = 0; i < num_threads; i++)
      if (m.fibers[i].waits == Waits::nothing) ready.push_back(i);
    if (under_way::has_copies()) {
      under_way::bring_one(ready.empty(), m.seed ? m.draw() : 0);
      if (ready.empty()) continue;
    }
    if (ready.empty()) {
      if (!is_early()) return void(m.problem = waiting());
      end_early();
      continue;
    }
    if (m.seed) std::shuffle(ready.begin(), ready.end(), m.draw);
    for (int i : ready) {
      if (!m.problem.empty()) return;
      m.place.thread = i;
      pd_emulate_switch(&m.home, m.fibers[i].stack_pointer);
    }
  }
  if (m.problem.empty()) m.problem = under_way::end_block();
}

bool is_of_before(const Moment &a) { return a.block_round < m.block_round; }  // before the block met
bool is_ordered(const Moment &before, int thread) {  // what that access did is known to this thread, or is its own
  if (before.thread < 0 || before.thread == thread || is_of_before(before)) return true;
  const int group = before.thread / GROUP;
  if (group == thread / GROUP && before.group_round < m.groups[group].round) return true;
  return before.thread / WARP == thread / WARP && before.order_round < m.warps[thread / WARP].order_round;
}

bool are_ordered(const Changes &all) {  // each of them before what this thread does next
  const Moment &last = all.last;
  if (last.thread < 0 || is_of_before(last)) return true;
  const bool unmet = last.thread / WARP == m.place.thread / WARP && last.order_round == m.warp().order_round;
  return !all.many_warps && !(unmet && all.many_lanes) && is_ordered(last, m.place.thread);
}

void note(Changes &all) {  // one more, by this thread
  const int thread = m.place.thread;
  const Moment &last = all.last;
  const bool was = last.thread >= 0 && !is_of_before(last);
  const bool same_warp = was && last.thread / WARP == thread / WARP;
  const bool unmet = same_warp && last.order_round == m.warp().order_round;  // they have not met since
  all.many_warps = was && (all.many_warps || !same_warp);
  all.many_lanes = unmet && (all.many_lanes || last.thread != thread);
  all.last = m.moment();
}

}  // namespace

const Place &place() { return m.place; }
Moment moment() { return m.moment(); }
bool is_known(const Moment &of) { return is_ordered(of, m.place.thread); }
void set_seed(uint64_t seed) { m.seed = seed; }
bool is_running() { return is_running_now; }
void await_kernels() {
  m.fiber().has_awaited = true;
  if (is_early()) wait(Waits::kernels);
}
void check_awaited() {
  if (!m.fiber().has_awaited) fault("a kernel that may begin early has not awaited those before it");
}

std::string run(int num_blocks, int num_threads, int64_t shared_bytes, const std::function<void()> &body,
                Before *before) {
  if (num_threads < 1 || num_threads > MAX_THREADS) return "a block of " + std::to_string(num_threads) + " threads";
  if (num_blocks < 1) return "a grid of " + std::to_string(num_blocks) + " blocks";
  const std::lock_guard<std::mutex> mine(turn);
  m.body = &body, m.before = before;
  m.problem.clear();
  m.memory.clear(), m.shadows.clear(), m.regions.clear();
  m.memory.reserve(MAX_SHARED_BYTES);  // addresses must last
  m.launch_bytes = shared_bytes;
  if (shared_bytes > MAX_SHARED_BYTES) return std::to_string(shared_bytes) + " bytes of shared memory";
  m.place = {0, 0, num_threads, num_blocks};
  m.draw.seed(m.seed);
  std::vector<int> order(num_blocks);
  for (int i = 0; i < num_blocks; i++) order[i] = i;
  if (m.seed) std::shuffle(order.begin(), order.end(), m.draw);
  for (int block : order) {
    is_running_now = true;
    run_block(block);
    is_running_now = false;
    if (is_early()) end_early();
    if (!m.problem.empty()) return "block " + std::to_string(block) + ": " + m.problem;
  }
  return "";
}

void fault(const char *format, ...) {
  char text[256];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  m.problem = "thread " + std::to_string(m.place.thread) + ": " + text;
  for (;;) to_home();
}

void sync_block() {
  if (++m.num_arrived == m.num_live)
    end_block_meeting();
  else
    wait(Waits::block);
}

// A device waits for lanes in an instruction, not for whatever they come to: what they give tells some of these apart.
static void meet(size_t size) {
  Warp &w = m.warp();
  if (w.num_live < WARP) fault("a warp's meeting of %d lanes", w.num_live);
  if (w.num_arrived > 0 && size != w.size) fault("lanes of a warp meet in different instructions");
  w.size = size;
  if (++w.num_arrived == WARP)
    end_warp_meeting(m.place.thread / WARP);
  else
    wait(Waits::warp);
}
void sync_warp() { meet(MEET_AND_ORDER); }
void meet_in(Meeting what) { meet(FIRST_MEETING + (size_t)what); }

void sync_group() {
  const int first = m.place.thread / GROUP * GROUP;
  if (first + GROUP > (int)m.fibers.size()) fault("a group of %d threads", (int)m.fibers.size() - first);
  if (++m.group().num_arrived < GROUP) return wait(Waits::group);
  m.group().num_arrived = 0, m.group().round++;
  under_way::meet(first / WARP, GROUP / WARP);
  wake(first, first + GROUP, Waits::group);
}
void wait_at_barrier() { wait(Waits::barrier); }
void wake_those_at_barriers() { wake(0, (int)m.fibers.size(), Waits::barrier); }
void release() { meet(RELEASE); }

const void *exchange(const void *mine, size_t size) {
  Warp &w = m.warp();
  memcpy(w.data + m.place.thread % WARP * size, mine, size);
  meet(size);
  return w.data;
}

// To the others a change is a write: so it is made one, if only for as long as it takes to look.
void touch_atomically(const char *where, int64_t bytes) {
  const int64_t first = where - m.memory.data(), last = first + bytes - 1;
  for (int64_t g = first / GRANULE; g <= last / GRANULE; g++) {
    Changes changes;
    std::swap(changes, m.shadows[g].changes);
    const Moment write = m.shadows[g].write;
    touch(m.memory.data() + g * GRANULE, GRANULE, true);
    m.shadows[g].write = write;
    note(changes);
    m.shadows[g].changes = changes;
  }
}

char *shared(const void *tag, int64_t bytes) {
  for (const Region &region : m.regions)
    if (region.tag == tag) return m.memory.data() + region.begin;
  const int64_t begin = shared_size(), end = begin + (bytes + 15) / 16 * 16;
  // Both together: a launch asks for more than a kernel may have otherwise only if what it gives is more by itself.
  const int64_t most = m.launch_bytes > DECLARED_BYTES ? MAX_SHARED_BYTES : DECLARED_BYTES;
  if (end > most) fault("%lld bytes of shared memory, of %lld", (long long)end, (long long)most);
  m.memory.resize(end, (char)0xff);
  m.shadows.resize(end / GRANULE);
  m.regions.push_back({tag, begin, bytes});
  return m.memory.data() + begin;
}

const char *shared_begin() { return m.memory.data(); }
int64_t shared_size() { return (int64_t)m.memory.size(); }

static const char launch_tag = 0;
SharedMemory::SharedMemory() : p_(shared(&launch_tag, m.launch_bytes)), bytes_(m.launch_bytes) {}

void touch(const char *where, int64_t bytes, bool is_write) {
  const int64_t first = where - m.memory.data();
  if (first < 0 || first + bytes > (int64_t)m.memory.size())
    fault("%lld bytes outside shared memory", (long long)bytes);
  const int thread = m.place.thread;
  const Moment mine = m.moment();
  for (int64_t g = first / GRANULE; g < (first + bytes + GRANULE - 1) / GRANULE; g++) {
    Shadow &shadow = m.shadows[g];
    const Moment &read = shadow.read;
    const bool same_group = read.thread >= 0 && read.thread / GROUP == thread / GROUP;
    const bool group_met = same_group && !shadow.many_groups && read.group_round < mine.group_round;
    const bool was_read = read.thread >= 0 && !is_of_before(read) && !group_met;
    const bool same_warp = was_read && read.thread / WARP == thread / WARP;
    const bool unmet = same_warp && read.order_round == mine.order_round;  // they have not met since
    const bool is_read_elsewhere = was_read && (shadow.many_warps || (unmet && shadow.many_lanes));
    if (shadow.is_coming) fault("byte %lld of shared memory is used while it is copied to", (long long)(g * GRANULE));
    if (!is_ordered(shadow.write, thread))
      fault("byte %lld of shared memory is used while thread %d writes it", (long long)(g * GRANULE),
            shadow.write.thread);
    if (is_write && (is_read_elsewhere || !is_ordered(read, thread)))
      fault("byte %lld of shared memory is written while thread %d reads it", (long long)(g * GRANULE), read.thread);
    if (!are_ordered(shadow.changes))
      fault("byte %lld of shared memory is used while thread %d changes it", (long long)(g * GRANULE),
            shadow.changes.last.thread);
    if (is_write) {
      shadow.write = mine;
      continue;
    }
    shadow.many_groups = was_read && (shadow.many_groups || !same_group);
    shadow.many_warps = was_read && (shadow.many_warps || !same_warp);
    shadow.many_lanes = unmet && (shadow.many_lanes || read.thread != thread);
    shadow.read = mine;
  }
}

static void set_coming(const Copy &copy, bool is_coming) {
  const int64_t first = (copy.to - m.memory.data()) / GRANULE;
  for (int64_t g = first; g < first + copy.bytes / GRANULE; g++) m.shadows[g].is_coming = is_coming;
}

void begin_copy(char *to, const char *from, int bytes, bool is_read) {
  if (((uintptr_t)to | (uintptr_t)from) % bytes) fault("a copy that is not aligned");  // even of what is not read
  touch(to, bytes, true);
  under_way::begin_copy(to, bytes);
  m.fiber().copies.push_back({to, is_read ? from : nullptr, bytes, m.fiber().copy_group});
  set_coming(m.fiber().copies.back(), true);
}

void bring(Copy &copy) {
  if (std::exchange(copy.is_brought, true)) return;
  if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
  else memset(copy.to, 0, copy.bytes);
}
void end_copy_group() { m.fiber().copy_group++; }

void await_copies(int num_left) {
  Fiber &fiber = m.fiber();
  std::vector<Copy> under_way;
  for (Copy &copy : fiber.copies) {
    if (copy.group >= fiber.copy_group - num_left) {
      under_way.push_back(copy);
      continue;
    }
    set_coming(copy, false);
    bring(copy);
    touch(copy.to, copy.bytes, true);
    under_way::forget(copy.to, copy.bytes);
  }
  fiber.copies.swap(under_way);
}

}  // namespace pagedec::emulate
