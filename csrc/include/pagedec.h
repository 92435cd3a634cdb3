/* pagedec's kernels: one plain C interface for every instruction set and device.
 *
 * No torch, no C++ types, no exceptions: pointers, sizes, and an int status (0, or -1 with pd_last_error()).
 * The same sources are compiled once per instruction set into libpagedec_<isa>.so; all of them share the layouts below,
 * so that weights packed and caches written by one can be read by another.
 *
 * Whatever computes takes a pd_context first: which device, how many threads or which stream, and the memory to work
 * in. One thread at a time works in a context; any number of contexts work side by side, and none knows of another:
 * what a process has of its own is the last error of each thread, and what the processor can do. Functions without one
 * tell of the library or of sizes, or make, free and show handles.
 *
 * Every kernel takes one argument record. Records are filled once, when a model is loaded; what changes from step to
 * step is reached through pointers (`num_rows` first of all), so that a model's whole forward is a constant list of
 * pd_op which pd_run carries out in one parallel region. Calling pd_gemm(context, &args) alone does the same work in a
 * region of its own.
 *
 * Pointers: records, lists of pd_op, pd_attn_shape, pd_attn_batch with its arrays, and what a function returns through
 * pointers are the caller's memory, on every device. Whatever the record of a kernel, pd_pack or a probe points to is
 * memory of the context's device (the arrays that pd_rules points to, too; pd_attention_args.plan is a handle). On a
 * CPU the two are one, and kernels check what the pointers lead to (counts, rows, draws, rules) before anything runs;
 * on a device that is the caller's part. These records are filled for one call, with arrays that the host has just
 * written; for a device they are to be copied there first, and their answers back:
 *   pd_kv_copy_args         num_moves, src, dst
 *   pd_process_logits_args  all but logits and token_plane; rules, and the five arrays of each
 *   pd_restrict_logits_args all but logits
 *   pd_copy_rows_args       num_rows, src_rows, dst_rows
 *   pd_pick_logits_args     num_entries, rows, tokens; values, ranks
 *   pd_argmax_args          num_rows; token_ids
 *   pd_topk_lse_args        num_rows, row_ids; token_ids, values, lse
 *   pd_sample_args          num_draws, draws; token_ids
 *   pd_verify_args          num_drafts, draws, drafts, drafted; token_ids
 *   pd_best_args            num_rows, lse where has_lse, rows, groups; lse, candidates, counts
 *
 * Layouts (block = block_size token slots, slot = block * block_size + offset; D = head_dim):
 *   K, bf16   [num_blocks][kv_heads][D/2][block_size][2]     K, fp32   [num_blocks][kv_heads][D][block_size]
 *   V, bf16   [num_blocks][kv_heads][block_size/2][D][2]     V, fp32   [num_blocks][kv_heads][block_size][D]
 *   weight, bf16   [N/32][K/2][32][2]               weight, fp32   [N/32][K][32]        (N padded to 32 with zeros)
 *   weight, int8   [N/32] panels: 32 scales fp32, then q + 128 [K/4][32][4]
 *   weight, int8 alone   [N/32] panels: 32 scales fp32, then q [K/2][32][2]
 *   weight, fp8   [N/32] panels: scales times 2^120 fp32 [K/128][32], then bytes (csrc/cpu/gemm_fp8.h)
 *   weight, blocks   [N/32] panels: csrc/cpu/blocks.h
 *   on a CUDA device K and V   [num_blocks][kv_heads][block_size][D]
 *     weight   [N][K] (both padded to 32)   weight, int8   q [N][K] (padded to 32 and 64), then N scales fp32
 *   K and V in bytes (pd_kv_kind): each [num_blocks][kv_heads] piece is laid out as above, a byte an element, then come
 *     the scales of its tokens, bf16 [block_size]: (D + 2) * block_size bytes. On a CUDA device the bytes of a token
 *     lie in groups of 16, of each in the order 0 8 1 9 2 10 ... 7 15; what is left of D is as it is.
 * Every row's result is a function of that row's own inputs: not of num_rows, its neighbours, or the number of threads.
 */
#ifndef PAGEDEC_H
#define PAGEDEC_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_ABI_VERSION 17
#if defined(__GNUC__)
#define PD_EXPORT __attribute__((visibility("default")))
#else
#define PD_EXPORT
#endif

