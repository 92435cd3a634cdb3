// A list of kernels in one parallel region, with a barrier after each: entering a region and a Python call for every
// kernel of every layer would cost a double-digit share of a small model's step.
#include <omp.h>
#include <sched.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <new>

#include "common/context.h"

namespace pagedec {
namespace {

int check(const pd_op &op) {
  switch (op.kind) {
    case PD_OP_GEMM: return check_gemm(*(const pd_gemm_args *)op.args);
    case PD_OP_EMBED: return check_embed(*(const pd_embed_args *)op.args);
    case PD_OP_RMS_NORM: return check_rms_norm(*(const pd_rms_norm_args *)op.args);
    case PD_OP_ROPE_KV_WRITE: return check_rope_kv_write(*(const pd_rope_kv_write_args *)op.args);
    case PD_OP_KV_COPY: return check_kv_copy(*(const pd_kv_copy_args *)op.args);
    case PD_OP_ATTENTION: return check_attention(*(const pd_attention_args *)op.args);
    case PD_OP_ARGMAX: return check_argmax(*(const pd_argmax_args *)op.args);
    case PD_OP_TOPK_LSE: return check_topk_lse(*(const pd_topk_lse_args *)op.args);
    case PD_OP_SAMPLE: return check_sample(*(const pd_sample_args *)op.args);
    case PD_OP_LAYER_NORM: return check_layer_norm(*(const pd_layer_norm_args *)op.args);
    case PD_OP_SOFT_CAP: return check_soft_cap(*(const pd_soft_cap_args *)op.args);
    case PD_OP_PROCESS_LOGITS: return check_process_logits(*(const pd_process_logits_args *)op.args);
    case PD_OP_BEST: return check_best(*(const pd_best_args *)op.args);
    case PD_OP_VERIFY: return check_verify(*(const pd_verify_args *)op.args);
    case PD_OP_ADD_PARTS: return check_add_parts(*(const pd_add_parts_args *)op.args);
    case PD_OP_JOIN_PARTS: return check_join_parts(*(const pd_join_parts_args *)op.args);
    case PD_OP_MEET: return check_meet(*(const pd_meet_args *)op.args);
    case PD_OP_RESTRICT_LOGITS: return check_restrict_logits(*(const pd_restrict_logits_args *)op.args);
    case PD_OP_COPY_ROWS: return check_copy_rows(*(const pd_copy_rows_args *)op.args);
    case PD_OP_PICK_LOGITS: return check_pick_logits(*(const pd_pick_logits_args *)op.args);
    case PD_OP_ALL_GATHER: return check_all_gather(*(const pd_all_gather_args *)op.args);
    case PD_OP_GATHER: return check_gather(*(const pd_gather_args *)op.args);
    case PD_OP_ROUTE: return check_route(*(const pd_route_args *)op.args);
    case PD_OP_EXPERTS: return check_experts(*(const pd_experts_args *)op.args);
    case PD_OP_COMBINE: return check_combine(*(const pd_combine_args *)op.args);
    case PD_OP_LORA: return check_lora(*(const pd_lora_args *)op.args);
    case PD_OP_SPREAD_LOGITS: return check_spread_logits(*(const pd_spread_logits_args *)op.args);
    default: return fail("pd_run: op.kind is %d; it must be 1 to %d", op.kind, PD_OP_SPREAD_LOGITS);
  }
}

void part(pd_context &c, const pd_op &op, int t, int n) {
  switch (op.kind) {
    case PD_OP_GEMM: return gemm_part(c, *(const pd_gemm_args *)op.args, t, n);
    case PD_OP_EMBED: return embed_part(*(const pd_embed_args *)op.args, t, n);
    case PD_OP_RMS_NORM: return rms_norm_part(*(const pd_rms_norm_args *)op.args, t, n);
    case PD_OP_ROPE_KV_WRITE: return rope_kv_write_part(*(const pd_rope_kv_write_args *)op.args, t, n);
    case PD_OP_KV_COPY: return kv_copy_part(*(const pd_kv_copy_args *)op.args, t, n);
    case PD_OP_ATTENTION: return attention_part(c, *(const pd_attention_args *)op.args, t, n);
    case PD_OP_ARGMAX: return argmax_part(*(const pd_argmax_args *)op.args, t, n);
    case PD_OP_TOPK_LSE: return topk_lse_part(c, *(const pd_topk_lse_args *)op.args, t, n);
    case PD_OP_SAMPLE: return sample_part(c, *(const pd_sample_args *)op.args, t, n);
    case PD_OP_LAYER_NORM: return layer_norm_part(*(const pd_layer_norm_args *)op.args, t, n);
    case PD_OP_SOFT_CAP: return soft_cap_part(*(const pd_soft_cap_args *)op.args, t, n);
    case PD_OP_PROCESS_LOGITS: return process_logits_part(c, *(const pd_process_logits_args *)op.args, t, n);
    case PD_OP_BEST: return best_part(c, *(const pd_best_args *)op.args, t, n);
    case PD_OP_VERIFY: return verify_part(c, *(const pd_verify_args *)op.args, t, n);
    case PD_OP_ADD_PARTS: return add_parts_part(*(const pd_add_parts_args *)op.args, t, n);
    case PD_OP_JOIN_PARTS: return join_parts_part(*(const pd_join_parts_args *)op.args, t, n);
    case PD_OP_RESTRICT_LOGITS: return restrict_logits_part(*(const pd_restrict_logits_args *)op.args, t, n);
    case PD_OP_COPY_ROWS: return copy_rows_part(*(const pd_copy_rows_args *)op.args, t, n);
    case PD_OP_PICK_LOGITS: return pick_logits_part(*(const pd_pick_logits_args *)op.args, t, n);
    case PD_OP_ROUTE: return route_part(*(const pd_route_args *)op.args, t, n);
    case PD_OP_EXPERTS: return experts_part(c, *(const pd_experts_args *)op.args, t, n);
    case PD_OP_COMBINE: return combine_part(*(const pd_combine_args *)op.args, t, n);
    case PD_OP_LORA: return lora_part(*(const pd_lora_args *)op.args, t, n);
    case PD_OP_SPREAD_LOGITS: return spread_logits_part(*(const pd_spread_logits_args *)op.args, t, n);
    case PD_OP_MEET: return;  // pd_run's own
    case PD_OP_ALL_GATHER:
    case PD_OP_GATHER: return;  // which no check lets through
  }
}

// What all threads must be through with before a kernel's own part. True: they wait for one another.
bool first_part(pd_context &c, const pd_op &op, int t, int n) {
  if (op.kind == PD_OP_GEMM) return gemm_quantize_part(c, *(const pd_gemm_args *)op.args, t, n);
  if (op.kind == PD_OP_LORA) return lora_low_part(*(const pd_lora_args *)op.args, t, n);
  if (op.kind == PD_OP_BEST) best_rows_part(c, *(const pd_best_args *)op.args, t, n);
  if (op.kind == PD_OP_ROUTE) route_rows_part(*(const pd_route_args *)op.args, t, n);
  return op.kind == PD_OP_BEST || op.kind == PD_OP_ROUTE;
}

// OpenMP's barrier spins for milliseconds, or with a passive policy sleeps at once. A kernel takes tens of
// microseconds: alone, nobody waits longer than SPINS pauses (about 30 us); next to a busy process, yielding lets the
// thread that is waited for run.
class Barrier {
 public:
  void expect(int threads) { threads_ = threads; }  // before the first wait
  void wait() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < SPINS) pause();
      else sched_yield();
    }
  }

 private:
  static constexpr int SPINS = 2000;
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  int threads_ = 0;
};

