// NCCL's functions for emulated devices, over memory that ranks share, in a library of its own. As the real one: calls
// go on behind their return, exchanges are work of a stream, a rank that does not come is waited for until somebody
// aborts, and one whose process is gone is told of only to those who ask. Stricter: what a rank sends must be as long
// as what the other one expects, and recorded where that is: all ranks record an exchange at a time. And who aborts
// beside recordings with exchanges, for whose end the real one waits, ends the process.
#include "cuda/nccl.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/patience.h"
#include "cuda/emulate/stream.h"

#define PD_EMULATED extern "C" __attribute__((visibility("default")))

namespace pagedec::nccl {
namespace {

constexpr int MAX_WORLD = 16, VERSION = 23203;
constexpr size_t PIECE = 16384;  // bytes
constexpr double FOR_EVER = 5.0;  // seconds
using Number = std::atomic<uint64_t>;

struct Box {  // from one rank to another: a piece at a time
  Number num_sent, num_taken, num_bytes, recorded;  // of the whole; which of the recorded exchanges, 0: none
  char data[PIECE];
};
struct Shared {
  std::atomic<int> num_come, processes[MAX_WORLD];
  Box boxes[MAX_WORLD][MAX_WORLD];
};

struct Way {  // one rank's bytes to another
  int peer;
  char *bytes;
  size_t size, num_done = 0;
  bool is_sent;
  uint64_t recorded = 0;
};

}  // namespace

struct Communicator {
  Communicator(int rank, int world, std::string name) : rank(rank), world(world), name(std::move(name)) {}
  ~Communicator() {
    if (shared) munmap(shared, sizeof(Shared));
  }
  bool map() {
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    void *memory = file < 0 || ftruncate(file, sizeof(Shared))
                       ? MAP_FAILED
                       : mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) return false;
    shared = (Shared *)memory;
    shared->processes[rank] = getpid();
    shared->num_come++;
    return true;
  }
  // Moves a piece of a way where it can be moved.
  bool advance(Way &way, std::string &problem) {
    Box &box = way.is_sent ? shared->boxes[rank][way.peer] : shared->boxes[way.peer][rank];
    const uint64_t sent = box.num_sent, taken = box.num_taken;
    const size_t size = std::min(PIECE, way.size - way.num_done);
    if (way.is_sent ? sent != taken : sent == taken) return false;
    if (way.is_sent) {
      memcpy(box.data, way.bytes + way.num_done, size);
      box.num_bytes = way.size, box.recorded = way.recorded, box.num_sent = sent + 1;
    } else {
      if (box.num_bytes != way.size)
        problem = "rank " + std::to_string(way.peer) + " sends " + std::to_string(box.num_bytes) + " bytes; rank " +
                  std::to_string(rank) + " expects " + std::to_string(way.size);
      if (box.recorded != way.recorded)
        problem = "rank " + std::to_string(way.peer) + " has not recorded what rank " + std::to_string(rank) + " has";
      memcpy(way.bytes + way.num_done, box.data, size);
      box.num_taken = taken + 1;
    }
    way.num_done += size;
    return true;
  }
  void look_for_peers() {
    for (int peer = 0; peer < world; peer++)
      if (kill(shared->processes[peer], 0)) error = REMOTE_ERROR;
  }
  std::string exchange(std::vector<Way> ways) {
    std::string problem;
    Patience patience(1e9);
    for (int idle = 0; !is_aborted && problem.empty();) {
      bool is_through = true, moves = false;
      for (Way &way : ways) {
        if (way.num_done < way.size && problem.empty()) moves = advance(way, problem) || moves;
        is_through = is_through && way.num_done == way.size;
      }
      if (is_through || !problem.empty()) return problem;
      if (moves) continue;
      patience.pause();
      if (++idle % 512 == 0) look_for_peers();
    }
    return problem;  // aborted: a device's kernels just end
  }
  const int rank, world;
  const std::string name;
  Shared *shared = nullptr;
  bool is_init = false, is_pending = false;
  uint64_t num_recorded = 0;
  std::shared_ptr<int> recorded = std::make_shared<int>();  // which recordings with exchanges have, too
  Stream stream = nullptr;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{SUCCESS};
  std::shared_ptr<Communicator> self;  // until it is aborted; works have their own
};

