// The two products of a decode (scores, and weighted sums of values), for a few query heads that
// share a KV head.
#pragma once

#include "attention.h"

namespace stepscope {

constexpr int QUERY_HEADS = VECTOR_BYTES == 64 ? 4 : 2;  // at a time, limited by registers

// ---- rows of K and V as vectors of WIDTH elements; the last one may be short ----

template <class T, class Packed>
struct Rows;

template <class T>
struct Rows<T, Single> {
    static constexpr int WIDTH = VL;
    using Query = float;
    using Weight = float;

    static INLINE vu key(const T* p) { return (vu)load(p); }
    static INLINE vu key(const T* p, int64_t n) { return (vu)load(p, n); }
    static INLINE vu query(const float* p) { return (vu)load(p); }
    template <class Q>
    static INLINE float to_query(Q x) { return to_float(x); }
};

#if defined(__AVX512BF16__)
template <>
struct Rows<bf16, Pair> {
    static constexpr int WIDTH = 32;
    using Query = bf16;
    using Weight = uint32_t;

    static INLINE vu key(const bf16* p) { return *(const vu_mem*)p; }
    static INLINE vu key(const bf16* p, int64_t n) {
        return n >= WIDTH ? key(p) : (vu)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
    }
    static INLINE vu query(const bf16* p) { return *(const vu_mem*)p; }
    static INLINE bf16 to_query(bf16 x) { return x; }
};
#endif

// Prefetches rows that will be read some time later. Blocks of a few KB are scattered in memory,
// so hardware prefetchers start anew in each, and a miss also costs a walk of the page tables. We
// prefetch a few rows at a time between the products, and into L2: a burst of prefetches, or
// prefetches into L1, would fill the few buffers that the products' own loads need.
template <class T>
struct Ahead {
    const T* rows;  // null: nothing to prefetch
    const int64_t* offsets;

    INLINE void fetch(int64_t k, int64_t size) const {
        if (rows == nullptr) return;
        const char* row = (const char*)(rows + offsets[k]);
        for (int64_t byte = 0; byte < size * (int64_t)sizeof(T); byte += 64) {
            __builtin_prefetch(row + byte, 0, 2);
        }
    }
};

// Scores of VL keys for GT query heads; the rows of `scores` have PARTITION elements.
template <class T, class Packed, int GT>
INLINE void score(const T* keys, const int64_t* offsets, int64_t head_dim, const Ahead<T>& ahead,
                  const typename Rows<T, Packed>::Query* queries, int64_t query_stride,
                  float* scores) {
    using R = Rows<T, Packed>;
    vf fours[GT][VL / 4];
#pragma GCC unroll 4
    for (int f = 0; f < VL / 4; f++) {
        const T* k0 = keys + offsets[4 * f];
        const T* k1 = keys + offsets[4 * f + 1];
        const T* k2 = keys + offsets[4 * f + 2];
        const T* k3 = keys + offsets[4 * f + 3];
        for (int k = 4 * f; k < 4 * f + 4; k++) ahead.fetch(k, head_dim);
        vf sums[GT][4] = {};
        int64_t d = 0;
        auto add = [&](vu a, vu b, vu c, vu e) {
#pragma GCC unroll 4
            for (int g = 0; g < GT; g++) {
                vu q = R::query(queries + g * query_stride + d);
                sums[g][0] = Packed::multiply_add(sums[g][0], q, a);
                sums[g][1] = Packed::multiply_add(sums[g][1], q, b);
                sums[g][2] = Packed::multiply_add(sums[g][2], q, c);
                sums[g][3] = Packed::multiply_add(sums[g][3], q, e);
            }
        };
        for (; d + R::WIDTH <= head_dim; d += R::WIDTH) {
            add(R::key(k0 + d), R::key(k1 + d), R::key(k2 + d), R::key(k3 + d));
        }
        if (d < head_dim) {
            const int64_t n = head_dim - d;
            add(R::key(k0 + d, n), R::key(k1 + d, n), R::key(k2 + d, n), R::key(k3 + d, n));
        }
#pragma GCC unroll 4
        for (int g = 0; g < GT; g++) {
            fours[g][f] = sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) store(scores + g * PARTITION, sum_all(fours[g]));
}

// Turns scores into weights; returns the largest score and the sum of the weights.
INLINE void softmax(float* scores, int64_t num_keys, int64_t padded, float scale, float softcap,
                    float& largest_score, float& sum_of_weights) {
    vf top = splat(-INFINITE);
    for (int64_t k = 0; k < padded; k += VL) {
        vf s = cap_and_scale(load(scores + k), scale, softcap);
        if (k + VL > num_keys) s = iota() < (int)(num_keys - k) ? s : splat(-INFINITE);
        store(scores + k, s);
        top = larger(top, s);
    }
    largest_score = largest(top);
    vf total = {};
    for (int64_t k = 0; k < padded; k += VL) {
        vf weight = exp(load(scores + k) - largest_score);
        store(scores + k, weight);
        total += weight;
    }
    sum_of_weights = sum(total);
}

// Adds weighted values to the sums: NV vectors for each of GT query heads. `n` is the number of
// elements left in the head; only used if SHORT.
template <class T, int GT, int NV, bool SHORT>
INLINE void weigh(Single, const T* values, const int64_t* offsets, int64_t num_keys, int64_t n,
                  const Ahead<T>& ahead, const float* weights, float* sums, int64_t sum_stride) {
    vf acc[GT][NV];
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) acc[g][j] = load(sums + g * sum_stride + j * VL);
    }
    for (int64_t k = 0; k < num_keys; k++) {
        ahead.fetch(k, NV * VL);
        const T* row = values + offsets[k];
        vf v[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) v[j] = SHORT ? load(row, n) : load(row + j * VL);
#pragma GCC unroll 4
        for (int g = 0; g < GT; g++) {
            vf w = splat(weights[g * PARTITION + k]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) acc[g][j] += w * v[j];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) store(sums + g * sum_stride + j * VL, acc[g][j]);
    }
}

