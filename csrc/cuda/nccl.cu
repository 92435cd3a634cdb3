// Ranks that exchange values by NCCL, in their streams. No call of a communicator blocks: whoever waits does it here,
// and gives up where the others do not come.
#include "cuda/nccl.h"

#include <dlfcn.h>

#include <cmath>
#include <mutex>
#include <new>
#include <utility>

#include "common/patience.h"
#include "cuda/context.h"
#if !defined(__CUDACC__)
#include "cuda/emulate/stream.h"
#endif

namespace pagedec {

struct Ranks {
  Ranks(pd_context &context, int32_t rank, int32_t world, double seconds)
      : context(context), rank(rank), world(world), seconds(seconds) {}
  nccl::Comm comm = nullptr;  // NULL: they were left, and why
  pd_context &context;
  const int32_t rank, world;
  const double seconds;
  bool is_alike = false;  // all ranks' memory grows at a time
  DeviceMemory words;     // what they say
  char problem[512] = "";
};

namespace {

struct Library {
  int version = 0;  // 0: none is open
#define PD_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  PD_NCCL_FUNCTIONS(PD_MEMBER)
#undef PD_MEMBER
};
Library library;  // filled once
std::mutex opening;

int open_library(const char *path) {
  void *handle = dlopen(path ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return fail("pd_nccl_open: %s", dlerror());
  Library found;
  const char *missing = nullptr;
#define PD_FIND(result, name, parameters) \
  if (!(found.name = (result(*) parameters)dlsym(handle, #name))) missing = #name;
  PD_NCCL_FUNCTIONS(PD_FIND)
#undef PD_FIND
  const char *shown = path ? path : "libnccl.so.2";
  if (missing) return fail("pd_nccl_open: %s has no function %s: it must be NCCL 2.14 or newer", shown, missing);
  if (found.ncclGetVersion(&found.version) != nccl::SUCCESS || found.version < nccl::OLDEST)
    return fail("pd_nccl_open: the version of %s is %d; it must be %d or more", shown, found.version, nccl::OLDEST);
  library = found;
  return 0;
}

int failed(const char *name, int result, nccl::Comm comm) {
  const char *more = library.ncclGetLastError(comm);
  return fail("%s: %s%s%s", name, library.ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "");
}

// What the device still waits for ends, and every later exchange fails with what was said last.
int give_up(Ranks &r) {
  snprintf(r.problem, sizeof r.problem, "%s", pd_last_error());
  end_recordings(r.context);
  library.ncclCommAbort(std::exchange(r.comm, nullptr));
  return -1;
}

// A call goes on behind the one that began it. Until it is through, nothing else may be asked of the communicator.
int settle(Ranks &r, const char *name, int result) {
  Patience patience(r.seconds);
  while (result == nccl::IN_PROGRESS) {
    if (!patience.pause()) {
      fail("%s: rank %d of %d has waited %g s for the others", name, r.rank, r.world, r.seconds);
      return give_up(r);
    }
    const int asked = library.ncclCommGetAsyncError(r.comm, &result);
    if (asked != nccl::SUCCESS) result = asked;
  }
  if (result == nccl::SUCCESS) return 0;
  failed(name, result, r.comm);
  return give_up(r);
}

int check_exchange(const char *name, const void *own, const void *parts, int64_t num_values) {
  if (check_pointer(name, "own", own) || (parts && check_pointer(name, "parts", parts))) return -1;
  return check_range(name, "num_values", num_values, 1, INT64_MAX / 8);
}
// NULL: fail(...).
Ranks *joined(pd_context &c, const char *name) {
  if (!c.ranks) return fail("%s: the context has joined no ranks; pd_nccl_join must come first", name), nullptr;
  return check_ranks(c) ? nullptr : c.ranks;
}

}  // namespace

int check_all_gather(const pd_all_gather_args &a) {
  const char *name = "pd_all_gather";
  return check_pointer(name, "parts", a.parts) ? -1 : check_exchange(name, a.own, a.parts, a.num_values);
}
int check_gather(const pd_gather_args &a) { return check_exchange("pd_gather", a.own, a.parts, a.num_values); }

int enqueue_all_gather(pd_context &c, const pd_all_gather_args &a) {
  Ranks *r = joined(c, "pd_all_gather");
  if (!r) return -1;
  const int result = library.ncclAllGather(a.own, a.parts, (size_t)a.num_values, nccl::FLOAT32, r->comm, c.stream);
  return settle(*r, "ncclAllGather", result);
}

// Everybody sends, the first one to itself, too.
int enqueue_gather(pd_context &c, const pd_gather_args &a) {
  Ranks *r = joined(c, "pd_gather");
  if (!r) return -1;
  if (r->rank == 0 && check_pointer("pd_gather", "parts", a.parts)) return -1;
  const size_t n = (size_t)a.num_values;
  int result = library.ncclGroupStart();
  const auto also = [&](int next) { result = result == nccl::SUCCESS || result == nccl::IN_PROGRESS ? next : result; };
  also(library.ncclSend(a.own, n, nccl::FLOAT32, 0, r->comm, c.stream));
  for (int32_t p = 0; r->rank == 0 && p < r->world; p++)
    also(library.ncclRecv((float *)a.parts + p * n, n, nccl::FLOAT32, p, r->comm, c.stream));
  also(library.ncclGroupEnd());
  return settle(*r, "ncclSend and ncclRecv", result);
}

int check_ranks(pd_context &c) {
  return c.ranks && !c.ranks->comm ? fail("the ranks were left: %s", c.ranks->problem) : 0;
}

int any_rank(pd_context &c, bool &so) {
  constexpr int64_t APART = 64;
  if (!c.ranks || c.ranks->is_alike) return 0;
  const int64_t size = c.ranks->world * (int64_t)sizeof(int32_t);
  std::vector<int32_t> all(c.ranks->world);
  if (c.ranks->words.reserve(APART + size)) return -1;
  char *own = (char *)c.ranks->words.get(), *parts = own + APART;
  const int32_t word = so;
  if (upload(c, own, &word, sizeof word) || enqueue_all_gather(c, {own, parts, 1}) ||
      download(c, all.data(), parts, size))
    return -1;
  for (const int32_t said : all) so = so || said;
  return 0;
}

int await_ranks(pd_context &c, pd_fetch *fetch) {
  Ranks &r = *c.ranks;
  for (Patience patience(r.seconds);;) {
    const int through = fetch ? is_through(c, *fetch) : is_through(c);
    if (through < 0) return -1;
    int state = nccl::SUCCESS;
    if (r.comm && library.ncclCommGetAsyncError(r.comm, &state) == nccl::SUCCESS && state != nccl::SUCCESS &&
        state != nccl::IN_PROGRESS) {
      failed("ncclCommGetAsyncError", state, r.comm);
      return give_up(r);
    }
    if (through) return 0;
    if (patience.pause()) continue;
    fail("await: rank %d of %d is not through after %g s: another one may not have come", r.rank, r.world, r.seconds);
    return r.comm ? give_up(r) : -1;
  }
}

void leave_ranks(pd_context &c) {
  end_recordings(c);
  if (c.ranks && c.ranks->comm) library.ncclCommAbort(c.ranks->comm);
  delete std::exchange(c.ranks, nullptr);
}

}  // namespace pagedec

using namespace pagedec;

extern "C" {
int32_t pd_nccl_open(const char *path) {
  const std::lock_guard lock(opening);
  return library.version || open_library(path) == 0 ? library.version : -1;
}
int pd_nccl_id(void *id) {
  static_assert(sizeof(nccl::Id) == PD_NCCL_ID_BYTES);
  if (!id) return fail("pd_nccl_id: id is NULL; it must point to %d bytes", PD_NCCL_ID_BYTES);
  if (!library.version) return fail("pd_nccl_id: no library is open; pd_nccl_open must come first");
  nccl::Id made;
  const int result = library.ncclGetUniqueId(&made);
  if (result != nccl::SUCCESS) return failed("ncclGetUniqueId", result, nullptr);
  memcpy(id, &made, sizeof made);
  return 0;
}
int pd_nccl_join(pd_context *context, const void *id, int32_t rank, int32_t world, double seconds) {
  const char *name = "pd_nccl_join";
  if (!context) return fail("%s: context is NULL", name);
  if (!id) return fail("%s: id is NULL; it must point to %d bytes", name, PD_NCCL_ID_BYTES);
  if (check_range(name, "world", world, 1, 65536) || check_range(name, "rank", rank, 0, world - 1)) return -1;
  if (!(seconds > 0.0) || !std::isfinite(seconds))
    return fail("%s: seconds is %g; it must be above 0 and finite", name, seconds);
  if (!library.version) return fail("%s: no library is open; pd_nccl_open must come first", name);
  const Turn turn(*context);
  if (!turn) return fail("%s: another thread works in this context", name);
  if (context->ranks) return fail("%s: the context has joined ranks already", name);
  Ranks *ranks = new (std::nothrow) Ranks(*context, rank, world, seconds);
  if (!ranks) return fail("%s: out of memory", name);
  nccl::Id own;
  memcpy(&own, id, sizeof own);
  nccl::Config config;
  if (settle(*ranks, "ncclCommInitRankConfig",
             library.ncclCommInitRankConfig(&ranks->comm, world, own, rank, &config))) {
    delete ranks;
    return -1;
  }
  context->ranks = ranks;
#if !defined(__CUDACC__)
  stream_of(*context)->go_on();  // others wait for what it exchanges, whatever this host does
#endif
  return 0;
}
int pd_nccl_alike(pd_context *context) {
  if (!context) return fail("pd_nccl_alike: context is NULL");
  if (!context->ranks) return fail("pd_nccl_alike: the context has joined no ranks; pd_nccl_join must come first");
  context->ranks->is_alike = true;
  return 0;
}
int32_t pd_nccl_world(const pd_context *context) {
  if (!context) return fail("pd_nccl_world: context is NULL");
  return context->ranks && context->ranks->comm ? context->ranks->world : 0;
}
}
