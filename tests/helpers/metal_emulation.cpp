// Runs a kernel for Metal on a CPU: one thread of a group after the other, each as far as the next barrier.
//
// Every access to memory comes here first, since the kernel is compiled as if for GCC's thread sanitizer. So what lies
// outside a buffer, what nobody has written, and what two threads touch without a barrier between them is found
// whatever the order of the threads.

// Some compilers have it on by themselves, and it ends a process that jumps from one stack to another.
#undef _FORTIFY_SOURCE

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

namespace emulation {

struct uint3 {
  unsigned x, y, z;
};

enum { DEVICE = 1, THREADGROUP = 2 };

// These two are as in the header.
struct Call {
  void** buffers;
  uint3 grid, group;
  unsigned order;
  void (*body)(const Call&);
  const char* group_memory;
  size_t group_memory_size;
};

struct Position {
  uint3 thread_position_in_threadgroup, threadgroup_position_in_grid, threads_per_threadgroup, threadgroups_per_grid,
      thread_position_in_grid, threads_per_grid;
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
};

constexpr size_t STACK = 1 << 16;
constexpr size_t GROUP_MEMORY = 32768;
constexpr unsigned SIMDGROUP = 32;
constexpr int NOBODY = -1, MANY = -2;

struct Thread {
  ucontext_t beginning;
  jmp_buf place;
  bool has_begun, has_ended;
  int line, memory;
  std::unique_ptr<char[]> stack{new char[STACK]};
  Position position;
};

// What is known of a word, the entry of a buffer: who wrote and who read it last, and after how many barriers for its memory.
struct Word {
  bool written = false;
  int writer = NOBODY, reader = NOBODY;
  unsigned written_at = 0, read_at = 0, written_by_group = 0;
};

struct Region {
  const char *begin, *end;
  bool is_input;
  int memory;
  std::vector<Word> words;
  const char* name;
  size_t entry = 4;
};

static std::vector<Thread> threads;
static std::vector<Region> regions;
static jmp_buf scheduler, caller;
static int current = NOBODY;
static unsigned group_number, epoch[3];
static const Call* call;
static char* message;
static size_t message_size;

[[noreturn]] static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, message_size, format, arguments);
  va_end(arguments);
  current = NOBODY;
  _longjmp(caller, 1);
}

static unsigned fresh_epoch() {
  static unsigned last = 0;
  return ++last;
}

static void access(const void* at, size_t size, bool is_write) {
  if (current == NOBODY) return;
  const char* from = static_cast<const char*>(at);
  for (Region& region : regions) {
    if (from < region.begin || from >= region.end) continue;
    if (from + size > region.end) fail("out of bounds: %s is left by an access that begins inside", region.name);
    if (is_write && region.is_input) fail("%s is an input and is written", region.name);
    unsigned now = epoch[region.memory];
    for (size_t i = (from - region.begin) / region.entry; i <= (from + size - 1 - region.begin) / region.entry; ++i) {
      if (region.is_input) continue;
      Word& word = region.words[i];
      bool other_group = region.memory == DEVICE && word.writer != NOBODY && word.written_by_group != group_number;
      if (other_group) fail("race: %s[%zu] belongs to another threadgroup", region.name, i);
      if (word.writer != NOBODY && word.writer != current && word.written_at == now)
        fail("race: %s[%zu] was written by thread %d and is touched by %d with no barrier", region.name, i, word.writer,
            current);
      if (is_write) {
        if (word.reader != NOBODY && word.reader != current && word.read_at == now)
          fail(
              "race: %s[%zu] was read by another thread and is written by %d with no barrier", region.name, i, current);
        word.written = true;
        word.writer = current;
        word.written_at = now;
        word.written_by_group = group_number;
      } else {
        if (!word.written) fail("uninitialised: %s[%zu] is read and was never written", region.name, i);
        bool first = word.reader == NOBODY || word.read_at != now;
        word.reader = first || word.reader == current ? current : MANY;
        word.read_at = now;
      }
    }
    return;
  }
  Thread& thread = threads[current];
  if (from >= thread.stack.get() && from < thread.stack.get() + STACK) return;
  fail("out of bounds: an access of %zu bytes that is in no buffer", size);
}

const Position& position() { return threads[current].position; }

void barrier(int memory, int line) {
  Thread& thread = threads[current];
  thread.line = line;
  thread.memory = memory;
  if (!_setjmp(thread.place)) _longjmp(scheduler, 1);
}

// By jumps, since to change a context takes a call of the system.
static void go_on(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  setcontext(&thread.beginning);
}

static void begin() {
  call->body(*call);
  threads[current].has_ended = true;
  _longjmp(scheduler, 1);
}

