// Attention for several queries of a request. A tile of keys is packed once for many rows (a row is
// one query head of one query), multiplied with one block of rows after the other, and reduced by
// an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
// A row's result depends neither on the rows around it nor on the number of threads: tiles of
// keys begin at multiples of KEY_TILE, and keys that a row may not attend to add exactly nothing (if
// their values are finite).
#pragma once

#include "pack.h"
#include "tiles.h"

namespace stepscope {

// What a product of packed values takes at a time: rows, packed values of a row, and columns.
template <class Packed>
struct Block {
    static constexpr int ROWS = 6;  // the sums of ROWS rows by STRIP vectors fit into the registers
    static constexpr int64_t DEPTH = 1, COLUMNS = VL;
};
constexpr int STRIP = VECTOR_BYTES == 64 ? 4 : 2;

// How to multiply queries of type T with a KV cache of type C.
template <class T, class C>
struct ChunkPacking : Packing<T, C> {};

#if defined(__AMX_BF16__)
template <>
struct Block<Tiles> {
    static constexpr int ROWS = 2 * TILE_ROWS;
    static constexpr int64_t DEPTH = TILE_PAIRS, COLUMNS = 2 * VL;
};
template <>
struct ChunkPacking<bf16, bf16> {
    using type = Tiles;
};
#endif
// Rows that share a packed tile; with more rows there would be fewer items for the threads.
constexpr int64_t ROWS_OF_ITEM = 192;

INLINE int64_t queries_of_item(const Call& call) { return max(1, ROWS_OF_ITEM / call.group()); }

// c[ROWS][NV * VL] (+)= a[ROWS][depth] * b[depth][NV * VL], in packed values.
template <class Packed, int NV>
INLINE void multiply_strip(const uint32_t* a, int64_t a_stride, const uint32_t* b,
                           int64_t b_stride, int64_t depth, float* c, int64_t c_stride, bool add) {
    constexpr int ROWS = Block<Packed>::ROWS;
    vf acc[ROWS][NV];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            acc[i][j] = add ? load(c + i * c_stride + j * VL) : vf{};
        }
    }
    for (int64_t k = 0; k < depth; k++) {
        vu column[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) column[j] = *(const vu_mem*)(b + k * b_stride + j * VL);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            vu x = splat(a[i * a_stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) {
                acc[i][j] = Packed::multiply_add(acc[i][j], x, column[j]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) store(c + i * c_stride + j * VL, acc[i][j]);
    }
}

template <class Packed>
INLINE void multiply(Packed, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                     int64_t b_stride, int64_t depth, float* c, int64_t c_stride,
                     int64_t num_vectors, bool add) {
    in_pieces<STRIP>(num_vectors, [&](auto count, int64_t j) {
        multiply_strip<Packed, count()>(a, a_stride, b + j * VL, b_stride, depth, c + j * VL,
                                        c_stride, add);
    });
}
#if defined(__AMX_BF16__)
INLINE void multiply(Tiles, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                     int64_t b_stride, int64_t depth, float* c, int64_t c_stride,
                     int64_t num_vectors, bool add) {
    for (int64_t column = 0; column < num_vectors * VL; column += Block<Tiles>::COLUMNS) {
        multiply_tiles<2>(a, 4 * a_stride, b + column, 4 * b_stride, depth, c + column,
                          4 * c_stride, add);
    }
}
#endif

// State of the online softmax for ROWS rows.
template <int ROWS>
struct Softmax {
    float top[ROWS];  // the largest score so far
    vf total[ROWS];   // sums of weights relative to `top`, one partial sum in each lane
};

// Turns the scores of one tile into weights, in place; a row attends to the keys [from, to) of the
// tile. Returns true if a largest score has changed: multiply earlier sums by `factor` then.
template <int ROWS>
INLINE bool update(Softmax<ROWS>& state, float (&scores)[ROWS][KEY_TILE], int64_t num_rows,
                   int64_t num_vectors, const int64_t* from, const int64_t* to, float scale,
                   float softcap, float (&factor)[ROWS]) {
    bool changed = false;
    for (int i = 0; i < num_rows; i++) {
        const bool masked = from[i] > 0 || to[i] < num_vectors * VL;
        vf top = splat(state.top[i]);
        for (int64_t j = 0; j < num_vectors; j++) {
            vf s = cap_and_scale(load(scores[i] + j * VL), scale, softcap);
            if (masked) {
                vi key = iota() + (int)(j * VL);
                s = (key >= (int)from[i]) & (key < (int)to[i]) ? s : splat(-INFINITE);
            }
            store(scores[i] + j * VL, s);
            top = larger(top, s);
        }
        const float new_top = largest(top);
        // A row without any key yet: use 0 instead, to avoid -inf - -inf.
        const float base = new_top == -INFINITE ? 0 : new_top;
        factor[i] = 1;
        if (new_top != state.top[i]) {
            changed = true;
            factor[i] = exp(splat(state.top[i] - base))[0];
            state.total[i] *= factor[i];
            state.top[i] = new_top;
        }
        for (int64_t j = 0; j < num_vectors; j++) {
            vf weight = exp(load(scores[i] + j * VL) - base);
            store(scores[i] + j * VL, weight);
            state.total[i] += weight;
        }
    }
    return changed;
}

template <int ROWS>
INLINE const uint32_t* packed_weights(Single, const float (&weights)[ROWS][KEY_TILE], uint32_t*) {
    return (const uint32_t*)weights;
}
#if defined(__AVX512BF16__)
template <int ROWS>
INLINE const uint32_t* packed_weights(Pair, const float (&weights)[ROWS][KEY_TILE],
                                      uint32_t* out) {
    for (int i = 0; i < ROWS; i++) {
        for (int64_t k = 0; k < KEY_TILE; k += 2 * VL) {
            *(vu_mem*)(out + i * (KEY_TILE / 2) + k / 2) =
                narrow_pairs(load(weights[i] + k), load(weights[i] + k + VL));
        }
    }
    return out;
}
#endif

// Runs one item of a chunk, with queries of type T, keys and values of type C.
template <class T, class C>
void chunk(Call& call, const Item& item, Scratch& scratch) {
    using Packed = typename ChunkPacking<T, C>::type;
    constexpr int ROWS = Block<Packed>::ROWS;
    constexpr int64_t PACK = Packed::PACK, DEPTH = Block<Packed>::DEPTH;
    const int64_t D = call.head_dim, G = call.group(), H = call.num_heads;
    const int64_t filled = (D + PACK - 1) / PACK, depth = round_up(filled, DEPTH);
    const int64_t padded_dim = round_up(D, Block<Packed>::COLUMNS);
    const int64_t num_rows = (item.end - item.begin) * G, padded_rows = round_up(num_rows, ROWS);
    const int64_t num_blocks = padded_rows / ROWS;
    const int64_t token = call.query_starts[item.request] + item.begin;
    // The position of the first query in the context, and of its own key.
    const int64_t position = call.context_lens[item.request] -
                             call.num_queries(item.request) + item.begin;
    const int64_t last_key = position + item.end - item.begin;
    const int64_t first_key = call.first_key(position) / KEY_TILE * KEY_TILE;

    Pieces pieces(scratch.reserve(
        Pieces::bytes<int64_t>(KEY_TILE) + Pieces::bytes<uint32_t>(padded_rows * depth) +
        Pieces::bytes<float>(padded_rows * padded_dim) + Pieces::bytes<Softmax<ROWS>>(num_blocks) +
        Pieces::bytes<uint32_t>(depth * KEY_TILE) + Pieces::bytes<uint32_t>(KEY_TILE * padded_dim) +
        Pieces::bytes<uint32_t>(ROWS * KEY_TILE)));
    int64_t* offsets = pieces.take<int64_t>(KEY_TILE);
    uint32_t* queries = pieces.take<uint32_t>(padded_rows * depth);
    float* sums = pieces.take<float>(padded_rows * padded_dim);
    Softmax<ROWS>* states = pieces.take<Softmax<ROWS>>(num_blocks);
    uint32_t* keys = pieces.take<uint32_t>(depth * KEY_TILE);
    uint32_t* values = pieces.take<uint32_t>(KEY_TILE * padded_dim);
    uint32_t* pairs = pieces.take<uint32_t>(ROWS * KEY_TILE);
#if defined(__AMX_BF16__)
    TileRegisters registers;
    if constexpr (DEPTH > 1) registers.set_rows(ROWS);
#endif
    memset(keys + filled * KEY_TILE, 0, (depth - filled) * KEY_TILE * sizeof(*keys));

    for (int64_t head = item.first_kv_head; head < item.first_kv_head + item.num_kv_heads; head++) {
        for (int64_t row = 0; row < padded_rows; row++) {
            const int64_t from = min(row, num_rows - 1);
            const int64_t query_head = (token + from / G) * H + head * G + from % G;
            const T* query = (const T*)call.query + query_head * D;
            int64_t d = 0;
            for (; (d + VL) * PACK <= D; d += VL) {
                *(vu_mem*)(queries + row * depth + d) = (vu)packed_vector(Packed(), query, d);
            }
            for (; d < depth; d++) {
                queries[row * depth + d] = d < filled ? packed_at(Packed(), query, d, D) : 0;
            }
        }
        memset(sums, 0, padded_rows * padded_dim * sizeof(float));
        for (int64_t b = 0; b < num_blocks; b++) {
            for (int i = 0; i < ROWS; i++) {
                states[b].top[i] = -INFINITE;
                states[b].total[i] = vf{};
            }
        }

        for (int64_t tile = first_key; tile < last_key; tile += KEY_TILE) {
            const int64_t num_keys = min(KEY_TILE, last_key - tile);
            call.row_offsets(item.request, tile, tile + num_keys, tile + KEY_TILE, offsets);
            pack_keys<C, Packed>((const C*)call.key_cache + head * D, offsets, num_keys, D, keys);
            pack_values(Packed(), (const C*)call.value_cache + head * D, offsets, num_keys, D,
                        padded_dim, values);
            const int64_t packed_keys = (num_keys + PACK - 1) / PACK;
            memset(values + packed_keys * padded_dim, 0,
                   (round_up(packed_keys, DEPTH) - packed_keys) * padded_dim * sizeof(*values));
            for (int64_t b = 0; b < num_blocks; b++) {
                const int64_t rows = min(ROWS, num_rows - b * ROWS);
                int64_t from[ROWS], to[ROWS];
                for (int i = 0; i < ROWS; i++) {
                    const int64_t at = position + min(b * ROWS + i, num_rows - 1) / G;
                    from[i] = call.first_key(at) - tile;
                    to[i] = min(at + 1 - tile, num_keys);
                }
                // Rows are in order of position, so the block attends to [from of its first row,
                // to of its last row).
                if (to[ROWS - 1] <= 0 || from[0] >= num_keys) continue;
                const int64_t num_vectors = round_up(to[ROWS - 1], VL) / VL;
                alignas(64) float scores[ROWS][KEY_TILE];
                multiply(Packed(), queries + b * ROWS * depth, depth, keys, KEY_TILE, depth,
                         scores[0], KEY_TILE, num_vectors, false);
                float factor[ROWS];
                float* block_sums = sums + b * ROWS * padded_dim;
                if (update(states[b], scores, rows, num_vectors, from, to, (float)call.scale,
                           (float)call.softcap, factor)) {
                    for (int i = 0; i < rows; i++) {
                        for (int64_t d = 0; d < padded_dim; d += VL) {
                            float* at = block_sums + i * padded_dim + d;
                            store(at, load(at) * factor[i]);
                        }
                    }
                }
                const int64_t used = round_up((to[ROWS - 1] + PACK - 1) / PACK, DEPTH);
                for (int64_t k = num_vectors * VL; k < used * PACK; k += VL) {
                    for (int i = 0; i < rows; i++) store(scores[i] + k, vf{});
                }
                multiply(Packed(), packed_weights(Packed(), scores, pairs), KEY_TILE / PACK, values,
                         padded_dim, used, block_sums, padded_dim, padded_dim / VL, true);
            }
        }
        for (int64_t row = 0; row < num_rows; row++) {
            const Softmax<ROWS>& state = states[row / ROWS];
            finish<T>(call, token + row / G, head * G + row % G, sums + row * padded_dim,
                      state.top[row % ROWS], sum(state.total[row % ROWS]));
        }
    }
}

}  // namespace stepscope
