// The slots that torch keeps for a CUDA device: its guard (devices, streams, events) and its hooks.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace moerl_double {
inline void select_device(DeviceIndex device) {
  TORCH_CHECK(device < num_devices, "CUDA error: invalid device ordinal");
  if (device >= 0) device_now = device;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index(Device d) { return d.index() < 0 ? device_now : d.index(); }
  static Stream pair(const c10::Stream& s) { return {s.device_index(), s.id()}; }
  static int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }

  c10::DeviceType type() const override { return kCuda; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return {kCuda, device_now}; }
  void setDevice(Device d) const override { select_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_now = d.index();
  }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    uncheckedSetDevice(d);
    return before;
  }
  c10::Stream getStream(Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kCuda, index(d)), current_stream(index(d)));
  }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kCuda, index(d)));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = getStream(s.device());
    selected[s.device_index()] = s.id();
    return before;
  }
  // autograd orders the streams of its device threads with these
  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(record_event(number(*event), pair(s)));
  }
  void block(void* event, const c10::Stream& s) const override {
    stream_waits_for_event(pair(s), number(event));
  }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override {
    note("sync", "stream");
    host_waits_for(clock_of(pair(s)));
  }
  void synchronizeEvent(void* event) const override {
    note("sync", "event");
    host_waits_for_event(number(event));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    note("sync", "device");
    host_waits_for_device(device);
  }
};

// The name is what torch's registry asks for, once, at first use.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Device getDeviceFromPtr(void*) const override { return {kCuda, device_now}; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex device) const override { select_device(device); }
  int getNumGPUs() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};
}  // namespace moerl_double
