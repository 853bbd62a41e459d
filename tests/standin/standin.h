// The device's streams and memory, as group.cpp uses them.
#pragma once

#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace standin {

// More would not fit what is kept per device and thread.
constexpr int kMaxDevices = 64;

using Task = std::function<void()>;

// A point of a stream: what an event was recorded as.
class Moment {
 public:
  void reach();
  bool reached() const {
    return reached_.load(std::memory_order_acquire);
  }
  // Blocks the calling thread. False if the time was over first.
  bool wait_for(std::chrono::milliseconds timeout);
  std::chrono::steady_clock::time_point time() const {
    return time_;
  }

 private:
  std::atomic<bool> reached_{false};
  std::chrono::steady_clock::time_point time_{};
  std::mutex mutex_;
  std::condition_variable condition_;
};
using MomentPtr = std::shared_ptr<Moment>;

// Lets other Python threads run while this one waits.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Puts a task at the end of a stream and returns. It raises on a broken device.
void enqueue(const c10::Stream& stream, Task task);
// The end of a stream as it is now.
MomentPtr record(const c10::Stream& stream);
// What comes on the stream from now on runs after the moment.
void block(const c10::Stream& stream, MomentPtr moment);
// Blocks the calling thread, without the interpreter's lock.
void wait(Moment& moment);
void synchronize(const c10::Stream& stream);

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream pool_stream(c10::DeviceIndex device);

// Memory that the stream uses is not handed out again before the stream is done with it.
void used_by(const c10::DataPtr& memory, const c10::Stream& stream);

// Stops the calling stream's thread for good, where the process is about to end.
void park_if_ending();

// Raises what broke the device, if it is broken.
void check(c10::DeviceIndex device);

} // namespace standin
