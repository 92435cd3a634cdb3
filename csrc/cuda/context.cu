#include "cuda/context.h"

#include <dlfcn.h>

#include <new>
#include <utility>

#if !defined(__CUDACC__)
#include "cuda/emulate/devices.h"
#endif

namespace pagedec {
namespace {

constexpr int MAX_THREADS = 4096;

// What needs a little more in each step, as a plan does, would be taken anew in each, and recordings with it.
int64_t with_room(int64_t bytes) { return bytes + bytes / 2; }

constexpr int kOldest = 8;  // the compute capability whose instructions kernels have

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

PD_KERNEL(kWarp) nothing_kernel() {}

// Whether the library has no code that the device runs. Else a kernel before may have failed, or there is no memory for
// a context.
bool is_of_code(cudaError_t error) {
  return error == cudaErrorInvalidDeviceFunction || error == cudaErrorInvalidKernelImage ||
         error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
}

// Whether kernels are there that the device runs. 0, or fail(...).
int check_code(int32_t device) {
  int major = 0, minor = 0;
  if (launched("pd_context_new", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) ||
      launched("pd_context_new", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)))
    return -1;
  if (major < kOldest)
    return fail("pd_context_new: device %d has compute capability %d.%d; it must be %d.0 or newer", device, major,
                minor, kOldest);
  cudaFuncAttributes found;
  const cudaError_t error = cudaFuncGetAttributes(&found, (const void *)nothing_kernel);
  if (!is_of_code(error)) return launched("pd_context_new", error);
  cudaGetLastError();
  constexpr const char *kNone =
      "pd_context_new: nothing here was built for device %d, of compute capability %d.%d (%s): make cuda does it";
  return fail(kNone, device, major, minor, cudaGetErrorString(error));
}

// A stream of its own, and what is to be known of the device; false with an error.
bool begin(pd_context &c, int32_t device) {
  const int count = count_devices("pd_context_new");
  if (count < 0) return false;
  if (device < 0 || device >= count)
    return fail("pd_context_new: device is %d; it must be 0 to %d", device, count - 1), false;
  c.device = device;
  const OnDevice on(device);
  if (check_code(device)) return false;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaDeviceGetAttribute(&c.num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  int shared_bytes = 0;
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  c.max_shared_bytes = shared_bytes;
  int major = 0, minor = 0;
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  c.capability = 10 * major + minor;
  if (error == cudaSuccess) error = cudaDriverGetVersion(&c.driver);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (launched("pd_context_new", error)) return false;
  c.stream = stream;
  last_device = device;
  return true;
}
void end(pd_context &c) {
  const OnDevice on(c.device);
  leave_ranks(c);
  ignore(cudaStreamSynchronize(stream_of(c)));  // copies out of the staging, too
  ignore(cudaFreeHost(c.staging));
  launched("pd_context_free", cudaStreamDestroy(stream_of(c)));
}

}  // namespace

const Target &target(const pd_context &c) { return c; }

const char *advice_on(cudaError_t error) {
  switch (error) {
    case cudaErrorInitializationError: return "; a fork cannot use the device that its parent uses";
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return "; a kernel before has failed, and nothing more of this process runs on its device: with "
             "CUDA_LAUNCH_BLOCKING=1 in its environment the kernel itself is named";
    default: return "";
  }
}

bool is_in_use(int device) {
#if defined(__CUDACC__)
  using State = int (*)(int device, unsigned *flags, int *is_active);
  static const State state = [] {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? (State)dlsym(driver, "cuDevicePrimaryCtxGetState") : nullptr;
  }();
  unsigned flags = 0;
  int is_active = 0;
  return state && state(device, &flags, &is_active) == 0 && is_active;
#else
  return emulate::is_in_use(device);
#endif
}

OnDevice::OnDevice(int32_t device) {
  int now = -1;
  ignore(cudaGetDevice(&now));
  if (now == device) return;
  ignore(cudaSetDevice(device));
  before_ = now;
}
OnDevice::~OnDevice() {
  if (before_ >= 0 && is_in_use(before_)) ignore(cudaSetDevice(before_));
}

Turn::Turn(pd_context &context, [[maybe_unused]] bool records)
    : context_(context), taken_(!context.busy.exchange(true, std::memory_order_acquire)), on_(context.device)
#if !defined(__CUDACC__)
      ,
      access_(records && context.is_alone)
#endif
{
}
Turn::~Turn() {
  if (taken_) context_.busy.store(false, std::memory_order_release);
}

DeviceMemory::~DeviceMemory() { clear(); }
void DeviceMemory::clear() {
  pd_memory_free(data_);
  data_ = nullptr, size_ = 0;
}
int32_t any_device() { return last_device; }
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
int before_checks(pd_context &c) {
#if defined(__CUDACC__)
  (void)c;
  return 0;
#else
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ignore(cudaStreamIsCapturing(stream_of(c), &status));
  return status == cudaStreamCaptureStatusNone ? await(c) : 0;
#endif
}
int await(pd_context &c) {
  return c.ranks ? await_ranks(c) : launched("await", cudaStreamSynchronize(stream_of(c)));
}
int is_through(pd_context &c) {
  const cudaError_t error = cudaStreamQuery(stream_of(c));
  if (error != cudaErrorNotReady) return launched("await", error) ? -1 : 1;
  cudaGetLastError();
  return 0;
}
}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_num_devices(void) {
  return count_devices("pd_num_devices");
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
// For tests: in which order threads run; whether kernels that may begin early do; a device that fails for ever, until
// it is told otherwise; one of another compute capability than kernels are built for, which is 8; which is this
// thread's, from now on if it is one; and whether one has a context, not counting what was before it was last told that
// it has none.
PD_EXPORT void pd_emulate_seed(uint64_t seed) { emulate::set_seed(seed); }
PD_EXPORT void pd_emulate_early(int32_t begins) { emulate::begin_early(begins); }
PD_EXPORT void pd_emulate_lost(int32_t is_lost) { emulate::lose(is_lost); }
PD_EXPORT void pd_emulate_capability(int32_t major) { emulate::set_capability(major); }
PD_EXPORT int32_t pd_emulate_device(int32_t device) {
  return device < 0 ? emulate::device_now() : (emulate::set_device(device), device);
}
PD_EXPORT void pd_emulate_unused(int32_t device) { emulate::set_unused(device); }
PD_EXPORT int32_t pd_emulate_in_use(int32_t device) { return emulate::is_in_use(device); }
#endif
int pd_await(pd_context *context) {
  if (!context) return fail("pd_await: context is NULL");
  const Turn turn(*context);
  return turn ? await(*context) : fail("pd_await: another thread works in this context");
}
void *pd_stream(const pd_context *context) { return context ? context->stream : nullptr; }
}