// Results must not depend on which thread computes them: whatever a thread has been set to (flushing denormals, say,
// which torch sets for one thread alone), kernels round to nearest and keep denormals.
class ExactFloats {
 public:
#if defined(__x86_64__)
  ExactFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // as a process begins: all exceptions masked
  ~ExactFloats() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  ExactFloats() {}
#endif
};

// Checks a program, and makes room in the context for what its kernels need besides their arguments.
int prepare(pd_context &c, const pd_op *ops, int64_t num_ops, int threads) {
  int64_t linear = 0, attention = 0;
  for (int64_t i = 0; i < num_ops; i++) {
    if (check(ops[i])) return -1;
    if (ops[i].kind == PD_OP_GEMM)
      linear = std::max(linear, gemm_workspace_bytes(c, *(const pd_gemm_args *)ops[i].args, threads));
    if (ops[i].kind == PD_OP_EXPERTS)
      linear = std::max(linear, experts_workspace_bytes(c, *(const pd_experts_args *)ops[i].args, threads));
    if (ops[i].kind == PD_OP_ATTENTION)
      attention = std::max(attention, attention_workspace_bytes(*(const pd_attention_args *)ops[i].args, threads));
  }
  if (!c.linear.reserve(linear) || !c.attention.reserve(attention))
    return fail("pd_run: no memory for %lld bytes of workspace", (long long)(linear + attention));
  try {
    if ((int)c.scratch.size() < threads) c.scratch.resize(threads);
  } catch (const std::bad_alloc &) {
    return fail("pd_run: no memory for %d threads", threads);
  }
  return 0;
}

