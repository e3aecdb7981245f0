// Runs kernels for CUDA on a CPU: each block is a thread of the system, each of its threads a context that goes on until
// it has to wait for others of the block. Blocks take turns, so that all runs are alike.

// Some compilers have it on by themselves, and it ends a process that jumps from one stack to another.
#undef _FORTIFY_SOURCE

#include "cuda_emulation.hpp"

#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

__thread Index threadIdx, blockIdx;

namespace emulation {

constexpr size_t STACK = 1 << 15;

enum class Waits { for_nobody, for_block, no_more };

struct Thread {
  ucontext_t beginning;
  jmp_buf place;
  bool has_begun = false;
  std::unique_ptr<char[]> stack{new char[STACK]};
  Waits waits = Waits::for_nobody;
};

struct Block {
  std::vector<Thread> threads;
  jmp_buf scheduler;
  size_t current = 0;
  // Of what the threads bring to a barrier: all so far, and all at the last one.
  bool all = true, was_all = true;
  void (*body)(const void*) = nullptr;
  const void* data = nullptr;
};

static thread_local Block* block;

inline void wait(Waits waits) {
  Thread& thread = block->threads[block->current];
  thread.waits = waits;
  if (!_setjmp(thread.place)) _longjmp(block->scheduler, 1);
}

// Until it waits. By jumps, since to change a context takes a call of the system.
inline void go_on(Thread& thread) {
  if (_setjmp(block->scheduler)) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  setcontext(&thread.beginning);
}

inline void begin() {
  block->body(block->data);
  wait(Waits::no_more);
}

// Lets those that wait for each other go on; false where all have ended.
inline bool release() {
  bool any = false;
  for (Thread& thread : block->threads) {
    if (thread.waits == Waits::no_more) continue;
    thread.waits = Waits::for_nobody;
    any = true;
  }
  block->was_all = block->all;
  block->all = true;
  return any;
}

inline void run_block(Block& here, unsigned index, Index size) {
  block = &here;
  size_t n = size_t(size.x) * size.y;
  if (here.threads.size() < n) here.threads = std::vector<Thread>(n);
  blockIdx = {index, 0, 0};
  for (size_t i = n; i < here.threads.size(); ++i) here.threads[i].waits = Waits::no_more;
  for (size_t i = 0; i < n; ++i) {
    Thread& thread = here.threads[i];
    thread.waits = Waits::for_nobody;
    thread.has_begun = false;
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = thread.stack.get();
    thread.beginning.uc_stack.ss_size = STACK;
    makecontext(&thread.beginning, begin, 0);
  }
  for (bool goes_on = true; goes_on;) {
    for (size_t i = 0; i < n; ++i) {
      // The other way round in every other block, so that neither order hides that a barrier is missing.
      here.current = index % 2 ? n - 1 - i : i;
      Thread& thread = here.threads[here.current];
      if (thread.waits != Waits::for_nobody) continue;
      threadIdx = {unsigned(here.current % size.x), unsigned(here.current / size.x), 0};
      go_on(thread);
    }
    goes_on = release();
  }
}

// One of some threads of the system goes on, the others wait.
class Turns {
 public:
  explicit Turns(unsigned n) : holds_(n), n_left_(n), here_(n, true) {}

  void begin(unsigned me) {
    std::unique_lock<std::mutex> lock(mutex_);
    holds_[me].wait(lock, [&] { return turn_ == me; });
  }

  void pass(unsigned me) {
    std::unique_lock<std::mutex> lock(mutex_);
    give();
    holds_[me].wait(lock, [&] { return turn_ == me; });
  }

  void leave(unsigned me) {
    std::unique_lock<std::mutex> lock(mutex_);
    here_[me] = false;
    if (--n_left_) give();
  }

  bool is_last() const { return n_left_ == 1; }

 private:
  void give() {
    do turn_ = (turn_ + 1) % here_.size();
    while (!here_[turn_]);
    holds_[turn_].notify_one();
  }

  std::mutex mutex_;
  std::vector<std::condition_variable> holds_;
  unsigned n_left_, turn_ = 0;
  std::vector<bool> here_;
};

static Turns* turns;
static thread_local unsigned worker, n_looks;

bool wait_for_block(bool value) {
  block->all &= value;
  wait(Waits::for_block);
  return block->was_all;
}

void look() {
  if (++n_looks % 32 == 0) turns->pass(worker);
}

// The first block is the slowest: what waits for it has to wait, and finds that many others have told what they can
// without it.
void run_all(unsigned n_blocks, Index size, unsigned n_at_once, void (*body)(const void*), const void* data) {
  // Kept, for new memory costs more than to run in it.
  static std::vector<Block> blocks;
  unsigned n_workers = n_at_once < n_blocks ? n_at_once : n_blocks, next = 0;
  if (blocks.size() < n_workers) blocks = std::vector<Block>(n_workers);
  Turns of_run(n_workers);
  turns = &of_run;
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < n_workers; ++i) {
    workers.emplace_back([&, i] {
      worker = i;
      blocks[i].body = body;
      blocks[i].data = data;
      of_run.begin(i);
      for (unsigned index = next++; index < n_blocks; index = next++) {
        for (int wait = 0; index == 0 && wait < 30 && !of_run.is_last(); ++wait) of_run.pass(i);
        run_block(blocks[i], index, size);
      }
      of_run.leave(i);
    });
  }
  for (std::thread& thread : workers) thread.join();
}

}  // namespace emulation