/* A CPU has the first two, a CUDA device all. */
typedef enum { PD_F32 = 0, PD_BF16 = 1, PD_F16 = 2 } pd_dtype;

/* ---- library */
PD_EXPORT int32_t pd_abi_version(void);
PD_EXPORT const char *pd_last_error(void);   /* of this thread's last failing call; valid until the next one */
/* "scalar", "avx2", "avx512", "avx512bf16", "amx" or "cuda": what this library was built for. Or for tests
 * "amx_emulated", "avx512_on_avx2", "avx512bf16_on_avx2", "amx_on_avx2" or "cuda_emulated". */
PD_EXPORT const char *pd_isa(void);
/* the richest of those that this processor runs (any library can be asked). Asks Linux for what "amx" needs. */
PD_EXPORT const char *pd_best_isa(void);

/* ---- where to compute */
typedef struct pd_context pd_context;
PD_EXPORT int32_t pd_num_devices(void);  /* -1 with pd_last_error() where the driver does not tell */
/* NULL with pd_last_error(). A CPU: device 0; 0 threads: OpenMP's own choice */
PD_EXPORT pd_context *pd_context_new(int32_t device, int32_t num_threads);
PD_EXPORT void pd_context_free(pd_context *);                   /* no call may be under way in it; NULL is nothing */
/* that a call uses now. The thread that a forked child begins with uses 1 */
PD_EXPORT int32_t pd_num_threads(const pd_context *);
/* that its calls are put into, in the device's own form; a CPU: NULL */
PD_EXPORT void *pd_stream(const pd_context *);
/* until all is through that it was called for; a CPU's calls are when they return */
PD_EXPORT int pd_await(pd_context *);

/* ---- memory of a context's device. 1: kernels reach nothing else; 0: they reach all of this process's */
PD_EXPORT int32_t pd_has_memory(const pd_context *);
/* zeros, 64-byte aligned; NULL with pd_last_error(). It outlives its context, and serves all contexts of the device */
PD_EXPORT void *pd_memory_new(pd_context *, int64_t num_bytes);
/* once all is through that any context has begun; NULL is nothing */
PD_EXPORT void pd_memory_free(void *);
/* from the host, in order with the context's calls; `from` may change when it returns */
PD_EXPORT int pd_memory_write(pd_context *, void *to, const void *from, int64_t num_bytes);
/* to the host, when all is through that the context was called for */
PD_EXPORT int pd_memory_read(pd_context *, void *to, const void *from, int64_t num_bytes);
/* A copy to the host that may be under way while the context is called for more: one at a time in each. `end` waits for
 * what came before `begin`, and for nothing that came after it; where the context has joined ranks, as long as they may
 * take. A `begin` without an `end` before it waits for the former copy, which is nobody's then. Freed before its
 * context */
typedef struct pd_fetch pd_fetch;
PD_EXPORT pd_fetch *pd_fetch_new(pd_context *, int64_t max_bytes);   /* NULL with pd_last_error() */
PD_EXPORT void pd_fetch_free(pd_fetch *);
PD_EXPORT int pd_fetch_begin(pd_context *, pd_fetch *, const void *from, int64_t num_bytes);
PD_EXPORT int pd_fetch_end(pd_context *, pd_fetch *, void *to);
/* every byte, in order with the context's calls */
PD_EXPORT int pd_memory_fill(pd_context *, void *to, int32_t byte, int64_t num_bytes);
/* let kernels reach memory of the host, at its own address, until it is unmapped */
PD_EXPORT int pd_memory_map(pd_context *, void *from, int64_t num_bytes);
PD_EXPORT int pd_memory_unmap(void *from);
/* bytes that the device has, and how many of them nobody uses; -1 each where the host's system tells */
PD_EXPORT int pd_memory_room(pd_context *, int64_t *num_free, int64_t *num_all);

/* ---- linear layers: y = epilogue(x W^T + bias). x [rows][k] in dtype, W [n][k]. One chain of products over k = 0, 1,
 * 2, ... for each output, so its bits depend on neither the number of rows nor the number of threads. */
