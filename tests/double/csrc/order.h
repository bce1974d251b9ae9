// Which work is ordered before which: a vector clock for each stream, for the host and for events.
//
// Streams run beside each other.  Work of one is before work of another only through an event, and
// before the host's next step only through a wait.  The CPU computes at once, so a missing order
// never gives wrong numbers here: it is found by comparing clocks.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "events.h"

namespace moerl_double {
using at::Tensor;
using Stream = std::pair<DeviceIndex, int64_t>;
using Clock = std::map<Stream, int64_t>;  // work items of each stream that are known to be done

struct Stamp {  // one work item
  Stream stream;
  int64_t number;
  bool before(const Clock& clock) const {
    auto found = clock.find(stream);
    return found != clock.end() && found->second >= number;
  }
};

struct Use {  // of some bytes, by the last work item that touched them in this way
  Stamp stamp;
  const char *begin, *end;
  bool writes;
  std::string what;
};

// A copy to pinned memory that nobody has waited for: its target holds rubbish until then.
struct Unfinished {
  Stamp stamp;
  Tensor target, value;
};

struct Order {
  std::recursive_mutex lock;
  std::map<Stream, Clock> clocks;
  Clock host;
  std::unordered_map<int64_t, Clock> events;
  std::unordered_map<const void*, std::vector<Use>> uses;        // by begin of a storage
  std::unordered_map<const void*, std::set<Stream>> recorded;    // record_stream of a storage
  std::vector<Unfinished> unfinished;
  int64_t num_events = 0;
};
inline Order& order() {
  static auto* one = new Order;  // outlives every tensor
  return *one;
}
using Held = std::lock_guard<std::recursive_mutex>;

inline void merge(Clock& into, const Clock& other) {
  for (auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}
inline Stream stream_on(DeviceIndex device) { return {device, current_stream(device)}; }

// --- work ---------------------------------------------------------------------------------------
inline Stamp launch(Stream stream) {
  Held held(order().lock);
  Clock& clock = order().clocks[stream];
  merge(clock, order().host);  // the host launches after all that it has waited for
  return {stream, ++clock[stream]};
}

inline std::pair<const char*, const char*> extent(const Tensor& t) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  auto* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + (t.numel() ? (last + 1) * (int64_t)t.itemsize() : 0)};
}

// Returns the earlier use that this one is not ordered after, if there is one.
inline std::optional<Use> touch(const Tensor& t, bool writes, Stamp stamp, const std::string& what) {
  auto [begin, end] = extent(t);
  if (begin == end) return std::nullopt;
  Held held(order().lock);
  auto& uses = order().uses[t.storage().data()];
  const Clock& clock = order().clocks[stamp.stream];
  std::vector<Use> kept;
  std::optional<Use> unordered;
  for (Use& use : uses) {
    const bool overlaps = use.begin < end && begin < use.end;
    const bool ordered = use.stamp.before(clock);
    if (overlaps && !ordered && (writes || use.writes)) unordered = use;
    const bool inside = begin <= use.begin && use.end <= end;
    const bool replaced = inside && ordered && (writes || (!use.writes && use.stamp.stream == stamp.stream));
    if (!replaced) kept.push_back(use);
  }
  kept.push_back({stamp, begin, end, writes, what});
  uses = std::move(kept);
  return unordered;
}

// A freed block goes back to the stream that it was allocated on, which may write to it at once.
inline std::optional<Use> forget_storage(const void* data, Stream owner) {
  Held held(order().lock);
  std::optional<Use> early;
  auto found = order().uses.find(data);
  if (found != order().uses.end()) {
    Clock known = order().host;
    merge(known, order().clocks[owner]);
    const auto& safe = order().recorded[data];
    for (Use& use : found->second)
      if (!use.stamp.before(known) && !safe.count(use.stamp.stream)) early = use;
    order().uses.erase(found);
  }
  order().recorded.erase(data);
  return early;
}

// --- waits --------------------------------------------------------------------------------------
inline void finish_copies() {
  std::vector<Unfinished> done;
  {
    Held held(order().lock);
    auto& all = order().unfinished;
    for (size_t i = 0; i < all.size();) {
      if (!all[i].stamp.before(order().host)) {
        ++i;
        continue;
      }
      done.push_back(std::move(all[i]));
      all.erase(all.begin() + i);
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& copy : done) copy.target.copy_(copy.value);
}
inline void host_waits_for(const Clock& clock) {
  {
    Held held(order().lock);
    merge(order().host, clock);
  }
  finish_copies();
}
inline Clock clock_of(Stream stream) {
  Held held(order().lock);
  return order().clocks[stream];
}
inline void host_waits_for_device(DeviceIndex device) {
  Clock all;
  {
    Held held(order().lock);
    for (auto& [stream, clock] : order().clocks)
      if (stream.first == device) merge(all, clock);
  }
  host_waits_for(all);
}

// --- events -------------------------------------------------------------------------------------
inline int64_t record_event(int64_t event, Stream stream) {  // 0 makes one
  Held held(order().lock);
  if (!event) event = ++order().num_events;
  Clock clock = order().clocks[stream];
  merge(clock, order().host);
  order().events[event] = std::move(clock);
  return event;
}
inline void stream_waits_for_event(Stream stream, int64_t event) {
  Held held(order().lock);
  merge(order().clocks[stream], order().events[event]);
}
inline void host_waits_for_event(int64_t event) {
  Clock clock;
  {
    Held held(order().lock);
    clock = order().events[event];
  }
  host_waits_for(clock);
}
}  // namespace moerl_double
