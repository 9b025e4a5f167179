// A simulated accelerator, as torch's device "sim" (tests/sim/__init__.py names it).
//
// Streams are threads that begin each kernel after a random delay. A kernel's shapes come from the
// meta device when it is launched; the CPU's kernel runs later, over raw addresses, and keeps nothing
// alive. Memory comes from a pool for each stream; freed memory becomes NaN in the order of the stream
// that owns it. Collectives run on a stream of their own by another backend (gloo), and keep NCCL's
// contracts. Every launch is checked against those before: two accesses to the same bytes, one of them
// a write, that no chain of streams, events and waits of the host orders, are a race. Whether they do
// collide in this run does not matter. Page-locked memory that a copy reads is write-protected until the
// host knows that the copy is over: so the host's own writes are in the check, of whatever code.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <signal.h>
#include <sys/mman.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <thread>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Stream;
using c10::StreamId;
constexpr auto PU1 = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 8;

struct Config {
  int max_us = 300;
  double share = 0.3;  // of the kernels that are late
  int seed = 0;
  int devices = 1;
  int64_t memory = int64_t(1) << 34;  // bytes of a device
  bool checks = true;                  // for races
};
static Config config;

// Where the host is: the lines of Python that called, innermost first.
struct Frame {
  PyObject* code;
  int line;
  bool operator<(const Frame& o) const { return std::tie(code, line) < std::tie(o.code, o.line); }
};
static std::mutex places_m;
static std::map<std::vector<Frame>, int> place_ids;
static std::vector<const std::vector<Frame>*> places;
static thread_local bool is_blind = false;  // it asks events, and tells no other thread what it saw
static thread_local std::string label;  // what the test says that this thread does
static thread_local bool is_device = false;  // this thread is a stream
static thread_local int last_launch = -1;  // by this thread

static int here() {
  std::vector<Frame> found;
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame && found.size() < 40) {
      PyCodeObject* code = PyFrame_GetCode(frame);  // kept for good: few, and their address is an id
      found.push_back({reinterpret_cast<PyObject*>(code), PyFrame_GetLineNumber(frame)});
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
  }
  std::lock_guard<std::mutex> guard(places_m);
  auto [it, is_new] = place_ids.try_emplace(std::move(found), int(places.size()));
  if (is_new) places.push_back(&it->first);
  return it->second;
}

// Mutants: lines of the library at which streams wait, or the host does, and one of them that does not.
static std::mutex sites_m;
static bool watches_sites = false;
static std::string mutant;
static std::map<std::string, int64_t> sites;  // calls by line
static bool is_mutant() {
  if (!watches_sites || !Py_IsInitialized()) return false;
  std::string site;
  {
    py::gil_scoped_acquire gil;
    std::vector<Frame> frames;
    const int place = here();
    { std::lock_guard<std::mutex> g(places_m); frames = *places.at(place); }
    for (auto& f : frames) {
      const auto file = py::str(py::handle(f.code).attr("co_filename")).cast<std::string>();
      const auto at = file.rfind("/onefold/");
      if (at == std::string::npos || file.find("/accelerator.py") != std::string::npos) continue;
      site = file.substr(at + 9) + ":" + std::to_string(f.line);
      break;
    }
  }
  if (site.empty()) return false;
  std::lock_guard<std::mutex> g(sites_m);
  sites[site]++;
  return site == mutant;
}

// Vector clocks. All threads of the host share one: what one has waited for, the others know.
using Clock = std::vector<uint32_t>;
static void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}
struct Range {
  uintptr_t begin, end;
  bool is_write;
};
struct Launch {
  std::string name, label, node;
  int stream, place;
  std::vector<Range> ranges{};  // if it keeps them
};
struct Access {
  int stream = -1;
  uint32_t tick = 0;
  int launch = -1;
};
static bool is_before(const Access& a, const Clock& clock) {
  return a.stream < 0 || (size_t(a.stream) < clock.size() && clock[a.stream] >= a.tick);
}
struct Cell {  // of bytes [key, end)
  uintptr_t end;
  Access write;
  std::vector<Access> reads;  // since the write, the last of each stream
};
static std::mutex clocks_m;
static bool keeps_ranges = false;  // of launches in the log, and allocations as launches
static Clock host;
static std::vector<Launch> log_;
static std::map<uintptr_t, Cell> cells;
struct Race {
  Launch first, second;
  bool first_writes, second_writes;
  int64_t nbytes;
};
static std::vector<Race> races;
static std::map<std::pair<std::string, int>, int64_t> host_waits;
static std::map<std::string, int64_t> counts;  // launches by name

struct Flag {  // one recording of an event
  std::mutex m;
  std::condition_variable cv;
  bool is_set = false;
  Clock clock;  // what has happened when it is set
  std::chrono::steady_clock::time_point when;
  void set() {
    { std::lock_guard<std::mutex> g(m); is_set = true; when = std::chrono::steady_clock::now(); }
    cv.notify_all();
  }
  void wait() { std::unique_lock<std::mutex> l(m); cv.wait(l, [&] { return is_set; }); }
  bool query() { std::lock_guard<std::mutex> g(m); return is_set; }
};
using FlagPtr = std::shared_ptr<Flag>;

struct Queue {  // a stream
  const int number, device;
  std::mutex m;
  std::condition_variable cv, idle;
  std::deque<std::function<void()>> tasks;
  bool is_busy = false, is_started = false;
  std::mt19937 random;
  std::string error;
  Clock clock;
  Queue(int number, int device) : number(number), device(device), random(config.seed * 1000003 + number) {}
  void push(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> g(m);
      if (!is_started) { is_started = true; std::thread([this] { run(); }).detach(); }
      tasks.push_back(std::move(task));
    }
    cv.notify_one();
  }
  void run() {
    is_device = true;
    at::set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> l(m);
        cv.wait(l, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
        is_busy = true;
      }
      if (config.max_us && std::uniform_real_distribution<>(0, 1)(random) < config.share)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % config.max_us));
      try { task(); } catch (const std::exception& e) {
        std::lock_guard<std::mutex> g(m);
        if (error.empty()) error = e.what();
      }
      task = nullptr;
      std::lock_guard<std::mutex> g(m);
      is_busy = false;
      if (tasks.empty()) idle.notify_all();
    }
  }
  bool query() { std::lock_guard<std::mutex> g(m); return tasks.empty() && !is_busy; }
  void drain() {
    std::unique_lock<std::mutex> l(m);
    idle.wait(l, [&] { return tasks.empty() && !is_busy; });
    if (error.empty()) return;
    std::string told;
    std::swap(told, error);
    TORCH_CHECK(false, "sim: a kernel or collective failed: ", told);
  }
};

static std::mutex queues_m;
static std::vector<Queue*> queues;                    // by number
static std::vector<std::vector<Queue*>> by_device(MAX_DEVICES);  // by stream id
static Queue& queue(int device, StreamId id) {
  std::lock_guard<std::mutex> g(queues_m);
  auto& own = by_device.at(device);
  while (StreamId(own.size()) <= id) {
    own.push_back(new Queue(int(queues.size()), device));
    queues.push_back(own.back());
  }
  return *own[id];
}
static StreamId new_stream(int device) {
  queue(device, 0);
  size_t id;
  { std::lock_guard<std::mutex> g(queues_m); id = by_device.at(device).size(); }
  queue(device, StreamId(id));
  return StreamId(id);
}
static thread_local StreamId current[MAX_DEVICES] = {};
static thread_local DeviceIndex device_now = 0;
static std::atomic<int64_t> used_devices{0};  // a bit each: something was allocated or launched there
static Queue& now(int device) { return queue(device, current[device]); }

static void note_wait(const std::string& what) {
  int place = here();
  std::lock_guard<std::mutex> g(clocks_m);
  host_waits[{what, place}]++;
}

