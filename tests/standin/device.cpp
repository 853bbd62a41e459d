// A device of type PrivateUse1 whose memory is the host's and whose streams are threads.
#include "standin.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <vector>

namespace standin {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kPoolStreams = 32;
constexpr size_t kStagedBytes = 64 * 1024;
constexpr auto kSlice = std::chrono::milliseconds(20);
constexpr int kStickyError = 700;

// ---- The end of the process, and forks ----

std::atomic<bool> ending{false};
std::atomic<int> running{0};
std::atomic<bool> used{false};
std::atomic<bool> forked_after_use{false};

void end() {
  // Threads of streams may be in the middle of an operation, and what that uses goes away now.
  ending = true;
  for (int i = 0; i < 1000 && running > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void use() {
  TORCH_CHECK(
      !forked_after_use,
      "Cannot re-initialize standin in forked subprocess: its streams are threads of the parent");
  if (!used.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { forked_after_use = true; });
    std::atexit(end);
  }
}

// ---- Devices ----

thread_local DeviceIndex current_device = 0;

DeviceIndex device_count() {
  const char* text = std::getenv("DISTSESSION_STANDIN_DEVICES");
  const int count = text && *text ? std::atoi(text) : 8;
  return static_cast<DeviceIndex>(std::max(0, std::min(count, kMaxDevices)));
}

DeviceIndex checked(DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "standin error: invalid device ordinal ",
      static_cast<int>(device),
      " of ",
      static_cast<int>(device_count()));
  return device;
}

std::mutex broken_mutex;
std::array<std::string, kMaxDevices> broken;
std::array<std::atomic<bool>, kMaxDevices> is_broken{};

void break_device(DeviceIndex device, const std::string& why) {
  std::lock_guard<std::mutex> lock(broken_mutex);
  if (!is_broken[device]) {
    broken[device] = why;
    is_broken[device] = true;
  }
}

} // namespace

void check(DeviceIndex device) {
  if (is_broken[device]) {
    std::lock_guard<std::mutex> lock(broken_mutex);
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        kStickyError,
        c10::str(
            "standin error: ",
            broken[device],
            " (a device-side error is sticky: every use of the device raises it until the "
            "process ends)"));
  }
}

// ---- Waiting ----

namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Python ends a thread that asks for its lock when it is too late, which C++ takes for a crash. torch
// itself lets go of the lock around some of its calls, so this is for all threads but the main one.
void park_at_the_end() {
  while (gettid() != getpid() && (ending || is_finalizing())) {
    pause();
  }
}

} // namespace

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_) {
    park_at_the_end();
    PyEval_RestoreThread(state_);
  }
}

void Moment::reach() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = std::chrono::steady_clock::now();
    reached_.store(true, std::memory_order_release);
  }
  condition_.notify_all();
}

bool Moment::wait_for(std::chrono::milliseconds timeout) {
  if (reached()) {
    return true;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  return condition_.wait_for(lock, timeout, [this] { return reached(); });
}

void park_if_ending() {
  if (ending) {
    --running;
    for (;;) {
      pause();
    }
  }
}

void wait(Moment& moment) {
  if (moment.reached()) {
    return;
  }
  WithoutGil released;
  while (!moment.wait_for(kSlice) && !ending) {
    park_at_the_end();
  }
  park_at_the_end();
}

// ---- Streams ----

namespace {

class Queue {
 public:
  explicit Queue(DeviceIndex device) : device_(device) {}

  void put(Task task) {
    use();
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    condition_.notify_one();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "standin_stream");
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        busy_ = false;
        condition_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
      }
      ++running;
      park_if_ending();
      try {
        task();
      } catch (const std::exception& error) {
        break_device(device_, error.what());
      }
      task = nullptr;
      --running;
    }
  }

  const DeviceIndex device_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<Task> tasks_;
  bool started_ = false;
  bool busy_ = false;
};

// Streams live as long as the process: their threads may be anywhere when it ends.
Queue& queue(const Stream& stream) {
  static auto* mutex = new std::mutex;
  static auto* queues = new std::map<std::pair<DeviceIndex, StreamId>, Queue*>;
  const auto device = checked(stream.device_index());
  std::lock_guard<std::mutex> lock(*mutex);
  auto& found = (*queues)[{device, stream.id()}];
  if (!found) {
    found = new Queue(device);
  }
  return *found;
}

