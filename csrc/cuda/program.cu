// A list of kernels, put into the context's stream in order.
#include "cuda/context.h"

namespace pagedec {
namespace {

template <class A>
int checked(const pd_op &op, int (*check)(const A &)) {
  return check(*(const A *)op.args);
}
template <class A>
int put(pd_context &c, const pd_op &op, int (*enqueue)(pd_context &, const A &)) {
  return enqueue(c, *(const A *)op.args);
}

// What ranks wait for is theirs when the host is here, so what they have put into their streams must be through.
int enqueue_meet(pd_context &c, const pd_meet_args &a) {
  if (await(c)) return -1;
  const int missing = meet(a);
  return missing < 0 ? 0 : fail("pd_run: rank %d has not come in time", missing);
}

// Checks a kernel's record or, `runs`, puts it into the stream.
int one(pd_context &c, const pd_op &op, bool runs) {
  switch (op.kind) {
    case PD_OP_GEMM: return runs ? put(c, op, enqueue_gemm) : checked(op, check_gemm);
    case PD_OP_EMBED: return runs ? put(c, op, enqueue_embed) : checked(op, check_embed);
    case PD_OP_RMS_NORM: return runs ? put(c, op, enqueue_rms_norm) : checked(op, check_rms_norm);
    case PD_OP_LAYER_NORM: return runs ? put(c, op, enqueue_layer_norm) : checked(op, check_layer_norm);
    case PD_OP_ROPE_KV_WRITE: return runs ? put(c, op, enqueue_rope_kv_write) : checked(op, check_rope_kv_write);
    case PD_OP_KV_COPY: return runs ? put(c, op, enqueue_kv_copy) : checked(op, check_kv_copy);
    case PD_OP_ATTENTION: return runs ? put(c, op, enqueue_attention) : checked(op, check_attention);
    case PD_OP_SOFT_CAP: return runs ? put(c, op, enqueue_soft_cap) : checked(op, check_soft_cap);
    case PD_OP_ARGMAX: return runs ? put(c, op, enqueue_argmax) : checked(op, check_argmax);
    case PD_OP_PROCESS_LOGITS: return runs ? put(c, op, enqueue_process_logits) : checked(op, check_process_logits);
    case PD_OP_TOPK_LSE: return runs ? put(c, op, enqueue_topk_lse) : checked(op, check_topk_lse);
    case PD_OP_SAMPLE: return runs ? put(c, op, enqueue_sample) : checked(op, check_sample);
    case PD_OP_BEST: return runs ? put(c, op, enqueue_best) : checked(op, check_best);
    case PD_OP_VERIFY: return runs ? put(c, op, enqueue_verify) : checked(op, check_verify);
    case PD_OP_ADD_PARTS: return runs ? put(c, op, enqueue_add_parts) : checked(op, check_add_parts);
    case PD_OP_MEET: return runs ? put(c, op, enqueue_meet) : checked(op, check_meet);
    case PD_OP_RESTRICT_LOGITS: return runs ? put(c, op, enqueue_restrict_logits) : checked(op, check_restrict_logits);
    case PD_OP_COPY_ROWS: return runs ? put(c, op, enqueue_copy_rows) : checked(op, check_copy_rows);
    case PD_OP_PICK_LOGITS: return runs ? put(c, op, enqueue_pick_logits) : checked(op, check_pick_logits);
    case PD_OP_JOIN_PARTS: return runs ? put(c, op, enqueue_join_parts) : checked(op, check_join_parts);
    case PD_OP_ALL_GATHER: return runs ? put(c, op, enqueue_all_gather) : checked(op, check_all_gather);
    case PD_OP_GATHER: return runs ? put(c, op, enqueue_gather) : checked(op, check_gather);
    case PD_OP_ROUTE: return runs ? put(c, op, enqueue_route) : checked(op, check_route);
    case PD_OP_EXPERTS: return runs ? put(c, op, enqueue_experts) : checked(op, check_experts);
    case PD_OP_COMBINE: return runs ? put(c, op, enqueue_combine) : checked(op, check_combine);
    case PD_OP_LORA: return runs ? put(c, op, enqueue_lora) : checked(op, check_lora);
    case PD_OP_SPREAD_LOGITS: return runs ? put(c, op, enqueue_spread_logits) : checked(op, check_spread_logits);
  }
  return fail("pd_run: op.kind is %d; it must be 1 to %d", op.kind, PD_OP_SPREAD_LOGITS);
}

int single(pd_context *context, pd_op_kind kind, const void *args) {
  const pd_op op{kind, 0, args};
  return pd_run(context, &op, 1);
}

}  // namespace

int carry_out(pd_context &c, const pd_op *ops, int64_t num_ops) {
  if (before_checks(c)) return -1;
  for (int64_t i = 0; i < num_ops; i++) {
    if (one(c, ops[i], false)) return -1;
    if (ops[i].kind == PD_OP_ATTENTION && reserve_attention(c, *(const pd_attention_args *)ops[i].args)) return -1;
  }
  for (int64_t i = 0; i < num_ops; i++)
    if (one(c, ops[i], true)) return -1;
  return 0;
}

}  // namespace pagedec

