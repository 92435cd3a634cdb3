// Memory of the emulated device. Only while something holds it open can it be touched: a host that reads or writes it
// at another time ends as a process does that touches what it has not. Behind each piece lies a page that nobody may
// touch.
#pragma once
#include <cstdint>

namespace pagedec::emulate {

// NULL: the system gives none. Given back, and unmapped, is what no stream needs any more. False: it is nobody's.
void *allocate(int64_t num_bytes);
bool release(void *);
// Memory of the host that kernels may reach, too. False: it is mapped, or not mapped, already.
bool map(const void *from, int64_t num_bytes);
bool unmap(const void *from);

// Opens the memory for as long as it lives.
class Opened {
 public:
  Opened();
  ~Opened();
  Opened(const Opened &) = delete;
};
// The same for a thread that works in a context; `is_alone`: records that it looks at may lead nowhere else.
class Access {
 public:
  explicit Access(bool is_alone);
  ~Access();
  Access(const Access &) = delete;

 private:
  const Opened opened_;
};

// This thread's device, whose the memory is that it takes.
int device_now();
void set_device(int);

// Whether a record that this thread looks at may lead there.
bool may_reach(const void *);

}  // namespace pagedec::emulate