// Copies to page-locked memory land there when the host has waited for them, or a later kernel reads it:
// a host that reads before finds NaN, however fast the copy was.
struct Landing {
  char* to;
  std::vector<char> bytes;
  int stream;
  uint32_t tick;
  bool has_run = false, is_awaited = false, has_landed = false;
};
static void write_as_device(void* to, const void* from, size_t nbytes);
static std::mutex landings_m;
static std::vector<std::shared_ptr<Landing>> landings;
template <class F>
static void land_if(F wanted) {
  std::lock_guard<std::mutex> g(landings_m);
  for (auto& l : landings)
    if (wanted(*l) && l->has_run && !l->has_landed) { l->has_landed = true; write_as_device(l->to, l->bytes.data(), l->bytes.size()); }
  landings.erase(std::remove_if(landings.begin(), landings.end(), [](auto& l) { return l->has_landed; }), landings.end());
}
static void land(const void* from, size_t n) {
  const char* at = static_cast<const char*>(from);
  land_if([&](const Landing& l) { return l.to < at + n && at < l.to + l.bytes.size(); });
}

// Page-locked memory that a copy to the device reads may not be written to by the host before it knows that
// the copy is over. Until then its pages are protected, and a write of the host ends in `on_write`.
constexpr uintptr_t PAGE = 4096;
struct Reading {
  uintptr_t begin, end;
  Access by;
};
static std::recursive_mutex readings_m;
static std::vector<Reading> readings;
static uintptr_t page_of(uintptr_t at) { return at / PAGE * PAGE; }
static uintptr_t page_after(uintptr_t at) { return (at + PAGE - 1) / PAGE * PAGE; }
static bool is_read(uintptr_t begin, uintptr_t end) {
  return std::any_of(readings.begin(), readings.end(), [&](auto& r) { return r.begin < end && begin < r.end; });
}
static void allow(uintptr_t begin, uintptr_t end, bool writes) {
  mprotect(reinterpret_cast<void*>(page_of(begin)), page_after(end) - page_of(begin), writes ? PROT_READ | PROT_WRITE : PROT_READ);
}
static void protect(const void* from, size_t nbytes, const Access& by) {
  const auto begin = reinterpret_cast<uintptr_t>(from);
  std::lock_guard<std::recursive_mutex> g(readings_m);
  readings.push_back({begin, begin + nbytes, by});
  allow(begin, begin + nbytes, false);
}
template <class F>
static void end_readings(F is_over) {  // pages that no other copy reads may be written to again
  std::lock_guard<std::recursive_mutex> g(readings_m);
  std::vector<Reading> ended;
  auto kept = std::partition(readings.begin(), readings.end(), [&](auto& r) { return !is_over(r); });
  ended.assign(kept, readings.end());
  readings.erase(kept, readings.end());
  for (auto& r : ended)
    for (auto page = page_of(r.begin); page < r.end; page += PAGE)
      if (!is_read(page, page + PAGE)) allow(page, page + PAGE, true);
}
static void write_as_device(void* to, const void* from, size_t nbytes) {
  std::lock_guard<std::recursive_mutex> g(readings_m);
  const auto begin = reinterpret_cast<uintptr_t>(to);
  const bool was_read = is_read(page_of(begin), page_after(begin + nbytes));
  if (was_read) allow(begin, begin + nbytes, true);
  memcpy(to, from, nbytes);
  for (auto page = page_of(begin); was_read && page < begin + nbytes; page += PAGE)
    if (is_read(page, page + PAGE)) allow(page, page + PAGE, false);
}
static void learn(const Clock& clock) {
  Clock known;
  { std::lock_guard<std::mutex> g(clocks_m); join(host, clock); known = host; }
  end_readings([&](const Reading& r) { return is_before(r.by, known); });
  land_if([&](Landing& l) { return l.is_awaited = l.is_awaited || (size_t(l.stream) < known.size() && known[l.stream] >= l.tick); });
}
static void learn(Queue& q) {
  Clock clock;
  { std::lock_guard<std::mutex> g(clocks_m); clock = q.clock; }
  learn(clock);
}

// Queue "set" on a stream; the flag knows what has happened then.
static FlagPtr record(Queue& q) {
  auto flag = std::make_shared<Flag>();
  { std::lock_guard<std::mutex> g(clocks_m); join(q.clock, host); flag->clock = q.clock; }
  q.push([flag] { flag->set(); });
  return flag;
}
static void await(Queue& q, const FlagPtr& flag) {
  { std::lock_guard<std::mutex> g(clocks_m); join(q.clock, flag->clock); }
  q.push([flag] { flag->wait(); });
}
static void host_await(const FlagPtr& flag) { flag->wait(); learn(flag->clock); }

// Races

static void split(uintptr_t at) {
  auto it = cells.upper_bound(at);
  if (it == cells.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Cell right = it->second;
  it->second.end = at;
  cells.emplace(at, std::move(right));
}
static bool is_locked(const void* p);
static void found_race(const Access& a, bool a_writes, const Launch& b, bool b_writes, int64_t nbytes) {
  if (races.size() < 100) races.push_back({log_[a.launch], b, a_writes, b_writes, nbytes});
}
static void touch(const Range& r, const Access& own, const Clock& clock, const Launch& launch) {
  if (r.begin >= r.end) return;
  split(r.begin);
  split(r.end);
  auto it = cells.lower_bound(r.begin);
  uintptr_t at = r.begin;
  std::vector<Range> gaps;
  bool told = false;
  for (; it != cells.end() && it->first < r.end; ++it) {
    if (it->first > at) gaps.push_back({at, it->first, false});
    at = it->second.end;
    Cell& cell = it->second;
    const int64_t nbytes = int64_t(cell.end - it->first);
    if (!is_before(cell.write, clock) && !told) { told = true; found_race(cell.write, true, launch, r.is_write, nbytes); }
    if (r.is_write) {
      for (auto& read : cell.reads)
        if (!is_before(read, clock) && !told) { told = true; found_race(read, false, launch, true, nbytes); }
      cell.write = own;
      cell.reads.clear();
    } else {
      bool has = false;
      for (auto& read : cell.reads) if (read.stream == own.stream) { read = own; has = true; }
      if (!has) cell.reads.push_back(own);
    }
  }
  if (at < r.end) gaps.push_back({at, r.end, false});
  for (auto& gap : gaps) {
    Cell cell{gap.end, {}, {}};
    if (r.is_write) cell.write = own; else cell.reads.push_back(own);
    cells.emplace(gap.begin, std::move(cell));
  }
  if (r.is_write) {  // one cell again, so that their number stays small
    auto first = cells.lower_bound(r.begin);
    first->second.end = r.end;
    cells.erase(std::next(first), cells.lower_bound(r.end));
  }
}
// The host writes to a page that a copy reads. Streams may: their writes have clocks of their own.
static struct sigaction before_us;
static void on_write(int number, siginfo_t* info, void* context) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  if (!is_locked(info->si_addr)) {
    sigaction(SIGSEGV, &before_us, nullptr);  // not ours: it comes again
    return;
  }
  const int place = is_device ? -1 : here();  // takes Python's lock: before ours
  std::lock_guard<std::recursive_mutex> g(readings_m);
  auto it = std::find_if(readings.begin(), readings.end(), [&](auto& r) { return r.begin <= at && at < r.end; });
  if (is_device || it == readings.end()) {
    allow(at, at + 1, true);
    return;
  }
  const Access by = it->by;
  const auto nbytes = int64_t(it->end - it->begin);
  const Launch write{"a write", label, "", -1, place};
  {
    std::lock_guard<std::mutex> c(clocks_m);
    found_race(by, false, write, true, nbytes);
  }
  end_readings([&](const Reading& r) { return r.begin <= at && at < r.end; });
  allow(at, at + 1, true);
}
static void forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
}
static Launch describe(std::string name, const Queue& q, int place) {
  std::string node;
  if (auto current_node = torch::autograd::get_current_node()) node = current_node->name();
  return {std::move(name), label, node, q.number, place};
}
static std::map<uintptr_t, size_t> segments;  // all memory of devices
static bool is_of_device(uintptr_t at) {
  auto it = segments.upper_bound(at);
  return it != segments.begin() && at < (--it)->first + it->second;
}
// Note a launch on a stream: its accesses, and that it happens after all that the host knows.
static uint32_t note(const std::string& name, Queue& q, const std::vector<Range>& ranges, bool counts_too = true) {
  const int place = here();
  used_devices |= int64_t(1) << q.device;
  Launch launch = describe(name, q, place);
  std::lock_guard<std::mutex> g(clocks_m);
  if (counts_too) counts[name]++;
  join(q.clock, host);
  if (q.clock.size() <= size_t(q.number)) q.clock.resize(q.number + 1);
  Access own{q.number, ++q.clock[q.number], int(log_.size())};
  last_launch = own.launch;
  log_.push_back(launch);
  if (keeps_ranges)
    for (auto& r : ranges) if (is_of_device(r.begin)) log_.back().ranges.push_back(r);
  if (config.checks) for (auto& r : ranges) touch(r, own, q.clock, launch);
  return own.tick;
}
static void ranges_of(const at::Tensor& t, bool is_write, std::vector<Range>& out) {
  if (!t.defined() || t.numel() == 0 || t.is_meta()) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), innermost first
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.size(i) > 1 && t.stride(i) != 0) dims.push_back({t.stride(i), t.size(i)});
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t from = 0;
  while (from < dims.size() && dims[from].first <= run) { run = std::max(run, dims[from].first * (dims[from].second - 1) + run); from++; }
  const auto base = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  std::vector<int64_t> starts{0};
  for (size_t i = from; i < dims.size(); i++) {
    std::vector<int64_t> more;
    for (int64_t k = 0; k < dims[i].second; k++) for (auto s : starts) more.push_back(s + k * dims[i].first);
    starts = std::move(more);
  }
  for (auto s : starts) out.push_back({base + s * t.itemsize(), base + (s + run) * t.itemsize(), is_write});
}