typedef enum {
  PD_STORE = 0,    /* y [rows][n] in y_dtype */
  PD_ADD = 1,      /* y [rows][n] fp32: y += result (the residual stream) */
  /* W holds gate and up rows interleaved by 16 (gate 0-15, up 0-15, gate 16-31, ...): y [rows][n/2] in y_dtype =
   * silu(gate) * up */
  PD_SILU_MUL = 2,
  PD_GELU_MUL = 3, /* as PD_SILU_MUL with the tanh approximation of GELU */
  PD_GELU = 4,     /* y [rows][n] in y_dtype = gelu(result), the tanh approximation */
  /* as PD_SILU_MUL: (min(max(up, -7), 7) + 1) * g * sigmoid(1.702 g) with g = min(gate, 7) (gpt-oss, 2025) */
  PD_CLAMPED_SWIGLU = 5
} pd_epilogue;

/* bytes of a packed weight; 64-byte aligned storage is the caller's */
PD_EXPORT int64_t pd_packed_bytes(int64_t n, int64_t k, int32_t dtype);
/* w [n][k] row-major in dtype; k may be odd */
PD_EXPORT int pd_pack(pd_context *, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed);

/* int8 weights: q = W * (127 / max |W|) of each output, to nearest even, and scale = max |W| / 127. When the kernel
 * runs, x alike in groups of 64 values of a row. y = epilogue((the sum over groups, in order, of (sum of q q) * scale
 * of the group) * scale of the output + bias). A group's sum is an integer that fp32 holds exactly and the rest has one
 * order, so results without an activation are the same on every instruction set and device. A row of x with an infinity
 * or NaN in it gives NaN; a group whose values are all below 2^-120 counts as zeros. */
typedef enum { PD_PLAIN = 0, PD_INT8 = 1, PD_BLOCKS = 2, PD_INT8_WEIGHT_ONLY = 3, PD_FP8 = 4 } pd_quantization;
PD_EXPORT int64_t pd_packed_int8_bytes(int64_t n, int64_t k);                       /* as pd_packed_bytes */
/* w [n][k] in dtype */
PD_EXPORT int pd_pack_int8(pd_context *, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed);

/* The same integers and scales, but x stays in its dtype: y = epilogue((the chain of products x q over k) * scale of
 * the output + bias), where the chain is that of a plain weight whose values are q. So its bits, too, are of one
 * instruction set, or of CUDA. */
PD_EXPORT int64_t pd_packed_int8_weight_only_bytes(int64_t n, int64_t k);           /* as pd_packed_bytes */
/* w [n][k] in dtype */
PD_EXPORT int pd_pack_int8_weight_only(pd_context *, const void *w, int64_t n, int64_t k, int32_t dtype, void *packed);

/* Weights in e4m3 (four bits of exponent, three of mantissa; no NaN), of which PD_FP8_GROUP values of an output share a
 * scale. x stays in its dtype, and a byte becomes w = scale * e4m3, rounded to fp32 and then to x's dtype: y is that of
 * a plain weight of these numbers, to the bit. A scale is 0, or its magnitude from 2^-117 to 2^7: no w is less than
 * fp32's normal numbers or more than fp16's. */
#define PD_FP8_GROUP 128
PD_EXPORT int64_t pd_packed_fp8_bytes(int64_t n, int64_t k);                        /* as pd_packed_bytes */
/* blocks: [n][k / PD_FP8_GROUP, rounded up] of a scale (fp32) and as many bytes; those behind k are passed over */
PD_EXPORT int pd_pack_fp8(pd_context *, const void *blocks, int64_t n, int64_t k, void *packed);

