// Vectors of fp32, as wide as the target allows, and the operations that the kernels need. Uses the
// vector extensions of GCC and Clang; intrinsics are only used where there is no extension, or where
// an instruction takes the place of many.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))

namespace stepscope {

constexpr int VL = VECTOR_BYTES / 4;  // floats in a vector

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));  // VL values of 16 bits
typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t vb __attribute__((vector_size(VL)));

// The same types in memory, aligned only like their elements.
typedef float vf_mem __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef int8_t vb_mem __attribute__((vector_size(VL), aligned(1), may_alias));

struct bf16 {
    uint16_t bits;
};
// Sign, 4 bits of exponent, 3 of mantissa (e4m3fn); all of the last seven set are NaN.
struct fp8 {
    int8_t bits;
};

constexpr float INFINITE = __builtin_inff();

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat(uint32_t x) { return x - vu{}; }

// ---- memory ----

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// FP8 bits at the place of fp32's bits give a number that is too small by the difference of the
// exponent biases; FP8_BIAS corrects that.
constexpr float FP8_BIAS = 0x1p120f;
constexpr uint32_t FP8_BITS = 0x87f00000;
INLINE float to_float(fp8 x) {
    const uint32_t bits = ((uint32_t)(int32_t)x.bits << 20) & FP8_BITS;
    float small;
    memcpy(&small, &bits, sizeof small);
    return (x.bits & 0x7f) == 0x7f ? __builtin_nanf("") : small * FP8_BIAS;
}

INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

// Rounds to nearest even; NaN stays NaN. The instruction for it takes subnormals for 0.
INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu kept = x == x ? rounded : (u >> 16) | 0x40;
    return __builtin_convertvector(kept, vh);
#endif
}

INLINE vf load(const float* p) { return *(const vf_mem*)p; }
INLINE vf load(const bf16* p) { return widen(*(const vh_mem*)p); }
INLINE vf load(const fp8* p) {
#if defined(__F16C__)
    // Converts through fp16, because a CPU takes a hundred cycles for subnormal fp32.
    const vh both = (vh)__builtin_convertvector(*(const vb_mem*)p, vs) << 7;
    // Bit 14 is the sign once more. The sum changes that bit of NaN alone, which stays NaN so.
    const vh half = both ^ ((both + 0x80) & 0x4000);
#if VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps((__m256i)half) * 256;
#else
    return (vf)_mm256_cvtph_ps((__m128i)half) * 256;
#endif
#else
    const vu bits = ((vu)__builtin_convertvector(*(const vb_mem*)p, vi) << 20) & FP8_BITS;
    return (bits & 0x07f00000) == 0x07f00000 ? splat(__builtin_nanf("")) : (vf)bits * FP8_BIAS;
#endif
}
INLINE void store(float* p, vf x) { *(vf_mem*)p = x; }
INLINE void store(bf16* p, vf x) { *(vh_mem*)p = narrow(x); }
// Rounds to nearest even, and saturates at the largest value, 448.
INLINE void store(fp8* p, vf x) {
    const vu sign = ((vu)x >> 24) & 0x80, all = (vu)x & 0x7fffffff;
    const vf size = (vf)all > 448.0f ? splat(448.0f) : (vf)all;
    const vu normal = (((vu)size + 0x7ffff + (((vu)size >> 20) & 1)) >> 20) - (120 << 3);
    // Below 2^-6 the value is a multiple of 2^-9; the addition leaves the factor in the last bits.
    const vu subnormal = (vu)(size + 0x1p14f) - (vu)splat(0x1p14f);
    const vu finite = size < 0x1p-6f ? subnormal : normal;
    const vu bits = sign | (x == x ? finite : splat(0x7fu));
    *(vb_mem*)p = __builtin_convertvector((vi)bits, vb);
}

// Loads or stores only the first `n` elements; a load fills the rest with zeros. Nothing past them
// is accessed.
template <class T>
INLINE vf load(const T* p, int64_t n) {
    if (n >= VL) return load(p);
    T whole[VL] = {};
    memcpy(whole, p, n * sizeof(T));
    return load(whole);
}
template <class T>
INLINE void store(T* p, vf x, int64_t n) {
    if (n >= VL) return store(p, x);
    T whole[VL];
    store(whole, x);
    memcpy(p, whole, n * sizeof(T));
}

// `x` rounded as if it were stored as a T and loaded again.
template <class T>
INLINE vf rounded_to(vf x) {
    if constexpr (sizeof(T) == 2) return widen(narrow(x));
    return x;
}

// The numbers are those of kernels/cpu/library.py.
enum Dtype : int64_t { FLOAT = 0, BF16 = 1, FP8 = 2 };

// Calls f(T(), C()) with the types of queries and KV cache; callers refuse bf16 with an fp32 cache.
template <class F>
INLINE auto with_dtypes(int64_t dtype, int64_t kv_dtype, const F& f) {
    if (kv_dtype == FP8) return dtype == BF16 ? f(bf16(), fp8()) : f(float(), fp8());
    if (kv_dtype == BF16) return dtype == BF16 ? f(bf16(), bf16()) : f(float(), bf16());
    return f(float(), float());
}

// ---- across lanes ----

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (decltype((a) < (b))){__VA_ARGS__})
#endif

template <int... I>
using Lanes = std::integer_sequence<int, I...>;
using AllLanes = std::make_integer_sequence<int, VL>;

template <int... I>
INLINE vi iota(Lanes<I...>) { return vi{I...}; }
INLINE vi iota() { return iota(AllLanes()); }