// Memory: a caching allocator with a pool for each stream, as CUDA's

struct Block {
  void* ptr;
  size_t nbytes;
  Queue* owner;
  std::vector<Queue*> users;  // by record_stream
};
static std::mutex memory_m;
static std::map<std::pair<Queue*, size_t>, std::vector<void*>> pools;
static std::map<void*, Block*> live;
struct Usage { int64_t allocated = 0, peak = 0, reserved = 0; };
static Usage usage[MAX_DEVICES];

static void poison(Queue& q, void* ptr, size_t nbytes, const char* name) {
  const auto at = reinterpret_cast<uintptr_t>(ptr);
  note(name, q, {{at, at + nbytes, true}}, false);
  q.push([ptr, nbytes] { memset(ptr, 0xFF, nbytes); });
}
static void release(void* context) {
  auto* block = static_cast<Block*>(context);
  for (auto* user : block->users) await(*block->owner, record(*user));
  poison(*block->owner, block->ptr, block->nbytes, "free");
  std::lock_guard<std::mutex> g(memory_m);
  usage[block->owner->device].allocated -= block->nbytes;
  live.erase(block->ptr);
  pools[{block->owner, block->nbytes}].push_back(block->ptr);
  delete block;
}
static void release_nothing(void*) {}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Device d(PU1, device_now);
    if (n == 0) return {nullptr, nullptr, &release_nothing, d};
    const size_t nbytes = (n + 511) / 512 * 512;
    Queue& q = now(device_now);
    used_devices |= int64_t(1) << device_now;
    void* ptr = nullptr;
    std::lock_guard<std::mutex> g(memory_m);
    Usage& u = usage[device_now];
    auto& pool = pools[{&q, nbytes}];
    TORCH_CHECK_WITH(OutOfMemoryError, u.allocated + int64_t(nbytes) <= config.memory,
      "sim out of memory. Tried to allocate ", nbytes, " bytes; ", u.allocated, " of ", config.memory, " are in use.");
    if (!pool.empty()) {
      ptr = pool.back();
      pool.pop_back();
    } else {
      TORCH_CHECK(posix_memalign(&ptr, 4096, nbytes) == 0, "the host has no memory for a simulated device");
      memset(ptr, 0xFF, nbytes);
      std::lock_guard<std::mutex> c(clocks_m);
      forget(reinterpret_cast<uintptr_t>(ptr), reinterpret_cast<uintptr_t>(ptr) + nbytes);  // it was the host's
      segments[reinterpret_cast<uintptr_t>(ptr)] = nbytes;
      u.reserved += nbytes;
    }
    auto* block = new Block{ptr, nbytes, &q, {}};
    live[ptr] = block;
    u.allocated += nbytes;
    u.peak = std::max(u.peak, u.allocated);
    if (keeps_ranges) {
      const auto at = reinterpret_cast<uintptr_t>(ptr);
      std::lock_guard<std::mutex> c(clocks_m);
      log_.push_back({"allocate", "", "", q.number, 0, {{at, at + nbytes, true}}});
    }
    return {ptr, block, &release, d};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    const auto a = reinterpret_cast<uintptr_t>(to), b = reinterpret_cast<uintptr_t>(from);
    Queue& q = now(device_now);
    note("copy", q, {{b, b + n, false}, {a, a + n, true}});
    q.push([=] { memcpy(to, from, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override {
    std::lock_guard<std::mutex> g(memory_m);
    auto it = live.find(p.get());
    Queue* user = &queue(s.device_index(), s.id());
    if (it != live.end() && user != it->second->owner) it->second->users.push_back(user);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory_m);
    c10::CachingDeviceAllocator::DeviceStats s;
    s.allocated_bytes[0].current = usage[d].allocated;
    s.allocated_bytes[0].peak = usage[d].peak;
    s.reserved_bytes[0].current = usage[d].reserved;
    return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { usage[d].peak = usage[d].allocated; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory_m);
    return {size_t(config.memory - usage[d].allocated), size_t(config.memory)};
  }
};
static Allocator allocator;

// Page-locked host memory. As torch's, it is used again only when the copies that read it are over.
struct Locked {
  size_t nbytes;
  std::vector<FlagPtr> users;
};
static std::mutex locked_m;
static std::map<uintptr_t, Locked> locked;
static std::vector<uintptr_t> unlocked;  // freed
static std::map<uintptr_t, Locked>::iterator locked_at(const void* p) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  auto it = locked.upper_bound(at);
  if (it == locked.begin()) return locked.end();
  --it;
  return at < it->first + it->second.nbytes ? it : locked.end();
}
static bool is_locked(const void* p) { std::lock_guard<std::mutex> g(locked_m); return locked_at(p) != locked.end(); }
struct Pinned final : c10::Allocator {
  static void give(void* p) {
    if (!p) return;
    std::lock_guard<std::mutex> g(locked_m);
    unlocked.push_back(reinterpret_cast<uintptr_t>(p));
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n == 0) return {p, p, &give, Device(c10::kCPU)};
    const size_t nbytes = (n + 4095) / 4096 * 4096;
    std::lock_guard<std::mutex> g(locked_m);
    for (size_t i = 0; i < unlocked.size(); i++) {
      Locked& old = locked.at(unlocked[i]);
      const bool is_over = std::all_of(old.users.begin(), old.users.end(), [](auto& f) { return f->query(); });
      if (old.nbytes != nbytes || !is_over) continue;
      p = reinterpret_cast<void*>(unlocked[i]);
      unlocked.erase(unlocked.begin() + i);
      old.users.clear();
      break;
    }
    if (!p) {
      TORCH_CHECK(posix_memalign(&p, 4096, nbytes) == 0, "no page-locked memory");
      locked[reinterpret_cast<uintptr_t>(p)] = {nbytes, {}};
    }
    land(p, nbytes);
    const auto at = reinterpret_cast<uintptr_t>(p);
    end_readings([&](const Reading& r) { return at <= r.begin && r.begin < at + nbytes; });
    memset(p, 0xFF, nbytes);
    std::lock_guard<std::mutex> c(clocks_m);
    forget(reinterpret_cast<uintptr_t>(p), reinterpret_cast<uintptr_t>(p) + nbytes);
    return {p, p, &give, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static Pinned pinned;

// Generators: a kernel draws from a CPU generator whose seed is drawn as it is launched
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  std::mutex m;
  explicit Generator(DeviceIndex d)
      : GeneratorImpl(Device(PU1, d), c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator next() {
    std::lock_guard<std::mutex> g(m);
    return at::make_generator<at::CPUGeneratorImpl>(inner.get<at::CPUGeneratorImpl>()->random64());
  }
};
static const at::Generator& default_generator(DeviceIndex d) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MAX_DEVICES; i++) made.push_back(at::make_generator<Generator>(DeviceIndex(i)));
    return made;
  }();
  return all.at(d < 0 ? device_now : d);
}

