// A backend of torch.distributed that behaves as NCCL's does, between processes of one host.
#include "standin.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <thread>
#include <vector>

namespace standin {

void bind_device(py::module_& m);

namespace {

using c10::Stream;
using c10d::OpType;
using c10d::ReduceOp;
using Clock = std::chrono::steady_clock;

constexpr const char* kName = "standin";
constexpr const char* kName2 = "standin2";
constexpr const char* kNameLazy = "standin-lazy";
constexpr size_t kRingBytes = 128 * 1024; // that much is sent without a receiver, as NCCL buffers
constexpr auto kRemoteCheck = std::chrono::milliseconds(50);
constexpr auto kAbortTimeout = std::chrono::seconds(90);
constexpr size_t kKinds = 64; // of operations, by their OpType

// ---- Shared memory ----

// Bytes from one rank to another: one writes, one reads.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::array<char, kRingBytes> data;

  size_t push(const char* from, size_t bytes) {
    const auto at = written.load(std::memory_order_relaxed);
    const auto used = at - read.load(std::memory_order_acquire);
    const auto count = std::min<size_t>(bytes, kRingBytes - std::min<size_t>(used, kRingBytes));
    const auto start = static_cast<size_t>(at % kRingBytes);
    const auto first = std::min(count, kRingBytes - start);
    std::memcpy(data.data() + start, from, first);
    std::memcpy(data.data(), from + first, count - first);
    written.store(at + count, std::memory_order_release);
    return count;
  }

  size_t pull(char* to, size_t bytes) {
    const auto at = read.load(std::memory_order_relaxed);
    const auto there = written.load(std::memory_order_acquire) - at;
    const auto count = std::min<size_t>(bytes, std::min<size_t>(there, kRingBytes));
    const auto start = static_cast<size_t>(at % kRingBytes);
    const auto first = std::min(count, kRingBytes - start);
    std::memcpy(to, data.data() + start, first);
    std::memcpy(to + first, data.data(), count - first);
    read.store(at + count, std::memory_order_release);
    return count;
  }
};

struct Head {
  alignas(64) std::atomic<int> joined;
  alignas(64) std::atomic<int> splits; // calls of all members together
  alignas(64) std::array<std::atomic<int>, kKinds> connected;
};

struct Member {
  alignas(64) std::atomic<int> pid;
};

// Collectives and sends between two ranks do not meet, though they share a communicator.
enum class Lane : uint8_t { kCollective, kPointToPoint };

struct Transfer {
  bool sends;
  Lane lane;
  int peer;
  char* data;
  size_t bytes;
  size_t done = 0;
};

bool process_ended(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) {
    return true;
  }
  const auto end = line.rfind(')');
  return end == std::string::npos || end + 2 >= line.size() || line[end + 2] == 'Z' ||
      line[end + 2] == 'X';
}

ino_t inode_of(int file) {
  struct stat found {};
  return fstat(file, &found) == 0 ? found.st_ino : 0;
}

double remote_error_after() {
  const char* text = std::getenv("DISTSESSION_STANDIN_REMOTE_ERROR_S");
  return text && *text ? std::atof(text) : -1;
}

void pause_longer(int idle) {
  if (idle < 20) {
    sched_yield();
  } else {
    usleep(idle < 1000 ? 50 : idle < 3000 ? 200 : 1000);
  }
}

// What NCCL calls so: the members' memory for one another.
class Communicator {
 public:
  Communicator(int rank, int size, int group_rank)
      : rank_(rank),
        size_(size),
        group_rank_(group_rank),
        bytes_(
            sizeof(Head) + sizeof(Member) * static_cast<size_t>(size) +
            sizeof(Ring) * 2 * static_cast<size_t>(size) * static_cast<size_t>(size)) {}

  ~Communicator() {
    if (memory_) {
      munmap(memory_, bytes_);
    }
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Blocks until all members are there, as ncclCommInitRank does.
  void join(c10d::Store& store, const std::string& key) {
    int file = -1;
    if (rank_ == 0) {
      file = memfd_create("standin", MFD_CLOEXEC);
      TORCH_CHECK(
          file >= 0 && ftruncate(file, static_cast<off_t>(bytes_)) == 0,
          "no memory for a communicator: ",
          std::strerror(errno));
      map(file);
      store.set(
          key,
          std::to_string(inode_of(file)) + " /proc/" + std::to_string(getpid()) + "/fd/" +
              std::to_string(file));
    } else {
      for (int tries = 0; file < 0; ++tries) {
        raise_if_aborted();
        if (store.check({key})) {
          const auto text = store.get_to_str(key);
          const auto space = text.find(' ');
          file = open(text.c_str() + space + 1, O_RDWR | O_CLOEXEC);
          // A member that was given up has closed its file, and the number may be another one's.
          if (file >= 0 && std::to_string(inode_of(file)) != text.substr(0, space)) {
            close(file);
            file = -1;
          }
        }
        if (file < 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(std::min(1 + tries, 10)));
        }
      }
      map(file);
    }
    members()[rank_].pid = getpid();
    ++head()->joined;
    for (int idle = 0; head()->joined < size_; ++idle) {
      if (aborted_) {
        close(file);
        raise_if_aborted();
      }
      pause_longer(idle);
    }
    close(file);
    ready_ = true;
  }

  // Blocks until all members are there with a first operation of this kind, as NCCL does where it
  // connects them for the algorithm of an operation.
  void connect(OpType type) {
    const auto kind = static_cast<size_t>(type) % kKinds;
    {
      std::lock_guard<std::mutex> lock(order);
      if (connects_[kind]) {
        return;
      }
      connects_[kind] = true;
    }
    auto& connected = head()->connected[kind];
    ++connected;
    WithoutGil released;
    for (int idle = 0; connected < size_; ++idle) {
      raise_if_aborted();
      pause_longer(idle);
    }
  }

  // Blocks until all members have called it as often as this one, as ncclCommSplit does: those that
  // get no part of it have to call it, too.
  void split() {
    const auto all = (++splits_) * size_;
    ++head()->splits;
    WithoutGil released;
    for (int idle = 0; head()->splits < all; ++idle) {
      raise_if_aborted();
      pause_longer(idle);
    }
  }

  // False if it was cut off.
  bool exchange(std::vector<Transfer>& transfers) {
    auto check_remote = Clock::now() + kRemoteCheck;
    std::vector<char> waits(static_cast<size_t>(size_) * 4);
    for (int idle = 0;; ++idle) {
      if (aborted_) {
        return false;
      }
      park_if_ending();
      bool moved = false;
      bool left = false;
      std::fill(waits.begin(), waits.end(), 0);
      for (auto& transfer : transfers) {
        const auto lane = static_cast<size_t>(transfer.lane);
        auto& behind = waits
            [(static_cast<size_t>(transfer.peer) * 2 + lane) * 2 + (transfer.sends ? 1 : 0)];
        if (transfer.done == transfer.bytes) {
          continue;
        }
        if (!behind) {
          auto* at = transfer.data + transfer.done;
          const auto rest = transfer.bytes - transfer.done;
          const auto count = transfer.sends
              ? ring(lane, rank_, transfer.peer).push(at, rest)
              : ring(lane, transfer.peer, rank_).pull(at, rest);
          transfer.done += count;
          moved = moved || count > 0;
        }
        if (transfer.done < transfer.bytes) {
          behind = 1;
          left = true;
        }
      }
      if (!left) {
        return true;
      }
      if (moved) {
        idle = 0;
        continue;
      }
      pause_longer(idle);
      if (idle > 100 && Clock::now() > check_remote) {
        look_for_dead_members();
        check_remote = Clock::now() + kRemoteCheck;
      }
    }
  }

