// The threads of a parallel region, which wait for each other after every kernel of a graph.
#pragma once

#include <atomic>

#include <omp.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct Team {
  std::atomic<int> arrived{0}, generation{0}, asleep{0};
};

// Of the calling thread.
static thread_local Team* team = nullptr;

#ifdef __linux__
static void futex(std::atomic<int>& word, int operation, int value) {
  syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}
#else  // threads never sleep
constexpr int FUTEX_WAKE = 0, FUTEX_WAIT = 0;
static void futex(std::atomic<int>&, int, int) {}
#endif

// Waits until all threads of the team are here. OpenMP's own barrier lets a thread fall asleep after
// some 5 us if the process has more threads of OpenMP than there are processors, which takes longer
// than most kernels of a step of few rows; otherwise it spins for up to 16 ms, although another
// thread may need the processor. This one spins for some 50 us.
static void wait_for_team() {
  constexpr int SPINS = 1000;
  const int size = omp_get_num_threads();
  if (size == 1) return;
  const int generation = team->generation.load();
  if (team->arrived.fetch_add(1) + 1 == size) {
    team->arrived.store(0);
    team->generation.store(generation + 1);
    if (team->asleep.load()) futex(team->generation, FUTEX_WAKE, size);
    return;
  }
  for (int i = 0; i < SPINS; ++i) {
    if (team->generation.load(std::memory_order_acquire) != generation) return;
#if HAS_X86_VARIANTS
    _mm_pause();
#endif
  }
  ++team->asleep;
  while (team->generation.load() == generation) futex(team->generation, FUTEX_WAIT, generation);
  --team->asleep;
}

// Runs work() on every thread of a team.
template <class Work>
static void run_in_team(int threads, const Work& work) {
  Team shared;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    team = &shared;
    work();
    team = nullptr;
  }
}
