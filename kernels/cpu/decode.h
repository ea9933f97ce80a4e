// One query of a request over one partition of its keys, all query heads of a KV head together, so
// that each key and value is fetched once. Partitions begin at multiples of PARTITION whatever
// else is in the batch and however many threads there are: the result depends on neither.
// (Split-KV decoding: Dao et al., Flash-Decoding, 2023.)
#pragma once

#include "attention.h"

namespace stepscope {

constexpr int QUERY_HEADS = VECTOR_BYTES == 64 ? 4 : 2;  // at a time, as registers allow

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
    static INLINE float to_query(T x) { return to_float(x); }
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

// Rows that will be read some time from now. Blocks lie anywhere and hold a few KB: the hardware's
// prefetchers start anew in each, and what they miss costs a walk of the page tables too. Asked for
// a few at a time between the products, and into L2: a burst of requests, or requests into L1,
// would fill the few buffers that the products' own loads need.
template <class T>
struct Ahead {
    const T* rows;  // null: nothing to ask for
    const int64_t* offsets;

    INLINE void fetch(int64_t k, int64_t size) const {
        if (rows == nullptr) return;
        const char* row = (const char*)(rows + offsets[k]);
        for (int64_t byte = 0; byte < size * (int64_t)sizeof(T); byte += 64) {
            __builtin_prefetch(row + byte, 0, 2);
        }
    }
};

// Scores of VL keys with GT query heads; `scores` has rows of PARTITION.
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

// Adds weighted values to the sums: NV vectors from `d` on of GT query heads. `n` is what is left of
// the head from `d` on, read only when SHORT.
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

// Two keys at a time: their values interleaved, against their weights as a pair.
template <class T, int GT, int NV, bool SHORT>
INLINE void weigh(Pair, const bf16* values, const int64_t* offsets, int64_t num_keys, int64_t n,
                  const Ahead<T>& ahead, const uint32_t* weights, float* sums, int64_t sum_stride) {
    using R = Rows<bf16, Pair>;
    static_assert(NV % 2 == 0);
    // The interleaving leaves groups of four in the order 0 2 4 6 and 1 3 5 7.
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

template <int N>
using Count = std::integral_constant<int, N>;

// f(Count<n>(), first) for pieces of `total`, all but the last of MOST.
template <int MOST, class F>
INLINE void in_pieces(int64_t total, const F& f) {
    int64_t i = 0;
    for (; i + MOST <= total; i += MOST) f(Count<MOST>(), i);
    if constexpr (MOST > 3) {
        if (total - i == 3) return f(Count<3>(), i);
    }
    if constexpr (MOST > 2) {
        if (total - i == 2) return f(Count<2>(), i);
    }
    if (total - i == 1) f(Count<1>(), i);
}

template <class T>
void merge(const Call& call, const Split& split, int64_t r, int64_t padded_dim, float* sums) {
    const int64_t size = padded_dim + VL;  // of a partial; largest score and sum of weights last
    for (int64_t h = 0; h < call.num_heads; h++) {
        const float* first = call.partials + (split.first_partial + h) * size;
        const int64_t stride = call.num_heads * size;
        float top = -INFINITE;
        for (int64_t p = 0; p < split.num_partitions; p++) {
            const float here = first[p * stride + padded_dim];
            top = here > top ? here : top;
        }
        float total = 0;
        memset(sums, 0, padded_dim * sizeof(float));
        for (int64_t p = 0; p < split.num_partitions; p++) {
            const float* partial = first + p * stride;
            const float factor = exp(splat(partial[padded_dim] - top))[0];
            total += partial[padded_dim + 1] * factor;
            for (int64_t d = 0; d < padded_dim; d += VL) {
                store(sums + d, load(sums + d) + load(partial + d) * factor);
            }
        }
        finish<T>(call, call.query_starts[r], h, sums, top, total);
    }
}

constexpr int64_t KEYS_AHEAD = 64;
constexpr int64_t VALUES_AT_ONCE = 32;  // keys whose values are added up head by head

// `next` is what this thread will probably do after it, or null.
template <class T>
void decode(Call& call, const Item& item, const Item* next, Scratch& scratch) {
    using Packed = typename Packing<T>::type;
    using R = Rows<T, Packed>;
    using Query = typename R::Query;
    const int64_t D = call.head_dim, G = call.group();
    const int64_t padded_dim = round_up(D, R::WIDTH), num_rows = item.num_kv_heads * G;
    const int64_t n = item.end - item.begin, padded = round_up(n, VL);
    const int64_t token = call.query_starts[item.request];
    const int64_t first_head = item.first_kv_head * G;

    Pieces pieces(scratch.reserve(
        Pieces::bytes<int64_t>(PARTITION + KEYS_AHEAD) + Pieces::bytes<Query>(num_rows * padded_dim) +
        Pieces::bytes<float>(num_rows * PARTITION) + Pieces::bytes<float>(num_rows * padded_dim) +
        Pieces::bytes<uint32_t>(num_rows * PARTITION)));
    int64_t* offsets = pieces.take<int64_t>(PARTITION + KEYS_AHEAD);
    Query* queries = pieces.take<Query>(num_rows * padded_dim);
    float* scores = pieces.take<float>(num_rows * PARTITION);
    float* sums = pieces.take<float>(num_rows * padded_dim);

    call.row_offsets(item.request, item.begin, item.end, item.begin + padded, offsets);
    const T* query = (const T*)call.query + (token * call.num_heads + first_head) * D;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t d = 0; d < D; d++) {
            queries[row * padded_dim + d] = R::to_query(query[row * D + d]);
        }
        for (int64_t d = D; d < padded_dim; d++) queries[row * padded_dim + d] = Query{};
    }