  // What is under way ends, and nothing begins any more. Memory is freed then, and CUDA frees none
  // before all that the device does has ended, other communicators' operations as well.
  void abort() {
    give_up();
    await_end();
  }

  // What is under way on it ends.
  void give_up() {
    aborted_ = true;
  }

  void await_end() {
    const auto deadline = Clock::now() + kAbortTimeout;
    WithoutGil released;
    while (running > 0 && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  bool aborted() const {
    return aborted_;
  }

  bool ready() const {
    return ready_;
  }

  bool remote_error() const {
    return remote_error_;
  }

  std::string abort_message() const {
    return c10::str("NCCL communicator was aborted on rank ", group_rank_, ".");
  }

  void raise_if_aborted() const {
    if (aborted_) {
      C10_THROW_ERROR(DistBackendError, abort_message());
    }
  }

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }

  static std::atomic<int> running; // operations of all communicators of this process
  std::mutex order; // what is enqueued on it is enqueued under this lock
  MomentPtr last; // operations of one communicator run one after the other, on whatever streams

 private:
  void map(int file) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(memory_ != MAP_FAILED, "cannot map a communicator: ", std::strerror(errno));
  }

  Head* head() {
    return static_cast<Head*>(memory_);
  }
  Member* members() {
    return reinterpret_cast<Member*>(head() + 1);
  }
  Ring& ring(size_t lane, int from, int to) {
    auto* rings = reinterpret_cast<Ring*>(members() + size_);
    const auto size = static_cast<size_t>(size_);
    return rings[(lane * size + static_cast<size_t>(from)) * size + static_cast<size_t>(to)];
  }

  void look_for_dead_members() {
    const auto after = remote_error_after();
    if (after < 0 || remote_error_) {
      return;
    }
    bool dead = false;
    for (int i = 0; i < size_; ++i) {
      dead = dead || (i != rank_ && process_ended(members()[i].pid));
    }
    if (!dead) {
      return;
    }
    const auto now = Clock::now();
    dead_since_ = dead_since_ == Clock::time_point{} ? now : dead_since_;
    if (std::chrono::duration<double>(now - dead_since_).count() >= after) {
      remote_error_ = true;
    }
  }

  const int rank_;
  const int size_;
  const int group_rank_;
  const size_t bytes_;
  void* memory_ = nullptr;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> ready_{false};
  std::array<bool, kKinds> connects_{};
  int splits_ = 0;
  std::atomic<bool> remote_error_{false};
  Clock::time_point dead_since_{};
};
std::atomic<int> Communicator::running{0};

using CommunicatorPtr = std::shared_ptr<Communicator>;

// ---- Operations ----

// A part of an operation, as the stream's thread runs it.
struct Piece {
  std::function<void(std::vector<Transfer>&)> prepare;
  std::function<void()> finish = nullptr;
};

// One operation of a group: enqueued, running, done or cut off.
class Operation {
 public:
  explicit Operation(OpType type) : type(type) {}

  void fail(const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
    }
  }

  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  void set_end(MomentPtr end) {
    std::lock_guard<std::mutex> lock(mutex_);
    end_ = std::move(end);
  }

  // Null while it is part of a group that is not closed yet.
  MomentPtr end() {
    std::lock_guard<std::mutex> lock(mutex_);
    return end_;
  }

  bool ended() {
    const auto moment = end();
    return moment && moment->reached();
  }

  const OpType type;
  CommunicatorPtr communicator;
  std::vector<Piece> pieces;

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  MomentPtr end_;
};
using OperationPtr = std::shared_ptr<Operation>;

void run(const OperationPtr& operation) {
  auto& communicator = *operation->communicator;
  ++communicator.running;
  const std::shared_ptr<void> at_the_end(nullptr, [&](void*) {
    operation->pieces.clear();
    --communicator.running;
  });
  std::vector<Transfer> transfers;
  bool done = !communicator.aborted();
  if (done) {
    for (auto& piece : operation->pieces) {
      piece.prepare(transfers);
    }
    done = communicator.exchange(transfers);
  }
  if (done) {
    for (auto& piece : operation->pieces) {
      if (piece.finish) {
        piece.finish();
      }
    }
  } else {
    operation->fail(communicator.abort_message());
  }
}

class Work : public c10d::Work {
 public:
  Work(
      int rank,
      OperationPtr operation,
      c10::Device device,
      uint64_t number,
      std::vector<at::Tensor> outputs,
      std::chrono::milliseconds limit)
      : c10d::Work(rank, operation->type),
        operation_(std::move(operation)),
        device_(device),
        number_(number),
        outputs_(std::move(outputs)),
        limit_(limit),
        started_(Clock::now()) {}

  bool isCompleted() override {
    see_remote_error();
    see_time_limit();
    return operation_->error() || operation_->ended();
  }

  bool isSuccess() const override {
    return !operation_->error() && operation_->ended();
  }

  std::exception_ptr exception() const override {
    see_remote_error();
    see_time_limit();
    return operation_->error();
  }

  int sourceRank() const override {
    return -1;
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  void synchronize() override {
    block(current_stream(device_.index()), operation_->end());
  }

  void blockCurrentStream() override {
    synchronize();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) {
      wait_for(timeout);
    } else if (operation_->type == OpType::BARRIER && !isCompleted()) {
      standin::synchronize(current_stream(device_.index()));
    }
    if (const auto error = operation_->error()) {
      abort();
      std::rethrow_exception(error);
    }
    return true;
  }

  void abort() override {
    operation_->communicator->abort();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }

  uint64_t getSequencenumber() const override {
    return number_;
  }

  // It has been given to the device.
  virtual void launched() {}

  c10::intrusive_ptr<c10::ivalue::Future> future;

 protected:
  const OperationPtr operation_;
  const c10::Device device_;

 private:
  void see_remote_error() const {
    const auto& communicator = operation_->communicator;
    if (communicator && communicator->remote_error() && !operation_->ended()) {
      operation_->fail(
          "NCCL error: remote process exited or there was a network error\n"
          "ncclRemoteError: A call failed possibly due to a network error or a remote process "
          "exiting prematurely.");
    }
  }

  // What the watchdog does with a work that takes too long, if it is not to end anything.
  void see_time_limit() const {
    if (Clock::now() - started_ > limit_ && !operation_->ended() && !operation_->error()) {
      operation_->fail(c10::str(
          "Watchdog caught collective operation timeout: it ran longer than ",
          limit_.count(),
          " milliseconds"));
    }
  }