using namespace pagedec;

extern "C" {
int pd_run(pd_context *context, const pd_op *ops, int64_t num_ops) {
  if (!context) return fail("pd_run: context is NULL");
  const Turn turn(*context, true);
  if (!turn) return fail("pd_run: another thread works in this context");
  return carry_out(*context, ops, num_ops);
}
int pd_gemm(pd_context *c, const pd_gemm_args *a) { return single(c, PD_OP_GEMM, a); }
int pd_embed(pd_context *c, const pd_embed_args *a) { return single(c, PD_OP_EMBED, a); }
int pd_rms_norm(pd_context *c, const pd_rms_norm_args *a) { return single(c, PD_OP_RMS_NORM, a); }
int pd_layer_norm(pd_context *c, const pd_layer_norm_args *a) { return single(c, PD_OP_LAYER_NORM, a); }
int pd_rope_kv_write(pd_context *c, const pd_rope_kv_write_args *a) { return single(c, PD_OP_ROPE_KV_WRITE, a); }
int pd_kv_copy(pd_context *c, const pd_kv_copy_args *a) { return single(c, PD_OP_KV_COPY, a); }
int pd_attention(pd_context *c, const pd_attention_args *a) { return single(c, PD_OP_ATTENTION, a); }
int pd_soft_cap(pd_context *c, const pd_soft_cap_args *a) { return single(c, PD_OP_SOFT_CAP, a); }
int pd_restrict_logits(pd_context *c, const pd_restrict_logits_args *a) { return single(c, PD_OP_RESTRICT_LOGITS, a); }
int pd_copy_rows(pd_context *c, const pd_copy_rows_args *a) { return single(c, PD_OP_COPY_ROWS, a); }
int pd_pick_logits(pd_context *c, const pd_pick_logits_args *a) { return single(c, PD_OP_PICK_LOGITS, a); }
int pd_argmax(pd_context *c, const pd_argmax_args *a) { return single(c, PD_OP_ARGMAX, a); }
int pd_process_logits(pd_context *c, const pd_process_logits_args *a) { return single(c, PD_OP_PROCESS_LOGITS, a); }
int pd_topk_lse(pd_context *c, const pd_topk_lse_args *a) { return single(c, PD_OP_TOPK_LSE, a); }
int pd_sample(pd_context *c, const pd_sample_args *a) { return single(c, PD_OP_SAMPLE, a); }
int pd_best(pd_context *c, const pd_best_args *a) { return single(c, PD_OP_BEST, a); }
int pd_verify(pd_context *c, const pd_verify_args *a) { return single(c, PD_OP_VERIFY, a); }
int pd_add_parts(pd_context *c, const pd_add_parts_args *a) { return single(c, PD_OP_ADD_PARTS, a); }
int pd_meet(pd_context *c, const pd_meet_args *a) { return single(c, PD_OP_MEET, a); }
int pd_join_parts(pd_context *c, const pd_join_parts_args *a) { return single(c, PD_OP_JOIN_PARTS, a); }
int pd_all_gather(pd_context *c, const pd_all_gather_args *a) { return single(c, PD_OP_ALL_GATHER, a); }
int pd_gather(pd_context *c, const pd_gather_args *a) { return single(c, PD_OP_GATHER, a); }
int pd_route(pd_context *c, const pd_route_args *a) { return single(c, PD_OP_ROUTE, a); }
int pd_experts(pd_context *c, const pd_experts_args *a) { return single(c, PD_OP_EXPERTS, a); }
int pd_combine(pd_context *c, const pd_combine_args *a) { return single(c, PD_OP_COMBINE, a); }
int pd_lora(pd_context *c, const pd_lora_args *a) { return single(c, PD_OP_LORA, a); }
int pd_spread_logits(pd_context *c, const pd_spread_logits_args *a) { return single(c, PD_OP_SPREAD_LOGITS, a); }
}