    const T* first_key = (const T*)call.key_cache + item.first_kv_head * D;
    const T* first_value = (const T*)call.value_cache + item.first_kv_head * D;
    const int64_t num_ahead = min(KEYS_AHEAD, padded);
    for (int64_t k = 0; k < num_ahead; k++) {
        Ahead<T>{first_key, offsets}.fetch(k, item.num_kv_heads * D);
    }
    // The KV heads of a token lie side by side: taken in turn, memory is read in order.
    for (int64_t k = 0; k < n; k += VL) {
        const int64_t later = k + num_ahead;
        for (int64_t h = 0; h < item.num_kv_heads; h++) {
            Ahead<T> ahead = later < padded
                                 ? Ahead<T>{first_key + h * D, offsets + later}
                                 : Ahead<T>{first_value + h * D, offsets + later - padded};
            in_pieces<QUERY_HEADS>(G, [&](auto count, int64_t g) {
                const int64_t row = h * G + g;
                score<T, Packed, count()>(first_key + h * D, offsets + k, D, ahead,
                                          queries + row * padded_dim, padded_dim,
                                          scores + row * PARTITION + k);
                ahead.rows = nullptr;
            });
        }
    }
    float* tops = (float*)__builtin_alloca(2 * num_rows * sizeof(float));
    float* totals = tops + num_rows;
    for (int64_t row = 0; row < num_rows; row++) {
        softmax(scores + row * PARTITION, n, padded, (float)call.scale, (float)call.softcap,
                tops[row], totals[row]);
    }

    using Weight = typename R::Weight;
    Weight* weights = (Weight*)scores;
    if constexpr (Packed::PACK == 2) {
#if defined(__AVX512BF16__)
        weights = pieces.take<Weight>(num_rows * PARTITION);
        for (int64_t row = 0; row < num_rows; row++) {
            for (int64_t k = 0; k < padded; k += 2 * VL) {
                // Behind `padded` lies what earlier calls left; no weight from there is used.
                const float* from = scores + row * PARTITION + k;
                *(vu_mem*)(weights + row * (PARTITION / 2) + k / 2) =
                    narrow_pairs(load(from), load(from + VL));
            }
        }
#endif
    }
    constexpr int64_t WEIGHTS = PARTITION / Packed::PACK;
    constexpr int NV = VECTOR_BYTES == 64 ? 4 : 2;
    constexpr int ONE = Packed::PACK;  // vectors of one load
    memset(sums, 0, num_rows * padded_dim * sizeof(float));
    int64_t* next_offsets = offsets + PARTITION;
    int64_t num_next = 0;
    if (next != nullptr && !next->is_chunk) {
        num_next = min(num_ahead, next->end - next->begin);
        call.row_offsets(next->request, next->begin, next->begin + num_next,
                         next->begin + KEYS_AHEAD, next_offsets);
    }
    for (int64_t k = 0; k < n; k += VALUES_AT_ONCE) {
        const int64_t num_keys = min(VALUES_AT_ONCE, n - k), later = k + num_ahead;
        for (int64_t h = 0; h < item.num_kv_heads; h++) {
            const T* values = first_value + h * D;
            Ahead<T> ahead{nullptr, nullptr};
            if (later + num_keys <= padded) {
                ahead = {values, offsets + later};
            } else if (later >= padded && later - padded + num_keys <= num_next) {
                ahead = {first_key + h * D, next_offsets + later - padded};
            }
            in_pieces<QUERY_HEADS>(G, [&](auto count, int64_t g) {
                constexpr int GT = count();
                const int64_t row = h * G + g;
                const Weight* w = weights + row * WEIGHTS + k / Packed::PACK;
                auto run = [&](auto num_vectors, auto is_short, int64_t d) {
                    weigh<T, GT, num_vectors(), is_short()>(Packed(), values + d, offsets + k,
                                                            num_keys, D - d,
                                                            {ahead.rows ? ahead.rows + d : nullptr,
                                                             ahead.offsets},
                                                            w, sums + row * padded_dim + d,
                                                            padded_dim);
                };
                int64_t d = 0;
                for (; d + NV * VL <= D; d += NV * VL) run(Count<NV>(), Count<0>(), d);
                for (; d + ONE * VL <= D; d += ONE * VL) run(Count<ONE>(), Count<0>(), d);
                if (d < D) run(Count<ONE>(), Count<1>(), d);
                ahead.rows = nullptr;
            });
        }
    }

    Split& split = call.splits[item.request];
    if (split.num_partitions == 1) {
        for (int64_t row = 0; row < num_rows; row++) {
            finish<T>(call, token, first_head + row, sums + row * padded_dim, tops[row],
                      totals[row]);
        }
        return;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float* partial = call.partials + (padded_dim + VL) * (split.first_partial +
                             item.partition * call.num_heads + first_head + row);
        memcpy(partial, sums + row * padded_dim, padded_dim * sizeof(float));
        partial[padded_dim] = tops[row];
        partial[padded_dim + 1] = totals[row];
    }
    if (__atomic_sub_fetch(&split.num_missing, 1, __ATOMIC_ACQ_REL) == 0) {
        merge<T>(call, split, item.request, padded_dim, sums);
    }
}

}  // namespace stepscope
