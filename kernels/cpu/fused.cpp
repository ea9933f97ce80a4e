// The operations between the matrix products of a layer, row by row. kernels/dispatch/fused.py
// describes what each computes. All arrays are contiguous.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "parallel.h"
#include "vec.h"

namespace stepscope {
namespace {

// With fewer elements (about 50 us) one thread does it all; see attention.cpp.
constexpr int64_t ELEMENTS_FOR_THREADS = 1 << 17;
constexpr int64_t ELEMENTS_OF_ITEM = 1 << 14;  // elements that a thread processes at a time

// Calls work(row) for all rows.
template <class Work>
void for_rows(int64_t num_rows, int64_t row_size, int num_threads, const Work& work) {
    const int64_t at_once = max(1, ELEMENTS_OF_ITEM / max(1, row_size));
    if (num_rows * row_size < ELEMENTS_FOR_THREADS) num_threads = 1;
    for_each((num_rows + at_once - 1) / at_once, num_threads, [&](int64_t i) {
        const int64_t end = min((i + 1) * at_once, num_rows);
        for (int64_t row = i * at_once; row < end; row++) work(row);
    });
}

INLINE float inverse_root_mean_square(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / (float)size + eps);
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t num_rows,
                  int64_t size, float eps, int num_threads) {
    for_rows(num_rows, size, num_threads, [&](int64_t row) {
        const T* added = x + row * size;
        T* stream = residual == nullptr ? nullptr : residual + row * size;
        vf squares = {};
        for (int64_t d = 0; d < size; d += VL) {
            vf v = load(added + d, size - d);
            if (stream != nullptr) {
                v = rounded_to<T>(v + load(stream + d, size - d));
                store(stream + d, v, size - d);
            }
            squares += v * v;
        }
        const float scale = inverse_root_mean_square(sum(squares), size, eps);
        const T* summed = stream == nullptr ? added : stream;
        for (int64_t d = 0; d < size; d += VL) {
            vf v = rounded_to<T>(load(summed + d, size - d) * scale);
            store(out + row * size + d, v * load(weight + d, size - d), size - d);
        }
    });
}

// One head: normalised unless `norm` is null, rotated (RoPE of its two halves), times `factor`.
template <class T, class C>
INLINE void norm_rotate(const T* head, const T* norm, const float* rope, int64_t dim, float eps,
                        float factor, C* out) {
    float scale = 1;
    if (norm != nullptr) {
        vf squares = {};
        for (int64_t d = 0; d < dim; d += VL) {
            vf v = load(head + d, dim - d);
            squares += v * v;
        }
        scale = inverse_root_mean_square(sum(squares), dim, eps);
    }
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d += VL) {
        const int64_t n = half - d;
        vf a = load(head + d, n), b = load(head + half + d, n);
        if (norm != nullptr) {
            a = a * scale * load(norm + d, n);
            b = b * scale * load(norm + half + d, n);
        }
        vf cos = load(rope + d, n), sin = load(rope + half + d, n);
        store(out + d, rounded_to<T>(a * cos - b * sin) * factor, n);
        store(out + half + d, rounded_to<T>(b * cos + a * sin) * factor, n);
    }
}

// `key_factors` and `value_factors` (one for each KV head) multiply keys and values before they are
// stored; null means 1.
template <class T, class C>
int norm_rope_store(const T* qkv, const float* rope, int64_t num_positions,
                    const int64_t* positions, const int64_t* slots, int64_t num_slots,
                    C* key_cache, C* value_cache, const float* key_factors,
                    const float* value_factors, const T* q_norm, const T* k_norm, T* query,
                    int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim,
                    float eps, int num_threads) {
    int invalid = 0;
    const int64_t num_all = num_heads + 2 * num_kv_heads;
    for_rows(num_rows, num_all * dim, num_threads, [&](int64_t row) {
        const int64_t position = positions[row], slot = slots[row];
        if (position < 0 || position >= num_positions || slot < 0 || slot >= num_slots) {
            __atomic_store_n(&invalid, -1, __ATOMIC_RELAXED);
            return;
        }
        const T* from = qkv + row * num_all * dim;
        const float* turn = rope + position * dim;
        for (int64_t h = 0; h < num_heads; h++) {
            norm_rotate(from + h * dim, q_norm, turn, dim, eps, 1,
                        query + (row * num_heads + h) * dim);
        }
        C* key = key_cache + slot * num_kv_heads * dim;
        C* value = value_cache + slot * num_kv_heads * dim;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            norm_rotate(from + (num_heads + h) * dim, k_norm, turn, dim, eps,
                        key_factors == nullptr ? 1 : key_factors[h], key + h * dim);
        }
        const T* values = from + (num_heads + num_kv_heads) * dim;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const float factor = value_factors == nullptr ? 1 : value_factors[h];
            for (int64_t d = h * dim; d < (h + 1) * dim; d += VL) {
                const int64_t n = (h + 1) * dim - d;
                store(value + d, load(values + d, n) * factor, n);
            }
        }
    });
    return invalid;
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size, int num_threads) {
    for_rows(num_rows, 2 * size, num_threads, [&](int64_t row) {
        const T* gate = gate_up + row * 2 * size;
        for (int64_t d = 0; d < size; d += VL) {
            const int64_t n = size - d;
            vf g = load(gate + d, n);
            store(out + row * size + d, g / (1.0f + exp(-g)) * load(gate + size + d, n), n);
        }
    });
}

}  // namespace
}  // namespace stepscope

