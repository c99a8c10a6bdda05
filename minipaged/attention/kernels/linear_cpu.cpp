// Products of rows with a weight, out = x . weight^T, with the norm before them and what comes after at hand.
// With few rows the time goes into reading the weight: it is laid out once in the order of reading (packing.py), each
// part is asked for before it is needed, and used for up to 12 rows while it is in the processor.
#include <algorithm>
#include <cmath>
#include <memory>

#include "tile.h"

constexpr int64_t BLOCK = 240;  // rows that stay in a core's own cache while it goes through its panels
enum After { ROUND, KEEP_FLOAT32, ADD, GATE };
template <typename T> struct Product {
    const T *x, *norm;       // [rows, depth]; weight of the RMSNorm that the rows go through first, or null
    const uint32_t* weight;  // [panels, words, WIDTH], see tile.h
    void* out;               // [rows, columns]; float32 after KEEP_FLOAT32; half as many columns after GATE
    int64_t rows, words, panels;
    float eps;               // of the norm
    int32_t after;           // ADD: to what is in out. GATE: a panel has 16 gates and their 16 ups, silu(gate) * up
};

template <typename T> static void finish(const Product<T>& p, const Lanes* sums, int64_t row, int64_t panel) {
    const int64_t at = (row * p.panels + panel) * (p.after == GATE ? LANES : WIDTH);
    T* const out = static_cast<T*>(p.out) + at;
    if (p.after == GATE) {
        float denominator[LANES];
        store(sums[0], denominator);
#pragma omp simd  // without it the compiler writes the loop out before it looks for vectors; exp(89) is infinite
        for (int i = 0; i < LANES; i++) denominator[i] = 1 + std::exp(std::min(-denominator[i], 88.0f));
        store(sums[0] / load(denominator) * sums[1], out);
    } else for (int i = 0; i < 2; i++) {
        if (p.after == KEEP_FLOAT32) store(sums[i], static_cast<float*>(p.out) + at + i * LANES);
        else store(p.after == ADD ? sums[i] + load(out + i * LANES) : sums[i], out + i * LANES);
    }
}

template <typename T> static void product(const Product<T>& p) {
    const int64_t depth = p.words * 4 / sizeof(T);
    const std::unique_ptr<T[]> normed(p.norm ? new T[std::min(BLOCK, p.rows) * depth] : nullptr);
#pragma omp parallel
    for (int64_t first = 0; first < p.rows; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, p.rows - first), tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
        const T* x = p.x + first * depth;
        if (p.norm) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                rms_norm_row(x + row * depth, p.norm, normed.get() + row * depth, depth, p.eps);
            x = normed.get();
        }
#pragma omp for schedule(static)  // a thread keeps its panels
        for (int64_t panel = 0; panel < p.panels; panel++)
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;
                Lanes sums[MOST_ROWS][2];
                multiply<T>(end - begin, x + begin * depth, p.words, p.weight + panel * p.words * WIDTH, p.words, sums);
                for (int64_t row = begin; row < end; row++) finish(p, sums[row - begin], first + row, panel);
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
