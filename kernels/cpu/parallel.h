// Threads and scratch memory. We use the OpenMP runtime that torch has loaded, and its threads.
#pragma once

#include <cstdint>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stepscope {

// Scratch memory of one thread. It grows and is kept, because new pages for every call would cost
// more than a small call.
class Scratch {
public:
    ~Scratch() { free(memory_); }

    // Returns at least `bytes`, aligned to 64; the old content is lost.
    char* reserve(int64_t bytes) {
        if (bytes > size_) {
            free(memory_);
            size_ = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(aligned_alloc(64, size_));
            if (memory_ == nullptr) abort();
        }
        return memory_;
    }

private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};

// Allocates pieces of a reservation, each aligned to 64.
class Pieces {
public:
    explicit Pieces(char* memory) : at_(memory) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(at_);
        at_ += bytes<T>(count);
        return piece;
    }

    template <class T>
    static int64_t bytes(int64_t count) {
        return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    }

private:
    char* at_;
};

// Calls work(i) for all i in [0, count), small i first. Uses either all threads or only the
// caller's: if a team is smaller, libgomp ends the other threads and must start them again later.
template <class Work>
void for_each(int64_t count, int num_threads, const Work& work) {
#if defined(_OPENMP)
    if (num_threads > 1 && count > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) work(i);
}

}  // namespace stepscope