  void wait_for(std::chrono::milliseconds timeout) {
    {
      WithoutGil released;
      while (!isCompleted() && Clock::now() - started_ < timeout) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    if (!isCompleted()) {
      operation_->fail(c10::str(
          "[Rank ",
          rank_,
          "] Work WorkNCCL(SeqNum=",
          number_,
          ", OpType=",
          c10d::opTypeToString(operation_->type),
          ", Timeout(ms)=",
          timeout.count(),
          ") timed out in blocking wait."));
    }
  }

  const uint64_t number_;
  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds limit_;
  const Clock::time_point started_;
};

// ---- What operations do with memory ----

// A tensor's memory, as a flat one of the host. It owns nothing.
at::Tensor flat(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(),
      {tensor.numel()},
      tensor.options().device(c10::DeviceType::CPU).pinned_memory(false));
}

void combine(const ReduceOp& op, at::Tensor into, const std::vector<at::Tensor>& parts) {
  auto all = parts[0].clone();
  for (size_t i = 1; i < parts.size(); ++i) {
    switch (op.op_) {
      case ReduceOp::PRODUCT:
        all.mul_(parts[i]);
        break;
      case ReduceOp::MIN:
        all = at::minimum(all, parts[i]);
        break;
      case ReduceOp::MAX:
        all = at::maximum(all, parts[i]);
        break;
      default:
        all.add_(parts[i]);
    }
  }
  if (op.op_ == ReduceOp::AVG) {
    const auto size = static_cast<int64_t>(parts.size());
    if (c10::isIntegralType(all.scalar_type(), true)) {
      all.div_(size, "trunc");
    } else {
      all.div_(size);
    }
  }
  into.copy_(all);
}

// The factor of PREMUL_SUM is applied before anything is sent.
std::function<at::Tensor(const at::Tensor&)> scaling(const ReduceOp& op) {
  if (op.op_ != ReduceOp::PREMUL_SUM || !op.supplement_) {
    return [](const at::Tensor& tensor) { return tensor; };
  }
  const auto* supplement = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement->tensor_factor.defined()) {
    const auto factor = flat(supplement->tensor_factor);
    return [factor](const at::Tensor& tensor) { return tensor.mul(factor.to(tensor.dtype())); };
  }
  return [factor = supplement->double_factor](const at::Tensor& tensor) {
    return tensor.mul(factor);
  };
}

void check_op(const ReduceOp& op, const at::Tensor& tensor) {
  switch (op.op_) {
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
    case ReduceOp::AVG:
      TORCH_CHECK_WITH(
          TypeError,
          tensor.scalar_type() != at::kBool,
          "Cannot use ReduceOp.AVG with boolean inputs");
      break;
    default:
      break;
  }
}

size_t bytes_of(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.nbytes());
}

Transfer transfer(bool sends, int peer, const at::Tensor& host, Lane lane = Lane::kCollective) {
  return {sends, lane, peer, static_cast<char*>(host.data_ptr()), bytes_of(host)};
}

// Sends a tensor to each peer and receives one of each. Undefined ones stay out.
Piece move(int rank, std::vector<at::Tensor> sent, std::vector<at::Tensor> received) {
  Piece piece;
  piece.prepare = [rank, sent, received](std::vector<Transfer>& transfers) {
    for (size_t i = 0; i < sent.size(); ++i) {
      const auto peer = static_cast<int>(i);
      if (peer != rank && sent[i].defined()) {
        transfers.push_back(transfer(true, peer, sent[i]));
      }
      if (peer != rank && received[i].defined()) {
        transfers.push_back(transfer(false, peer, received[i]));
      }
    }
  };
  const auto own = static_cast<size_t>(rank);
  if (sent[own].defined() && received[own].defined() &&
      sent[own].data_ptr() != received[own].data_ptr()) {
    piece.finish = [from = sent[own], to = received[own]] {
      // A mismatch is the caller's, and must not write beyond the end.
      std::memmove(to.data_ptr(), from.data_ptr(), std::min(bytes_of(from), bytes_of(to)));
    };
  }
  return piece;
}

// Each rank gets the reduction of what all have sent to it.
Piece reduce_to(
    int rank,
    const ReduceOp& op,
    std::vector<at::Tensor> sent, // by peer, undefined for those that get nothing
    at::Tensor into) { // undefined where nothing is wanted
  struct State {
    std::vector<at::Tensor> scaled;
    std::vector<at::Tensor> parts;
  };
  auto state = std::make_shared<State>();
  const auto scale = scaling(op);
  Piece piece;
  piece.prepare = [rank, sent, into, state, scale](std::vector<Transfer>& transfers) {
    for (size_t i = 0; i < sent.size(); ++i) {
      const auto peer = static_cast<int>(i);
      const auto own = peer == rank;
      state->scaled.push_back(sent[i].defined() ? scale(sent[i]) : sent[i]);
      if (!own && sent[i].defined()) {
        transfers.push_back(transfer(true, peer, state->scaled.back()));
      }
      if (into.defined()) {
        state->parts.push_back(own ? state->scaled.back() : at::empty_like(into));
        if (!own) {
          transfers.push_back(transfer(false, peer, state->parts.back()));
        }
      }
    }
  };
  if (into.defined()) {
    piece.finish = [op, into, state] { combine(op, into, state->parts); };
  }
  return piece;
}

// ---- The backend ----

