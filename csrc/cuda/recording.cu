// Programs as a device repeats them: a graph of their kernels, put into the stream at once.
//
// Grids do not depend on a step, and kernels read counts and plans where the device has them; so one graph serves steps
// of every size. Where the host has written that linear layers have few rows, another one leaves out their kernels for
// many, which would do nothing; were there more rows after all, it would be slow, and right. A graph is made anew only
// where memory that a launch was told of has grown since: plans and partial results, which grow to what was needed
// most; or where a plan was made anew for layers of another shape. Exchanges of ranks are recorded by all of them at a
// time, and repeated likewise, so a list with some is made anew at all where it is at one. NCCL waits for the end of
// all graphs with its exchanges before it gives a communicator up: so contexts know theirs, and end them first.
#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <utility>

#include "cuda/context.h"
#include "cuda/gemm.h"

namespace pagedec {
// And how often the memory there has grown; or nowhere, and a number of a plan's shape.
using Places = std::vector<std::pair<const void *, int64_t>>;
// Of linear layers that have one kernel for few rows, and one for many; and how many are few to all of a counter's.
using Counters = std::vector<std::pair<const void *, int>>;
}

struct pd_recording {
  pd_recording(const pd_context &, const pd_program &);
  ~pd_recording();
  const bool has_exchanges;
  const pagedec::Counters counters;
  std::unique_ptr<pd_recording> of_few;      // the same list for few rows
  pd_context *context = nullptr;  // NULL: it holds nothing
  pagedec::Places places;         // what launches were told of
  cudaGraphExec_t graph = nullptr;
  void clear() {  // one that is under way ends behind this; whose thread it is has no device yet, perhaps
    if (graph) {
      const pagedec::OnDevice on(context->device);
      pagedec::ignore(cudaGraphExecDestroy(graph));
    }
    graph = nullptr, context = nullptr;
  }
};

namespace pagedec {
namespace {

std::mutex belonging;  // of recordings to contexts, each of which may end first, in any thread

void begin_recording(pd_context &c, pd_recording &r) {
  const std::lock_guard lock(belonging);
  r.context = &c;
  c.recordings.push_back(&r);
}
void end_recording(pd_recording &r) {
  const std::lock_guard lock(belonging);
  if (r.context) std::erase(r.context->recordings, &r);
  r.clear();
}

}  // namespace

void end_recordings(pd_context &c) {
  const cudaStream_t stream = stream_of(c);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;  // what is being recorded holds on to exchanges, too
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone)
    ignore(cudaStreamEndCapture(stream, &graph));
  if (graph) ignore(cudaGraphDestroy(graph));
  cudaGetLastError();
  const std::lock_guard lock(belonging);
  for (pd_recording *recording : c.recordings) recording->clear();
  c.recordings.clear();
}
}  // namespace pagedec

namespace pagedec {
namespace {

bool has_exchanges(const pd_program &p) {
  for (int64_t i = 0; i < p.num_ops; i++)
    if (p.ops[i].kind == PD_OP_ALL_GATHER || p.ops[i].kind == PD_OP_GATHER) return true;
  return false;
}

// A kernel's record of a linear layer, of experts what they all are; NULL: it has none.
const pd_gemm_args *layer_of(const pd_op &op) {
  if (op.kind == PD_OP_EXPERTS) return &((const pd_experts_args *)op.args)->gemm;
  return op.kind == PD_OP_GEMM ? (const pd_gemm_args *)op.args : nullptr;
}

// None, where ranks exchange values: all of them have the same list recorded.
Counters counters_of(const pd_context &c, const pd_program &p) {
  Counters found;
  if (has_exchanges(p)) return found;
  for (int64_t i = 0; i < p.num_ops; i++) {
    const pd_gemm_args *a = layer_of(p.ops[i]);
    if (!a || a->dtype == PD_F32 || a->quantization == PD_INT8 || a->quantization == PD_BLOCKS) continue;
    const int few = p.ops[i].kind == PD_OP_GEMM ? gemm::few_rows(c, *a) : gemm::kFewRows;
    const auto is_its = [&](const auto &counter) { return counter.first == a->num_rows; };
    const auto at = std::find_if(found.begin(), found.end(), is_its);
    if (at == found.end()) found.emplace_back(a->num_rows, few);
    else at->second = std::min(at->second, few);
  }
  return found;
}

}  // namespace
}  // namespace pagedec

pd_recording::pd_recording(const pd_context &c, const pd_program &p)
    : has_exchanges(pagedec::has_exchanges(p)), counters(pagedec::counters_of(c, p)) {}
pd_recording::~pd_recording() { pagedec::end_recording(*this); }

