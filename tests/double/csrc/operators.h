// Operators: one fallback for all of them, and the few that a fallback cannot be.
//
// The fallback gives the storages of an operator's arguments a CPU label, runs the CPU kernel on the
// same memory and gives its results a device label.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstring>

#include "device.h"

namespace moerl_double {
using c10::StorageImpl;

inline void check_order(const Tensor& t, bool writes, Stamp stamp, const std::string& what) {
  auto other = touch(t, writes, stamp, what);
  if (!other) return;
  note("race", what, t.nbytes());
  TORCH_CHECK(false, "stream ", stamp.stream.second, writes ? " writes" : " reads", " in ", what,
              " what stream ", other->stamp.stream.second, other->writes ? " writes" : " reads", " in ",
              other->what, ", and no event orders them");
}

// --- labels -------------------------------------------------------------------------------------
class Labels {  // of one call: a device storage has one CPU twin and the other way round
 public:
  Tensor to_host(const Tensor& t) {
    StorageImpl* from = t.storage().unsafeGetStorageImpl();
    auto found = host_.find(from);
    if (found == host_.end()) {
      auto* keep = new c10::Storage(t.storage());
      c10::DataPtr data(from->mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                        Device(c10::kCPU));
      c10::Storage twin = storage(std::move(data), from->nbytes(), c10::GetCPUAllocator());
      device_[twin.unsafeGetStorageImpl()] = t.storage();
      found = host_.emplace(from, twin).first;
    }
    return view(found->second, c10::DispatchKey::CPU, t);
  }
  Tensor to_device(const Tensor& t, DeviceIndex device) {
    StorageImpl* from = t.storage().unsafeGetStorageImpl();
    auto found = device_.find(from);
    if (found == device_.end()) {
      Block* block = new_block(t.storage(), {}, from->nbytes(), device);
      c10::DataPtr data(from->mutable_data(), block, &free_block, Device(kCuda, device));
      found = device_.emplace(from, storage(std::move(data), from->nbytes(), &device_memory)).first;
    }
    return view(found->second, c10::DispatchKey::CUDA, t);
  }

 private:
  static c10::Storage storage(c10::DataPtr data, size_t bytes, c10::Allocator* allocator) {
    return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator,
                                            /*resizable=*/true);
  }
  static Tensor view(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
    Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }
  std::unordered_map<StorageImpl*, c10::Storage> host_, device_;
};

// --- the fallback -------------------------------------------------------------------------------
// The host must learn a value or a size from these, whatever their arguments.
inline const std::set<std::string> kWaits = {
    "aten::_local_scalar_dense", "aten::nonzero",     "aten::masked_select", "aten::equal",
    "aten::unique_consecutive",  "aten::_unique2",    "aten::unique_dim",    "aten::is_nonzero",
    "aten::bincount",            "aten::histc",       "aten::multinomial"};
inline const std::set<std::string> kIndexes = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                               "aten::index_put", "aten::_unsafe_index"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(op.schema().name()), launches_(!is_view(op.schema())) {}

  void run() {
    swap_arguments();
    TORCH_CHECK(!has_host_ || pairs_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                (int)device_, " and cpu! (", name_, ")");
    if (device_ < 0) device_ = device_now;
    stamp_ = launches_ ? launch(stream_on(device_)) : Stamp{};
    check_arguments();
    if (waits_) wait();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack_);
    }
    for (auto& [device, host] : pairs_) adopt(device, host);
    label_results();
  }

 private:
  struct Argument {
    Tensor tensor;
    bool writes;
  };

  static bool is_view(const c10::FunctionSchema& schema) {  // no kernel runs
    for (auto& result : schema.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
  }

  void swap_arguments() {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack_->size() - arguments.size();
    waits_ = kWaits.count(name_) || (name_ == "aten::repeat_interleave" && stack_->back().isNone());
    const bool fills = fills_a_mask(begin);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      swap_value((*stack_)[begin + i], alias && alias->isWrite());
    }
    waits_ = waits_ && !fills;
  }
  // `x[mask] = 0`: torch calls masked_fill_, which counts nothing
  bool fills_a_mask(size_t begin) const {
    if (name_ != "aten::index_put_" && name_ != "aten::_index_put_impl_") return false;
    const Tensor& values = (*stack_)[begin + 2].toTensor();
    size_t masks = 0, others = 0;
    for (const auto& t : (*stack_)[begin + 1].toOptionalTensorVector())
      if (t) ++(t->scalar_type() == at::kBool ? masks : others);
    return !(*stack_)[begin + 3].toBool() && !values.is_cuda() && values.numel() == 1 && masks == 1 && !others;
  }
  void swap_value(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      value = swap(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<Tensor> swapped;
      for (const Tensor& t : value.toTensorVector()) swapped.push_back(swap(t, writes));
      value = c10::List<Tensor>(swapped);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> swapped;
      for (const auto& t : value.toOptionalTensorVector())
        swapped.push_back(t ? std::optional<Tensor>(swap_index(*t)) : t);
      value = swapped;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device_ < 0 && value.toDevice().has_index()) device_ = value.toDevice().index();
      value = Device(c10::kCPU);
    }
  }
  Tensor swap_index(const Tensor& t) {  // an index with a mask counts its ones first
    if (kIndexes.count(name_) && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) waits_ = true;
    if (kIndexes.count(name_) && !t.is_cuda() && t.dim() > 0) {
      note("h2d_pageable", name_, t.nbytes());
      return t;
    }
    return swap(t, false);
  }
  Tensor swap(const Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      has_host_ |= t.dim() > 0;
      return t;
    }
    const DeviceIndex device = t.device().index();
    TORCH_CHECK(device_ < 0 || device_ == device || t.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                (int)device_, " and ", t.device(), "! (", name_, ")");
    if (device_ < 0) device_ = device;
    arguments_.push_back({t, writes});
    pairs_.emplace_back(t, labels_.to_host(t));
    return pairs_.back().second;
  }

  void check_arguments() const {
    if (!launches_) return;
    for (auto& [tensor, writes] : arguments_) check_order(tensor, writes, stamp_, name_);
  }
  void wait() const {
    note("sync", name_);
    host_waits_for(clock_of(stream_on(device_)));
  }

  void adopt(const Tensor& device, const Tensor& host) const {  // an output that the kernel resized
    StorageImpl* mine = device.storage().unsafeGetStorageImpl();
    StorageImpl* theirs = host.storage().unsafeGetStorageImpl();
    if (mine->data() != theirs->data()) {
      const size_t bytes = theirs->nbytes();
      Block* block = new_block({}, theirs->set_data_ptr({}), bytes, device_);
      void* data = block->memory.get();
      mine->set_data_ptr_noswap({data, block, &free_block, Device(kCuda, device_)});
      mine->set_nbytes(bytes);
    }
    if (device.sizes() != host.sizes() || device.strides() != host.strides())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  void label_results() {
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = label(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> labelled;
        for (const Tensor& t : value.toTensorVector()) labelled.push_back(label(t));
        value = c10::List<Tensor>(labelled);
      }
    }
  }
  Tensor label(const Tensor& t) {
    if (!t.defined() || t.is_cuda()) return t;
    for (auto& [device, host] : pairs_)
      if (host.is_same(t)) return device;
    Tensor made = labels_.to_device(t, device_);
    if (launches_) touch(made, true, stamp_, name_);
    return made;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::string name_;
  const bool launches_;
  bool has_host_ = false, waits_ = false;
  DeviceIndex device_ = -1;
  Stamp stamp_{};
  Labels labels_;
  std::vector<Argument> arguments_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // device, host
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// --- operators of their own ---------------------------------------------------------------------
inline DeviceIndex index_of(std::optional<Device> d) { return d && d->has_index() ? d->index() : device_now; }
inline at::ScalarType type_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pin,
                    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(index_of(device));
  return Tensor(at::detail::empty_generic(size, &device_memory, kKeys, type_of(dtype), format));
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, type_of(dtype)));
}

