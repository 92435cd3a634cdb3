#include "cuda/emulate/runtime.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emulate/devices.h"
#include "cuda/emulate/machine.h"
#include "cuda/emulate/memory.h"
#include "cuda/emulate/stream.h"
#include "pagedec.h"

namespace pagedec::emulate {

using Clock = std::chrono::steady_clock;

struct Event {
  Stream *stream = nullptr;
  uint64_t mark = 0;
  bool is_timed = false;
  Clock::time_point at;  // when its stream came to it
};
struct Graph {
  std::vector<Stream::Work> launches;
};

namespace {

constexpr int MULTIPROCESSORS = 3;  // blocks of a grid: fewer than rows of a test, and no power of two
constexpr int SHARED_BYTES[DEVICES] = {MAX_SHARED_BYTES, 99 << 10};  // of a block; sm_86's

thread_local cudaError_t last = cudaSuccess;
thread_local std::string problem;  // of a kernel, which a wait has told of
std::atomic<int> capability{8};
std::atomic<bool> is_lost{false}, in_use[DEVICES];

cudaError_t error(cudaError_t value) { return last = value; }
cudaError_t told(const std::string &text) {
  if (is_lost) return error(cudaErrorIllegalAddress);
  if (text.empty()) return cudaSuccess;
  problem = text;
  return error(cudaErrorUnknown);
}

struct Capture {
  Stream *stream = nullptr;
  std::thread::id thread;
  bool is_valid = true;
  Graph graph;
};
std::mutex capturing;  // of the following
std::atomic<int64_t> num_captured{0};
std::set<Capture *> captures;

Capture *of(Stream *stream) {
  for (Capture *capture : captures)
    if (capture->stream == stream) return capture;
  return nullptr;
}
// What may not be while this thread captures, and ends what it captures.
bool is_forbidden() {
  in_use[device_now()] = true;
  const std::lock_guard lock(capturing);
  bool found = false;
  for (Capture *capture : captures)
    if (capture->thread == std::this_thread::get_id()) capture->is_valid = false, found = true;
  return found;
}
bool is_forbidden(Stream *stream) {
  const std::lock_guard lock(capturing);
  Capture *capture = of(stream);
  if (capture) capture->is_valid = false;
  return capture;
}

class Pinned {
 public:
  void add(void *begin, size_t size) {
    const std::lock_guard lock(mutex_);
    pieces_.insert({(char *)begin, size});
  }
  void remove(void *begin) {
    const std::lock_guard lock(mutex_);
    pieces_.erase(pieces_.lower_bound({(char *)begin, 0}));
  }
  bool holds(const void *p) {
    const std::lock_guard lock(mutex_);
    const auto next = pieces_.upper_bound({(char *)p, SIZE_MAX});
    return next != pieces_.begin() && (char *)p < std::prev(next)->first + std::prev(next)->second;
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<char *, size_t>> pieces_;
};
Pinned &pinned() {  // never destroyed: Python frees contexts until the process is gone
  static Pinned &one = *new Pinned;
  return one;
}

}  // namespace

void put(Stream *stream, std::function<std::string()> work) { stream->put(std::move(work)); }
void lose(bool lost) { is_lost = lost; }
void set_capability(int major) { capability = major; }
bool is_in_use(int device) { return device >= 0 && device < DEVICES && in_use[device]; }
void set_unused(int device) { in_use[device] = false; }

}  // namespace pagedec::emulate

using namespace pagedec::emulate;

#define PD_FORBIDDEN(...) \
  if (is_forbidden(__VA_ARGS__)) return error(cudaErrorStreamCaptureUnsupported)

const char *cudaGetErrorString(cudaError_t value) {
  switch (value) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidKernelImage: return "device kernel image is invalid";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorUnsupportedPtxVersion: return "the provided PTX was compiled with an unsupported toolchain.";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorIllegalInstruction: return "an illegal instruction was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorUnknown: return problem.c_str();
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureWrongThread: return "a thread-local capture is ended from another thread";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaGetDeviceCount(int *count) { return *count = DEVICES, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = device_now(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return error(cudaErrorInvalidDevice);
  in_use[device] = true;
  return set_device(device), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int device) {
  if (device < 0 || device >= DEVICES) return error(cudaErrorInvalidDevice);
  switch (name) {
    case cudaDevAttrMultiProcessorCount: return *value = MULTIPROCESSORS, cudaSuccess;
    case cudaDevAttrL2CacheSize: return *value = 1 << 16, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = SHARED_BYTES[device], cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = capability, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = 0, cudaSuccess;
  }
  return error(cudaErrorInvalidValue);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *) {
  if (is_lost) return error(cudaErrorIllegalAddress);
  return capability == 8 ? cudaSuccess : error(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaDeviceSynchronize() {
  {
    const std::lock_guard lock(capturing);
    for (Capture *capture : captures) capture->is_valid = false;
    if (!captures.empty()) return error(cudaErrorStreamCaptureUnsupported);
  }
  return await_all(device_now()), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *num_free, size_t *num_all) { return *num_free = *num_all = 0, cudaSuccess; }

// ---- memory
cudaError_t cudaMalloc(void **memory, size_t num_bytes) {
  PD_FORBIDDEN();
  *memory = allocate((int64_t)num_bytes);
  if (!*memory) return error(cudaErrorMemoryAllocation);
  const Opened opened;
  memset(*memory, 0xff, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  PD_FORBIDDEN();
  return release(memory) ? cudaSuccess : error(cudaErrorInvalidValue);
}
cudaError_t cudaMallocHost(void **memory, size_t num_bytes) {
  PD_FORBIDDEN();
  *memory = malloc(num_bytes);
  if (!*memory) return error(cudaErrorMemoryAllocation);
  return pinned().add(*memory, num_bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void *memory) {
  PD_FORBIDDEN();
  if (!memory) return cudaSuccess;
  if (!pinned().holds(memory)) return error(cudaErrorInvalidValue);
  await_all();
  pinned().remove(memory);
  return free(memory), cudaSuccess;
}
cudaError_t cudaHostRegister(void *from, size_t num_bytes, unsigned) {
  PD_FORBIDDEN();
  return map(from, (int64_t)num_bytes) ? cudaSuccess : error(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void *from) {
  PD_FORBIDDEN();
  return unmap(from) ? cudaSuccess : error(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **seen, void *from, unsigned) { return *seen = from, cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, cudaMemcpyKind way, cudaStream_t stream) {
  PD_FORBIDDEN();
  PD_FORBIDDEN(stream);
  if (!holds(way == cudaMemcpyDeviceToHost ? from : to, (int64_t)num_bytes)) return error(cudaErrorInvalidValue);
  if (way == cudaMemcpyDeviceToHost && pinned().holds(to)) memset(to, 0xff, num_bytes);
  return put(stream, [=] { return forget_before(), memcpy(to, from, num_bytes), std::string(); }), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t num_bytes, cudaStream_t stream) {
  PD_FORBIDDEN();
  PD_FORBIDDEN(stream);
  if (!holds(to, (int64_t)num_bytes)) return error(cudaErrorInvalidValue);
  return put(stream, [=] { return forget_before(), memset(to, byte, num_bytes), std::string(); }), cudaSuccess;
}

// ---- streams
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  PD_FORBIDDEN();
  *stream = new Stream;
  (*stream)->device = device_now();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  PD_FORBIDDEN();
  return delete stream, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PD_FORBIDDEN();
  PD_FORBIDDEN(stream);
  return told(stream->await());
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  PD_FORBIDDEN();
  PD_FORBIDDEN(stream);
  return stream->is_through() ? told(stream->await()) : error(cudaErrorNotReady);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = new Event;
  (*event)->is_timed = flags != cudaEventDisableTiming;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  PD_FORBIDDEN();
  if (event->stream && event->is_timed) event->stream->await();  // it has yet to be told the time
  return delete event, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  PD_FORBIDDEN(stream);
  if (device_now() != stream->device) return error(cudaErrorInvalidResourceHandle);
  if (event->is_timed) put(stream, [event] { return event->at = Clock::now(), std::string(); });
  event->stream = stream, event->mark = stream->mark();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  PD_FORBIDDEN();
  return event->stream ? told(event->stream->await(event->mark)) : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  PD_FORBIDDEN();
  if (!event->stream) return cudaSuccess;
  return event->stream->is_through(event->mark) ? told(event->stream->await(event->mark)) : error(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// ---- graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  PD_FORBIDDEN(stream);
  Capture *capture = new Capture{stream, std::this_thread::get_id(), true, {}};
  const std::lock_guard lock(capturing);
  captures.insert(capture);
  stream->record(&capture->graph.launches);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  const std::lock_guard lock(capturing);
  Capture *capture = of(stream);
  *graph = nullptr;
  if (!capture) return error(cudaErrorInvalidValue);
  if (capture->thread != std::this_thread::get_id()) return error(cudaErrorStreamCaptureWrongThread);
  captures.erase(capture);
  stream->record(nullptr);
  const bool is_valid = capture->is_valid;
  if (is_valid) *graph = new Graph{std::move(capture->graph)};
  if (is_valid) num_captured += (int64_t)(*graph)->launches.size();
  delete capture;
  return is_valid ? cudaSuccess : error(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  const std::lock_guard lock(capturing);
  *status = of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  return *made = new Graph(*graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  PD_FORBIDDEN(stream);
  for (const auto &launch : graph->launches) put(stream, launch);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  PD_FORBIDDEN();
  return delete graph, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }

// For tests: how many launches have been recorded; what becomes of a capture in which this is done, and then of the
// stream.
extern "C" PD_EXPORT int64_t pd_emulate_num_captured(void) { return num_captured; }
extern "C" PD_EXPORT int32_t pd_emulate_capture(void *stream, const char *what) {
  const cudaStream_t own = (cudaStream_t)stream;
  const std::string name = what;
  static char bytes[64];
  void *memory = nullptr;
  cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal);
  if (name == "wait") cudaStreamSynchronize(own);
  if (name == "look") cudaStreamQuery(own);
  if (name == "copy") cudaMemcpyAsync(bytes, bytes, sizeof bytes, cudaMemcpyHostToDevice, own);
  if (name == "take") cudaMalloc(&memory, 64);
  if (name == "give") cudaFree(nullptr);
  if (name == "wait for all elsewhere") std::thread([] { cudaDeviceSynchronize(); }).join();
  if (name == "give elsewhere") std::thread([] { cudaFree(nullptr); }).join();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(own, &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
  return ended ? ended : cudaStreamSynchronize(own);
}
