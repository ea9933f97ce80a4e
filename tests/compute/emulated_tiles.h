// The tile instructions that kernels/cpu/tiles.h uses, computed in plain C++ as Intel's manual (volume 2,
// TDPBF16PS) describes them. test_tiles.py compiles the kernels with it where a processor lacks them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef _tile_dpbf16ps
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero

namespace emulated {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
struct Registers {
    Config config;  // palette 0: not configured
    alignas(64) uint8_t tiles[8][16][64];
};
inline thread_local Registers registers;

inline void load_config(const void* config) {
    memset(&registers, 0, sizeof registers);
    memcpy(&registers.config, config, sizeof(Config));
    for (int tile = 0; tile < 8; tile++) {
        const int rows = registers.config.rows[tile], row_bytes = registers.config.row_bytes[tile];
        if (registers.config.palette != 1 || rows < 1 || rows > 16 || row_bytes != 64) abort();
    }
}

inline int num_rows(int tile) {
    if (registers.config.palette == 0) abort();
    return registers.config.rows[tile];
}

inline void zero(int tile) {
    num_rows(tile);
    memset(registers.tiles[tile], 0, sizeof registers.tiles[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < num_rows(tile); row++) {
        memcpy(registers.tiles[tile][row], (const char*)from + row * stride, 64);
    }
}

inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < num_rows(tile); row++) {
        memcpy((char*)to + row * stride, registers.tiles[tile][row], 64);
    }
}

inline float value(int tile, int row, int at) {
    uint16_t half;
    memcpy(&half, registers.tiles[tile][row] + 2 * at, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void multiply(int sums, int a, int b) {
    // The rows of b are the pairs of a.
    if (num_rows(sums) != num_rows(a) || num_rows(b) != 16) abort();
    for (int row = 0; row < num_rows(sums); row++) {
        for (int column = 0; column < 16; column++) {
            float even = 0, odd = 0, sum;
            for (int pair = 0; pair < 16; pair++) {
                even = __builtin_fmaf(value(a, row, 2 * pair), value(b, pair, 2 * column), even);
                odd = __builtin_fmaf(value(a, row, 2 * pair + 1), value(b, pair, 2 * column + 1),
                                     odd);
            }
            uint8_t* at = registers.tiles[sums][row] + 4 * column;
            memcpy(&sum, at, sizeof sum);
            sum += even + odd;
            memcpy(at, &sum, sizeof sum);
        }
    }
}

}  // namespace emulated

#define _tile_loadconfig emulated::load_config
#define _tile_release() memset(&emulated::registers.config, 0, sizeof(emulated::Config))
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