// Streams and events

struct Event {
  std::mutex m;
  FlagPtr flag;
  FlagPtr get() { std::lock_guard<std::mutex> g(m); return flag; }
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = PU1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static int index(Device d) { return d.index() < 0 ? device_now : d.index(); }
  static Queue& of(const Stream& s) { return queue(s.device_index(), s.id()); }
  static Stream made(int device, StreamId id) { return Stream(Stream::UNSAFE, Device(PU1, DeviceIndex(device)), id); }
  c10::DeviceType type() const override { return PU1; }
  Device exchangeDevice(Device d) const override { Device old(PU1, device_now); device_now = index(d); return old; }
  Device getDevice() const override { return {PU1, device_now}; }
  void setDevice(Device d) const override { device_now = index(d); }
  void uncheckedSetDevice(Device d) const noexcept override { device_now = index(d); }
  Stream getStream(Device d) const override { return made(index(d), current[index(d)]); }
  Stream getDefaultStream(Device d) const override { return made(index(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return made(index(d), new_stream(index(d))); }
  Stream getNewStream(Device d, int) const override { return made(index(d), new_stream(index(d))); }
  Stream exchangeStream(Stream s) const override {
    auto& slot = current[s.device_index()];
    Stream old = made(s.device_index(), slot);
    slot = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &of(s); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(config.devices); }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new Event;
    if (is_mutant()) return;
    auto* event = static_cast<Event*>(*e);
    auto flag = sim::record(of(s));
    std::lock_guard<std::mutex> g(event->m);
    event->flag = flag;
  }
  void block(void* e, const Stream& s) const override {
    auto flag = e ? static_cast<Event*>(e)->get() : nullptr;
    if (flag && !is_mutant()) await(of(s), flag);
  }
  bool queryEvent(void* e) const override {
    auto flag = e ? static_cast<Event*>(e)->get() : nullptr;
    if (flag && !flag->query()) return false;
    if (flag && !is_blind) learn(flag->clock);
    return true;
  }
  void synchronizeEvent(void* e) const override {
    auto flag = e ? static_cast<Event*>(e)->get() : nullptr;
    if (!flag || is_mutant()) return;
    note_wait("event.synchronize");
    host_await(flag);
  }
  bool queryStream(const Stream& s) const override {
    if (!of(s).query()) return false;
    learn(of(s));
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    if (is_mutant()) return;
    note_wait("stream.synchronize");
    of(s).drain();
    learn(of(s));
  }
  void synchronizeDevice(DeviceIndex d) const override {
    if (is_mutant()) return;
    note_wait("device.synchronize");
    std::vector<Queue*> all;
    { std::lock_guard<std::mutex> g(queues_m); all = by_device.at(d < 0 ? device_now : d); }
    for (auto* q : all) { q->drain(); learn(*q); }
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator.recordStream(p, s); }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    auto first = static_cast<Event*>(a)->get(), last = static_cast<Event*>(b)->get();
    TORCH_CHECK(first->query() && last->query(), "sim: an event that is not over has no time");
    return std::chrono::duration<double, std::milli>(last->when - first->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex d) const override { return used_devices >> d & 1; }
  DeviceIndex deviceCount() const override { return DeviceIndex(config.devices); }
  void setCurrentDevice(DeviceIndex d) const override { device_now = d; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = device_now; device_now = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { auto old = device_now; if (d >= 0) device_now = d; return old; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* p) const override { return is_locked(p); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? device_now : d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* s = storage.unsafeGetStorageImpl();
    if (n == s->nbytes()) return;
    auto old_device = device_now;
    device_now = s->device().index();
    auto data = allocator.allocate(n);
    const size_t kept = std::min(n, s->nbytes());
    if (kept && s->data()) allocator.copy_data(data.get(), s->data(), kept);
    s->set_data_ptr_noswap(std::move(data));
    s->set_nbytes(n);
    device_now = old_device;
  }
};

// Kernels

static at::Tensor view_of_bytes(const at::Tensor& t) {  // the same bytes as a tensor of the CPU that keeps nothing alive
  if (!t.defined() || (t.device().type() != PU1 && !t.is_cpu())) return t;
  c10::InferenceMode mode(false);
  static char none[64];
  void* base = t.storage().unsafeGetStorageImpl()->mutable_data();
  char* at = base ? static_cast<char*>(base) + t.storage_offset() * t.itemsize() : none;
  auto out = at::from_blob(at, t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()));
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
static at::Tensor to_meta(const at::Tensor& t) {
  if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return t;
  auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}
static at::Tensor like(const at::Tensor& t, DeviceIndex d) {  // as the meta device says
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(Device(PU1, d)));
}
template <class F>
static c10::IValue mapped(const c10::IValue& v, F f, Device d) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> out;
    for (at::Tensor t : v.toTensorList()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList()) out.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  if (v.isDevice() && v.toDevice().type() == PU1) return d;
  return v;
}
template <class F>
static void each(const c10::IValue& v, F f) {
  if (v.isTensor()) { if (v.toTensor().defined()) f(v.toTensor()); }
  else if (v.isTensorList()) { for (at::Tensor t : v.toTensorList()) f(t); }
  else if (v.isOptionalTensorList()) { for (std::optional<at::Tensor> t : v.toOptionalTensorList()) if (t && t->defined()) f(*t); }
}
static bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

// What the CPU's kernel saves for backward differs from a device's in dtype: these compute in fp32.
static const std::set<std::string> WIDENED = {
  "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::_fused_rms_norm",
  "aten::_fused_rms_norm_backward", "aten::native_group_norm", "aten::native_group_norm_backward"};

