// The noise of a run of tokens, for those who want to see it.
#include "cpu/philox.h"

#include "common/internal.h"

using namespace pagedec;

extern "C" int pd_gumbel(pd_context *context, uint64_t seed, uint64_t stream, int32_t position, int32_t first_token,
                         int32_t num_tokens, float *out) {
  if (check_gumbel(context, first_token, num_tokens, out)) return -1;
  const NoiseKey key{seed, stream, position};
  const int64_t end = (int64_t)first_token + num_tokens;
  for (int64_t group = first_token / 64; group * 64 < end; group++) {
    uint32_t words[64];
    float noise[64];
    philox_group(key, (uint32_t)(group * 16), words);
    for (uint32_t &word : words) word >>= 8;
    for (int i = 0; i < 64; i += 16) store16(noise + i, gumbel_of<F16>(load16i((const int32_t *)words + i)));
    const int64_t start = group * 64, begin = start < first_token ? first_token : start;
    const int64_t stop = start + 64 < end ? start + 64 : end;
    memcpy(out + (begin - first_token), noise + (begin - start), (stop - begin) * sizeof(float));
  }
  return 0;
}