Stream stream_of(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

thread_local std::array<StreamId, kMaxDevices> current_streams{};

} // namespace

void enqueue(const Stream& stream, Task task) {
  check(stream.device_index());
  const auto device = stream.device_index();
  queue(stream).put([device, task = std::move(task)] {
    if (!is_broken[device]) {
      task();
    }
  });
}

MomentPtr record(const Stream& stream) {
  auto moment = std::make_shared<Moment>();
  auto& at = queue(stream);
  if (at.idle()) {
    moment->reach();
  } else {
    at.put([moment] { moment->reach(); });
  }
  return moment;
}

void block(const Stream& stream, MomentPtr moment) {
  if (!moment || moment->reached()) {
    return;
  }
  queue(stream).put([moment = std::move(moment)] {
    while (!moment->wait_for(kSlice)) {
      park_if_ending();
    }
  });
}

void synchronize(const Stream& stream) {
  check(stream.device_index());
  wait(*record(stream));
  check(stream.device_index());
}

Stream current_stream(DeviceIndex device) {
  if (device < 0) {
    device = current_device;
  }
  return stream_of(device, current_streams[checked(device)]);
}

Stream pool_stream(DeviceIndex device) {
  static std::array<std::atomic<uint32_t>, kMaxDevices> next{};
  if (device < 0) {
    device = current_device;
  }
  return stream_of(device, 1 + next[checked(device)]++ % kPoolStreams);
}

namespace {

void synchronize_device(DeviceIndex device) {
  if (device < 0) {
    device = current_device;
  }
  check(device);
  for (StreamId id = 0; id <= kPoolStreams; ++id) {
    wait(*record(stream_of(device, id)));
  }
  check(device);
}

// ---- Memory ----

std::array<std::atomic<int64_t>, kMaxDevices> allocated{};
std::array<std::atomic<int64_t>, kMaxDevices> peak{};

int64_t memory_of_a_device() {
  const char* text = std::getenv("DISTSESSION_STANDIN_MEMORY");
  return text && *text ? std::atoll(text) : int64_t{16} << 30;
}

// Memory that a stream has let go of is reused by that stream alone, at once, as its later work
// comes after its earlier. Other streams that were said to use it have to be done with it first.
struct Block {
  Block(void* data, size_t size, DeviceIndex device, StreamId stream)
      : data(data), size(size), device(device), stream(stream) {}

  void* const data;
  const size_t size;
  const DeviceIndex device;
  const StreamId stream;
  int64_t bytes = 0; // as asked for
  std::atomic<int> uses{0};
  std::mutex mutex;
  std::vector<StreamId> others;
};

class Cache {
 public:
  Block* take(size_t bytes, DeviceIndex device, StreamId stream) {
    const size_t unit = bytes < (1 << 20) ? 512 : 1 << 20;
    const auto size = (bytes + unit - 1) / unit * unit;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[{device, stream}];
      const auto found = free.lower_bound(size);
      if (found != free.end() && found->first <= 2 * size) {
        auto* block = found->second;
        free.erase(found);
        return block;
      }
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, size) == 0, "no memory on the host for the stand-in");
    reserved[device] += static_cast<int64_t>(size);
    return new Block(data, size, device, stream);
  }

  void give(Block* block) {
    block->others.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    free_[{block->device, block->stream}].emplace(block->size, block);
  }

  // Every stream has to be idle.
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [stream, blocks] : free_) {
      for (auto& [size, block] : blocks) {
        reserved[block->device] -= static_cast<int64_t>(size);
        std::free(block->data);
        delete block;
      }
    }
    free_.clear();
  }

  std::array<std::atomic<int64_t>, kMaxDevices> reserved{};

 private:
  std::mutex mutex_;
  std::map<std::pair<DeviceIndex, StreamId>, std::multimap<size_t, Block*>> free_;
};

