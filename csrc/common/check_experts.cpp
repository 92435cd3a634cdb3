// What can be wrong with the records of mixtures of experts.
#include <cmath>

#include "common/check.h"

namespace pagedec {
namespace {

int check_choice(const char *name, int32_t num_experts, int32_t num_chosen) {
  if (check_range(name, "num_experts", num_experts, 1, PD_MAX_EXPERTS)) return -1;
  return check_range(name, "num_chosen", num_chosen, 1, num_experts);
}

}  // namespace

int check_route(const pd_route_args &a) {
  const char *name = "pd_route";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "logits", a.logits, a.num_rows) ||
      check_optional(name, "bias", a.bias) || check_array(name, "x", a.x, a.num_rows) ||
      check_array(name, "sorted", a.sorted, a.num_rows) || check_pointer(name, "first", a.first) ||
      check_array(name, "chosen", a.chosen, a.num_rows) || check_array(name, "places", a.places, a.num_rows) ||
      check_array(name, "weights", a.weights, a.num_rows) || check_dtype(name, a.dtype) ||
      check_range(name, "dim", a.dim, 1, INT32_MAX) || check_choice(name, a.num_experts, a.num_chosen) ||
      check_range(name, "score", a.score, PD_SOFTMAX, PD_SIGMOID) || check_range(name, "normalize", a.normalize, 0, 1))
    return -1;
  if (kReadsRecords && (int64_t)*a.num_rows * a.num_chosen > INT32_MAX)
    return fail("%s: num_rows is %d; times num_chosen it must be at most %d", name, *a.num_rows, INT32_MAX);
  if (!std::isfinite(a.scale)) return fail("%s: scale is %g; it must be finite", name, (double)a.scale);
  return 0;
}

int check_experts(const pd_experts_args &a) {
  const char *name = "pd_experts";
  const pd_gemm_args &g = a.gemm;
  if (check_gemm(g) || check_pointer(name, "first", a.first) || check_choice(name, a.num_experts, a.num_chosen))
    return -1;
  if (g.epilogue == PD_ADD) return fail("%s: epilogue is %d; a row's experts are summed by pd_combine", name, PD_ADD);
  if (is_gated(g.epilogue) && g.n % 32)
    return fail("%s: n is %d; with gate and up rows it must be a multiple of 32", name, g.n);
  if (g.quantization == PD_BLOCKS && g.num_segments != 1)
    return fail("%s: num_segments is %d; of experts it must be 1", name, g.num_segments);
  if (a.expert_bytes < 64 || a.expert_bytes % 64)
    return fail("%s: expert_bytes is %lld; it must be a multiple of 64", name, (long long)a.expert_bytes);
  return 0;
}

int check_combine(const pd_combine_args &a) {
  const char *name = "pd_combine";
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "y", a.y, a.num_rows) ||
      check_array(name, "places", a.places, a.num_rows) || check_array(name, "weights", a.weights, a.num_rows) ||
      check_optional(name, "shared", a.shared) || check_optional(name, "gates", a.gates) ||
      check_array(name, "out", a.out, a.num_rows) || check_range(name, "dim", a.dim, 1, INT32_MAX) ||
      check_range(name, "num_chosen", a.num_chosen, 1, PD_MAX_EXPERTS) || check_range(name, "add", a.add, 0, 1))
    return -1;
  if ((a.shared == nullptr) != (a.gates == nullptr))
    return fail("%s: %s is NULL; shared and gates must be given together", name, a.shared ? "gates" : "shared");
  return 0;
}

}  // namespace pagedec