int single(pd_context *context, pd_op_kind kind, const void *args) {
  const pd_op op{kind, 0, args};
  return pd_run(context, &op, 1);
}

}  // namespace
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int pd_run(pd_context *context, const pd_op *ops, int64_t num_ops) {
  if (!context) return fail("pd_run: context is NULL");
  pd_context &c = *context;
  const Turn turn(c);
  if (!turn) return fail("pd_run: another thread works in this context");
  const int n = num_threads(c);
  if (prepare(c, ops, num_ops, n)) return -1;
  Barrier barrier;
  std::atomic<int64_t> starved{-1};  // the last kernel for which a thread found no memory
  std::atomic<int> missing{-1};      // the rank that did not come to a meeting
#pragma omp parallel num_threads(n)
  {
    const ExactFloats exact;
    // Inside someone else's parallel region, or under a thread limit, OpenMP gives fewer threads than asked for: count
    // first.
    const int t = omp_get_thread_num(), got = omp_get_num_threads();
#pragma omp single
    barrier.expect(got);
    for (int64_t i = 0; i < num_ops; i++) {
      bool waits = true;  // whoever found no memory, too
      if (ops[i].kind == PD_OP_MEET) {
        if (t == 0 && missing < 0) missing = meet(*(const pd_meet_args *)ops[i].args);
        barrier.wait();
        continue;
      }
      try {  // nothing may leave the region: the other threads wait at the barrier
        waits = first_part(c, ops[i], t, got);
      } catch (const std::bad_alloc &) {
        starved = i;
      }
      if (waits) barrier.wait();
      try {
        part(c, ops[i], t, got);
      } catch (const std::bad_alloc &) {
        starved = i;
      }
      if (i + 1 < num_ops) barrier.wait();
    }
  }
  if (missing >= 0) return fail("pd_run: rank %d has not come in time", (int)missing);
  const int64_t op = starved;
  return op < 0 ? 0 : fail("pd_run: no memory for ops[%lld], of kind %d", (long long)op, ops[op].kind);
}
int pd_run_program(pd_context *context, pd_program *program) {
  if (!context) return fail("pd_run_program: context is NULL");
  if (!program) return fail("pd_run_program: program is NULL");
  return pd_run(context, program->ops, program->num_ops);  // there is nothing to record
}
void pd_program_clear(pd_program *) {}
int pd_gemm(pd_context *c, const pd_gemm_args *a) { return single(c, PD_OP_GEMM, a); }
int pd_embed(pd_context *c, const pd_embed_args *a) { return single(c, PD_OP_EMBED, a); }
int pd_rms_norm(pd_context *c, const pd_rms_norm_args *a) { return single(c, PD_OP_RMS_NORM, a); }
int pd_layer_norm(pd_context *c, const pd_layer_norm_args *a) { return single(c, PD_OP_LAYER_NORM, a); }
int pd_rope_kv_write(pd_context *c, const pd_rope_kv_write_args *a) { return single(c, PD_OP_ROPE_KV_WRITE, a); }
int pd_kv_copy(pd_context *c, const pd_kv_copy_args *a) { return single(c, PD_OP_KV_COPY, a); }
int pd_attention(pd_context *c, const pd_attention_args *a) { return single(c, PD_OP_ATTENTION, a); }
int pd_soft_cap(pd_context *c, const pd_soft_cap_args *a) { return single(c, PD_OP_SOFT_CAP, a); }
int pd_process_logits(pd_context *c, const pd_process_logits_args *a) { return single(c, PD_OP_PROCESS_LOGITS, a); }
int pd_restrict_logits(pd_context *c, const pd_restrict_logits_args *a) { return single(c, PD_OP_RESTRICT_LOGITS, a); }
int pd_copy_rows(pd_context *c, const pd_copy_rows_args *a) { return single(c, PD_OP_COPY_ROWS, a); }
int pd_pick_logits(pd_context *c, const pd_pick_logits_args *a) { return single(c, PD_OP_PICK_LOGITS, a); }
int pd_argmax(pd_context *c, const pd_argmax_args *a) { return single(c, PD_OP_ARGMAX, a); }
int pd_topk_lse(pd_context *c, const pd_topk_lse_args *a) { return single(c, PD_OP_TOPK_LSE, a); }
int pd_sample(pd_context *c, const pd_sample_args *a) { return single(c, PD_OP_SAMPLE, a); }
int pd_best(pd_context *c, const pd_best_args *a) { return single(c, PD_OP_BEST, a); }
int pd_verify(pd_context *c, const pd_verify_args *a) { return single(c, PD_OP_VERIFY, a); }
int pd_add_parts(pd_context *c, const pd_add_parts_args *a) { return single(c, PD_OP_ADD_PARTS, a); }
int pd_join_parts(pd_context *c, const pd_join_parts_args *a) { return single(c, PD_OP_JOIN_PARTS, a); }
int pd_meet(pd_context *c, const pd_meet_args *a) { return single(c, PD_OP_MEET, a); }
int pd_all_gather(pd_context *c, const pd_all_gather_args *a) { return single(c, PD_OP_ALL_GATHER, a); }
int pd_gather(pd_context *c, const pd_gather_args *a) { return single(c, PD_OP_GATHER, a); }
int pd_route(pd_context *c, const pd_route_args *a) { return single(c, PD_OP_ROUTE, a); }
int pd_experts(pd_context *c, const pd_experts_args *a) { return single(c, PD_OP_EXPERTS, a); }
int pd_combine(pd_context *c, const pd_combine_args *a) { return single(c, PD_OP_COMBINE, a); }
int pd_lora(pd_context *c, const pd_lora_args *a) { return single(c, PD_OP_LORA, a); }
int pd_spread_logits(pd_context *c, const pd_spread_logits_args *a) { return single(c, PD_OP_SPREAD_LOGITS, a); }
}