struct Call {  // one kernel, to run later
  c10::OperatorHandle op;
  torch::jit::Stack cpu;
  std::vector<std::vector<at::Tensor>> outs;  // by return value; empty where it is an argument
  bool widens;
  void operator()() {
    std::vector<std::pair<at::Tensor, at::Tensor>> back;
    if (widens)
      for (size_t i = 0; i < cpu.size(); i++) {
        const bool w = writes(op.schema().arguments()[i]);
        cpu[i] = mapped(cpu[i], [&](const at::Tensor& t) {
          if (!t.defined() || !at::isReducedFloatingType(t.scalar_type())) return t;
          auto wide = t.to(at::kFloat);
          if (w) back.push_back({t, wide});
          return wide;
        }, Device(c10::kCPU));
      }
    op.callBoxed(&cpu);
    for (auto& [narrow, wide] : back) narrow.copy_(wide);
    for (size_t r = 0; r < outs.size(); r++) {
      size_t i = 0;
      if (!outs[r].empty()) each(cpu[r], [&](const at::Tensor& got) { outs[r][i++].copy_(got); });
    }
  }
};
static DeviceIndex device_of(const torch::jit::Stack& args) {
  int found = -1;
  for (auto& v : args) {
    each(v, [&](const at::Tensor& t) { if (t.device().type() == PU1) {
      TORCH_CHECK(found < 0 || found == t.device().index(), "Expected all tensors to be on the same device, found sim:", found, " and ", t.device());
      found = t.device().index();
    } else TORCH_CHECK(t.dim() == 0, "Expected all tensors to be on the same device, found ", t.device(), " beside sim"); });
    if (v.isDevice() && v.toDevice().type() == PU1 && v.toDevice().has_index() && found < 0) found = v.toDevice().index();
  }
  return DeviceIndex(found < 0 ? device_now : found);
}
// An operation whose shapes depend on numbers: the host waits for the stream, as a device's does.
static void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack, DeviceIndex d, const std::vector<Range>& ranges) {
  const size_t n = op.schema().arguments().size();
  note_wait(op.schema().name());
  Queue& q = now(d);
  note(op.schema().name(), q, ranges);
  q.drain();
  learn(q);
  torch::jit::Stack cpu;
  for (size_t i = stack->size() - n; i < stack->size(); i++) cpu.push_back(mapped((*stack)[i], view_of_bytes, Device(c10::kCPU)));
  { at::NoGradGuard no_grad; c10::InferenceMode mode(false); at::AutoDispatchBelowADInplaceOrView below; op.callBoxed(&cpu); }
  std::vector<c10::IValue> out;
  const auto& returns = op.schema().returns();
  for (size_t r = 0; r < returns.size(); r++) {
    int from = -1;
    if (returns[r].alias_info())
      for (size_t i = 0; i < n; i++) if (writes(op.schema().arguments()[i]) && op.schema().arguments()[i].alias_info()->beforeSets() == returns[r].alias_info()->beforeSets()) from = int(i);
    out.push_back(from >= 0 ? (*stack)[stack->size() - n + from] : mapped(cpu[r], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto made = like(t, d);
      auto to = view_of_bytes(made);
      std::vector<Range> written;
      ranges_of(to, true, written);
      note("result of " + op.schema().name(), q, written, false);
      q.push([to, t]() { to.copy_(t); });
      return made;
    }, Device(PU1, d)));
  }
  torch::jit::drop(*stack, n);
  for (auto& v : out) stack->push_back(std::move(v));
}
static bool needs_meta(const c10::FunctionSchema& schema) {  // it returns something new, or resizes
  if (schema.overload_name().find("out") != std::string::npos || schema.name().find("resize") != std::string::npos) return true;
  for (auto& r : schema.returns()) if (!r.alias_info()) return true;
  return false;
}
// Shapes of results, by operation and arguments: the meta device's kernels are Python, and slow.
static std::mutex shapes_m;
static std::unordered_map<std::string, torch::jit::Stack> shapes;
template <class T>
static void spell(std::string& key, const T& value) { key.append(reinterpret_cast<const char*>(&value), sizeof(T)); }
static bool spell_all(std::string& key, const c10::IValue& v) {  // false: no key for such a value
  if (v.isNone() || v.isGenerator()) { key += 'n'; return true; }
  if (v.isTensor()) {
    const auto& t = v.toTensor();
    if (!t.defined()) { key += 'u'; return true; }
    key += t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : t.is_conj() || t.is_neg() ? 'c' : 't';
    spell(key, t.scalar_type());
    spell(key, t.device().type());
    spell(key, t.dim());
    for (auto n : t.sizes()) spell(key, n);
    for (auto n : t.strides()) spell(key, n);
    return true;
  }
  if (v.isList()) {
    key += '[';
    for (const c10::IValue& item : v.toListRef()) if (!spell_all(key, item)) return false;
    key += ']';
    return true;
  }
  if (v.isBool()) { key += v.toBool() ? 'y' : 'f'; return true; }
  if (v.isInt()) { key += 'i'; spell(key, v.toInt()); return true; }
  if (v.isDouble()) { key += 'd'; spell(key, v.toDouble()); return true; }
  if (v.isDevice()) { key += 'D'; return true; }
  if (v.isString()) { key += 's' + v.toStringRef() + '\0'; return true; }
  return false;
}
static void shape(const c10::OperatorHandle& op, const std::vector<c10::IValue>& args, torch::jit::Stack& meta) {
  std::string key = op.schema().name() + '.' + op.schema().overload_name();
  spell(key, at::get_default_dtype_as_scalartype());
  bool has_key = true;
  for (auto& a : args) has_key = has_key && spell_all(key, a);
  if (has_key) {
    std::lock_guard<std::mutex> g(shapes_m);
    if (auto it = shapes.find(key); it != shapes.end()) { meta = it->second; return; }
  }
  op.callBoxed(&meta);
  if (!has_key) return;
  std::lock_guard<std::mutex> g(shapes_m);
  shapes.emplace(std::move(key), meta);
}
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const size_t n = formal.size();
  std::vector<c10::IValue> args(stack->end() - n, stack->end());
  at::AutoDispatchBelowADInplaceOrView below;
  const DeviceIndex d = device_of(args);
  std::vector<Range> ranges;
  for (size_t i = 0; i < n; i++) each(args[i], [&](const at::Tensor& t) { ranges_of(t, writes(formal[i]), ranges); });
  torch::jit::Stack meta;
  if (needs_meta(schema)) {
    for (auto& a : args) meta.push_back(a.isGenerator() ? c10::IValue() : mapped(a, to_meta, Device(c10::kMeta)));
    auto before = meta;
    const bool resizes = schema.overload_name().find("out") != std::string::npos;
    try { if (resizes) op.callBoxed(&meta); else shape(op, args, meta); } catch (const std::exception&) { run_now(op, stack, d, ranges); return; }
    for (size_t i = 0; resizes && i < n; i++)
      if (writes(formal[i]) && args[i].isTensor() && args[i].toTensor().defined() && before[i].toTensor().sizes() != args[i].toTensor().sizes()) {
        args[i].toTensor().resize_(before[i].toTensor().sizes());
        ranges_of(args[i].toTensor(), true, ranges);
      }
  }
  std::vector<c10::IValue> results;
  Call call{op, {}, {}, WIDENED.count(schema.name()) > 0};
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto* info = schema.returns()[r].alias_info();
    int from = -1;
    for (size_t i = 0; info && i < n; i++)
      if (formal[i].alias_info() && formal[i].alias_info()->beforeSets() == info->beforeSets()) from = int(i);
    TORCH_CHECK(from < 0 || writes(formal[from]), "sim: no view ", schema.name());
    call.outs.emplace_back();
    if (from >= 0) { results.push_back(args[from]); continue; }
    results.push_back(mapped(meta[r], [&](const at::Tensor& t) { return like(t, d); }, Device(PU1, d)));
    each(results.back(), [&](const at::Tensor& t) { call.outs.back().push_back(view_of_bytes(t)); ranges_of(t, true, ranges); });
  }
  for (size_t i = 0; i < n; i++) {
    const bool draws = formal[i].type()->str().find("Generator") != std::string::npos;
    if (draws) {
      auto own = args[i].isNone() ? default_generator(d) : args[i].toGenerator();
      call.cpu.push_back(own.device().type() == PU1 ? static_cast<Generator*>(own.unsafeGetGeneratorImpl())->next() : own);
    } else {
      call.cpu.push_back(mapped(args[i], [](const at::Tensor& t) { return t.defined() && t.is_cpu() ? t.clone() : view_of_bytes(t); }, Device(c10::kCPU)));
    }
  }
  Queue& q = now(d);
  note(schema.name(), q, ranges);
  q.push(std::move(call));
  torch::jit::drop(*stack, n);
  for (auto& v : results) stack->push_back(std::move(v));
}
static at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> d, std::optional<bool>, std::optional<c10::MemoryFormat> f) {
  c10::impl::InlineDeviceGuard<Guard> guard(Device(PU1, DeviceIndex(d && d->has_index() ? d->index() : device_now)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), f);
}
static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> d, std::optional<bool>) {
  c10::impl::InlineDeviceGuard<Guard> guard(Device(PU1, DeviceIndex(d && d->has_index() ? d->index() : device_now)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
static at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef a, c10::SymIntArrayRef b, std::optional<c10::SymInt> o) { return at::cpu::as_strided_symint(t, a, b, o); }
static const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef s, std::optional<at::MemoryFormat> f) { return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(s), f); }
static at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef a, c10::SymIntArrayRef b) { return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(a), C10_AS_INTARRAYREF_SLOW(b)); }
static at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef s) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(s)); }
static at::Tensor& set_source(at::Tensor& a, at::Storage s, int64_t o, c10::IntArrayRef sz, c10::IntArrayRef st) { return at::cpu::set_(a, s, o, sz, st); }