auto& cache = *new Cache;

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) {
    return;
  }
  allocated[block->device] -= block->bytes;
  if (ending || forked_after_use) {
    return;
  }
  std::vector<Queue*> busy;
  for (const auto id : block->others) {
    auto& at = queue(stream_of(block->device, id));
    if (!at.idle()) {
      busy.push_back(&at);
    }
  }
  block->uses = static_cast<int>(busy.size());
  if (busy.empty()) {
    cache.give(block);
  }
  for (auto* at : busy) {
    at->put([block] {
      if (--block->uses == 0) {
        cache.give(block);
      }
    });
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = checked(current_device);
    check(device);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, Device(kType, device)};
    }
    const auto size = static_cast<int64_t>(bytes);
    const auto total = allocated[device] += size;
    if (total > memory_of_a_device()) {
      allocated[device] -= size;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "standin out of memory. Tried to allocate ",
          size,
          " bytes. Device ",
          static_cast<int>(device),
          " has ",
          memory_of_a_device(),
          " bytes, of which ",
          total - size,
          " are allocated.");
    }
    auto highest = peak[device].load();
    while (highest < total && !peak[device].compare_exchange_weak(highest, total)) {
    }
    auto* block = cache.take(bytes, device, current_streams[device]);
    block->bytes = size;
    return {block->data, block, &free_block, Device(kType, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a pointer is no block
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    synchronize(current_stream(-1));
    std::memcpy(target, source, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      synchronize_device(device);
    }
    cache.clear();
  }

  void recordStream(const c10::DataPtr& memory, Stream stream) override {
    used_by(memory, stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = allocated[checked(device)];
      (*bytes)[0].peak = peak[device];
    }
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = cache.reserved[device];
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex) override {}

  void resetPeakStats(DeviceIndex device) override {
    peak[checked(device)] = allocated[device].load();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto total = memory_of_a_device();
    const auto free = std::max<int64_t>(0, total - allocated[checked(device)]);
    return {static_cast<size_t>(free), static_cast<size_t>(total)};
  }
};

DeviceMemory* device_memory() {
  static auto* memory = new DeviceMemory;
  return memory;
}

// Host memory that copies may use while the host goes on.
struct Pinned {
  void* data;
  size_t bytes;
  std::atomic<int> uses{1};

  void release() {
    if (--uses == 0) {
      std::free(data);
      delete this;
    }
  }
};

std::mutex pinned_mutex;
auto& all_pinned = *new std::map<const char*, Pinned*>;

// The block that a pointer is in, held; or null.
std::shared_ptr<void> hold_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto* at = static_cast<const char*>(data);
  auto found = all_pinned.upper_bound(at);
  if (found == all_pinned.begin()) {
    return nullptr;
  }
  --found;
  auto* pinned = found->second;
  if (at >= found->first + pinned->bytes) {
    return nullptr;
  }
  ++pinned->uses;
  return {pinned, [](void* held) { static_cast<Pinned*>(held)->release(); }};
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "no memory");
    auto* pinned = new Pinned{data, std::max<size_t>(bytes, 1)};
    std::lock_guard<std::mutex> lock(pinned_mutex);
    all_pinned[static_cast<char*>(data)] = pinned;
    const auto drop = [](void* context) {
      auto* pinned = static_cast<Pinned*>(context);
      {
        std::lock_guard<std::mutex> lock(pinned_mutex);
        all_pinned.erase(static_cast<char*>(pinned->data));
      }
      pinned->release();
    };
    return {data, pinned, drop, Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

PinnedMemory* pinned_memory() {
  static auto* memory = new PinnedMemory;
  return memory;
}

} // namespace

void used_by(const c10::DataPtr& memory, const Stream& stream) {
  if (memory.get_deleter() != &free_block || !memory.get_context()) {
    return;
  }
  auto* block = static_cast<Block*>(memory.get_context());
  std::lock_guard<std::mutex> lock(block->mutex);
  auto& others = block->others;
  if (stream.id() != block->stream &&
      std::find(others.begin(), others.end(), stream.id()) == others.end()) {
    others.push_back(stream.id());
  }
}

namespace {

// ---- Random numbers ----

// As CUDA's: a seed and an offset, 16 bytes.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "the state of a generator of standin has 16 bytes");
    const auto* data = static_cast<const char*>(state.data());
    std::memcpy(&seed_, data, 8);
    std::memcpy(&offset_, data + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* data = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(data, &seed_, 8);
    std::memcpy(data + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

  // A generator for one operation that draws so many numbers.
  at::Generator next(int64_t numbers) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ + 0x9e3779b97f4a7c15ULL * (offset_ + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    offset_ += static_cast<uint64_t>((std::max<int64_t>(numbers, 1) + 3) / 4 * 4);
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) {
      all->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    }
    return all;
  }();
  return generators->at(checked(device < 0 ? current_device : device));
}

// ---- What torch asks a device for ----

struct Event {
  std::mutex mutex;
  MomentPtr moment;

