// Products with packed bf16 weights. kernels/cpu/linear.py describes what is computed, and when.
//
// A panel holds the weights of WIDTH outputs, ordered by input. A step of the loop reads one value
// (or pair) of each row of x and multiplies it by two vectors: the weights of the panel's outputs.
// A tile is several rows times one panel, or few rows times several panels; its sums stay in
// registers, with AMX in tile registers (tiles.h). A panel stays in the cache for all rows of a block.
#include "parallel.h"
#include "tiles.h"
#include "vec.h"

namespace stepscope {
namespace {

constexpr int64_t WIDTH = 2 * VL;
// Rows of a tile. With two sums a row, two vectors of weights and one of x, it needs up to 32
// registers (AVX-512), or 16.
constexpr int ROWS = VECTOR_BYTES == 64 ? 12 : 6;
// With less work one thread does it all: about what it computes while a second thread starts.
constexpr int64_t WEIGHTS_FOR_THREADS = 1 << 16;
constexpr int ITEMS_PER_THREAD = 4;  // so that a thread that is held up processes fewer items

// Products with x and y in fp32. 32 bits hold two bf16 weights: the lower half belongs to the first
// vector, the upper half to the second. One instruction widens each to fp32.
struct Widened {
    typedef float value;
    static constexpr int64_t INPUTS = 1;  // values that a step reads from each row
    static constexpr int64_t STEP_BYTES = VECTOR_BYTES;  // bytes of weights that a step reads
    struct Weights {
        vf first, second;
    };
    static INLINE Weights load_weights(const char* p) {
        const vu both = *(const vu_mem*)p;
        return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
    }
    // Prefetches early enough for memory and products to overlap: 16 rows run at 83 instead of
    // 62 GFLOP/s on one core with AVX2.
    template <int NUM_ROWS>
    static INLINE void prefetch(const char* weights) { __builtin_prefetch(weights + 8192, 0, 2); }
    static INLINE vf input(const float* p) { return splat(*p); }
    static INLINE vf add(vf sums, vf weights, vf inputs) { return sums + weights * inputs; }
};

#if defined(__AVX512BF16__)
// Products with x and y in bf16: in pairs, added in fp32.
struct Pairs {
    typedef bf16 value;
    static constexpr int64_t INPUTS = 2;
    static constexpr int64_t STEP_BYTES = 2 * VECTOR_BYTES;
    struct Weights {
        __m512bh first, second;
    };
    static INLINE Weights load_weights(const char* p) {
        return {(__m512bh)_mm512_loadu_si512(p), (__m512bh)_mm512_loadu_si512(p + VECTOR_BYTES)};
    }
    // One row only waits for memory, so prefetch into L1. With more rows, data that comes into L1
    // so early would push out data that is needed before it.
    template <int NUM_ROWS>
    static INLINE void prefetch(const char* weights) {
        for (int64_t line = 0; line < STEP_BYTES; line += 64) {
            if constexpr (NUM_ROWS == 1) {
                __builtin_prefetch(weights + line + 16384);
            } else {
                __builtin_prefetch(weights + line + 16384, 0, 2);
                __builtin_prefetch(weights + line + 2048);
            }
        }
    }
    static INLINE __m512bh input(const bf16* p) {
        int32_t bits;
        memcpy(&bits, p, sizeof bits);
        return (__m512bh)_mm512_set1_epi32(bits);
    }
    static INLINE vf add(vf sums, __m512bh weights, __m512bh inputs) {
        return (vf)_mm512_dpbf16_ps((__m512)sums, weights, inputs);
    }
};
#endif

template <class T>
struct Output {
    T* y;
    const float* bias;  // for all panels, or null
    int64_t num_columns;
    bool is_gated;
};

template <class T>
INLINE void finish(const Output<T>& out, int64_t row, int64_t panel, vf first, vf second) {
    if (out.bias != nullptr) {
        first += load(out.bias + panel * WIDTH);
        second += load(out.bias + panel * WIDTH + VL);
    }
    T* to = out.y + row * out.num_columns;
    if (out.is_gated) {
        const int64_t at = panel * VL;
        store(to + at, first / (1.0f + exp(-first)) * second, out.num_columns - at);
        return;
    }
    const int64_t left = out.num_columns - panel * WIDTH;
    store(to + panel * WIDTH, first, left);
    if (left > VL) store(to + panel * WIDTH + VL, second, left - VL);
}

// `N` rows of x from `row` on, times `P` panels. Every sum adds the inputs in order, whatever N and
// P are, so a row's result does not depend on the rows beside it. One row by one panel has only two
// sums, and each addition waits for the one before; so few rows use several panels at once.
template <class Product, int N, int P>
void tile(const typename Product::value* x, int64_t row, const char* weights, int64_t panel,
                 int64_t size, const Output<typename Product::value>& out) {
    vf first[N * P] = {}, second[N * P] = {};
    const auto* from = x + row * size;
    const int64_t panel_bytes = WIDTH * size * 2;
    for (int64_t at = 0; at < size; at += Product::INPUTS, weights += Product::STEP_BYTES) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const char* of_panel = weights + p * panel_bytes;
            Product::template prefetch<N>(of_panel);
            const auto w = Product::load_weights(of_panel);
#pragma GCC unroll 12
            for (int n = 0; n < N; n++) {
                const auto v = Product::input(from + n * size + at);
                first[n * P + p] = Product::add(first[n * P + p], w.first, v);
                second[n * P + p] = Product::add(second[n * P + p], w.second, v);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int p = 0; p < P; p++) {
            finish(out, row + n, panel + p, first[n * P + p], second[n * P + p]);
        }
    }
}

template <class Product>
using Tile = void (*)(const typename Product::value*, int64_t, const char*, int64_t, int64_t,
                      const Output<typename Product::value>&);

// Panels of a tile, by its number of rows: few rows leave registers for several panels.
constexpr int MOST_PANELS[] = {1, 4, 2};

template <class Product, int... N>
constexpr Tile<Product> one_panel(int rows, std::integer_sequence<int, N...>) {
    constexpr Tile<Product> tiles[] = {tile<Product, N + 1, 1>...};
    return tiles[rows - 1];
}

template <class Product>
constexpr Tile<Product> several_panels(int rows) {
    constexpr Tile<Product> tiles[] = {tile<Product, 1, MOST_PANELS[1]>,
                                       tile<Product, 2, MOST_PANELS[2]>};
    return tiles[rows - 1];
}

template <class Product>
constexpr int64_t ROWS_AT_ONCE = ROWS;
// Bytes of x that fit into a core's L2 cache beside a panel.
template <class Product>
constexpr int64_t BLOCK_BYTES = 1 << 18;

// Rows [begin, end) of x times the panels [panel, last).
template <class Product>
void multiply(const typename Product::value* x, int64_t begin, int64_t end, const char* packed,
              int64_t panel, int64_t last, int64_t size,
              const Output<typename Product::value>& out) {
    const int most = end - begin <= 2 ? MOST_PANELS[end - begin] : 1;
    while (panel < last) {
        const char* weights = packed + panel * WIDTH * size * 2;
        if (most > 1 && panel + most <= last) {
            several_panels<Product>(end - begin)(x, begin, weights, panel, size, out);
            panel += most;
            continue;
        }
        for (int64_t row = begin; row < end;) {
            // Split a rest evenly, such as two tiles of 8 rows instead of 12 and 4.
            const int64_t left = end - row;
            const int64_t n = left > ROWS && left < 2 * ROWS ? (left + 1) / 2 : min(left, ROWS);
            one_panel<Product>(n, std::make_integer_sequence<int, ROWS>())(x, row, weights, panel,
                                                                          size, out);
            row += n;
        }
        panel++;
    }
}

#if defined(__AMX_BF16__)
// The same products by tile instructions. Their sums are rounded in another order.
struct InTiles : Pairs {};

template <>
constexpr int64_t ROWS_AT_ONCE<InTiles> = 2 * TILE_ROWS;
// A core with AMX has 2 MB. Smaller blocks would read each panel from memory too often.
template <>
constexpr int64_t BLOCK_BYTES<InTiles> = 1 << 20;

template <>
void multiply<InTiles>(const bf16* x, int64_t begin, int64_t end, const char* packed,
                       int64_t panel, int64_t last, int64_t size, const Output<bf16>& out) {
    // The last rows are computed once more with rows before them, as setting the registers anew
    // takes longer.
    const int64_t most = min(end - begin, 2 * TILE_ROWS);
    TileRegisters registers;
    registers.set_rows((int)most);
    alignas(64) float sums[2 * TILE_ROWS][WIDTH];
    const Output<bf16> output = out;  // a copy, which no store can change: it stays in registers
    for (; panel < last; panel++) {
        const char* weights = packed + panel * WIDTH * size * 2;
        const bool is_plain = output.bias == nullptr && !output.is_gated &&
                              (panel + 1) * WIDTH <= output.num_columns;
        for (int64_t at = begin; at < end; at += most) {
            const int64_t n = end - at > TILE_ROWS ? most : min(most, TILE_ROWS);
            const int64_t row = min(at, end - n);
            const auto run = n > TILE_ROWS ? multiply_tiles<2> : multiply_tiles<1>;
            run(x + row * size, 2 * size, weights, 4 * WIDTH, size / 2, sums[0], 4 * WIDTH, false);
            for (int64_t i = at - row; i < n; i++) {
                const vf first = load(sums[i]), second = load(sums[i] + VL);
                if (is_plain) {  // a quarter of the instructions of `finish`
                    bf16* to = output.y + (row + i) * output.num_columns + panel * WIDTH;
                    *(vu_mem*)to = narrow_pairs(first, second);
                } else {
                    finish(output, row + i, panel, first, second);
                }
            }
        }
    }
}
#endif

template <class Product>
void linear(const typename Product::value* x, const char* packed,
            const Output<typename Product::value>& out, int64_t num_rows, int64_t size,
            int64_t num_panels, int num_threads) {
    if (num_rows == 0) return;
    const int64_t work = num_rows * num_panels * WIDTH * size;
    if (work < WEIGHTS_FOR_THREADS) num_threads = 1;
    const int64_t row_bytes = sizeof(*x) * size;
    const int64_t at_once = ROWS_AT_ONCE<Product>;
    const int64_t block = max(BLOCK_BYTES<Product> / row_bytes / at_once, 1) * at_once;
    const int64_t num_blocks = (num_rows + block - 1) / block;
    // An item is a group of panels times one block of rows.
    const int64_t wanted = num_threads == 1 ? 1 : num_threads * ITEMS_PER_THREAD;
    const int64_t groups = min(num_panels, (wanted + num_blocks - 1) / num_blocks);
    for_each(num_blocks * groups, num_threads, [&](int64_t item) {
        const int64_t begin = item / groups * block, end = min(begin + block, num_rows);
        const int64_t group = item % groups;
        const int64_t last = num_panels * (group + 1) / groups;
        multiply<Product>(x, begin, end, packed, num_panels * group / groups, last, size, out);
    });
}

}  // namespace
}  // namespace stepscope

