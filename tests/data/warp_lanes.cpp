// The passes of csrc/masked_logprob.h with a warp played by 32 threads: the strides, the butterfly
// and the rule that lane 0 writes, as csrc/masked_logprob.cu runs them, on a machine without a GPU.
#include <pthread.h>

#include <thread>
#include <vector>

#include "masked_logprob.h"

namespace {

constexpr int kWarp = 32;

struct Exchange {
  pthread_barrier_t meet;
  double slots[kWarp];

  double shuffle_xor(int lane, double value, int step) {
    slots[lane] = value;
    pthread_barrier_wait(&meet);
    const double other = slots[lane ^ step];
    pthread_barrier_wait(&meet);
    return other;
  }
};

struct Lane {
  int number;
  Exchange* exchange;

  int64_t lane() const { return number; }
  int64_t lanes() const { return kWarp; }
  double sum(double value) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value += exchange->shuffle_xor(number, value, step);
    }
    return value;
  }
  template <class A>
  A max(A value) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const A other = static_cast<A>(exchange->shuffle_xor(number, value, step));
      value = other > value ? other : value;
    }
    return value;
  }
};

template <class Row>
void for_rows(const KeptCall& call, Row row) {
  Exchange exchange;
  pthread_barrier_init(&exchange.meet, nullptr, kWarp);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kWarp; ++lane) {
    lanes.emplace_back([&, lane] {
      for (int64_t s = 0; s < call.num_rows; ++s) row(Lane{lane, &exchange}, s);
    });
  }
  for (std::thread& lane : lanes) lane.join();
  pthread_barrier_destroy(&exchange.meet);
}

}  // namespace

#define MOERL_PASS(name)                                              \
  extern "C" int moerl_kept_##name(const KeptCall* call) {            \
    return moerl::with_types(*call, [&](auto kept) {                  \
      for_rows(*call, [&](Lane lane, int64_t s) { kept.name(lane, s); }); \
      return 0;                                                       \
    });                                                               \
  }

MOERL_PASS(gather)
MOERL_PASS(sums)
MOERL_PASS(spread)
