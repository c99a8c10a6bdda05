// Sixteen numbers at once: float32 lanes that load from and store to float32 or bfloat16. The vector types
// are those of gcc and clang, which map them to whatever instructions the processor has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
struct bfloat16 { uint16_t bits; };  // the upper half of a float32

static inline Lanes load(const float* from) { Lanes x; std::memcpy(&x, from, sizeof x); return x; }
static inline Lanes load(const bfloat16* from) {
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return (Lanes)(__builtin_convertvector(half, Bits) << 16);
}
static inline Bits load(const uint32_t* from) { Bits x; std::memcpy(&x, from, sizeof x); return x; }
static inline void store(Bits x, uint32_t* to) { std::memcpy(to, &x, sizeof x); }
static inline void store(Lanes x, float* to) { std::memcpy(to, &x, sizeof x); }
static inline void store(Lanes x, bfloat16* to) {  // to nearest, ties to even
    const Bits bits = (Bits)x;
    const Halves half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    std::memcpy(to, &half, sizeof half);
}
static inline float sum(Lanes x) { float s = 0; for (int i = 0; i < LANES; i++) s += x[i]; return s; }

// What the dtype T keeps of x.
template <typename T> static inline Lanes rounded(Lanes x) {
    T kept[LANES];
    store(x, kept);
    return load(kept);
}

// out = x / sqrt(mean(x^2) + eps) * weight for one row, rounded before the weight as torch does.
template <typename T>
static inline void rms_norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    Lanes squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1 / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(rounded<T>(load(x + i) * scale) * load(weight + i), out + i);
}

// Ask for memory that will be read soon, where the processor cannot guess it.
static inline void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// sum + x * y for words of type T, lane by lane; a word is one float32, or two bfloat16, whose products are
// both added.
template <typename T> static inline Lanes multiply_add(Bits x, Bits y, Lanes sum);
template <> inline Lanes multiply_add<float>(Bits x, Bits y, Lanes sum) { return sum + (Lanes)x * (Lanes)y; }
template <> inline Lanes multiply_add<bfloat16>(Bits x, Bits y, Lanes sum) {
#ifdef __AVX512BF16__
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    const Bits upper = Bits{} + 0xffff0000;
    return sum + (Lanes)(x << 16) * (Lanes)(y << 16) + (Lanes)(x & upper) * (Lanes)(y & upper);
#endif
}

// Words of two rows one below the other: a float32 fills a word alone, of bfloat16 the first row is the lower
// half.
static inline Bits words_of(const float* row, const float*) { return (Bits)load(row); }
static inline Bits words_of(const bfloat16* lower, const bfloat16* upper) {
    return (Bits)load(lower) >> 16 | (Bits)load(upper);
}
