// Memory of the emulated device. Only while something holds it open can it be touched: a host that reads or writes it
// at another time ends as a process does that touches what it has not. Behind each piece lies a page that nobody may
// touch.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

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

// Memory as it was when this was made, for a kernel that begins before those behind that are through.
class Before {
 public:
  Before();
  void show();
  bool hide();  // and show what is there. False: somebody has written meanwhile
  bool is_shown() const { return !now_.empty(); }

 private:
  std::vector<char> all() const;
  void put(const std::vector<char> &);
  std::vector<std::pair<char *, int64_t>> pieces_;
  std::vector<char> then_, now_;
};
// For tests: from now on a kernel that may begin early finds memory, until it waits, as it was before the kernels that
// may still be under way. Copies are always waited for.
void begin_early(bool);
// A kernel of a stream is about to be carried out: what it finds, if that is not what is there, or NULL.
Before *before_kernel(const void *stream, bool is_early);
void forget_before();  // what was put into a stream is through

// Whether a record that this thread looks at may lead there.
bool may_reach(const void *);

}  // namespace pagedec::emulate
