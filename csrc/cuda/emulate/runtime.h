// CUDA's runtime as the host's code calls it, for the emulated device: tests so run the code that calls a real one.
// Streams are late (stream.h), and events are marks of them. Stricter than a real one: memory begins as NaN, and so is
// what is copied to pinned memory until it is there; a thread that captures may neither wait, copy, nor take or give
// memory, and nobody may wait for a device meanwhile; kernels go into streams of the thread's device alone.
#pragma once
#include <cstddef>
#include <functional>
#include <string>

namespace pagedec::emulate {
class Stream;
struct Event;
struct Graph;
constexpr int DEVICES = 2;  // with one memory

void put(Stream *, std::function<std::string()> work);  // of the thread's device
// For tests: from now on every wait fails, and whoever asks for a kernel, as after an illegal address, or no more.
void lose(bool is_lost);
void set_capability(int major);  // kernels are built for 8
}  // namespace pagedec::emulate

constexpr int CUDART_VERSION = 13000;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidKernelImage = 200,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureWrongThread = 908,
  cudaErrorUnknown = 999,  // what a kernel has done wrong, of which the next one feels nothing
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrL2CacheSize,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum { cudaStreamNonBlocking, cudaEventDefault, cudaEventDisableTiming };
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
struct cudaFuncAttributes {};
using cudaStream_t = pagedec::emulate::Stream *;
using cudaEvent_t = pagedec::emulate::Event *;
using cudaGraph_t = pagedec::emulate::Graph *;
using cudaGraphExec_t = pagedec::emulate::Graph *;

const char *cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaDriverGetVersion(int *);
cudaError_t cudaGetDevice(int *);
cudaError_t cudaSetDevice(int);
cudaError_t cudaDeviceGetAttribute(int *, cudaDeviceAttr, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *kernel);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t *num_free, size_t *num_all);  // 0 of 0: its memory is the host's

cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaMallocHost(void **, size_t);
cudaError_t cudaFreeHost(void *);
cudaError_t cudaHostRegister(void *, size_t, unsigned flags);
cudaError_t cudaHostUnregister(void *);
cudaError_t cudaHostGetDevicePointer(void **, void *, unsigned flags);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemsetAsync(void *, int byte, size_t, cudaStream_t);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventQuery(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphDestroy(cudaGraph_t);
