// What the kernel files share: the instruction-set level, errors, and how work is split over threads.
//
// A kernel family is one file that defines `xxx_part(args, thread, num_threads)`: called by every thread of a parallel
// region, it does this thread's static share (a function of the sizes alone) and may use `#pragma omp barrier` inside,
// on a path that all threads take alike. program.cpp puts a barrier between the kernels of a list and wraps the single
// calls. A kernel that needs memory of its own takes it from the context (context.h), which is its first argument then:
// nothing here is static.
#pragma once
#include <cstdint>

#include "pagedec.h"

// 0 scalar, 1 AVX2 + FMA, 2 AVX-512 F/BW/VL/DQ, 3 AVX-512 BF16 + VNNI, 4 AMX tiles, bf16 and int8
#ifndef PD_LEVEL
#define PD_LEVEL 0
#endif
#define PD_INLINE static inline __attribute__((always_inline))

namespace pagedec {

// Whether a linear layer's outputs are gates and what they multiply, side by side.
constexpr bool is_gated(int32_t epilogue) {
  return epilogue == PD_SILU_MUL || epilogue == PD_GELU_MUL || epilogue == PD_CLAMPED_SWIGLU;
}

int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));  // sets pd_last_error, returns -1
int num_threads(const pd_context &);
const char *best_isa();
bool has_vnni();  // whether the processor multiplies bytes

// check_*: everything that can be wrong with a record, before a parallel region is entered. 0 or fail(...).
int check_gemm(const pd_gemm_args &);
int check_size(const char *name, int64_t n, int64_t k);  // of a weight: no number of bytes overflows
int check_pack(const char *name, const pd_context *, const void *w, const void *packed);
int check_blocks(const char *name, int64_t k, int32_t format);
int check_segments(const char *name, const pd_segment *, int32_t num_segments, int64_t n, int64_t k);
int check_embed(const pd_embed_args &);
int check_rms_norm(const pd_rms_norm_args &);
int check_layer_norm(const pd_layer_norm_args &);
int check_rope_kv_write(const pd_rope_kv_write_args &);
int check_kv_copy(const pd_kv_copy_args &);
int check_attention(const pd_attention_args &);
int check_soft_cap(const pd_soft_cap_args &);
int check_process_logits(const pd_process_logits_args &);
int check_restrict_logits(const pd_restrict_logits_args &);
int check_copy_rows(const pd_copy_rows_args &);
int check_spread_logits(const pd_spread_logits_args &);
int check_pick_logits(const pd_pick_logits_args &);
int check_argmax(const pd_argmax_args &);
int check_topk_lse(const pd_topk_lse_args &);
int check_sample(const pd_sample_args &);
int check_best(const pd_best_args &);
int check_verify(const pd_verify_args &);
int check_add_parts(const pd_add_parts_args &);
int check_join_parts(const pd_join_parts_args &);
int check_meet(const pd_meet_args &);
int check_all_gather(const pd_all_gather_args &);
int check_gather(const pd_gather_args &);
int check_route(const pd_route_args &);
int check_experts(const pd_experts_args &);
int check_combine(const pd_combine_args &);
int check_lora(const pd_lora_args &);
int check_probe_read(const pd_context *, const void *data, int64_t bytes, int32_t repeats);
int check_probe_dot(const pd_context *, int32_t dtype, double seconds);
int check_gumbel(const pd_context *, int32_t first_token, int32_t num_tokens, const float *out);

// What a kernel needs of the context's workspace when that many threads, or fewer, carry it out.
int64_t gemm_workspace_bytes(const pd_context &, const pd_gemm_args &, int num_threads);
int64_t experts_workspace_bytes(const pd_context &, const pd_experts_args &, int num_threads);
int64_t attention_workspace_bytes(const pd_attention_args &, int num_threads);

// x of a linear layer with weights in int8 or blocks is quantised into the workspace: by the threads together, with a
// barrier behind it, where gemm_quantize_part returns true (for all threads alike), else by each thread for itself
// inside gemm_part.
bool gemm_quantize_part(const pd_context &, const pd_gemm_args &, int thread, int num_threads);
void gemm_part(const pd_context &, const pd_gemm_args &, int thread, int num_threads);
void experts_part(const pd_context &, const pd_experts_args &, int thread, int num_threads);
// All threads are through with the first before one begins the second.
void route_rows_part(const pd_route_args &, int thread, int num_threads);
void route_part(const pd_route_args &, int thread, int num_threads);
void combine_part(const pd_combine_args &, int thread, int num_threads);
// A x of all rows, behind which all threads wait where it returns true (for all of them alike); then the outputs.
bool lora_low_part(const pd_lora_args &, int thread, int num_threads);
void lora_part(const pd_lora_args &, int thread, int num_threads);
// Groups of 16 gates and the 16 outputs that they multiply, z [groups][2][16], to y [groups][16] in y_dtype: the bits
// of a linear layer with that epilogue.
void gate_outputs(int32_t epilogue, int32_t y_dtype, const float *z, int64_t groups, void *y);
void embed_part(const pd_embed_args &, int thread, int num_threads);
void rms_norm_part(const pd_rms_norm_args &, int thread, int num_threads);
void layer_norm_part(const pd_layer_norm_args &, int thread, int num_threads);
void rope_kv_write_part(const pd_rope_kv_write_args &, int thread, int num_threads);
void kv_copy_part(const pd_kv_copy_args &, int thread, int num_threads);
void attention_part(const pd_context &, const pd_attention_args &, int thread, int num_threads);
void soft_cap_part(const pd_soft_cap_args &, int thread, int num_threads);
void process_logits_part(pd_context &, const pd_process_logits_args &, int thread, int num_threads);
void restrict_logits_part(const pd_restrict_logits_args &, int thread, int num_threads);
void copy_rows_part(const pd_copy_rows_args &, int thread, int num_threads);
void spread_logits_part(const pd_spread_logits_args &, int thread, int num_threads);
void pick_logits_part(const pd_pick_logits_args &, int thread, int num_threads);
void argmax_part(const pd_argmax_args &, int thread, int num_threads);
void topk_lse_part(pd_context &, const pd_topk_lse_args &, int thread, int num_threads);
void sample_part(pd_context &, const pd_sample_args &, int thread, int num_threads);
// All threads are through with the first before one begins the second.
void best_rows_part(pd_context &, const pd_best_args &, int thread, int num_threads);
void best_part(pd_context &, const pd_best_args &, int thread, int num_threads);
void verify_part(pd_context &, const pd_verify_args &, int thread, int num_threads);
void add_parts_part(const pd_add_parts_args &, int thread, int num_threads);
void join_parts_part(const pd_join_parts_args &, int thread, int num_threads);
// By one thread. -1, or the rank that has not come.
int meet(const pd_meet_args &);

// The host's arrays of a call, where kernels reach them: a CPU's do already.
struct HostArray {
  const void *from;
  int64_t num_bytes;
  const void **place;  // receives the address; it holds until the next arrays are carried
};
int carry(pd_context *, const HostArray *arrays, int num_arrays);
// Where kernels leave what an array of the host is to have, until the next call; NULL: fail(...). And the way there.
void *place_of_answer(pd_context *, void *to, int64_t num_bytes);
int bring(pd_context *, void *to, const void *from, int64_t num_bytes);

}  // namespace pagedec
