// Positions of the words that differ between two buffers: the only loop of moerl/weight_sync/delta.py
// that reads every byte; numpy is its reference there (`changed_reference`).
//
// Weights change rarely (about 1 % of bf16 words a step), so 64 bytes are compared at once, and only
// where they differ 8 bytes, and only there single words.
#include <cstdint>
#include <cstring>

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lowest word must be the lowest bits");

constexpr int kLanes = 8;  // 8-byte lanes of a block

template <class Word>
int64_t changed(const char* base, const char* now, int64_t num_words, uint32_t* positions) {
  constexpr int64_t kBits = 8 * sizeof(Word);
  constexpr int64_t kPerLane = 8 / sizeof(Word);
  constexpr int64_t kBlock = kLanes * kPerLane;
  constexpr uint64_t kMask = ~uint64_t{0} >> (64 - kBits);
  int64_t count = 0, first = 0;
  for (; first + kBlock <= num_words; first += kBlock) {
    uint64_t a[kLanes], b[kLanes], any = 0;
    std::memcpy(a, base + first * sizeof(Word), sizeof a);
    std::memcpy(b, now + first * sizeof(Word), sizeof b);
    for (int lane = 0; lane < kLanes; ++lane) any |= a[lane] ^= b[lane];
    if (any == 0) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (uint64_t rest = a[lane]; rest != 0;) {
        const int64_t word = __builtin_ctzll(rest) / kBits;
        positions[count++] = static_cast<uint32_t>(first + lane * kPerLane + word);
        rest &= ~(kMask << (word * kBits));
      }
    }
  }
  for (; first < num_words; ++first) {
    const auto offset = first * sizeof(Word);
    if (std::memcmp(base + offset, now + offset, sizeof(Word)) != 0)
      positions[count++] = static_cast<uint32_t>(first);
  }
  return count;
}

}  // namespace

// positions has room for num_words.  Returns how many were written, -1 for an unknown word size.
extern "C" __attribute__((visibility("default"))) int64_t moerl_changed(
    const char* base, const char* now, int64_t num_words, int64_t word_bytes,
    uint32_t* positions) {
  switch (word_bytes) {
    case 1: return changed<uint8_t>(base, now, num_words, positions);
    case 2: return changed<uint16_t>(base, now, num_words, positions);
    case 4: return changed<uint32_t>(base, now, num_words, positions);
    default: return -1;
  }
}