inline void copy_memory(Tensor& to, const Tensor& from) {
  Labels labels;
  Tensor target = to.is_cuda() ? labels.to_host(to) : to;
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(from.is_cuda() ? labels.to_host(from) : from);
}
inline void copy_to_host(Tensor& to, const Tensor& from, bool non_blocking) {
  const Stream stream = stream_on(from.device().index());
  const Stamp stamp = launch(stream);
  check_order(from, false, stamp, "aten::copy_");
  const bool waits = !non_blocking || !is_pinned(to.const_data_ptr());
  note(waits ? "d2h_sync" : "d2h_async", "aten::copy_", to.nbytes());
  if (waits) host_waits_for(clock_of(stream));
  if (waits || !to.is_non_overlapping_and_dense()) return copy_memory(to, from);
  Tensor value = at::detail::empty_cpu(to.sizes(), to.scalar_type());
  copy_memory(value, from);
  memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  Held held(order().lock);
  order().unfinished.push_back({stamp, to.detach(), value});
}
inline void copy_to_device(Tensor& to, const Tensor& from, bool non_blocking) {
  const Stream stream = stream_on(to.device().index());
  check_order(to, true, launch(stream), "aten::copy_");
  const bool pinned = is_pinned(from.const_data_ptr());
  note(!pinned ? "h2d_pageable" : non_blocking ? "h2d_async" : "h2d_sync", "aten::copy_", to.nbytes());
  if (!non_blocking) host_waits_for(clock_of(stream));
  copy_memory(to, from);
}
inline void copy_on_device(Tensor& to, const Tensor& from) {
  const Stamp stamp = launch(stream_on(from.device().index()));
  if (from.device() != to.device()) note("peer", "aten::copy_", to.nbytes());
  check_order(from, false, stamp, "aten::copy_");
  check_order(to, true, stamp, "aten::copy_");
  copy_memory(to, from);
}
inline Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (!self.is_cuda()) copy_to_host(self, src, non_blocking);
  else if (!src.is_cuda()) copy_to_device(self, src, non_blocking);
  else copy_on_device(self, src);
  return self;
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;
  impl->set_sizes_contiguous(size);
  const size_t need = (impl->numel() + impl->storage_offset()) * self.dtype().itemsize();
  StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= need) return self;
  OnDevice on(self.device().index());
  auto fresh = device_memory.allocate(need);
  copy_bytes(fresh.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(need);
  return self;
}
// UntypedStorage.resize_: torch has it for CUDA builds only
inline void resize_storage(const Tensor& self, int64_t bytes) {
  StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  OnDevice on(self.device().index());
  auto fresh = device_memory.allocate(bytes);
  if (bytes && storage->nbytes()) copy_bytes(fresh.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}
inline Tensor& set_(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "set_: a device tensor takes device storage");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  return self;
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  Held held(order().lock);
  order().recorded[self.storage().data()].insert({stream.device_index(), stream.id()});
}
}  // namespace moerl_double