/* Weights in blocks, as files have them: some consecutive values of an output with their own scales (d, dmin, z: fp16).
 *   PD_Q4_0                 32 values: d, nibbles: w = d (q - 8)      PD_INT4_128   the same of 128 values
 *   PD_INT4_ZERO_32, _128   32 or 128 values: d, z, nibbles: w = d (q - z)
 *   PD_Q8_0                 32 values: d, int8: w = d q
 *   PD_Q4_K                 256 values: d, dmin, sc and m of 6 bits for each 32, nibbles: w = d sc q - dmin m
 *   PD_Q6_K                 256 values: q of 6 bits, sc of 8 bits for each 16, d: w = d sc (q - 32)
 *   PD_MXFP4                32 values: d, nibbles that are floats (e2m1), q twice what each is: w = d q; CPUs alone
 * byte for byte as pagedec/kernels/blocks.py says; k is a multiple of a block's values. When the kernel runs, x becomes
 * int8 in groups of 32 values of a row, as above. Of a group, with t the exact sum of (q - zero) q_x over what shares a
 * scale, a = d sc, b = dmin m or d z (exact in fp32) and S the exact sum of q_x:
 *   acc = acc + scale of x * (a t)               Q4_0, INT4_128, Q8_0, MXFP4
 *   acc = acc + scale of x * (a t - b S)         Q4_K, INT4_ZERO_*, whose t has no zero
 *   acc = acc + scale of x * (a t + a' t')       Q6_K, of its two 16 values
 * from 0 on, groups in order, each product, sum and difference rounded to fp32 by itself; y = epilogue(acc + bias), the
 * same on every instruction set and device. Infinities, NaN and tiny values of x are as in int8; a d, dmin or z that is
 * no number gives some infinity or NaN. */
typedef enum {
  PD_Q4_0 = 1, PD_Q8_0, PD_Q4_K, PD_Q6_K, PD_INT4_128, PD_INT4_ZERO_32, PD_INT4_ZERO_128, PD_MXFP4
} pd_block_format;
/* Outputs from first_output on, up to the next segment's, are in this format: a multiple of 32, the first 0. A packed
 * weight is its segments' packed bytes one behind the other. */
typedef struct { int32_t format, first_output; } pd_segment;
#define PD_MAX_SEGMENTS 4
PD_EXPORT int64_t pd_packed_blocks_bytes(int64_t n, int64_t k, int32_t format);     /* as pd_packed_bytes */
/* blocks: [n][k / values of a block] blocks, without gaps. In which order kernels have their bytes is a CPU's or a CUDA
 * device's own; how many there are is not. */
PD_EXPORT int pd_pack_blocks(pd_context *, const void *blocks, int64_t n, int64_t k, int32_t format, void *packed);
/* for tests. 0: do as without the instruction that multiplies bytes, in a library that can; 1 if it will be used */
PD_EXPORT int pd_allow_vnni(pd_context *, int32_t allow);

typedef struct {
  const int32_t *num_rows;
  const void *x;
  const void *packed;
  const float *bias;           /* [n] or NULL; for the *_MUL epilogues interleaved like W */
  void *y;
  int32_t n, k, dtype, y_dtype, epilogue;
  int32_t quantization;        /* of W: pd_quantization */
  const void *next_packed;     /* weight of the linear layer that follows, or NULL: its first panels are prefetched */
  int64_t next_bytes;
  const pd_segment *segments;  /* [num_segments], with PD_BLOCKS: the caller's memory, as records are */
  int32_t num_segments;        /* 1 to PD_MAX_SEGMENTS with PD_BLOCKS, else 0 */
  int32_t x_rows;              /* rows of x that there is memory of, which may be read; 0: as many as num_rows says */
} pd_gemm_args;
PD_EXPORT int pd_gemm(pd_context *, const pd_gemm_args *);

/* ---- rows in and out of the residual stream, which is fp32 whatever the dtype */
/* out[r] = table[token_ids[r]] * scale (+ position_table[positions[r]]), NaN where an id or a position is outside its
 * table; and the cache's token plane: token_plane[slots[r]] = token_ids[r] where slots[r] >= 0. A rank of several has
 * some rows of the table, those of the ids first_id .. first_id + vocab - 1 of num_ids: of other ids, out[r] is 0. */
typedef struct {
  const int32_t *num_rows;
  const int32_t *token_ids;
  const void *table;           /* [vocab][dim] in dtype; with segments a weight in blocks, its values in dtype */
  float *out;                  /* [rows][dim] */
  const int32_t *slots;        /* or NULL */
  int32_t *token_plane;        /* [num_blocks * block_size] or NULL */
  int32_t dim, vocab, dtype;
  float scale;
  const int32_t *positions;    /* [rows]; given together with position_table or both NULL */
  const void *position_table;  /* [num_positions][dim] in dtype */
  int32_t num_positions;
  int32_t first_id, num_ids;   /* num_ids 0: the table has all of them */
  int32_t num_segments;
  const pd_segment *segments;  /* [num_segments], or NULL: as in pd_gemm_args */
} pd_embed_args;
PD_EXPORT int pd_embed(pd_context *, const pd_embed_args *);

