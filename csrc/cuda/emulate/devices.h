// What tests ask of emulated devices, and what a driver knows of them besides (runtime.h).
#pragma once
#include <cstdint>

namespace pagedec::emulate {

// Whether this process has a context on a device, as it has from a thread's first call there on: of a real one that
// takes hundreds of megabytes.
bool is_in_use(int device);
void set_unused(int device);
// Whether all of it is some device's memory, or the host's and mapped.
bool holds(const void *, int64_t num_bytes);

}  // namespace pagedec::emulate
