// Attention for a decode, over one partition of its keys. All query heads of a KV head are computed
// together, so that each key and value is fetched once. Partitions always begin at multiples of
// PARTITION, so the result depends neither on the rest of the batch nor on the number of threads.
// (Split-KV decoding: Dao et al., Flash-Decoding, 2023.)
#pragma once

#include "rows.h"

namespace stepscope {

template <class T>
void merge(const Call& call, const Split& split, int64_t r, int64_t padded_dim, float* sums) {
    const int64_t size = padded_dim + VL;  // of a partial: sums, largest score, sum of weights
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
constexpr int64_t VALUES_AT_ONCE = 32;  // keys whose values are added for one head after the other

// Runs one item of a decode, with queries of type T, keys and values of type C. `next` is the item
// that this thread will probably run next (its keys are prefetched), or null.
template <class T, class C>
void decode(Call& call, const Item& item, const Item* next, Scratch& scratch) {
    using Packed = typename Packing<T, C>::type;
    using R = Rows<C, Packed>;
    using Query = typename R::Query;
    const int64_t D = call.head_dim, G = call.group();
    const int64_t padded_dim = round_up(D, R::WIDTH), num_rows = item.num_kv_heads * G;
    const int64_t n = item.end - item.begin, padded = round_up(n, VL);
    const int64_t token = call.query_starts[item.request];
    const int64_t first_head = item.first_kv_head * G;

    Pieces pieces(scratch.reserve(
        Pieces::bytes<int64_t>(PARTITION + KEYS_AHEAD) +
        Pieces::bytes<Query>(num_rows * padded_dim) +
        Pieces::bytes<float>(num_rows * PARTITION) + Pieces::bytes<float>(num_rows * padded_dim) +
        2 * Pieces::bytes<float>(num_rows) + Pieces::bytes<uint32_t>(num_rows * PARTITION / 2)));
    int64_t* offsets = pieces.take<int64_t>(PARTITION + KEYS_AHEAD);
    Query* queries = pieces.take<Query>(num_rows * padded_dim);
    float* scores = pieces.take<float>(num_rows * PARTITION);
    float* sums = pieces.take<float>(num_rows * padded_dim);
    float* tops = pieces.take<float>(num_rows);
    float* totals = pieces.take<float>(num_rows);

    call.row_offsets(item.request, item.begin, item.end, item.begin + padded, offsets);
    const T* query = (const T*)call.query + (token * call.num_heads + first_head) * D;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t d = 0; d < D; d++) {
            queries[row * padded_dim + d] = R::to_query(query[row * D + d]);
        }
        for (int64_t d = D; d < padded_dim; d++) queries[row * padded_dim + d] = Query{};
    }

    const C* first_key = (const C*)call.key_cache + item.first_kv_head * D;
    const C* first_value = (const C*)call.value_cache + item.first_kv_head * D;
    const int64_t num_ahead = min(KEYS_AHEAD, padded);
    for (int64_t k = 0; k < num_ahead; k++) {
        Ahead<C>{first_key, offsets}.fetch(k, item.num_kv_heads * D);
    }
    // The KV heads of a token are adjacent, so this loop reads memory in order.
    for (int64_t k = 0; k < n; k += VL) {
        const int64_t later = k + num_ahead;
        for (int64_t h = 0; h < item.num_kv_heads; h++) {
            Ahead<C> ahead = later < padded
                                 ? Ahead<C>{first_key + h * D, offsets + later}
                                 : Ahead<C>{first_value + h * D, offsets + later - padded};
            in_pieces<QUERY_HEADS>(G, [&](auto count, int64_t g) {
                const int64_t row = h * G + g;
                score<C, Packed, count()>(first_key + h * D, offsets + k, D, ahead,
                                          queries + row * padded_dim, padded_dim,
                                          scores + row * PARTITION + k);
                ahead.rows = nullptr;
            });
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        softmax(scores + row * PARTITION, n, padded, (float)call.scale, (float)call.softcap,
                tops[row], totals[row]);
    }

    using Weight = typename R::Weight;
    Weight* weights = (Weight*)scores;
    if constexpr (Packed::PACK == 2) {
#if defined(__AVX512BF16__)
        weights = pieces.take<Weight>(num_rows * PARTITION / 2);
        for (int64_t row = 0; row < num_rows; row++) {
            for (int64_t k = 0; k < padded; k += 2 * VL) {
                // Scores after `padded` are left over from earlier calls; their weights are unused.
                const float* from = scores + row * PARTITION + k;
                *(vu_mem*)(weights + row * (PARTITION / 2) + k / 2) =
                    narrow_pairs(load(from), load(from + VL));
            }
        }
#endif
    }
    constexpr int64_t WEIGHTS = PARTITION / Packed::PACK;
    constexpr int NV = VECTOR_BYTES == 64 ? 4 : 2;
    constexpr int ONE = Packed::PACK;  // vectors in one load
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
            const C* values = first_value + h * D;
            Ahead<C> ahead{nullptr, nullptr};
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
                    weigh<C, GT, num_vectors(), is_short()>(Packed(), values + d, offsets + k,
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