typedef struct { /* out[r] = x[row_ids ? row_ids[r] : r] / sqrt(mean(x^2) + eps) * weight, over dim */
  const int32_t *num_rows;
  const float *x;              /* [*][dim] */
  const float *weight;         /* [dim], or NULL without add: out[r] is x's row as it is, in dtype */
  void *out;                   /* [rows][dim] in dtype */
  const int32_t *row_ids;      /* [rows] or NULL */
  int32_t dim, dtype;
  float eps;
  int32_t add;                 /* 1: out is fp32 (and dtype says so) and the result is added to it */
} pd_rms_norm_args;
PD_EXPORT int pd_rms_norm(pd_context *, const pd_rms_norm_args *);

/* out[r] = (v - mean(v)) / sqrt(var(v) + eps) * weight + bias, over dim, with v = x[row_ids ? row_ids[r] : r]; var: the
 * mean of squares */
typedef struct {
  const int32_t *num_rows;
  const float *x;              /* [*][dim] */
  const float *weight;         /* [dim] */
  const float *bias;           /* [dim] or NULL */
  void *out;                   /* [rows][dim] in dtype */
  const int32_t *row_ids;      /* [rows] or NULL */
  int32_t dim, dtype;
  float eps;
  int32_t reserved;
} pd_layer_norm_args;
PD_EXPORT int pd_layer_norm(pd_context *, const pd_layer_norm_args *);

/* ---- the KV cache. Layer l's K starts at k_cache + l * layer_stride (in elements, of bytes in bytes), V alike.
 *
 * What an element is. PD_KV_PLAIN: a number of the layer's dtype. The others: a byte, and a scale for each token and
 * head. Of one token's head x of K (after the rotation) or V, in fp32:
 *   scale = max|x| / limit, rounded to fp32 and then to bf16; limit: 127, of FP8 448
 *   byte = x / scale to nearest even, as a two's complement integer, or as e4m3 (never its NaN). The scale's rounding
 *     takes no x beyond the limit by half a step, so nothing is cut off.
 *   all |x| below 2^-100: scale 0, bytes 0. An infinity or NaN in x: scale NaN, bytes 0.
 * Attention takes a byte for the number that it is, which bf16 holds exactly, so its sums are those of a plain cache of
 * these numbers, in the layer's dtype:
 *   logit = scale * ((q.k) * k's scale), the product of fp32 with one rounding
 *   o = sum of round(p * v's scale) v, l = sum of p: where a bf16 layer rounds p, it rounds the product, once; an fp16
 *     layer rounds it to bf16, as fp16 has no numbers that small
 * So a row's bits depend on nothing that they would not depend on in a plain cache. */
typedef enum { PD_KV_PLAIN = 0, PD_KV_INT8 = 1, PD_KV_FP8 = 2 } pd_kv_kind;

typedef struct { /* rotate q and k of each row by its position and write k and v to its slot; q to q_out */
  const int32_t *num_rows;
  /* [rows][(q_heads + 2 * kv_heads) * head_dim] in dtype: all q, then all k, then all v heads */
  const void *qkv;
  void *q_out;                 /* [rows][q_heads * head_dim] in dtype */
  void *k_cache, *v_cache;     /* of this layer */
  const int32_t *positions;    /* [rows] */
  const int32_t *slots;        /* [rows]; -1: nothing is written (the row only reads) */
  /* [max_position][rotary_dim]: cos of rotary_dim/2 frequencies, then sin; NULL: no rotation */
  const float *cos_sin;
  const float *q_norm, *k_norm; /* [head_dim] RMS norm over each head before rotation, or NULL; see norms_all_heads */
  int32_t q_heads, kv_heads, head_dim, rotary_dim, block_size, dtype;
  int32_t interleaved;         /* 0: pairs (i, i + rotary_dim/2) as in Llama; 1: pairs (2i, 2i + 1) as in GPT-J */
  float norm_eps;
  int32_t kv_kind;             /* pd_kv_kind */
  int32_t norms_all_heads;     /* 1: the norms are over all of a row's q or k, and have a weight for each number */
} pd_rope_kv_write_args;
PD_EXPORT int pd_rope_kv_write(pd_context *, const pd_rope_kv_write_args *);