class ProcessGroupStandin : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(bool is_high_priority_stream = false)
        : c10d::Backend::Options(kName), is_high_priority_stream(is_high_priority_stream) {}
    bool is_high_priority_stream;
    c10::intrusive_ptr<ProcessGroupStandin> split_from; // its communicator is split for the first
  };

  ProcessGroupStandin(
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {
    init();
  }

  ~ProcessGroupStandin() override = default;

  const std::string getBackendName() const override {
    return kName;
  }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override {
    return c10::static_intrusive_pointer_cast<Backend::Options>(options_);
  }
  c10::intrusive_ptr<Options> options() {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return number_;
  }

  // ---- its end ----

  void abort() override {
    std::vector<CommunicatorPtr> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
      for (auto& [key, communicator] : communicators_) {
        all.push_back(communicator);
      }
    }
    for (auto& communicator : all) { // in one group of calls
      communicator->give_up();
    }
    for (auto& communicator : all) {
      communicator->await_end();
    }
  }

  // As NCCL's: what is enqueued still runs to its end.
  void shutdown() override {
    std::vector<MomentPtr> ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [key, communicator] : communicators_) {
        std::lock_guard<std::mutex> order(communicator->order);
        if (communicator->last) {
          ends.push_back(communicator->last);
        }
      }
    }
    for (auto& end : ends) {
      standin::wait(*end);
    }
    abort();
  }

  c10d::ErrorType getError() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, communicator] : communicators_) {
      if (communicator->remote_error()) {
        return c10d::ErrorType::REMOTE_ERROR;
      }
    }
    return c10d::ErrorType::SUCCESS;
  }

  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& opts) override {
    const auto found = std::find(ranks.begin(), ranks.end(), getRank());
    const auto number = splits_++;
    communicator("0", getRank(), getSize())->split();
    if (found == ranks.end()) {
      return nullptr;
    }
    auto options = c10::make_intrusive<Options>();
    options->timeout = opts ? opts->timeout : options_->timeout;
    if (opts) {
      options->group_name = opts->group_name;
      options->group_desc = opts->group_desc;
    }
    for (const auto rank : ranks) {
      options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
    }
    auto inner = c10::make_intrusive<c10d::PrefixStore>(
        c10::str("split", number, "/", c10::Join("_", ranks)), store ? store : store_);
    return child(
        inner, static_cast<int>(found - ranks.begin()), static_cast<int>(ranks.size()), options);
  }

  int splits() const {
    return splits_;
  }

  // What a rank does for a group that is split from this one and that it is no member of.
  void perform_nocolor_split(at::Device) {
    communicator("0", getRank(), getSize())->split();
  }

  void eagerConnectSingleDevice(at::Device) override {
    communicator("0", getRank(), getSize());
    eager_ = true;
  }

  // ---- coalescing ----

  void startCoalescing() override {
    coalesced_ = std::make_shared<Operation>(OpType::COALESCED);
    coalesced_tensors_.clear();
    coalesced_async_ = false;
  }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    auto operation = std::exchange(coalesced_, nullptr);
    if (!operation || operation->pieces.empty()) {
      return nullptr;
    }
    const auto tensors = std::exchange(coalesced_tensors_, {});
    auto work = launch(operation, tensors[0].device(), tensors, {}, coalesced_async_);
    return returned(work, coalesced_async_);
  }

  // ---- collectives ----

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& opts) override {
    const auto& tensor = one(tensors);
    const auto root = checked_rank(opts.rootRank);
    auto sent = nothing();
    auto received = nothing();
    if (root == getRank()) {
      std::fill(sent.begin(), sent.end(), flat(tensor));
      sent[static_cast<size_t>(root)] = at::Tensor();
    } else {
      received[static_cast<size_t>(root)] = flat(tensor);
    }
    return collective(
        OpType::BROADCAST, tensors, tensors, move(getRank(), sent, received), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& opts) override {
    one(tensors);
    return collective(
        OpType::ALLREDUCE, tensors, tensors, all_reduced(tensors[0], opts.reduceOp), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override {
    std::vector<Piece> pieces;
    for (const auto& tensor : tensors) {
      check(tensor);
      pieces.push_back(all_reduced(tensor, opts.reduceOp));
    }
    return collective(
        OpType::ALLREDUCE_COALESCED, tensors, tensors, std::move(pieces), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOptions& opts) override {
    const auto& tensor = one(tensors);
    check_op(opts.reduceOp, tensor);
    const auto root = checked_rank(opts.rootRank);
    auto sent = nothing();
    sent[static_cast<size_t>(root)] = flat(tensor);
    const auto into = root == getRank() ? flat(tensor) : at::Tensor();
    return collective(
        OpType::REDUCE,
        tensors,
        tensors,
        reduce_to(getRank(), opts.reduceOp, sent, into),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override {
    const auto& input = one(inputs);
    auto& targets = list_of(outputs, "allgather");
    std::vector<at::Tensor> sent(targets.size(), flat(input));
    return collective(
        OpType::ALLGATHER,
        inputs,
        targets,
        move(getRank(), sent, flat_each(targets)),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts) override {
    std::vector<at::Tensor> inputs{input};
    std::vector<at::Tensor> outputs{output};
    return collective(
        OpType::_ALLGATHER_BASE, inputs, outputs, gathered(output, input), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < inputs.size(); ++i) {
      pieces.push_back(gathered(outputs.at(i), inputs[i]));
    }
    return collective(OpType::COALESCED, inputs, outputs, std::move(pieces), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& opts) override {
    const auto& input = one(inputs);
    const auto root = checked_rank(opts.rootRank);
    auto sent = nothing();
    auto received = nothing();
    std::vector<at::Tensor> targets;
    sent[static_cast<size_t>(root)] = flat(input);
    if (root == getRank()) {
      targets = list_of(outputs, "gather");
      received = flat_each(targets);
    } else {
      TORCH_CHECK_WITH(ValueError, outputs.empty(), "requires empty output on non-root");
      targets = inputs;
    }
    return collective(
        OpType::GATHER, inputs, targets, move(getRank(), sent, received), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& opts) override {
    const auto& output = one(outputs);
    const auto root = checked_rank(opts.rootRank);
    auto sent = nothing();
    auto received = nothing();
    std::vector<at::Tensor> sources;
    received[static_cast<size_t>(root)] = flat(output);
    if (root == getRank()) {
      sources = list_of(inputs, "scatter");
      sent = flat_each(sources);
    } else {
      TORCH_CHECK_WITH(ValueError, inputs.empty(), "requires empty input on non-root");
    }
    return collective(
        OpType::SCATTER, sources, outputs, move(getRank(), sent, received), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    const auto& output = one(outputs);
    check_op(opts.reduceOp, output);
    auto& sources = list_of(inputs, "reduce_scatter");
    return collective(
        OpType::REDUCE_SCATTER,
        sources,
        outputs,
        reduce_to(getRank(), opts.reduceOp, flat_each(sources), flat(output)),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override {
    std::vector<at::Tensor> inputs{input};
    std::vector<at::Tensor> outputs{output};
    return collective(
        OpType::_REDUCE_SCATTER_BASE,
        inputs,
        outputs,
        scattered(output, input, opts.reduceOp),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < inputs.size(); ++i) {
      pieces.push_back(scattered(outputs.at(i), inputs[i], opts.reduceOp));
    }
    return collective(OpType::COALESCED, inputs, outputs, std::move(pieces), opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& opts) override {
    check(output);
    check(input);
    std::vector<at::Tensor> inputs{input};
    std::vector<at::Tensor> outputs{output};
    return collective(
        OpType::ALLTOALL_BASE,
        inputs,
        outputs,
        move(getRank(), in_rows(input, input_sizes), in_rows(output, output_sizes)),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& opts) override {
    const auto size = static_cast<size_t>(getSize());
    TORCH_CHECK(
        outputs.size() == size && inputs.size() == size,
        "alltoall needs as many tensors as there are ranks");
    return collective(
        OpType::ALLTOALL,
        inputs,
        outputs,
        move(getRank(), flat_each(inputs), flat_each(outputs)),
        opts.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> send(
      std::vector<at::Tensor>& tensors,
      int peer,
      int) override {
    return point_to_point(OpType::SEND, tensors, peer);
  }

  c10::intrusive_ptr<c10d::Work> recv(
      std::vector<at::Tensor>& tensors,
      int peer,
      int) override {
    return point_to_point(OpType::RECV, tensors, peer);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    auto device = c10::Device(c10::DeviceType::PrivateUse1, current_stream(-1).device_index());
    if (!opts.device_ids.empty()) {
      device = c10::Device(device.type(), static_cast<c10::DeviceIndex>(opts.device_ids[0]));
    } else if (own_device()) {
      device = *own_device();
    } else if (opts.device && opts.device->type() == device.type() && opts.device->has_index()) {
      device = *opts.device;
    }
    std::vector<at::Tensor> tensors{
        at::zeros({1}, at::TensorOptions().device(device).dtype(at::kFloat))};
    auto work = collective(
        OpType::BARRIER, tensors, tensors, all_reduced(tensors[0], ReduceOp::SUM), opts.asyncOp);
    if (!work) {
      standin::synchronize(current_stream(device.index())); // the host waits in the call
    }
    return work;
  }

 protected:
  virtual std::optional<at::Device> own_device() const {
    return getBoundDeviceId();
  }

  virtual void check_device(const at::Tensor&) const {}

  // Before an operation is launched.
  virtual void check_usable() {}

  virtual bool coalesces(OpType) const {
    return coalesced_ != nullptr;
  }

  // The handle of one that is part of a group of calls.
  virtual c10::intrusive_ptr<c10d::Work> part_of_group(
      OpType type,
      const std::vector<at::Tensor>& tensors,
      const std::vector<at::Tensor>& outputs,
      bool async) {
    if (!async || c10d::isP2POp(type)) {
      return nullptr;
    }
    return make_work(coalesced_, tensors.at(0).device(), outputs, async);
  }

  virtual c10::intrusive_ptr<Work> make_work(
      const OperationPtr& operation,
      c10::Device device,
      const std::vector<at::Tensor>& outputs,
      bool) {
    return c10::make_intrusive<Work>(
        getRank(), operation, device, number_, outputs, options_->timeout);
  }

  // What is on the current stream needs no waiting for.
  virtual c10::intrusive_ptr<c10d::Work> returned(
      const c10::intrusive_ptr<Work>& work,
      bool async) {
    return async ? work : nullptr;
  }

  virtual c10::intrusive_ptr<Backend> child(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      const c10::intrusive_ptr<Options>& options) {
    return c10::make_intrusive<ProcessGroupStandin>(store, rank, size, options);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  bool eager_ = false;
  std::atomic<uint64_t> number_{0};
  std::mutex mutex_;
  std::map<std::string, CommunicatorPtr> communicators_;
  OperationPtr coalesced_;

 private:
  // ---- arguments ----

  void check(const at::Tensor& tensor) const {
    TORCH_CHECK_WITH(
        ValueError,
        tensor.device().type() == c10::DeviceType::PrivateUse1 && !tensor.is_sparse(),
        "Tensors must be on standin and dense");
    check_device(tensor);
    TORCH_CHECK_WITH(
        ValueError,
        tensor.is_contiguous(tensor.suggest_memory_format()),
        "Tensors must be contiguous");
  }

  const at::Tensor& one(const std::vector<at::Tensor>& tensors) const {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
    check(tensors[0]);
    return tensors[0];
  }

  std::vector<at::Tensor>& list_of(
      std::vector<std::vector<at::Tensor>>& lists,
      const char* operation) const {
    TORCH_CHECK_WITH(
        ValueError,
        lists.size() == 1 && lists[0].size() == static_cast<size_t>(getSize()),
        operation,
        ": the list must have as many tensors as there are ranks");
    return lists[0];
  }

  int checked_rank(int64_t rank) const {
    TORCH_CHECK_WITH(ValueError, rank >= 0 && rank < getSize(), "invalid root rank: ", rank);
    return static_cast<int>(rank);
  }

  std::vector<at::Tensor> nothing() const {
    return std::vector<at::Tensor>(static_cast<size_t>(getSize()));
  }

  std::vector<at::Tensor> flat_each(const std::vector<at::Tensor>& tensors) const {
    std::vector<at::Tensor> all;
    for (const auto& tensor : tensors) {
      check(tensor);
      all.push_back(flat(tensor));
    }
    return all;
  }

  // A tensor in as many equal parts as there are ranks.
  std::vector<at::Tensor> in_parts(const at::Tensor& tensor) const {
    const auto whole = flat(tensor);
    const auto part = tensor.numel() / getSize();
    std::vector<at::Tensor> parts;
    for (int i = 0; i < getSize(); ++i) {
      parts.push_back(whole.narrow(0, i * part, part));
    }
    return parts;
  }

  std::vector<at::Tensor> in_rows(
      const at::Tensor& tensor,
      const std::vector<int64_t>& rows) const {
    if (rows.empty()) {
      TORCH_CHECK(
          tensor.size(0) % getSize() == 0,
          "Tensor's dim 0 does not divide equally across group size");
      return in_parts(tensor);
    }
    TORCH_CHECK(
        rows.size() == static_cast<size_t>(getSize()) &&
            std::accumulate(rows.begin(), rows.end(), int64_t{0}) == tensor.size(0),
        "Split sizes doesn't match total dim 0 size");
    const auto whole = flat(tensor);
    const auto row = tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 0;
    std::vector<at::Tensor> parts;
    int64_t start = 0;
    for (const auto count : rows) {
      parts.push_back(whole.narrow(0, start * row, count * row));
      start += count;
    }
    return parts;
  }

  // ---- pieces ----

  Piece all_reduced(const at::Tensor& tensor, const ReduceOp& op) const {
    check_op(op, tensor);
    const std::vector<at::Tensor> sent(static_cast<size_t>(getSize()), flat(tensor));
    return reduce_to(getRank(), op, sent, flat(tensor));
  }

  Piece gathered(const at::Tensor& output, const at::Tensor& input) const {
    check(output);
    check(input);
    TORCH_CHECK_WITH(
        TypeError, output.dtype() == input.dtype(), "output tensor must have the same type as input");
    TORCH_CHECK_WITH(
        ValueError,
        output.numel() == input.numel() * getSize(),
        "output tensor size must be equal to world_size times input tensor size");
    const std::vector<at::Tensor> sent(static_cast<size_t>(getSize()), flat(input));
    return move(getRank(), sent, in_parts(output));
  }

  Piece scattered(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op) const {
    check(output);
    check(input);
    check_op(op, output);
    TORCH_CHECK_WITH(
        TypeError, output.dtype() == input.dtype(), "input tensor must be the same type as the output");
    TORCH_CHECK_WITH(
        ValueError,
        input.numel() == output.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    return reduce_to(getRank(), op, in_parts(input), flat(output));
  }

  // ---- communicators and streams ----

  // A child's communicator is split from this one's, if there is one that works.
  void split_for_child() {
    CommunicatorPtr parent;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = communicators_.find("0");
      parent = found == communicators_.end() ? nullptr : found->second;
    }
    if (parent && parent->ready() && !parent->aborted()) {
      ++splits_;
      parent->split();
    }
  }

  CommunicatorPtr communicator(const std::string& key, int rank, int size) {
    CommunicatorPtr found;
    bool is_new = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& slot = communicators_[key];
      if (!slot) {
        slot = std::make_shared<Communicator>(rank, size, getRank());
        is_new = true;
      }
      found = slot;
      if (aborted_) {
        C10_THROW_ERROR(DistBackendError, found->abort_message());
      }
    }
    if (is_new) {
      if (key == "0" && options_->split_from) {
        options_->split_from->split_for_child();
      }
      WithoutGil released;
      found->join(*store_, c10::str("standin/", key));
    } else if (!found->ready()) {
      WithoutGil released; // another thread makes it
      for (int idle = 0; !found->ready() && !found->aborted(); ++idle) {
        pause_longer(idle);
      }
    }
    found->raise_if_aborted();
    return found;
  }

  Stream own_stream(const std::string& key, c10::DeviceIndex device) {
    static std::mutex one_mutex;
    static auto* one = new std::map<c10::DeviceIndex, Stream>;
    const char* text = std::getenv("DISTSESSION_STANDIN_ONE_STREAM");
    if (text && *text && std::string(text) != "0") {
      std::lock_guard<std::mutex> lock(one_mutex);
      return one->try_emplace(device, pool_stream(device)).first->second;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_.try_emplace({key, device}, pool_stream(device)).first->second;
  }

  // ---- launching ----

  c10::intrusive_ptr<c10d::Work> collective(
      OpType type,
      const std::vector<at::Tensor>& inputs,
      const std::vector<at::Tensor>& outputs,
      Piece piece,
      bool async) {
    std::vector<Piece> pieces;
    pieces.push_back(std::move(piece));
    return collective(type, inputs, outputs, std::move(pieces), async);
  }

  c10::intrusive_ptr<c10d::Work> collective(
      OpType type,
      const std::vector<at::Tensor>& inputs,
      const std::vector<at::Tensor>& outputs,
      std::vector<Piece> pieces,
      bool async) {
    ++number_;
    check_usable();
    auto joined = communicator("0", getRank(), getSize());
    auto tensors = inputs;
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    if (coalesces(type)) {
      return coalesce(type, joined, std::move(pieces), tensors, outputs, async);
    }
    joined->connect(type);
    auto operation = std::make_shared<Operation>(type);
    operation->communicator = joined;
    operation->pieces = std::move(pieces);
    auto work = launch(operation, outputs.at(0).device(), tensors, outputs, async);
    return returned(work, async);
  }

  c10::intrusive_ptr<c10d::Work> point_to_point(
      OpType type,
      std::vector<at::Tensor>& tensors,
      int peer) {
    ++number_;
    check_usable();
    const auto& tensor = one(tensors);
    checked_rank(peer);
    const bool sends = type == OpType::SEND;
    CommunicatorPtr joined;
    int target = peer;
    std::string key = "0";
    if (coalesced_ || eager_) {
      joined = communicator(key, getRank(), getSize());
    } else {
      const auto low = std::min(peer, getRank());
      const auto high = std::max(peer, getRank());
      key = c10::str(low, ":", high);
      const int own = getRank() == low ? 0 : 1;
      target = low == high ? 0 : 1 - own;
      joined = communicator(key, own, low == high ? 1 : 2);
    }
    Piece piece;
    piece.prepare = [sends, target, host = flat(tensor)](std::vector<Transfer>& transfers) {
      transfers.push_back(transfer(sends, target, host, Lane::kPointToPoint));
    };
    std::vector<Piece> pieces{piece};
    if (coalesced_) {
      return coalesce(type, joined, std::move(pieces), tensors, tensors, true);
    }
    auto operation = std::make_shared<Operation>(type);
    operation->communicator = joined;
    operation->pieces = std::move(pieces);
    return launch(operation, tensor.device(), tensors, tensors, true, key);
  }

  c10::intrusive_ptr<c10d::Work> coalesce(
      OpType type,
      const CommunicatorPtr& joined,
      std::vector<Piece> pieces,
      const std::vector<at::Tensor>& tensors,
      const std::vector<at::Tensor>& outputs,
      bool async) {
    coalesced_->communicator = joined;
    coalesced_async_ = async;
    for (auto& piece : pieces) {
      coalesced_->pieces.push_back(std::move(piece));
    }
    coalesced_tensors_.insert(coalesced_tensors_.end(), tensors.begin(), tensors.end());
    return part_of_group(type, tensors, outputs, async);
  }

  c10::intrusive_ptr<Work> launch(
      const OperationPtr& operation,
      c10::Device device,
      const std::vector<at::Tensor>& tensors,
      const std::vector<at::Tensor>& outputs,
      bool async,
      const std::string& key = "0") {
    const c10::DeviceGuard guard(device);
    const auto current = current_stream(device.index());
    const auto stream = async ? own_stream(key, device.index()) : current;
    auto work = make_work(operation, device, outputs, async);
    if (async) {
      block(stream, record(current));
      for (const auto& tensor : tensors) {
        used_by(tensor.storage().data_ptr(), stream);
      }
    }
    {
      auto& communicator = *operation->communicator;
      std::lock_guard<std::mutex> lock(communicator.order);
      block(stream, communicator.last);
      enqueue(stream, [operation] { run(operation); });
      communicator.last = record(stream);
      operation->set_end(communicator.last);
    }
    work->launched();
    const c10::StreamGuard on(stream);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  std::atomic<int> splits_{0};
  bool aborted_ = false;
  std::map<std::pair<std::string, c10::DeviceIndex>, Stream> streams_;
  std::vector<at::Tensor> coalesced_tensors_;
  bool coalesced_async_ = false;
};

// ---- The class behind "nccl" from torch 2.15 on ----

enum class Health : uint8_t { kNormal, kTimeout, kError };

// TORCH_NCCL_ASYNC_ERROR_HANDLING: what the watchdog does with a group that is not healthy.
struct Handling {
  static Handling read() {
    const char* text = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
    const int mode = text && *text ? std::atoi(text) : 3;
    return {mode == 1 || mode == 2, mode == 1 || mode == 3};
  }
  bool cleans_up;
  bool ends_process;
};

// What a group and the works that it has launched know of each other.
class Ledger {
 public:
  enum class Status : uint8_t { kOpen, kCompleted, kTimedOut, kFailed };

  // How far one work is. It is held by the work's handle and, until it is over, by the group.
  struct Entry {
    OperationPtr operation;
    std::chrono::milliseconds limit;
    Clock::time_point started;
    std::atomic<Status> status{Status::kOpen};
  };
  using EntryPtr = std::shared_ptr<Entry>;

  // The group's health comes before the operation's own end: of a group that was aborted also what
  // had come to its end, and was not asked for it since, has failed.
  Status look(Entry& entry, std::optional<std::chrono::milliseconds> limit = std::nullopt) const {
    if (entry.status != Status::kOpen) {
      return entry.status;
    }
    auto found = Status::kOpen;
    if (health != Health::kNormal) {
      found = health == Health::kTimeout ? Status::kTimedOut : Status::kFailed;
    } else if (entry.operation->ended()) {
      found = Status::kCompleted;
    } else if (Clock::now() - entry.started >= limit.value_or(entry.limit)) {
      found = Status::kTimedOut;
    }
    auto open = Status::kOpen;
    entry.status.compare_exchange_strong(open, found);
    return entry.status;
  }

  void add(EntryPtr entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(std::move(entry));
  }

  // What the first one that has not come to a good end has come to; completed if none is left.
  Status look_at_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(entries_, [this](auto& entry) { return look(*entry) == Status::kCompleted; });
    auto worst = entries_.empty() ? Status::kCompleted : Status::kOpen;
    for (auto& entry : entries_) {
      const auto status = look(*entry);
      worst = status == Status::kTimedOut || status == Status::kFailed ? status : worst;
    }
    return worst;
  }

  std::atomic<Health> health{Health::kNormal};

 private:
  std::mutex mutex_;
  std::vector<EntryPtr> entries_;
};

class Work2 : public Work {
 public:
  Work2(
      int rank,
      OperationPtr operation,
      c10::Device device,
      uint64_t number,
      std::vector<at::Tensor> outputs,
      std::chrono::milliseconds limit,
      std::shared_ptr<Ledger> ledger,
      bool blocks_host)
      : Work(rank, std::move(operation), device, number, std::move(outputs), limit),
        ledger_(std::move(ledger)),
        blocks_host_(blocks_host),
        entry_(std::make_shared<Ledger::Entry>()) {
    entry_->operation = operation_;
    entry_->limit = limit;
    entry_->started = Clock::now();
  }

  void launched() override {
    ledger_->add(entry_);
  }

  bool isCompleted() override {
    return ledger_->look(*entry_) != Ledger::Status::kOpen;
  }

  bool isSuccess() const override {
    return entry_->status == Ledger::Status::kOpen || entry_->status == Ledger::Status::kCompleted;
  }

  std::exception_ptr exception() const override {
    if (isSuccess()) {
      return nullptr;
    }
    return std::make_exception_ptr(C10_BUILD_ERROR(
        DistBackendError,
        entry_->status == Ledger::Status::kTimedOut
            ? "Watchdog caught collective operation timeout: NCCL operation timed out"
            : "NCCL operation failed"));
  }

  void synchronize() override {
    if (entry_->status != Ledger::Status::kOpen) {
      return;
    }
    Work::synchronize();
    if (blocks_host_) {
      standin::synchronize(current_stream(device_.index()));
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    std::optional<std::chrono::milliseconds> limit;
    if (timeout != kNoTimeout) {
      limit = timeout;
      WithoutGil released;
      while (ledger_->look(*entry_, limit) == Ledger::Status::kOpen) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    ledger_->look(*entry_, limit);
    if (const auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }

 private:
  const std::shared_ptr<Ledger> ledger_;
  const bool blocks_host_;
  const Ledger::EntryPtr entry_;
};

// What a call within a group of calls gives, and an empty group.
class CompletedWork : public c10d::Work {
 public:
  explicit CompletedWork(std::vector<at::Tensor> outputs = {}) : outputs_(std::move(outputs)) {}
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  void synchronize() override {}
  std::vector<at::Tensor> result() override {
    return outputs_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
};

// One communicator on one device, made with the group, and a watchdog.
class ProcessGroupStandin2 : public ProcessGroupStandin {
 public:
  using ProcessGroupStandin::ProcessGroupStandin;

  ~ProcessGroupStandin2() override {
    if (state_ != State::kConnected) {
      return;
    }
    stop_watchdog();
    give_up_communicators();
  }

  const std::string getBackendName() const override {
    return kName2;
  }

  // Makes the communicator.
  virtual void connect_on(std::optional<at::Device> device) {
    const auto index = current_stream(-1).device_index();
    device_ = device ? *device : at::Device(c10::DeviceType::PrivateUse1, index);
    eagerConnectSingleDevice(*device_);
    state_ = State::kConnected;
    watchdog_ = std::thread([this] { watch(); });
  }

  void abort() override {
    stop_watchdog(); // its caller has asked for this failure, so nothing is to follow from it
    ledger_->health = Health::kError;
    give_up_communicators();
  }

  // What is under way comes to its end, or to its time limit, which aborts it.
  void shutdown() override {
    if (state_ != State::kConnected) {
      return;
    }
    state_ = State::kEnded;
    stop_watchdog();
    {
      WithoutGil released;
      while (ledger_->look_at_all() == Ledger::Status::kOpen) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    give_up_communicators();
  }

  c10d::ErrorType getError() override {
    switch (ledger_->health.load()) {
      case Health::kTimeout:
        return c10d::ErrorType::TIMEOUT;
      case Health::kError:
        return c10d::ErrorType::COMM_ERROR;
      default:
        return c10d::ErrorType::SUCCESS;
    }
  }

  // Only sends and receives are put together. Collectives begin at once.
  void startCoalescing() override {
    TORCH_CHECK(!coalesced_, "startCoalescing called while a batch is already active");
    collectives_.clear();
    ProcessGroupStandin::startCoalescing();
  }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(coalesced_, "endCoalescing called without a matching startCoalescing");
    const auto collectives = std::exchange(collectives_, {});
    if (auto messages = ProcessGroupStandin::endCoalescing()) {
      return messages;
    }
    if (!collectives.empty()) {
      return collectives.back(); // they run in the order of their launch
    }
    return c10::make_intrusive<CompletedWork>();
  }

 protected:
  std::optional<at::Device> own_device() const override {
    return device_;
  }

  void check_device(const at::Tensor& tensor) const override {
    TORCH_CHECK(
        tensor.device() == *device_,
        "Expected tensor on ",
        *device_,
        " but found tensor on ",
        tensor.device());
  }

  void check_usable() override {
    TORCH_CHECK(state_ == State::kConnected, "ProcessGroupNCCL not initialized");
    look_at_works();
    if (ledger_->health == Health::kTimeout) {
      handle_failure("timeout - collective operation timed out");
    }
    TORCH_CHECK(ledger_->health != Health::kTimeout, "NCCL operation timed out");
    TORCH_CHECK(
        ledger_->health != Health::kError,
        "NCCL communicator was aborted after a previous error");
  }

  bool coalesces(OpType type) const override {
    return coalesced_ && c10d::isP2POp(type);
  }

  c10::intrusive_ptr<c10d::Work> part_of_group(
      OpType,
      const std::vector<at::Tensor>&,
      const std::vector<at::Tensor>& outputs,
      bool) override {
    return c10::make_intrusive<CompletedWork>(outputs);
  }

  c10::intrusive_ptr<Work> make_work(
      const OperationPtr& operation,
      c10::Device device,
      const std::vector<at::Tensor>& outputs,
      bool async) override {
    const bool blocks_host = operation->type == OpType::BARRIER && !async;
    return c10::make_intrusive<Work2>(
        getRank(), operation, device, number_, outputs, options_->timeout, ledger_, blocks_host);
  }

  c10::intrusive_ptr<c10d::Work> returned(
      const c10::intrusive_ptr<Work>& work,
      bool) override {
    if (coalesced_) {
      collectives_.push_back(work);
    }
    return work;
  }

  c10::intrusive_ptr<Backend> child(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      const c10::intrusive_ptr<Options>& options) override {
    auto group = c10::make_intrusive<ProcessGroupStandin2>(store, rank, size, options);
    group->connect_on(device_);
    return c10::static_intrusive_pointer_cast<Backend>(group);
  }

  std::optional<at::Device> device_;

 private:
  enum class State : uint8_t { kNone, kConnected, kEnded };

  // Once: there is nothing left then that would have to be waited for.
  void give_up_communicators() {
    if (!given_up_.exchange(true)) {
      ProcessGroupStandin::abort();
    }
  }

  void look_at_works() {
    const auto status = ledger_->look_at_all();
    auto healthy = Health::kNormal;
    if (status == Ledger::Status::kTimedOut) {
      ledger_->health.compare_exchange_strong(healthy, Health::kTimeout);
    } else if (status == Ledger::Status::kFailed) {
      ledger_->health.compare_exchange_strong(healthy, Health::kError);
    }
  }

  bool has_remote_error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(communicators_.begin(), communicators_.end(), [](auto& each) {
      return each.second->remote_error();
    });
  }

  void watch() {
    while (true) {
      {
        std::unique_lock<std::mutex> lock(watch_mutex_);
        if (watch_condition_.wait_for(lock, std::chrono::seconds(1), [this] { return unwatched_; })) {
          return;
        }
      }
      park_if_ending();
      look_at_works();
      auto healthy = Health::kNormal;
      if (has_remote_error() &&
          ledger_->health.compare_exchange_strong(healthy, Health::kError)) {
        handle_failure("error - nccl hit async error");
      } else if (ledger_->health == Health::kTimeout) {
        handle_failure("timeout - timeout watchdog detected operation timeout");
      } else if (ledger_->health == Health::kError) {
        handle_failure("error - timeout watchdog detected operation error");
      }
    }
  }

  void handle_failure(const char* reason) {
    const auto handling = Handling::read();
    if (handling.cleans_up) {
      give_up_communicators();
      std::lock_guard<std::mutex> lock(watch_mutex_);
      unwatched_ = true;
    }
    if (handling.ends_process) {
      std::fprintf(stderr, "Aborting process on rank %d due to %s\n", getRank(), reason);
      std::abort();
    }
  }

  void stop_watchdog() {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      unwatched_ = true;
    }
    watch_condition_.notify_all();
    WithoutGil released;
    std::lock_guard<std::mutex> lock(join_mutex_);
    if (watchdog_.joinable()) {
      watchdog_.join();
    }
  }

  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  std::atomic<State> state_{State::kNone};
  std::atomic<bool> given_up_{false};
  std::vector<c10::intrusive_ptr<c10d::Work>> collectives_;
  std::thread watchdog_;
  std::mutex watch_mutex_;
  std::mutex join_mutex_;
  std::condition_variable watch_condition_;
  bool unwatched_ = false;
};

// ---- The class behind "nccl-lazy" ----

// Collectives and batches are those of the other class. A send or receive on its own goes through a
// group of the two ranks, which its first use makes.
class ProcessGroupStandinLazy : public ProcessGroupStandin2 {
 public:
  using ProcessGroupStandin2::ProcessGroupStandin2;

  const std::string getBackendName() const override {
    return kNameLazy;
  }

  c10::intrusive_ptr<c10d::Work> send(
      std::vector<at::Tensor>& tensors,
      int peer,
      int tag) override {
    if (coalesced_) {
      return ProcessGroupStandin2::send(tensors, peer, tag);
    }
    return channel(peer)->send(tensors, getRank() < peer ? 1 : 0, tag);
  }

  c10::intrusive_ptr<c10d::Work> recv(
      std::vector<at::Tensor>& tensors,
      int peer,
      int tag) override {
    if (coalesced_) {
      return ProcessGroupStandin2::recv(tensors, peer, tag);
    }
    return channel(peer)->recv(tensors, getRank() < peer ? 1 : 0, tag);
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    ProcessGroupStandin2::setTimeout(timeout);
    for (auto& [peer, pair] : pairs()) {
      pair->setTimeout(timeout);
    }
  }

  // One after the other, and each waits for all that the device does.
  void abort() override {
    ProcessGroupStandin2::abort();
    for (auto& [peer, pair] : pairs()) {
      pair->abort();
    }
  }

  void shutdown() override {
    for (auto& [peer, pair] : pairs()) {
      pair->shutdown();
    }
    ProcessGroupStandin2::shutdown();
  }

  c10d::ErrorType getError() override {
    auto error = ProcessGroupStandin2::getError();
    for (auto& [peer, pair] : pairs()) {
      error = error == c10d::ErrorType::SUCCESS ? pair->getError() : error;
    }
    return error;
  }

  size_t channels() {
    return pairs().size();
  }

 private:
  using Pairs = std::map<int, c10::intrusive_ptr<ProcessGroupStandin2>>;

  Pairs pairs() {
    std::lock_guard<std::mutex> lock(pairs_mutex_);
    return pairs_;
  }

  c10::intrusive_ptr<ProcessGroupStandin2> channel(int peer) {
    TORCH_CHECK(
        peer != getRank() && peer >= 0 && peer < getSize(),
        "LazyBackend: invalid peer rank ",
        peer);
    const auto known = pairs();
    if (const auto found = known.find(peer); found != known.end()) {
      return found->second;
    }
    const auto low = std::min(peer, getRank());
    const auto high = std::max(peer, getRank());
    auto store = c10::make_intrusive<c10d::PrefixStore>(c10::str("p2p-", low, "-", high), store_);
    auto options = c10::make_intrusive<Options>(*options_);
    options->split_from = nullptr;
    auto made = c10::make_intrusive<ProcessGroupStandin2>(
        store, getRank() == low ? 0 : 1, 2, options);
    made->connect_on(device_);
    std::lock_guard<std::mutex> lock(pairs_mutex_);
    return pairs_.emplace(peer, std::move(made)).first->second;
  }

  std::mutex pairs_mutex_;
  Pairs pairs_;
};

} // namespace

// A class that connects when it is made, on a device.
template <typename T>
py::class_<T, c10::intrusive_ptr<T>, c10d::Backend> bind_eager(py::module_& m, const char* name) {
  using Options = ProcessGroupStandin::Options;
  return py::class_<T, c10::intrusive_ptr<T>, c10d::Backend>(m, name)
      .def(
          py::init([](c10::intrusive_ptr<c10d::Store> store,
                      int rank,
                      int size,
                      c10::intrusive_ptr<Options> options,
                      std::optional<at::Device> device) {
            auto made = c10::make_intrusive<T>(std::move(store), rank, size, std::move(options));
            made->connect_on(device);
            return made;
          }),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::arg("device_id") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def("get_error", &T::getError)
      .def(
          "perform_nocolor_split",
          [](T& self, at::Device device) { self.perform_nocolor_split(device); })
      .def(
          "split",
          &T::split,
          py::arg("store"),
          py::arg("ranks"),
          py::arg("opts"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", [](T& self) { return self.options(); });
}

void bind_group(py::module_& m) {
  py::module_::import("torch.distributed");
  using Group = ProcessGroupStandin;
  auto group = py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(
      m, "ProcessGroupStandin");
  py::class_<Group::Options, c10::intrusive_ptr<Group::Options>, c10d::Backend::Options>(
      group, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Group::Options::is_high_priority_stream)
      .def_readwrite("split_from", &Group::Options::split_from)
      .def("__deepcopy__", [](const Group::Options& self, const py::dict&) {
        return c10::make_intrusive<Group::Options>(self);
      });
  group
      .def(
          py::init<
              c10::intrusive_ptr<c10d::Store>,
              int,
              int,
              c10::intrusive_ptr<Group::Options>>(),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::call_guard<py::gil_scoped_release>())
      .def("get_error", &Group::getError)
      .def("comm_split_count", &Group::splits)
      .def("perform_nocolor_split", &Group::perform_nocolor_split)
      .def_property_readonly("options", &Group::options);

  bind_eager<ProcessGroupStandin2>(m, "ProcessGroupStandin2").attr("Options") =
      group.attr("Options");
  bind_eager<ProcessGroupStandinLazy>(m, "ProcessGroupStandinLazy")
      .def("_num_active_channels", &ProcessGroupStandinLazy::channels);
}

} // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  standin::bind_device(m);
  standin::bind_group(m);
}
