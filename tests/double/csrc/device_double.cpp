// A CUDA device for the CPU build of torch: tensors are cuda:N, kernels are those of the CPU.
//
// The CPU wheel knows the device type and its autograd keys but registers no kernel, allocator,
// guard or hooks for it.  This library supplies them, and observes what a GPU would do silently:
// waits of the host, copies from pageable memory, unordered use by two streams, bytes by purpose.
// No Python header is read, so one library serves every Python (not every torch).
#include <torch/library.h>

#include "operators.h"

namespace moerl_double {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// --- what Python calls --------------------------------------------------------------------------
void listen(int64_t function) { listener = reinterpret_cast<Listener>(function); }
void set_purpose(std::string purpose) {
  std::lock_guard<std::mutex> held(meters().lock);
  meters().purpose = std::move(purpose);
}
std::vector<int64_t> memory(int64_t device, std::string purpose) {
  std::lock_guard<std::mutex> held(meters().lock);
  const Meter& meter = meters().by_purpose[{(DeviceIndex)device, purpose}];
  return {meter.live, meter.peak, meter.total, meter.held};
}
// A purpose stands for a process: it empties its own cache.
void empty_cache(int64_t device) {
  std::lock_guard<std::mutex> held(meters().lock);
  Meter& meter = meters().by_purpose[{(DeviceIndex)device, meters().purpose}];
  meter.held = meter.live;
}
std::vector<std::string> purposes(int64_t device) {
  std::lock_guard<std::mutex> held(meters().lock);
  std::vector<std::string> found;
  for (auto& [key, meter] : meters().by_purpose)
    if (key.first == device && !key.second.empty()) found.push_back(key.second);
  return found;
}
void reset_peak(int64_t device) {
  std::lock_guard<std::mutex> held(meters().lock);
  for (auto& [key, meter] : meters().by_purpose)
    if (key.first == device) meter.peak = meter.live;
}
int64_t get_stream(int64_t device) { return current_stream(device); }
void set_stream(int64_t device, int64_t stream) { selected[device] = stream; }
void wait_event(int64_t device, int64_t stream, int64_t event) { stream_waits_for_event({device, stream}, event); }
int64_t record(int64_t event, int64_t device, int64_t stream) { return record_event(event, {device, stream}); }
void sync_stream(int64_t device, int64_t stream, bool noted) {
  if (noted) note("sync", "stream");
  host_waits_for(clock_of({device, stream}));
}
void sync_event(int64_t event, bool noted) {
  if (noted) note("sync", "event");
  host_waits_for_event(event);
}
Tensor host_view(const Tensor& t) {  // the same memory, labelled cpu
  Labels labels;
  return t.is_cuda() ? labels.to_host(t) : t;
}
void use(const std::vector<Tensor>& tensors, bool writes, std::string what) {  // a kernel that torch does not know
  for (const Tensor& t : tensors) check_order(t, writes, launch(stream_on(t.device().index())), what);
}

TORCH_LIBRARY(device_double, m) {
  m.def("listen", &listen);
  m.def("set_count", +[](int64_t count) { num_devices = count; });
  m.def("get_device", +[]() -> int64_t { return device_now; });
  m.def("set_device", +[](int64_t device) { select_device(device); });
  m.def("get_stream", &get_stream);
  m.def("set_stream", &set_stream);
  m.def("record", &record);
  m.def("wait_event", &wait_event);
  m.def("sync_stream", &sync_stream);
  m.def("sync_event", &sync_event);
  m.def("sync_device", +[](int64_t device) { Guard().synchronizeDevice(device); });
  m.def("resize_storage(Tensor t, int bytes) -> ()");
  m.def("set_purpose", &set_purpose);
  m.def("memory", &memory);
  m.def("purposes", &purposes);
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("host_view(Tensor t) -> Tensor");
  m.def("use(Tensor[] tensors, bool writes, str what) -> ()");
  m.def("record_use(Tensor t, int device, int stream) -> ()");
}
void record_use(const Tensor& t, int64_t device, int64_t stream) {
  Held held(order().lock);
  order().recorded[t.storage().data()].insert({(DeviceIndex)device, stream});
}
TORCH_LIBRARY_IMPL(device_double, CompositeExplicitAutograd, m) {
  m.impl("host_view", TORCH_FN(host_view));
  m.impl("use", +[](const c10::List<Tensor>& t, bool writes, c10::string_view what) { use(t.vec(), writes, std::string(what)); });
  m.impl("resize_storage", TORCH_FN(resize_storage));
  m.impl("record_use", TORCH_FN(record_use));
}

const bool registered = [] {
  c10::SetAllocator(kCuda, &device_memory, 100);
  return true;
}();
}  // namespace moerl_double