namespace {

thread_local int depth = 0;
thread_local std::vector<Way> grouped;
thread_local Comm of_group = nullptr;
thread_local Stream stream_of_group = nullptr;

int enqueue(Comm comm, Stream stream, std::vector<Way> ways) {
  if (!comm->is_init || comm->is_pending) return INVALID_ARGUMENT;  // the call before is under way
  comm->is_pending = true, comm->stream = stream;
  const bool is_recorded = ((emulate::Stream *)stream)->is_recorded();
  if (is_recorded) {
    comm->num_recorded++;
    for (Way &way : ways) way.recorded = comm->num_recorded;
  }
  ((emulate::Stream *)stream)->put([comm = comm->self, ways, recorded = is_recorded ? comm->recorded : nullptr] {
    return comm->exchange(ways);
  });
  return IN_PROGRESS;
}
int add(Comm comm, Stream stream, Way way) {
  if (depth == 0) return enqueue(comm, stream, {way});
  grouped.push_back(way), of_group = comm, stream_of_group = stream;
  return SUCCESS;
}

}  // namespace
}  // namespace pagedec::nccl

using namespace pagedec;
using namespace pagedec::nccl;

#define PD_DECLARE(result, name, parameters) PD_EMULATED result name parameters;
PD_NCCL_FUNCTIONS(PD_DECLARE)

int ncclGetVersion(int *version) { return *version = VERSION, SUCCESS; }
int ncclGetUniqueId(Id *id) {
  std::random_device random;
  *id = {};
  snprintf(id->internal, sizeof id->internal, "/pagedec-nccl-%d-%08x%08x", getpid(), random(), random());
  return SUCCESS;
}
int ncclCommInitRankConfig(Comm *comm, int world, Id id, int rank, Config *config) {
  if (world > MAX_WORLD || config->size != sizeof(Config) || config->blocking) return INVALID_ARGUMENT;
  auto made = std::make_shared<Communicator>(rank, world, id.internal);
  if (!made->map()) return INVALID_ARGUMENT;
  made->self = made;
  *comm = made.get();
  return IN_PROGRESS;
}
int ncclCommGetAsyncError(Comm comm, int *result) {
  *result = comm->error;
  if (*result != SUCCESS) return SUCCESS;
  if (!comm->is_init) {
    comm->is_init = comm->shared->num_come == comm->world;
    if (comm->is_init) shm_unlink(comm->name.c_str());
    *result = comm->is_init ? SUCCESS : IN_PROGRESS;
  } else if (comm->is_pending) {
    comm->is_pending = false, *result = IN_PROGRESS;
  }
  return SUCCESS;
}
int ncclCommAbort(Comm comm) {
  if (!comm) return SUCCESS;
  if (!comm->is_init) shm_unlink(comm->name.c_str());
  comm->is_aborted = true;
  for (Patience patience(FOR_EVER); comm->recorded.use_count() > 1;) {
    ((emulate::Stream *)comm->stream)->is_through();  // what is under way ends, as a device's work does
    if (patience.pause()) continue;
    fprintf(stderr, "ncclCommAbort: it waits for the end of recordings with exchanges, and nobody ends them\n");
    abort();
  }
  comm->self.reset();
  return SUCCESS;
}
const char *ncclGetErrorString(int result) {
  return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "invalid argument";
}
const char *ncclGetLastError(Comm) { return ""; }
int ncclAllGather(const void *own, void *parts, size_t count, int, Comm comm, Stream stream) {
  const size_t size = count * sizeof(float);
  std::vector<Way> ways;
  for (int peer = 0; peer < comm->world; peer++) {
    ways.push_back({peer, (char *)own, size, 0, true});
    ways.push_back({peer, (char *)parts + peer * size, size, 0, false});
  }
  return enqueue(comm, stream, ways);
}
int ncclSend(const void *bytes, size_t count, int, int peer, Comm comm, Stream stream) {
  return add(comm, stream, {peer, (char *)bytes, count * sizeof(float), 0, true});
}
int ncclRecv(void *bytes, size_t count, int, int peer, Comm comm, Stream stream) {
  return add(comm, stream, {peer, (char *)bytes, count * sizeof(float), 0, false});
}
int ncclGroupStart() { return depth++, SUCCESS; }
int ncclGroupEnd() {
  if (--depth > 0 || grouped.empty()) return SUCCESS;
  return enqueue(of_group, stream_of_group, std::exchange(grouped, {}));
}
