// What can be wrong with the records of low-rank updates.
#include "common/check.h"

namespace pagedec {

namespace {

int check_values(const char *field, const int32_t *values, int64_t number, int32_t low, int32_t high) {
  for (int64_t i = 0; i < number; i++)
    if (values[i] < low || values[i] > high)
      return fail("pd_lora: %s[%lld] is %d; it must be %d to %d", field, (long long)i, values[i], low, high);
  return 0;
}

}  // namespace

int check_lora(const pd_lora_args &a) {
  const char *name = "pd_lora";
  const bool gated = is_gated(a.epilogue);
  if (check_count(name, "num_rows", a.num_rows) || check_array(name, "adapters", a.adapters, a.num_rows) ||
      check_array(name, "x", a.x, a.num_rows) || check_pointer(name, "a", a.a) || check_pointer(name, "b", a.b) ||
      check_pointer(name, "scales", a.scales) || check_pointer(name, "ranks", a.ranks) ||
      check_pointer(name, "parts", a.parts) || check_array(name, "low", a.low, a.num_rows) ||
      check_array(name, "y", a.y, a.num_rows) || check_range(name, "num_places", a.num_places, 1, 65536) ||
      check_range(name, "num_parts", a.num_parts, 1, PD_MAX_LORA_PARTS) ||
      check_range(name, "rank", a.rank, 1, PD_MAX_LORA_RANK) || check_range(name, "n", a.n, 1, INT32_MAX) ||
      check_range(name, "k", a.k, 1, INT32_MAX) || check_dtype(name, a.dtype))
    return -1;
  if (a.epilogue != PD_ADD && !gated)
    return fail("%s: epilogue is %d; it must be %d (add), or one of gates", name, a.epilogue, PD_ADD);
  if (gated && check_array(name, "z", a.z, a.num_rows)) return -1;
  if (!gated && a.z) return fail("%s: z is given; only where outputs are gates may it be", name);
  if (gated && a.n % 32) return fail("%s: n is %d; with gate and up rows it must be a multiple of 32", name, a.n);
  if (a.y_dtype != PD_F32 && a.y_dtype != a.dtype)
    return fail("%s: y_dtype is %d; it must be %d (fp32) or dtype, %d", name, a.y_dtype, PD_F32, a.dtype);
  if (!kReadsRecords || *a.num_rows == 0) return 0;
  return check_values("adapters", a.adapters, *a.num_rows, -1, a.num_places - 1) ||
                 check_values("ranks", a.ranks, (int64_t)a.num_places * a.num_parts, 0, a.rank) ||
                 check_values("parts", a.parts, ((int64_t)a.n + 15) / 16, 0, a.num_parts - 1)
             ? -1
             : 0;
}

}  // namespace pagedec
