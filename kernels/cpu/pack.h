// Packs the keys and values of a tile for the products of a chunk: keys as columns, values as rows.
#pragma once

#include "attention.h"

namespace stepscope {

// Packed value `d` of a row: element d, or the pair of elements 2d and 2d + 1; zero from `dim` on.
template <class T>
INLINE uint32_t packed_at(Single, const T* row, int64_t d, int64_t) {
    const float wide = to_float(row[d]);
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return bits;
}
#if defined(__AVX512BF16__)
INLINE uint32_t packed_at(Pair, const bf16* row, int64_t d, int64_t dim) {
    return row[2 * d].bits | (2 * d + 1 < dim ? (uint32_t)row[2 * d + 1].bits << 16 : 0);
}
#endif

// VL packed values of a row from `d` on; all of them must be inside the row.
template <class T>
INLINE vf packed_vector(Single, const T* row, int64_t d) { return load(row + d); }
#if defined(__AVX512BF16__)
INLINE vf packed_vector(Pair, const bf16* row, int64_t d) {
    return (vf)*(const vu_mem*)(row + 2 * d);
}
#endif

// Transposes VL rows of VL values.
INLINE void transpose(const vf (&rows)[VL], uint32_t* out, int64_t stride) {
    AllLanes all;
    vf fours[VL];  // [group of 4 rows][column within each 4]
#pragma GCC unroll 4
    for (int f = 0; f < VL; f += 4) {
        vf ab0 = unpack<0>(rows[f], rows[f + 1], all), ab2 = unpack<2>(rows[f], rows[f + 1], all);
        vf cd0 = unpack<0>(rows[f + 2], rows[f + 3], all);
        vf cd2 = unpack<2>(rows[f + 2], rows[f + 3], all);
        fours[f] = unpack_pairs<0>(ab0, cd0, all);
        fours[f + 1] = unpack_pairs<2>(ab0, cd0, all);
        fours[f + 2] = unpack_pairs<0>(ab2, cd2, all);
        fours[f + 3] = unpack_pairs<2>(ab2, cd2, all);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        if constexpr (VL == 4) {
            *(vu_mem*)(out + i * stride) = (vu)fours[i];
        } else if constexpr (VL == 8) {
            *(vu_mem*)(out + i * stride) = (vu)halves<0>(fours[i], fours[i + 4], all);
            *(vu_mem*)(out + (i + 4) * stride) = (vu)halves<1>(fours[i], fours[i + 4], all);
        } else {
            vf even01 = groups<0>(fours[i], fours[i + 4], all);
            vf odd01 = groups<1>(fours[i], fours[i + 4], all);
            vf even23 = groups<0>(fours[i + 8], fours[(i + 12) % VL], all);
            vf odd23 = groups<1>(fours[i + 8], fours[(i + 12) % VL], all);
            *(vu_mem*)(out + i * stride) = (vu)groups<0>(even01, even23, all);
            *(vu_mem*)(out + (i + 4) * stride) = (vu)groups<0>(odd01, odd23, all);
            *(vu_mem*)(out + (i + 8) * stride) = (vu)groups<1>(even01, even23, all);
            *(vu_mem*)(out + (i + 12) * stride) = (vu)groups<1>(odd01, odd23, all);
        }
    }
}

// Packs the keys at `offsets` as columns: out[packed values of a head][KEY_TILE]. `offsets` must be
// valid for a whole tile.
template <class T, class Packed>
INLINE void pack_keys(const T* keys, const int64_t* offsets, int64_t num_keys, int64_t dim,
                      uint32_t* out) {
    const int64_t depth = dim / Packed::PACK;  // whole packed values
    int64_t d = 0;
    for (; d + VL <= depth; d += VL) {
        for (int64_t k = 0; k < num_keys; k += VL) {
            vf rows[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                rows[i] = packed_vector(Packed(), keys + offsets[k + i], d);
            }
            transpose(rows, out + d * KEY_TILE + k, KEY_TILE);
        }
    }
    for (; d * Packed::PACK < dim; d++) {
        for (int64_t k = 0; k < round_up(num_keys, VL); k++) {
            out[d * KEY_TILE + k] = packed_at(Packed(), keys + offsets[k], d, dim);
        }
    }
}

// Packs values: out[num_keys / PACK][padded_dim]. With an odd number of keys, the last is paired
// with zeros.
template <class T>
INLINE void pack_values(Single, const T* values, const int64_t* offsets, int64_t num_keys,
                        int64_t dim, int64_t padded_dim, uint32_t* out) {
    for (int64_t k = 0; k < num_keys; k++) {
        for (int64_t d = 0; d < dim; d += VL) {
            *(vu_mem*)(out + k * padded_dim + d) = (vu)load(values + offsets[k] + d, dim - d);
        }
    }
}
#if defined(__AVX512BF16__)
INLINE void pack_values(Pair, const bf16* values, const int64_t* offsets, int64_t num_keys,
                        int64_t dim, int64_t padded_dim, uint32_t* out) {
    for (int64_t k = 0; k < num_keys; k += 2) {
        const bf16* low = values + offsets[k];
        const bf16* high = k + 1 < num_keys ? values + offsets[k + 1] : nullptr;
        for (int64_t d = 0; d < dim; d += VL) {
            vu pair = (vu)load(low + d, dim - d) >> 16;
            if (high != nullptr) pair |= (vu)load(high + d, dim - d);
            *(vu_mem*)(out + k / 2 * padded_dim + d) = pair;
        }
    }
}
#endif

}  // namespace stepscope
