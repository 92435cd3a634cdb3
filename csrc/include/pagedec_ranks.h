/* The part of pagedec.h that is about ranks; include that one. */
#ifndef PAGEDEC_RANKS_H
#define PAGEDEC_RANKS_H

/* ---- ranks: processes or machines that share a model, each with some columns or rows of its matrices. What every rank
 * has computed of a sum lies in parts, one behind the other; parts are summed in the order of ranks, so a row's bits
 * depend neither on how many rows there are nor on who comes first. */
typedef struct { /* out[r] = (add ? out[r] : 0) + ((part 0 + part 1) + part 2 ...)[r], fp32 */
  const int32_t *num_rows;
  const float *parts;          /* num_parts times [*][dim], part_stride elements apart */
  float *out;                  /* [rows][dim] */
  int64_t part_stride;
  int32_t dim, num_parts, add, reserved;
} pd_add_parts_args;
PD_EXPORT int pd_add_parts(pd_context *, const pd_add_parts_args *);

typedef struct { /* out[r] = part 0's row, then part 1's ...: fp32 */
  const int32_t *num_rows;
  const float *parts;          /* part p: [*][widths[p]], part_stride elements behind part p - 1 */
  const int32_t *widths;       /* [num_parts], dim in all */
  float *out;                  /* [rows][dim] */
  int64_t part_stride;
  int32_t dim, num_parts;
} pd_join_parts_args;
PD_EXPORT int pd_join_parts(pd_context *, const pd_join_parts_args *);

/* Wait until every rank has come as often as this one: of ranks on one machine, whose parts lie in memory that all have
 * mapped. What a rank wrote before it came, all others see behind it. Fails for a rank that does not come in time; no
 * meeting of the same list waits after that. */
typedef struct {
  int32_t *arrivals;           /* [world][PD_MEET_STRIDE], in the memory of all: how often each has come; 0 at first */
  double seconds;              /* above 0 */
  int32_t rank, world;
} pd_meet_args;
#define PD_MEET_STRIDE 32      /* elements: two lines of a cache, which some processors fetch together */
PD_EXPORT int pd_meet(pd_context *, const pd_meet_args *);

/* NCCL, which is opened at run time: ranks on CUDA devices, of one machine or of several, exchange values in the order
 * of their contexts' streams, so nothing waits on the host, and a list with exchanges in it is recorded like others.
 * Values are copied and never added by it. All ranks call the same exchanges of the same sizes in the same order. A
 * wait for such a context (pd_await, pd_memory_read) fails where a rank reports an error, or where its stream is not
 * through in the seconds that it has joined with. Then it has left the others: every exchange, and every list that is
 * recorded, fails from then on. What waits inside the driver (to give memory up) is not watched. */
#define PD_NCCL_ID_BYTES 128
/* libnccl.so.2 of this path, or NULL: as the system finds it. Its version, 10000 * major + 100 * minor + patch; -1 with
 * pd_last_error() where there is none that can be used. A process opens one: later calls tell of the first's. */
PD_EXPORT int32_t pd_nccl_open(const char *path);
/* what one of the ranks makes, and all of them join with: PD_NCCL_ID_BYTES */
PD_EXPORT int pd_nccl_id(void *id);
/* once a context, by all `world` ranks at a time; each has a device of its own */
PD_EXPORT int pd_nccl_join(pd_context *, const void *id, int32_t rank, int32_t world, double seconds);
/* To be called where all ranks have devices, layers and steps of the same shapes: what kernels of a list work in then
 * grows everywhere at a time, and it is recorded anew everywhere at a time. Else ranks ask one another before each
 * recorded list with exchanges, which costs a small one and a wait. */
PD_EXPORT int pd_nccl_alike(pd_context *);
/* how many ranks the context is one of; 0: it has joined none, or has left them */
PD_EXPORT int32_t pd_nccl_world(const pd_context *);

typedef struct { /* each rank's values to all: parts[p] = what rank p has in own. 4 bytes a value, fp32 or int32 */
  const void *own;             /* [num_values] */
  void *parts;                 /* [world][num_values]; own lies elsewhere */
  int64_t num_values;
} pd_all_gather_args;
PD_EXPORT int pd_all_gather(pd_context *, const pd_all_gather_args *);

typedef struct { /* the same, to rank 0 alone */
  const void *own;             /* [num_values] */
  void *parts;                 /* [world][num_values], rank 0's; NULL at others */
  int64_t num_values;
} pd_gather_args;
PD_EXPORT int pd_gather(pd_context *, const pd_gather_args *);

#endif
