// Products of bf16 by tile instructions (Intel AMX): 16 rows of 32 values times 32 values of 16
// columns at a time, with sums in fp32.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)

namespace stepscope {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row
constexpr int64_t TILE_PAIRS = TILE_BYTES / 4;

// Packed values that are multiplied in tiles.
struct Tiles : Pair {};

// Compilers do not know what memory the tile instructions read.
INLINE void written(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// The tile registers of this thread while the object lives. Sums are in 0 to 3 and the first operand
// in 4 and 5, for two tiles of rows; the second operand is in 6 and 7, for two tiles of columns.
class TileRegisters {
public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;
    ~TileRegisters() {
        if (are_set_) _tile_release();
    }

    // Sets the number of rows, at most 32; loses what the registers hold.
    void set_rows(int num_rows) {
        are_set_ = true;
        const uint8_t first = (uint8_t)min(num_rows, TILE_ROWS);
        const uint8_t second = (uint8_t)max(num_rows - TILE_ROWS, 1);
        const Config config = {1, 0, {}, {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES,
                                          TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES},
                               {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS}};
        written(&config);
        _tile_loadconfig(&config);
    }

private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    bool are_set_ = false;
};

// c (+)= a * b, for one or two tiles of rows and two of columns. Strides are in bytes; a row of `b`
// holds a pair of values of each column. Every sum adds the values in the same order, so a row's
// result does not depend on the rows beside it.
template <int NUM_TILES>
void multiply_tiles(const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                    int64_t num_pairs, float* c, int64_t c_stride, bool add) {
    const char* upper = (const char*)a;
    const char* lower = upper + TILE_ROWS * a_stride;
    char* sums = (char*)c;
    char* lower_sums = sums + TILE_ROWS * c_stride;
    written(a);
    written(b);
    written(c);
    _tile_zero(0);
    _tile_zero(1);
    if (add) {
        _tile_loadd(0, sums, c_stride);
        _tile_loadd(1, sums + TILE_BYTES, c_stride);
    }
    if constexpr (NUM_TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
        if (add) {
            _tile_loadd(2, lower_sums, c_stride);
            _tile_loadd(3, lower_sums + TILE_BYTES, c_stride);
        }
    }
    for (int64_t pair = 0; pair < num_pairs; pair += TILE_PAIRS) {
        const char* columns = (const char*)b + pair * b_stride;
        _tile_loadd(4, upper + pair * 4, a_stride);
        _tile_loadd(6, columns, b_stride);
        _tile_loadd(7, columns + TILE_BYTES, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (NUM_TILES == 2) {
            _tile_loadd(5, lower + pair * 4, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, c_stride);
    _tile_stored(1, sums + TILE_BYTES, c_stride);
    if constexpr (NUM_TILES == 2) {
        _tile_stored(2, lower_sums, c_stride);
        _tile_stored(3, lower_sums + TILE_BYTES, c_stride);
    }
}

}  // namespace stepscope

#endif
