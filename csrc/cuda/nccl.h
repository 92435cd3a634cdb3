// What is used of NCCL, as nccl.h declares it from 2.14 on: the library is opened at run time, where there is one. A
// test holds this against NVIDIA's own header.
#pragma once
#include <cstddef>

namespace pagedec::nccl {

constexpr int OLDEST = 21400;  // the first whose communicators need not block
enum Result { SUCCESS = 0, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum Type { FLOAT32 = 7 };
struct Id {
  char internal[128];
};
// The beginning of ncclConfig_t, which says how long it is and of which release.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef, version = OLDEST;
  int blocking = 0;
};
using Comm = struct Communicator *;
using Stream = void *;  // cudaStream_t

// result, name, parameters
#define PD_NCCL_FUNCTIONS(X)                                                                        \
  X(int, ncclGetVersion, (int *version))                                                            \
  X(int, ncclGetUniqueId, (nccl::Id *))                                                             \
  X(int, ncclCommInitRankConfig, (nccl::Comm *, int world, nccl::Id, int rank, nccl::Config *))     \
  X(int, ncclCommGetAsyncError, (nccl::Comm, int *result))                                          \
  X(int, ncclCommAbort, (nccl::Comm))                                                               \
  X(const char *, ncclGetErrorString, (int result))                                                 \
  X(const char *, ncclGetLastError, (nccl::Comm))                                                   \
  X(int, ncclAllGather, (const void *own, void *parts, size_t, int type, nccl::Comm, nccl::Stream)) \
  X(int, ncclSend, (const void *, size_t, int type, int peer, nccl::Comm, nccl::Stream))            \
  X(int, ncclRecv, (void *, size_t, int type, int peer, nccl::Comm, nccl::Stream))                  \
  X(int, ncclGroupStart, ())                                                                        \
  X(int, ncclGroupEnd, ())

}  // namespace pagedec::nccl
