// CPU build of csrc/masked_logprob.h: one thread per row, rows divided so that threads get equally
// many kept ids.  A row is summed by one thread in one order, so the result does not depend on the
// number of threads.  Own threads rather than OpenMP: torch brings an OpenMP runtime, and two of
// them in one process fight for the cores.
#include "masked_logprob.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using moerl::Kept;

constexpr int64_t kIdsPerThread = 1 << 14;  // starting a thread costs as much as about 1e3 ids

struct One {
  int64_t lane() const { return 0; }
  int64_t lanes() const { return 1; }
  double sum(double value) const { return value; }
  template <class A>
  A max(A value) const {
    return value;
  }
};

// row(s) for every row, from up to call.place threads.
template <class Row>
void for_rows(const KeptCall& call, Row row) {
  const int64_t num_ids = call.offsets[call.num_rows];
  const int64_t threads =
      std::clamp<int64_t>(num_ids / kIdsPerThread, 1, std::max<int64_t>(call.place, 1));
  const auto bound = [&](int64_t part) {  // first row of a part; whole rows, about equal ids
    const int64_t* last = call.offsets + call.num_rows;
    if (part == threads) return call.num_rows;
    return std::lower_bound(call.offsets, last, num_ids / threads * part) - call.offsets;
  };
  const auto work = [&](int64_t part) {
    for (int64_t s = bound(part); s < bound(part + 1); ++s) row(s);
  };
  std::vector<std::thread> others;
  for (int64_t part = 1; part < threads; ++part) {
    try {
      others.emplace_back(work, part);
    } catch (const std::system_error&) {  // no more threads to be had
      work(part);
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace

#define MOERL_PASS(name)                                                     \
  extern "C" __attribute__((visibility("default"))) int moerl_kept_##name(   \
      const KeptCall* call) {                                                \
    return moerl::with_types(*call, [&](auto kept) {                         \
      for_rows(*call, [&](int64_t s) { kept.name(One{}, s); });              \
      return 0;                                                              \
    });                                                                      \
  }

MOERL_PASS(gather)
MOERL_PASS(sums)
MOERL_PASS(spread)
