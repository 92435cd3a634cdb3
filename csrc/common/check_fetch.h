// Checks of copies to the host that run beside other work; what a pd_fetch is, each kind of memory says for itself.
#pragma once
#include "common/check.h"

namespace pagedec {
namespace {

template <class Fetch>
int check_fetch(const char *name, const pd_context *context, const Fetch *fetch) {
  if (!context) return fail("%s: context is NULL", name);
  if (!fetch) return fail("%s: fetch is NULL", name);
  return fetch->context == context ? 0 : fail("%s: fetch is another context's", name);
}
template <class Fetch>
int check_fetch_begin(const pd_context *context, const Fetch *fetch, const void *from, int64_t num_bytes) {
  const char *name = "pd_fetch_begin";
  if (check_fetch(name, context, fetch) || check_copy(name, context, fetch, from, num_bytes)) return -1;
  if (num_bytes <= fetch->max_bytes) return 0;
  return fail("%s: num_bytes is %lld; it must be at most %lld", name, (long long)num_bytes,
              (long long)fetch->max_bytes);
}

}  // namespace
}  // namespace pagedec
