// What csrc/cuda/nccl.h declares is what NVIDIA's header says: this compiles, or it does not.
#include <nccl.h>

#include <type_traits>

#include "cuda/nccl.h"

using namespace pagedec;

// Passed alike: pointers, numbers of one size, records of one size.
template <class Ours, class Theirs>
constexpr bool is_alike = sizeof(Ours) == sizeof(Theirs) &&
                          std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                          std::is_class_v<Ours> == std::is_class_v<Theirs>;
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... P, class S, class... Q>
  requires(sizeof...(P) == sizeof...(Q))
struct Alike<R(P...), S(Q...)> : std::bool_constant<is_alike<R, S> && (is_alike<P, Q> && ...)> {};

#define DECLARED(result, name, parameters) static_assert(Alike<result parameters, decltype(name)>::value, #name);
PD_NCCL_FUNCTIONS(DECLARED)

static_assert((int)nccl::SUCCESS == ncclSuccess && (int)nccl::INVALID_ARGUMENT == ncclInvalidArgument);
static_assert((int)nccl::REMOTE_ERROR == ncclRemoteError && (int)nccl::IN_PROGRESS == ncclInProgress);
static_assert((int)nccl::FLOAT32 == ncclFloat32 && sizeof(nccl::Id) == sizeof(ncclUniqueId));
static_assert(nccl::OLDEST == NCCL_VERSION(2, 14, 0));
static_assert(nccl::Config{}.magic == ((ncclConfig_t)NCCL_CONFIG_INITIALIZER).magic);
static_assert(sizeof(nccl::Config) <= sizeof(ncclConfig_t));
static_assert(offsetof(nccl::Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(nccl::Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(nccl::Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(nccl::Config, blocking) == offsetof(ncclConfig_t, blocking));