using stepscope::bf16;

// These are filled in by kernels/dispatch/fused.py, field by field in this order.
struct AddRmsNorm {
    const void* x;
    void* residual;  // or null
    const void* weight;
    void* out;
    int64_t num_rows, size, is_bf16, num_threads;
    double eps;
};

struct NormRopeStore {
    const void* qkv;
    const float* rope;
    const int64_t* positions;
    const int64_t* slots;
    void* key_cache;
    void* value_cache;
    const void* q_norm;  // or null
    const void* k_norm;  // or null
    void* query;
    const float* key_factors;    // or null
    const float* value_factors;  // or null
    int64_t num_positions, num_slots, num_rows, num_heads, num_kv_heads, dim;
    int64_t dtype, kv_dtype;  // Dtypes
    int64_t num_threads;
    double eps;
};

struct SiluMul {
    const void* gate_up;
    void* out;
    int64_t num_rows, size, is_bf16, num_threads;
};

EXPORT int stepscope_add_rms_norm(const AddRmsNorm* a) {
    auto run = [&](auto t) {
        using T = decltype(t);
        stepscope::add_rms_norm((const T*)a->x, (T*)a->residual, (const T*)a->weight, (T*)a->out,
                                a->num_rows, a->size, (float)a->eps, (int)a->num_threads);
    };
    a->is_bf16 ? run(bf16()) : run(float());
    return 0;
}

// Returns 0, or -1 if a position or a slot is out of range (its row is left out).
EXPORT int stepscope_norm_rope_store(const NormRopeStore* a) {
    auto run = [&](auto t, auto c) {
        using T = decltype(t);
        using C = decltype(c);
        return stepscope::norm_rope_store(
            (const T*)a->qkv, a->rope, a->num_positions, a->positions, a->slots, a->num_slots,
            (C*)a->key_cache, (C*)a->value_cache, a->key_factors, a->value_factors,
            (const T*)a->q_norm, (const T*)a->k_norm, (T*)a->query, a->num_rows, a->num_heads,
            a->num_kv_heads, a->dim, (float)a->eps, (int)a->num_threads);
    };
    return stepscope::with_dtypes(a->dtype, a->kv_dtype, run);
}

EXPORT int stepscope_silu_mul(const SiluMul* a) {
    auto run = [&](auto t) {
        using T = decltype(t);
        stepscope::silu_mul((const T*)a->gate_up, (T*)a->out, a->num_rows, a->size,
                            (int)a->num_threads);
    };
    a->is_bf16 ? run(bf16()) : run(float());
    return 0;
}

// Increase this, and INTERFACE in kernels/cpu/library.py, when a structure changes.
EXPORT int stepscope_interface(void) { return 5; }

#if defined(__x86_64__) && defined(__linux__)
// Whether this process may use tiles of bf16. Linux keeps their registers only for who has asked
// (arch_prctl: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA).
static bool may_use_tiles() {
    unsigned a, b, c, features;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &features)) return false;
    const bool has_tiles = (features >> 24 & 1) && (features >> 22 & 1);  // AMX-TILE, AMX-BF16
    return has_tiles && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#else
static bool may_use_tiles() { return false; }
#endif

// The highest level of library that this CPU can run: 0 the portable one, 1 also x86-64-v3,
// 2 also x86-64-v4 with bf16 products, 3 also tiles of bf16.
EXPORT int stepscope_cpu_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v4 && __builtin_cpu_supports("avx512bf16")) return may_use_tiles() ? 3 : 2;
    if (v3) return 1;
#endif
    return 0;
}
