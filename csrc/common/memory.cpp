// Memory of a CPU, which is the host's.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "common/check_fetch.h"

namespace pagedec {
int carry(pd_context *, const HostArray *arrays, int num_arrays) {
  for (int i = 0; i < num_arrays; i++) *arrays[i].place = arrays[i].from;
  return 0;
}
void *place_of_answer(pd_context *, void *to, int64_t) { return to; }
int bring(pd_context *, void *, const void *, int64_t) { return 0; }
}  // namespace pagedec

using namespace pagedec;

struct pd_fetch {
  const pd_context *context;
  int64_t max_bytes;
  std::vector<char> bytes;
  bool is_begun = false;
};

extern "C" {
int32_t pd_has_memory(const pd_context *context) { return context ? 0 : fail("pd_has_memory: context is NULL"); }
void *pd_memory_new(pd_context *context, int64_t num_bytes) {
  if (check_memory("pd_memory_new", context, num_bytes)) return nullptr;
  void *memory = std::aligned_alloc(64, std::max<int64_t>(1, (num_bytes + 63) / 64) * 64);
  if (memory) return memset(memory, 0, num_bytes);
  return fail("pd_memory_new: num_bytes is %lld, which the system does not give", (long long)num_bytes), nullptr;
}
void pd_memory_free(void *memory) { std::free(memory); }
int pd_memory_write(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_write", context, to, from, num_bytes)) return -1;
  if (num_bytes) memcpy(to, from, num_bytes);
  return 0;
}
int pd_memory_read(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_read", context, to, from, num_bytes)) return -1;
  if (num_bytes) memcpy(to, from, num_bytes);
  return 0;
}
pd_fetch *pd_fetch_new(pd_context *context, int64_t max_bytes) {
  if (check_memory("pd_fetch_new", context, max_bytes)) return nullptr;
  pd_fetch *fetch = new (std::nothrow) pd_fetch{context, max_bytes, {}};
  if (!fetch) return fail("pd_fetch_new: out of memory"), nullptr;
  return fetch;
}
void pd_fetch_free(pd_fetch *fetch) { delete fetch; }
int pd_fetch_begin(pd_context *context, pd_fetch *fetch, const void *from, int64_t num_bytes) {
  if (check_fetch_begin(context, fetch, from, num_bytes)) return -1;
  fetch->bytes.assign((const char *)from, (const char *)from + num_bytes);
  fetch->is_begun = true;
  return 0;
}
int pd_fetch_end(pd_context *context, pd_fetch *fetch, void *to) {
  if (check_fetch("pd_fetch_end", context, fetch)) return -1;
  if (!fetch->is_begun) return fail("pd_fetch_end: no copy is under way");
  const int64_t num_bytes = (int64_t)fetch->bytes.size();
  if (check_copy("pd_fetch_end", context, to, fetch, num_bytes)) return -1;
  if (num_bytes) memcpy(to, fetch->bytes.data(), num_bytes);
  fetch->is_begun = false;
  return 0;
}
int pd_memory_fill(pd_context *context, void *to, int32_t byte, int64_t num_bytes) {
  if (check_copy("pd_memory_fill", context, to, to, num_bytes)) return -1;
  if (num_bytes) memset(to, byte, num_bytes);
  return 0;
}
int pd_memory_map(pd_context *context, void *from, int64_t num_bytes) {
  return check_copy("pd_memory_map", context, from, from, num_bytes);
}
int pd_memory_unmap(void *) { return 0; }
int pd_memory_room(pd_context *context, int64_t *num_free, int64_t *num_all) {
  if (!context) return fail("pd_memory_room: context is NULL");
  if (!num_free || !num_all) return fail("pd_memory_room: num_free or num_all is NULL; they must point to numbers");
  *num_free = *num_all = -1;
  return 0;
}
}