// For every four lanes: unpack gives a0 b0 a1 b1 (or a2 b2 a3 b3); unpack_pairs gives a0 a1 b0 b1
// (or a2 a3 b2 b3).
template <int FROM, int... I>
INLINE vf unpack(vf a, vf b, Lanes<I...>) {
    return SHUFFLE(a, b, (I / 4 * 4 + I % 4 / 2 + FROM + I % 2 * VL)...);
}
template <int FROM, int... I>
INLINE vf unpack_pairs(vf a, vf b, Lanes<I...>) {
    return SHUFFLE(a, b, (I / 4 * 4 + I % 2 + FROM + I % 4 / 2 * VL)...);
}
// Every second group of four lanes of `a`, then of `b`.
template <int ODD, int... I>
INLINE vf groups(vf a, vf b, Lanes<I...>) {
    return SHUFFLE(a, b, ((I / 4 * 8 + I % 4 + ODD * 4) % (2 * VL))...);
}
// The lower (upper) half of `a`, then that of `b`.
template <int UPPER, int... I>
INLINE vf halves(vf a, vf b, Lanes<I...>) {
    return SHUFFLE(a, b, (I % (VL / 2) + UPPER * (VL / 2) + I / (VL / 2) * VL)...);
}
// For every four lanes, their sum in a, in b, in c and in d.
INLINE vf sum4(vf a, vf b, vf c, vf d) {
    AllLanes all;
    vf ab = unpack<0>(a, b, all) + unpack<2>(a, b, all);
    vf cd = unpack<0>(c, d, all) + unpack<2>(c, d, all);
    return unpack_pairs<0>(ab, cd, all) + unpack_pairs<2>(ab, cd, all);
}
INLINE vf add_groups(vf a, vf b) {
    return groups<0>(a, b, AllLanes()) + groups<1>(a, b, AllLanes());
}
// The sums of VL vectors, in order, from the results of `sum4`.
INLINE vf sum_all(const vf (&fours)[VL / 4]) {
    if constexpr (VL == 16) {
        return add_groups(add_groups(fours[0], fours[1]), add_groups(fours[2], fours[3]));
    } else if constexpr (VL == 8) {
        return add_groups(fours[0], fours[1]);
    } else {
        return fours[0];
    }
}

template <int BY, int... I>
INLINE vf swapped(vf x, Lanes<I...>) { return SHUFFLE(x, x, (I ^ BY)...); }
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

INLINE float largest(vf x) {
    AllLanes all;
    if constexpr (VL >= 16) x = larger(x, swapped<8 % VL>(x, all));
    if constexpr (VL >= 8) x = larger(x, swapped<4 % VL>(x, all));
    x = larger(x, swapped<2>(x, all));
    return larger(x, swapped<1>(x, all))[0];
}
INLINE float sum(vf x) {
    AllLanes all;
    if constexpr (VL >= 16) x = x + swapped<8 % VL>(x, all);
    if constexpr (VL >= 8) x = x + swapped<4 % VL>(x, all);
    x = x + swapped<2>(x, all);
    return (x + swapped<1>(x, all))[0];
}

// ---- functions ----

// e^x with a relative error below 2e-7; 0 below -87.3, at most 2.4e38, NaN for NaN.
#if VECTOR_BYTES == 64
// 2^(n + f) with |f| <= 1/2, by the polynomial of Cephes' exp2f.
INLINE vf exp(vf x) {
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.33f), _CMP_NLT_UQ);
    const __m512 c = _mm512_min_ps((__m512)splat(88.37f), (__m512)x);  // in this order, NaN stays
    const __m512 log2e = (__m512)splat(1.44269502f), rest = (__m512)splat(1.92596299e-8f);
    const __m512 n = _mm512_roundscale_ps(c * log2e, 0);
    const vf f = (vf)_mm512_fmadd_ps(c, rest, _mm512_fmsub_ps(c, log2e, n));
    vf p = f * 1.535336188e-4f + 1.339887440e-3f;
    p = p * f + 9.618437358e-3f;
    p = p * f + 5.550332471e-2f;
    p = p * f + 2.402264791e-1f;
    p = p * f + 6.931472029e-1f;
    p = p * f + 1.0f;
    return (vf)_mm512_maskz_scalef_ps(is_kept, (__m512)p, n);
}
#else
// The reduction to |r| <= ln(2)/2 and the polynomial are those of Cephes' expf.
INLINE vf exp(vf x) {
    const vf low = splat(-87.33f), high = splat(88.37f);
    vf c = low > x ? low : x;  // this order of operands keeps NaN
    c = high < c ? high : c;
    const vf to_integer = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf t = c * 1.44269504088896341f + to_integer;
    vf n = t - to_integer;
    vf r = c - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vf power = (vf)(((vu)t << 23) + 0x3f800000u);
    return x < low ? vf{} : p * power;
}
#endif

INLINE vf tanh(vf x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// ---- loops over pieces that fit into registers ----

template <int N>
using Count = std::integral_constant<int, N>;

// Calls f(Count<n>(), first) for pieces of `total`; all but the last have n = MOST.
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

// ---- products of packed values ----

// Packed values are 32 bits wide: one fp32, or a pair of bf16 whose products are added in fp32.
struct Single {
    static constexpr int PACK = 1;
    static INLINE vf multiply_add(vf sum, vu a, vu b) { return sum + (vf)a * (vf)b; }
};

#if defined(__AVX512BF16__)
struct Pair {
    static constexpr int PACK = 2;
    static INLINE vf multiply_add(vf sum, vu a, vu b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
INLINE vu narrow_pairs(vf low, vf high) {
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#endif

// How to compute products of queries of type T with a KV cache of type C.
template <class T, class C = T>
struct Packing {
    using type = Single;
};
#if defined(__AVX512BF16__)
template <>
struct Packing<bf16, bf16> {
    using type = Pair;
};
#endif

}  // namespace stepscope
