// Products of rows with a weight, out = x . weight^T, and what comes after them while the sums are still at hand.
// With few rows the time goes into reading the weight: it is laid out once in the order of reading (packing.py), each
// part is asked for before it is needed, and used for up to 12 rows while it is in the processor.
#include <algorithm>
#include <cmath>

#include "tile.h"

constexpr int64_t BLOCK = 240;  // rows that stay in a core's own cache while it goes through its panels
enum After { ROUND, KEEP_FLOAT32, ADD, GATE };
template <typename T> struct Product {
    const T* x;              // [rows, depth]
    const uint32_t* weight;  // [panels, words, WIDTH], see tile.h
    void* out;               // [rows, columns]; float32 after KEEP_FLOAT32; half as many columns after GATE
    int64_t rows, words, panels;
    int32_t after;           // ADD: to what is in out. GATE: a panel has 16 gates and their 16 ups, silu(gate) * up
};

template <typename T> static void finish(const Product<T>& p, const Lanes* sums, int64_t row, int64_t panel) {
    const int64_t at = (row * p.panels + panel) * (p.after == GATE ? LANES : WIDTH);
    T* const out = static_cast<T*>(p.out) + at;
    if (p.after == GATE) {
        float denominator[LANES];
        store(sums[0], denominator);
#pragma omp simd  // without it the compiler writes the loop out before it looks for vectors
        for (int i = 0; i < LANES; i++) denominator[i] = 1 + std::exp(std::min(-denominator[i], 88.0f));  // then infinite
        store(sums[0] / load(denominator) * sums[1], out);
    } else for (int i = 0; i < 2; i++) {
        if (p.after == KEEP_FLOAT32) store(sums[i], static_cast<float*>(p.out) + at + i * LANES);
        else store(p.after == ADD ? sums[i] + load(out + i * LANES) : sums[i], out + i * LANES);
    }
}

template <typename T> static void product(const Product<T>& p) {
#pragma omp parallel
    for (int64_t first = 0; first < p.rows; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, p.rows - first), tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp for schedule(static) nowait  // a thread keeps its panels, and no panel's rows depend on another's
        for (int64_t panel = 0; panel < p.panels; panel++)
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t begin = first + rows * i / tiles, end = first + rows * (i + 1) / tiles;
                Lanes sums[MOST_ROWS][2];
                multiply<T>(end - begin, p.x + begin * p.words * 4 / sizeof(T), p.words,
                            p.weight + panel * p.words * WIDTH, p.words, sums);
                for (int64_t row = begin; row < end; row++) finish(p, sums[row - begin], row, panel);
            }
    }
}
extern "C" void product_float32(const Product<float>* p) { product(*p); }
extern "C" void product_bfloat16(const Product<bfloat16>* p) { product(*p); }
// For these dtypes it has the instructions; for others the compiler's code is slower than torch's products.
#if defined __AVX512BF16__
extern "C" const char* const fast_products = "float32 bfloat16";
#elif defined __AVX512F__
extern "C" const char* const fast_products = "float32";
#else
extern "C" const char* const fast_products = "";
#endif
