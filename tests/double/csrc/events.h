// What the double tells Python, and what the host thread has selected.
#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace moerl_double {
using c10::Device;
using c10::DeviceIndex;
constexpr auto kCuda = c10::DeviceType::CUDA;

// Called at once, on the thread that caused the event, so that Python sees the guilty line.
// Nothing may be locked at that moment: the listener takes Python's lock.
using Listener = void (*)(const char* kind, const char* what, int64_t bytes, int64_t stream);
inline std::atomic<Listener> listener{nullptr};

inline std::atomic<int> num_devices{1};
inline thread_local DeviceIndex device_now = 0;
inline thread_local std::map<DeviceIndex, int64_t> selected;  // stream of each device

inline int64_t current_stream(DeviceIndex device) { return selected[device]; }

inline void note(const char* kind, const std::string& what, int64_t bytes = 0) {
  if (Listener listen = listener) listen(kind, what.c_str(), bytes, current_stream(device_now));
}

struct OnDevice {  // select a device for a block
  DeviceIndex before = device_now;
  explicit OnDevice(DeviceIndex device) { device_now = device; }
  ~OnDevice() { device_now = before; }
};
}  // namespace moerl_double
