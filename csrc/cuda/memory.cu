// Memory of a device, and the ways there and back.
#include <new>

#include "cuda/context.h"

namespace pagedec {
namespace {

constexpr int64_t kStaging = 4 << 20;

// Memory of the host that stays where it is, and a copy that the stream carries out when it comes to it: from and to
// such memory, while the host goes on. NULL: there is none, and copies are slower.
#if defined(__CUDACC__)
char *new_staging() {
  char *staging = nullptr;
  return launched("cudaMallocHost", cudaMallocHost((void **)&staging, kStaging)) ? nullptr : staging;
}
int enqueue_copy(pd_context &c, const char *name, void *to, const void *from, int64_t num_bytes, cudaMemcpyKind way) {
  return launched(name, cudaMemcpyAsync(to, from, num_bytes, way, (cudaStream_t)c.stream));
}
#else
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
char *new_staging() { return (char *)malloc(kStaging); }
int enqueue_copy(pd_context &c, const char *name, void *to, const void *from, int64_t num_bytes, int) {
  if (emulate::is_recording()) return fail("%s: while a list is recorded", name);
  c.work.put([=] { return memcpy(to, from, num_bytes), std::string(); });
  return 0;
}
#endif

// A place there that no copy under way uses; NULL: there is none.
char *staged(pd_context &c, int64_t num_bytes) {
  if (num_bytes > kStaging) return nullptr;
  if (!c.staging && !(c.staging = new_staging())) return nullptr;
  if (c.num_staged + num_bytes > kStaging) {
    if (await(c)) return nullptr;
    c.num_staged = 0;
  }
  char *place = c.staging + c.num_staged;
  c.num_staged += (num_bytes + 63) / 64 * 64;
  return place;
}

// Copies of memory that may move are carried out before the driver returns, so it would wait for ranks for ever: they
// are waited for here.
int waits_in_driver(pd_context &c) { return c.ranks ? await(c) : 0; }

}  // namespace

int download(pd_context &c, void *to, const void *from, int64_t num_bytes) {
  char *place = staged(c, num_bytes);
  if (!place && waits_in_driver(c)) return -1;
  if (enqueue_copy(c, "pd_memory_read", place ? place : to, from, num_bytes, cudaMemcpyDeviceToHost) || await(c))
    return -1;
  if (place) memcpy(to, place, num_bytes);
  c.num_staged = 0;  // all of it has been copied
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
  if (context->carried.reserve((int64_t)packed.size())) return -1;
  const char *place = (const char *)context->carried.get();
  for (int i = 0; i < num_arrays; i++) {
    *arrays[i].place = place;
    place += (arrays[i].num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return pd_memory_write(context, context->carried.get(), packed.data(), (int64_t)packed.size());
}
void *place_of_answer(pd_context *context, void *, int64_t num_bytes) {
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
#if defined(__CUDACC__)
  void *memory = nullptr;
  const cudaStream_t stream = (cudaStream_t)context->stream;
  cudaError_t error = cudaMalloc(&memory, num_bytes ? num_bytes : 1);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, num_bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);  // other contexts may write there first
  if (error == cudaSuccess) return memory;
  cudaGetLastError();
  cudaFree(memory);
  return fail("pd_memory_new: num_bytes is %lld: %s", (long long)num_bytes, cudaGetErrorString(error)), nullptr;
#else
  context->is_alone = true;
  void *memory = emulate::allocate(num_bytes);
  if (!memory) fail("pd_memory_new: num_bytes is %lld, which the system does not give", (long long)num_bytes);
  return memory;
#endif
}
void pd_memory_free(void *memory) {
#if defined(__CUDACC__)
  if (!memory) return;
  any_device();
  launched("pd_memory_free", cudaFree(memory));
#else
  emulate::release(memory);
#endif
}
int pd_memory_write(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_write", context, to, from, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_write: another thread works in this context");
  return num_bytes ? upload(*context, to, from, num_bytes) : 0;
}
int pd_memory_read(pd_context *context, void *to, const void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_read", context, to, from, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_read: another thread works in this context");
  return num_bytes ? download(*context, to, from, num_bytes) : 0;
}
int pd_memory_fill(pd_context *context, void *to, int32_t byte, int64_t num_bytes) {
  if (check_copy("pd_memory_fill", context, to, to, num_bytes)) return -1;
  const Turn turn(*context);
  if (!turn) return fail("pd_memory_fill: another thread works in this context");
#if defined(__CUDACC__)
  return launched("pd_memory_fill", cudaMemsetAsync(to, byte, num_bytes, (cudaStream_t)context->stream));
#else
  if (num_bytes) context->work.put([=] { return memset(to, byte, num_bytes), std::string(); });
  return 0;
#endif
}
int pd_memory_map(pd_context *context, void *from, int64_t num_bytes) {
  if (check_copy("pd_memory_map", context, from, from, num_bytes)) return -1;
#if defined(__CUDACC__)
  const Turn turn(*context);
  if (launched("pd_memory_map", cudaHostRegister(from, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)))
    return -1;
  void *seen = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&seen, from, 0);
  if (error == cudaSuccess && seen == from) return 0;
  cudaHostUnregister(from);
  if (launched("pd_memory_map", error)) return -1;
  return fail("pd_memory_map: the device sees memory of the host at another address");
#else
  return emulate::map(from, num_bytes) ? 0 : fail("pd_memory_map: it is mapped already");
#endif
}
int pd_memory_unmap(void *from) {
#if defined(__CUDACC__)
  any_device();
  cudaDeviceSynchronize();  // a kernel may be under way that reaches it
  return launched("pd_memory_unmap", cudaHostUnregister(from));
#else
  return emulate::unmap(from) ? 0 : fail("pd_memory_unmap: it is not mapped");
#endif
}
int pd_memory_room(pd_context *context, int64_t *num_free, int64_t *num_all) {
  if (!context) return fail("pd_memory_room: context is NULL");
  if (!num_free || !num_all) return fail("pd_memory_room: num_free or num_all is NULL; they must point to numbers");
#if defined(__CUDACC__)
  const Turn turn(*context);
  size_t free = 0, all = 0;
  if (launched("pd_memory_room", cudaMemGetInfo(&free, &all))) return -1;
  *num_free = (int64_t)free, *num_all = (int64_t)all;
#else
  *num_free = *num_all = -1;
#endif
  return 0;
}
}
