// OpenMP's parallel regions on std::thread, in place of libgomp.
//
// ThreadSanitizer does not see how libgomp's own threads wait for one another, so that every
// parallel region looks like a race to it. GCC turns a region into one call of GOMP_parallel with
// the function that each thread runs; starting a thread for each and joining them is what OpenMP
// promises (a region begins after what came before it, and ends when all threads have), and
// ThreadSanitizer understands it. So there is nothing to suppress: what it reports is a race of
// ours. Should the kernels use more of OpenMP than this, linking fails and says what is missing.
#include <thread>
#include <vector>

namespace {
thread_local int number = 0, count = 1;
}

extern "C" int omp_get_thread_num() { return number; }
extern "C" int omp_get_num_threads() { return count; }

extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  const int size = threads ? static_cast<int>(threads) : 1;
  std::vector<std::thread> others;
  for (int i = 1; i < size; ++i)
    others.emplace_back([=] {
      number = i;
      count = size;
      run(data);
    });
  // A region may be within another, whose numbers count again behind it.
  const int outer_number = number, outer_count = count;
  number = 0;
  count = size;
  run(data);
  number = outer_number;
  count = outer_count;
  for (std::thread& other : others) other.join();
}