// Copies between host and device wait for neither only from or to page-locked memory, as CUDA's.
static at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (src.numel() == 0) return dst;
  const bool to_device = dst.device().type() == PU1, from_device = src.device().type() == PU1;
  const at::Tensor& on_device = to_device ? dst : src;
  const at::Tensor& on_host = to_device ? src : dst;
  std::vector<Range> ranges;
  ranges_of(src, false, ranges);
  ranges_of(dst, true, ranges);
  auto a = view_of_bytes(src), b = view_of_bytes(dst);
  std::function<void()> copy = [a, b]() { b.copy_(a); };
  if (!from_device && a.is_non_overlapping_and_dense()) copy = [a, b]() { land(a.const_data_ptr(), a.nbytes()); b.copy_(a); };
  Queue& q = now(on_device.device().index());
  if (to_device && from_device) {
    Queue& other = now(src.device().index());
    if (&q != &other) await(q, record(other));  // between devices: behind both, and both behind it
    note("copy", q, ranges);
    q.push(copy);
    if (&q != &other) await(other, record(q));
    return dst;
  }
  const std::string name = to_device ? "copy to device" : "copy to host";
  const uint32_t tick = note(name, q, ranges);
  const bool pageable = !is_locked(on_host.const_data_ptr());
  if (!non_blocking || pageable) {
    note_wait(name + (non_blocking ? " of pageable memory" : ""));
    q.push(copy);
    q.drain();
    learn(q);
    return dst;
  }
  if (to_device && config.checks)
    for (auto& r : ranges) if (!r.is_write) protect(reinterpret_cast<void*>(r.begin), r.end - r.begin, {q.number, tick, last_launch});
  if (!to_device && b.is_contiguous()) {
    auto landing = std::make_shared<Landing>();
    landing->to = static_cast<char*>(b.data_ptr());
    landing->bytes.resize(b.nbytes());
    landing->stream = q.number;
    landing->tick = tick;
    { std::lock_guard<std::mutex> g(landings_m); landings.push_back(landing); }
    copy = [a, b, landing]() {  // kernels before it may read what was there
      land(landing->to, landing->bytes.size());
      write_as_device(landing->to, std::vector<char>(landing->bytes.size(), char(0xFF)).data(), landing->bytes.size());
      at::from_blob(landing->bytes.data(), b.sizes(), b.options()).copy_(a);
      { std::lock_guard<std::mutex> g(landings_m); landing->has_run = true; }
      land_if([&](const Landing& l) { return &l == landing.get() && l.is_awaited; });
    };
  }
  q.push(copy);
  auto flag = record(q);
  std::lock_guard<std::mutex> g(locked_m);
  locked_at(on_host.const_data_ptr())->second.users.push_back(flag);
  return dst;
}
static at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) { dst.resize_(src.sizes()); return copy_from(src, dst, false); }
static at::Scalar item(const at::Tensor& t) {
  note_wait("item");
  Queue& q = now(t.device().index());
  std::vector<Range> ranges;
  ranges_of(t, false, ranges);
  note("item", q, ranges);
  q.drain();
  learn(q);
  return view_of_bytes(t).item();
}
static std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(x, mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
// `parameter.data = parameter.data.to("sim")`: as between CPU and CUDA
static bool has_compatible_type(const at::Tensor& a, const at::Tensor& b) { return a.layout() == b.layout(); }
static void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", static_cast<at::Tensor& (*)(at::Tensor&, const at::Tensor&)>(at::native::set_tensor_));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("native_dropout", native_dropout);
  m.impl("_foreach_copy_", foreach_copy);
  for (auto name : {"native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward", "split_with_sizes_copy.out", "_chunk_cat", "_chunk_cat.out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // one kernel for a list of tensors, as on CUDA: else the composite would launch one for each
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0 && op.name != "aten::_foreach_copy_" && op.overload_name.find("out") == std::string::npos)
      m.impl((op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

static void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool is_one = true;  // kernel: all on the device, of equal sizes
  for (size_t i = 0; i < to.size(); i++) is_one = is_one && from[i].device() == to[i].device() && from[i].sizes() == to[i].sizes();
  if (!is_one) {
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], non_blocking);
    return;
  }
  std::vector<Range> ranges;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < to.size(); i++) {
    ranges_of(from[i], false, ranges);
    ranges_of(to[i], true, ranges);
    pairs.push_back({view_of_bytes(to[i]), view_of_bytes(from[i])});
  }
  if (to.empty()) return;
  Queue& q = now(to[0].device().index());
  note("aten::_foreach_copy_", q, ranges);
  q.push([pairs]() { for (auto& [b, a] : pairs) b.copy_(a); });
}

// Collectives: on a stream of their own, as NCCL's; the bytes go by another backend

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
struct Collective {
  std::string text;              // the same on every rank
  std::vector<Range> ranges;
  std::vector<at::Tensor> kept;  // by the work, until it is waited for
  std::function<std::vector<WorkPtr>()> start;
  std::function<void()> finish;
};
struct Communicator {
  std::mutex m;
  std::condition_variable cv;
  bool is_over = false;
  std::string failure;
  void end(const std::string& why) {
    { std::lock_guard<std::mutex> g(m); if (!is_over) { is_over = true; failure = why; } }
    cv.notify_all();
  }
  bool over() { std::lock_guard<std::mutex> g(m); return is_over; }
  void await(const WorkPtr& work) {  // on the communicator's stream; returns early if it is ended
    auto done = std::make_shared<bool>(false);
    auto self = this;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try { future = work->getFuture(); } catch (const c10::Error&) { work->wait(); return; }  // gloo's send and recv have none
    future->addCallback([self, done](auto&) { { std::lock_guard<std::mutex> g(self->m); *done = true; } self->cv.notify_all(); });
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return *done || is_over; });
    TORCH_CHECK(*done, "communicator was aborted: ", failure);
    l.unlock();
    work->wait();  // raises its error
  }
};
struct QueuedWork final : c10d::Work {
  FlagPtr flag;
  int device;
  std::vector<at::Tensor> kept;
  std::shared_ptr<Communicator> communicator;
  QueuedWork(FlagPtr f, int device, std::vector<at::Tensor> kept, std::shared_ptr<Communicator> c)
      : Work(-1, c10d::OpType::UNKNOWN), flag(std::move(f)), device(device), kept(std::move(kept)), communicator(std::move(c)) {}
  bool isCompleted() override { if (!flag->query()) return false; learn(flag->clock); return true; }
  bool isSuccess() const override { return flag->query() && !communicator->over(); }
  void synchronize() override {
    if (!is_mutant()) sim::await(now(device), flag);
    kept.clear();
  }
  // a wait with a limit blocks the host, and ends the communicator when the limit is over
  bool wait(std::chrono::milliseconds limit) override {
    synchronize();
    if (limit.count() == 0) return true;
    note_wait("work.wait(limit)");
    std::unique_lock<std::mutex> l(flag->m);
    if (flag->cv.wait_for(l, limit, [&] { return flag->is_set; })) return true;
    l.unlock();
    communicator->end("a wait with a limit was over");
    TORCH_CHECK(false, "simccl: a wait with a limit was over; the communicator was aborted");
  }
  std::vector<at::Tensor> result() override { return kept; }
};
struct PartOfGroup final : c10d::Work {  // what a collective returns between startCoalescing and endCoalescing
  PartOfGroup() : Work(-1, c10d::OpType::UNKNOWN) {}
  bool isCompleted() override { return false; }
  bool wait(std::chrono::milliseconds) override { TORCH_CHECK(false, "simccl: wait for the work of the whole group"); }
};
static int64_t digest(const std::string& s) {
  uint64_t h = 1469598103934665603ull;
  for (unsigned char c : s) h = (h ^ c) * 1099511628211ull;
  return int64_t(h >> 1);
}