static void run_group(uint3 at, uint3 groups, std::minstd_rand& random) {
  uint3 size = call->group, grid = call->grid;
  // The last groups may be smaller.
  uint3 here = {std::min(size.x, grid.x - at.x * size.x), std::min(size.y, grid.y - at.y * size.y),
      std::min(size.z, grid.z - at.z * size.z)};
  size_t n = size_t(here.x) * here.y * here.z;
  if (threads.size() < n) threads = std::vector<Thread>(n);
  for (size_t i = 0; i < n; ++i) {
    Thread& thread = threads[i];
    thread.has_begun = thread.has_ended = false;
    uint3 in_group = {unsigned(i % here.x), unsigned(i / here.x % here.y), unsigned(i / here.x / here.y)};
    uint3 in_grid = {at.x * size.x + in_group.x, at.y * size.y + in_group.y, at.z * size.z + in_group.z};
    thread.position = {
        in_group, at, here, groups, in_grid, grid, unsigned(i), unsigned(i % SIMDGROUP), unsigned(i / SIMDGROUP)};
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = thread.stack.get();
    thread.beginning.uc_stack.ss_size = STACK;
    makecontext(&thread.beginning, begin, 0);
  }
  Region& memory = regions[0];
  memset(const_cast<char*>(memory.begin), 0xff, memory.end - memory.begin);
  std::fill(memory.words.begin(), memory.words.end(), Word());
  ++group_number;
  epoch[DEVICE] = fresh_epoch();
  epoch[THREADGROUP] = fresh_epoch();
  std::vector<int> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = call->order == 1 ? n - 1 - i : i;
  for (size_t n_ended = 0; !n_ended;) {
    if (call->order > 1) std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      current = i;
      go_on(threads[i]);
      n_ended += threads[i].has_ended;
    }
    current = NOBODY;
    if (n_ended && n_ended != n) fail("barrier: %zu of %zu threads do not come to it", n_ended, n);
    if (n_ended) return;
    for (size_t i = 1; i < n; ++i)
      if (threads[i].line != threads[0].line) fail("barrier: threads wait at different ones");
    for (int kind : {DEVICE, THREADGROUP})
      if (threads[0].memory & kind) epoch[kind] = fresh_epoch();
  }
}

static void run_all(const Call& wanted) {
  uint3 size = wanted.group, grid = wanted.grid;
  uint3 groups = {(grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y, (grid.z + size.z - 1) / size.z};
  std::minstd_rand random(wanted.order);
  size_t n = size_t(groups.x) * groups.y * groups.z;
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = wanted.order == 1 ? n - 1 - i : i;
  if (wanted.order > 1) std::shuffle(order.begin(), order.end(), random);
  for (size_t i : order)
    run_group(
        {unsigned(i % groups.x), unsigned(i / groups.x % groups.y), unsigned(i / groups.x / groups.y)}, groups, random);
}

}  // namespace emulation

using namespace emulation;

// *sizes* in bytes of all buffers, in order; the last *n_results* of those are written. 0, or 1 with a message.
extern "C" int emulation_run(const Call* wanted, const size_t* sizes, const size_t* entries, int n_buffers, const char* is_result,
    const char* const* names, char* text, size_t text_size) {
  call = wanted;
  message = text;
  message_size = text_size;
  regions.clear();
  const char* memory = wanted->group_memory;
  size_t memory_size = wanted->group_memory_size;
  regions.push_back(
      {memory, memory + memory_size, false, THREADGROUP, std::vector<Word>(memory_size / 4 + 1), "threadgroup memory"});
  for (int i = 0; i < n_buffers; ++i) {
    const char* begin = static_cast<const char*>(wanted->buffers[i]);
    size_t n_words = is_result[i] ? sizes[i] / entries[i] + 1 : 0;
    regions.push_back({begin, begin + sizes[i], !is_result[i], DEVICE, std::vector<Word>(n_words), names[i], entries[i]});
  }
  if (_setjmp(caller)) return 1;
  uint3 group = wanted->group;
  size_t n_threads = size_t(group.x) * group.y * group.z;
  if (!n_threads || n_threads > 1024) fail("%zu threads in a threadgroup; Metal has 1 to 1024", n_threads);
  if (memory_size > GROUP_MEMORY) fail("%zu bytes of threadgroup memory; Metal has %zu", memory_size, GROUP_MEMORY);
  run_all(*wanted);
  current = NOBODY;
  return 0;
}

extern "C" {
// For kernels that count what they compute.
unsigned long emulation_operations;

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(name, size, is_write) \
  void __tsan_##name##size(void* at) { access(at, size, is_write); }
#define ACCESSES(size)                \
  ACCESS(read, size, false)           \
  ACCESS(write, size, true)           \
  ACCESS(unaligned_read, size, false) \
  ACCESS(unaligned_write, size, true) \
  ACCESS(volatile_read, size, false)  \
  ACCESS(volatile_write, size, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* at, size_t size) { access(at, size, false); }
void __tsan_write_range(void* at, size_t size) { access(at, size, true); }
}