/* for i = 0, 1, ... in order, in every layer and head: slot dst[i] = slot src[i]; token plane and features too */
typedef struct {
  const int32_t *num_moves;
  const int32_t *src, *dst;    /* [num_moves] slots */
  void *k_cache, *v_cache;     /* of layer 0 */
  int32_t *token_plane;        /* or NULL */
  void *features;              /* [num_blocks * block_size][feature_bytes] or NULL */
  int64_t layer_stride;        /* elements; of bytes: bytes */
  int32_t num_layers, kv_heads, head_dim, block_size, dtype;
  int32_t kv_kind;             /* pd_kv_kind */
  int32_t feature_bytes;       /* a multiple of 4 */
} pd_kv_copy_args;
PD_EXPORT int pd_kv_copy(pd_context *, const pd_kv_copy_args *);

/* ---- attention: a plan once a step (for each kind of layer), then one run a layer.
 * Branch b has rows row_indptr[b] .. row_indptr[b+1]: first a chain (parents < 0), then the nodes of a draft tree. The
 * tokens it may see lie in the slots 0 .. kv_len[b]-1 of its block table; its rows are the last of them, one slot a
 * row. chain row: sees every slot up to its own. Position = its slot index. node row: parents[r] = the row of its
 * parent, relative to the branch's first row. Sees all slots before the first node's, then its ancestors and itself.
 * Position = its parent's + 1 (several nodes may share one). A row's keys are reduced by position: tile = position /
 * 64, chunk = position / 512. */
typedef struct {
  int32_t q_heads, kv_heads, head_dim, block_size, dtype;
  int32_t window;              /* a row at position p sees positions > p - window; 0: all */
  float scale, soft_cap;       /* logit = scale * q.k; soft_cap > 0: soft_cap * tanh(logit / soft_cap) */
  int32_t kv_kind;             /* pd_kv_kind */
} pd_attn_shape;
typedef struct {
  int32_t num_branches, num_rows;
  const int32_t *row_indptr;   /* [num_branches + 1] */
  const int32_t *kv_len;       /* [num_branches] */
  const int32_t *block_table;  /* [num_branches][table_stride] block ids */
  const int32_t *parents;      /* [num_rows] or NULL: no trees */
  int32_t table_stride;
  int32_t share;               /* 0: no two branches are grouped (for tests) */
  const int32_t *elsewhere;    /* [num_branches] or NULL: not 0: others compute this branch's rows */
} pd_attn_batch;
/* of no context: any may fill it, and any of the same device carry it out; where another has filled it, when that is
 * through (pd_await) */
typedef struct pd_plan pd_plan;
PD_EXPORT pd_plan *pd_plan_new(void);
PD_EXPORT void pd_plan_free(pd_plan *);
PD_EXPORT int pd_attn_plan(pd_context *, pd_plan *, const pd_attn_shape *, const pd_attn_batch *);
/* the flat, relocatable form: docs in csrc/plan/plan.h */
PD_EXPORT int pd_plan_view(const pd_plan *, const int32_t **words, int64_t *num_words);
typedef struct {
  const int32_t *num_rows;     /* must equal the plan's */
  pd_plan *plan;
  const void *q;               /* [rows][q_heads * head_dim] in dtype */
  const void *k_cache, *v_cache; /* of this layer */
  void *out;                   /* [rows][q_heads * head_dim] in dtype */
  /* [q_heads], finite, or NULL: a head's sink, a logit beside those of the tokens in its softmax that has no value */
  const float *sinks;
} pd_attention_args;
PD_EXPORT int pd_attention(pd_context *, const pd_attention_args *);

#include "pagedec_readout.h"
#include "pagedec_ranks.h"
#include "pagedec_experts.h"
#include "pagedec_lora.h"