struct SimCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  std::shared_ptr<Communicator> communicator = std::make_shared<Communicator>();
  std::map<std::pair<int, int>, StreamId> streams;  // by device, and peer (-1: all ranks)
  std::mutex m;
  std::vector<Collective> group;
  std::vector<int> group_peers;
  int group_device = -1;
  bool is_coalescing = false;
  std::atomic<int64_t> number{0};
  SimCCL(c10::intrusive_ptr<c10d::Backend> b, int rank, int size) : Backend(rank, size), inner(std::move(b)) {}
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number; }
  c10d::ErrorType getError() override { return communicator->over() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS; }
  void abort() override { communicator->end("abort was called"); }
  void shutdown() override { communicator->end("it was shut down"); }

  void startCoalescing() override { is_coalescing = true; }
  WorkPtr endCoalescing() override {
    is_coalescing = false;
    auto all = std::move(group);
    group.clear();
    if (all.empty()) return nullptr;
    const bool is_between_two = group_peers.front() >= 0;
    group_peers.clear();
    return launch(std::move(all), group_device, is_between_two ? -2 : -1, true);
  }
  WorkPtr add(Collective c, int device, bool is_async, int peer = -1) {
    for (auto& t : c.kept) TORCH_CHECK(t.is_contiguous() && t.device().type() == PU1, c.text, ": contiguous tensors of a device");
    if (!is_coalescing) { std::vector<Collective> one; one.push_back(std::move(c)); return launch(std::move(one), device, peer, is_async); }
    group.push_back(std::move(c));
    group_peers.push_back(peer);
    group_device = device;
    return c10::make_intrusive<PartOfGroup>();
  }
  // Ranks say what they begin: another order, or other sizes, would hang or mix bytes on a device.
  void compare(const std::string& text, int64_t index) {
    if (getSize() == 1) return;
    const int64_t width = 32;
    auto own = at::zeros({width}, at::kLong);
    own[0] = digest(text);
    own[1] = index;
    strncpy(static_cast<char*>(own.mutable_data_ptr()) + 16, text.c_str(), (width - 2) * 8 - 1);
    auto all = at::empty({width * getSize()}, at::kLong);
    communicator->await(inner->_allgather_base(all, own));
    auto rows = all.view({getSize(), width});
    for (int r = 0; r < getSize(); r++) {
      if (rows[r][0].item<int64_t>() == digest(text) && rows[r][1].item<int64_t>() == index) continue;
      std::string theirs(static_cast<const char*>(rows[r].const_data_ptr()) + 16);
      auto why = "rank " + std::to_string(getRank()) + " began " + text + " as number " + std::to_string(index) + ", rank " + std::to_string(r) + " " + theirs + " as number " + std::to_string(rows[r][1].item<int64_t>());
      communicator->end(why);
      TORCH_CHECK(false, "simccl: ranks differ: ", why);
    }
  }
  WorkPtr launch(std::vector<Collective> all, int device, int peer, bool is_async) {
    if (communicator->over()) TORCH_CHECK(false, "simccl: the communicator was aborted: ", communicator->failure);
    StreamId id;
    {
      std::lock_guard<std::mutex> g(m);
      auto it = streams.find({device, peer});
      if (it == streams.end()) it = streams.emplace(std::make_pair(device, peer), new_stream(device)).first;
      id = it->second;
    }
    Queue& own = queue(device, id);
    await(own, record(now(device)));
    std::string text;
    std::vector<Range> ranges;
    std::vector<at::Tensor> kept;
    for (auto& c : all) {
      text += (text.empty() ? "" : "; ") + c.text;
      ranges.insert(ranges.end(), c.ranges.begin(), c.ranges.end());
      kept.insert(kept.end(), c.kept.begin(), c.kept.end());
      c.kept.clear();
    }
    note(all.size() > 1 ? "group of collectives" : text.substr(0, text.find(' ')), own, ranges);
    const bool compares = peer == -1;
    const int64_t index = compares ? number++ : 0;
    c10::intrusive_ptr<SimCCL> self = c10::intrusive_ptr<SimCCL>::unsafe_reclaim_from_nonowning(this);
    own.push([self, all, text, index, compares]() {
      try {
        if (compares) self->compare(text, index);
        std::vector<WorkPtr> works;
        for (auto& c : all) for (auto& w : c.start()) works.push_back(w);
        for (auto& w : works) self->communicator->await(w);
        for (auto& c : all) if (c.finish) c.finish();
      } catch (const std::exception& e) {
        if (!self->communicator->over()) self->communicator->end(e.what());
        throw;
      }
    });
    auto work = c10::make_intrusive<QueuedWork>(record(own), device, std::move(kept), communicator);
    if (!is_async) work->synchronize();
    return work;
  }
  static std::string words(const char* name, const at::Tensor& t, int64_t numel) { return std::string(name) + " of " + std::to_string(numel) + " " + c10::toString(t.scalar_type()); }
  static void reads(Collective& c, const at::Tensor& t) { ranges_of(t, false, c.ranges); c.kept.push_back(t); }
  static void fills(Collective& c, const at::Tensor& t) { ranges_of(t, true, c.ranges); c.kept.push_back(t); }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& own, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.numel() == own.numel() * getSize() && out.scalar_type() == own.scalar_type(), "simccl: all_gather wants ", getSize(), " equal pieces");
    Collective c{words("all_gather", own, own.numel())};
    reads(c, own);
    fills(c, out);
    auto a = view_of_bytes(out), b = view_of_bytes(own);
    c.start = [=, in = inner]() mutable { auto piece = b.clone(); return std::vector<WorkPtr>{in->_allgather_base(a, piece)}; };
    return add(std::move(c), out.device().index(), o.asyncOp);
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outs, std::vector<at::Tensor>& ins, const c10d::AllgatherOptions& o) override {
    auto& pieces = outs.at(0);
    Collective c{words("all_gather", ins.at(0), ins[0].numel())};
    reads(c, ins[0]);
    std::vector<at::Tensor> a;
    for (auto& t : pieces) {
      TORCH_CHECK(t.numel() == ins[0].numel(), "simccl: all_gather wants equal pieces");
      fills(c, t);
      a.push_back(view_of_bytes(t));
    }
    auto b = view_of_bytes(ins[0]);
    c.start = [=, in = inner]() mutable { std::vector<std::vector<at::Tensor>> to{a}; std::vector<at::Tensor> from{b.clone()}; return std::vector<WorkPtr>{in->allgather(to, from)}; };
    return add(std::move(c), ins[0].device().index(), o.asyncOp);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override {
    Collective c{words("broadcast", t.at(0), t[0].numel()) + " from " + std::to_string(o.rootRank)};
    if (o.rootRank == getRank()) reads(c, t[0]); else fills(c, t[0]);
    auto a = view_of_bytes(t[0]);
    c10d::BroadcastOptions own;
    own.rootRank = o.rootRank;
    own.rootTensor = o.rootTensor;
    c.start = [=, in = inner]() { std::vector<at::Tensor> v{a}; return std::vector<WorkPtr>{in->broadcast(v, own)}; };
    return add(std::move(c), t[0].device().index(), o.asyncOp);
  }
  Collective reduced(const at::Tensor& t, const c10d::ReduceOp& op) {
    Collective c{words("all_reduce", t, t.numel())};
    fills(c, t);
    auto a = view_of_bytes(t);
    const bool is_mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions own;
    own.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    c.start = [=, in = inner]() { std::vector<at::Tensor> v{a}; return std::vector<WorkPtr>{in->allreduce(v, own)}; };
    if (is_mean) c.finish = [a, n = getSize()]() { a.div_(n); };
    return c;
  }
  WorkPtr allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& o) override { return add(reduced(t.at(0), o.reduceOp), t[0].device().index(), o.asyncOp); }
  WorkPtr reduce(std::vector<at::Tensor>& t, const c10d::ReduceOptions& o) override { return add(reduced(t.at(0), o.reduceOp), t[0].device().index(), o.asyncOp); }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& full, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(full.numel() == out.numel() * getSize(), "simccl: reduce_scatter wants ", getSize(), " equal pieces");
    Collective c{words("reduce_scatter", out, out.numel())};
    reads(c, full);
    fills(c, out);
    auto a = view_of_bytes(out), b = view_of_bytes(full);
    auto sum = std::make_shared<at::Tensor>();
    const bool is_mean = o.reduceOp == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions own;
    own.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
    c.start = [=, in = inner]() { *sum = b.clone(); std::vector<at::Tensor> v{*sum}; return std::vector<WorkPtr>{in->allreduce(v, own)}; };
    c.finish = [=, r = getRank(), n = getSize()]() {
      a.copy_(sum->flatten().narrow(0, r * a.numel(), a.numel()).view_as(a));
      if (is_mean) a.div_(n);
    };
    return add(std::move(c), out.device().index(), o.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& sent, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& o) override {
    auto split = [n = getSize()](const at::Tensor& t, const std::vector<int64_t>& s) { return s.empty() ? std::vector<int64_t>(n, t.dim() ? t.size(0) / n : 0) : s; };
    auto to = split(out, outs), from = split(sent, ins);
    TORCH_CHECK(int(to.size()) == getSize() && int(from.size()) == getSize(), "simccl: all_to_all wants a piece for each rank");
    Collective c{std::string("all_to_all of ") + c10::toString(out.scalar_type())};
    reads(c, sent);
    fills(c, out);
    auto a = view_of_bytes(out), b = view_of_bytes(sent);
    c.start = [=, in = inner]() mutable {
      if (getSize() == 1) { a.copy_(b); return std::vector<WorkPtr>{}; }
      auto mine = at::tensor(from, at::kLong), theirs = at::empty({int64_t(from.size()) * getSize()}, at::kLong);
      communicator->await(in->_allgather_base(theirs, mine));
      for (int r = 0; r < getSize(); r++) {
        const auto sends = theirs.view({getSize(), getSize()})[r][getRank()].item<int64_t>();
        TORCH_CHECK(sends == to[r], "simccl: all_to_all expects ", to[r], " rows of rank ", r, ", which sends ", sends);
      }
      return std::vector<WorkPtr>{in->alltoall_base(a, b, to, from)};
    };
    return add(std::move(c), out.device().index(), o.asyncOp);
  }
  WorkPtr scatter(std::vector<at::Tensor>& outs, std::vector<std::vector<at::Tensor>>& ins, const c10d::ScatterOptions& o) override {
    Collective c{words("scatter", outs.at(0), outs[0].numel()) + " from " + std::to_string(o.rootRank)};
    fills(c, outs[0]);
    std::vector<std::vector<at::Tensor>> from;
    if (o.rootRank == getRank()) from.emplace_back();
    for (auto& t : o.rootRank == getRank() ? ins.at(0) : std::vector<at::Tensor>{}) {
      TORCH_CHECK(t.numel() == outs[0].numel(), "simccl: scatter wants equal pieces");
      reads(c, t);
      from[0].push_back(view_of_bytes(t));
    }
    auto a = view_of_bytes(outs[0]);
    c10d::ScatterOptions own;
    own.rootRank = o.rootRank;
    c.start = [=, in = inner]() mutable { std::vector<at::Tensor> to{a}; return std::vector<WorkPtr>{in->scatter(to, from, own)}; };
    return add(std::move(c), outs[0].device().index(), o.asyncOp);
  }
  WorkPtr send(std::vector<at::Tensor>& t, int to, int tag) override {
    Collective c{words("send", t.at(0), t[0].numel())};
    reads(c, t[0]);
    auto a = view_of_bytes(t[0]);
    c.start = [=, in = inner]() { std::vector<at::Tensor> v{a}; return std::vector<WorkPtr>{in->send(v, to, tag)}; };
    return add(std::move(c), t[0].device().index(), true, to);
  }
  WorkPtr recv(std::vector<at::Tensor>& t, int from, int tag) override {
    Collective c{words("recv", t.at(0), t[0].numel())};
    fills(c, t[0]);
    auto a = view_of_bytes(t[0]);
    c.start = [=, in = inner]() { std::vector<at::Tensor> v{a}; return std::vector<WorkPtr>{in->recv(v, from, tag)}; };
    return add(std::move(c), t[0].device().index(), true, from);
  }
  template <class F>
  WorkPtr grouped(F begin_all) { startCoalescing(); begin_all(); return endCoalescing(); }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins, const c10d::AllgatherOptions& o) override {
    return grouped([&] { for (size_t i = 0; i < outs.size(); i++) _allgather_base(outs[i], ins[i], o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins, const c10d::ReduceScatterOptions& o) override {
    return grouped([&] { for (size_t i = 0; i < outs.size(); i++) _reduce_scatter_base(outs[i], ins[i], o); });
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    return grouped([&] { for (auto& one : t) add(reduced(one, o.reduceOp), one.device().index(), true); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return inner->barrier(o); }
};

static std::vector<std::string> lines_of(int place) {
  std::vector<Frame> frames;
  { std::lock_guard<std::mutex> g(places_m); frames = *places.at(place); }
  std::vector<std::string> out;
  for (auto& f : frames) {
    auto code = py::handle(f.code);
    out.push_back(py::str(code.attr("co_filename")).cast<std::string>() + ":" + std::to_string(f.line) + ":" + py::str(code.attr("co_name")).cast<std::string>());
  }
  return out;
}
static py::dict told(const Launch& l) {
  py::dict d;
  d["name"] = l.name;
  d["label"] = l.label;
  d["node"] = l.node;
  d["stream"] = l.stream;
  d["lines"] = lines_of(l.place);
  py::list ranges;
  for (auto& r : l.ranges) ranges.append(py::make_tuple(r.begin, r.end, r.is_write));
  d["ranges"] = ranges;
  return d;
}
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  c10::SetAllocator(PU1, &allocator, 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  struct sigaction action {};
  action.sa_sigaction = on_write;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before_us);
  m.def("configure", [](int max_us, double share, int seed, int devices, int64_t memory, bool checks) {
    TORCH_CHECK(devices <= MAX_DEVICES);
    config = {max_us, share, seed, devices, memory, checks};
  }, py::arg("max_us") = 300, py::arg("share") = 0.3, py::arg("seed") = 0, py::arg("devices") = 1, py::arg("memory") = int64_t(1) << 34, py::arg("checks") = true);
  m.def("use", [](int d) { device_now = DeviceIndex(d); });
  m.def("current", [] { return int(device_now); });
  m.def("count", [] { return config.devices; });
  m.def("used", [](int d) { return bool(used_devices >> d & 1); });
  m.def("default_generator", [](int d) { return default_generator(DeviceIndex(d)); });
  m.def("label", [](std::string text) { std::swap(label, text); return text; });
  m.def("blind", [](bool so) { is_blind = so; });
  m.def("reset", [] { std::lock_guard<std::mutex> g(clocks_m); host_waits.clear(); counts.clear(); races.clear(); });
  m.def("mutate", [](const std::string& site, bool watches) { std::lock_guard<std::mutex> g(sites_m); mutant = site; watches_sites = watches; sites.clear(); });
  m.def("sites", [] { std::lock_guard<std::mutex> g(sites_m); return sites; });
  m.def("counts", [] { std::lock_guard<std::mutex> g(clocks_m); return counts; });
  m.def("keep_ranges", [](bool so) { keeps_ranges = so; });
  m.def("num_launches", [] { std::lock_guard<std::mutex> g(clocks_m); return log_.size(); });
  m.def("launches", [](size_t from) {
    std::vector<Launch> some;
    { std::lock_guard<std::mutex> g(clocks_m); some.assign(log_.begin() + from, log_.end()); }
    py::list out;
    for (auto& l : some) out.append(told(l));
    return out;
  });
  m.def("host_waits", [] {
    decltype(host_waits) some;
    { std::lock_guard<std::mutex> g(clocks_m); some = host_waits; }
    py::list out;
    for (auto& [key, n] : some) out.append(py::make_tuple(key.first, lines_of(key.second), n));
    return out;
  });
  m.def("races", [] {
    std::vector<Race> some;
    { std::lock_guard<std::mutex> g(clocks_m); some = races; }
    py::list out;
    for (auto& r : some) out.append(py::make_tuple(told(r.first), r.first_writes, told(r.second), r.second_writes, r.nbytes));
    return out;
  });
  m.def("wrap", [](const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimCCL>(inner, rank, size);
  });
}
