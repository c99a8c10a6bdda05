// The heart of every matrix product here: up to 12 rows times 32 columns, whose sums stay in the registers.
#pragma once
#include "lanes.h"

constexpr int WIDTH = 2 * LANES, MOST_ROWS = 12;  // with AVX-512: 24 sums of 16 numbers in its 32 registers
constexpr int64_t AHEAD = 128;  // steps between asking for a part of the weight and using it

// out[r] = row r of x times a panel: WIDTH columns side by side, word after word of their depth. Rows of x
// begin `stride` words apart. A word holds one float32 or two bfloat16 of the depth.
template <typename T, int ROWS>
static void multiply(const uint32_t* x, int64_t stride, const uint32_t* panel, int64_t words,
                     Lanes (*out)[2]) {
    Lanes sums[ROWS][2] = {};
    for (int64_t word = 0; word < words; word++, panel += WIDTH) {
        // Read once a step: it need not push other data out of the caches.
        for (int half = 0; half < 2; half++)
            __builtin_prefetch(panel + AHEAD * WIDTH + half * LANES, 0, 0);
        const Bits left = load(panel), right = load(panel + LANES);
        for (int r = 0; r < ROWS; r++) {
            const Bits both = Bits{} + x[r * stride + word];
            sums[r][0] = multiply_add<T>(both, left, sums[r][0]);
            sums[r][1] = multiply_add<T>(both, right, sums[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

// The same for 1 to MOST_ROWS rows. A row is summed in the same order whatever rows come with it, so that the
// batch changes no bit of its result.
template <typename T>
static void multiply(int64_t rows, const T* x, int64_t stride, const uint32_t* panel, int64_t words,
                     Lanes (*out)[2]) {
    static constexpr decltype(&multiply<T, 1>) by_rows[] = {
        multiply<T, 1>, multiply<T, 2>, multiply<T, 3>, multiply<T, 4>, multiply<T, 5>, multiply<T, 6>,
        multiply<T, 7>, multiply<T, 8>, multiply<T, 9>, multiply<T, 10>, multiply<T, 11>, multiply<T, 12>};
    by_rows[rows - 1](reinterpret_cast<const uint32_t*>(x), stride, panel, words, out);
}
