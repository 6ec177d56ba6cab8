// Threads for the duration of one call. Results never depend on their number.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace pipecomp {

// Barrier of all threads of a call. Calls are far shorter than a time slice, so waiting spins, then yields.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait() {
        if (threads_ == 1) return;
        int phase = phase_.load();
        if (waiting_.fetch_add(1) + 1 == threads_) {
            waiting_.store(0);
            phase_.store(phase + 1);
            return;
        }
        for (int spin = 0; phase_.load() == phase; spin++)
            if (spin > 1000) std::this_thread::yield();
    }

  private:
    const int threads_;
    std::atomic<int> waiting_{0}, phase_{0};
};

// Runs body(thread, threads, barrier) on up to `threads` threads, this one included; fewer if starting one fails.
template <class Body>
void run_threads(int threads, const Body& body) {
    std::vector<std::thread> others;
    std::atomic<Barrier*> gate{nullptr};
    std::atomic<int> count{0};
    if (threads > 1) {
        try {
            others.reserve(size_t(threads - 1));
            for (int t = 1; t < threads; t++)
                others.emplace_back([&gate, &count, &body, t] {
                    Barrier* barrier;
                    while (!(barrier = gate.load())) std::this_thread::yield();
                    body(t, count.load(), *barrier);
                });
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
    }
    Barrier barrier(int(others.size()) + 1);
    count.store(int(others.size()) + 1);
    gate.store(&barrier);
    body(0, int(others.size()) + 1, barrier);
    for (std::thread& other : others) other.join();
}

// Part `thread` of [0, n), cut at multiples of `step`.
struct Range {
    int64_t begin, end;
    Range(int64_t n, int64_t step, int thread, int threads) {
        int64_t blocks = (n + step - 1) / step;
        begin = blocks * thread / threads * step;
        end = blocks * (thread + 1) / threads * step;
        if (begin > n) begin = n;
        if (end > n) end = n;
    }
};

// Threads worth starting for this many values: one costs about as much as quantizing 64 Ki values.
inline int useful_threads(int threads, int64_t values) {
    int64_t most = values >> 16;
    if (most < 1) most = 1;
    return threads < 1 ? 1 : threads < most ? threads : int(most);
}

template <class Body>
void parallel_range(int threads, int64_t n, int64_t step, const Body& body) {
    run_threads(useful_threads(threads, n), [&](int thread, int count, Barrier&) {
        Range part(n, step, thread, count);
        if (part.begin < part.end) body(part.begin, part.end);
    });
}

}  // namespace pipecomp