#if defined(__AVX512BF16__)
typedef uint16_t v32h __attribute__((vector_size(64)));

// The same with two keys at a time: interleaved values times pairs of weights.
template <class T, int GT, int NV, bool SHORT>
INLINE void weigh(Pair, const bf16* values, const int64_t* offsets, int64_t num_keys, int64_t n,
                  const Ahead<T>& ahead, const uint32_t* weights, float* sums, int64_t sum_stride) {
    using R = Rows<bf16, Pair>;
    static_assert(NV % 2 == 0);
    // Interleaving puts groups of four lanes into the order 0 2 4 6 and 1 3 5 7.
    vf acc[GT][NV];
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j += 2) {
            const float* in = sums + g * sum_stride + j * VL;
            vf a = load(in), b = load(in + VL);
            acc[g][j] = groups<0>(a, b, AllLanes());
            acc[g][j + 1] = groups<1>(a, b, AllLanes());
        }
    }
    for (int64_t k = 0; k < num_keys; k += 2) {
        const bf16* even = values + offsets[k];
        const bf16* odd = values + offsets[k + 1];
        ahead.fetch(k, NV * VL);
        ahead.fetch(k + 1, NV * VL);
        vu v[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j += 2) {
            __m512i a = (__m512i)(SHORT ? R::key(even, n) : R::key(even + j * VL));
            __m512i b = (__m512i)(SHORT ? R::key(odd, n) : R::key(odd + j * VL));
            v[j] = (vu)_mm512_unpacklo_epi16(a, b);
            v[j + 1] = (vu)_mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 4
        for (int g = 0; g < GT; g++) {
            vu w = splat(weights[g * (PARTITION / 2) + k / 2]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) acc[g][j] = Pair::multiply_add(acc[g][j], w, v[j]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GT; g++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j += 2) {
            float* out = sums + g * sum_stride + j * VL;
            vf a = acc[g][j], b = acc[g][j + 1];
            store(out, SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
            store(out + VL, SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29,
                                    30, 31));
        }
    }
}
#endif

}  // namespace stepscope