  MomentPtr get() {
    std::lock_guard<std::mutex> lock(mutex);
    return moment;
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device device) const override {
    const Device before(kType, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kType, current_device);
  }
  void setDevice(Device device) const override {
    if (device.index() >= 0) {
      current_device = checked(device.index());
    }
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }

  Stream getStream(Device device) const override {
    return current_stream(device.index());
  }
  Stream getDefaultStream(Device device) const override {
    return stream_of(checked(device.index() < 0 ? current_device : device.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override {
    return pool_stream(device.index());
  }
  Stream getNewStream(Device device, int = 0) const override {
    return pool_stream(device.index());
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return &queue(stream);
  }
  bool queryStream(const Stream& stream) const override {
    check(stream.device_index());
    return queue(stream).idle();
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    check(stream.device_index());
    if (!*event) {
      *event = new Event;
    }
    auto moment = standin::record(stream);
    auto* recorded = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(recorded->mutex);
    recorded->moment = std::move(moment);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) {
      standin::block(stream, static_cast<Event*>(event)->get());
    }
  }
  bool queryEvent(void* event) const override {
    const auto moment = event ? static_cast<Event*>(event)->get() : nullptr;
    return !moment || moment->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (const auto moment = event ? static_cast<Event*>(event)->get() : nullptr) {
      wait(*moment);
    }
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto from = first ? static_cast<Event*>(first)->get() : nullptr;
    const auto to = second ? static_cast<Event*>(second)->get() : nullptr;
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(from->reached() && to->reached(), "Both events must be completed before that.");
    return std::chrono::duration<double, std::milli>(to->time() - from->time()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    used_by(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return standin::device_count() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  DeviceIndex deviceCount() const override {
    return standin::device_count();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current_device = checked(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current_device;
    if (device >= 0) {
      current_device = checked(device);
    }
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(checked(device < 0 ? current_device : device));
  }
  bool isPinnedPtr(const void* data) const override {
    return hold_pinned(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_memory();
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kType, current_device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (impl->nbytes() > 0 && bytes > 0) {
      synchronize(current_stream(impl->device().index()));
    }
    const c10::DeviceGuard guard(impl->device());
    at::native::resize_bytes_cpu(impl, bytes);
  }
};

// ---- Operations ----

bool ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The same memory, as the threads of streams see it. It owns nothing.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(),
      tensor.sizes(),
      tensor.strides(),
      tensor.options().device(c10::DeviceType::CPU).pinned_memory(false));
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::Meta));
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size,
      stride,
      device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<Device> device,
    std::optional<bool> pin,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size,
      device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_as(const at::Tensor& meta, Device device) {
  const auto options = meta.options().device(device);
  return meta.is_non_overlapping_and_dense()
      ? at::empty_strided(meta.sizes(), meta.strides(), options)
      : at::empty(meta.sizes(), options);
}

const at::Tensor& resize_(
    const at::Tensor& self,
    c10::IntArrayRef size,
    std::optional<c10::MemoryFormat> format) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(size)) * self.itemsize();
  if (self.storage().nbytes() > 0 && bytes > self.storage().nbytes()) {
    synchronize(current_stream(self.device().index()));
  }
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  if (ours(source) && ours(target)) {
    const auto stream = current_stream(target.device().index());
    if (source.device() != target.device()) {
      const auto from = current_stream(source.device().index());
      block(stream, record(from));
    }
    enqueue(stream, [from = on_host(source), to = on_host(target)] { to.copy_(from); });
    if (source.device() != target.device()) {
      block(current_stream(source.device().index()), record(stream));
    }
    return target;
  }
  if (ours(target)) {
    const auto stream = current_stream(target.device().index());
    const auto held = non_blocking ? hold_pinned(source.const_data_ptr()) : nullptr;
    if (held) {
      enqueue(stream, [held, from = on_host(source), to = on_host(target)] { to.copy_(from); });
      return target;
    }
    // As CUDA copies pageable memory: a little is put aside, for more the host waits.
    const bool staged = source.nbytes() <= kStagedBytes;
    auto from = staged ? source.detach().clone() : on_host(source);
    enqueue(stream, [from = std::move(from), to = on_host(target)] { to.copy_(from); });
    if (!staged) {
      synchronize(stream);
    }
    return target;
  }
  const auto stream = current_stream(source.device().index());
  const auto held = non_blocking ? hold_pinned(target.const_data_ptr()) : nullptr;
  enqueue(stream, [held, from = on_host(source), to = on_host(target)] { to.copy_(from); });
  if (!held) {
    synchronize(stream);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize(current_stream(self.device().index()));
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

void record_stream(at::Tensor& self, Stream stream) {
  used_by(self.storage().data_ptr(), stream);
}

// An operation's arguments for shapes alone, and for the thread that computes it.
struct Arguments {
  std::vector<at::Tensor> meta; // of the tensors of this device, in order
  std::vector<at::Tensor> real;
  std::optional<Device> device;

  // False where the host has to wait.
  bool see(const c10::IValue& value) {
    if (value.isTensor()) {
      return see(value.toTensor());
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (!see(tensor)) {
          return false;
        }
      }
      return true;
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor && !see(*tensor)) {
          return false;
        }
      }
      return true;
    }
    return value.isNone() || value.isScalar() || value.isInt() || value.isDouble() ||
        value.isBool() || value.isString() || value.isIntList() || value.isDoubleList() ||
        value.isBoolList() || value.isGenerator();
  }

  bool see(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return true;
    }
    if (ours(tensor)) {
      if (tensor.layout() != c10::Layout::Strided || tensor.is_quantized()) {
        return false;
      }
      device = device ? device : tensor.device();
      return true;
    }
    return tensor.is_cpu() && tensor.dim() == 0;
  }
};

template <typename F>
c10::IValue each_tensor(const c10::IValue& value, const F& convert) {
  if (value.isTensor()) {
    return convert(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) {
      list.push_back(convert(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

at::Tensor copy_of_scalar(const at::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// Puts the operation on the current stream, if the shapes of its results can be told beforehand.
bool try_enqueue(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (result.type()->kind() != c10::TypeKind::TensorType || (alias && !alias->isWrite())) {
      return false;
    }
  }
  std::vector<c10::IValue> actual(
      stack->end() - static_cast<int64_t>(formal.size()), stack->end());
  Arguments seen;
  for (size_t i = 0; i < actual.size(); ++i) {
    const auto* alias = formal[i].alias_info();
    if (!seen.see(actual[i]) || (alias && alias->isWrite() && !actual[i].isTensor())) {
      return false;
    }
  }
  if (!seen.device) {
    return false;
  }
  const auto device = *seen.device;
  const c10::DeviceGuard guard(device);
  at::AutoDispatchBelowADInplaceOrView no_autograd;

  Stack meta;
  for (const auto& value : actual) {
    meta.push_back(each_tensor(value, [](const at::Tensor& tensor) {
      return ours(tensor) ? on_meta(tensor) : tensor;
    }));
  }
  const auto shapes = meta;
  try {
    op.callBoxed(meta);
  } catch (...) {
    return false; // shapes that depend on data, or an error, which the CPU's kernel raises better
  }

  for (size_t i = 0; i < actual.size(); ++i) {
    const auto* alias = formal[i].alias_info();
    if (!alias || !alias->isWrite() || !ours(actual[i].toTensor())) {
      continue;
    }
    const auto& wanted = shapes[i].toTensor();
    const auto& tensor = actual[i].toTensor();
    if (tensor.sizes() != wanted.sizes()) {
      tensor.resize_(wanted.sizes());
      if (tensor.strides() != wanted.strides() && wanted.is_non_overlapping_and_dense()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes(), wanted.strides());
      }
    }
  }

  if (const auto found = std::find_if(
          formal.begin(),
          formal.end(),
          [](const auto& argument) {
            return argument.type()->isSubtypeOf(c10::OptionalType::create(c10::GeneratorType::get()));
          });
      found != formal.end()) {
    auto& value = actual[static_cast<size_t>(found - formal.begin())];
    auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device.index());
    if (generator.device().type() == kType) {
      int64_t numbers = 0;
      for (const auto& each : actual) {
        numbers = each.isTensor() && ours(each.toTensor())
            ? std::max(numbers, each.toTensor().numel())
            : numbers;
      }
      value = generator.get<Generator>()->next(numbers);
    }
  }

  Stack real;
  for (const auto& value : actual) {
    real.push_back(each_tensor(value, [](const at::Tensor& tensor) {
      return ours(tensor) ? on_host(tensor) : tensor.defined() ? copy_of_scalar(tensor) : tensor;
    }));
  }
  Stack results;
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    fresh.emplace_back();
    if (alias) {
      for (size_t j = 0; j < formal.size(); ++j) {
        const auto* other = formal[j].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) {
          results.push_back(actual[j]);
          break;
        }
      }
      continue;
    }
    const auto& shape = meta[i].toTensor();
    if (!shape.defined()) {
      results.emplace_back(at::Tensor());
      continue;
    }
    auto result = empty_as(shape, device);
    fresh.back() = on_host(result);
    results.emplace_back(std::move(result));
  }
  if (results.size() != schema.returns().size()) {
    return false;
  }
  enqueue(current_stream(device.index()), [op, real, fresh] {
    Stack computed = real;
    op.callBoxed(computed);
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (fresh[i].defined()) {
        fresh[i].copy_(computed[i].toTensor());
      }
    }
  });
  torch::jit::drop(*stack, formal.size());
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
  return true;
}

void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  if (!try_enqueue(op, stack)) {
    synchronize(current_stream(-1));
    at::native::cpu_fallback(op, stack);
  }
}

