// The largest number of each row, all that greedy sampling asks of the logits: one pass over memory.
#include <algorithm>
#include <cstdint>

constexpr int64_t BLOCK = 256;  // of 128 to 512 as fast as any
constexpr int32_t INF = 0x7f800000, LARGEST = 0x7fffffff;

// An integer in the order of the float32 numbers with these bits: -0 and 0 are equal, NaN is above all. Comparing the
// floats would not do, for fast maths knows no NaN. Without a branch, so that the compiler makes vectors of it.
static inline int32_t ordered(int32_t bits) {
    const int32_t size = bits & LARGEST, minus = bits >> 31, nan = (INF - size) >> 31;  // minus and nan: no bit or all
    return (((size ^ minus) - minus) & ~nan) | (LARGEST & nan);
}

static int32_t largest(const int32_t* x, int64_t count) {
    int32_t key = -LARGEST;
    for (int64_t i = 0; i < count; i++) key = std::max(key, ordered(x[i]));
    return key;
}

// The first place of the largest of `count` numbers, searched in the block that holds it; *key tells how large it is.
static int64_t first_largest(const int32_t* x, int64_t count, int32_t* key) {
    *key = -LARGEST;
    int64_t place = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int32_t here = largest(x + start, std::min(BLOCK, count - start));
        if (here > *key) *key = here, place = start;
    }
    while (ordered(x[place]) != *key) place++;
    return place;
}

// places[row] = the first place of the row's largest number; x: the bits of float32 [rows, size], size >= 1. Returns
// the first row where that number is infinite or NaN, or `rows`.
extern "C" int64_t largest_float32(const int32_t* x, int64_t* places, int64_t rows, int64_t size) {
    int64_t bad = rows;
#pragma omp parallel for reduction(min : bad) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        int32_t key;
        places[row] = first_largest(x + row * size, size, &key);
        if (key >= INF || key <= -INF) bad = std::min(bad, row);
    }
    return bad;
}
