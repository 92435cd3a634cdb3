// Programs as a device repeats them: a graph of their kernels, put into the stream at once.
//
// Grids do not depend on a step, and kernels read counts and plans where the device has them; so one graph serves steps
// of every size. It is made anew only where memory that a launch was told of lies elsewhere since: plans and partial
// results, which grow to what was needed most.
#include <new>

#include "cuda/context.h"

struct pd_recording {
  const pd_context *context = nullptr;
  std::vector<const void *> places;  // that launches were told of
#if defined(__CUDACC__)
  cudaGraphExec_t graph = nullptr;
  void clear() {
    if (graph) cudaGraphExecDestroy(graph);
    graph = nullptr, context = nullptr;
  }
  ~pd_recording() { clear(); }
#else
  std::vector<pagedec::emulate::Stream::Work> launches;
  void clear() { launches.clear(), context = nullptr; }
#endif
};

namespace pagedec {
namespace {

// Ranks that share memory meet on the host: a list with meetings is carried out kernel by kernel.
bool can_be_recorded(const pd_program &p) {
  for (int64_t i = 0; i < p.num_ops; i++)
    if (p.ops[i].kind == PD_OP_MEET) return false;
  return p.num_ops > 1;
}

std::vector<const void *> places_of(const pd_context &c, const pd_program &p) {
  std::vector<const void *> places{c.partials.get(), c.totals.get()};
  for (int64_t i = 0; i < p.num_ops; i++)
    if (p.ops[i].kind == PD_OP_ATTENTION)
      places.push_back(((const pd_device_plan *)((const pd_attention_args *)p.ops[i].args)->plan)->resident.get());
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

#if defined(__CUDACC__)
int record(pd_context &c, const pd_program &p, pd_recording &r) {
  const cudaStream_t stream = (cudaStream_t)c.stream;
  if (launched("pd_run_program", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) return -1;
  const int failed = carry_out(c, p.ops, p.num_ops);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);  // also of what has failed
  int status = failed ? failed : launched("pd_run_program", ended);
  if (!status) status = launched("pd_run_program", cudaGraphInstantiate(&r.graph, graph, 0));
  if (graph) cudaGraphDestroy(graph);
  return status;
}
int repeat(pd_context &c, const pd_recording &r) {
  return launched("pd_run_program", cudaGraphLaunch(r.graph, (cudaStream_t)c.stream));
}
#else
int record(pd_context &c, const pd_program &p, pd_recording &r) {
  const emulate::Recording now;
  c.work.record(&r.launches);
  const int failed = carry_out(c, p.ops, p.num_ops);
  c.work.record(nullptr);
  return failed;
}
int repeat(pd_context &c, const pd_recording &r) {
  for (const auto &launch : r.launches) c.work.put(launch);
  return 0;
}
#endif

}  // namespace
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
    r = new (std::nothrow) pd_recording;  // without it the next time is like this one
    return 0;
  }
  if (check_ranks(c) || prepare(c, *program)) return -1;
  std::vector<const void *> places = places_of(c, *program);
  if (r->context != &c || r->places != places) {
    r->clear();
    if (record(c, *program, *r)) return -1;
    r->context = &c, r->places = std::move(places);
  }
  return repeat(c, *r);
}
void pd_program_clear(pd_program *program) {
  if (!program) return;
  delete program->recording;
  program->recording = nullptr;
}
}
