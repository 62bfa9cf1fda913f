// OpenMP's parallel regions on std::thread, in place of libgomp.
//
// ThreadSanitizer does not see how libgomp's own threads wait for one another, so that every
// parallel region looks like a race to it. GCC turns a region into one call of GOMP_parallel with
// the function that each thread runs; starting a thread for each and joining them is what OpenMP
// promises (a region begins after what came before it, and ends when all threads have), and
// ThreadSanitizer understands it. So there is nothing to suppress: what it reports is a race of
// ours. Should the kernels use more of OpenMP than this, linking fails and says what is missing.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {
thread_local int number = 0, count = 1;
thread_local std::atomic<long>* next_of_team = nullptr;  // of the one loop that a region may divide
thread_local long loop_end = 0, loop_size = 1;
}  // namespace

extern "C" int omp_get_thread_num() { return number; }
extern "C" int omp_get_num_threads() { return count; }

extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  const int size = threads ? static_cast<int>(threads) : 1;
  std::atomic<long> parts{0}, *const next = &parts;
  std::vector<std::thread> others;
  for (int i = 1; i < size; ++i)
    others.emplace_back([=] {
      number = i;
      count = size;
      next_of_team = next;
      run(data);
    });
  // A region may be within another, whose numbers count again behind it.
  const int outer_number = number, outer_count = count;
  std::atomic<long>* const outer_next = next_of_team;
  next_of_team = next;
  number = 0;
  count = size;
  run(data);
  number = outer_number;
  count = outer_count;
  next_of_team = outer_next;
  for (std::thread& other : others) other.join();
}

// A loop from zero, in steps of one, whose parts go to whichever thread is free.
extern "C" bool GOMP_loop_nonmonotonic_dynamic_next(long* begin, long* end) {
  *begin = next_of_team->fetch_add(loop_size);
  *end = std::min(*begin + loop_size, loop_end);
  return *begin < loop_end;
}

extern "C" bool GOMP_loop_nonmonotonic_dynamic_start(long, long end, long, long size, long* from,
                                                     long* to) {
  loop_end = end;
  loop_size = size;
  return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

extern "C" void GOMP_loop_end_nowait() {}