/* ---- a constant list of kernels, carried out in order in one parallel region */
typedef enum {
  PD_OP_GEMM = 1, PD_OP_EMBED, PD_OP_RMS_NORM, PD_OP_ROPE_KV_WRITE, PD_OP_KV_COPY, PD_OP_ATTENTION,
  PD_OP_ARGMAX, PD_OP_TOPK_LSE, PD_OP_SAMPLE, PD_OP_LAYER_NORM, PD_OP_SOFT_CAP,
  PD_OP_PROCESS_LOGITS, PD_OP_BEST, PD_OP_VERIFY, PD_OP_ADD_PARTS, PD_OP_JOIN_PARTS, PD_OP_MEET,
  PD_OP_RESTRICT_LOGITS, PD_OP_COPY_ROWS, PD_OP_PICK_LOGITS, PD_OP_ALL_GATHER, PD_OP_GATHER,
  PD_OP_ROUTE, PD_OP_EXPERTS, PD_OP_COMBINE, PD_OP_LORA, PD_OP_SPREAD_LOGITS
} pd_op_kind;
typedef struct { int32_t kind, reserved; const void *args; } pd_op;
PD_EXPORT int pd_run(pd_context *, const pd_op *ops, int64_t num_ops);
/* A list that is carried out again and again. From its first time on it and its records stay as they are: a device may
 * record what is to be done, and repeat that. What records point to may change, and plans may be made anew. */
typedef struct pd_recording pd_recording;
typedef struct {
  const pd_op *ops;
  int64_t num_ops;
  pd_recording *recording;     /* NULL before the first time */
} pd_program;
PD_EXPORT int pd_run_program(pd_context *, pd_program *);
PD_EXPORT void pd_program_clear(pd_program *);  /* free the recording: the next time is the first */

/* ---- chains of tokens, each drawn behind the one before it (a draft model's). For the i-th token of a chain, from 1
 * on, the one before it is a row of a forward, alone of its branch; its logits are processed by the chain's rules, and
 * the token is drawn, with the chain's draw, at its position plus i. The i-th tokens of all chains are one round.
 * Beside a token others may be drawn, of the ranks behind its own, which no row follows. In a lane that lags behind the
 * text a token's row, and its slot, are `lag` positions before its own. */
typedef struct {
  int32_t branch;              /* row of block_table */
  int32_t count;               /* tokens, the given one too */
  int32_t prompt_length;       /* of the lane's positions */
  int32_t rules;               /* place in rules; -1: none */
  int32_t kept_row;            /* its first row of kept; -1: it has none */
  int32_t reserved;
} pd_chain;
typedef struct {               /* a kind of attention layer: its plan, made anew each round */
  pd_plan *plan;
  const pd_attn_shape *shape;
} pd_layer_kind;
typedef struct {
  /* lists over the same buffers: the forward, its rows up to the residual stream, and the logits of the rows to read */
  pd_program *whole, *body, *head;
  const pd_layer_kind *kinds;
  /* what the lists read their rows from, [max_rows] each but the counts, and [room] read_rows */
  int32_t *num_rows, *token_ids, *positions, *slots, *num_read, *read_rows;
  int32_t *chain_ids;          /* [max_rows]: which of chains each row is of; or NULL */
  float *logits;               /* [room][vocab]: what they write */
  const pd_chain *chains;      /* [num_chains] */
  const pd_draw *draws;        /* [num_chains]: of the given token, which is at its position */
  const int32_t *block_table;  /* [*][table_stride] */
  const int32_t *chain_slots;  /* [sum of count - 1]: of all tokens but the last of each chain */
  const int32_t *token_plane;
  const pd_rules *rules;
  const int32_t *indptr;       /* [sum of count + 1]: where the 1 to 1 + PD_MAX_RANK tokens of each place begin */
  int32_t *tokens;             /* [indptr's last]: those of a chain's first place are given, others written */
  float *kept;                 /* [*][vocab]: what tokens were drawn from, of chains that have rows here; or NULL */
  int32_t num_kinds, num_chains, table_stride, block_size;
  int32_t vocab, num_drawn;    /* tokens from num_drawn on are never drawn */
  int32_t num_rules, room, max_rows;
  int32_t refuse_nan;          /* 1: to fail where a logit is NaN */
  int32_t lag;                 /* 0 or more */
} pd_roll_args;
PD_EXPORT int pd_roll(pd_context *, const pd_roll_args *);

/* ---- probes: what this machine allows (benchmarks/, pagedec doctor) */
/* best GB/s of reading `bytes` with every thread */
PD_EXPORT double pd_probe_read(pd_context *, const void *data, int64_t bytes, int32_t repeats);
/* GFLOP/s of the dot-product instruction from registers */
PD_EXPORT double pd_probe_dot(pd_context *, int32_t dtype, double seconds);

#ifdef __cplusplus
}
#endif
#endif
