// Products by weights that are packed for the instructions that multiply pairs of bf16:
// kernels/cpu/linear.py says what is computed. Only in the library for CPUs that have them.
//
// A panel holds the weights of WIDTH outputs, pair after pair of inputs, so that one pair of a row
// of x meets the pairs of all outputs of the panel in two vectors. A tile is ROWS rows by one
// panel; its sums stay in registers, and a panel stays in the cache for all rows of a block.
#include "parallel.h"
#include "vec.h"

namespace stepscope {
namespace {

#if defined(__AVX512BF16__)

constexpr int64_t WIDTH = 2 * VL;
constexpr int ROWS = 12;  // of a tile: 24 sums, 2 vectors of weights and one of x in 32 registers
// Bytes before their use that weights are asked for. With one row memory is all that is waited for;
// with more, asking so early for the first cache would push out what is needed before.
constexpr int64_t AHEAD = 16384;
constexpr int64_t SHORTLY_AHEAD = 2048;
constexpr int64_t BLOCK_BYTES = 1 << 18;  // of x, to stay in a core's second cache beside a panel
// What is multiplied by one row in the time that a second thread takes to begin, about.
constexpr int64_t WEIGHTS_FOR_THREADS = 1 << 16;
constexpr int ITEMS_PER_THREAD = 4;  // so that a thread that is held up gets less of them

typedef __m512bh pairs;

INLINE pairs load_pairs(const char* p) { return (pairs)_mm512_loadu_si512(p); }

INLINE pairs same_pair(const bf16* p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (pairs)_mm512_set1_epi32(bits);
}

INLINE vf add_products(vf sums, pairs a, pairs b) {
    return (vf)_mm512_dpbf16_ps((__m512)sums, a, b);
}

template <bool IS_FIRST_CACHE>
INLINE void prefetch(const char* weights) {
    if constexpr (IS_FIRST_CACHE) {
        __builtin_prefetch(weights + AHEAD);
    } else {
        __builtin_prefetch(weights + AHEAD, 0, 2);  // to the second cache
        __builtin_prefetch(weights + SHORTLY_AHEAD);
    }
}

struct Output {
    bf16* y;
    const float* bias;  // of all panels, or null
    int64_t num_columns;
    bool is_gated;
};

INLINE void finish(const Output& out, int64_t row, int64_t panel, vf first, vf second) {
    if (out.bias != nullptr) {
        first += load(out.bias + panel * WIDTH);
        second += load(out.bias + panel * WIDTH + VL);
    }
    bf16* to = out.y + row * out.num_columns;
    if (out.is_gated) {
        const int64_t at = panel * VL;
        store(to + at, first / (1.0f + exp(-first)) * second, out.num_columns - at);
        return;
    }
    const int64_t left = out.num_columns - panel * WIDTH;
    store(to + panel * WIDTH, first, left);
    if (left > VL) store(to + panel * WIDTH + VL, second, left - VL);
}

// `N` rows of x from `row` on, by one panel. Every sum is of pair after pair, the first one first,
// whatever N is: so a row's result does not depend on the rows beside it.
template <int N>
void tile(const bf16* x, int64_t row, const char* weights, int64_t panel, int64_t size,
          const Output& out) {
    vf first[N] = {}, second[N] = {};
    const bf16* from = x + row * size;
    for (int64_t pair = 0; pair < size / 2; pair++, weights += 128) {
        prefetch<N == 1>(weights);
        prefetch<N == 1>(weights + 64);
        const pairs w0 = load_pairs(weights), w1 = load_pairs(weights + 64);
#pragma GCC unroll 12
        for (int n = 0; n < N; n++) {
            const pairs v = same_pair(from + n * size + 2 * pair);
            first[n] = add_products(first[n], w0, v);
            second[n] = add_products(second[n], w1, v);
        }
    }
    for (int n = 0; n < N; n++) finish(out, row + n, panel, first[n], second[n]);
}

typedef void (*Tile)(const bf16*, int64_t, const char*, int64_t, int64_t, const Output&);
constexpr Tile TILES[ROWS + 1] = {nullptr, tile<1>, tile<2>, tile<3>,  tile<4>,  tile<5>, tile<6>,
                                  tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

void linear(const bf16* x, const char* packed, const Output& out, int64_t num_rows, int64_t size,
            int64_t num_panels, int num_threads) {
    const int64_t work = num_rows * num_panels * WIDTH * size;
    if (work < WEIGHTS_FOR_THREADS) num_threads = 1;
    const int64_t block = max(BLOCK_BYTES / (2 * size) / ROWS, 1) * ROWS;
    const int64_t num_blocks = (num_rows + block - 1) / block;
    // An item is some panels for one block of rows.
    const int64_t wanted = num_threads == 1 ? 1 : num_threads * ITEMS_PER_THREAD;
    const int64_t groups = min(num_panels, (wanted + num_blocks - 1) / num_blocks);
    for_each(num_blocks * groups, num_threads, [&](int64_t item) {
        const int64_t begin = item / groups * block, end = min(begin + block, num_rows);
        const int64_t group = item % groups;
        const int64_t last = num_panels * (group + 1) / groups;
        for (int64_t panel = num_panels * group / groups; panel < last; panel++) {
            const char* weights = packed + panel * WIDTH * size * 2;
            for (int64_t row = begin; row < end;) {
                // Two tiles of 8 instead of one of 12 and one of 4.
                const int64_t left = end - row;
                const int64_t n = left > ROWS && left < 2 * ROWS ? (left + 1) / 2 : min(left, ROWS);
                TILES[n](x, row, weights, panel, size, out);
                row += n;
            }
        }
    });
}

#endif

}  // namespace
}  // namespace stepscope

// Filled in by kernels/cpu/linear.py, field by field in this order.
struct Linear {
    const void* x;       // [num_rows, size]
    const void* packed;  // [num_panels, size / 2, 32, 2]
    const float* bias;   // [num_panels * 32] in the order of the panels, or null
    void* out;           // [num_rows, num_columns]
    int64_t num_rows, num_columns, size, num_panels, is_gated, num_threads;
};

// 0, or -1 when this library has no such instructions.
EXPORT int stepscope_linear(const Linear* a) {
#if defined(__AVX512BF16__)
    using stepscope::bf16;
    const stepscope::Output out = {(bf16*)a->out, a->bias, a->num_columns, a->is_gated != 0};
    stepscope::linear((const bf16*)a->x, (const char*)a->packed, out, a->num_rows, a->size,
                      a->num_panels, (int)a->num_threads);
    return 0;
#else
    (void)a;
    return -1;
#endif
}
