// CUDA build of csrc/masked_logprob.h: one warp per row.  Sampling masks have tens to hundreds of ids, so
// a warp fills itself and no shared memory is needed; a row of the whole vocabulary works and is
// slower than a block per row would be.  Lanes take ids in strides of 32 and reduce in a fixed
// butterfly, so the result does not depend on the grid.  No torch header is included: pointers and
// the stream come from the caller, so one build serves every version of torch.
#include "masked_logprob.h"

#include <cuda_runtime.h>

namespace {

using moerl::Kept;

constexpr int kWarp = 32;
constexpr int kRowsPerBlock = 4;
constexpr int64_t kMaxBlocks = 1 << 16;  // rows beyond are taken in further turns of the loop

struct Warp {
  __device__ __forceinline__ int64_t lane() const { return threadIdx.x % kWarp; }
  __device__ __forceinline__ int64_t lanes() const { return kWarp; }
  // Every lane of the warp calls these: the row number is the same for all 32.
  __device__ __forceinline__ double sum(double value) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
  }
  template <class A>
  __device__ __forceinline__ A max(A value) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, value, step);
      value = other > value ? other : value;
    }
    return value;
  }
};

#define MOERL_PASS(name)                                                                     \
  template <class T, class I>                                                                \
  __global__ void __launch_bounds__(kWarp* kRowsPerBlock) name##_rows(                       \
      const __grid_constant__ KeptCall call) {                                               \
    const Kept<T, I> kept{call};                                                             \
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;                  \
    int64_t s = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;      \
    for (; s < call.num_rows; s += stride) kept.name(Warp{}, s);                             \
  }                                                                                          \
  template <class T, class I>                                                                \
  void launch_##name(Kept<T, I>, const KeptCall& call, int blocks) {                         \
    name##_rows<T, I><<<blocks, kWarp * kRowsPerBlock, 0,                                    \
                        static_cast<cudaStream_t>(call.stream)>>>(call);                     \
  }                                                                                          \
  int run_##name(const KeptCall& call) {                                                     \
    if (call.num_rows == 0) return 0; /* an empty grid is a launch error */                  \
    const cudaError_t chosen = cudaSetDevice(static_cast<int>(call.place));                  \
    if (chosen != cudaSuccess) return static_cast<int>(chosen);                              \
    const int64_t want = (call.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;                \
    const int blocks = static_cast<int>(want < kMaxBlocks ? want : kMaxBlocks);              \
    return moerl::with_types(call, [&](auto kept) {                                          \
      launch_##name(kept, call, blocks);                                                     \
      return static_cast<int>(cudaGetLastError());                                           \
    });                                                                                      \
  }

MOERL_PASS(gather)
MOERL_PASS(sums)
MOERL_PASS(spread)

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int moerl_kept_gather(const KeptCall* call) {
  return run_gather(*call);
}
__attribute__((visibility("default"))) int moerl_kept_sums(const KeptCall* call) {
  return run_sums(*call);
}
__attribute__((visibility("default"))) int moerl_kept_spread(const KeptCall* call) {
  return run_spread(*call);
}
}
