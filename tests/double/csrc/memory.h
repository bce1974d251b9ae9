// Device memory and pinned host memory, counted by device and by purpose.
#pragma once
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "order.h"

namespace moerl_double {
struct Meter {
  int64_t live = 0, peak = 0, total = 0;
  int64_t held = 0;  // with torch's cache, which keeps what is freed until it is emptied
  void add(int64_t bytes) {
    live += bytes;
    held = std::max(held, live);
    peak = std::max(peak, live);
    if (bytes > 0) total += bytes;
  }
};
struct Meters {
  std::mutex lock;
  std::map<std::pair<DeviceIndex, std::string>, Meter> by_purpose;  // "": all of a device
  std::map<const char*, size_t> pinned;                             // begin, bytes
  std::string purpose = "other";  // of the process: backward runs on threads of its own
};
inline Meters& meters() {
  static auto* one = new Meters;
  return *one;
}

struct Block {  // what lies behind a device pointer
  c10::Storage storage;  // of the CPU result that became a device tensor
  c10::DataPtr memory;
  int64_t bytes;
  Stream stream;
  std::string purpose;
};
inline void count(const Block& block, int64_t bytes) {
  std::lock_guard<std::mutex> held(meters().lock);
  meters().by_purpose[{block.stream.first, ""}].add(bytes);
  meters().by_purpose[{block.stream.first, block.purpose}].add(bytes);
}
inline Block* new_block(c10::Storage storage, c10::DataPtr memory, int64_t bytes, DeviceIndex device) {
  std::string purpose;
  {
    std::lock_guard<std::mutex> held(meters().lock);
    purpose = meters().purpose;
  }
  auto* block = new Block{std::move(storage), std::move(memory), bytes, stream_on(device), purpose};
  count(*block, bytes);
  return block;
}
inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count(*block, -block->bytes);
  const void* data = block->memory ? block->memory.get() : block->storage ? block->storage.data() : nullptr;
  if (auto use = forget_storage(data, block->stream))
    note("freed_early", use->what, block->bytes);
  delete block;
}

inline void copy_bytes(void* to, const void* from, size_t bytes) { std::copy_n((const char*)from, bytes, (char*)to); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new_block({}, c10::GetCPUAllocator()->allocate(bytes), bytes, device_now);
    return {block->memory.get(), block, &free_block, Device(kCuda, device_now)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { copy_bytes(to, from, bytes); }
};
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> held(meters().lock);
    meters().pinned[static_cast<const char*>(memory->get())] = bytes;
    return {memory->get(), memory, &free_pinned, Device(c10::kCPU)};
  }
  static void free_pinned(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> held(meters().lock);
      meters().pinned.erase(static_cast<const char*>(memory->get()));
    }
    delete memory;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { copy_bytes(to, from, bytes); }
};
inline void register_host(int64_t address, int64_t bytes) {
  std::lock_guard<std::mutex> held(meters().lock);
  meters().pinned[reinterpret_cast<const char*>(address)] = bytes;
}
inline void unregister_host(int64_t address) {
  std::lock_guard<std::mutex> held(meters().lock);
  TORCH_CHECK(meters().pinned.erase(reinterpret_cast<const char*>(address)), "not registered");
}
inline DeviceMemory device_memory;
inline PinnedMemory pinned_memory;

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(meters().lock);
  auto at = static_cast<const char*>(data);
  auto after = meters().pinned.upper_bound(at);
  if (after == meters().pinned.begin()) return false;
  --after;
  return at < after->first + std::max<size_t>(after->second, 1);
}
}  // namespace moerl_double
