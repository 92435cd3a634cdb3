// Memory of a device, and the ways there and back.
#include <algorithm>
#include <new>
#include <utility>

#include "common/check_fetch.h"
#include "cuda/context.h"

namespace pagedec {
namespace {

// Memory of the host that stays where it is: a copy from there or to it is carried out when the stream comes to it,
// while the host goes on. NULL: there is none, and copies are slower.
#if defined(__CUDACC__)
constexpr int64_t kStagingLeast = 1 << 20;  // which takes the system a thirtieth of what the most does
constexpr int64_t kStagingMost = 32 << 20;  // of several steps: a plan of long sequences has megabytes
#else
constexpr int64_t kStagingLeast = 64 << 10, kStagingMost = 4 << 20;  // which tests fill
#endif
char *new_staging(int64_t num_bytes) {
  void *staging = nullptr;
  return launched("cudaMallocHost", cudaMallocHost(&staging, num_bytes)) ? nullptr : (char *)staging;
}
void free_staging(char *staging) { ignore(cudaFreeHost(staging)); }
int enqueue_copy(pd_context &c, const char *name, void *to, const void *from, int64_t num_bytes, cudaMemcpyKind way) {
  return launched(name, cudaMemcpyAsync(to, from, num_bytes, way, stream_of(c)));
}

// Marks of what has been put into a context's stream so far.
int new_event(pd_fetch &fetch) {
  return launched("pd_fetch_new", cudaEventCreateWithFlags(&fetch.through, cudaEventDisableTiming));
}
int mark(pd_context &c, pd_fetch &fetch) {
  return launched("pd_fetch_begin", cudaEventRecord(fetch.through, stream_of(c)));
}
int await_mark(pd_context &c, pd_fetch &fetch) {
  return c.ranks ? await_ranks(c, &fetch) : launched("pd_fetch_end", cudaEventSynchronize(fetch.through));
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Where the next so many bytes begin in the ring: in one piece.
int64_t next_place(const pd_context &c, int64_t size) {
  return c.staged_end % c.staging_bytes + size > c.staging_bytes ? round_up(c.staged_end, c.staging_bytes)
                                                                 : c.staged_end;
}
bool has_place(const pd_context &c, int64_t size) {
  return c.staging && next_place(c, size) + size - c.staged_begin <= c.staging_bytes;
}
// To twice as much, or to what is wanted, when the copies from where it was are through. Or it stays as it is.
void grow_staging(pd_context &c, int64_t wanted) {
  int64_t bytes = std::max(kStagingLeast, 2 * c.staging_bytes);
  while (bytes < wanted) bytes *= 2;
  char *larger = new_staging(bytes);
  if (larger && c.staging && await(c)) free_staging(std::exchange(larger, nullptr));
  if (!larger) return;
  free_staging(c.staging);
  c.staging = larger, c.staging_bytes = bytes;
  c.staged_begin = c.staged_end = round_up(c.staged_end, bytes);  // never less than fetches have been told
}
// A place there that no copy under way uses; NULL: there is none.
char *staged(pd_context &c, int64_t num_bytes) {
  const int64_t size = round_up(num_bytes, 64);
  if (size > kStagingMost) return nullptr;
  if (!has_place(c, size) && c.staging_bytes < kStagingMost) grow_staging(c, size);
  if (c.staging_bytes < size) return nullptr;
  const int64_t begin = next_place(c, size);
  if (!has_place(c, size)) {
    if (await(c)) return nullptr;
    c.staged_begin = begin;
  }
  c.staged_end = begin + size;
  return c.staging + begin % c.staging_bytes;
}

void note_written(pd_context &c, const void *to, const void *from) {
  constexpr int kMost = sizeof c.written / sizeof c.written[0];
  int at = 0;
  while (at < kMost && c.written[at].place != to) at++;
  if (at == kMost) at = (int)(c.num_written++ % kMost);
  c.written[at].place = to;
  memcpy(&c.written[at].number, from, sizeof(int32_t));
}

// Copies of memory that may move are carried out before the driver returns, so it would wait for ranks for ever: they
// are waited for here.
int waits_in_driver(pd_context &c) { return c.ranks ? await(c) : 0; }

}  // namespace

int is_through(pd_context &, pd_fetch &fetch) {
  const cudaError_t error = cudaEventQuery(fetch.through);
  if (error != cudaErrorNotReady) return launched("pd_fetch_end", error) ? -1 : 1;
  cudaGetLastError();
  return 0;
}

int download(pd_context &c, void *to, const void *from, int64_t num_bytes) {
  char *place = staged(c, num_bytes);
  if (!place && waits_in_driver(c)) return -1;
  if (enqueue_copy(c, "pd_memory_read", place ? place : to, from, num_bytes, cudaMemcpyDeviceToHost) || await(c))
    return -1;
  if (place) memcpy(to, place, num_bytes);
  c.staged_begin = c.staged_end;  // all of it has been copied
  return 0;
}

int upload(pd_context &c, void *to, const void *from, int64_t num_bytes) {
  char *place = staged(c, num_bytes);
  if (place) memcpy(place, from, num_bytes);
  else if (waits_in_driver(c)) return -1;
  if (enqueue_copy(c, "pd_memory_write", to, place ? place : from, num_bytes, cudaMemcpyHostToDevice)) return -1;
  return place ? 0 : await(c);
}

int carry(pd_context *context, const HostArray *arrays, int num_arrays) {
  constexpr int64_t kAlignment = 64;
  std::vector<char> &packed = context->packed;
  packed.clear();
  for (int i = 0; i < num_arrays; i++) {
    const char *from = (const char *)arrays[i].from;
    packed.insert(packed.end(), from, from + arrays[i].num_bytes);
    packed.resize((packed.size() + kAlignment - 1) / kAlignment * kAlignment);
  }
  const OnDevice on(context->device);
  if (context->carried.reserve((int64_t)packed.size())) return -1;
  const char *place = (const char *)context->carried.get();
  for (int i = 0; i < num_arrays; i++) {
    *arrays[i].place = place;
    place += (arrays[i].num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return pd_memory_write(context, context->carried.get(), packed.data(), (int64_t)packed.size());
}
void *place_of_answer(pd_context *context, void *, int64_t num_bytes) {
  const OnDevice on(context->device);
  return context->answers.reserve(num_bytes) ? nullptr : context->answers.get();
}
int bring(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  return pd_memory_read(context, to, from, num_bytes);
}

}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_has_memory(const pd_context *context) { return context ? 1 : fail("pd_has_memory: context is NULL"); }

void *pd_memory_new(pd_context *context, int64_t num_bytes) {
  if (check_memory("pd_memory_new", context, num_bytes)) return nullptr;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_new: another thread works in this context"), nullptr;
  context->is_alone = true;
  void *memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, num_bytes ? num_bytes : 1);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, num_bytes, stream_of(*context));
  if (error == cudaSuccess) {
    if (!await(*context)) return memory;  // other contexts may write there first
    ignore(cudaFree(memory));
    return nullptr;
  }
  cudaGetLastError();
  ignore(cudaFree(memory));
  return fail("pd_memory_new: num_bytes is %lld: %s", (long long)num_bytes, cudaGetErrorString(error)), nullptr;
}
void pd_memory_free(void *memory) {
  if (!memory) return;
  const OnDevice on(any_device());
  launched("pd_memory_free", cudaFree(memory));
}
int pd_memory_write(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_write", context, to, from, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_write: another thread works in this context");
  if (!num_bytes) return 0;
  if (upload(*context, to, from, num_bytes)) return -1;
  if (num_bytes == sizeof(int32_t)) note_written(*context, to, from);
  return 0;
}
int pd_memory_read(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_read", context, to, from, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_read: another thread works in this context");
  return num_bytes ? download(*context, to, from, num_bytes) : 0;
}
pd_fetch *pd_fetch_new(pd_context *context, int64_t max_bytes) {
  if (check_memory("pd_fetch_new", context, max_bytes)) return nullptr;
  const Turn turn(*context);
  if (!turn) return fail("pd_fetch_new: another thread works in this context"), nullptr;
  pd_fetch *fetch = new (std::nothrow) pd_fetch;
  if (!fetch) return fail("pd_fetch_new: out of memory"), nullptr;
  fetch->context = context, fetch->device = context->device, fetch->max_bytes = max_bytes;
  fetch->memory = new_staging(max_bytes ? max_bytes : 1);
  if (fetch->memory && !new_event(*fetch)) return fetch;
  if (!fetch->memory) fail("pd_fetch_new: max_bytes is %lld, which the system does not give", (long long)max_bytes);
  free_staging(fetch->memory);
  delete fetch;
  return nullptr;
}
void pd_fetch_free(pd_fetch *fetch) {
  if (!fetch) return;
  const OnDevice on(fetch->device);  // a thread that only frees has none yet
  free_staging(fetch->memory);       // when the copy that is under way has ended
  ignore(cudaEventDestroy(fetch->through));
  delete fetch;
}
int pd_fetch_begin(pd_context *context, pd_fetch *fetch, const void *from, int64_t num_bytes) {
  if (check_fetch_begin(context, fetch, from, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_fetch_begin: another thread works in this context");
  // The former one, which nobody asks for any more.
  if (std::exchange(fetch->num_bytes, -1) >= 0 && await_mark(*context, *fetch)) return -1;
  if (num_bytes && enqueue_copy(*context, "pd_fetch_begin", fetch->memory, from, num_bytes, cudaMemcpyDeviceToHost))
    return -1;
  if (mark(*context, *fetch)) return -1;
  fetch->num_bytes = num_bytes, fetch->staged_end = context->staged_end;
  return 0;
}
int pd_fetch_end(pd_context *context, pd_fetch *fetch, void *to) {
  if (check_fetch("pd_fetch_end", context, fetch)) return -1;
  if (fetch->num_bytes < 0) return fail("pd_fetch_end: no copy is under way");
  if (check_copy("pd_fetch_end", context, to, fetch, fetch->num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_fetch_end: another thread works in this context");
  const int64_t num_bytes = std::exchange(fetch->num_bytes, -1);
  if (await_mark(*context, *fetch)) return -1;
  context->staged_begin = std::max(context->staged_begin, fetch->staged_end);
  if (num_bytes) memcpy(to, fetch->memory, num_bytes);
  return 0;
}
int pd_memory_fill(pd_context *context, void *to, int32_t byte, int64_t num_bytes) {
  if (check_copy("pd_memory_fill", context, to, to, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_fill: another thread works in this context");
  return launched("pd_memory_fill", cudaMemsetAsync(to, byte, num_bytes, stream_of(*context)));
}
#if !defined(__CUDACC__)
// For tests: how much of the host's memory copies go through.
PD_EXPORT int64_t pd_emulate_staging_bytes(const pd_context *context) { return context->staging_bytes; }
#endif
int pd_memory_map(pd_context *context, void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_map", context, from, from, num_bytes)) return -1;
  const OnDevice on(context->device);
  if (launched("pd_memory_map", cudaHostRegister(from, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)))
    return -1;
  void *seen = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&seen, from, 0);
  if (error == cudaSuccess && seen == from) return 0;
  ignore(cudaHostUnregister(from));
  if (launched("pd_memory_map", error)) return -1;
  return fail("pd_memory_map: the device sees memory of the host at another address");
}
int pd_memory_unmap(void *from) {
  const OnDevice on(any_device());
  await_devices();  // a kernel may be under way that reaches it, on any of them
  return launched("pd_memory_unmap", cudaHostUnregister(from));
}
int pd_memory_room(pd_context *context, int64_t *num_free, int64_t *num_all) {
  if (!context) return fail("pd_memory_room: context is NULL");
  if (!num_free || !num_all) return fail("pd_memory_room: num_free or num_all is NULL; they must point to numbers");
  const OnDevice on(context->device);
  size_t free = 0, all = 0;
  if (launched("pd_memory_room", cudaMemGetInfo(&free, &all))) return -1;
  *num_free = all ? (int64_t)free : -1, *num_all = all ? (int64_t)all : -1;
  return 0;
}
}