// Filled in by kernels/cpu/linear.py, field by field in this order.
struct Linear {
    const void* x;       // [num_rows, size]
    const void* packed;  // [num_panels, size, WIDTH / 2, 2]; is_bf16: [num_panels, size / 2, WIDTH, 2]
    const float* bias;   // [num_panels * WIDTH] in the order of the panels, or null
    void* out;           // [num_rows, num_columns]
    int64_t num_rows, num_columns, size, num_panels, is_gated, num_threads;
    int64_t is_bf16;  // whether x and out are bf16; otherwise fp32
};

template <class Product>
static void run(const Linear* a) {
    typedef typename Product::value value;
    const stepscope::Output<value> out = {(value*)a->out, a->bias, a->num_columns,
                                          a->is_gated != 0};
    stepscope::linear<Product>((const value*)a->x, (const char*)a->packed, out, a->num_rows,
                               a->size, a->num_panels, (int)a->num_threads);
}

// Number of outputs in a panel.
EXPORT int stepscope_linear_width(void) { return (int)stepscope::WIDTH; }

// Returns 0, or -1 if this library has no bf16 instructions and x is bf16.
EXPORT int stepscope_linear(const Linear* a) {
    if (!a->is_bf16) {
        run<stepscope::Widened>(a);
        return 0;
    }
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)
    if (a->size % (2 * stepscope::TILE_PAIRS) == 0) {
        run<stepscope::InTiles>(a);
        return 0;
    }
#endif
    run<stepscope::Pairs>(a);
    return 0;
#else
    return -1;
#endif
}
