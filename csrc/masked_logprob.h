// CSR masked log-softmax: what happens to one row of kept ids, shared by the CPU and the CUDA build.
//
// Row s is a sampled token: its kept ids are ids[offsets[s] .. offsets[s + 1]), its logits row is
// logits + rows[s] * width, of which this rank holds the entries vocab_start .. vocab_start + width.
// Three passes, because a vocabulary-parallel group reduces between them (the caller does that):
//
//   gather  kept[i] = logit / temperature (-inf for entries of other ranks); top[s] = their maximum
//   -- all-reduce MAX of top --
//   sums    kept[i] = e = exp(kept[i] - top); sum of e, sum of e * log e, log e of the sampled token
//   -- all-reduce SUM of sums --
//   spread  gradient[row, id] = scale * ([id is sampled] - e / total), other entries untouched
//
// Memory is one number per kept id and a few per row.  A Team is who works on one row together: one
// thread on the CPU, the 32 lanes of a warp on CUDA.  Sums are taken in fp64: a row of the whole
// vocabulary has 1e5 terms.  Reference: moerl/algorithms/masked_logprob.py, which says the same in
// torch and which both builds are tested against.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MOERL_DEVICE __device__ __forceinline__
#else
#define MOERL_DEVICE inline
#endif

extern "C" {

// One call of any pass; unused fields are null.  Mirrored by moerl/kernels/masked_logprob_call.py: keep the order.
struct KeptCall {
  int64_t dtype;        // of logits and gradient: 0 fp32, 1 bf16, 2 fp64
  int64_t id_bytes;     // of one id: 4 or 8
  int64_t place;        // CPU: number of threads; CUDA: device index
  void* stream;         // CUDA stream; null on the CPU
  int64_t num_rows;     // sampled tokens
  int64_t width;        // entries of a logits row, distance between rows
  int64_t vocab_start;  // global id of a row's first entry
  const void* logits;   // [any, width]
  void* gradient;       // [any, width], spread
  const int64_t* rows;  // [num_rows], each logits row at most once
  const int64_t* sampled;  // [num_rows]
  const int64_t* offsets;  // [num_rows + 1]
  const void* ids;         // [offsets[num_rows]], inside a row ascending and unique
  const void* temperature;  // [num_rows]; this and below: fp64 for fp64 logits, else fp32
  void* kept;               // [offsets[num_rows]]
  void* top;                // [num_rows]
  void* sums;               // [3, num_rows]; spread reads the first row of it, the totals
  const void* scale;        // [num_rows], incoming gradient / temperature, spread
  int32_t* status;          // [num_rows], gather: 0, or a Refusal
};
}

namespace moerl {

enum Refusal : int32_t { kFine = 0, kSampledNotOnce = 1, kNotAscending = 2 };

struct Bf16 {
  uint16_t bits;
};

MOERL_DEVICE float widen(float value) { return value; }
MOERL_DEVICE double widen(double value) { return value; }
MOERL_DEVICE float widen(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

MOERL_DEVICE void narrow(float value, float* target) { *target = value; }
MOERL_DEVICE void narrow(double value, double* target) { *target = value; }
MOERL_DEVICE void narrow(float value, Bf16* target) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool nan = value != value;
  target->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// T logit type, I id type; A = type of everything computed.
template <class T, class I>
struct Kept {
  using A = decltype(widen(T{}));

  const KeptCall& call;

  MOERL_DEVICE int64_t begin(int64_t s) const { return call.offsets[s]; }
  MOERL_DEVICE int64_t end(int64_t s) const { return call.offsets[s + 1]; }
  MOERL_DEVICE int64_t id(int64_t i) const { return static_cast<const I*>(call.ids)[i]; }
  MOERL_DEVICE int64_t column(int64_t i) const { return id(i) - call.vocab_start; }
  MOERL_DEVICE bool mine(int64_t i) const { return column(i) >= 0 && column(i) < call.width; }
  MOERL_DEVICE A* kept() const { return static_cast<A*>(call.kept); }

  template <class Team>
  MOERL_DEVICE void gather(Team team, int64_t s) const {
    const T* row = static_cast<const T*>(call.logits) + call.rows[s] * call.width;
    const A temperature = static_cast<const A*>(call.temperature)[s];
    const A none = -INFINITY;
    A best = none;
    double hits = 0, disorder = 0;
    for (int64_t i = begin(s) + team.lane(); i < end(s); i += team.lanes()) {
      disorder += i > begin(s) && id(i - 1) >= id(i);
      hits += id(i) == call.sampled[s];
      const A value = mine(i) ? widen(row[column(i)]) / temperature : none;
      kept()[i] = value;
      best = value > best ? value : best;
    }
    best = team.max(best);
    hits = team.sum(hits);
    disorder = team.sum(disorder);
    if (team.lane() == 0) {
      static_cast<A*>(call.top)[s] = best;
      call.status[s] = disorder != 0 ? kNotAscending : hits != 1 ? kSampledNotOnce : kFine;
    }
  }

  template <class Team>
  MOERL_DEVICE void sums(Team team, int64_t s) const {
    const A top = static_cast<const A*>(call.top)[s];
    double total = 0, weighted = 0, picked = 0;
    for (int64_t i = begin(s) + team.lane(); i < end(s); i += team.lanes()) {
      A e = 0;
      if (mine(i)) {
        const A log_e = kept()[i] - top;
        e = std::exp(log_e);
        total += e;
        if (e > 0) weighted += static_cast<double>(e) * log_e;  // 0 * -inf counts as 0
        if (id(i) == call.sampled[s]) picked = log_e;
      }
      kept()[i] = e;
    }
    total = team.sum(total);
    weighted = team.sum(weighted);
    picked = team.sum(picked);
    if (team.lane() == 0) {
      A* out = static_cast<A*>(call.sums);
      out[s] = static_cast<A>(total);
      out[call.num_rows + s] = static_cast<A>(weighted);
      out[2 * call.num_rows + s] = static_cast<A>(picked);
    }
  }

  template <class Team>
  MOERL_DEVICE void spread(Team team, int64_t s) const {
    T* row = static_cast<T*>(call.gradient) + call.rows[s] * call.width;
    const A total = static_cast<const A*>(call.sums)[s];
    const A scale = static_cast<const A*>(call.scale)[s];
    for (int64_t i = begin(s) + team.lane(); i < end(s); i += team.lanes()) {
      if (!mine(i)) continue;
      const A hit = id(i) == call.sampled[s] ? A(1) : A(0);
      narrow(scale * (hit - kept()[i] / total), row + column(i));
    }
  }
};

// Calls work(Kept<T, I>{call}) with the types the call names; -1 when it names none.
template <class Work>
int with_types(const KeptCall& call, Work work) {
  if (call.id_bytes == 4) {
    if (call.dtype == 0) return work(Kept<float, int32_t>{call});
    if (call.dtype == 1) return work(Kept<Bf16, int32_t>{call});
    if (call.dtype == 2) return work(Kept<double, int32_t>{call});
  }
  if (call.id_bytes == 8) {
    if (call.dtype == 0) return work(Kept<float, int64_t>{call});
    if (call.dtype == 1) return work(Kept<Bf16, int64_t>{call});
    if (call.dtype == 2) return work(Kept<double, int64_t>{call});
  }
  return -1;
}

}  // namespace moerl
