#include "cuda/context.h"

#include <new>
#include <utility>

namespace pagedec {
namespace {

constexpr int MAX_THREADS = 4096;

// What needs a little more in each step, as a plan does, would be taken anew in each, and recordings with it.
int64_t with_room(int64_t bytes) { return bytes + bytes / 2; }

#if defined(__CUDACC__)
// A thread that only frees has no device of its own yet. CUDA would give it the first, and make a context there of
// hundreds of megabytes.
std::atomic<int> last_device{0};

int count_devices(const char *name) {
  int count = 0, driver = 0;  // which error 35 calls too old where there is none
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess)
    return launched(name, error) ? -1 : count;
  cudaGetLastError();
  if (driver == 0) return fail("%s: there is no driver of an NVIDIA device (libcuda.so.1)", name);
  constexpr const char *kTooOld =
      "%s: the driver is for CUDA %d.%d, and must be for %d.0 or newer (CUDA 12: driver 525, CUDA 13: driver 580)";
  return fail(kTooOld, name, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
}

// The device and a stream of its own; NULL with an error.
bool begin(pd_context &c, int32_t device) {
  const int count = count_devices("pd_context_new");
  if (count < 0) return false;
  if (device < 0 || device >= count)
    return fail("pd_context_new: device is %d; it must be 0 to %d", device, count - 1), false;
  c.device = device;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&c.num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  int shared_bytes = 0;
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  c.max_shared_bytes = shared_bytes;
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (launched("pd_context_new", error)) return false;
  c.stream = stream;
  last_device = device;
  return true;
}
void end(pd_context &c) {
  ignore(cudaSetDevice(c.device));
  leave_ranks(c);
  ignore(cudaStreamSynchronize((cudaStream_t)c.stream));  // copies out of the staging, too
  ignore(cudaFreeHost(c.staging));
  launched("pd_context_free", cudaStreamDestroy((cudaStream_t)c.stream));
}
#else
constexpr int EMULATED_DEVICES = 2;  // with one memory
constexpr int64_t SHARED_BYTES[EMULATED_DEVICES] = {emulate::MAX_SHARED_BYTES, 99 << 10};  // of a block; sm_86's
constexpr int EMULATED_MULTIPROCESSORS = 3;  // blocks of a grid: fewer than rows of a test, and no power of two
bool begin(pd_context &c, int32_t device) {
  if (device < 0 || device >= EMULATED_DEVICES)
    return fail("pd_context_new: device is %d; it must be 0 to %d", device, EMULATED_DEVICES - 1), false;
  c.device = device, c.num_multiprocessors = EMULATED_MULTIPROCESSORS, c.max_shared_bytes = SHARED_BYTES[device];
  c.stream = &c.work;
  return true;
}
void end(pd_context &c) {
  leave_ranks(c);
  c.work.await();
  free(c.staging);
}
#endif

}  // namespace

const Target &target(const pd_context &c) { return c; }

#if defined(__CUDACC__)
Turn::Turn(pd_context &context, bool)
    : context_(context), taken_(!context.busy.exchange(true, std::memory_order_acquire)) {
  ignore(cudaSetDevice(context.device));
}
#else
Turn::Turn(pd_context &context, bool records)
    : context_(context),
      taken_(!context.busy.exchange(true, std::memory_order_acquire)),
      access_(context.device, records && context.is_alone) {}
void put(pd_context &c, std::function<std::string()> work) { c.work.put(std::move(work)); }
#endif
Turn::~Turn() {
  if (taken_) context_.busy.store(false, std::memory_order_release);
}

DeviceMemory::~DeviceMemory() { clear(); }
void DeviceMemory::clear() {
  pd_memory_free(data_);
  data_ = nullptr, size_ = 0;
}
#if defined(__CUDACC__)
void any_device() { ignore(cudaSetDevice(last_device)); }
int DeviceMemory::reserve(int64_t bytes) {
  if (bytes <= size_) return 0;
  num_grown_++;
  ignore(cudaFree(data_));  // waits for what uses it
  data_ = nullptr, size_ = with_room(bytes);
  cudaError_t error = cudaMalloc(&data_, size_);
  if (error != cudaSuccess) error = cudaMalloc(&data_, size_ = bytes);
  cudaGetLastError();  // also where the second has succeeded
  if (error == cudaSuccess) return 0;
  data_ = nullptr, size_ = 0;
  return fail("%lld bytes of a device's memory: %s", (long long)bytes, cudaGetErrorString(error));
}
int before_checks(pd_context &) { return 0; }
int await(pd_context &c) {
  return c.ranks ? await_ranks(c) : launched("await", cudaStreamSynchronize((cudaStream_t)c.stream));
}
int is_through(pd_context &c) {
  const cudaError_t error = cudaStreamQuery((cudaStream_t)c.stream);
  if (error != cudaErrorNotReady) return launched("await", error) ? -1 : 1;
  cudaGetLastError();
  return 0;
}
#else
int before_checks(pd_context &c) { return c.work.is_recorded() ? 0 : await(c); }
int await(pd_context &c) {
  if (emulate::is_recording()) return fail("await: while a list is recorded");
  return c.ranks ? await_ranks(c) : is_through(c) < 0 ? -1 : 0;
}
int is_through(pd_context &c) {
  if (c.ranks && !c.work.is_through()) return 0;
  const std::string problem = c.work.await();
  return problem.empty() ? 1 : fail("%s", problem.c_str());
}
int DeviceMemory::reserve(int64_t bytes) {
  if (bytes <= size_) return 0;
  if (emulate::is_recording())
    return fail("%lld bytes of a device's memory: while a list is recorded", (long long)bytes);
  num_grown_++;
  emulate::release(data_);
  size_ = with_room(bytes);
  data_ = emulate::allocate(size_);
  if (!data_) return size_ = 0, fail("%lld bytes of a device's memory: there is no room", (long long)bytes);
  const emulate::Opened opened;
  memset(data_, 0xff, size_);  // NaN
  return 0;
}
#endif
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_num_devices(void) {
#if defined(__CUDACC__)
  return count_devices("pd_num_devices");
#else
  return EMULATED_DEVICES;
#endif
}
// num_threads: multiprocessors that are used at most; 0: all.
pd_context *pd_context_new(int32_t device, int32_t num_threads) {
  if (num_threads < 0 || num_threads > MAX_THREADS)
    return fail("pd_context_new: num_threads is %d; it must be 0 to %d", num_threads, MAX_THREADS), nullptr;
  pd_context *context = new (std::nothrow) pd_context;
  if (!context) return fail("pd_context_new: out of memory"), nullptr;
  if (!begin(*context, device)) {
    delete context;
    return nullptr;
  }
#if !defined(__CUDACC__)
  if (num_threads > 0) context->num_multiprocessors = num_threads;
#else
  if (num_threads > 0 && num_threads < context->num_multiprocessors) context->num_multiprocessors = num_threads;
#endif
  return context;
}
void pd_context_free(pd_context *context) {
  if (!context) return;
  end(*context);
  delete context;
}
int32_t pd_num_threads(const pd_context *context) {
  return context ? context->num_multiprocessors : fail("pd_num_threads: context is NULL");
}
#if !defined(__CUDACC__)
// For tests: in which order threads run.
PD_EXPORT void pd_emulate_seed(uint64_t seed) { emulate::set_seed(seed); }
#endif
int pd_await(pd_context *context) {
  if (!context) return fail("pd_await: context is NULL");
  const Turn turn(*context);
  return turn ? await(*context) : fail("pd_await: another thread works in this context");
}
void *pd_stream(const pd_context *context) { return context ? context->stream : nullptr; }
}