std::optional<at::Tensor> maybe(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups) {
  const auto with_bias = bias && bias->defined();
  const auto shape = at::convolution(
      on_meta(input),
      on_meta(weight),
      with_bias ? maybe(on_meta(*bias)) : std::nullopt,
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups);
  auto result = empty_as(shape, input.device());
  enqueue(
      current_stream(input.device().index()),
      [input = on_host(input),
       weight = on_host(weight),
       bias = with_bias ? maybe(on_host(*bias)) : std::nullopt,
       stride = stride.vec(),
       padding = padding.vec(),
       dilation = dilation.vec(),
       transposed,
       output_padding = output_padding.vec(),
       groups,
       to = on_host(result)] {
        to.copy_(at::convolution(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups));
      });
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  const auto channels = gradient.size(1);
  std::array<at::Tensor, 3> results;
  if (mask[0]) {
    results[0] = at::empty_like(input);
  }
  if (mask[1]) {
    results[1] = at::empty_like(weight);
  }
  if (mask[2]) {
    results[2] = at::empty({channels}, gradient.options());
  }
  std::array<at::Tensor, 3> hosts;
  for (size_t i = 0; i < 3; ++i) {
    hosts[i] = mask[i] ? on_host(results[i]) : at::Tensor();
  }
  enqueue(
      current_stream(input.device().index()),
      [gradient = on_host(gradient),
       input = on_host(input),
       weight = on_host(weight),
       stride = stride.vec(),
       padding = padding.vec(),
       dilation = dilation.vec(),
       transposed,
       output_padding = output_padding.vec(),
       groups,
       channels,
       mask,
       hosts] {
        const std::vector<int64_t> bias_sizes{channels};
        const auto computed = at::convolution_backward(
            gradient,
            input,
            weight,
            at::OptionalIntArrayRef(bias_sizes),
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            mask);
        const std::array<at::Tensor, 3> all{
            std::get<0>(computed), std::get<1>(computed), std::get<2>(computed)};
        for (size_t i = 0; i < 3; ++i) {
          if (hosts[i].defined()) {
            hosts[i].copy_(all[i]);
          }
        }
      });
  return {results[0], results[1], results[2]};
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input,
    double p,
    std::optional<bool> train) {
  if (p == 0 || (train && !*train)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl(
      "set_.source_Storage",
      TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("native_dropout", TORCH_FN(native_dropout));
}

} // namespace

void bind_device(py::module_& m) {
  c10::SetAllocator(kType, device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) { current_device = checked(static_cast<DeviceIndex>(device)); });
  m.def("synchronize", [](int device) { synchronize_device(static_cast<DeviceIndex>(device)); });
  m.def("is_in_bad_fork", [] { return forked_after_use.load(); });
  m.def("break_device", [](int device, const std::string& why) {
    break_device(checked(static_cast<DeviceIndex>(device)), why);
  });
  m.def("generator", [](int device) { return default_generator(static_cast<DeviceIndex>(device)); });
  m.def("memory_info", [](int device) {
    return device_memory()->getMemoryInfo(static_cast<DeviceIndex>(device));
  });
  m.def("streams_in_use", [] { return used.load(); });
}

} // namespace standin