namespace pagedec {
namespace {

// Ranks that share memory meet on the host: a list with meetings is carried out kernel by kernel.
bool can_be_recorded(const pd_program &p) {
  for (int64_t i = 0; i < p.num_ops; i++)
    if (p.ops[i].kind == PD_OP_MEET) return false;
  return p.num_ops > 1 || has_exchanges(p);
}

bool is_few(const pd_context &c, const pd_recording &r) {
  const auto is_small = [&](const auto &counter) {
    for (const auto &written : c.written)
      if (written.place == counter.first) return written.number <= counter.second;
    return false;
  };
  return !r.counters.empty() && std::all_of(r.counters.begin(), r.counters.end(), is_small);
}

Places places_of(const pd_context &c, const pd_program &p) {
  Places places;
  const auto add = [&](const DeviceMemory &memory) { places.emplace_back(memory.get(), memory.num_grown()); };
  add(c.partials), add(c.totals);
  for (int64_t i = 0; i < p.num_ops; i++) {
    if (p.ops[i].kind != PD_OP_ATTENTION) continue;
    const auto &own = *(const pd_device_plan *)((const pd_attention_args *)p.ops[i].args)->plan;
    const plan::Header &h = own.header();
    add(own.resident);
    for (int32_t word : {h.kv_heads, h.head_dim, h.block_size, h.dtype, h.kv_kind, h.scale_bits, h.soft_cap_bits})
      places.emplace_back(nullptr, word);
  }
  return places;
}

// What a step may change of plans: that they hold something, and what they need.
int prepare(pd_context &c, const pd_program &p) {
  for (int64_t i = 0; i < p.num_ops; i++) {
    if (p.ops[i].kind != PD_OP_ATTENTION) continue;
    const pd_attention_args &a = *(const pd_attention_args *)p.ops[i].args;
    if (before_checks(c) || check_attention(a) || reserve_attention(c, a)) return -1;
  }
  return 0;
}

// A device must not be waited for while a stream of it is captured, whichever threads they are of: that would end what
// is being recorded. Those that record do not wait for each other, since ranks of a process do it together.
std::shared_mutex captures;
std::atomic<int64_t> num_recorded{0};

int record(pd_context &c, const pd_program &p, pd_recording &r, bool for_few) {
  const cudaStream_t stream = stream_of(c);
  const std::shared_lock lock(captures);
  if (launched("pd_run_program", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) return -1;
  num_recorded++;
  c.is_for_few = for_few;
  const int failed = carry_out(c, p.ops, p.num_ops);
  c.is_for_few = false;
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);  // also of what has failed
  if (failed) cudaGetLastError();  // what came of that is told already
  int status = failed ? failed : launched("pd_run_program", ended);
  if (!status) status = launched("pd_run_program", cudaGraphInstantiate(&r.graph, graph, 0));
  if (graph) ignore(cudaGraphDestroy(graph));
  return status;
}
int repeat(pd_context &c, const pd_recording &r) {
  return launched("pd_run_program", cudaGraphLaunch(r.graph, stream_of(c)));
}

}  // namespace

bool is_for_few(const pd_context &c) { return c.is_for_few; }

int await_devices() {
  const std::lock_guard lock(captures);
  int count = 0, status = launched("await", cudaGetDeviceCount(&count));
  for (int device = 0; device < count; device++) {
    if (!is_in_use(device)) continue;
    const OnDevice on(device);
    if (launched("await", cudaDeviceSynchronize())) status = -1;
  }
  return status;
}
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int pd_run_program(pd_context *context, pd_program *program) {
  if (!context) return fail("pd_run_program: context is NULL");
  if (!program) return fail("pd_run_program: program is NULL");
  pd_context &c = *context;
  const Turn turn(c, true);
  if (!turn) return fail("pd_run_program: another thread works in this context");
  if (!can_be_recorded(*program)) return carry_out(c, program->ops, program->num_ops);
  pd_recording *&r = program->recording;
  if (!r) {  // a kernel is loaded when it is first launched, which no recording can hold
    if (carry_out(c, program->ops, program->num_ops)) return -1;
    r = new (std::nothrow) pd_recording(c, *program);  // without it the next time is like this one
    return 0;
  }
  if (check_ranks(c) || prepare(c, *program)) return -1;
  const bool is_small = is_few(c, *r);
  if (is_small && !r->of_few) r->of_few.reset(new (std::nothrow) pd_recording(c, *program));
  const bool for_few = is_small && r->of_few;
  pd_recording &own = for_few ? *r->of_few : *r;
  Places places = places_of(c, *program);
  bool is_stale = own.context != &c || own.places != places;
  if (own.has_exchanges && any_rank(c, is_stale)) return -1;
  if (is_stale) {
    end_recording(own);
    begin_recording(c, own);
    if (record(c, *program, own, for_few)) return end_recording(own), -1;
    own.places = std::move(places);
  }
  return repeat(c, own);
}
#if !defined(__CUDACC__)
// For tests: how many lists have been recorded.
PD_EXPORT int64_t pd_emulate_num_recorded(void) { return num_recorded; }
#endif
void pd_program_clear(pd_program *program) {
  if (!program) return;
  delete program->recording;
  program->recording = nullptr;
}
}
